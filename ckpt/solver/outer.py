"""The outer program: one option for every layer, least cost, the peak bounded at every position of forward and
backward.

Memory at any moment is what stands before the step, plus what earlier layers hold, plus what the layer at hand does. So
with P(i) the bytes held by layers 0 .. i-1:

    P(i) + forward_peak[i][o]  <= budget        while layer i runs
    P(L) + loss_peak           <= budget        between forward and backward
    P(i) + backward_peak[i][o] <= budget        while layer i is replayed and differentiated

where backward_peak contains the gradients of the layers behind. Cost adds up over layers, and what a prefix of layers
does to the rest is P alone; so dynamic programming over (P, cost), with dominated states dropped, is exact. It needs no
integer program: 32 layers of 12 options take tens of milliseconds where a solver takes seconds, and it never stops at
a gap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

# More states than this are thinned: of states that hold about the same, the cheapest stays.
MAX_STATES = 3_000


@dataclass(frozen=True)
class Choice:
    """One option of one layer as the outer program sees it. Bytes are counted from zero.

    held: added to P for the layers behind. forward, backward: peak while the layer runs and is differentiated, without
    P.
    """

    held: int
    forward: int
    backward: int
    cost: float


def solve(layers: Sequence[Sequence[Choice]], loss_peak: int, budget: int) -> list[int] | None:
    """Return, by layer, the index of its choice; None if nothing fits.

    Among plans of equal cost the one that holds least comes first, then the one whose layers in front hold least.
    """
    held, cost, worst = np.zeros(1, np.int64), np.zeros(1), np.zeros(1, np.int64)
    trail: list[tuple[np.ndarray, np.ndarray]] = []
    for choices in layers:
        h = np.array([c.held for c in choices], np.int64)
        need = np.array([max(c.forward, c.backward) for c in choices], np.int64)
        price = np.array([c.cost for c in choices])
        new_held = (held[:, None] + h).ravel()
        new_cost = (cost[:, None] + price).ravel()
        new_worst = np.maximum(worst[:, None], held[:, None] + need).ravel()
        fits = np.flatnonzero(new_worst <= budget)
        if not len(fits):
            return None
        order = fits[np.lexsort((new_worst[fits], new_cost[fits], new_held[fits]))]
        running = np.minimum.accumulate(new_cost[order])
        better = np.concatenate([[True], new_cost[order][1:] < running[:-1] - 1e-12 * np.abs(running[:-1])])
        order = order[better]
        if len(order) > MAX_STATES:
            order = _thin(order, new_held)
        trail.append((order // len(choices), order % len(choices)))
        held, cost, worst = new_held[order], new_cost[order], new_worst[order]
    fits = np.flatnonzero(held + loss_peak <= budget)
    if not len(fits):
        return None
    state = int(fits[np.lexsort((held[fits], cost[fits]))[0]])
    plan = []
    for parents, choices in reversed(trail):
        plan.append(int(choices[state]))
        state = int(parents[state])
    return plan[::-1]


def peak_of(layers: Sequence[Sequence[Choice]], loss_peak: int, plan: Sequence[int]) -> int:
    """Return the peak of a plan under the program's own model."""
    held = worst = 0
    for choices, index in zip(layers, plan, strict=True):
        choice = choices[index]
        worst = max(worst, held + choice.forward, held + choice.backward)
        held += choice.held
    return max(worst, held + loss_peak)


def cost_of(layers: Sequence[Sequence[Choice]], plan: Sequence[int]) -> float:
    """Return the cost of a plan."""
    return sum(choices[index].cost for choices, index in zip(layers, plan, strict=True))


def _thin(order: np.ndarray, held: np.ndarray) -> np.ndarray:
    """Keep about MAX_STATES states, the cheapest of each small range of bytes."""
    values = held[order]
    width = max(1, int(values[-1] - values[0]) // MAX_STATES)
    bucket = (values - values[0]) // width
    last_of_bucket = np.concatenate([bucket[1:] != bucket[:-1], [True]])
    return order[last_of_bucket]
