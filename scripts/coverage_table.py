"""Write docs/coverage.md from the rows of docs/coverage.csv."""

from __future__ import annotations

import os
import platform
from collections import Counter, defaultdict
from collections.abc import Sequence

from coverage_rows import Row

MARKS = {"exact": "=", "close": "~", "refused": "refused"}
INTRO = """# Every causal LM of Transformers, under every strategy

{date}, torch {torch}, transformers {transformers}, Python {python}, {machine}. Made by `make coverage`
(`scripts/coverage.py`, {minutes:.1f} minutes on {workers} processes of one thread); all figures are in
[coverage.csv](coverage.csv).

Each of the {architectures} architectures of the causal-LM mapping is built tiny with random weights and takes three
training steps in fp32 on the CPU (other tokens on the second, another length on the third), plain and under each
strategy, once with dropout 0.1 and routing noise, once without, since attention takes another kernel then.

- `=`: loss and **every** gradient of every step are bitwise those of the plain model, the random state afterwards is
  the same, layers were really run again, the state dict is untouched, and `undo()` leaves no attribute, hook, config
  value or class changed.
- `~`: the same, gradients within a relative norm of 1e-6 (chunks and tiles sum in another order), or within twice what
  one unit in the last place of the weights changes them.
- `stock` is Transformers' own full checkpointing, for comparison; only its numbers are checked.
"""


def markdown(rows: Sequence[Row], seconds: float, workers: int) -> str:
    """Return the page. Counts are of architectures: one counts as exact only if it is so with and without dropout."""
    strategies = list(dict.fromkeys(row.strategy for row in rows))
    table: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        table[row.architecture][row.strategy].append(row)
    newest = max(rows, key=lambda row: row.date)
    parts = [
        INTRO.format(
            date=newest.date,
            torch=newest.torch,
            transformers=newest.transformers,
            python=platform.python_version(),
            machine=f"{platform.machine()}, {os.cpu_count()} cores",
            minutes=seconds / 60,
            workers=workers,
            architectures=len(table),
        ),
        "## Summary\n",
        _summary(table, strategies),
        "## Exceptions\n",
        _exceptions(rows),
        "## All architectures\n",
        _grid(table, strategies),
    ]
    return "\n".join(parts)


def _worst(rows: Sequence[Row]) -> str:
    """Return the status of an architecture under a strategy: the worse of its rows."""
    order = ["exact", "close", "refused"]
    return max((row.status for row in rows), key=lambda s: order.index(s) if s in order else len(order))


def _summary(table: dict[str, dict[str, list[Row]]], strategies: Sequence[str]) -> str:
    counts = {s: Counter(_worst(by[s]) for by in table.values() if s in by) for s in strategies}
    statuses = sorted({status for c in counts.values() for status in c}, key=lambda s: [*MARKS, s].index(s))
    lines = [_line("strategy", *statuses), _line(*["---"] * (len(statuses) + 1))]
    lines += [_line(f"`{s}`", *(counts[s][status] or "" for status in statuses)) for s in strategies]
    return "\n".join(lines) + "\n"


def _exceptions(rows: Sequence[Row]) -> str:
    """List what is neither exact nor close, rows of one cause together."""
    causes: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
    for row in rows:
        if row.status not in ("exact", "close"):
            causes[row.architecture, row.status, row.cause][row.strategy] = None
    if not causes:
        return "None.\n"
    lines = [_line("architecture", "strategies", "status", "cause"), _line(*["---"] * 4)]
    for (architecture, status, cause), strategies in causes.items():
        lines.append(_line(architecture, ", ".join(strategies), status, cause.replace("|", "\\|")))
    return "\n".join(lines) + "\n"


def _grid(table: dict[str, dict[str, list[Row]]], strategies: Sequence[str]) -> str:
    lines = [_line("architecture", "random", *strategies), _line(*["---"] * (len(strategies) + 2))]
    for architecture, by in table.items():
        random = "yes" if any(row.random for rows in by.values() for row in rows) else "no"
        marks = [MARKS.get(_worst(by[s]), f"**{_worst(by[s])}**") if s in by else "" for s in strategies]
        lines.append(_line(architecture, random, *marks))
    return "\n".join(lines) + "\n"


def _line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
