"""The report's figures, drawn with matplotlib: as SVG inside the page, as PNG beside it.

Owns what is drawn, and nothing of the page. Every mark that stands for a job carries the id `CHART--INDEX`, by which
the page finds its numbers and its config. matplotlib because it draws memory.png already, writes text as text and
shapes with ids, and leaves an SVG of some 30 KB a figure; an embedded plotly.js would be 4.7 MB, and would draw no PNG
without a browser.

    for name, figure in draw(sweep).items(): figure.savefig(f"{name}.png")
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from matplotlib.ticker import FuncFormatter

from recipes.picture import unit_of
from recipes.report import palette
from recipes.report.axes import WIDTH, figures, log_ticks, new_axes, scale_lengths, scale_values, shortened
from recipes.report.palette import series_colour, series_marker
from recipes.report.points import Point, Sweep

NOT_RUN = ("oom", "predicted_oom")
MIN_ROW, MAX_BARS = 0.24, 40


def draw(sweep: Sweep) -> dict[str, Figure]:
    """Draw every figure that the sweep has numbers for, by the name of its file."""
    makers: dict[str, Callable[[Sweep], Figure | None]] = {
        "grid": grid, "peak": peak, "speed": speed, "front": front, "prediction": prediction, "residents": residents,
    }  # fmt: skip
    drawn = {name: make(sweep) for name, make in makers.items()}
    return {name: figure for name, figure in drawn.items() if figure is not None}


def peak(sweep: Sweep) -> Figure | None:
    """Peak memory against sequence length; what ran out of memory stands at the upper edge."""
    ran = [point for point in sweep.points if point.peak_bytes and point.seq_len]
    if not ran:
        return None
    unit, size = unit_of(int(max(point.peak_bytes for point in ran)))
    figure, axes = new_axes()
    for number, series in enumerate(sweep.series):
        _line(axes, "peak", number, [(p.seq_len, p.peak_bytes / size, p) for p in sweep.of(series) if p in ran])
    scale_lengths(axes, sweep.lengths)
    scale_values(axes, [point.peak_bytes / size for point in ran])
    _mark_oom(axes, "peak", sweep)
    axes.set_ylabel(f"peak memory ({unit})")
    return figure


def speed(sweep: Sweep) -> Figure | None:
    """Tokens a second against sequence length."""
    ran = [point for point in sweep.points if point.tokens_per_second and point.seq_len]
    if not ran:
        return None
    figure, axes = new_axes()
    for number, series in enumerate(sweep.series):
        _line(axes, "speed", number, [(p.seq_len, p.tokens_per_second, p) for p in sweep.of(series) if p in ran])
    scale_lengths(axes, sweep.lengths)
    axes.set_ylim(0, 1.12 * max(point.tokens_per_second for point in ran))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_ylabel("tokens/s")
    return figure


def front(sweep: Sweep) -> Figure | None:
    """Time a token against peak memory: at each length a line through the jobs that no other beats in both."""
    ran = [point for point in sweep.points if point.tokens_per_second and point.peak_bytes]
    if not ran:
        return None
    unit, size = unit_of(int(max(point.peak_bytes for point in ran)))
    best = undominated(ran)
    figure, axes = new_axes()
    for length in sorted({point.seq_len or 0 for point in ran}):
        here = sorted((p for p in best if (p.seq_len or 0) == length), key=lambda p: p.peak_bytes)
        xs, ys = [p.peak_bytes / size for p in here], [_micros(p) for p in here]
        axes.plot(xs, ys, color=palette.FAINT.light, linewidth=1.2, zorder=1)
        axes.annotate(f"{length:,}", (xs[0], ys[0]), xytext=(-7, 0), textcoords="offset points", fontsize=8,
                      ha="right", va="center", color=palette.MUTED.light)  # fmt: skip
    for number, series in enumerate(sweep.series):
        for point in (point for point in sweep.of(series) if point in ran):
            colour = series_colour(number) if point in best else palette.FAINT
            _mark(axes, "front", point, point.peak_bytes / size, _micros(point), colour, series_marker(number))
    axes.set_xscale("log")
    axes.set_yscale("log")
    log_ticks(axes.xaxis, [point.peak_bytes / size for point in ran])
    log_ticks(axes.yaxis, [_micros(point) for point in ran])
    axes.margins(x=0.14, y=0.12)
    axes.set_xlabel(f"peak memory ({unit})")
    axes.set_ylabel("microseconds a token")
    return figure


def prediction(sweep: Sweep) -> Figure | None:
    """How far the predicted peak was from the measured one, in per cent; the band is what is promised on a CPU."""
    known = [point for point in sweep.points if point.prediction_error is not None]
    if not known:
        return None
    unit, size = unit_of(int(max(point.peak_bytes for point in known)))
    figure, axes = new_axes()
    axes.axhspan(-1, 1, color=palette.BAND.light, linewidth=0, zorder=0)
    axes.axhline(0, color=palette.FAINT.light, linewidth=1, zorder=1)
    for number, series in enumerate(sweep.series):
        for point in (point for point in sweep.of(series) if point in known):
            x, y = point.peak_bytes / size, 100 * point.prediction_error
            _mark(axes, "prediction", point, x, y, series_colour(number), series_marker(number))
    most = max(1.5, 1.15 * max(abs(100 * point.prediction_error) for point in known))
    axes.set_ylim(-most, most)
    axes.set_xscale("log")
    log_ticks(axes.xaxis, [point.peak_bytes / size for point in known])
    axes.margins(x=0.08)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}%" if value else "0"))
    axes.set_xlabel(f"measured peak ({unit})")
    axes.set_ylabel("predicted peak, off by")
    return figure


def residents(sweep: Sweep) -> Figure | None:
    """What the peak consisted of, one bar a job, by sequence length."""
    known = [point for length in sweep.lengths for point in sweep.points if point.seq_len == length and point.residents]
    known = known[-MAX_BARS:]
    if not known:
        return None
    unit, size = unit_of(int(max(sum(point.residents.values()) for point in known)))
    lengths = list(dict.fromkeys(point.seq_len for point in known))
    rows = [index + 1.1 * (lengths.index(point.seq_len) + 1) for index, point in enumerate(known)]
    figure, axes = new_axes(width=5.6, height=0.8 + MIN_ROW * rows[-1])
    for row, point in zip(rows, known, strict=True):
        left = 0.0
        for resident, colour in palette.STACK.items():
            width = point.residents.get(resident, 0) / size
            (bar,) = axes.barh(row, width, left=left, height=0.74, color=colour.light, linewidth=0)
            bar.set_gid(f"residents--{point.index}--{resident}")
            left += width
    for length in lengths:
        first = min(row for row, point in zip(rows, known, strict=True) if point.seq_len == length)
        axes.annotate(f"{length:,} tokens", (0, first - 0.95), xytext=(2, 0), textcoords="offset points", fontsize=8.5,
                      fontweight="bold", va="center", color=palette.MUTED.light)  # fmt: skip
    axes.set_yticks(rows, [shortened(point.series, 24) for point in known], fontsize=8.5)
    axes.set_ylim(rows[-1] + 0.6, -0.3)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(f"live memory at the peak ({unit})")
    axes.spines["left"].set_visible(False)
    return figure


def grid(sweep: Sweep) -> Figure | None:
    """Strategy by sequence length: the peak in each cell, and what became of jobs that have none."""
    lengths, series = sweep.lengths, sweep.series
    if not lengths:
        return None
    ran = [point.peak_bytes for point in sweep.points if point.peak_bytes]
    unit, size = unit_of(int(max(ran, default=1)))
    width = max(WIDTH, 1.7 + 0.85 * len(lengths))
    figure, axes = new_axes(width=width, height=0.55 + 0.46 * len(series))
    axes.grid(False)
    for row, name in enumerate(series):
        for point in sweep.of(name):
            if point.seq_len:
                _cell(axes, point, lengths.index(point.seq_len), row, ran, size)
    axes.set_xlim(-0.5, len(lengths) - 0.5)
    axes.set_ylim(len(series) - 0.5, -0.5)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(series)), [shortened(name, 24) for name in series])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.annotate(f"peak memory in {unit}, by tokens a row", (1, 0), xytext=(0, -6), xycoords="axes fraction",
                  textcoords="offset points", ha="right", va="top", fontsize=8, color=palette.MUTED.light)  # fmt: skip
    return figure


def undominated(points: Sequence[Point]) -> list[Point]:
    """Leave out every point that another of its length beats: no more memory and no less speed, and better in one."""

    def beats(a: Point, b: Point) -> bool:
        as_good = a.peak_bytes <= b.peak_bytes and a.tokens_per_second >= b.tokens_per_second
        return as_good and (a.peak_bytes, a.tokens_per_second) != (b.peak_bytes, b.tokens_per_second)

    return [b for b in points if not any(beats(a, b) for a in points if a.seq_len == b.seq_len)]


def add_legend(figure: Figure, sweep: Sweep, of_residents: bool = False) -> None:
    """Put a legend above a figure, for the PNG; the page has one of its own."""
    from matplotlib.lines import Line2D

    if of_residents:
        names = [(name.replace("_", " "), colour.light, "s") for name, colour in palette.STACK.items()]
    else:
        names = [(name, series_colour(n).light, series_marker(n)) for n, name in enumerate(sweep.series)]
    handles = [Line2D([], [], color=c, marker=m, linestyle="", label=shortened(name, 30)) for name, c, m in names]
    figure.legend(handles=handles, loc="outside upper left", ncols=3, fontsize=8, frameon=False, handletextpad=0.2,
                  labelcolor=palette.INK.light, columnspacing=1.0)  # fmt: skip


def _line(axes: Axes, chart: str, number: int, found: Sequence[tuple[float, float, Point]]) -> None:
    (line,) = axes.plot([x for x, _, _ in found], [y for _, y, _ in found], color=series_colour(number).light,
                        linewidth=1.6, solid_joinstyle="round", zorder=2)  # fmt: skip
    line.set_gid(f"{chart}--line--{number}")
    for x, y, point in found:
        _mark(axes, chart, point, x, y, series_colour(number), series_marker(number))


def _mark(axes: Axes, chart: str, point: Point, x: float, y: float, colour: palette.Colour, marker: str) -> None:
    (mark,) = axes.plot([x], [y], marker=marker, markersize=6.5, color=colour.light, markeredgewidth=0.9, linestyle="",
                        markeredgecolor=palette.PAPER.light, clip_on=False, zorder=3)  # fmt: skip
    mark.set_gid(f"{chart}--{point.index}")


def _mark_oom(axes: Axes, chart: str, sweep: Sweep) -> None:
    """Cross every job that ran out of memory, or was predicted to, at the upper edge, side by side at one length."""
    top = axes.get_ylim()[1]
    seen: dict[int, int] = {}
    for number, series in enumerate(sweep.series):
        for point in (p for p in sweep.of(series) if p.status in NOT_RUN and p.seq_len and not p.peak_bytes):
            shift = seen[point.seq_len] = seen.get(point.seq_len, -1) + 1
            (mark,) = axes.plot([point.seq_len * 1.13**-shift], [top], marker="x", markersize=6.5, markeredgewidth=1.8,
                                color=series_colour(number).light, linestyle="", clip_on=False, zorder=3)  # fmt: skip
            mark.set_gid(f"{chart}--{point.index}")
    if seen:
        axes.annotate("x  out of memory", (0.0, 1.0), xytext=(4, -4), xycoords="axes fraction", va="top", fontsize=8,
                      textcoords="offset points", color=palette.MUTED.light)  # fmt: skip


def _cell(axes: Axes, point: Point, column: int, row: int, ran: Sequence[float], size: int) -> None:
    if point.peak_bytes:
        low, high = math.log(min(ran)), math.log(max(ran))
        step = int(4.999 * (math.log(point.peak_bytes) - low) / (high - low)) if high > low else 0
        fill, ink = palette.HEAT[step], palette.ON_HEAT if step >= 3 else palette.INK
        text = figures(point.peak_bytes / size)
    else:
        skipped = point.status == "predicted_oom"
        fill = palette.SKIPPED_PAPER if skipped else palette.BAD_PAPER
        ink = palette.MUTED if skipped else palette.BAD
        text = {"oom": "OOM", "predicted_oom": "OOM\nforeseen"}.get(point.status, point.status)
    box = FancyBboxPatch((column - 0.46, row - 0.42), 0.92, 0.84, boxstyle="round,pad=0,rounding_size=0.09",
                         facecolor=fill.light, edgecolor="none", mutation_aspect=2)  # fmt: skip
    box.set_gid(f"grid--{point.index}")
    axes.add_patch(box)
    axes.text(column, row, text, ha="center", va="center_baseline" if "\n" not in text else "center",
              fontsize=9.5 if "\n" not in text else 7.5, linespacing=1.0, color=ink.light,
              gid=f"grid-text--{point.index}")  # fmt: skip


def _micros(point: Point) -> float:
    return 1e6 / point.tokens_per_second
