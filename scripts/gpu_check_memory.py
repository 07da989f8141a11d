"""Sections of the GPU check about what is exact and what fits: exact, packed, peaks, budgets, pool.

Each is a function of the `Check`; it notes findings as it goes, so that what ran before a failure stays.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

import ckpt
from ckpt import attention
from ckpt.attention import bounds
from ckpt.flops import FlopCounter
from ckpt.plan import Plan
from scripts.gpu_check_scale import STRATEGIES
from scripts.gpu_check_setup import Check, step_of

# bf16 has 8 bits of mantissa. Tiles add a sum's parts in another order, in bf16; the rest must not change a bit.
TILE_TOLERANCE = 2e-2
PEAK_TOLERANCE = 0.03


def exact(check: Check) -> None:
    """Loss and gradients of every strategy against `none`, bf16, flash attention, deterministic kernels: bitwise;
    with tiles norm(g - g0) / norm(g0) at most TILE_TOLERANCE. Without deterministic kernels the flash backward adds in
    any order: then no further from `none` than twice what `none` is from itself."""
    scale = check.scale
    model, ids = check.model(scale.exact_layers), check.tokens(scale.exact_tokens)
    with check.flash():
        for deterministic in (True, False):
            # Not warn_only: the flash backward would then stay as it is.
            torch.use_deterministic_algorithms(deterministic)
            try:
                _exact(check, model, ids, deterministic)
            except RuntimeError as error:
                if not (deterministic and "deterministic" in str(error)):
                    raise
                check.note("deterministic kernels", "for all ops", str(error).splitlines()[0][:120], False)
            finally:
                torch.use_deterministic_algorithms(False)
        with FlopCounter() as counter:
            step_of(model, ids)()
    kernels = sorted(op for op in counter.by_op if "attention" in op and "backward" not in op)
    check.note("attention kernel", "flash", ", ".join(kernels), all("flash" in op for op in kernels) and bool(kernels))


def _exact(check: Check, model: nn.Module, ids: torch.Tensor, deterministic: bool) -> None:
    handle = ckpt.apply(model, "none", loss="chunked")
    runs = [_gradients(model, ids) for _ in range(3)]
    handle.undo()
    noise = max(_distance(run, runs[0]) for run in runs[1:])
    kind = "deterministic" if deterministic else "as usual"
    asked = "0" if deterministic else "-"
    check.note(f"none twice, {kind}", asked, f"{noise:.1e}", noise == 0 if deterministic else None, error=noise)
    for name, (strategy, tiles) in STRATEGIES.items():
        check.heed_time()
        if name == "none":
            continue
        handle = ckpt.apply(model, strategy, loss="chunked", tile_mlp=tiles)
        # The first step records, the second replays from the record: both must be right.
        error = max(_distance(_gradients(model, ids), runs[0]) for _ in range(2))
        replays = sum(layer.replays for layer in handle.audit().layers)
        handle.undo()
        most = TILE_TOLERANCE if tiles > 1 else 2 * noise
        check.note(f"{name}, {kind}", f"<= {most:.1e}", f"{error:.1e}", error <= most and replays > 0, error=error)


def _gradients(model: nn.Module, ids: torch.Tensor) -> list[torch.Tensor]:
    loss = step_of(model, ids)()
    return [loss, *(p.grad.clone() for p in model.parameters())]


def _distance(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """Largest norm(g - g0) / norm(g0) over loss and gradients; infinite where something is not finite."""
    pairs = [(a.float(), b.float()) for a, b in zip(some, others, strict=True)]
    found = [((a - b).norm() / b.norm().clamp_min(1e-30)).item() for a, b in pairs]
    return max(found) if all(map(math.isfinite, found)) else math.inf


def packed(check: Check) -> None:
    """Documents packed in a row give the loss that they give in rows of their own, under `selective` too."""
    scale = check.scale
    model, length = check.model(scale.exact_layers), scale.packed_tokens
    cuts = [0, length // 8, length // 2, length]
    ids = check.tokens(length)
    documents = list(zip(cuts, cuts[1:], strict=False))
    with torch.no_grad():
        alone = sum(
            model(input_ids=ids[:, a:b], labels=ids[:, a:b], use_cache=False).loss.float() * (b - a - 1)
            for a, b in documents
        ) / sum(b - a - 1 for a, b in documents)
    labels = ids.clone()
    for start in cuts[1:-1]:
        labels[:, start] = -100  # the first token of a document is predicted by nothing
    edges = bounds.from_starts(cuts[:-1], 1, length).to(check.device)
    positions = torch.cat([torch.arange(b - a) for a, b in documents])[None].to(check.device)
    batch = {
        "input_ids": ids, "labels": labels, "position_ids": positions, "cu_seq_lens_q": edges, "cu_seq_lens_k": edges,
        "max_length_q": max(b - a for a, b in documents), "max_length_k": max(b - a for a, b in documents),
    }  # fmt: skip
    attention.prepare(model, "isolate")
    values = {}
    for name in ("none", "selective"):
        handle = ckpt.apply(model, STRATEGIES[name][0], loss="chunked")
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            with FlopCounter() as counter:
                loss = model(**batch, use_cache=False).loss
                loss.backward()
        values[name] = loss.detach(), [p.grad.clone() for p in model.parameters()]
        handle.undo()
    error = abs(values["none"][0].float() / alone - 1).item()
    kernels = sorted(op for op in counter.by_op if "attention" in op or "attn" in op or "varlen" in op)
    what = "loss of packed documents, over theirs alone"
    check.note(what, "<= 1e-02", f"{error:.1e}", error <= 1e-2, kernels=kernels)
    error = _distance(values["selective"][1], values["none"][1])
    check.note("gradients, selective over none", "<= 1e-02", f"{error:.1e}", error <= 1e-2, error=error)


def peaks(check: Check) -> None:
    """Predicted against measured peak of every strategy, at most 3% off. Of one step alone: the first one's."""
    scale, asked = check.scale, check.predictions()
    for at in scale.peaks:
        num_layers, seq_len, num_steps = at
        model, ids = check.model(num_layers), check.tokens(seq_len)
        for name, (strategy, tiles) in STRATEGIES.items():
            check.heed_time()
            what = f"{num_layers} layers, T={seq_len:,}, {name}"
            known = check.result(asked[at, name])[name]
            expected = known["peak_bytes" if num_steps > 1 else "first_step_peak_bytes"]
            if check.is_cuda and expected > 0.95 * torch.cuda.get_device_properties(0).total_memory:
                check.note(what, "-", f"predicted {_gib(expected)}, does not fit", None)
                continue
            measured = _measured_peak(check, model, ids, strategy, tiles, num_steps)
            error = expected / measured - 1
            check.note(
                what, f"<= {PEAK_TOLERANCE:.0%} off",
                f"measured {_gib(measured)}, predicted {_gib(expected)} ({error:+.2%})", abs(error) <= PEAK_TOLERANCE,
                measured_bytes=measured, predicted_bytes=expected, error=error,
            )  # fmt: skip
        del model
        check.free()


