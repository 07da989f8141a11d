"""Write a sweep's report: report.html, and its figures as PNGs in report/.

write_report("runs/SWEEP")           # -> Path("runs/SWEEP/report.html")
"""

from __future__ import annotations

import io
import re
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from recipes.report import palette
from recipes.report.figures import add_legend, draw
from recipes.report.page import page
from recipes.report.points import read_points
from recipes.rundir import write_atomically

DPI = 200


def write_report(path: str | Path) -> Path:
    """Write runs/SWEEP/report.html and runs/SWEEP/report/*.png; return the page's path.

    Raises ValueError for a folder that holds no sweep and no runs, and where a file is in the way.
    """
    path = Path(path)
    sweep = read_points(path)
    folder = path / "report"
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, where the report's pictures go. Move it away.")
    folder.mkdir(exist_ok=True)
    svgs = {}
    for name, figure in draw(sweep).items():
        svgs[name] = to_svg(name, figure)
        if name != "grid":  # the page has one legend for all of them
            add_legend(figure, sweep, of_residents=name == "residents")
        figure.savefig(folder / f"{name}.png", dpi=DPI, facecolor=palette.PAPER.light, metadata={"Title": name})
    out = path / "report.html"
    write_atomically(out, page(sweep, svgs, command=f"python scripts/report.py {path}"))
    return out


def to_svg(name: str, figure: Figure) -> str:
    """Return a figure as an SVG element: text as text, ids of its own, colours as CSS variables."""
    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Several drawings stand in one page: ids that are not ours get the figure's name, and so do their references.
    svg = re.sub(r'\bid="(?![\w-]+--)([^"]+)"', rf'id="{name}-\1"', svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'^<svg [^>]*?viewBox="([^"]+)"[^>]*>', _opening(name), svg, count=1)
    return palette.with_variables(svg)


def _opening(name: str) -> str:
    return rf'<svg xmlns:xlink="http://www.w3.org/1999/xlink" viewBox="\1" role="group" aria-label="{name}">'
