"""The probe: one real training step under the ledger and the FLOP counter, after warm-up (`measure_every` for more).

Owns when a step is measured and what is written of it: residents and peak in summary.json, memory.png, plan.json. The
step is part of training like any other, only slower, so the meter leaves its time out.

    probe = Probe(cfg, handle, model, optimizer, run, meter)
    with probe.measure(batches): ...                      # if probe.due(step)
    probe.record(step)                                    # writes files, when the clock has stopped
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ckpt.flops import FlopCounter
from ckpt.flops_attention import attention_layout
from ckpt.ledger import measure
from ckpt.plan import Plan
from recipes.config import Config
from recipes.meter import Meter, StepFlops, num_pairs
from recipes.picture import draw_memory
from recipes.profile import TRACE, profiled_step
from recipes.rundir import RunDir
from recipes.workload import workload_of

WARMUP_STEPS = 2
"""Steps before the first probe: optimizer state is made in the first, and CUDA's caches settle."""


class Probe:
    """Measures the steps that are due and records what it saw."""

    def __init__(
        self, cfg: Config, handle: Any, model: nn.Module, optimizer: Any, run: RunDir, meter: Meter, start: int = 0
    ):
        self.handle, self.model, self.optimizer = handle, model, optimizer
        self.run, self.meter = run, meter
        self.source = {
            "strategy": {"name": cfg.strategy.name, **cfg.strategy.fields},
            "model": cfg.model.name,
            "workload": workload_of(cfg).to_dict(),
        }
        self.first = min(start + WARMUP_STEPS + 1, cfg.steps)
        self.every = cfg.measure_every
        # The step after the probe, if there is one: a trace without the ledger's work in it.
        self.profiled = min(self.first + 1, cfg.steps) if cfg.profile and run.writes else 0
        if cfg.compile and meter.device.type == "cpu":
            self.first = 0
            run.console.say("memory is not measured: compiled code on a CPU allocates where no ledger can see it")

    def due(self, step: int) -> bool:
        """Tell whether `step` is to be measured."""
        return step == self.first or bool(self.first and self.every and step > self.first and step % self.every == 0)

    def profile(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Profile what runs inside if `profile=true` and `step` is the one for it: the step after the first probe."""
        if step != self.profiled:
            return contextlib.nullcontext()
        self.run.console.say(f"profiling step {step}: {TRACE} in {self.run.path}, for https://ui.perfetto.dev")
        return profiled_step(self.model, self.run.path, self.meter.device)

    @contextlib.contextmanager
    def measure(self, batches: list[dict[str, Any]]) -> Iterator[None]:
        """Measure what runs inside, and tell the meter."""
        before = self.handle.audit()
        with measure(self.model, self.optimizer, inputs=batches) as ledger, FlopCounter() as counter:
            yield
        self.ledger, self.step_flops = ledger, counter.total
        self.recompute_flops = self.handle.audit().flops_run_again - before.flops_run_again
        self.ops_run_before = sum(layer.ops_run_again for layer in before.layers)
        self.meter.flops = step_flops(counter, self.recompute_flops, batches)
        self.meter.peak_bytes = {
            "peak_allocated_bytes": ledger.peak_bytes,
            "peak_reserved_bytes": ledger.peak_reserved_bytes,
        }

    def record(self, step: int) -> None:
        """Write what the last measured step, `step`, told: summary, plan and picture, here and to the tracker."""
        run, layers = self.run, self.handle.audit().layers
        run.update(
            peak_bytes=self.ledger.peak_bytes,
            residents=self.ledger.residents,
            step_flops=self.step_flops,
            recompute_flops=self.recompute_flops,
            probe_step=step,
            ops={
                "kept": sum(layer.ops_kept for layer in layers),
                "run again": sum(layer.ops_run_again for layer in layers) - self.ops_run_before,
            },
        )
        if run.writes:
            plan = self.handle.plan()
            measured = {"measured_peak_bytes": self.ledger.peak_bytes, "measured_step_seconds": self.meter.mean_seconds}
            plan.source |= self.source | measured  # `auto` and loaded plans bring one: budget, what binds
            run.save_json("plan.json", plan.to_dict())
            run.tracker.table("plan", ("layers", "op", "decision"), plan_rows(plan))
            rows = beside(run.summary, self.meter.mean_seconds)
            run.tracker.table("planned_and_measured", ("what", "planned", "measured"), rows)
            draw_memory(self.ledger, run.path / "memory.png", predicted_peak_bytes=run.summary["predicted_peak_bytes"])
            run.tracker.picture("memory", run.path / "memory.png")


def plan_rows(plan: Plan) -> list[tuple[str, str, str]]:
    """List a plan as (layers, op, decision), equal layers together; a layer that keeps everything is one row."""
    rows = []
    for group in plan.to_dict()["layers"]:
        layers = ",".join(map(str, group["indices"]))
        if not group["replay"]:
            rows.append((layers, "all", "keep"))
        rows += [(layers, op, decision) for op, decision in group["decisions"].items()]
    return rows


def beside(summary: Mapping[str, Any], step_seconds: float | None) -> list[tuple[str, float | None, float | None]]:
    """List what was planned beside what was measured: (what, planned, measured), None where one is not known.

    step_seconds: mean of the steps before the probe that count; the run's own stands in its summary when it has ended.
    """
    return [
        ("peak_bytes", summary.get("predicted_peak_bytes"), summary.get("peak_bytes")),
        ("step_seconds", summary.get("predicted_step_seconds"), step_seconds),
    ]


def step_flops(counter: FlopCounter, recomputed: int, batches: list[dict[str, Any]]) -> StepFlops:
    """Split what a step ran into matmuls and fused attention, and into model and hardware FLOPs.

    A fused attention backward makes the scores again: one of its five matmuls, which is no model FLOP (value heads as
    wide as key heads; `ckpt/flops_attention.py`). Of the replayed FLOPs, `recomputed`, attention's part is what its
    forward ran beyond half of what its backward needed: two matmuls against four.
    """
    forward = sum(flops for op, flops in counter.by_op.items() if _is_attention(op) and not _is_backward(op))
    backward = sum(flops for op, flops in counter.by_op.items() if _is_attention(op) and _is_backward(op))
    needed = backward * 4 // 5
    replayed_attention = min(max(forward - needed // 2, 0), recomputed)
    matmul = counter.total - forward - backward
    return StepFlops(
        hardware_matmul=matmul,
        hardware_attention=forward + backward,
        model_matmul=matmul - (recomputed - replayed_attention),
        model_attention=forward - replayed_attention + needed,
        positions=sum(batch["input_ids"].numel() for batch in batches),
        pairs=sum(map(num_pairs, batches)),
    )


def _is_attention(op: str) -> bool:
    return attention_layout(op.replace(".", "::", 1)) is not None


def _is_backward(op: str) -> bool:
    return "backward" in op or "bwd" in op