def _measured_peak(
    check: Check, model: nn.Module, ids: torch.Tensor, strategy: Any, tiles: int, num_steps: int = 2
) -> int:
    """Return the higher peak of the step that records and of those that replay."""
    check.free()
    handle = ckpt.apply(model, strategy, loss="chunked", tile_mlp=tiles)
    step = step_of(model, ids)
    try:
        with check.flash():
            return max(check.peak(model, step, inputs=(ids, ids.clone())) for _ in range(num_steps))
    finally:
        handle.undo()
        model.zero_grad(set_to_none=True)


def budgets(check: Check) -> None:
    """Auto's plans at budgets from the peak of `full` to that of keeping everything: measured peak within each."""
    scale = check.scale
    plans = check.result(check.plans())
    model, ids = check.model(scale.num_layers), check.tokens(scale.auto_tokens)
    for budget, plan in plans:
        check.heed_time()
        measured = _measured_peak(check, model, ids, Plan.from_dict(plan), 1)
        again = plan["source"]["recompute_flops"] / 1e12
        check.note(
            f"auto, budget {_gib(budget)}", "peak within it",
            f"{_gib(measured)} ({measured / budget:.1%}), recomputes {again:.2f} TFLOP",
            measured <= budget, measured_bytes=measured, budget_bytes=budget,
        )  # fmt: skip


def pool(check: Check) -> None:
    """Nothing grows from step to step, with offload and without: device memory reserved and held, host buffers."""
    scale = check.scale
    model, ids = check.model(scale.num_layers), check.tokens(scale.pool_tokens)
    for name in ("full", "offload"):
        check.heed_time()
        handle = ckpt.apply(model, STRATEGIES[name][0], loss="chunked")
        step, seen = step_of(model, ids), []
        with check.flash():
            for _ in range(scale.pool_steps):
                step()
                seen.append(_held(check, handle))
        handle.undo()
        growth = [last - first for first, last in zip(seen[2], seen[-1], strict=True)]
        got = ", ".join(f"{what} {bytes_:+,}" for what, bytes_ in zip(_HELD, growth, strict=True))
        check.note(f"{name}, bytes from step 3 to {scale.pool_steps}", "0", got, not any(growth))


_HELD = ("allocated", "reserved", "in host buffers")


def _held(check: Check, handle: ckpt.Applied) -> tuple[int, int, int]:
    check.wait()
    host = 0 if handle.store is None else sum(size * len(slots) for size, slots in handle.store._pool.items())
    if not check.is_cuda:
        return 0, 0, host
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved(), host


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3f} GiB"
