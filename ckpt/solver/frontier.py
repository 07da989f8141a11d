"""The frontier of whole plans: built once for a model and workload, asked for any budget.

Plans come from the outer program at a row of budgets between the smallest feasible one and what keeping everything
needs, and from the uniform strategies that people choose by hand. Each has a cost that is exact and an estimated peak.
Asked for a budget, the frontier goes through the plans from the cheapest and runs them on fake tensors until one really
fits. The plans do not depend on the budget asked for, and a plan that fits a budget fits every larger one: so more
budget never costs more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ckpt.engine.keys import OpKey
from ckpt.engine.record import Record
from ckpt.plan import Decision, LayerPlan, Plan
from ckpt.simulate import Simulated, Simulator
from ckpt.solver.inner import Option, Price, flops_price, inner_frontier
from ckpt.solver.outer import Choice, solve
from ckpt.trace import Trace

# Budgets at which the outer program is solved. More cost time and find plans closer to any one budget.
NUM_BUDGETS = 48
# A plan whose estimate is further above the budget than this is not tried.
ESTIMATE_SLACK = 0.01


@dataclass(eq=False)
class Candidate:
    """A whole plan. cost: of all replays of a step, in the unit of the price. estimate: of its peak, in bytes."""

    options: tuple[Option, ...]  # by layer
    cost: float
    flops: int
    estimate: int
    plan: Plan
    label: str
    peak_bytes: int | None = None  # of its run on fake tensors, once it was run
    simulated: Simulated | None = field(default=None, repr=False)


class Frontier:
    """Plans for one model and workload under one objective."""

    def __init__(self, simulator: Simulator, price: Price = flops_price, progress: Callable[[str], None] | None = None):
        self._simulator = simulator
        self._say = progress or (lambda text: None)
        self._say("replaying every layer on fake tensors")
        self.full = simulator.run("full")
        self._say("keeping everything on fake tensors")
        self.none = simulator.run("none")
        self.num_layers = self.full.num_layers
        self.records = [self.full.programs[i].record for i in range(self.num_layers)]
        self._inner: dict[tuple, list[Option]] = {}
        self.options = [self._options_of(record, price) for record in self.records]
        self._say("solving for the layers")

    def _options_of(self, record: Record, price: Price) -> list[Option]:
        key = record_key(record)
        if key not in self._inner:
            self._say(f"pricing what a kind of layer can keep ({len(record.ops)} ops)")
            options = [] if record.is_data_dependent else inner_frontier(record, price)
            if not options:
                options = [
                    Option(frozenset(), 0, float(sum(price(op, record) for op in record.ops)), sum_flops(record))
                ]
            self._inner[key] = [*options, keep_all(record)]
        return self._inner[key]

    @cached_property
    def candidates(self) -> list[Candidate]:
        """All plans by rising cost, then by falling estimate of what they leave free."""
        model = self._layers_as_seen()
        smallest = self._estimate([0] * self.num_layers, model)
        largest = max(self.none.peak_bytes, smallest + 1)
        found: dict[tuple[int, ...], Candidate] = {}
        for budget in np.linspace(smallest, largest, NUM_BUDGETS).astype(np.int64):
            plan = solve(model.choices, model.loss_peak, int(budget))
            if plan is not None:
                self._add(found, plan, model, "planned")
        for label, plan in self._by_hand():
            self._add(found, plan, model, label)
        return sorted(found.values(), key=lambda c: (c.cost, c.estimate))

    def best_within(self, budget_bytes: int) -> Candidate | None:
        """Return the cheapest plan whose peak on fake tensors is within the budget; None if there is none."""
        for candidate in self.candidates:
            if candidate.estimate <= budget_bytes * (1 + ESTIMATE_SLACK) and self.peak_of(candidate) <= budget_bytes:
                return candidate
        return None

    def smallest(self) -> Candidate:
        """Return the plan with the lowest peak."""
        return min(self.candidates[-8:] + [self.candidates[-1]], key=self.peak_of)

    def next_cheaper(self, candidate: Candidate) -> Candidate | None:
        """Return the plan that a larger budget would allow next."""
        cheaper = [c for c in self.candidates if c.cost < candidate.cost and c.estimate > candidate.estimate]
        return min(cheaper, key=lambda c: c.estimate, default=None)

    def peak_of(self, candidate: Candidate) -> int:
        """Return the plan's peak from a run of the real engine on fake tensors, in bytes."""
        if candidate.peak_bytes is None:
            self._say(f"checking a plan ({candidate.estimate / 2**30:.2f} GiB estimated)")
            candidate.simulated = self._simulator.run(candidate.plan)
            candidate.peak_bytes = candidate.simulated.peak_bytes
        return candidate.peak_bytes

    # -- the outer program's view
    # ---------------------------------------------------------------------------------------

    def _layers_as_seen(self) -> _Model:
        """Peaks by layer and option. What a layer adds to the others comes from the run that replays everything; what
        an option changes of that comes from runs in which every layer has another option."""
        peaks = LayerPeaks.of(self.full, self.num_layers)
        changes = self._measured_changes(peaks)
        choices = []
        for i, (record, options) in enumerate(zip(self.records, self.options, strict=True)):
            measured = changes[record_key(record)]
            choices.append(
                [
                    Choice(
                        held=int(peaks.held[i] + measured[k].held),
                        forward=int(peaks.forward[i] + measured[k].forward),
                        backward=int(peaks.backward[i] + measured[k].backward),
                        cost=option.cost,
                    )
                    for k, option in enumerate(options)
                ]
            )
        return _Model(choices, int(peaks.loss), int(peaks.elsewhere))

    def _measured_changes(self, full: LayerPeaks) -> dict[tuple, list[_Change]]:
        """Return, by kind of layer and option, the change against replaying everything."""
        kinds = [record_key(record) for record in self.records]
        places: dict[tuple, list[int]] = {}
        for i, kind in enumerate(kinds):
            places.setdefault(kind, []).append(i)
        rounds = max(-(-(len(self._inner[kind]) - 1) // len(layers)) for kind, layers in places.items())
        found: dict[tuple, list[_Change]] = {k: [_Change(0, 0, 0)] * len(self._inner[k]) for k in places}
        for turn in range(rounds):
            self._say(f"measuring what each option holds ({turn + 1} of {rounds})")
            picked = [0] * self.num_layers
            for kind, layers in places.items():
                for k, layer in enumerate(layers):
                    picked[layer] = min(1 + turn * len(layers) + k, len(self._inner[kind]) - 1)
            options = [choices[k] for choices, k in zip(self.options, picked, strict=True)]
            seen = LayerPeaks.of(self._simulator.run(self._plan_of(options)), self.num_layers)
            for i, k in enumerate(picked):
                found[kinds[i]][k] = _Change(
                    int(seen.held[i] - full.held[i]),
                    int(seen.forward[i] - full.forward[i]),
                    int(seen.backward[i] - full.backward[i]),
                )
        return found

    def _estimate(self, plan: Sequence[int], model: _Model) -> int:
        held, worst = 0, model.elsewhere
        for choices, index in zip(model.choices, plan, strict=True):
            worst = max(worst, held + choices[index].forward, held + choices[index].backward)
            held += choices[index].held
        return max(worst, held + model.loss_peak)

    def _add(self, found: dict, plan: Sequence[int], model: _Model, label: str) -> None:
        plan = tuple(plan)
        if plan in found:
            return
        options = tuple(choices[i] for choices, i in zip(self.options, plan, strict=True))
        found[plan] = Candidate(
            options=options,
            cost=sum(o.cost for o in options),
            flops=sum(o.flops for o in options),
            estimate=self._estimate(plan, model),
            plan=self._plan_of(options),
            label=label,
        )

    def _by_hand(self) -> list[tuple[str, list[int]]]:
        """Uniform plans, and those that leave every n-th layer to be replayed."""
        last = [len(options) - 1 for options in self.options]
        plans = [("full", [0] * self.num_layers), ("none", last)]
        plans += [(f"every_{n}", [0 if i % n == 0 else last[i] for i in range(self.num_layers)]) for n in (2, 3, 4)]
        for depth in range(1, max(last)):
            plans.append((f"uniform_{depth}", [min(depth, k) for k in last]))
        return plans

    def _plan_of(self, options: Sequence[Option]) -> Plan:
        layers = []
        for option, record in zip(options, self.records, strict=True):
            decisions: dict[OpKey, Decision] = {}
            if option.replay:
                decisions = {record.ops[i].key: Decision.KEEP for i in sorted(option.keep)}
            layers.append(LayerPlan(replay=option.replay, decisions=decisions))
        return Plan(layers, name="auto")


@dataclass(frozen=True)
class _Change:
    """Bytes more than with everything replayed."""

    held: int
    forward: int
    backward: int


@dataclass(frozen=True)
class _Model:
    choices: list[list[Choice]]
    loss_peak: int
    elsewhere: int


@dataclass(frozen=True)
class LayerPeaks:
    """Bytes alive in a run, by layer: held: added from its forward to the next; forward, backward: the most while it
    works, less what earlier layers hold; loss, elsewhere: the most between forward and backward (less all that layers
    hold), and outside all layers."""

    held: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    loss: int
    elsewhere: int

    @classmethod
    def of(cls, run: Simulated, num_layers: int) -> LayerPeaks:
        trace = run.steady
        total = trace.total
        forward, head, backward = spans(trace, num_layers)
        begin = np.array([total[a] for a, _ in forward] + [total[head[0]]])
        held = np.diff(begin)
        before = np.concatenate([[0], np.cumsum(held)])
        peak_forward = np.array([total[a : b + 1].max() for a, b in forward]) - before[:-1]
        peak_backward = np.array([total[a : b + 1].max() for a, b in backward]) - before[:-1]
        loss = int(total[head[0] : head[1] + 1].max() - before[-1])
        elsewhere = int(max(total[: forward[0][0] + 1].max(), total[backward[0][1] :].max()))
        return cls(held, peak_forward, peak_backward, loss, elsewhere)


def spans(trace: Trace, num_layers: int) -> tuple[list[tuple[int, int]], tuple[int, int], list[tuple[int, int]]]:
    """Return where each layer's forward, the head, and each layer's backward lie in a trace's changes (last
    micro-batch).

    Raises ValueError if the layers do not run one by one, once each."""
    last_batch = max(i for i, mark in enumerate(trace.marks) if mark.kind == "batch")
    marks = trace.marks[last_batch + 1 :]
    forward = [m.position for m in marks if m.kind == "forward"]
    backward = [m.position for m in marks if m.kind == "backward"][::-1]
    head = [m.position for m in marks if m.kind == "head"]
    in_order = forward == sorted(forward) and backward == sorted(backward, reverse=True)
    if len(forward) != num_layers or len(backward) != num_layers or len(head) != 1 or not in_order:
        raise ValueError("auto: this model's layers do not run one by one, once each; choose another strategy")
    ends = [*forward[1:], head[0]]
    back = list(zip(backward, [len(trace.total) - 1, *backward[:-1]], strict=True))
    return list(zip(forward, ends, strict=True)), (head[0], backward[-1]), back


def record_key(record: Record) -> tuple:
    """Layers with equal keys can be treated alike."""
    ops = tuple((op.key, op.func, op.reads, op.makes, op.writes, op.flops, op.num_bytes) for op in record.ops)
    return ops, tuple(record.saved), tuple(record.producer), tuple(record.storage_bytes)


def keep_all(record: Record) -> Option:
    """The layer left to autograd: all that it saves of the layer's own, and no replay."""
    storages = {s.storage for s in record.saved if record.producer[s.storage] >= 0}
    return Option(frozenset(), sum(record.storage_bytes[s] for s in storages), 0.0, 0, replay=False)


def sum_flops(record: Record) -> int:
    """Return the FLOPs of the whole layer."""
    return sum(op.flops for op in record.ops)
