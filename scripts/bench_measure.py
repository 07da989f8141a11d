"""What the benchmark measures of one row: bytes, FLOPs and gradients in one step, CPU seconds in many.

Bytes and FLOPs are exact and repeat; they are measured under the ledger, in a step of their own. Times are CPU seconds
of the one thread, which other work on the machine disturbs least, and only ever compared within a round.

    cell = measured(case, row)                       # {"peak_bytes": ..., "flops": ..., "gradients": "equal", ...}
    for round_ in rounds(case, rows): ...            # {"row name": seconds}
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ckpt.auto import GIB, Auto
from ckpt.flops import FlopCounter
from ckpt.ledger import measure
from ckpt.plan import Plan
from scripts.bench_cases import Case
from scripts.bench_rows import Row

Gradients = list[torch.Tensor | None]


class Reference:
    """Loss and gradients of `none`, by its loss, that the rows of a case are held against."""

    def __init__(self, case: Case):
        self._case = case
        self.known: dict[str, tuple[torch.Tensor, Gradients]] = {}

    def of(self, none: Row) -> tuple[torch.Tensor, Gradients]:
        """Return (loss, gradients) of a step of the row `none`."""
        if none.loss not in self.known:
            model = self._case.model()
            value = none.prepare(model)(*self._case.batch())
            self.known[none.loss] = value, [p.grad for p in model.parameters()]
        return self.known[none.loss]


def measured(case: Case, row: Row, none: Row, reference: Reference, plan: Plan | None = None) -> dict[str, Any]:
    """Measure one step of a row: peak live bytes, executed FLOPs, and its gradients against those of `none`."""
    model, batch = case.model(), case.batch()
    step = row.prepare(model, plan)
    if row.side == "ours":
        step(*batch)  # the first step records, and is not like the others
    with measure(model, inputs=batch) as ledger, FlopCounter() as counter:
        loss = step(*batch)
    gradients = [p.grad for p in model.parameters()]
    if row == none:
        reference.known.setdefault(none.loss, (loss, gradients))
    return {
        "peak_bytes": ledger.peak_bytes,
        "host_bytes": ledger.host_bytes,
        "residents": ledger.residents,
        "flops": counter.total,
        **compared(loss, gradients, *reference.of(none)),
    }


def compared(loss: torch.Tensor, gradients: Gradients, expected: torch.Tensor, known: Gradients) -> dict[str, Any]:
    """Compare loss and gradients: equal bit for bit, or the largest norm(g - g0) / norm(g0) of a parameter."""
    pairs = [(g, g0) for g, g0 in zip(gradients, known, strict=True) if g is not None or g0 is not None]
    if torch.equal(loss, expected) and all(_same(g, g0) for g, g0 in pairs):
        return {"gradients": "equal", "gradient_error": 0.0}
    if any(g is None or g0 is None for g, g0 in pairs):
        return {"gradients": "missing", "gradient_error": float("inf")}
    return {"gradients": "differ", "gradient_error": max(_error(g, g0) for g, g0 in pairs)}


def _same(g: torch.Tensor | None, g0: torch.Tensor | None) -> bool:
    return g is not None and g0 is not None and torch.equal(g, g0)


def _error(g: torch.Tensor, g0: torch.Tensor) -> float:
    return ((g - g0).norm() / g0.norm().clamp_min(1e-30)).item()


class Planner:
    """Plans of `auto` for a case: the frontier is built once for each loss and number of tiles."""

    def __init__(self, case: Case):
        self._case = case
        self._frontiers: dict[tuple[str, int], Any] = {}

    def plan(self, row: Row, budget_bytes: int) -> Plan:
        """Plan within a budget, for least FLOPs. Raises ValueError if nothing fits."""
        auto = Auto(budget_gib=budget_bytes / GIB, objective="flops", bitwise=True)
        work = self._case.workload(row.loss, row.tile_mlp)
        key = row.loss, row.tile_mlp
        if key not in self._frontiers:
            self._frontiers[key] = auto.frontier(self._case.model(), work)
        return auto.plan_from(self._frontiers[key], work)


def rounds(case: Case, rows: Mapping[str, tuple[Row, Plan | None]], num_rounds: int) -> Iterator[dict[str, float]]:
    """Time every row once a round, in an order that rotates and turns; yield CPU seconds by row.

    Each row has a model of its own, so that what was recorded stays; its first step is not timed.
    """
    batch = case.batch()
    steps: dict[str, tuple[nn.Module, Callable[..., torch.Tensor]]] = {}
    for name, (row, plan) in rows.items():
        model = case.model()
        steps[name] = model, row.prepare(model, plan)
        steps[name][1](*batch)
        model.zero_grad(set_to_none=True)
    names = list(steps)
    for round_ in range(num_rounds):
        turned = names[round_ % len(names) :] + names[: round_ % len(names)]
        seconds = {}
        for name in turned if round_ % 2 else reversed(turned):
            model, step = steps[name]
            start = time.thread_time()
            step(*batch)
            seconds[name] = time.thread_time() - start
            model.zero_grad(set_to_none=True)
        yield seconds
