"""`Auto`: a budget in, the cheapest plan that fits out. The planning itself is in `ckpt/solver/`, imported when asked
for.

>>> plan = Auto(budget_gib=70).plan(model, work)        # doctest: +SKIP
>>> handle = ckpt.apply(model, plan)                    # doctest: +SKIP
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

if TYPE_CHECKING:
    from ckpt.hardware import Device
    from ckpt.plan import Plan
    from ckpt.solver.frontier import Frontier
    from ckpt.solver.inner import Price
    from ckpt.workload import Workload

GIB = 2**30
OBJECTIVES = ("seconds", "flops")


@dataclass(frozen=True)
class Auto:
    """Least cost whose predicted peak fits a budget.

    budget_gib: all of the device's memory that a step may use, in GiB (1024**3 bytes); or budget_fraction of the
        device's memory (of `hardware`, or of the CUDA device at hand).
    objective: "seconds" (roofline of `hardware`) or "flops" (what is computed twice).
    hardware: a name of the device table, for `seconds` and `budget_fraction`.
    """

    budget_gib: float | None = None
    budget_fraction: float | None = None
    objective: str = "seconds"
    hardware: str | None = None
    name: ClassVar[str] = "auto"

    def __post_init__(self):
        given = [v is not None for v in (self.budget_gib, self.budget_fraction)]
        if sum(given) != 1:
            raise ValueError(
                "auto: give strategy.budget_gib (GiB) or strategy.budget_fraction (of the device), one of both"
            )
        for key, value, most in (
            ("budget_gib", self.budget_gib, math.inf),
            ("budget_fraction", self.budget_fraction, 1.0),
        ):
            bad = isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value)
            if value is not None and (bad or not 0 < value <= most):
                raise ValueError(
                    f"auto: {key}={value!r} must be a number above 0" + (", at most 1" if most == 1.0 else "")
                )
        if self.objective not in OBJECTIVES:
            raise ValueError(f"auto: objective={self.objective!r} is unknown; it is {' or '.join(OBJECTIVES)}")

    def budget_bytes(self) -> int:
        """Return the budget in bytes. Raises ValueError if budget_fraction has no device to be a fraction of."""
        if self.budget_gib is not None:
            return int(self.budget_gib * GIB)
        return int(self.budget_fraction * self.device().usable_bytes)

    def plan(self, model, work: Workload, *, progress: Callable[[str], None] | None = None) -> Plan:
        """Plan for a model (a module, on meta too, or a config) and a workload.

        Raises:
            ValueError: nothing fits; the message names the smallest budget that does, and what would lower it.
        """
        from ckpt.simulate import Simulator
        from ckpt.solver.frontier import Frontier

        frontier = Frontier(Simulator(model, work), self.price(), progress)
        return self.plan_from(frontier, work)

    def plan_from(self, frontier: Frontier, work: Workload) -> Plan:
        """Take the best plan under the budget from a frontier that was built before."""
        budget = self.budget_bytes()
        best = frontier.best_within(budget)
        if best is None:
            raise ValueError(infeasible(self, frontier, work))
        following = frontier.next_cheaper(best)
        best.plan.source = {
            "strategy": self.name,
            "objective": self.objective,
            "budget_bytes": budget,
            "predicted_peak_bytes": best.peak_bytes,
            "recompute_flops": best.flops,
            "recompute_cost": best.cost,
            "binds": "nothing" if best.cost <= frontier.candidates[0].cost else "memory",
            "next_budget_bytes": None if following is None else following.estimate,
            "workload": work.to_dict(),
        }
        return best.plan

    def price(self) -> Price:
        """Return the price of running one op again: FLOPs, or seconds by the device's roofline."""
        from ckpt.solver.inner import flops_price, seconds_price

        return flops_price if self.objective == "flops" else seconds_price(self.device())

    def device(self) -> Device:
        """Return the device that is planned for: `hardware`, or the CUDA device at hand, else an H100."""
        from ckpt.hardware import find, find_by_cuda_name

        if self.hardware is not None:
            return find(self.hardware)
        if torch.cuda.is_available():
            index = torch.cuda.current_device()
            memory_bytes = torch.cuda.get_device_properties(index).total_memory
            found = find_by_cuda_name(torch.cuda.get_device_name(index), memory_bytes)
            if found is not None:
                return found
        if self.budget_fraction is not None:
            raise ValueError("auto: budget_fraction needs a device: set strategy.hardware, or give strategy.budget_gib")
        return find("h100")  # only ratios of its figures decide


def infeasible(auto: Auto, frontier: Frontier, work: Workload) -> str:
    """Say which budget would do, and what would lower it."""
    smallest = frontier.smallest()
    advice = ["raise strategy.budget_gib", "lower seq_len"]
    if work.loss != "chunked":
        advice.append("use loss=chunked")
    if work.tile_mlp == 1:
        advice.append("tile the MLP (tile_mlp=8)")
    advice.append("offload (+strategy=offload) or hold fewer inputs (+strategy=segments)")
    return (
        f"budget of {auto.budget_bytes() / GIB:.3g} GiB is below the smallest plan, {smallest.peak_bytes / GIB:.4g} "
        f"GiB ({smallest.label}, loss {work.loss}, MLP in {work.tile_mlp} tiles). To fit: {'; '.join(advice)}."
    )
