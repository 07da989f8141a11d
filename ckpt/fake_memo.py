"""What an op made of fake tensors before, made again without asking torch: most of a simulation's time goes into that.

Owns one memo a fake mode. Torch's cache answers an op on fake tensors of known shapes too, but takes long to look it
up; what it answered once is found here by a shorter key, and made in the same way. Whatever torch does not cache
(random or data-dependent results, custom ops) never gets here.

    memo = Memo(mode)
    if memo.knows(key := memo.key(func, args, kwargs)): result = memo.make(key, args)
    else: result = memo.watch(key, args, lambda: mode.dispatch(...))

Serves torch 2.11 to 2.13, whose counters it reads (`FakeTensorMode.cache_hits`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_PLAIN = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


class _Made(NamedTuple):
    """A tensor that an op made. of: number of the argument whose storage it shares, -1 if it has its own."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    of: int = -1


class Memo:
    """Results by key, for one fake mode."""

    def __init__(self, mode: FakeTensorMode):
        self._mode = mode
        self._known: dict[Hashable, Any] = {}  # _Made, a tuple of them, the number of the argument returned, or None

    def key(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Hashable | None:
        """Return what decides about the result; None for arguments that say more than shapes."""
        parts = [func]
        return tuple(parts) if _add(parts, args) and (not kwargs or _add(parts, tuple(kwargs.items()))) else None

    def knows(self, key: Hashable | None) -> bool:
        """Whether `make` can make this result."""
        return key is not None and self._known.get(key) is not None

    def make(self, key: Hashable, args: tuple) -> Any:
        """Make the result of an op again. Call it where no dispatch mode is active."""
        known = self._known[key]
        if type(known) is int:
            return args[known]
        if type(known) is _Made:
            return self._tensor(known, args)
        return tuple(self._tensor(made, args) for made in known)

    def watch(self, key: Hashable | None, args: tuple, run: Callable[[], Any]) -> Any:
        """Run an op, and remember the result if torch's cache answered."""
        if key is None or key in self._known:  # not to be remembered: looked at before
            return run()
        before = _counts()
        result = run()
        hits, others = (a - b for a, b in zip(_counts(), before, strict=True))
        if not others:
            self._known[key] = _describe(key[0], args, result) if hits == 1 else None
        elif hits:
            self._known[key] = None
        return result

    def _tensor(self, made: _Made, args: tuple) -> FakeTensor:
        if made.of < 0:
            empty = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        else:
            storage = args[made.of].untyped_storage()
            empty = torch.empty(0, dtype=made.dtype, device="meta").set_(storage, made.offset, made.shape, made.stride)
        return FakeTensor(self._mode, empty, made.device)


def is_hollow(tensor: torch.Tensor) -> bool:
    """Whether a tensor is larger than its storage, as the engine's placeholders are. Views of one are made neither here
    nor by torch's cache: that would fill the storage."""
    return tensor.untyped_storage().nbytes() == 0 and tensor.numel() > 0


def _counts() -> tuple[int, int]:
    """Answers of torch's cache so far, and calls that it did not answer."""
    return FakeTensorMode.cache_hits, FakeTensorMode.cache_misses + sum(FakeTensorMode.cache_bypasses.values())


def _add(parts: list[Any], values: tuple | list) -> bool:
    """Append the key of each value; False for one that has none."""
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if value.constant is not None or value.layout is not torch.strided or value.dtype.is_complex:
                return False
            offset, device = value.storage_offset(), value.fake_device
            parts += (value.shape, value.stride(), offset, value.dtype, device, value.requires_grad)
        elif kind in _PLAIN:
            parts += (kind, value)  # 1, 1.0 and True are equal
        elif kind is tuple or kind is list or kind is torch.Size:
            parts.append(len(value))
            if not _add(parts, value):
                return False
        else:
            return False
    return True


def _describe(func: Any, args: tuple, result: Any) -> Any:
    """Say how to make a result again; None if that is not sure."""
    if type(result) is tuple:
        made = tuple(_describe(func, args, one) for one in result)
        return made if all(type(one) is _Made and one.of < 0 for one in made) else None
    if type(result) is not FakeTensor or result.constant is not None or result.requires_grad or result.dtype.is_complex:
        return None
    storage = result.untyped_storage()._cdata
    shared = [i for i, a in enumerate(args) if isinstance(a, FakeTensor) and a.untyped_storage()._cdata == storage]
    same = [i for i in shared if args[i] is result]
    if same:
        return same[0]
    if bool(shared) != func.is_view or len(shared) > 1:
        return None
    if not shared and result.storage_offset():
        return None
    return _Made(result.shape, result.stride(), result.storage_offset(), result.dtype, result.fake_device, *shared)
