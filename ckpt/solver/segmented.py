"""Plans in which layers in front share one input in groups: dearer than replaying layer by layer, and smaller.

Owns which of them are offered and when they are run. Knows no option of a layer.

    segmented = Segmented(spaces, whole, price)    # whole(space): the plan that replays every layer
    segmented.below(budget_bytes, cost)
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property

from ckpt.plan import LayerPlan, Plan
from ckpt.simulate import Simulated
from ckpt.solver.candidate import Candidate
from ckpt.solver.floors import floor_of_segments
from ckpt.solver.price import Price
from ckpt.solver.space import Space

# Layers a segment; plans with so many layers in segments, from few to all.
SIZES = (2, 4, 8)
NUM_PLANS = 8


class Segmented:
    """Plans with segments, of several spaces."""

    def __init__(
        self,
        spaces: Sequence[Space],
        whole: Callable[[Space], Candidate],
        price: Price,
        say: Callable[[str], None] = lambda text: None,
    ):
        self._spaces, self._whole, self._price, self._say = spaces, whole, price, say
        self._groups: dict[tuple[Space, int], list[Candidate]] = {}

    @cached_property
    def floors(self) -> list[tuple[int, Space, int]]:
        """Bytes that are needed at least, space, and layers a segment, by rising bytes."""
        sizes = [(space, size) for space in self._spaces for size in SIZES if size < space.num_layers]
        return sorted(((floor_of_segments(*pair), *pair) for pair in sizes), key=lambda row: row[0])

    @property
    def known(self) -> Iterator[Candidate]:
        """The plans of groups that were asked for."""
        return itertools.chain(*self._groups.values())

    def below(self, budget_bytes: int, cost: float) -> list[Candidate]:
        """Return plans that are estimated to fit and cost less, by rising cost.

        Groups are run only where replaying every layer costs less, and where their floor is within the budget.
        """
        found: list[Candidate] = []
        for floor, space, size in self.floors:
            if floor <= budget_bytes and self._whole(space).cost < cost * (1 - 1e-9):
                group = self.groups(space, size)
                if group[-1].estimate <= budget_bytes:  # else all of them need more: nothing lies below that
                    found += [c for c in group if c.estimate <= budget_bytes and c.cost < cost]
        return sorted(found, key=lambda c: (c.cost, c.estimate))

    def groups(self, space: Space, size: int) -> list[Candidate]:
        """Return plans with segments of `size` in ever more layers.

        All layers in groups are run; fewer of them lie, in bytes and cost, between that and replaying layer by layer.
        """
        if (space, size) not in self._groups:
            self._say(f"trying segments of {size} layers{space.setting}")
            ran = space.run(_plan(space, size, space.num_layers))
            self._groups[space, size] = list(self._from_few_to_all(space, size, ran))
        return self._groups[space, size]

    def _from_few_to_all(self, space: Space, size: int, ran: Simulated) -> Iterator[Candidate]:
        whole = self._whole(space)
        more_peak = ran.peak_bytes - whole.peak_bytes
        more_flops = ran.steady.flops() - whole.simulated.steady.flops()
        more_cost = self._price.of_step(ran.steady.rows) - self._price.of_step(whole.simulated.steady.rows)
        step = -(-space.num_layers // (size * NUM_PLANS)) * size
        for front in sorted({*range(step, space.num_layers, step), space.num_layers}):
            share = front / space.num_layers
            is_run = front == space.num_layers
            yield Candidate(
                space=space,
                cost=whole.cost + share * more_cost,
                flops=round(whole.flops + share * more_flops),
                estimate=round(whole.peak_bytes + share * more_peak),
                plan=_plan(space, size, front),
                label=f"segments of {size} layers" + ("" if is_run else f" in the first {front}"),
                segment_size=size,
                peak_bytes=ran.peak_bytes if is_run else None,
                simulated=ran if is_run else None,
            )


def _plan(space: Space, size: int, front: int) -> Plan:
    """Return the plan with segments in the first `front` layers; the others hold their own inputs."""
    layers = [LayerPlan(True, i // size, "replay") if i < front else LayerPlan() for i in range(space.num_layers)]
    return Plan(layers, name="auto", **space.setting.as_given())
