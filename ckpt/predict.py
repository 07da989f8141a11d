"""Know a step's peak before it is run: `predict`, and what it returns.

Owns the reading of simulated steps: which of the two steps peaks, what a device adds, how long it may take. The steps
themselves come from `ckpt/simulate.py`, devices from `ckpt/hardware.py`.

    pred = ckpt.predict(model_or_config, "selective", ckpt.Workload(seq_len=131072), hardware="h100")
    print(pred.peak_bytes, pred.residents, pred.fits, pred.step_seconds)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig

from ckpt import hardware as devices
from ckpt.engine.program import Program
from ckpt.hardware import Device
from ckpt.plan import Policy
from ckpt.simulate import Simulated, Simulator
from ckpt.timeline import PHASES, RESIDENTS, WORKSPACE, Timeline
from ckpt.trace import Mark, Trace
from ckpt.workload import Workload


class OpTotal(NamedTuple):
    """All calls of one op in a step: how many, FLOPs, bytes moved, estimated seconds, and the FLOPs run again."""

    calls: int
    flops: int
    num_bytes: int
    seconds: float
    replayed_flops: int


@dataclass(frozen=True)
class Prediction:
    """What one optimizer step on one rank is predicted to take.

    peak_bytes: most bytes alive at once, over the first step (which records layers) and the later ones. residents:
    their shares, in the order of RESIDENTS. timeline: the step that peaks, of at most two micro-batches. peak_phase:
    forward, backward or optimizer. step_flops: all FLOPs of a step, those run again included; recompute_flops: these.
    step_seconds: an estimate, None without hardware; exposed_seconds: its part that waits for other ranks;
    communication_seconds: of all collectives, hidden or not. sent_bytes: what the rank sends in a step. host_bytes:
    most bytes offloaded at once. device_bytes: what the hardware has for the step. device_only_bytes: share of the peak
    that only that device's kernels and allocator take.
    """

    peak_bytes: int
    residents: dict[str, int]
    timeline: Timeline
    recompute_flops: int
    step_flops: int
    step_seconds: float | None
    exposed_seconds: float | None
    communication_seconds: float | None
    sent_bytes: int
    host_bytes: int
    peak_phase: str
    first_step_peak_bytes: int
    strategy: str | None
    workload: Workload
    hardware: str | None
    device_bytes: int | None
    device_only_bytes: int
    num_layers: int
    num_layers_run: int
    assumptions: tuple[str, ...]
    policy: Policy | None = field(repr=False)
    layer_kinds: tuple[str, ...] = field(repr=False)
    by_op: Mapping[str, OpTotal] = field(repr=False)
    programs: Mapping[int, Program] = field(repr=False)
    marks: tuple[Mark, ...] = field(repr=False)

    @property
    def fits(self) -> bool | None:
        """Whether the step fits the device; None without hardware."""
        return None if self.device_bytes is None else self.peak_bytes <= self.device_bytes

    @property
    def margin_bytes(self) -> int | None:
        """Bytes left on the device at the peak, negative if it does not fit; None without hardware."""
        return None if self.device_bytes is None else self.device_bytes - self.peak_bytes

    @property
    def tokens_per_second(self) -> float | None:
        """An estimate, None without hardware."""
        return self.workload.num_tokens / self.step_seconds if self.step_seconds else None

    @property
    def recompute_share(self) -> float:
        """Share of the step's FLOPs that are run again."""
        return self.recompute_flops / self.step_flops if self.step_flops else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; the timeline is left out."""
        names = (
            "strategy", "peak_bytes", "residents", "peak_phase", "fits", "margin_bytes", "device_bytes",
            "device_only_bytes", "host_bytes", "first_step_peak_bytes", "step_flops", "recompute_flops",
            "recompute_share", "step_seconds", "exposed_seconds", "communication_seconds", "sent_bytes",
            "tokens_per_second", "hardware", "num_layers", "num_layers_run",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        return values | {"workload": self.workload.to_dict(), "assumptions": list(self.assumptions)}


def predict(
    model: nn.Module | PreTrainedConfig | Simulator,
    strategy: Any,
    work: Workload | None = None,
    hardware: str | Device | None = None,
    *,
    inputs: Mapping[str, Any] | None = None,
    workspaces: bool = True,
) -> Prediction:
    """Predict one optimizer step by running it on fake tensors.

    Args:
        model: a module (left as it is), a Transformers config, a model on meta, or a Simulator made of one with its
            workload.
        strategy: anything that `ckpt.apply` takes; None: the model as it is, its own checkpointing and loss included.
        work: shapes, dtype, optimizer, loss.
        hardware: a name in `ckpt.hardware.DEVICES`, "measure", or a Device; None: bytes that a CPU would hold, no
        times. inputs: keyword arguments of the forward, for models that need others than tokens and labels.
        workspaces: count what only a CUDA device allocates: kernel workspaces and the allocator's rounding.

    Raises:
        ValueError: an unknown strategy or hardware, a config that cannot be built, a forward that needs the values of
            tensors; the message names what is wrong.
    """
    device = None if hardware is None else as_device(hardware, getattr(work, "dtype", None))
    if isinstance(model, Simulator):
        if work is not None and work != model.work:
            raise ValueError(
                "predict got a Simulator and another workload than its own; make a Simulator for that workload"
            )
        simulator = model
    else:
        simulator = Simulator(model, Workload() if work is None else work, inputs=inputs)
    try:
        return read(simulator.run(strategy), simulator.work, device, workspaces=workspaces)
    finally:
        if simulator is not model:
            simulator.close()


def as_device(hardware: str | Device, dtype: str | None = None) -> Device:
    """Return the device that a name stands for; "measure" calibrates the one at hand for the workload's dtype."""
    if isinstance(hardware, Device):
        return hardware
    if hardware != "measure":
        return devices.find(hardware)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    return devices.measure_device(kind, torch.float32 if dtype == "fp32" else torch.bfloat16)


