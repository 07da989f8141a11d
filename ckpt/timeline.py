"""A step's memory over time, by resident: the data behind `ledger.timeline` and `memory.png`.

Owns the names of phases and residents and the arrays that hold one step. Knows no torch: the tracker (`ckpt/live.py`)
hands it plain numbers, so that a timeline from a measured step and one from a predicted step are the same thing.

    timeline.total.max() == ledger.peak_bytes        # CPU and fake tensors
    for phase, first, last in timeline.spans(): ...
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

PHASES = ("forward", "backward", "optimizer")
FORWARD, BACKWARD, OPTIMIZER_STEP = range(3)

RESIDENTS = ("parameters", "gradients", "optimizer_state", "activations", "workspace")
# Where two claims meet, the lower number wins: a gradient that the optimizer made (fp32 copies) is a gradient.
PARAMETERS, GRADIENTS, OPTIMIZER_STATE, ACTIVATIONS, WORKSPACE = range(5)
HOST = 5  # offloaded: counted apart, never part of the device's peak


@dataclass(frozen=True)
class Timeline:
    """Live bytes after every change of one step (N points; point 0 is the state when the step began).

    event: (N,) int64, the index of the change; thinned timelines skip indices.
    phase: (N,) int8, index into PHASES.
    bytes: (N, 5) int64, live bytes of each resident in the order of RESIDENTS.
    """

    event: np.ndarray
    phase: np.ndarray
    bytes: np.ndarray

    def __len__(self) -> int:
        return len(self.event)

    @property
    def total(self) -> np.ndarray:
        """(N,) int64, live bytes of all residents."""
        return self.bytes.sum(axis=1)

    @property
    def peak_index(self) -> int:
        """The first point at which the total is greatest."""
        return int(self.total.argmax())

    def spans(self) -> list[tuple[str, int, int]]:
        """The phases in order, each with its first and last point (inclusive)."""
        starts = np.flatnonzero(np.diff(self.phase, prepend=-1))
        ends = np.append(starts[1:], len(self)) - 1
        return [(PHASES[self.phase[s]], int(s), int(e)) for s, e in zip(starts, ends, strict=True)]

    def thin(self, max_points: int) -> Timeline:
        """At most `max_points` points: of equal stretches the highest point each, besides the first and the last.

        The peak survives exactly, dips between two high points may not. Raises ValueError below 3 points.
        """
        if max_points < 3:
            raise ValueError(f"max_points={max_points} cannot hold the start, the peak and the end. Give at least 3.")
        n = len(self)
        if n <= max_points:
            return self
        edges = np.linspace(1, n - 1, max_points - 1).astype(np.int64)  # max_points - 2 stretches
        total = self.total
        tops = [int(a + total[a:b].argmax()) for a, b in pairwise(edges)]
        keep = np.unique([0, *tops, n - 1])
        return Timeline(self.event[keep], self.phase[keep], self.bytes[keep])


def resolve(
    deltas: np.ndarray, residents: np.ndarray, phases: np.ndarray, num_before: int
) -> tuple[Timeline, np.ndarray]:
    """Turn the log of changes into a timeline, once it is known what every storage was.

    deltas (M,) int64: bytes gained or lost; residents (M,): final resident of the storage concerned, HOST included;
    phases (M,); num_before: how many leading changes only list what was alive before the step (they become point 0).
    Returns the timeline and (N,) offloaded bytes at the same points.
    """
    columns = np.zeros((len(deltas) + 1, HOST + 1), dtype=np.int64)
    columns[np.arange(1, len(deltas) + 1), residents] = deltas
    live = np.cumsum(columns, axis=0)[num_before:]
    phase = np.append(np.int8(FORWARD), phases[num_before:]).astype(np.int8)
    if len(phase) > 1:
        phase[0] = phase[1]
    return Timeline(np.arange(len(live), dtype=np.int64), phase, live[:, :HOST]), live[:, HOST]
