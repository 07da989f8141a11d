"""Axes of the report's figures: how they look, and how lengths and sizes are scaled and written on them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from recipes.report import palette

WIDTH, HEIGHT = 4.6, 3.3  # inches; the page shows them 330 to 640 CSS pixels wide
# Labels of a logarithmic axis, ever closer.
_DIGITS = ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7), (1, 1.2, 1.4, 1.6, 1.8, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9))


def new_axes(width: float = WIDTH, height: float = HEIGHT) -> tuple[Figure, Axes]:
    """Make a figure of one plot on a transparent ground, for either mode."""
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    axes.patch.set_alpha(0)
    axes.set_axisbelow(True)
    axes.grid(True, color=palette.LINE.light, linewidth=0.7)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(palette.FAINT.light)
    axes.tick_params(colors=palette.MUTED.light, labelcolor=palette.INK.light, labelsize=9, length=3)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(color=palette.MUTED.light, fontsize=9)
    return figure, axes


def scale_lengths(axes: Axes, lengths: Sequence[int]) -> None:
    """Put sequence lengths on the x axis, each doubling as wide as the next."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(_thin(lengths, 6)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: tokens(value)))
    axes.set_xlim(min(lengths) / 1.25, max(lengths) * 1.25)
    axes.set_xlabel("tokens a row")


def scale_values(axes: Axes, values: Sequence[float]) -> None:
    """Logarithmic where values span more than a factor of eight, else from zero."""
    if max(values) > 8 * min(values):
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 1.3, max(values) * 1.6)
        log_ticks(axes.yaxis, values)
    else:
        axes.set_ylim(0, 1.18 * max(values))
        axes.yaxis.set_major_locator(MaxNLocator(6))


def log_ticks(axis: Axis, values: Sequence[float]) -> None:
    """Label a logarithmic axis with round numbers around its values, three at least."""
    low, high = min(values) / 1.08, max(values) * 1.08
    powers = [10.0**power for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    inside: list[float] = []
    for digits in _DIGITS:
        steps = [digit * power for power in powers for digit in digits]
        inside = [step for step in steps if low <= step <= high]
        if len(inside) >= 3:
            break
    axis.set_major_locator(FixedLocator(_thin(inside, 7)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: figures(value)))


def _thin(values: Sequence[float], most: int) -> list[float]:
    step = -(-len(values) // most) if values else 1
    return list(values)[::-1][::step][::-1]


def tokens(value: float) -> str:
    """Write a number of tokens: 512, 8K, 1M."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if value >= size and value % size == 0:
            return f"{value / size:g}{unit}"
    return f"{value:,.0f}"


def figures(value: float) -> str:
    """Write a number in three figures."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def shortened(text: str, most: int) -> str:
    """Cut a text that is longer than `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"
