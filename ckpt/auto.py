"""`Auto`: a budget in, the cheapest plan that fits out. The planning itself is in `ckpt/solver/`, imported when asked
for.

>>> plan = Auto(budget_gib=70).plan(model, work)        # doctest: +SKIP
>>> handle = ckpt.apply(model, plan)                    # doctest: +SKIP
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

if TYPE_CHECKING:
    from ckpt.hardware import Device
    from ckpt.plan import Plan
    from ckpt.solver.away import Room
    from ckpt.solver.candidate import Candidate
    from ckpt.solver.frontier import Frontier
    from ckpt.solver.price import Price
    from ckpt.workload import Workload

GIB = 2**30
OBJECTIVES = ("seconds", "flops")


class BudgetTooSmall(ValueError):
    """No plan fits the budget. smallest_bytes: the least budget that one fits."""

    def __init__(self, message: str, smallest_bytes: int = 0):
        super().__init__(message)
        self.smallest_bytes = smallest_bytes


@dataclass(frozen=True)
class Auto:
    """Least cost whose predicted peak fits a budget.

    budget_gib: all of the device's memory that a step may use, in GiB (1024**3 bytes); or budget_fraction of the
        device's memory (of `hardware`, or of the CUDA device at hand).
    host_budget_gib, disk_budget_gib: of the host's memory and of the disk that may hold offloaded tensors; 0: none.
    objective: "seconds" (roofline of `hardware`) or "flops" (what is computed twice).
    bitwise: True leaves loss and tiles as the workload has them, so that gradients are bitwise those of no
        checkpointing; False lets the plan chunk the loss and tile the MLP (gradients within 1e-6) where that pays.
    hardware: a name of the device table, or a Device, for `seconds`, links and `budget_fraction`; None: the CUDA device
        at hand, else an H100, which the plan's source and its line then say. Recipes give the device they train on.
    """

    budget_gib: float | None = None
    budget_fraction: float | None = None
    host_budget_gib: float = 0.0
    disk_budget_gib: float = 0.0
    objective: str = "seconds"
    bitwise: bool = False
    hardware: str | Device | None = None
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
            if value is not None and not (_is_number(value) and 0 < value <= most):
                raise ValueError(
                    f"auto: {key}={value!r} must be a number above 0" + (", at most 1" if most == 1.0 else "")
                )
        for key in ("host_budget_gib", "disk_budget_gib"):
            value = getattr(self, key)
            if not (_is_number(value) and value >= 0):
                raise ValueError(f"auto: {key}={value!r} must be a number, 0 (no offload there) or more")
        if not isinstance(self.bitwise, bool):
            raise ValueError(f"auto: bitwise={self.bitwise!r} must be true or false")
        if self.objective not in OBJECTIVES:
            raise ValueError(f"auto: objective={self.objective!r} is unknown; it is {' or '.join(OBJECTIVES)}")
        if isinstance(self.hardware, str):
            from ckpt.hardware import find

            find(self.hardware)

    def budget_bytes(self) -> int:
        """Return the budget in bytes. Raises ValueError if budget_fraction has no device to be a fraction of."""
        if self.budget_gib is not None:
            return int(self.budget_gib * GIB)
        return int(self.budget_fraction * self.device().usable_bytes)

    def plan(self, model, work: Workload, *, progress: Callable[[str], None] | None = None) -> Plan:
        """Plan for a model (a module, on meta too, or a config) and a workload.

        Raises:
            BudgetTooSmall: nothing fits; the message names the smallest budget that does, and what would lower it.
        """
        frontier = self.frontier(model, work, progress)
        return self.plan_from(frontier, work)

    def frontier(self, model, work: Workload, progress: Callable[[str], None] | None = None) -> Frontier:
        """Return what plans are taken from; it does not depend on the budget of the device's memory."""
        from ckpt.simulate import Simulator
        from ckpt.solver.frontier import Frontier

        simulator = model if isinstance(model, Simulator) else Simulator(model, work)
        if simulator.work != work:
            raise ValueError(
                "auto got a Simulator and another workload than its own; make a Simulator for that workload"
            )
        if progress is not None and self.objective == "seconds":
            progress(f"seconds are estimated for {self.device_said()}")
        return Frontier(simulator, self.price(), progress, rooms=self.rooms(), settings=not self.bitwise)

    def plan_from(self, frontier: Frontier, work: Workload) -> Plan:
        """Take the best plan under the budget from a frontier that was built before.

        The plan brings loss and tiles, the workload's too: with others it needs another budget."""
        budget = self.budget_bytes()
        best = frontier.best_within(budget)
        if best is None:
            raise infeasible(self, frontier, work)
        loss, tiles = frontier.loss_and_tiles(best)
        return dataclasses.replace(
            best.plan, loss=loss, tile_mlp=tiles, source=self.describe(frontier, best, work)
        )  # fmt: skip

    def describe(self, frontier: Frontier, best: Candidate, work: Workload) -> dict:
        """Return what a plan says of its making: budgets, prediction, what binds, where it would change."""
        budget = self.budget_bytes()
        cheaper = [] if best is frontier.keeps_all else frontier.candidates
        following = frontier.next_cheaper(best, budget) if cheaper else None
        return {
            "strategy": self.name,
            "objective": self.objective,
            "bitwise": self.bitwise,
            "device": self.device_said() if self.objective == "seconds" else None,
            "budget_bytes": budget,
            "host_budget_bytes": int(self.host_budget_gib * GIB),
            "disk_budget_bytes": int(self.disk_budget_gib * GIB),
            "chosen": best.said,
            "predicted_peak_bytes": best.peak_bytes,
            "predicted_offloaded_bytes": best.simulated.steady.host_bytes,
            "predicted_seconds": self.seconds_of(best, work) if self.objective == "seconds" else None,
            "recompute_flops": best.flops,
            "recompute_cost": best.cost,
            "stall_cost": best.stall,
            "binds": binds(frontier, best, budget),
            "next_budget_bytes": None if following is None else following.estimate,
            "workload": work.to_dict(),
        }

    def seconds_of(self, best: Candidate, work: Workload) -> float:
        """Return the seconds of a step under the plan, by the device's roofline, waiting for the link included."""
        return self.device().seconds(best.simulated.steady.rows) + best.stall * work.grad_accum

    def rooms(self) -> list[Room]:
        """Return where tensors may be offloaded to."""
        from ckpt.solver.away import DISK_BANDWIDTH, Room

        rooms = []
        if self.host_budget_gib:
            rooms.append(Room("host", int(self.host_budget_gib * GIB), self.device().link_bandwidth))
        if self.disk_budget_gib:
            rooms.append(Room("disk", int(self.disk_budget_gib * GIB), DISK_BANDWIDTH))
        return rooms

    def price(self) -> Price:
        """Return the price of running one op again: FLOPs, or seconds by the device's roofline."""
        from ckpt.solver.price import FlopsPrice, SecondsPrice

        return FlopsPrice() if self.objective == "flops" else SecondsPrice(self.device())

    def device(self) -> Device:
        """Return the device that is planned for: `hardware`, or the CUDA device at hand, else an H100."""
        from ckpt.hardware import Device, find, find_by_cuda_name

        if isinstance(self.hardware, Device):
            return self.hardware
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

    def device_said(self) -> str:
        """Name the device that is planned for, and say so where nobody named it and it is not at hand."""
        device = self.device()
        is_guess = self.hardware is None and not torch.cuda.is_available()
        return f"{device.name} (none was named: strategy.hardware)" if is_guess else device.name


