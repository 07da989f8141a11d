"""One simulated step as arrays: the change of memory at every event, the cost of every op, and where each layer begins.

Owns the arithmetic on steps: what it means to repeat identical layers, peaks, sums. Knows numbers only, no module and
no strategy.

    deep = trace.repeat([Repeat(first=2, period=1, copies=28)], ...)      # the third of four equal layers stands for 29
    deep.bytes.sum(axis=1).max()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from ckpt.costs import OpCost
from ckpt.timeline import OPTIMIZER_STEP, Timeline


class Mark(NamedTuple):
    """A place in a step.

    kind: "batch", "forward" (of a layer), "head" (the last layer is through), "backward" (of a layer).
    index: number of the micro-batch or layer. position: changes of memory before it. row: ops before it.
    """

    kind: str
    index: int
    position: int
    row: int


class Repeat(NamedTuple):
    """Layers first .. first+period-1, which do as those a period before or after them, stand `copies` times more."""

    first: int
    period: int
    copies: int


class _Span(NamedTuple):
    position: int
    end: int
    row: int
    end_row: int
    copies: int = 0


@dataclass(frozen=True)
class Trace:
    """One optimizer step on one rank.

    start: (5,) bytes alive when it began, by resident (`ckpt/timeline.py`). deltas: (N, 5) bytes gained or lost at each
    change; host: (N,) the same of offloaded bytes; phase: (N,). rows: the ops.
    """

    start: np.ndarray
    deltas: np.ndarray
    host: np.ndarray
    phase: np.ndarray
    rows: Sequence[OpCost]
    marks: Sequence[Mark]

    @cached_property
    def bytes(self) -> np.ndarray:
        """(N+1, 5) bytes alive before the first change and after each."""
        return np.cumsum(np.concatenate([self.start[None], self.deltas]), axis=0)

    @cached_property
    def total(self) -> np.ndarray:
        """(N+1,) bytes alive of all residents."""
        return self.bytes.sum(axis=1)

    @property
    def timeline(self) -> Timeline:
        """The step as a ledger tells it."""
        phase = np.concatenate([self.phase[:1] if len(self.phase) else np.zeros(1, np.int8), self.phase])
        return Timeline(np.arange(len(phase), dtype=np.int64), phase, self.bytes)

    @property
    def host_bytes(self) -> int:
        """Most bytes offloaded at once."""
        return int(np.cumsum(self.host).max(initial=0))

    @property
    def before_optimizer(self) -> np.ndarray:
        """(N+1,) whether a point lies in forward or backward."""
        return np.concatenate([[True], self.phase != OPTIMIZER_STEP])

    def flops(self, replayed_only: bool = False) -> int:
        """Return the FLOPs of all ops, or of those run again in backward."""
        return sum(row.flops * row.weight for row in self.rows if row.is_replay or not replayed_only)

    def repeat(
        self, repeats: Sequence[Repeat], missing: np.ndarray, end: np.ndarray, optimizer_share: float = 1.0
    ) -> Trace | None:
        """Return the step of the deeper model; None if its layers do not run one by one, or not alike.

        missing: (5,) bytes that the added layers hold from the start. end: (5,) bytes alive in the end, which only the
        caller knows (nobody here drops the gradients of added layers). optimizer_share: trained numbers of the deeper
        model over those of this one, by which the costs of the update grow.
        """
        spans = []
        for first in self._batches():
            for repeat in repeats:
                found = self._spans_of(repeat, first)
                if found is None:
                    return None
                spans += found
        deltas, host, phase, rows, marks = [], [], [], [], []
        shift = 0
        for piece in _pieces(sorted(spans), len(self.phase), len(self.rows)):
            for _ in range(piece.copies + 1):
                inside, ops = slice(piece.position, piece.end), slice(piece.row, piece.end_row)
                deltas.append(self.deltas[inside])
                host.append(self.host[inside])
                phase.append(self.phase[inside])
                moved = shift - piece.position
                rows += [row._replace(position=row.position + moved) for row in self.rows[ops]]
                # Copies keep the number of the layer they copy; in order of position, marks tell which layer it is.
                marks += [m._replace(position=m.position + moved) for m in self.marks if _within(m, piece)]
                shift += piece.end - piece.position
        start = self.start + missing
        deltas.append((end - start - sum(part.sum(axis=0) for part in deltas))[None])
        host.append(np.zeros(1, np.int64))
        phase.append(self.phase[-1:])
        deltas, host, phase = map(np.concatenate, (deltas, host, phase))
        rows = [_grown(row, optimizer_share) if phase[row.position - 1] == OPTIMIZER_STEP else row for row in rows]
        return Trace(start, deltas, host, phase, rows, marks)

    def _batches(self) -> list[int]:
        """Index into marks of each micro-batch's first."""
        return [i for i, mark in enumerate(self.marks) if mark.kind == "batch"]

    def _spans_of(self, repeat: Repeat, batch: int) -> list[_Span] | None:
        """Return forward and backward of the layers to repeat; None unless others, a period away, do the same."""
        forward, backward = {}, {}
        for mark in self.marks[batch + 1 :]:
            if mark.kind == "batch":
                break
            places = backward if mark.kind == "backward" else forward
            key = len(forward) if mark.kind == "head" else mark.index
            if key in places:
                return None
            places[key] = mark
        if list(forward) != sorted(forward) or list(backward) != sorted(backward, reverse=True):
            return None
        blocks = [_blocks(forward, 1), _blocks(backward, -1)]
        first, last = repeat.first, repeat.first + repeat.period - 1
        ends = (0, max(forward) - 1)  # the model's own first and last layer prove nothing
        for block in blocks:
            for layer in range(first, last + 1):
                others = (layer - repeat.period, layer + repeat.period)
                proofs = [block[other] for other in others if other in block and other not in ends]
                if layer not in block or not any(self._alike(block[layer], proof) for proof in proofs):
                    return None
        spans = (
            _between(forward[first], forward[last + 1]),
            _between(backward[last], backward[first - 1]),
        )
        return [span._replace(copies=repeat.copies) for span in spans]

    def _alike(self, one: _Span, other: _Span) -> bool:
        a, b = slice(one.position, one.end), slice(other.position, other.end)
        if not all(np.array_equal(x[a], x[b]) for x in (self.deltas, self.host, self.phase)):
            return False
        a, b = self.rows[one.row : one.end_row], self.rows[other.row : other.end_row]
        return [row[1:] for row in a] == [row[1:] for row in b]


def _grown(row: OpCost, factor: float) -> OpCost:
    return row._replace(flops=round(row.flops * factor), num_bytes=round(row.num_bytes * factor))


def _between(one: Mark, other: Mark) -> _Span:
    return _Span(one.position, other.position, one.row, other.row)


def _blocks(marks: dict[int, Mark], step: int) -> dict[int, _Span]:
    """What each layer does, from its mark to that of the layer that comes after it in the order of the marks."""
    return {layer: _between(mark, marks[layer + step]) for layer, mark in marks.items() if layer + step in marks}


def _pieces(spans: list[_Span], num_changes: int, num_rows: int) -> list[_Span]:
    """Cut the whole step so that each span is a piece of its own."""
    pieces, position, row = [], 0, 0
    for span in spans:
        pieces += [_Span(position, span.position, row, span.row), span]
        position, row = span.end, span.end_row
    return [*pieces, _Span(position, num_changes, row, num_rows)]


def _within(mark: Mark, piece: _Span) -> bool:
    """Whether a mark belongs to a piece; one between two pieces belongs to the later one."""
    return (piece.position, piece.row) <= (mark.position, mark.row) < (piece.end, piece.end_row)
