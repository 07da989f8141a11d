"""Colours of the report, each with a light and a dark form, and the marker that goes with a series.

Figures are drawn in the light colours; in the page each becomes a CSS variable, so that one drawing serves both modes.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ckpt.timeline import RESIDENTS


class Colour(NamedTuple):
    """One colour: the name of its CSS variable, and its two forms."""

    name: str
    light: str
    dark: str


# Every light form must differ: the page finds colours by it. Figures are transparent where the page shows through.
INK = Colour("ink", "#1b2430", "#e8ecf1")
MUTED = Colour("muted", "#5d6875", "#9aa6b4")
LINE = Colour("line", "#dfe4ea", "#2d3642")
FAINT = Colour("faint", "#b9c2cc", "#4d5866")
PAPER = Colour("paper", "#fefefe", "#151b23")
BAND = Colour("band", "#e9f3ee", "#1b2f29")
BAD = Colour("bad", "#c03434", "#ff8a80")
BAD_PAPER = Colour("bad-paper", "#fbebea", "#3a1f20")
SKIPPED_PAPER = Colour("skipped-paper", "#f1f3f6", "#212934")
ON_HEAT = Colour("on-heat", "#fffffe", "#0f141a")

# Apart in hue and lightness, with markers besides; each has a contrast of 3 and more on its background.
SERIES = (
    Colour("s0", "#2b6cb0", "#6cb2f5"),
    Colour("s1", "#c05621", "#f6a25f"),
    Colour("s2", "#00786a", "#3fd0b6"),
    Colour("s3", "#97266d", "#f08ac4"),
    Colour("s4", "#7b6200", "#e3c14a"),
    Colour("s5", "#5a45b5", "#b0a1ff"),
    Colour("s6", "#b83240", "#ff8f98"),
    Colour("s7", "#4a5a6a", "#a9b8c8"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
SYMBOLS = ("●", "■", "▲", "◆", "▼", "✚", "✖", "⬟")

# recipes/picture.py draws the same residents; here in pairs for two backgrounds.
STACK = dict(
    zip(
        RESIDENTS,
        (
            Colour("r0", "#0a6ebd", "#4b9fe0"),
            Colour("r1", "#129c72", "#3cc79c"),
            Colour("r2", "#58aee0", "#9bd3f5"),
            Colour("r3", "#e0ad1f", "#f0cb62"),
            Colour("r4", "#d2601a", "#f0915a"),
        ),
        strict=True,
    )
)
HEAT = (
    Colour("h0", "#dcebf7", "#17324a"),
    Colour("h1", "#b3d2ec", "#1d4a70"),
    Colour("h2", "#7fb2dd", "#276699"),
    Colour("h3", "#4889c4", "#4a93cf"),
    Colour("h4", "#1f5f9e", "#86c1f0"),
)
ALL = (INK, MUTED, LINE, FAINT, PAPER, BAND, BAD, BAD_PAPER, SKIPPED_PAPER, ON_HEAT, *SERIES, *STACK.values(), *HEAT)
_BY_LIGHT = {colour.light: colour for colour in ALL}


def series_colour(number: int) -> Colour:
    """Return the colour of the n-th series."""
    return SERIES[number % len(SERIES)]


def series_marker(number: int) -> str:
    """Return the marker of the n-th series: after eight series colours repeat, their markers move on."""
    return MARKERS[(number + number // len(SERIES)) % len(MARKERS)]


def series_symbol(number: int) -> str:
    """Return the character that looks like `series_marker`."""
    return SYMBOLS[(number + number // len(SERIES)) % len(SYMBOLS)]


def with_variables(svg: str) -> str:
    """Replace the light colours of a drawing by their CSS variables."""
    return re.sub(r"#[0-9a-f]{6}\b", lambda found: _variable(found[0]), svg)


def css(dark: bool) -> str:
    """List the variables of one mode as CSS declarations."""
    return " ".join(f"--{colour.name}: {colour.dark if dark else colour.light};" for colour in ALL)


def _variable(value: str) -> str:
    return f"var(--{_BY_LIGHT[value].name})" if value in _BY_LIGHT else value
