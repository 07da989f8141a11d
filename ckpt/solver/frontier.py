"""The frontier of whole plans: built once for a model and workload, asked for any budget.

Plans come from the outer program at a row of budgets between the smallest feasible one and what keeping everything
needs, and from the strategies that people choose by hand; each has a cost and an estimated peak. Asked for a budget,
the frontier goes through the plans from the cheapest and runs them on fake tensors until one really fits. The plans do
not depend on the budget asked for, and a plan that fits a budget fits every larger one: so more budget never costs
more.

Settings that hold for all layers (tiles of the MLP, chunks of the loss) each make a space of plans; so does offload.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from ckpt.choose_tiles import choose_tiles
from ckpt.plan import LayerPlan, Plan
from ckpt.simulate import Simulated, Simulator
from ckpt.solver.away import Room, input_bytes
from ckpt.solver.candidate import Candidate
from ckpt.solver.floors import floor_of_layers
from ckpt.solver.price import FlopsPrice, Price
from ckpt.solver.segmented import Segmented
from ckpt.solver.solutions import solutions
from ckpt.solver.space import Setting, Space

MOST_TILES = 64


class Frontier:
    """Plans for one model and workload under one objective.

    rooms: where tensors may be offloaded to. settings: False leaves loss and tiles as the workload has them.
    """

    def __init__(
        self,
        simulator: Simulator,
        price: Price | None = None,
        progress: Callable[[str], None] | None = None,
        *,
        rooms: Sequence[Room] = (),
        settings: bool = False,
    ):
        self._simulator = simulator
        self.price = price or FlopsPrice()
        self._say = progress or (lambda text: None)
        self._rooms = [room for room in rooms if room.budget_bytes > 0]
        self._settings = settings
        given = Setting(tile_mlp=given_tiles(simulator, settings))
        self._wholes: dict[Space, Candidate] = {}
        self.space = Space(simulator, given, self.price, self._rooms[0] if self._rooms else None, self._say)

    @property
    def none(self) -> Simulated:
        """The steps that keep everything, loss and tiles as given."""
        return self.space.none

    @property
    def full(self) -> Simulated:
        """The steps that replay every layer, loss and tiles as given."""
        return self.space.full

    @cached_property
    def keeps_all(self) -> Candidate:
        """The plan that does nothing."""
        layers = [LayerPlan(replay=False) for _ in range(self.space.num_layers)]
        plan = Plan(layers, name="auto", **self.space.setting.as_given())
        peak = self.none.peak_bytes
        return Candidate(self.space, 0.0, 0, peak, plan, "none", peak_bytes=peak, simulated=self.none)

    @cached_property
    def spaces(self) -> list[Space]:
        """All spaces, the options of their layers not yet measured."""
        spaces = [self.space]
        for room in self._rooms[1:]:
            spaces.append(Space(self._simulator, self.space.setting, self.price, room, self._say))
            spaces[-1].full = self.full
        lean = self._lean() if self._settings else None
        return spaces if lean is None else [*spaces, lean]

    def _lean(self) -> Space | None:
        """Return the space in which loss and MLP need least; None if that is the given one."""
        work = self._simulator.work
        loss = "chunked" if work.loss == "full" else None
        tiles = _tiles_for(self.space) if (self.space.setting.tile_mlp or work.tile_mlp) == 1 else None
        room = self._rooms[0] if self._rooms else None
        for setting in dict.fromkeys((Setting(loss, tiles), Setting(loss, self.space.setting.tile_mlp))):
            if setting in (Setting(), self.space.setting):
                continue
            space = Space(self._simulator, setting, self.price, room, self._say)
            try:
                space.full  # noqa: B018 (a step is made)
            except ValueError as error:  # an MLP that cannot be tiled, a head that chunks cannot be computed of
                self._say(f"{setting} is left out: {error}")
            else:
                return space
        return None

    @cached_property
    def candidates(self) -> list[Candidate]:
        """All plans by rising cost; of those that cost the same, the simpler first, then what needs less."""
        found = [self.keeps_all]
        for space in self.spaces:
            more, flops = self._more(space)
            seen = set()
            for numbers in solutions(space):
                if tuple(numbers) not in seen:
                    seen.add(tuple(numbers))
                    found.append(self._candidate(space, numbers, more, flops))
        # Sums of the same terms in another order differ in their last digits.
        return sorted(found, key=lambda c: (float(f"{c.cost:.12g}"), c.num_changes, c.estimate))

    def _more(self, space: Space) -> tuple[float, int]:
        """Return cost and FLOPs that a space's loss and tiles take beyond those that are given."""
        if space.setting == self.space.setting:
            return 0.0, 0
        (cost, flops), (own_cost, own_flops) = space.without_replays(), self.space.without_replays()
        return max(0.0, cost - own_cost), max(0, flops - own_flops)

    def _candidate(self, space: Space, numbers: Sequence[int], more_cost: float, more_flops: int) -> Candidate:
        options = tuple(choices[k] for choices, k in zip(space.options, numbers, strict=True))
        return Candidate(
            space=space,
            cost=more_cost + sum(o.cost for o in options),
            flops=more_flops + sum(o.flops for o in options),
            estimate=space.estimate(numbers),
            plan=space.plan(options),
            label="each layer by itself",
            options=options,
            away_bytes=sum(o.away_bytes for o in options),
            stall=sum(o.stall for o in options),
        )

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """Return the cheapest plan whose peak on fake tensors is within the budget; None if there is none."""
        if self.keeps_all.estimate <= budget_bytes:
            return self.keeps_all
        by_layer = None
        if budget_bytes >= self._layers_floor:
            fitting = (c for c in self.candidates if c.estimate <= budget_bytes and self.fits(c, budget_bytes))
            by_layer = next(fitting, None)
        cost = math.inf if by_layer is None else by_layer.cost
        in_segments = (c for c in self.segmented.below(budget_bytes, cost) if self.fits(c, budget_bytes))
        return next(in_segments, by_layer)

    @cached_property
    def segmented(self) -> Segmented:
        """Plans in which layers in front share one input in groups."""
        return Segmented(self.spaces, self._whole, self.price, self._say)

    @cached_property
    def _layers_floor(self) -> int:
        return min(floor_of_layers(space) for space in self.spaces)

    def fits(self, candidate: Candidate, budget_bytes: int) -> bool:
        """Whether the plan's run on fake tensors stays within the budgets of device, host and disk."""
        room = candidate.space.room
        if candidate.away_bytes and candidate.away_bytes > room.budget_bytes:
            return False
        if self.peak_of(candidate) > budget_bytes:
            return False
        return not candidate.away_bytes or candidate.simulated.steady.host_bytes <= room.budget_bytes

    def smallest(self) -> Candidate:
        """Return the plan that the least budget allows, looking only where there can be one."""
        least = min([self.keeps_all, *map(self._whole, self.spaces)], key=self.needed)
        for floor, space, size in self.segmented.floors:
            if floor < self.needed(least):
                least = min(least, self.segmented.groups(space, size)[-1], key=self.needed)
        if self.needed(least) <= self._layers_floor:
            return least
        allowed = [c for c in self.candidates if not c.away_bytes or c.away_bytes <= c.space.room.budget_bytes]
        for candidate in sorted(allowed, key=lambda c: c.estimate)[:4]:
            if candidate.estimate < self.needed(least):
                least = min(least, candidate, key=self.needed)
        return least

    def needed(self, candidate: Candidate) -> int:
        """Return the least budget within which the plan is found: its peak, or its estimate where that is more."""
        return max(candidate.estimate, self.peak_of(candidate))

    def _whole(self, space: Space) -> Candidate:
        """The plan that replays every layer."""
        if space not in self._wholes:
            self._wholes[space] = Candidate(
                space=space,
                cost=self._more(space)[0] + sum(options[0].cost for options in space.options),
                flops=space.full.steady.flops() - self.none.steady.flops(),
                estimate=space.full.peak_bytes,
                plan=Plan([LayerPlan() for _ in range(space.num_layers)], name="auto", **space.setting.as_given()),
                label="every layer replayed",
                peak_bytes=space.full.peak_bytes,
                simulated=space.full,
            )
        return self._wholes[space]

    def loss_and_tiles(self, candidate: Candidate) -> tuple[str, int]:
        """Return the loss and the number of tiles of the MLP that the plan is run with, the workload's included."""
        work, setting = self._simulator.work, candidate.space.setting
        return setting.loss or work.loss, setting.tile_mlp or work.tile_mlp

    def next_cheaper(self, candidate: Candidate, budget_bytes: int) -> Candidate | None:
        """Return the plan that a larger budget would allow next."""

        def following(offered: Iterable[Candidate]) -> Candidate | None:
            cheaper = (c for c in offered if c.cost < candidate.cost and c.estimate > budget_bytes)
            return min(cheaper, key=lambda c: c.estimate, default=None)

        found = following(itertools.chain(self.candidates, self.segmented.known))
        for floor, space, size in self.segmented.floors:  # smaller segments cost less
            if size < candidate.segment_size and floor < (math.inf if found is None else found.estimate):
                found = following(filter(None, (found, *self.segmented.groups(space, size))))
        return found

    def peak_of(self, candidate: Candidate) -> int:
        """Return the plan's peak from a run of the real engine on fake tensors, in bytes."""
        if candidate.peak_bytes is None:
            self._say(f"checking a plan ({candidate.estimate / 2**30:.2f} GiB estimated)")
            candidate.simulated = candidate.space.run(candidate.plan)
            candidate.peak_bytes = candidate.simulated.peak_bytes
        return candidate.peak_bytes


def given_tiles(simulator: Simulator, settings: bool) -> int | None:
    """Return the tiles that tile_mlp="auto" stands for, chosen once: 1 where the plan may choose, else those of a whole
    replay; None for a number."""
    if simulator.work.tile_mlp != "auto":
        return None
    return 1 if settings else choose_tiles(simulator, "full")


def _tiles_for(space: Space) -> int:
    """Return the number of tiles, a power of 2, at which the widest tensor of a layer is half its input at most."""
    widest = max((op.num_bytes / max(1, input_bytes(r)) for r in space.records for op in r.ops), default=1)
    tiles = 2
    while tiles < min(2 * widest, MOST_TILES):
        tiles *= 2
    return tiles
