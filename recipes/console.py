"""What a run prints: lines, a progress bar while it trains, a table at the end. Plain lines where no terminal is.

With output=json the table becomes one JSON object on stdout, and all else goes to stderr.

    console = Console("table")
    with console.progress(total=100) as tick:
        tick(1, loss=5.9, tokens_per_second=2100.0)
    console.end(run.summary, run.path)
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

NUM_PLAIN_LINES = 10
RESIDENTS = ("parameters", "gradients", "optimizer_state", "activations", "workspace")
Tick = Callable[..., None]


class Console:
    """Prints on rank 0, and nothing elsewhere."""

    def __init__(self, output: str = "table", quiet: bool | None = None):
        quiet = int(os.environ.get("RANK", 0)) != 0 if quiet is None else quiet
        self.output = output
        self.rich = RichConsole(stderr=output == "json", quiet=quiet, highlight=False, soft_wrap=True)
        self.results = RichConsole(quiet=quiet, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """Print one line; above the bar while one is shown."""
        if text:
            self.rich.print(text, markup=False)

    @contextlib.contextmanager
    def progress(self, total: int, start: int = 0) -> Iterator[Tick]:
        """Show progress from step `start` to `total`; call the yielded `tick(step, loss=..., ...)` once a step.

        Off a terminal about ten plain lines are printed instead.
        """
        if not self.rich.is_terminal:
            every = max(1, (total - start) // NUM_PLAIN_LINES)

            def tick_plain(step: int, **shown: Any) -> None:
                if step == start + 1 or step == total or step % every == 0:
                    self.say(f"step {step}/{total}  {_shown(shown)}")

            yield tick_plain
            return
        columns = (
            TextColumn("training"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[shown]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.rich, transient=True) as bar:
            task = bar.add_task("training", total=total, completed=start, shown="")
            yield lambda step, **shown: bar.update(task, completed=step, shown=_shown(shown))

    def end(self, summary: Mapping[str, Any], path: Path) -> None:
        """Print how the run ended: residents, peaks, speed, what was kept and replayed, where the files are."""
        if self.output == "json":
            self.results.print(json.dumps({**summary, "path": str(path)}), markup=False)
            return
        table = Table(show_header=False, box=None, pad_edge=False)
        table.add_column(style="bold")
        table.add_column()
        for name, value in end_rows(summary, path):
            table.add_row(name, value)
        self.results.print(table)


def sweep_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print one line a job of a sweep."""
    table = Table("job", "status", "peak memory", "tokens/s", "loss", "seconds", box=None, pad_edge=False)
    for row in rows:
        cells = (
            mib(row["peak_bytes"]) if row["peak_bytes"] is not None else "",
            f"{row['tokens_per_second']:,.0f}" if row["tokens_per_second"] is not None else "",
            f"{row['final_loss']:.3f}" if row["final_loss"] is not None else "",
            f"{row['seconds']:.0f}",
        )
        table.add_row(row["name"], row["status"], *cells)
    RichConsole(highlight=False, soft_wrap=True).print(table)


def end_rows(summary: Mapping[str, Any], path: Path) -> list[tuple[str, str]]:
    """List the rows of the last table as (name, value); what was not measured has no row."""
    rows = [("status", summary["status"] + (f": {summary['error']}" if summary.get("error") else ""))]
    if summary.get("final_loss") is not None:
        first = summary.get("first_loss")
        rows.append(("loss", (f"{first:.3f} -> " if first is not None else "") + f"{summary['final_loss']:.3f}"))
    if summary.get("eval_loss") is not None:
        rows.append(("held-out loss", f"{summary['eval_loss']:.3f}"))
    if summary.get("tokens_per_second") is not None:
        rows.append(("speed", f"{summary['tokens_per_second']:,.0f} tokens/s"))
    if summary.get("step_seconds") is not None:
        foreseen = summary.get("predicted_step_seconds")  # a roofline: of a CPU, by rules of thumb
        roofline = f" (roofline estimate {foreseen:.3g} s)" if foreseen is not None else ""
        rows.append(("step", f"{summary['step_seconds']:.3g} s{roofline}"))
    peak, predicted = summary.get("peak_bytes"), summary.get("predicted_peak_bytes")
    if peak is not None:
        rows.append(("peak memory", mib(peak)))
    if predicted is not None:
        error = f" ({round((predicted - peak) / peak, 4) + 0.0:+.2%})" if peak else ""
        rows.append(("predicted peak", mib(predicted) + error))
    residents = summary.get("residents") or {}
    rows += [(f"  {name.replace('_', ' ')}", mib(residents[name])) for name in RESIDENTS if name in residents]
    if summary.get("ops"):
        rows.append(("ops", ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in summary["ops"].items())))
    if summary.get("recompute_flops") is not None and summary.get("step_flops"):
        rows.append(("recompute", f"{summary['recompute_flops'] / summary['step_flops']:.1%} of the step's FLOPs"))
    rows.append(("files", str(path)))
    return rows


def mib(num_bytes: float) -> str:
    """Write bytes as MiB or, from 10 GiB, as GiB."""
    return f"{num_bytes / 1024**3:,.2f} GiB" if num_bytes >= 10 * 1024**3 else f"{num_bytes / 1024**2:,.1f} MiB"


def _shown(values: Mapping[str, Any]) -> str:
    words = []
    for name, value in values.items():
        if name == "tokens_per_second":
            words.append(f"{value:,.0f} tokens/s")
        else:
            words.append(f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}")
    return "  ".join(words)
