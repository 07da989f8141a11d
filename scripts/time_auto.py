"""Paired step times: `auto` (objective=seconds) beside checkpointing set by hand, at the same peak. Needs a quiet hour.

    OMP_NUM_THREADS=1 python scripts/time_auto.py [--arch llama] [--tokens 1024] [--layers 8] [--rounds 8]
        [--only "library*|attention kept"] [--out docs/time_auto.md]

For each baseline (`scripts/baselines.py`) the budget is the peak that its step was measured to take; `auto` plans with
`strategy.hardware=cpu`, bitwise. A round times both, one step each after an untimed one that records, who comes first
alternating; a ratio is taken within a round. Times are CPU seconds of one thread, which other work on the machine
disturbs less than the wall clock; malloc keeps freed memory (`recipes/allocator.py`). The last two rows stand against a
model with nothing applied: the plan that keeps everything, and the engine in every layer with every op kept.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p or ".").resolve() != ROOT / "scripts")]

import ckpt  # noqa: E402
from ckpt.auto import GIB, Auto  # noqa: E402
from ckpt.ledger import measure  # noqa: E402
from ckpt.workload import Workload  # noqa: E402
from recipes.allocator import keep_freed_memory  # noqa: E402
from scripts.baselines import BASELINES, VOCAB, Enable, build, config_of, ours, step  # noqa: E402
from scripts.bench_table import interval  # noqa: E402

MIB = 2**20
PLAIN = "`auto` keeps every layer"
KEEPS_ALL = "every op kept by the engine"


@dataclass(frozen=True)
class Pair:
    """Two ways to run a step at one peak. ratios: of CPU seconds, ours over theirs, a round each."""

    name: str
    their_peak: int
    our_peak: int
    ratios: tuple[float, ...]

    def row(self) -> str:
        """Return the table's line: geometric mean and 95% interval of the ratios."""
        low, mean, high = interval(list(self.ratios))
        said = "" if low <= 1 else "slower"
        peaks = f"{self.their_peak / MIB:.1f} | {self.our_peak / MIB:.1f}"
        return f"| {self.name} | {peaks} | {mean:.3f} | {low:.3f} to {high:.3f} | {said} |"


def peak_of(model: nn.Module, ids: torch.Tensor, enable: Enable) -> int:
    """Return the higher peak of a first and a second step, in bytes."""
    labels, peaks, undo = ids.clone(), [], enable(model)
    try:
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            gc.collect()
            with measure(model, inputs=(ids, labels)) as ledger:
                step(model, ids, labels)
            peaks.append(ledger.peak_bytes)
    finally:
        undo()
        model.zero_grad(set_to_none=True)
    return max(peaks)


def seconds(model: nn.Module, ids: torch.Tensor, enable: Enable) -> float:
    """Return the CPU seconds of a second step; the first records."""
    undo = enable(model)
    try:
        step(model, ids, ids)
        start = time.process_time()
        step(model, ids, ids)
        return time.process_time() - start
    finally:
        undo()
        model.zero_grad(set_to_none=True)


def ratios(model: nn.Module, ids: torch.Tensor, mine: Enable, theirs: Enable, rounds: int) -> tuple[float, ...]:
    """Time both in turn, and return mine over theirs, a round each."""
    found = []
    for k in range(rounds):
        first, second = (mine, theirs) if k % 2 else (theirs, mine)
        a, b = seconds(model, ids, first), seconds(model, ids, second)
        found.append(a / b if k % 2 else b / a)
    return tuple(found)


def pairs(arch: str, tokens: int, layers: int, hidden: int, rounds: int, only: str) -> Iterator[Pair]:
    """Yield the pairs of one model."""
    config = config_of(arch, tokens, layers, hidden)
    work = Workload(batch_size=1, seq_len=tokens, dtype="fp32", optimizer=None, loss="full")
    frontier = Auto(budget_gib=1, bitwise=True, hardware="cpu").frontier(config, work)
    model = build(config)
    torch.manual_seed(1)
    ids = torch.randint(0, VOCAB, (1, tokens))
    for name, theirs in BASELINES.items():
        if not any(fnmatch.fnmatch(name, pattern) for pattern in only.split("|")):
            continue
        try:
            budget = peak_of(model, ids, theirs)
        except (RuntimeError, ValueError) as error:
            print(f"{name} does not run: {str(error).splitlines()[0][:80]}", file=sys.stderr)
            continue
        plan = Auto(budget_gib=budget / GIB, bitwise=True, hardware="cpu").plan_from(frontier, work)
        mine = ours(plan)
        yield Pair(name, budget, peak_of(model, ids, mine), ratios(model, ids, mine, theirs, rounds))
    for name, strategy in ((PLAIN, frontier.keeps_all.plan), (KEEPS_ALL, ckpt.Selective("*"))):
        if any(fnmatch.fnmatch(name, pattern) for pattern in only.split("|")):
            mine = ours(strategy)
            peaks = peak_of(model, ids, plain), peak_of(model, ids, mine)
            yield Pair(f"nothing applied; {name}", *peaks, ratios(model, ids, mine, plain, rounds))


def plain(model: nn.Module):
    """Apply nothing."""
    return lambda: None


def table(arguments: argparse.Namespace) -> list[str]:
    """Measure, print row by row, and return the lines of the table."""
    size = f"{arguments.layers} layers, hidden {arguments.hidden}, {arguments.tokens:,} tokens"
    lines = [f"{arguments.arch}, {size}, fp32, {arguments.rounds} rounds", ""]
    lines += [
        "| baseline | its peak MiB | `auto`'s peak | `auto`'s time / its | 95% interval | |",
        "|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    for pair in pairs(*(getattr(arguments, n) for n in ("arch", "tokens", "layers", "hidden", "rounds", "only"))):
        lines.append(pair.row())
        print(lines[-1], flush=True)
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Measure what is asked for and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", default="llama")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--only", default="*", help="patterns of baselines' names, separated by |")
    parser.add_argument("--out", type=Path, default=None, help="file to write the table to")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    keep_freed_memory()
    lines = table(arguments)
    if arguments.out:
        arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
