"""`batch_size=auto`: the micro-batch that gives most predicted tokens a second within strategy.budget_gib.

The rows of an optimizer step stay what `grad_accum` says (batch_size=auto counts as one row a micro-batch), so the
gradient does not change its meaning: a micro-batch of 4 rows takes a quarter of the micro-batches. Larger ones use the
device better and need more recompute; which wins is predicted, by the roofline of the device that the plan is for.

    cfg = choose_batch(cfg, config, say)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedConfig

from ckpt.auto import Auto, BudgetTooSmall
from ckpt.simulate import Simulator
from recipes.config import Config
from recipes.device import choose_device
from recipes.planning import model_without_weights, strategy_of, target_device
from recipes.workload import workload_of


@dataclass(frozen=True)
class Tried:
    """One micro-batch. tokens_per_second: predicted. recompute_share: of the step's FLOPs."""

    batch_size: int
    grad_accum: int
    tokens_per_second: float
    recompute_share: float

    def __str__(self) -> str:
        return (
            f"{self.batch_size} x {self.grad_accum} micro-batches: {self.tokens_per_second:,.0f} tokens/s, "
            f"{self.recompute_share:.1%} of its FLOPs run again"
        )


def choose_batch(cfg: Config, config: PreTrainedConfig, say: Callable[[str], None]) -> Config:
    """Return the config with batch_size and grad_accum as numbers.

    Raises BudgetTooSmall if not even one row fits the budget; ValueError for a strategy without one.
    """
    if cfg.batch_size != "auto":
        return cfg
    strategy = strategy_of(cfg, target_device(cfg, choose_device(cfg.device)))
    if not isinstance(strategy, Auto):
        raise ValueError("batch_size=auto needs a budget: +strategy=auto strategy.budget_gib=..., or give a number.")
    tried: list[Tried] = []
    for rows in (n for n in range(1, cfg.grad_accum + 1) if cfg.grad_accum % n == 0):
        fixed = dataclasses.replace(cfg, batch_size=rows, grad_accum=cfg.grad_accum // rows)
        try:
            tried.append(predicted(fixed, config, strategy, say))
        except BudgetTooSmall:
            if not tried:
                raise
            break  # what does not fit with this many rows does not fit with more
        say(f"batch_size=auto: {tried[-1]}")
    best = max(tried, key=lambda t: t.tokens_per_second)
    say(f"batch_size=auto: {verdict(best, tried)}")
    return dataclasses.replace(cfg, batch_size=best.batch_size, grad_accum=best.grad_accum)


def predicted(cfg: Config, config: PreTrainedConfig, strategy: Auto, say: Callable[[str], None]) -> Tried:
    """Plan one micro-batch and predict its speed."""
    work = workload_of(cfg)
    simulator = Simulator(model_without_weights(cfg, config), work)
    frontier = strategy.frontier(simulator, work, say)
    plan = strategy.plan_from(frontier, work)
    ran = simulator.run(plan)
    seconds = strategy.device().seconds(ran.steady.rows) + plan.source["stall_cost"] * work.grad_accum
    share = ran.steady.flops(replayed_only=True) / max(1, ran.steady.flops())
    return Tried(cfg.batch_size, cfg.grad_accum, work.num_tokens / seconds, share)


def verdict(best: Tried, tried: list[Tried]) -> str:
    """Say what was chosen, and whether more recompute with a larger batch beats less with a smaller one, or not."""
    smaller = [t for t in tried if t.batch_size < best.batch_size and t.recompute_share < best.recompute_share]
    larger = [t for t in tried if t.batch_size > best.batch_size and t.recompute_share > best.recompute_share]
    said = f"{best.batch_size} rows a micro-batch, {best.grad_accum} micro-batches a step"
    if smaller:
        return f"{said}: more recompute with a larger batch beats less with {smaller[-1].batch_size} rows"
    if larger:
        return f"{said}: less recompute beats a larger batch, {larger[0].batch_size} rows"
    return said
