"""What the GPU check knows before it measures: predictions, plans, longest contexts.

Run by processes without a device, while the device works; hence functions of plain values, by the scale's name.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ckpt.auto import GIB, Auto
from ckpt.hardware import find
from ckpt.predict import read
from ckpt.simulate import Simulator
from scripts.gpu_check_scale import SCALES, STRATEGIES

# The allocator rounds each tensor up to 512 bytes: room for 2,048 tensors at the peak.
ROUNDING_BYTES = 2**20


def without_device() -> None:
    """Make sure that a process leaves the device alone."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)


def predicted(scale_name: str, num_layers: int, seq_len: int, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Predict one length under some strategies, kernel workspaces of the device included."""
    scale = SCALES[scale_name]
    device = None if scale.hardware is None else find(scale.hardware)
    simulator = Simulator(scale.config(num_layers), scale.workload(seq_len))
    made = {}
    for name in names:
        strategy, tiles = STRATEGIES[name]
        prediction = read(simulator.run(strategy, tile_mlp=tiles), simulator.work, device)
        made[name] = prediction.to_dict()
    return made


def planned(scale_name: str, num_layers: int, seq_len: int, num_budgets: int) -> list[tuple[int, dict]]:
    """Plan for budgets from the peak of `full` to that of `none`, in equal steps.

    Return (budget in bytes, plan), the device's own in the budget but not in what is planned:
    cuBLAS workspaces, and the allocator's rounding.
    """
    scale = SCALES[scale_name]
    work = scale.workload(seq_len)
    extra = 0 if scale.hardware is None else find(scale.hardware).fixed_bytes() + ROUNDING_BYTES
    frontier = Auto(budget_gib=1.0, objective="flops", bitwise=True).frontier(scale.config(num_layers), work)
    least, most = frontier.full.peak_bytes, frontier.none.peak_bytes
    plans = []
    for k in range(num_budgets):
        budget = least + (most - least) * k // (num_budgets - 1)
        auto = Auto(budget_gib=budget / GIB, objective="flops", bitwise=True)
        plans.append((budget + extra, auto.plan_from(frontier, work).to_dict()))
    return plans


def longest(scale_name: str, budget_bytes: int, name: str, loss: str) -> int:
    """Return the longest context whose predicted peak fits, a multiple of `context_tokens`; peaks rise with length.

    name: of STRATEGIES, or "library": Transformers' own checkpointing of every layer, with full logits.
    """
    scale = SCALES[scale_name]
    device = None if scale.hardware is None else find(scale.hardware)
    strategy, tiles = STRATEGIES.get(name, (None, 1))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(scale.config(scale.num_layers), dtype=torch.bfloat16).train()
    if name == "library":
        model.activation_checkpointing_enable()

    def peak(times: int) -> int:
        simulator = Simulator(model, scale.workload(times * scale.context_tokens, loss))
        return read(simulator.run(strategy, tile_mlp=tiles), simulator.work, device).peak_bytes

    known = {times: peak(times) for times in (1, 2)}
    if known[1] > budget_bytes:
        raise ValueError(f"{name}: {scale.context_tokens} tokens do not fit {budget_bytes / GIB:.3g} GiB")
    while True:  # the peak is nearly a line, so a few guesses along it find the last multiple that fits
        fits = max(times for times, found in known.items() if found <= budget_bytes)
        if fits + 1 in known:
            return fits * scale.context_tokens
        low, high = sorted(known)[-2:] if fits == max(known) else (fits, min(t for t in known if t > fits))
        slope = (known[high] - known[low]) / (high - low)
        guess = fits + int((budget_bytes - known[fits]) / slope)
        guess = max(fits + 1, min(guess, 4 * fits if fits == max(known) else high - 1))
        known[guess] = peak(guess)
