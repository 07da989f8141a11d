"""Check every causal LM of the installed transformers under every strategy: docs/coverage.csv and docs/coverage.md.

    python scripts/coverage.py                                    # everything
    python scripts/coverage.py --only gemma2,mixtral --strategies full,attention
    python scripts/coverage.py --resume                           # only what the CSV lacks for these versions

Each architecture runs in a process of its own, one torch thread, with a time limit. A process that dies or hangs costs
its own rows alone. Rows are appended to the CSV as they are made; a row replaces an older one of the same
architecture, strategy and dropout.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# this file's own folder must not be searched: libraries that try `import coverage` would find this script
sys.path[:] = [str(ROOT), str(ROOT / "tests"), *(p for p in sys.path if Path(p or ".").resolve() != ROOT / "scripts")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import coverage_rows  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import zoo  # noqa: E402
from coverage_checks import CHECKS, cells, check_all  # noqa: E402
from coverage_rows import Row  # noqa: E402

from scripts.coverage_table import markdown  # noqa: E402

CSV, TABLE = ROOT / "docs" / "coverage.csv", ROOT / "docs" / "coverage.md"
PRELOAD = ["torch", "transformers", "zoo", "coverage_checks"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is asked for; return 1 if a row is neither exact nor refused."""
    options = parse(argv)
    known = coverage_rows.read(options.csv)
    wanted = plan(options, known)
    for row in run(wanted, options.timeout, options.workers):
        known[row.key] = row
        coverage_rows.append(options.csv, row)
    coverage_rows.write(options.csv, known.values(), list(CHECKS))
    options.table.write_text(markdown(list(known.values()), len(zoo.names())))
    bad = [row for row in known.values() if not row.good]
    print(f"{len(known)} rows, {len(bad)} neither exact nor refused; see {options.table}")
    return 1 if bad else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=_listed(zoo.names()), default=zoo.names(), help="architectures, comma-separated")
    parser.add_argument("--strategies", type=_listed(list(CHECKS)), default=list(CHECKS), help=", ".join(CHECKS))
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one architecture (default 600)")
    parser.add_argument("--workers", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--resume", action="store_true", help="skip rows that the CSV has for these versions")
    parser.add_argument("--csv", type=Path, default=CSV)
    parser.add_argument("--table", type=Path, default=TABLE)
    return parser.parse_args(argv)


def _listed(allowed: list[str]):
    def split(text: str) -> list[str]:
        chosen = text.split(",")
        if unknown := [item for item in chosen if item not in allowed]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not among {', '.join(allowed)}")
        return chosen

    return split


def plan(options: argparse.Namespace, known: dict[tuple, Row]) -> dict[str, list[str]]:
    """Return architecture -> strategies to run."""
    if not options.resume:
        return dict.fromkeys(options.only, options.strategies)
    done = {row.key for row in known.values() if (row.torch, row.transformers) == versions() and row.good}
    wanted = {}
    for name in options.only:
        missing = [s for s in options.strategies if any((name, *cell) not in done for cell in cells([s]))]
        if missing:
            wanted[name] = missing
    return wanted


def versions() -> tuple[str, str]:
    """Return those that a row stands for: torch, transformers."""
    return torch.__version__, transformers.__version__


@dataclasses.dataclass
class Worker:
    """A process at work on one architecture."""

    architecture: str
    process: multiprocessing.process.BaseProcess
    rows: Connection
    deadline: float
    missing: list[tuple[str, float]]


def run(wanted: dict[str, list[str]], timeout: float, num_workers: int) -> Iterable[Row]:
    """Yield the rows of all architectures as they come, those of dead and late processes included."""
    context = multiprocessing.get_context("forkserver")  # imports torch once: a process then starts in milliseconds
    context.set_forkserver_preload(PRELOAD)
    queue, running, done = list(wanted.items()), [], 0
    while queue or running:
        while queue and len(running) < num_workers:
            running.append(start(context, *queue.pop(0), timeout))
        wait([worker.rows for worker in running], timeout=max(0.0, min(w.deadline for w in running) - time.monotonic()))
        for worker in list(running):
            rows, finished = collect(worker)
            yield from rows
            if finished:
                running.remove(worker)
                done += 1
                print(f"[{done:3d}/{len(wanted)}] {worker.architecture}", flush=True)


def start(context, architecture: str, strategies: list[str], timeout: float) -> Worker:
    """Start the process of one architecture."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(theirs, architecture, strategies), daemon=True)
    process.start()
    theirs.close()
    return Worker(architecture, process, ours, time.monotonic() + timeout, cells(strategies))


def work(rows: Connection, architecture: str, strategies: list[str]) -> None:
    """The process: send each row as soon as it is known."""
    torch.set_num_threads(1)
    for row in check_all(architecture, strategies):
        rows.send(row)
    rows.close()


def collect(worker: Worker) -> tuple[list[Row], bool]:
    """Take the rows that wait; if the process is over or late, say so for those that never came."""
    rows: list[Row] = []
    status = ""
    try:
        while worker.rows.poll():
            row = worker.rows.recv()
            worker.missing.remove((row.strategy, row.dropout))
            rows.append(row)
    except EOFError:
        worker.process.join()
        status = "crashed"
    if not status and time.monotonic() >= worker.deadline:
        worker.process.kill()
        worker.process.join()
        status = "timeout"
    if status:
        late = "the first such row was at work at the time limit"
        cause = late if status == "timeout" else f"exit code {worker.process.exitcode}"
        rows += [Row(worker.architecture, strategy, p, status, cause) for strategy, p in worker.missing]
    today, (torch_version, transformers_version) = datetime.date.today().isoformat(), versions()
    for row in rows:
        row.torch, row.transformers, row.date = torch_version, transformers_version, today
    return rows, bool(status)


if __name__ == "__main__":
    sys.exit(main())
