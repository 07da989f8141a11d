"""`auto` against budgets and against what people set by hand: measured peaks, executed FLOPs, gradients. No clock.

    OMP_NUM_THREADS=1 python scripts/check_auto.py [--arch llama,qwen3,mixtral,qwen3_next,gemma2] [--tokens 1024,4096]
        [--budgets 10] [--layers 8] [--hidden 256]

For each model: ten budgets from the smallest plan's peak to `none`'s predicted peak, and the measured peak of every
baseline (`scripts/baselines.py`) as a budget. Objective flops, no offload, bitwise, the same loss and tiles for all.
Peaks are the higher of a recorded and a steady step, without optimizer; FLOPs are counted (matmuls, attention). Exit
code 1 if a promise is broken: a peak above its budget, FLOPs that rise with the budget or differ from `none`'s at its
peak, a gradient that is not bitwise `none`'s, or a baseline with fewer FLOPs at its own peak.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from baselines import BASELINES, VOCAB, build, config_of, step
from torch import nn

import ckpt
from ckpt.auto import Auto
from ckpt.flops import FlopCounter
from ckpt.ledger import measure
from ckpt.simulate import Simulator
from ckpt.solver.frontier import Frontier
from ckpt.workload import Workload
from recipes.allocator import keep_freed_memory

ARCHITECTURES = ("llama", "qwen3", "mixtral", "qwen3_next", "gemma2")
LONGEST = {"gemma2": 1024}  # its eager attention makes T x T scores
MIB = 2**20


@dataclass(frozen=True)
class Measured:
    """peak_bytes: the higher of a recorded and a steady step. flops: of the steady one. values: loss and gradients."""

    peak_bytes: int
    flops: int
    values: list[torch.Tensor | None] = field(repr=False)

    def equals(self, other: Measured) -> bool:
        """Whether loss and all gradients are bitwise equal."""
        return all(
            (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(self.values, other.values, strict=True)
        )


def run(
    model: nn.Module, ids: torch.Tensor, enable: Callable[[nn.Module], Callable[[], None]], steps: int = 2
) -> Measured:
    """Make steps under what `enable` puts in force."""
    labels = ids.clone()  # a tensor of their own, as in training data and in predictions
    undo = enable(model)
    try:
        peaks = []
        for _ in range(steps):
            model.zero_grad(set_to_none=True)
            gc.collect()
            with measure(model, inputs=(ids, labels)) as ledger, FlopCounter() as counter:
                loss = step(model, ids, labels)
            peaks.append(ledger.peak_bytes)
        values = [loss, *(None if p.grad is None else p.grad.clone() for p in model.parameters())]
    finally:
        undo()
        model.zero_grad(set_to_none=True)
    return Measured(max(peaks), counter.total, values)


def under(plan: Any) -> Callable[[nn.Module], Callable[[], None]]:
    """Return what puts a plan in force."""
    return lambda model: ckpt.apply(model, plan).undo


def check(arch: str, tokens: int, layers: int, hidden: int, num_budgets: int) -> list[str]:
    """Print the two tables of one model; return what went wrong."""
    config = config_of(arch, tokens, layers, hidden)
    work = Workload(batch_size=1, seq_len=tokens, dtype="fp32", optimizer=None, loss="full")
    start = time.process_time()
    frontier = Frontier(Simulator(config, work), Auto(budget_gib=1, objective="flops").price())
    smallest, largest = frontier.needed(frontier.smallest()), frontier.none.peak_bytes
    spent = time.process_time() - start
    model = build(config)
    torch.manual_seed(1)
    ids = torch.randint(0, VOCAB, (1, tokens))
    none = run(model, ids, under("none"))
    print(f"\n{arch}, {layers} layers, {tokens} tokens: {len(frontier.candidates)} plans in {spent:.0f} CPU s")
    print(f"none: {none.peak_bytes / MIB:.2f} MiB measured, {largest / MIB:.2f} predicted")
    wrong: list[str] = []

    ran_before: dict[int, Measured] = {}

    def run_plan(best: Any) -> Measured:
        if id(best) not in ran_before:
            ran_before[id(best)] = run(model, ids, under(best.plan))
        return ran_before[id(best)]

    def expect(holds: bool, what: str) -> str:
        if not holds:
            wrong.append(f"{arch}, {tokens} tokens, {what}")
        return "" if holds else what

    print("\n| budget MiB | peak MiB | predicted | FLOPs / none | bitwise | wrong |\n|---|---|---|---|---|---|")
    last = None
    for k in range(num_budgets):
        budget = smallest + (largest - smallest) * k // max(1, num_budgets - 1)
        best = frontier.best_within(budget)
        ran = run_plan(best)
        faults = [
            expect(ran.peak_bytes <= budget, f"budget {budget / MIB:.2f}: peak {ran.peak_bytes / MIB:.2f} above it"),
            expect(last is None or ran.flops <= last, f"budget {budget / MIB:.2f}: FLOPs rise"),
            expect(ran.equals(none), f"budget {budget / MIB:.2f}: not bitwise none's"),
            expect(k < num_budgets - 1 or ran.flops == none.flops, "recomputes at none's predicted peak"),
        ]
        last = ran.flops
        print(
            f"| {budget / MIB:.2f} | {ran.peak_bytes / MIB:.2f} | {best.peak_bytes / MIB:.2f} "
            f"| {ran.flops / none.flops:.4f} | {'yes' if ran.equals(none) else 'NO'} "
            f"| {'; '.join(filter(None, faults))} |",
            flush=True,
        )
    print("\n| baseline | its peak MiB | its FLOPs / none | auto's peak | auto's FLOPs / none | |")
    print("|---|---|---|---|---|---|")
    fewer, dear = 0, 0
    for name, enable in BASELINES.items():
        try:
            theirs = run(model, ids, enable, steps=2 if name.startswith("ours") else 1)
        except (RuntimeError, ValueError) as error:
            print(f"| {name} | does not run: {str(error).splitlines()[0][:80]} | | | | |", flush=True)
            continue
        remark = "" if theirs.equals(none) else "its gradients differ from none's"
        best = frontier.best_within(theirs.peak_bytes)
        if best is None:
            expect(False, f"{name}: nothing fits its peak")
            continue
        ran = run_plan(best)
        faults = [
            expect(ran.peak_bytes <= theirs.peak_bytes, f"{name}: auto's peak is above"),
            expect(ran.flops <= theirs.flops, f"{name}: auto executes more"),
        ]
        if theirs.flops > none.flops:
            dear += 1
            fewer += ran.flops < theirs.flops
        print(
            f"| {name} | {theirs.peak_bytes / MIB:.2f} | {theirs.flops / none.flops:.4f} | {ran.peak_bytes / MIB:.2f} "
            f"| {ran.flops / none.flops:.4f} | {'; '.join(filter(None, [remark, *faults]))} |",
            flush=True,
        )
    expect(2 * fewer >= dear, f"only {fewer} of {dear} baselines that recompute are beaten")
    print(f"\nstrictly fewer FLOPs than {fewer} of the {dear} baselines that execute more than none", flush=True)
    return wrong


def main() -> int:
    """Check all that is asked for and sum up."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default=",".join(ARCHITECTURES))
    parser.add_argument("--tokens", default="1024,4096")
    parser.add_argument("--budgets", type=int, default=10)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    wrong = []
    for arch in arguments.arch.split(","):
        for tokens in map(int, arguments.tokens.split(",")):
            if tokens <= LONGEST.get(arch, tokens):
                wrong += check(arch, tokens, arguments.layers, arguments.hidden, arguments.budgets)
    print("\nall promises kept" if not wrong else "\nBROKEN:\n" + "\n".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
