"""The inner frontier: for one kind of layer, what can be kept, how many bytes that holds, and what replaying then
costs.

An option is a set of ops whose outputs are kept. Which replays it saves is not the sum of its parts: an op is skipped
when nothing that is still needed depends on it. So every option is priced by the program that the engine would run
(`build_program`), the same code that decides at run time.

Legend of bounds: with few ops that cost FLOPs all subsets are tried (exact); with many, options grow one op at a time
by the best ratio of saved cost to held bytes (within one op of the fractional optimum of a knapsack).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from ckpt.engine.program import Program, build_program
from ckpt.engine.record import Record
from ckpt.plan import Decision
from ckpt.solver.price import Price

# 2**EXHAUSTIVE subsets are priced; beyond, the greedy chain.
EXHAUSTIVE = 9


@dataclass(frozen=True)
class Option:
    """One way to treat a layer that is replayed, or (replay=False) the layer left to autograd.

    keep: indices of the ops whose outputs are kept. held_bytes: on the device from forward to backward, beside the
    layer's input. cost: of its replay and of waiting for the link, in the unit of the price. flops: of the replay.
    offload_input, moved: what is held off the device: the input, and which of the kept ops. away_bytes: how much.
    """

    keep: frozenset[int]
    held_bytes: int
    cost: float
    flops: int
    replay: bool = True
    ops_run: int = 0
    offload_input: bool = False
    moved: frozenset[int] = frozenset()
    away_bytes: int = 0
    stall: float = 0.0

    @property
    def is_moved_in_part(self) -> bool:
        """Whether some of the kept ops are held off the device, and others on it."""
        return bool(self.moved) and self.moved != self.keep


@dataclass
class Pricing:
    """Prices keep-sets of one record, remembering those asked before."""

    record: Record
    price: Price
    _known: dict[frozenset[int], Option] = field(default_factory=dict)
    _runs: dict[int, frozenset[int]] = field(default_factory=dict)  # by op that is kept alone

    @cached_property
    def _costs(self) -> list[float]:
        return [self.price(op, self.record) for op in self.record.ops]

    def runs(self, keep: int) -> frozenset[int]:
        """Return the indices of the ops that replays run where the output of one op is kept."""
        self.option([keep])
        return self._runs[keep]

    def option(self, keep: Iterable[int]) -> Option:
        keep = frozenset(keep)
        found = self._known.get(keep)
        if found is None:
            program = build_program(self.record, dict.fromkeys(keep, Decision.KEEP), to_run=False)
            held, runs = program.kept_ops, ops_run(program)
            if len(keep) == 1:
                self._runs[next(iter(keep))] = frozenset(runs)
            found = Option(
                keep=frozenset(i for i in keep if i in held),  # what nobody needs is not worth a decision
                held_bytes=program.kept_bytes,
                cost=sum(map(self._costs.__getitem__, runs)),
                flops=program.replay_flops,
                ops_run=program.ops_run,
            )
            self._known[keep] = found
        return found


def keep_all(record: Record) -> Option:
    """The layer left to autograd: all that it saves of the layer's own, and no replay."""
    storages = {s.storage for s in record.saved if record.producer[s.storage] >= 0}
    return Option(frozenset(), sum(record.storage_bytes[s] for s in storages), 0.0, 0, replay=False)


def ops_run(program: Program) -> list[int]:
    """Return the indices of the ops that the program's replays run."""
    return [i for stage in program.stages for i in stage.runs]


def inner_frontier(record: Record, price: Price) -> list[Option]:
    """Return options by rising bytes and falling cost, none dominated; the first keeps nothing."""
    pricing = Pricing(record, price)
    base = pricing.option(())
    candidates = _candidates(record, pricing, base)
    options = {base.keep: base}
    dear = [c for c in candidates if pricing.option([c]).flops < base.flops]
    if len(dear) <= EXHAUSTIVE:
        for size in range(1, len(dear) + 1):
            for keep in itertools.combinations(dear, size):
                option = pricing.option(keep)
                options[option.keep] = option
        start = pricing.option(dear)
        chain = _greedy_chain(pricing, start, [c for c in candidates if c not in start.keep])
    else:
        chain = []
    for option in [*chain, *_greedy_chain(pricing, base, candidates)]:
        options[option.keep] = option
    return pareto(options.values())


def pareto(options: Iterable[Option]) -> list[Option]:
    """Drop options that hold more and cost no less than another."""
    kept: list[Option] = []
    for option in sorted(options, key=lambda o: (o.held_bytes, o.cost, len(o.keep), sorted(o.keep))):
        if not kept or option.cost < kept[-1].cost * (1 - 1e-12):
            kept.append(option)
    return kept


def thin(options: list[Option], most: int) -> list[Option]:
    """Leave so many options of a frontier: those drop out first whose lack raises the staircase of cost over bytes
    least. The first and the last stay."""
    options = list(options)
    while len(options) > max(2, most):
        losses = [
            (options[k - 1].cost - options[k].cost) * (options[k + 1].held_bytes - options[k].held_bytes)
            for k in range(1, len(options) - 1)
        ]
        del options[1 + losses.index(min(losses))]
    return options


def _candidates(record: Record, pricing: Pricing, base: Option) -> list[int]:
    """Ops whose outputs alone save something: those that autograd saves, and those that cost FLOPs.

    For an op that costs FLOPs and whose output autograd does not save, a later saved tensor of no more bytes serves as
    well and needs no capture; the better of the two is left in."""
    saved = {record.producer[s.storage] for s in record.saved if record.producer[s.storage] >= 0}
    asked = [op.index for op in record.ops if op.makes and not op.is_random and (op.index in saved or op.flops > 0)]
    useful = [i for i in asked if pricing.option([i]).keep and pricing.option([i]).cost < base.cost]
    by_flops: dict[int, list[int]] = {}
    for i in useful:
        by_flops.setdefault(base.flops - pricing.option([i]).flops, []).append(i)
    chosen = []
    for i in useful:
        if i in saved:
            chosen.append(i)
            continue
        spared = base.flops - pricing.option([i]).flops
        rivals = [
            j for j in by_flops[spared] if j in saved and j > i and record.ops[j].num_bytes <= record.ops[i].num_bytes
        ]
        if spared == 0 or all(i in pricing.runs(j) for j in rivals):
            chosen.append(i)
    return chosen


def _greedy_chain(pricing: Pricing, start: Option, candidates: list[int]) -> list[Option]:
    """Add one op at a time, always the one that saves most cost per byte (lazy greedy: ratios are re-computed on
    top)."""
    chain, current = [start], start

    def ratio(i: int) -> float:
        option = pricing.option([*current.keep, i])
        return (current.cost - option.cost) / max(1, option.held_bytes - current.held_bytes)

    heap = [(-ratio(i), i) for i in candidates]
    heapq.heapify(heap)
    while heap:
        _, i = heapq.heappop(heap)
        fresh = ratio(i)
        if fresh <= 0:
            continue
        if heap and fresh < -heap[0][0] * (1 - 1e-9):
            heapq.heappush(heap, (-fresh, i))
            continue
        current = pricing.option([*current.keep, i])
        chain.append(current)
    return chain
