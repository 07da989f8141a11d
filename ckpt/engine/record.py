"""Record one layer call: every op, which storages it reads, makes and writes, and what autograd saves of them.

A record is what decisions are taken on and what the replay program is built from. It holds no tensor of the layer:
storages are known by number, tensors by shape, strides and dtype. Knows nothing of policies.

Only the first call of a layer for a given signature is recorded (a data-dependent layer: every call); later calls run
without a dispatch mode.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ckpt.collectives import Collective, collective_of
from ckpt.engine.bypass import PythonReads, unseen_writes
from ckpt.engine.keys import OpKey, canonical_op, canonical_path
from ckpt.engine.ops import (
    IGNORED,
    is_data_dependent,
    is_parameter_cast,
    is_random,
    storage_of,
    written_arguments,
)
from ckpt.flops import op_flops

T = TypeVar("T")

# Producers of storages that no op of the layer made.
EXTERNAL = -1  # parameters, buffers, closures
CAST = -2  # a parameter in another dtype: cheap to make again, never counted as an op
ARG = -3  # ARG - k: the k-th tensor argument of the layer


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What a tensor looks like, and whose storage it is."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    storage: int  # number of the storage within the record

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int) -> TensorMeta:
        return cls(tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, storage)


@dataclass(slots=True)
class Op:
    """One op call. `num_bytes` counts the storages it made; `flops` is what running it again would cost."""

    index: int
    key: OpKey
    func: Any
    reads: tuple[int, ...]
    outputs: tuple[TensorMeta | None, ...]
    makes: tuple[int, ...]
    writes: tuple[int, ...]
    single_output: bool
    is_random: bool
    is_data_dependent: bool
    flops: int
    num_bytes: int
    contraction: int = 0  # of a batched matmul: the length of the summed dimension
    collective: Collective | None = None  # what it exchanges with other ranks
    is_view: bool = field(init=False)  # asked very often

    def __post_init__(self) -> None:
        self.is_view = not self.makes and not self.writes and any(o is not None for o in self.outputs)


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor that autograd saved: after how many ops, of which storage."""

    at: int
    storage: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass
class Record:
    """What one call of a layer did."""

    ops: list[Op] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    producer: list[int] = field(default_factory=list)  # by storage: op index, EXTERNAL or ARG - k
    storage_bytes: list[int] = field(default_factory=list)
    module_outputs: dict[int, str] = field(default_factory=dict)  # storage -> module, called once, that returns it
    child_inputs: dict[int, str] = field(default_factory=dict)  # storage -> child of the layer, called once with it
    custom_functions: tuple[str, ...] = ()  # autograd.Functions written in Python: their kernels may bypass the record
    bypasses: list[str] = field(default_factory=list)  # other ways in which values passed by the record
    python_reads: list[tuple[int, int]] = field(default_factory=list)  # (after how many ops, storage) by `tolist`
    state: tuple[int | None, ...] = ()  # storage of each parameter and buffer of the layer, None if it took no part
    _told: dict[Callable, tuple[int, Any]] = field(default_factory=dict, compare=False, repr=False)

    def once(self, ask: Callable[[Record], T]) -> T:
        """Return `ask(record)`, remembered until more ops come: planning builds thousands of programs of a record."""
        known = self._told.get(ask)
        if known is None or known[0] != len(self.ops):
            known = self._told[ask] = (len(self.ops), ask(self))
        return known[1]

    @property
    def is_data_dependent(self) -> bool:
        """The op sequence may differ at the next call: a value or a data-dependent shape reached Python."""
        return bool(self.python_reads) or any(op.is_data_dependent for op in self.ops)

    @property
    def is_opaque(self) -> bool:
        """Values may have flowed past the record, so nothing can be skipped for being read by nobody."""
        return bool(self.custom_functions or self.bypasses)

    def reads_and_writes(self) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
        """Return, by storage, the ops that read it (views and writes in place apart) and the ops that write it."""
        readers: dict[int, list[int]] = defaultdict(list)
        writers: dict[int, list[int]] = defaultdict(list)
        for op in self.ops:
            for s in op.writes:
                writers[s].append(op.index)
            for s in op.reads:
                if s not in op.writes and not op.is_view:
                    readers[s].append(op.index)
        return readers, writers

    @property
    def has_random(self) -> bool:
        return any(op.is_random for op in self.ops)


