"""This library beside its peers, in one run: peak live bytes, executed FLOPs, step time, gradients.

    python scripts/bench.py                                  # everything; hours, and goes on where it was ended
    python scripts/bench.py --cases llama --only trl,auto*   # some of it; --redo measures cells again
    python scripts/bench.py --table --readme README.md       # only write the table, the picture, the README's part

First pass: bytes, FLOPs and gradients of every row, which are exact and repeat. Second: step times, paired, in rounds.
Third (--compile): the same model under torch.compile. Results: results/bench/CASE.json, docs/bench.md, docs/bench.png.
`auto` plans with objective=flops; its budget is the measured peak of the row it stands beside, with the same loss.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p or ".").resolve() != ROOT / "scripts")]

from recipes.allocator import keep_freed_memory  # noqa: E402

keep_freed_memory()  # before the first large tensor

import torch  # noqa: E402

from ckpt.plan import Plan  # noqa: E402
from scripts import bench_table  # noqa: E402
from scripts.bench_cases import CASES, QUICK, Case  # noqa: E402
from scripts.bench_compile import compile_points, compiler_problem  # noqa: E402
from scripts.bench_measure import Planner, Reference, measured, rounds  # noqa: E402
from scripts.bench_rows import Row, rows  # noqa: E402
from scripts.bench_store import Store, first_line, load, only_run, write  # noqa: E402


def main(argv: Sequence[str] | None = None) -> None:
    """Run the passes that are asked for, then write the table."""
    options = parse(argv)
    try:
        run(options)
    except ValueError as error:  # what was asked for does not go with the files that are there
        sys.exit(f"bench.py: {error}")


def run(options: argparse.Namespace) -> None:
    """Measure what is lacking, then write. Raises ValueError for files of another set-up, damaged, or in use."""
    torch.set_num_threads(1)
    cases = chosen_cases(options)
    if options.readme:  # hours before it is written
        bench_table.check_markers(options.readme.read_text())
    if not options.table:
        with only_run(options.out):
            measure(cases, options)
    found = load(options.out)
    page, picture = bench_table.markdown(found, options.markdown.with_suffix(".png").name), io.BytesIO()
    bench_table.draw(found, picture)
    files = {options.markdown: page.encode(), options.markdown.with_suffix(".png"): picture.getvalue()}
    if options.readme:
        files[options.readme] = bench_table.put_into_readme(options.readme.read_text(), found).encode()
    for path, content in files.items():
        write(path, content)
    print(f"wrote {options.markdown} and {options.markdown.with_suffix('.png')}")


def chosen_cases(options: argparse.Namespace) -> list[Case]:
    """Return the cases asked for."""
    return [QUICK] if options.quick else [CASES[name] for name in options.cases.split(",")]


def measure(cases: Sequence[Case], options: argparse.Namespace) -> None:
    """Run the passes that are asked for."""
    stores = {case.name: Store(options.out, case, options.fresh) for case in cases}
    for case in cases:
        measure_cells(case, stores[case.name], options)
    for case in cases:
        if not options.no_times:
            measure_times(case, stores[case.name], options)
        if options.compile:
            compile_points(case, stores[case.name], num_rounds=min(case.rounds, 5))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--only", default="*", help="patterns of row names, comma-separated")
    parser.add_argument("--redo", default="", help="patterns of row names to measure again, and to time anew")
    parser.add_argument("--no-times", action="store_true", help="bytes, FLOPs and gradients alone")
    parser.add_argument("--compile", action="store_true", help="also torch.compile (inductor; needs a C++ compiler)")
    parser.add_argument("--fresh", action="store_true", help="forget what was measured before")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--quick", action="store_true", help="one tiny case, for tests: its figures mean nothing")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "bench")
    parser.add_argument("--markdown", type=Path, default=ROOT / "docs" / "bench.md")
    parser.add_argument("--readme", type=Path, default=None, help="also put a short table between its markers")
    options = parser.parse_args(argv)
    if unknown := set(options.cases.split(",")) - set(CASES):
        parser.error(f"--cases {','.join(sorted(unknown))} is unknown; there are {', '.join(CASES)}")
    names = {name for case in chosen_cases(options) for name in (*case.same, *case.best)}
    for flag, patterns in (("--only", options.only), ("--redo", options.redo)):
        for pattern in filter(None, patterns.split(",")):
            if not any(matches(name, pattern) for name in names):
                parser.error(f"{flag} {pattern} fits no row of these cases; there are {', '.join(sorted(names))}")
    for path in (options.out, options.markdown.parent):  # before hours are spent
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"{path} cannot be written to: {error.strerror}")
        if not os.access(path, os.W_OK):
            parser.error(f"{path} cannot be written to")
    if options.readme and not options.readme.is_file():
        parser.error(f"--readme {options.readme}: there is no such file")
    if options.compile and not options.table and (problem := compiler_problem()):
        parser.error(f"--compile needs a C++ compiler: {problem}")
    return options


def wanted(case: Case, options: argparse.Namespace) -> dict[str, Row]:
    """The case's rows by key, "LOSSES: NAME", those that a budget is taken from before those that take it."""
    found = {}
    for losses, names in (("same", case.same), ("best", case.best)):
        made = rows(losses)
        asked = {name for name in names if matches(name, options.only)}
        asked |= {made[name].budget_of for name in asked}  # whose measured peaks are their budgets
        found |= {f"{losses}: {name}": made[name] for name in names if name in asked}
    return found


