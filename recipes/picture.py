"""`memory.png`: one step's memory over time, stacked by resident, with the predicted peak as a line.

Owns how a timeline looks. Knows no model and no run: it takes a ledger, a prediction or a timeline.

    draw_memory(ledger, run.path / "memory.png", predicted_peak_bytes=pred.peak_bytes)
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt.timeline import RESIDENTS, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# From the bottom: what stands through the step below what comes and goes. After Okabe and Ito's colours, which stay
# apart under the common colour deficiencies; neighbours differ in lightness too, for print.
STACK = {
    "parameters": "#0072B2",
    "optimizer_state": "#56B4E9",
    "gradients": "#009E73",
    "activations": "#F0C040",
    "workspace": "#D55E00",
}
MAX_POINTS = 4_000  # more than the picture has columns
_INK = "#333333"


def draw_memory(
    source: Any,
    path: str | Path,
    *,
    predicted_peak_bytes: int | None = None,
    title: str = "Memory of one training step",
) -> None:
    """Draw a step's timeline as a PNG.

    source: a Timeline, or anything with one as `.timeline` (a Ledger, a Prediction). Where it also has a `peak_bytes`
    above the timeline's own (a CUDA allocator's), that is drawn as a line of its own.
    Raises ValueError for a timeline without points.
    """
    from matplotlib.figure import Figure  # half a second that a run without pictures need not pay

    timeline: Timeline = getattr(source, "timeline", source)
    if not len(timeline):
        raise ValueError("the timeline has no points: nothing was measured. Draw a ledger whose context has closed.")
    peak = int(timeline.total.max())
    measured = max(int(getattr(source, "peak_bytes", peak)), peak)
    unit, size = unit_of(max(measured, predicted_peak_bytes or 0))

    figure = Figure(figsize=(10.0, 5.0), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    _draw_stack(axes, timeline.thin(MAX_POINTS), unit, size)
    _draw_phases(axes, timeline)
    _draw_away(axes, source, timeline.thin(MAX_POINTS), unit, size)
    _draw_lines(axes, timeline, measured, predicted_peak_bytes, unit, size)
    away = getattr(source, "full_host", None)
    top = max(measured, predicted_peak_bytes or 0, 1, 0 if away is None else int(away.max()))
    axes.set_ylim(0, 1.16 * top / size)
    axes.set_xlim(timeline.event[0], max(timeline.event[-1], timeline.event[0] + 1))
    axes.set_ylabel(f"live memory ({unit})", color=_INK)
    axes.set_xlabel("time, in allocations and frees since the step began", color=_INK)
    axes.set_title(title, loc="left", fontsize=13, color=_INK, pad=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_INK)
    axes.grid(axis="y", color="white", alpha=0.35, linewidth=0.6)
    figure.savefig(path, format="png", metadata={"Title": title})


def unit_of(num_bytes: int) -> tuple[str, int]:
    """Return the unit in which a number of bytes reads best, and its size: KiB, MiB or GiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if num_bytes >= size:
            return unit, size
    return "KiB", 2**10


def _draw_stack(axes: Axes, timeline: Timeline, unit: str, size: int) -> None:
    """Stack the residents, and list each with its share of the peak, in the order they lie."""
    columns = [timeline.bytes[:, RESIDENTS.index(name)] / size for name in STACK]
    at_peak = timeline.bytes[timeline.peak_index]
    total = max(int(at_peak.sum()), 1)
    labels = []
    for name in STACK:
        share = int(at_peak[RESIDENTS.index(name)])
        labels.append(f"{name.replace('_', ' ')}\n{share / size:,.1f} {unit} ({share / total:.0%})")
    areas = axes.stackplot(
        timeline.event, columns, colors=list(STACK.values()), labels=labels, step="post", linewidth=0
    )
    axes.legend(
        handles=areas[::-1],
        title="at the peak",
        alignment="left",
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        labelspacing=0.9,
        labelcolor=_INK,
        handlelength=1.2,
        handleheight=1.6,
    )


def _draw_away(axes: Axes, source: Any, timeline: Timeline, unit: str, size: int) -> None:
    """Draw what lies off the device as a line, for it is no part of the stack."""
    away = getattr(source, "full_host", None)
    if away is None or not away.max():
        return
    where = "disk" if getattr(source, "disk_bytes", 0) else "host"
    label = f"on the {where}, at most {int(away.max()) / size:,.1f} {unit}"
    line = away[timeline.event] / size
    axes.plot(timeline.event, line, color=_INK, linewidth=1.2, linestyle=":")
    axes.annotate(label, (timeline.event[line.argmax()], line.max()), color=_INK, fontsize=9, va="bottom")


def _draw_phases(axes: Axes, timeline: Timeline) -> None:
    """Mark where phases begin, and name those wide enough for their name."""
    first, last = int(timeline.event[0]), int(timeline.event[-1])
    above = axes.get_xaxis_transform()  # x in data, y in parts of the height
    for phase, start, end in timeline.spans():
        left, right = timeline.event[start], timeline.event[min(end + 1, len(timeline) - 1)]
        if start:
            # Faint below, where it would hide the loss's narrow peak.
            axes.axvline(left, ymin=0.91, color=_INK, linewidth=1.0)
            axes.axvline(left, ymax=0.91, color=_INK, linewidth=0.6, alpha=0.3, linestyle=(0, (2, 4)))
        if right - left > 0.07 * (last - first):
            axes.text((left + right) / 2, 0.985, phase, transform=above, ha="center", va="top", color=_INK, fontsize=11)


def _draw_lines(axes: Axes, timeline: Timeline, measured: int, predicted: int | None, unit: str, size: int) -> None:
    """Point at the peak; draw the predicted one, and an allocator's where it is above what storages account for."""
    at, peak = timeline.peak_index, int(timeline.total.max())
    first, last = timeline.event[0], timeline.event[-1]
    in_left_half = timeline.event[at] - first < (last - first) / 2
    axes.plot([timeline.event[at]], [peak / size], marker="o", markersize=5, color="black")
    axes.annotate(
        f"peak {peak / size:,.1f} {unit}",
        (timeline.event[at], peak / size),
        xytext=(8 if in_left_half else -8, 5),
        textcoords="offset points",
        ha="left" if in_left_half else "right",
        va="bottom",
        color="black",
        fontsize=10,
    )
    edge, side = (0.995, "right") if in_left_half else (0.005, "left")
    lines = []
    if measured > peak:
        lines.append((measured, ":", f"allocator's peak {measured / size:,.1f} {unit}"))
    if predicted is not None:
        off = (predicted - measured) / max(measured, 1)
        lines.append((predicted, "--", f"predicted {predicted / size:,.1f} {unit} ({off:+.1%})"))
    lines.sort()
    for i, (value, style, text) in enumerate(lines):
        axes.axhline(value / size, color="black", linestyle=style, linewidth=1.3)
        is_lower = i + 1 < len(lines)  # two lines may lie close: one name below, one above
        axes.annotate(
            text,
            (edge, value / size),
            xycoords=axes.get_yaxis_transform(),
            xytext=(0, -4 if is_lower else 4),
            textcoords="offset points",
            ha=side,
            va="top" if is_lower else "bottom",
            fontsize=10,
            color="black",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 0.8},
        )