def read(ran: Simulated, work: Workload, device: Device | None = None, *, workspaces: bool = True) -> Prediction:
    """Turn simulated steps into a prediction, for a device."""
    on_device = device if workspaces else None
    totals = [_total(trace, on_device) for trace in (ran.first, ran.steady)]
    in_first = np.where(ran.first.before_optimizer, totals[0], 0)
    first_peak, steady_peak = int(in_first.max()), int(totals[1].max())
    trace, total = (ran.first, in_first) if first_peak > steady_peak else (ran.steady, totals[1])
    at = int(total.argmax())
    residents = dict(zip(RESIDENTS, map(int, trace.bytes[at]), strict=True))
    extra = int(total[at]) - int(trace.total[at])
    residents[RESIDENTS[WORKSPACE]] += extra
    timeline = trace.timeline
    rows = ran.steady.rows
    times = None if device is None else device.step_time(rows)
    return Prediction(
        peak_bytes=int(total[at]),
        residents=residents,
        timeline=timeline,
        recompute_flops=ran.steady.flops(replayed_only=True),
        step_flops=ran.steady.flops(),
        step_seconds=None if times is None else times.seconds,
        exposed_seconds=None if times is None else times.exposed,
        communication_seconds=None if times is None else times.communication,
        sent_bytes=sum(row.collective.sent_bytes * row.weight for row in rows if row.collective),
        host_bytes=ran.steady.host_bytes,
        peak_phase=PHASES[timeline.phase[at]],
        first_step_peak_bytes=first_peak,
        strategy=ran.policy_name,
        workload=work,
        hardware=None if device is None else device.name,
        device_bytes=None if device is None else device.usable_bytes,
        device_only_bytes=extra,
        num_layers=ran.num_layers,
        num_layers_run=ran.num_layers_run,
        assumptions=_assumptions(work, device, on_device),
        policy=ran.policy,
        layer_kinds=ran.layer_kinds,
        by_op=_by_op(rows, device),
        programs=ran.programs,
        marks=tuple(trace.marks),
    )


def _total(trace: Trace, device: Device | None) -> np.ndarray:
    """(N+1,) bytes alive, with what the device's allocator and kernels add."""
    if device is None or not device.is_cuda:
        return trace.total
    start = trace.total[0] + device.fixed_bytes()
    total = start + np.concatenate([[0], np.cumsum(device.rounded(trace.deltas).sum(axis=1))])
    for row in trace.rows:
        if scratch := device.scratch_bytes(row):
            at = min(row.position, len(total) - 1)
            total[at] = max(total[at], total[at] + scratch)
    return total


def _by_op(rows: Any, device: Device | None) -> dict[str, OpTotal]:
    found: dict[str, list[float]] = {}
    for row in rows:
        sums = found.setdefault(row.op, [0, 0, 0, 0.0, 0])
        sums[0] += row.weight
        sums[1] += row.flops * row.weight
        sums[2] += row.num_bytes * row.weight
        sums[3] += 0.0 if device is None else device.op_time(row) * row.weight
        sums[4] += row.flops * row.weight if row.is_replay else 0
    return {op: OpTotal(*sums) for op, sums in sorted(found.items(), key=lambda item: -item[1][1])}


def _assumptions(work: Workload, device: Device | None, on_device: Device | None) -> tuple[str, ...]:
    said = [f"tokens choose experts: {work.routing}"]
    if device is not None:
        how = "calibrated here" if device.is_measured else "from data sheets"
        said.append(f"times are roofline estimates for {device.name}, {how}")
    if device is not None and work.num_ranks > 1:
        said.append(device.links.describe(work.num_ranks))
    if device is not None and device.is_cuda:
        what = "included" if on_device is not None else "left out"
        said.append(f"cuBLAS workspaces, FlashAttention-2 backward buffers and the allocator's rounding are {what}")
    return tuple(said)
