"""Write docs/coverage.md from the rows of docs/coverage.csv."""

from __future__ import annotations

import os
import platform
from collections import Counter, defaultdict
from collections.abc import Sequence

from coverage_rows import Row

MARKS = {"exact": "=", "close": "~", "refused": "refused"}
ALL = "Each of the {} architectures of the causal-LM mapping"
PARTIAL = "**{} of {} architectures have been run so far** (`make coverage ARGS=--resume` runs the rest). Each of them"
NO_PEAK = "no predicted peak: "
INTRO = """# Every causal LM of Transformers, under every strategy

{date}, torch {torch}, transformers {transformers}, Python {python}, {machine}. Made by `make coverage`
(`scripts/coverage.py`); all figures are in [coverage.csv](coverage.csv). All rows together took {cpu_minutes:.0f}
minutes of CPU time in processes of one thread: {per_core:.0f} minutes on two idle cores.

{which} is built tiny with random weights and takes three
training steps in fp32 on the CPU (other tokens on the second, another length on the third), plain and under each
strategy, once with dropout 0.1 and routing noise, once without, since attention takes another kernel then.

- `=`: loss and **every** gradient of every step are bitwise those of the plain model, the random state afterwards is
  the same, layers were really run again, the state dict is untouched, and `undo()` leaves no attribute, hook, config
  value or class changed.
- `~`: the same, gradients within a relative norm of 1e-6 (chunks and tiles sum in another order), or within twice what
  one unit in the last place of the weights changes them.
- `stock` is Transformers' own full checkpointing, for comparison; only its numbers are checked.
"""


def markdown(rows: Sequence[Row], total: int) -> str:
    """Return the page. total: how many architectures there are; those without a row have not been run yet.

    Counts are of architectures: one counts as exact only if it is so with and without dropout.
    """
    strategies = list(dict.fromkeys(row.strategy for row in rows))
    table: dict[str, dict[str, list[Row]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        table[row.architecture][row.strategy].append(row)
    newest = max(rows, key=lambda row: row.date)
    cpu_minutes = sum(row.cpu_seconds or 0.0 for row in rows) / 60
    parts = [
        INTRO.format(
            date=newest.date,
            torch=newest.torch,
            transformers=newest.transformers,
            python=platform.python_version(),
            machine=f"{platform.machine()}, {os.cpu_count()} cores",
            cpu_minutes=cpu_minutes,
            per_core=cpu_minutes / 2,
            which=ALL.format(total) if len(table) == total else PARTIAL.format(len(table), total),
        ),
        "## Summary\n",
        _summary(table, strategies),
        "## Exceptions\n",
        _exceptions(rows),
        "## Predicted peaks\n",
        _peaks(rows),
        "## Chunked loss\n",
        _chunked(rows),
        "## Tiled MLP\n",
        _tiled(rows),
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
    """List what is neither exact nor close, by cause."""
    causes: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
    for row in rows:
        if row.status not in ("exact", "close"):
            causes[row.strategy, row.status, row.cause][row.architecture] = None
    merged: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (strategy, status, cause), architectures in causes.items():
        merged[status, cause, ", ".join(architectures)].append(strategy)
    if not merged:
        return "None.\n"
    lines = [_line("status", "strategies", "cause", "architectures"), _line(*["---"] * 4)]
    for (status, cause, architectures), strategies in merged.items():
        lines.append(_line(status, ", ".join(strategies), cause.replace("|", "\\|"), architectures))
    return "\n".join(lines) + "\n"


def _peaks(rows: Sequence[Row]) -> str:
    """Say how many architectures are predicted within 1% under every strategy that is measured, and list the others."""
    errors: dict[str, dict[str, float]] = defaultdict(dict)
    missing: dict[str, str] = {}
    for row in rows:
        if row.peak_error is not None:
            errors[row.architecture][row.strategy] = row.peak_error
        elif NO_PEAK in row.note:
            missing[row.architecture] = row.note.split(NO_PEAK, 1)[1]
    within = [name for name, by in errors.items() if name not in missing and max(map(abs, by.values())) <= 0.01]
    measured = sorted({strategy for by in errors.values() for strategy in by})
    lines = [
        f"Forward and backward of 2 x 64 tokens in fp32, the higher of the first two steps, under "
        f"{', '.join(measured)}: {len(within)} of {len(errors.keys() | missing.keys())} architectures are predicted "
        f"within 1% under all of them, {sum(not any(by.values()) for by in errors.values())} to the byte.\n"
    ]
    others = [(name, ", ".join(f"{s} {e:+.2%}" for s, e in by.items() if abs(e) > 0.01)) for name, by in errors.items()]
    others = [(name, text) for name, text in others if text] + [(name, f"none: {why}") for name, why in missing.items()]
    if others:
        lines += [_line("architecture", "predicted over measured"), _line("---", "---"), *(_line(*o) for o in others)]
    return "\n".join(lines) + "\n"


def _chunked(rows: Sequence[Row]) -> str:
    """Say whose loss runs in chunks, and why others run with full logits."""
    notes = {row.architecture: row.note for row in rows if row.strategy == "chunked" and row.note}
    whole = {name: note.split(";")[0] for name, note in notes.items() if not note.startswith("chunked")}
    text = f"The loss runs in chunks in {len(notes) - len(whole)} architectures"
    text += "; the others are recognised and run whole:\n\n" if whole else ".\n"
    return text + "".join(f"- {name}: {why}\n" for name, why in whole.items())


def _tiled(rows: Sequence[Row]) -> str:
    """List whose MLPs run in tiles, and why others are refused."""
    tiled = {row.architecture: row.note.split(";")[0] for row in rows if row.strategy == "tiled" and not row.dropout}
    tiled = {name: note.removesuffix(" layers tiled") for name, note in tiled.items() if note.endswith(" layers tiled")}
    counts: dict[str, list[str]] = defaultdict(list)
    for name, count in tiled.items():
        counts[count].append(name)
    lines = [f"- {count} layers: {', '.join(names)}" for count, names in counts.items()]
    return f"{len(tiled)} architectures have MLPs that run in tiles:\n\n" + "\n".join(lines) + "\n"


def _grid(table: dict[str, dict[str, list[Row]]], strategies: Sequence[str]) -> str:
    lines = [_line("architecture", "random", *strategies), _line(*["---"] * (len(strategies) + 2))]
    for architecture, by in table.items():
        random = "yes" if any(row.random for rows in by.values() for row in rows) else "no"
        marks = [MARKS.get(_worst(by[s]), f"**{_worst(by[s])}**") if s in by else "" for s in strategies]
        lines.append(_line(architecture, random, *marks))
    return "\n".join(lines) + "\n"


def _line(*cells: object) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"
