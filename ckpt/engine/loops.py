"""Loops whose every turn does the same (chunks of the loss, tiles of a layer): in a simulation three turns tell all.

    for start in turns(range(0, num_rows, size), hidden):     # hidden: any tensor of the loop

On real tensors this is plain iteration. On fake ones inside a simulation (`ckpt/costs.py`) the first turn, the second
and the last are run; the second counts for those left out. Peaks are the same, since each turn frees what it made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

T = TypeVar("T")


def turns(items: Sequence[T], like: Tensor) -> Iterator[T]:
    """Yield `items`, in a simulation the first two and the last of them."""
    costs = _simulation() if len(items) > 3 and isinstance(like, FakeTensor) else None
    if costs is None:
        yield from items
        return
    yield items[0]
    with costs.counting(len(items) - 2):
        yield items[1]
    yield items[-1]


def _simulation():
    """Return the mode that counts costs, None outside of a simulation."""
    return next((m for m in _get_current_dispatch_mode_stack() if hasattr(m, "counting")), None)
