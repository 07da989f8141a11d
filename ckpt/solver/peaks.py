"""Read a simulated step by layer: what each layer adds to the others, and the most alive while it works.

Owns the arithmetic on traces. Knows no option and no plan.

    peaks = LayerPeaks.of(simulator.run("full"))
    peaks.held[3]       # bytes that layer 3 leaves behind for its backward
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ckpt.simulate import Simulated
from ckpt.trace import Trace


@dataclass(frozen=True)
class LayerPeaks:
    """Bytes alive in a run, by layer: held: added from its forward to the next; forward, backward: the most while it
    works, less what earlier layers hold; loss, elsewhere: the most between forward and backward (less all that layers
    hold), and outside all layers.

    The first step keeps what a layer saves until the layer is recorded, so its forward needs more than a later one's.
    """

    held: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    loss: int
    elsewhere: int

    @classmethod
    def of(cls, run: Simulated, held: np.ndarray | None = None) -> LayerPeaks:
        """Read the steady step and, where it needs more, the one that records.

        held: by layer, if it is known better than a look at the forward can tell (what is on its way out counts there).
        """
        total = run.steady.total
        forward, head, backward = spans(run.steady, run.num_layers)
        if held is None:
            held = np.diff(np.array([total[a] for a, _ in forward] + [total[head[0]]]))
        before = np.concatenate([[0], np.cumsum(held)])
        recorded = spans(run.first, run.num_layers, batch=0)
        return cls(
            held,
            np.maximum(_most(total, forward), _most(run.first.total, recorded[0])) - before[:-1],
            np.maximum(_most(total, backward), _most(run.first.total, recorded[2])) - before[:-1],
            loss=int(total[head[0] : head[1] + 1].max() - before[-1]),
            elsewhere=int(max(total[: forward[0][0] + 1].max(), total[backward[0][1] :].max())),
        )


def _most(total: np.ndarray, spans: list[tuple[int, int]]) -> np.ndarray:
    return np.array([total[a : b + 1].max() for a, b in spans])


def spans(
    trace: Trace, num_layers: int, batch: int = -1
) -> tuple[list[tuple[int, int]], tuple[int, int], list[tuple[int, int]]]:
    """Return where each layer's forward, the head, and each layer's backward lie in a trace's changes, in the last
    micro-batch or another. Layers in front that no gradient reaches, being frozen, have no backward: theirs is the end.

    Raises ValueError if the layers do not run one by one, once each."""
    begins = [i for i, mark in enumerate(trace.marks) if mark.kind == "batch"]
    begin, *later = begins[batch:]
    marks = trace.marks[begin + 1 : later[0] if later else None]
    end = trace.marks[later[0]].position if later else len(trace.total) - 1
    front, behind = ([m for m in marks if m.kind == kind] for kind in ("forward", "backward"))
    behind.reverse()
    frozen = num_layers - len(behind)
    forward, backward = ([m.position for m in found] for found in (front, behind))
    head = [m.position for m in marks if m.kind == "head"]
    in_order = forward == sorted(forward) and backward == sorted(backward, reverse=True)
    # Layers that were run for many have one number for all, in both directions.
    one_by_one = in_order and [m.index for m in behind] == [m.index for m in front][frozen:]
    if frozen < 0 or len(forward) != num_layers or len(head) != 1 or not one_by_one:
        raise ValueError("auto: this model's layers do not run one by one, once each; choose another strategy")
    ends = [*forward[1:], head[0]]
    backward = [end] * frozen + backward
    back = list(zip(backward, [end, *backward[:-1]], strict=True))
    return list(zip(forward, ends, strict=True)), (head[0], backward[-1]), back
