"""The report as one HTML file that asks for nothing: styles, script, figures and every job's config are inside.

Owns the page's words and structure. Colours come from palette.py, figures from figures.py, behaviour from page.js.

    html = page(sweep, {"peak": "<svg ...>"}, command="python scripts/report.py runs/SWEEP")
"""

from __future__ import annotations

import html
import json
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path

from recipes.console import mib
from recipes.report import palette
from recipes.report.figures import undominated
from recipes.report.points import Point, Sweep

_HERE = Path(__file__).resolve().parent
# No network, whatever a config or an error message holds.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"

TITLES = {
    "grid": ("Which job fits", "Each cell is a job; a click shows its config."),
    "peak": ("Peak memory", "Most bytes alive at once in a training step, against the tokens of a row."),
    "speed": ("Speed", "Tokens a second over the steps that count: neither the first nor the measured one."),
    "front": (
        "Time against memory",
        "Lower left is better. Jobs that another of the same length beats in both are grey; lines join the rest.",
    ),
    "prediction": ("Prediction", "Predicted over measured peak. The band is 1% either way."),
    "residents": ("What the memory held", "Live bytes at the peak, by what they are."),
}
WIDE = ("grid", "residents")
HEADS = ("strategy", "tokens a row", "status", "peak", "predicted", "off by", "tokens/s", "run again", "loss",
         "on the front")  # fmt: skip


