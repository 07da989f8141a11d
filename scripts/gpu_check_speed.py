"""Sections of the GPU check about time and length: offload, speed, context.

Each is a function of the `Check`; it notes findings as it goes, so that what ran before a failure stays.
"""

from __future__ import annotations

import statistics

import torch

import ckpt
from ckpt.flops import FlopCounter
from ckpt.plan import Plan
from recipes.meter import device_peak
from recipes.probe import step_flops
from scripts.gpu_check_scale import CONTEXT_SIDES, STRATEGIES
from scripts.gpu_check_setup import Check, step_of

# What is asked of offload: within 10% of `full`, where layers take long enough to hide the copies.
OFFLOAD_RATIO = 1.10


def offload(check: Check) -> None:
    """Step time with inputs offloaded to pinned host memory, over `full`; the share of it that compute waited."""
    scale = check.scale
    models = {name: check.model(scale.num_layers) for name in ("full", "offload")}
    handles = {name: ckpt.apply(model, STRATEGIES[name][0], loss="chunked") for name, model in models.items()}
    store = handles["offload"].store
    for seq_len in scale.offload_tokens:
        check.heed_time()
        ids = check.tokens(seq_len)
        steps = {name: step_of(model, ids) for name, model in models.items()}
        with check.flash():
            for step in steps.values():
                step()  # records
            stalled, moved = store.stall_seconds, store.moved_bytes
            seconds = check.paired(steps)
        ratio = statistics.median(a / b for a, b in zip(seconds["offload"], seconds["full"], strict=True))
        share = (store.stall_seconds - stalled) / sum(seconds["offload"])
        check.note(
            f"T={seq_len:,}, offload over full", f"<= {OFFLOAD_RATIO}",
            f"{ratio:.3f}, stalled {share:.1%} of the step, "
            f"{(store.moved_bytes - moved) / scale.repeats / 2**30:.3f} GiB moved out a step",
            ratio <= OFFLOAD_RATIO if check.is_cuda else None, ratio=ratio, stall_share=share, seconds=seconds,
        )  # fmt: skip


def speed(check: Check) -> None:
    """Tokens/s and MFU of `full` and of `auto`, beside the library's full recompute at the same memory and loss."""
    scale = check.scale
    seq_len = scale.auto_tokens
    ids = check.tokens(seq_len)
    # The library's peak with this loss is that of `full`, whose prediction is the lowest budget.
    _, plan = check.result(check.plans())[0]
    models = {"library, every layer": _library(check)}
    for name, strategy in {"none": "none", "full": "full", "auto at that memory": Plan.from_dict(plan)}.items():
        models[name] = check.model(scale.num_layers)
        ckpt.apply(models[name], strategy, loss="chunked")
    steps = {name: step_of(model, ids) for name, model in models.items()}
    peaks = {}
    # All four models stand on the device: a row's own peak is without the other three.
    others = 3 * sum(p.numel() * p.element_size() for p in models["none"].parameters()) if check.is_cuda else 0
    with check.flash():
        with FlopCounter() as counter:
            steps["none"]()
        models["none"].zero_grad(set_to_none=True)
        for name, step in steps.items():
            step()
            peaks[name] = check.peak(models[name], step, inputs=(ids, ids.clone())) - others
            models[name].zero_grad(set_to_none=True)
        seconds = check.paired(steps)
    most = device_peak(check.device, torch.bfloat16).flops
    # As in a run's metrics: the scores that a fused backward makes again are no model FLOPs.
    needed = step_flops(counter, 0, [{"input_ids": ids}])
    model_flops = needed.model_matmul + needed.model_attention
    for name, found in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(found, seconds["library, every layer"], strict=True))
        median = statistics.median(found)
        asked, ok = ("time < 1", ratio < 1) if name.startswith("auto") else ("-", None)
        check.note(
            f"T={seq_len:,}, {name}", asked,
            f"{seq_len / median:,.0f} tokens/s, MFU {model_flops / median / most:.1%}, {peaks[name] / 2**30:.2f} GiB,"
            f" {ratio:.3f} of the library's time",
            ok if check.is_cuda else None, seconds=found, peak_bytes=peaks[name], ratio=ratio,
            model_flops=model_flops,
        )  # fmt: skip


def _library(check: Check) -> torch.nn.Module:
    """The library's checkpointing of every layer, with the same loss as ours."""
    model = check.model(check.scale.num_layers)
    ckpt.apply(model, "none", loss="chunked")
    model.activation_checkpointing_enable()
    return model


def context(check: Check) -> None:
    """Longest context in a fixed memory: as predicted, then run there. Library: full recompute, full logits."""
    scale = check.scale
    asked, lengths = check.longest(), {}
    for name, loss in CONTEXT_SIDES.items():
        check.heed_time()
        lengths[name] = check.result(asked[name])
        model, ids = check.model(scale.num_layers), check.tokens(lengths[name])
        if name == "library":
            model.activation_checkpointing_enable()
        else:
            strategy, tiles = STRATEGIES[name]
            ckpt.apply(model, strategy, loss=loss, tile_mlp=tiles)
        check.free()
        with check.flash():
            measured = check.peak(model, step_of(model, ids), inputs=(ids, ids.clone()))
        check.note(
            f"{name}, in {scale.context_gib:g} GiB", "fits",
            f"{lengths[name]:,} tokens, {measured / 2**30:.3f} GiB, {lengths[name] / lengths['library']:.1f}x the "
            "library's",
            measured <= scale.context_gib * 2**30, tokens=lengths[name], measured_bytes=measured,
        )  # fmt: skip
        del model
        check.free()
