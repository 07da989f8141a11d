"""Record one layer call: every op, which storages it reads, makes and writes, and what autograd saves of them.

A record is what decisions are taken on and what the replay program is built from. It holds no tensor of the layer:
storages are known by number, tensors by shape, strides and dtype. Knows nothing of policies.

Only the first call of a layer for a given signature is recorded (a data-dependent layer: every call); later calls run
without a dispatch mode.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ckpt.engine.keys import OpKey, canonical_op, canonical_path
from ckpt.flops import op_flops

aten = torch.ops.aten

# Producers of storages that no op of the layer made.
EXTERNAL = -1  # parameters, buffers, closures
CAST = -2  # a parameter in another dtype: cheap to make again, never counted as an op
ARG = -3  # ARG - k: the k-th tensor argument of the layer

# Metadata queries and aliases without a value of their own: neither counted nor decided on. Autograd and the pack hooks
# issue `detach` at their own discretion, so counting it would make the numbering depend on the hooks.
IGNORED = {
    aten.detach.default,
    aten.alias.default,
    torch.ops.prim.device.default,
    aten.sym_size.default,
    aten.sym_stride.default,
    aten.sym_numel.default,
    aten.sym_storage_offset.default,
    aten.is_contiguous.default,
    aten.is_contiguous.memory_format,
    aten.is_strides_like_format.default,
    aten.is_non_overlapping_and_dense.default,
}


def is_parameter_cast(func: Any, args: tuple) -> bool:
    """True for the dtype cast of a parameter. Autocast caches these, so whether the op runs depends on the caller; they
    are left out of the numbering, never kept and always executed on replay."""
    return func is aten._to_copy.default and isinstance(args[0], torch.nn.Parameter)


@dataclass(frozen=True, slots=True)
class TensorMeta:
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

    @property
    def is_view(self) -> bool:
        return not self.makes and not self.writes and any(o is not None for o in self.outputs)


@dataclass(frozen=True, slots=True)
class Saved:
    """One tensor that autograd saved: after how many ops, of which storage."""

    at: int
    storage: int
    shape: torch.Size
    dtype: torch.dtype


@dataclass
class Record:
    ops: list[Op] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    producer: list[int] = field(default_factory=list)  # by storage: op index, EXTERNAL or ARG - k
    storage_bytes: list[int] = field(default_factory=list)
    module_outputs: dict[int, str] = field(default_factory=dict)  # storage -> name of a module, called once, returning it
    custom_functions: tuple[str, ...] = ()  # autograd.Functions written in Python: their kernels may bypass the record

    @property
    def is_data_dependent(self) -> bool:
        """The op sequence may differ at the next call: a value or a data-dependent shape reached Python."""
        return any(op.is_data_dependent for op in self.ops)

    @property
    def has_random(self) -> bool:
        return any(op.is_random for op in self.ops)


class Recorder(TorchDispatchMode):
    """Fill a `Record` while a layer runs. `on_output(op, tensors)` lets the caller hold outputs it decides to keep."""

    def __init__(self, layer: torch.nn.Module, inputs: list[torch.Tensor], on_output=None):
        super().__init__()
        self.record = Record()
        self.on_output = on_output
        self._layer = layer
        self._storages: dict[int, int] = {}  # cdata -> storage number
        self._alive: list[StorageWeakRef] = []  # weak references pin the addresses, so none is reused while we record
        self._names = {id(m): name for name, m in layer.named_modules() if m is not layer}
        self._calls: Counter = Counter()
        self._stack: list[tuple[str, Counter]] = [("", Counter())]
        self._hooks: list = []
        for k, tensor in enumerate(inputs):
            self._number(tensor, ARG - k)

    def __enter__(self):
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
        ]
        return super().__enter__()

    def __exit__(self, *exc):
        for hook in self._hooks:
            hook.remove()
        return super().__exit__(*exc)

    def _enter_module(self, module, args):
        name = self._names.get(id(module))
        if name is not None:
            self._calls[name] += 1
            self._stack.append((canonical_path(name), Counter()))

    def _leave_module(self, module, args, output):
        name = self._names.get(id(module))
        if name is None:
            return
        if len(self._stack) > 1:
            self._stack.pop()
        if isinstance(output, torch.Tensor):
            number = self._storages.get(output.untyped_storage()._cdata)
            if number is not None and self.record.producer[number] >= 0:
                self.record.module_outputs[number] = name

    def finish(self) -> Record:
        """Return the record. A module called more than once names no output: a hook could not tell its calls apart."""
        outputs = self.record.module_outputs
        self.record.module_outputs = {s: name for s, name in outputs.items() if self._calls[name] == 1}
        return self.record

    def _number(self, tensor: torch.Tensor, producer: int) -> int:
        storage = tensor.untyped_storage()
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
        )


def written_arguments(func, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """Return the tensors that `func` writes in place or through `out=`."""
    schema = getattr(func, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    written = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written += [t for t in tree_leaves(value) if isinstance(t, torch.Tensor)]
    return written


def is_random(func, args: tuple, kwargs: dict) -> bool:
    """True if the call draws from a generator. A fused attention with dropout_p=0 carries the tag but draws nothing."""
    if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
        return False
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            value = args[position] if position < len(args) else kwargs.get("dropout_p", argument.default_value)
            return value != 0.0
    return True


def is_data_dependent(func, args: tuple) -> bool:
    """True if a tensor's values decide a shape or reach Python. Indexing is so only by a boolean mask."""
    tags = getattr(func, "tags", ())
    if func is aten.index.Tensor:
        return any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1])
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
