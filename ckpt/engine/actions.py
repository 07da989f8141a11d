"""What a replay does in place of running an op: skip it, feed it, or run it without repeating its side effects.

Each action is called as `action(frame, args, kwargs)` below autograd and returns what the op would. An action that
meets other operands than the record had raises `Mismatch`: the layer took another way, and is replayed plainly.
"""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from ckpt.engine.ops import storage_of, written_arguments
from ckpt.engine.record import Op, TensorMeta


class Mismatch(BaseException):
    """The replay's ops are not those of the record. No Exception, so that no layer catches it."""


class Skip:
    """Return placeholders instead of running the op."""

    def __init__(self, op: Op):
        self._outputs = [None if o is None else placeholder(o) for o in op.outputs]
        self._single = op.single_output
        self._container = list if _returns_list(op) else tuple

    def __call__(self, frame, args, kwargs):
        if self._single:
            return alias(self._outputs[0])
        return self._container(None if t is None else alias(t) for t in self._outputs)


class SkipWrite:
    """Return the tensor that would have been written, as it is.

    fed: number of the written storage if what is fed holds its last value already. is_dead: nothing of it was made.
    Otherwise the write went outside the layer."""

    def __init__(self, op: Op, fed: int | None = None, is_dead: bool = False):
        self._func, self._fed, self._is_dead = op.func, fed, is_dead
        self._returns = any(o is not None for o in op.outputs)

    def __call__(self, frame, args, kwargs):
        target = written_arguments(self._func, args, kwargs)[0]
        if self._fed is not None and not frame.is_held(self._fed, target):
            raise Mismatch
        if self._is_dead and not is_placeholder(target):
            raise Mismatch
        if self._fed is None and not self._is_dead:
            frame.unwritten.note([target])
        return target if self._returns else None


class Feed:
    """Return the kept tensors as the op's outputs."""

    def __init__(self, op: Op, storages: set[int]):
        self._metas = op.outputs
        self._single = op.single_output
        self._container = list if _returns_list(op) else tuple
        self._placeholders = [None if o is None or o.storage in storages else placeholder(o) for o in op.outputs]

    def __call__(self, frame, args, kwargs):
        outputs = [
            alias(p) if p is not None else None if m is None else frame.held_as(m)
            for m, p in zip(self._metas, self._placeholders, strict=True)
        ]
        return outputs[0] if self._single else self._container(outputs)


class RunOnCopies:
    """Run an op whose outputs are needed, but let it write into copies: it wrote buffers of the layer in forward."""

    def __init__(self, op: Op):
        self._func = op.func

    def __call__(self, frame, args, kwargs):
        written = written_arguments(self._func, args, kwargs)
        frame.unwritten.note(written)
        return run_on_copies(self._func, args, kwargs, written)


def run_on_copies(func, args, kwargs, written: list[torch.Tensor]):
    """Run `func` with copies in place of the tensors in `written`."""
    copies = {id(t): t.clone() for t in written}
    args, kwargs = tree_map_only(torch.Tensor, lambda t: copies.get(id(t), t), (args, kwargs))
    return func(*args, **kwargs)


def placeholder(meta: TensorMeta) -> torch.Tensor:
    """Make a tensor of true shape, strides and dtype over an empty storage. True strides matter: SDPA chooses its
    kernel by them. It is made once and handed out as aliases. Nothing is allocated: `_reshape_alias` does not look at
    sizes; a fake one, whose fake kernel does, is made where no ledger sees it."""
    fake_mode = torch._guards.detect_fake_mode()
    if fake_mode is None:
        empty = torch.empty(0, dtype=meta.dtype, device=meta.device)
        return torch.ops.aten._reshape_alias(empty, meta.shape, meta.stride)
    with _disable_current_modes(), fake_mode:
        tensor = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
        tensor.untyped_storage().resize_(0)
    return tensor


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a new tensor over a placeholder's storage. The dispatch cache of fake tensors would resize the storage to
    what the shape says (torch 2.13), so it is bypassed."""
    if not isinstance(tensor, FakeTensor):
        return tensor.detach()
    mode, cached = tensor.fake_mode, tensor.fake_mode.cache_enabled
    mode.cache_enabled = False
    try:
        return tensor.detach()
    finally:
        mode.cache_enabled = cached


def is_placeholder(tensor: torch.Tensor) -> bool:
    """True for a tensor without data, which nothing may read."""
    return storage_of(tensor).nbytes() == 0 and tensor.numel() > 0


def reads_placeholder(args, kwargs) -> bool:
    """True if a tensor among the arguments, or in a list among them, has no data."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            if is_placeholder(value):
                return True
        elif isinstance(value, (list, tuple)) and reads_placeholder(value, {}):
            return True
    return False


def _returns_list(op: Op) -> bool:
    returns = op.func._schema.returns
    return len(returns) == 1 and str(returns[0].type).startswith("List")


def same_storage(a: torch.Tensor, b: torch.Tensor) -> bool:
    """True if the two lie in one storage."""
    return storage_of(a)._cdata == storage_of(b)._cdata
