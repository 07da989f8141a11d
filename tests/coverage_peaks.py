"""Peaks of a tiny model, measured and predicted, and a plan under a budget between its extremes.

Forward and backward of 2 rows of 64 tokens in fp32, without an optimizer: activations are then a fair share of it.
"""

from __future__ import annotations

import functools
from typing import Any

import exactness
import zoo
from torch import nn

import ckpt
from ckpt.ledger import measure
from ckpt.simulate import Simulator
from ckpt.solver.frontier import Frontier
from ckpt.workload import Workload

SEQ_LEN = 64
WORK = Workload(batch_size=2, seq_len=SEQ_LEN, dtype="fp32", optimizer=None, loss="full")


def measured(model: nn.Module, strategy: Any, loss: str = "full", tile_mlp: int = 1) -> int:
    """Return the higher peak of two steps, in bytes. The first one records the layers."""
    inputs = zoo.batch(model, SEQ_LEN)
    handle = ckpt.apply(model, strategy, loss=loss, tile_mlp=tile_mlp)
    peaks = []
    try:
        for _ in range(2):
            with measure(model, inputs=inputs) as ledger:
                exactness.loss_of(model(**inputs), inputs).backward()
            model.zero_grad(set_to_none=True)
            peaks.append(ledger.peak_bytes)
    finally:
        handle.undo()
    return max(peaks)


def predicted(model: nn.Module, strategy: Any, loss: str, tile_mlp: int) -> int:
    """Return the predicted peak in bytes. Raises ValueError for what cannot be predicted."""
    return _simulator(model).run(strategy, loss=loss, tile_mlp=tile_mlp).peak_bytes


def plan_within_half(model: nn.Module) -> tuple[ckpt.Plan, str]:
    """Plan for a budget halfway between the peaks of full recompute and of keeping everything; say what was planned.

    Raises AssertionError if the plan's measured peak exceeds the budget.
    """
    frontier = _frontier(model)
    low, high = frontier.full.peak_bytes, frontier.none.peak_bytes
    budget = (low + high) // 2
    plan = ckpt.Auto(budget_gib=budget / 2**30, objective="flops").plan_from(frontier, WORK)
    peak = measured(model, plan)
    if peak > budget:
        raise AssertionError(f"the plan's measured peak of {peak} bytes exceeds its budget of {budget}")
    return plan, f"{peak} of {budget} bytes; full {low}, none {high}"


# Building either takes a second; strategies of one model come one after the other.
@functools.lru_cache(maxsize=1)
def _simulator(model: nn.Module) -> Simulator:
    return Simulator(model, WORK, inputs=zoo.batch(model, SEQ_LEN))


@functools.lru_cache(maxsize=1)
def _frontier(model: nn.Module) -> Frontier:
    return Frontier(_simulator(model))
