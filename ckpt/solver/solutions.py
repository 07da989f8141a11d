"""The plans of a space that are worth offering: the outer program's at a row of budgets, and those set by hand.

Owns the budgets and the prices of moved bytes at which the program is asked. A plan is, by layer, the number of its
option.

    for plan in solutions(space): space.estimate(plan)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

from ckpt.solver.away import input_bytes
from ckpt.solver.inner import Option
from ckpt.solver.outer import Choice, solve
from ckpt.solver.space import Space

# Budgets at which the outer program is solved: without and with offload, there for each price of a byte moved.
NUM_BUDGETS = 160
NUM_BUDGETS_DEEP, DEEP = 64, 16  # from so many layers on
NUM_BUDGETS_AWAY = 24
AWAY_PRICES = (0.0, 0.03, 0.06, 0.1, 0.3)


def solutions(space: Space) -> Iterator[list[int]]:
    """Solve the outer program at a row of budgets, and yield uniform plans beside."""
    bounds = (_smallest_budget(space, None), _largest_peak(space))
    space.say("solving for the layers")
    number = NUM_BUDGETS if space.num_layers < DEEP else NUM_BUDGETS_DEEP
    for budget in np.linspace(*bounds, number).astype(np.int64):
        yield from _solved(space, int(budget), None)
    if space.room is not None:
        dearest = sum(c[0].cost for c in space.choices) / max(1, sum(map(input_bytes, space.records)))
        # Peaks of plans that move a part of what a layer keeps are estimated less well: others are offered too.
        ways = (False, True) if any(o.is_moved_in_part for options in space.kept for o in options) else (False,)
        for share, in_part in itertools.product(AWAY_PRICES, ways):
            low, high = _smallest_budget(space, share * dearest, in_part), _largest_peak(space)
            for part in np.linspace(0, 1, NUM_BUDGETS_AWAY) ** 2:  # tight budgets are what offload is for
                yield from _solved(space, int(low + part * (high - low)), share * dearest, in_part)
    yield from _by_hand(space)


def _largest_peak(space: Space) -> int:
    """The most that a plan can need: every layer replayed, or every one left to autograd."""
    plain = [[k for k, o in enumerate(options) if not o.away_bytes] for options in space.options]
    return max(space.estimate([k[0] for k in plain]), space.estimate([k[-1] for k in plain]))


def _smallest_budget(space: Space, away_price: float | None, in_part: bool = True) -> int:
    """Return the least budget for which the outer program finds a plan, to the byte: people give the budget back that a
    message named."""
    choices, _ = _offered(space, away_price, in_part)
    low, high = space.peaks.elsewhere, _largest_peak(space)
    while high - low > 1:
        middle = (low + high) // 2
        if solve(choices, space.peaks.loss, middle) is None:
            low = middle
        else:
            high = middle
    return high


def _solved(space: Space, budget: int, away_price: float | None, in_part: bool = True) -> Iterator[list[int]]:
    choices, numbers = _offered(space, away_price, in_part)
    found = solve(choices, space.peaks.loss, budget)
    if found is not None:
        plan = [numbers[i][k] for i, k in enumerate(found)]
        yield _gathered(space, plan, budget)


def _offered(space: Space, away_price: float | None, in_part: bool) -> tuple[list[list[Choice]], list[list[int]]]:
    """Choices of the outer program. away_price: cost of a byte moved beside its stall; None: nothing is moved.
    in_part: a part of what a layer keeps may be moved."""
    choices, numbers = [], []
    for i, options in enumerate(space.options):
        is_last = i == space.num_layers - 1  # its backward comes at once
        may_move = away_price is not None and not is_last
        offered = [
            k for k, o in enumerate(options) if not o.away_bytes or (may_move and (in_part or not o.is_moved_in_part))
        ]
        numbers.append(offered)
        choices.append([_priced(space.choices[i][k], options[k], away_price or 0.0) for k in offered])
    return choices, numbers


def _priced(choice: Choice, option: Option, away_price: float) -> Choice:
    if not option.away_bytes or not away_price:
        return choice
    return Choice(choice.held, choice.forward, choice.backward, choice.cost + away_price * option.away_bytes)


def _gathered(space: Space, plan: list[int], budget: int) -> list[int]:
    """Put equal options side by side where that still fits, those that hold least in front, else those that need most:
    such a plan is easier to read, and its dry run runs equal layers once."""
    limit = max(budget, space.estimate(plan))
    for order in (lambda c: (c.held, -c.backward), lambda c: (-c.backward, c.held)):
        tidy = list(plan)
        for kind in range(len(space.kept)):
            layers = [i for i, k in enumerate(space.kinds) if k == kind]
            free = [i for i in layers if not (i == space.num_layers - 1 and space.room is not None)]
            known = space.choices[layers[0]]
            ordered = sorted((plan[i] for i in free), key=lambda k: (*order(known[k]), k))
            for i, k in zip(free, ordered, strict=True):
                tidy[i] = k
        if space.estimate(tidy) <= limit:
            return tidy
    return plan


def _by_hand(space: Space) -> Iterator[list[int]]:
    """Uniform plans, and those that leave every n-th layer to be replayed."""
    plain = [[k for k, o in enumerate(options) if not o.away_bytes] for options in space.options]
    last = [options[-1] for options in plain]
    yield [0] * space.num_layers
    yield last
    for n in (2, 3, 4):
        yield [0 if i % n == 0 else last[i] for i in range(space.num_layers)]
    for depth in range(1, max(map(len, plain))):
        yield [options[min(depth, len(options) - 1)] for options in plain]
