"""What a layer reads and writes beside its arguments: parameters, buffers, tensors that its code closes over.

A replay must read there what the forward read, and must not write a second time. The first is checked by the version
counters of the layer's parameters and buffers, and by refusing layers in which an op that backward needs reads a value
that the layer then overwrites; the second is seen to by the actions, or by `WriteNothingOutside`.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ckpt.engine.actions import run_on_copies
from ckpt.engine.context import set_version
from ckpt.engine.ops import written_arguments
from ckpt.engine.record import EXTERNAL, Op, Record


def is_outside(record: Record, storage: int) -> bool:
    """True for a storage that is neither made by the layer nor an argument."""
    return record.producer[storage] == EXTERNAL


def writes_outside(record: Record, op: Op) -> bool:
    """True for an op that writes into a parameter, a buffer or a closure."""
    return any(is_outside(record, s) for s in op.writes)


def outside_reads(record: Record, ops: list[Op]) -> frozenset[int]:
    """Return the storages beside the layer's arguments whose values `ops` read."""
    return frozenset(
        s for op in ops if not op.is_view for s in op.reads if s not in op.writes and is_outside(record, s)
    )


def needed_ops(record: Record) -> list[Op]:
    """Return the ops that a saved tensor or the layer's output may depend on: all but those that serve nothing but a
    write outside, such as the arithmetic of a running mean."""
    readers, _ = record.once(Record.reads_and_writes)
    needed = {s.storage for s in record.saved}
    needed |= {s for op in record.ops for s in op.makes if not readers[s]}
    found = []
    for op in reversed(record.ops):
        only_outside = bool(op.writes) and not op.makes and all(is_outside(record, s) for s in op.writes)
        if only_outside or not (
            op.is_data_dependent
            or needed.intersection(op.makes)
            or needed.intersection(op.writes)
            or (op.is_view and needed.intersection(o.storage for o in op.outputs if o is not None))
            or (not op.writes and all(o is None for o in op.outputs))
        ):
            continue
        found.append(op)
        needed.update(op.reads)
    return found[::-1]


def overwritten_after_read(record: Record) -> int | None:
    """Return a storage that a needed op reads before the layer writes it: its value is gone when the replay comes."""
    last_write: dict[int, int] = {}
    for op in record.ops:
        for s in op.writes:
            if record.producer[s] == EXTERNAL:
                last_write[s] = op.index
    if last_write:
        for op in record.once(needed_ops):
            for s in outside_reads(record, [op]):
                if op.index < last_write.get(s, -1):
                    return s
    return None


class Unwritten:
    """Tensors that a replay did not write. Autograd counts a write before any mode is asked, so that the tensors would
    look modified to whoever saved them: `restore` puts their version counters back."""

    def __init__(self):
        self._versions: dict[int, tuple[torch.Tensor, int]] = {}

    def note(self, tensors: list[torch.Tensor]) -> None:
        for t in tensors:
            self._versions.setdefault(id(t), (t, t._version))

    def restore(self) -> None:
        for tensor, version in self._versions.values():
            set_version(tensor, version)
        self._versions.clear()


class WriteNothingOutside(TorchDispatchMode):
    """Run a layer plainly, but keep it from writing into anything that it did not make itself."""

    def __init__(self, unwritten: Unwritten):
        super().__init__()
        self._unwritten = unwritten
        self._made: dict[int, StorageWeakRef] = {}  # by address, which a weak reference keeps from being used again

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        written = written_arguments(func, args, kwargs)
        outside = [t for t in written if _address(t) not in self._made]
        self._unwritten.note(outside)
        if outside and len(outside) == len(written) and _returns_what_it_writes(func):
            num_returned = len(func._schema.returns)
            return None if num_returned == 0 else written[0] if num_returned == 1 else tuple(written)
        out = run_on_copies(func, args, kwargs, outside) if outside else func(*args, **kwargs)
        inputs = {_address(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and _address(tensor) not in inputs:
                self._made[_address(tensor)] = StorageWeakRef(tensor.untyped_storage())
        return out


def _returns_what_it_writes(func) -> bool:
    return all(r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
