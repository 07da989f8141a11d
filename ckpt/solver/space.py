"""The plan space under one setting of loss and tiles: kinds of layer, their options, what each adds to a peak.

Peaks by layer and option are measured, not modelled: what a layer adds to the others comes from the run that replays
everything; what an option changes of that comes from runs in which every layer has another option.

    space = Space(simulator, Setting(), price)
    space.estimate([0] * space.num_layers)    # every layer replayed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ckpt.engine.keys import OpKey
from ckpt.engine.record import Record
from ckpt.plan import Decision, LayerPlan, Plan
from ckpt.simulate import Simulated, Simulator
from ckpt.solver.away import Room, away_options, input_bytes
from ckpt.solver.inner import Option, inner_frontier, keep_all, thin
from ckpt.solver.outer import Choice
from ckpt.solver.peaks import LayerPeaks
from ckpt.solver.price import Price

# Measuring options runs layers on fake tensors; these many op calls of them at most (about 10 s), but MEASURED_ROUNDS
# of the model at least one and at most that.
MEASURED_OP_CALLS = 12_000
MEASURED_ROUNDS = 6
# Options of a kind of layer: at least, at most. Deep models need few: what one option is too coarse for, a mixture over
# layers is not.
FEWEST_OPTIONS, MOST_OPTIONS = 6, 48
OPTIONS_OF_ALL_LAYERS = 320


@dataclass(frozen=True)
class Setting:
    """What holds for all layers. None: as the workload says."""

    loss: str | None = None
    tile_mlp: int | None = None

    def __str__(self) -> str:
        said = ([f"loss {self.loss}"] if self.loss else []) + (
            [f"MLP in {self.tile_mlp} tiles"] if self.tile_mlp else []
        )
        return f" ({', '.join(said)})" if said else ""

    def as_given(self) -> dict:
        """Return the arguments of `Simulator.run`."""
        return {"loss": self.loss, "tile_mlp": self.tile_mlp}


class Space:
    """Options of every layer under one setting."""

    def __init__(
        self,
        simulator: Simulator,
        setting: Setting,
        price: Price,
        room: Room | None = None,
        say: Callable[[str], None] = lambda text: None,
    ):
        self.setting, self.price, self.room = setting, price, room
        self._simulator, self.say = simulator, say
        self.num_layers = len(simulator.layers)

    @cached_property
    def none(self) -> Simulated:
        """Two steps that keep everything."""
        self.say(f"keeping everything on fake tensors{self.setting}")
        return self.run("none")

    @cached_property
    def full(self) -> Simulated:
        """Two steps that replay every layer."""
        self.say(f"replaying every layer on fake tensors{self.setting}")
        return self.run("full")

    def without_replays(self) -> tuple[float, int]:
        """Return cost and FLOPs of a step, what replays take left out; by `full`, which is run anyway."""
        whole = [options[0] for options in self.options]
        rows = self.full.steady.rows
        cost = self.price.of_step(rows) - sum(o.cost for o in whole)
        return cost, self.full.steady.flops() - sum(o.flops for o in whole)

    @cached_property
    def records(self) -> list[Record]:
        """What each layer does, as `full` recorded it."""
        return [self.full.programs[i].record for i in range(self.num_layers)]

    @cached_property
    def peaks(self) -> LayerPeaks:
        """What each layer adds and needs where every layer is replayed."""
        return LayerPeaks.of(self.full)

    @cached_property
    def kinds(self) -> list[int]:
        """By layer, the number of its kind: layers of one kind can be treated alike."""
        keys: dict[tuple, int] = {}
        return [keys.setdefault(record_key(record), len(keys)) for record in self.records]

    @cached_property
    def kept(self) -> list[list[Option]]:
        """By kind of layer, its options, priced but not measured."""
        rounds = min(MEASURED_ROUNDS, max(1, MEASURED_OP_CALLS // sum(len(r.ops) for r in self.records)))
        firsts = [self.kinds.index(kind) for kind in range(max(self.kinds) + 1)]
        return [self._options_of(self.records[i], rounds * self.kinds.count(self.kinds[i])) for i in firsts]

    @cached_property
    def options(self) -> list[list[Option]]:
        """By layer, its options; the first replays all of it."""
        return [self.kept[kind] for kind in self.kinds]

    def run(self, strategy) -> Simulated:
        """Make two steps on fake tensors under this setting."""
        return self._simulator.run(strategy, **self.setting.as_given())

    def _options_of(self, record: Record, can_be_measured: int) -> list[Option]:
        self.say(f"pricing what a kind of layer can keep ({len(record.ops)} ops)")
        options = [] if record.is_data_dependent else inner_frontier(record, self.price)
        if not options:
            options = [
                Option(frozenset(), 0, float(sum(self.price(op, record) for op in record.ops)), sum_flops(record))
            ]
        most = min(MOST_OPTIONS, OPTIONS_OF_ALL_LAYERS // self.num_layers, can_be_measured)
        if self.setting != Setting():
            most //= 2  # the second space of two
        most = max(FEWEST_OPTIONS, most)
        away = []
        if self.room is not None and not record.is_data_dependent:
            away = away_options(options, record, self.price, self.room)
            most = max(FEWEST_OPTIONS, most - len(away) // 2)
        return [*thin([*options, keep_all(record)], most), *away]

    # -- peaks
    # ------------------------------------------------------------------------------------------------------------

    @cached_property
    def choices(self) -> list[list[Choice]]:
        """Return, by layer and option, the bytes it holds and needs.

        In each run the layers in front have options not seen before, the others are replayed whole: equal layers are
        run once."""
        places: dict[int, list[int]] = {}
        for layer, kind in enumerate(self.kinds):
            places.setdefault(kind, []).append(layer)
        changes = [[(0, 0, 0)] * len(options) for options in self.kept]
        for moves in (False, True):  # what is held beside offloaded tensors is counted, which needs the others' figures
            wanted = [[k for k, o in enumerate(opts) if k and bool(o.away_bytes) is moves] for opts in self.kept]
            rounds = max(-(-len(todo) // len(places[kind])) for kind, todo in enumerate(wanted))
            for turn in range(rounds):
                what = "sent away" if moves else "held"
                self.say(f"measuring options with tensors {what} ({turn + 1} of {rounds})")
                picked = [0] * self.num_layers
                for kind, layers in places.items():
                    for layer in layers:
                        if wanted[kind]:
                            picked[layer] = wanted[kind].pop(0)
                self._note(picked, changes)
        full = self.peaks
        return [
            [
                Choice(
                    held=int(full.held[i]) + held,
                    forward=int(full.forward[i]) + forward,
                    backward=int(full.backward[i]) + backward + option.away_bytes,
                    cost=option.cost,
                )
                for option, (held, forward, backward) in zip(self.options[i], changes[kind], strict=True)
            ]
            for i, kind in enumerate(self.kinds)
        ]

    def _note(self, picked: list[int], changes: list[list[tuple[int, int, int]]]) -> None:
        options = [self.options[i][k] for i, k in enumerate(picked)]
        full = self.peaks
        held = None
        if any(o.away_bytes for o in options):
            # What is on its way out stands in the forward of the layer behind: there held bytes are counted, not seen.
            # The input of a layer that is replayed is what the layer before leaves behind.
            gone = [input_bytes(r) if o.offload_input else 0 for r, o in zip(self.records, options, strict=True)]
            held = full.held + np.array([o.held_bytes for o in options]) - np.array(gone)
        seen = LayerPeaks.of(self.run(self.plan(options)), held)
        for i, k in enumerate(picked):
            if k:
                before = options[i - 1].away_bytes if i and options[i].away_bytes else 0  # comes back meanwhile
                changes[self.kinds[i]][k] = (
                    int(seen.held[i] - full.held[i]),
                    int(seen.forward[i] - full.forward[i]),
                    int(seen.backward[i] - full.backward[i]) - before,
                )

    def estimate(self, plan: Sequence[int]) -> int:
        """Estimate the peak of a plan, given by layer as the number of its option."""
        held, worst, before = 0, self.peaks.elsewhere, 0
        for i, k in enumerate(plan):
            choice, away = self.choices[i][k], self.options[i][k].away_bytes
            # The choice counts as coming back what the layer itself sent; it is what the layer before it sent.
            backward = choice.backward - away + (before if away else 0)
            worst = max(worst, held + choice.forward, held + backward)
            held += choice.held
            before = away
        return max(worst, held + self.peaks.loss)

    # -- plans
    # ------------------------------------------------------------------------------------------------------------

    def plan(self, options: Sequence[Option]) -> Plan:
        """Return the plan that gives each layer its option."""
        layers = []
        for option, record in zip(options, self.records, strict=True):
            decisions: dict[OpKey, Decision] = {}
            if option.replay:
                what = {i: Decision.OFFLOAD if i in option.moved else Decision.KEEP for i in sorted(option.keep)}
                decisions = {record.ops[i].key: decision for i, decision in what.items()}
            layers.append(LayerPlan(replay=option.replay, decisions=decisions, offload_input=option.offload_input))
        moves = any(o.away_bytes for o in options)
        offload = {"target": self.room.target, "directory": self.room.directory} if moves else None
        return Plan(layers, name="auto", offload=offload, **self.setting.as_given())


def record_key(record: Record) -> tuple:
    """Layers with equal keys can be treated alike."""
    ops = tuple((op.key, op.func, op.reads, op.makes, op.writes, op.flops, op.num_bytes) for op in record.ops)
    return ops, tuple(record.saved), tuple(record.producer), tuple(record.storage_bytes)


def sum_flops(record: Record) -> int:
    """Return the FLOPs of the whole layer."""
    return sum(op.flops for op in record.ops)