def matches(name: str, patterns: str) -> bool:
    """Whether a row's name fits one of the comma-separated patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split(","))


def measure_cells(case: Case, store: Store, options: argparse.Namespace) -> None:
    """Measure the rows that the store lacks."""
    reference, planner = Reference(case), Planner(case)
    for key, row in wanted(case, options).items():
        losses, start = key.split(":")[0], time.perf_counter()
        other = store.cells.get(f"{losses}: {row.budget_of}", {})
        no_peak = f"ValueError: {row.budget_of} has no peak to plan for"
        has_peak_now = "peak_bytes" in other and store.cells.get(key, {}).get("refused") == no_peak
        if key in store.cells and not matches(row.name, options.redo) and not has_peak_now:
            continue
        plan = None
        try:
            if row.budget_of is not None:
                if "peak_bytes" not in other:
                    raise ValueError(no_peak.partition(": ")[2])
                budget = int(other["peak_bytes"] * row.budget_share)
                plan = planner.plan(row, budget)
            # Where each side has its own loss, all are held against full logits: chunks reorder sums.
            cell = measured(case, row, rows(losses)["none"], reference, plan)
        except Exception as error:
            # No plan fits, or the row whose peak it needs has none, or a peer's policy breaks: here or at its import.
            if not isinstance(error, ValueError) and row.side != "peer":
                raise
            cell = {"refused": first_line(error)}
        cell |= {"what": row.what, "side": row.side, "source": row.source, "loss": row.loss, "tile_mlp": row.tile_mlp}
        if plan is not None:
            cell |= {"budget_bytes": budget, "plan": plan.to_dict()}
        store.cells[key] = cell
        store.rounds = [{k: s for k, s in seconds.items() if k != key} for seconds in store.rounds]
        store.save()
        say(case, key, cell, time.perf_counter() - start)


def say(case: Case, key: str, cell: dict, seconds: float) -> None:
    """Print one line of a cell."""
    if "refused" in cell:
        print(f"{case.name:>10} {key:<34} {cell['refused'][:150]}", flush=True)
        return
    error = f" ({cell['gradient_error']:.1e})" if cell["gradients"] == "differ" else ""
    print(
        f"{case.name:>10} {key:<34} {cell['peak_bytes'] / 2**20:9.1f} MiB {cell['flops'] / 1e9:10.2f} GFLOP  gradients "
        f"{cell['gradients']}{error}  {seconds:.0f} s",
        flush=True,
    )


def measure_times(case: Case, store: Store, options: argparse.Namespace) -> None:
    """Time the case's rows until each has `case.rounds` rounds; rounds that are there already stay."""
    every = wanted(case, options)
    chosen = {key: every[key] for key in case.timed if key in every and "peak_bytes" in store.cells.get(key, {})}
    lacking = {key: case.rounds - sum(key in seconds for seconds in store.rounds) for key in chosen}
    num_rounds = max(lacking.values(), default=0)
    if num_rounds <= 0:
        return
    plans = {key: Plan.from_dict(store.cells[key]["plan"]) if chosen[key].budget_of else None for key in chosen}
    for number, seconds in enumerate(rounds(case, {key: (chosen[key], plans[key]) for key in chosen}, num_rounds)):
        store.rounds.append(seconds)
        store.save()
        print(f"{case.name:>10} round {number + 1} of {num_rounds}: {sum(seconds.values()):.1f} CPU s", flush=True)


if __name__ == "__main__":
    main()