def page(sweep: Sweep, figures: Mapping[str, str], command: str) -> str:
    """Write the page. figures: SVG by name, in order; command: what makes this page again."""
    dark = f"{palette.css(dark=True)} color-scheme: dark;"
    facts = "".join(f"<li>{_text(name)} <b>{_text(value)}</b></li>" for name, value in sweep.facts.items())
    cards = "".join(_card(name, svg) for name, svg in figures.items())
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{_text(sweep.name)}</title>
<style>
:root {{ {palette.css(dark=False)} }}
@media (prefers-color-scheme: dark) {{ :root:not([data-mode="light"]) {{ {dark} }} }}
:root[data-mode="dark"] {{ {dark} }}
:root[data-mode="light"] {{ color-scheme: light; }}
{(_HERE / "page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<div class="top"><div><h1>{_text(sweep.name)}</h1>
<ul class="facts">{facts}</ul></div>
<button class="plain" id="mode" type="button">light / dark</button></div>
{"".join(f'<p class="notes">{_text(note)}</p>' for note in sweep.notes)}
<div class="tiles">{"".join(_tiles(sweep))}</div>
<div class="legend" role="group" aria-label="Show one strategy alone">{_legend(sweep)}</div>
<div class="charts">{cards}</div>
<h2 class="section">All jobs</h2>
<div class="tables">{_table(sweep)}</div>
<footer>{_text(_explained(command))}</footer>
<div id="tip" role="status"></div>
<dialog aria-label="One job"><header><h2></h2><button class="plain" type="button" autofocus>Close</button></header>
<div class="body"><dl></dl>Run it again<pre class="command"></pre>config.yaml<pre class="config"></pre></div></dialog>
<script type="application/json" id="jobs">{_json(sweep)}</script>
<script>
{(_HERE / "page.js").read_text(encoding="utf-8")}</script>
</body>
</html>
"""


def job_rows(point: Point) -> list[tuple[str, str]]:
    """List what is known of a job as (name, value in words)."""
    rows: list[tuple[str, str | None]] = [
        ("strategy", point.series),
        ("tokens a row", f"{point.seq_len:,}" if point.seq_len else None),
        ("status", point.status),
        ("error", point.error),
        ("peak memory", _bytes(point.peak_bytes)),
        ("predicted peak", _bytes(point.predicted_peak_bytes)),
        ("prediction off by", _percent(point.prediction_error)),
        ("speed", f"{point.tokens_per_second:,.1f} tokens/s" if point.tokens_per_second else None),
        ("FLOPs run again", f"{point.recompute_share:.1%}" if point.recompute_share is not None else None),
        ("loss", _loss(point)),
    ]
    rows += [(f"  {name.replace('_', ' ')}", mib(size)) for name, size in point.residents.items()]
    return [(name, value) for name, value in rows if value]


def _card(name: str, svg: str) -> str:
    title, words = TITLES[name]
    keys = ""
    if name == "residents":
        keys = "".join(
            f'<span><i style="background: var(--{colour.name})"></i>{resident.replace("_", " ")}</span>'
            for resident, colour in palette.STACK.items()
        )
        keys = f'<div class="swatches">{keys}</div>'
    wide = " wide" if name in WIDE else ""
    return (
        f'<figure class="card{wide}" id="chart-{name}"><h2>{title}</h2><p>{words}</p>{keys}'
        f'<div class="scroll">{svg}</div></figure>\n'
    )


def _tiles(sweep: Sweep) -> Iterator[str]:
    """The few figures that a reader asks for first."""
    ok = [point for point in sweep.points if point.status == "ok"]
    words = [f"{sum(p.status == status for p in sweep.points)} {status.replace('_', ' ')}"
             for status in dict.fromkeys(p.status for p in sweep.points) if status != "ok"]  # fmt: skip
    yield _tile("jobs that ended ok", f"{len(ok)} of {len(sweep.points)}", ", ".join(words))
    if long := [point for point in ok if point.seq_len]:
        most = max(point.seq_len for point in long)
        names = list(dict.fromkeys(point.series for point in long if point.seq_len == most))
        yield _tile("longest context that ran", f"{most:,}", _names(names))
    if small := [point for point in ok if point.peak_bytes and point.seq_len == max(sweep.lengths)]:
        least = min(small, key=lambda point: point.peak_bytes)
        yield _tile(f"least memory at {least.seq_len:,}", mib(least.peak_bytes), least.series)
    if timed := [point for point in ok if point.tokens_per_second and point.seq_len]:
        fastest = max(timed, key=lambda point: (point.seq_len, point.tokens_per_second))
        yield _tile(f"fastest at {fastest.seq_len:,}", f"{fastest.tokens_per_second:,.0f} tokens/s", fastest.series)
    if known := [point for point in ok if point.prediction_error is not None]:
        worst = max(known, key=lambda point: abs(point.prediction_error))
        under = f"of {len(known)}: {worst.series}, {worst.seq_len:,}"
        yield _tile("largest error of a predicted peak", _percent(worst.prediction_error), under)


def _tile(label: str, value: str, under: str) -> str:
    inner = f'<span class="label">{_text(label)}</span><b>{_text(value)}</b><span>{_text(under)}</span>'
    return f'<div class="tile">{inner}</div>'


def _legend(sweep: Sweep) -> str:
    return "".join(
        f'<button type="button" data-series="{number}" aria-pressed="false">{_symbol(number)}{_text(name)}</button>'
        for number, name in enumerate(sweep.series)
    )


def _symbol(number: int) -> str:
    colour = palette.series_colour(number).name
    return f'<i style="color: var(--{colour})" aria-hidden="true">{palette.series_symbol(number)}</i>'


def _table(sweep: Sweep) -> str:
    """Every job as a row; each cell holds the plain number of summary.json in data-value."""
    ran = [point for point in sweep.points if point.tokens_per_second and point.peak_bytes]
    best = {point.index for point in undominated(ran)}
    head = "".join(
        f'<th scope="col"{" class=text" if name == "status" else ""}><button type="button">{name}</button></th>'
        for name in HEADS
    )
    body = "".join(_row(point, sweep.series.index(point.series), point.index in best) for point in sweep.points)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(point: Point, number: int, is_best: bool) -> str:
    kind = {"ok": "", "predicted_oom": " skipped"}.get(point.status, " bad")
    name, loss = _text(point.series), point.number("final_loss")
    status = f'<span class="status{kind}">{_text(point.status.replace("_", " "))}</span>'
    cells = [
        f'<td data-value="{name}">{_symbol(number)}<button type="button">{name}</button></td>',
        _cell(point.seq_len, f"{point.seq_len:,}" if point.seq_len else ""),
        f'<td class="text" data-value="{_text(point.status)}">{status}</td>',
        _cell(point.peak_bytes, _bytes(point.peak_bytes)),
        _cell(point.predicted_peak_bytes, _bytes(point.predicted_peak_bytes)),
        _cell(point.prediction_error, _percent(point.prediction_error)),
        _cell(point.tokens_per_second, f"{point.tokens_per_second:,.0f}" if point.tokens_per_second else ""),
        _cell(point.recompute_share, f"{point.recompute_share:.1%}" if point.recompute_share is not None else ""),
        _cell(loss, "" if loss is None else f"{loss:.4f}"),
        _cell(1 if is_best else None, "yes" if is_best else ""),
    ]
    return f'<tr data-point="{point.index}" data-series="{number}">{"".join(cells)}</tr>'


def _cell(value: float | None, words: str | None) -> str:
    return f'<td data-value="{"" if value is None else value}">{_text(words or "")}</td>'


def _json(sweep: Sweep) -> str:
    """Everything that the script shows, as JSON that no text in it can end early."""
    jobs = [
        {
            "name": point.name,
            "series": str(sweep.series.index(point.series)),
            "tip": "\n".join(_tip(point)),
            "rows": job_rows(point),
            "command": f"python train.py {shlex.join(point.overrides)}",
            "config": point.config,
        }
        for point in sweep.points
    ]
    return json.dumps(jobs).replace("<", "\\u003c")


def _tip(point: Point) -> Iterator[str]:
    yield f"{point.series}, {point.seq_len:,} tokens" if point.seq_len else point.series
    if point.peak_bytes:
        yield f"peak {mib(point.peak_bytes)}"
    if point.prediction_error is not None:
        yield f"predicted {mib(point.predicted_peak_bytes)} ({_percent(point.prediction_error)})"
    if point.tokens_per_second:
        yield f"{point.tokens_per_second:,.0f} tokens/s"
    if point.status != "ok":
        yield point.status.replace("_", " ") + (f": {point.error}" if point.error else "")


def _explained(command: str) -> str:
    return (
        "Peak: live bytes of one probe step (on a GPU: what the allocator handed out). Run again: share of the step's "
        "FLOPs that are replays. Off by: predicted over measured peak, less one. On the front: no job of the same "
        f"length needs no more memory and is no slower. Made by: {command}"
    )


def _names(names: list[str]) -> str:
    return ", ".join(names) if len(names) <= 3 else f"{', '.join(names[:2])} and {len(names) - 2} more"


def _loss(point: Point) -> str | None:
    first, last = point.number("first_loss"), point.number("final_loss")
    return None if last is None else (f"{first:.4f} → " if first is not None else "") + f"{last:.4f}"


def _bytes(value: float | None) -> str | None:
    return mib(value) if value else None


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:+.2f}%"


def _text(value: str) -> str:
    return html.escape(str(value), quote=True)