def _is_number(value: Any) -> bool:
    """Whether a setting is a finite number that floats can hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def told(source: Mapping[str, Any]) -> str:
    """Say in one line, of a plan's source, what binds it and which budget would change it; "" for other plans."""
    if source.get("strategy") != "auto" or "binds" not in source:
        return ""
    budget, peak = (f"{source[name] / GIB:.4g} GiB" for name in ("budget_bytes", "predicted_peak_bytes"))
    following = source["next_budget_bytes"]
    change = "no larger budget changes it"
    if following is not None:
        change = f"the next plan needs {rounded_up(following / GIB)} GiB"
    priced = "FLOPs run again" if source["objective"] == "flops" else f"seconds of {source.get('device', 'h100')}"
    chosen = f" ({source['chosen']})" if source.get("chosen") else ""
    return f"plan within {budget}{chosen}: peak {peak}; {source['binds']} binds; {change}; least {priced}"


def binds(frontier: Frontier, best: Candidate, budget_bytes: int) -> str:
    """Say what keeps the plan from costing less: "nothing", "memory", "host memory" or "disk" (room for more offload),
    or "link" (waiting for what comes back costs more than all replays)."""
    if best.cost <= frontier.keeps_all.cost:
        return "nothing"
    if best.stall > best.cost / 2:
        return "link"
    for other in frontier.candidates:
        if other.cost >= best.cost:
            break
        room = other.space.room
        if other.estimate <= budget_bytes and other.away_bytes and other.away_bytes > room.budget_bytes:
            return "host memory" if room.target == "host" else "disk"
    return "memory"


def infeasible(auto: Auto, frontier: Frontier, work: Workload) -> BudgetTooSmall:
    """Say which budget would do, and what would lower it."""
    smallest = frontier.smallest()
    loss, tiles = frontier.loss_and_tiles(smallest)
    advice = ["raise strategy.budget_gib", "lower seq_len or batch_size"]
    if loss != "chunked":
        advice.append("use loss=chunked")
    if tiles == 1:
        advice.append("tile the MLP (tile_mlp=8)")
    if not auto.rooms():
        advice.append("allow offload (strategy.host_budget_gib=64)")
    needed = frontier.needed(smallest)
    tiled = "untiled" if tiles == 1 else f"in {tiles} tiles"
    return BudgetTooSmall(
        f"budget of {auto.budget_bytes() / GIB:.4g} GiB is below the smallest plan, {rounded_up(needed / GIB)} GiB "
        f"({smallest.label}, loss {loss}, MLP {tiled}). To fit: {'; '.join(advice)}.",
        needed,
    )


def rounded_up(gib: float, digits: int = 4) -> str:
    """Write a number of GiB so that, read as a budget, it is no less."""
    unit = 10.0 ** (math.floor(math.log10(gib)) - digits + 1)
    return f"{math.ceil(gib / unit) * unit:.{digits}g}"