class Recorder(TorchDispatchMode):
    """Fill a `Record` while a layer runs. `on_output(op, tensors)` lets the caller hold outputs it decides to keep,
    `on_input(storage, tensor)` what a child of the layer is called with."""

    def __init__(self, layer: torch.nn.Module, inputs: list[torch.Tensor], on_output=None, on_input=None):
        super().__init__()
        self.record = Record()
        self.on_output, self.on_input = on_output, on_input
        self._layer = layer
        self._storages: dict[int, int] = {}  # cdata -> storage number
        self._alive: list[StorageWeakRef] = []  # weak references pin the addresses, so none is reused while we record
        self._names = {id(m): name for name, m in layer.named_modules() if m is not layer}
        self._calls: Counter = Counter()
        self._stack: list[tuple[str, Counter]] = [("", Counter())]
        self._hooks: list = []
        self._python_reads = PythonReads(self.read_by_python)
        for k, tensor in enumerate(inputs):
            self._number(tensor, ARG - k)

    def __enter__(self):
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self._python_reads.__enter__()
        return super().__enter__()

    def __exit__(self, *exc):
        for hook in self._hooks:
            hook.remove()
        self._python_reads.__exit__(*exc)
        return super().__exit__(*exc)

    def _enter_module(self, module, args):
        name = self._names.get(id(module))
        if name is not None:
            self._calls[name] += 1
            self._stack.append((canonical_path(name), Counter()))
            if "." not in name and args and isinstance(args[0], torch.Tensor):
                self._note_input(name, args[0])

    def _note_input(self, name: str, tensor: torch.Tensor) -> None:
        number = self._storages.get(storage_of(tensor)._cdata)
        if number is not None and self.record.producer[number] >= 0:
            self.record.child_inputs.setdefault(number, name)
            if self.on_input is not None:
                self.on_input(number, tensor)

    def _leave_module(self, module, args, output):
        name = self._names.get(id(module))
        if name is None:
            return
        if len(self._stack) > 1:
            self._stack.pop()
        if isinstance(output, torch.Tensor):
            number = self._storages.get(storage_of(output)._cdata)
            if number is not None and self.record.producer[number] >= 0:
                self.record.module_outputs[number] = name

    def finish(self, state: Iterable[torch.Tensor] = ()) -> Record:
        """Return the record. A module called more than once names no output: a hook could not tell its calls apart.

        state: the layer's parameters and buffers, to be found again among the storages that the ops read."""
        record = self.record
        for named in (record.module_outputs, record.child_inputs):
            for storage in [s for s, name in named.items() if self._calls[name] != 1]:
                del named[storage]
        record.state = tuple(self._storages.get(storage_of(t)._cdata) for t in state)
        record.bypasses += unseen_writes(record)
        return record

    def read_by_python(self, tensor: torch.Tensor, method: str) -> None:
        """Note that Python reads the tensor's values, or takes a pointer to them, without an op."""
        number = self._storages.get(storage_of(tensor)._cdata)
        if number is None or self.record.producer[number] == EXTERNAL:
            return  # not made here: a replay reads the same
        if method == "tolist":  # read in Python, which may go another way next time
            self.record.python_reads.append((len(self.record.ops), number))
        else:
            self.record.bypasses.append(f"Tensor.{method}")

    def _number(self, tensor: torch.Tensor, producer: int) -> int:
        storage = storage_of(tensor)
        cdata = storage._cdata
        number = self._storages.get(cdata)
        if number is None:
            number = self._storages[cdata] = len(self.record.producer)
            self._alive.append(StorageWeakRef(storage))
            self.record.producer.append(producer)
            self.record.storage_bytes.append(storage.nbytes())
        return number

    def saved(self, tensor: torch.Tensor) -> int:
        """Note that autograd saves `tensor`; return the producer of its storage."""
        number = self._number(tensor, EXTERNAL)
        self.record.saved.append(Saved(len(self.record.ops), number, tensor.shape, tensor.dtype))
        return self.record.producer[number]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in IGNORED:
            return out
        if is_parameter_cast(func, args):
            self._number(out, CAST)
            return out
        op = self._op(func, args, kwargs, out)
        self.record.ops.append(op)
        if self.on_output is not None and op.makes:
            self.on_output(op, out)
        return out

    def _op(self, func, args, kwargs, out) -> Op:
        record = self.record
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        reads = tuple(dict.fromkeys(self._number(t, EXTERNAL) for t in inputs))
        writes = tuple(dict.fromkeys(self._number(t, EXTERNAL) for t in written_arguments(func, args, kwargs)))
        index, first_new = len(record.ops), len(record.producer)
        leaves = list(out) if isinstance(out, (tuple, list)) else [out]
        outputs = tuple(
            TensorMeta.of(t, self._number(t, index)) if isinstance(t, torch.Tensor) else None for t in leaves
        )
        makes = tuple(range(first_new, len(record.producer)))
        path, counter = self._stack[-1]
        name = canonical_op(func)
        key = OpKey(path, name, counter[name])
        counter[name] += 1
        return Op(
            index=index,
            key=key,
            func=func,
            reads=reads,
            outputs=outputs,
            makes=makes,
            writes=writes,
            single_output=isinstance(out, torch.Tensor),
            is_random=is_random(func, args, kwargs),
            is_data_dependent=is_data_dependent(func, args),
            flops=op_flops(func, args, kwargs, out),
            num_bytes=sum(record.storage_bytes[s] for s in makes),
            contraction=args[-1].shape[-2] if name in ("bmm", "baddbmm") else 0,
            collective=collective_of(func, args, kwargs),
        )
