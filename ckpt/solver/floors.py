"""What plans of a space need at least, told by the one run that replays every layer: no option is measured for it.

A budget below these floors is refused before a frontier is built, and what cannot be smaller than a plan that was run
is not run. Owns the bounds. Knows no budget and no cost.

    floor_of_layers(space) <= peak of every plan that treats layers one by one
    floor_of_segments(space, 4) <= peak of the plan with segments of 4 layers
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt.solver.away import input_bytes
from ckpt.solver.inner import keep_all

if TYPE_CHECKING:
    from ckpt.solver.space import Space


def floor_of_layers(space: Space) -> int:
    """Bytes that stand between forward and backward at least: of a layer that is replayed its input, of one that is not
    what autograd saves; less what the host or the disk could take of it."""
    peaks = space.peaks
    held = sum(min(int(h), keep_all(r).held_bytes) for h, r in zip(peaks.held, space.records, strict=True))
    away = 0 if space.room is None else space.room.budget_bytes
    return max(peaks.elsewhere, peaks.loss + max(0, held - away))


def floor_of_segments(space: Space, size: int) -> int:
    """Bytes that segments of `size` layers, replayed layer by layer, need at least.

    While layer i is differentiated there stand the inputs of its own and earlier segments, those re-created between its
    segment's first layer and itself, and what replaying it takes. Its own input, if re-created, may be gone by then.
    """
    peaks = space.peaks
    inputs = [min(int(h), input_bytes(r)) for h, r in zip(peaks.held, space.records, strict=True)]
    worst = max(peaks.elsewhere, peaks.loss + sum(inputs[::size]))
    for i in range(space.num_layers):
        first = i - i % size
        own = 0 if i == first else inputs[i]
        worst = max(worst, sum(inputs[:first:size]) + sum(inputs[first:i]) + int(peaks.backward[i]) - own)
    return worst
