"""The benchmark's table and picture, from its JSON alone.

    markdown(load(folder)); draw(load(folder), Path("docs/bench.png"))
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

MIB = 2**20
# Two-sided 95% quantiles of Student's t for 1 to 10 degrees of freedom.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
Found = Mapping[str, Mapping[str, Any]]


def interval(ratios: list[float]) -> tuple[float, float, float] | None:
    """Return (low, middle, high): the geometric mean of paired ratios and its 95% interval by Student's t."""
    if len(ratios) < 2:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    t = _T95[min(len(logs) - 1, len(_T95)) - 1]
    half = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return tuple(math.exp(statistics.mean(logs) + shift) for shift in (-half, 0.0, half))


def paired(rounds: list[Mapping[str, float]], key: str, other: str) -> list[float]:
    """Ratios of two rows' times, within each round that has both."""
    return [seconds[key] / seconds[other] for seconds in rounds if key in seconds and other in seconds]


def markdown(found: Found, picture: str = "bench.png") -> str:
    """Write the whole page."""
    lines = [
        "# Beside the peers",
        "",
        "Made by `python scripts/bench.py --compile`; the figures are in `results/bench/`. One forward and backward,",
        "fp32, CPU, one thread. Peak: most live bytes. FLOPs: contractions executed, over `none`. Time: CPU seconds",
        "over `none`, each ratio taken within a round, median. Policy: where it was imported from. Gradients: equal",
        "bit for bit to `none`, or the largest norm(g - g0) / norm(g0) of a parameter.",
        "",
        f"![peak against FLOPs and time]({picture})",
    ]
    for name in sorted(found, key=_order):
        lines += ["", *_case(found[name])]
    return "\n".join(lines) + "\n"


def _order(name: str) -> tuple:
    known = ("llama", "llama_long", "qwen3", "gemma2", "mixtral")
    return (known.index(name) if name in known else len(known), name)


def _case(one: Mapping[str, Any]) -> list[str]:
    case, cells, rounds = one["case"], one["cells"], one["rounds"]
    lines = [f"## {title_of(case)}"]
    for losses, heading in (("same", "The same loss for all (chunked)"), ("best", "Each side's own best loss")):
        mine = {key: cell for key, cell in cells.items() if key.startswith(f"{losses}:")}
        if mine:
            lines += ["", f"**{heading}**", "", *rows_table(mine, rounds, losses)]
    pairs = auto_table(cells, rounds)
    if pairs:
        lines += ["", "**`auto` with its budget at each peer's measured peak (objective=flops)**", "", *pairs]
    if one.get("compiled"):
        lines += ["", "**torch.compile (inductor), each decoder layer**", "", *compiled_table(one["compiled"])]
    return lines


def rows_table(cells: Mapping[str, Any], rounds: list, losses: str) -> list[str]:
    """One line a row: peak, FLOPs and time over the first, gradients."""
    base_key = f"{losses}: none" if f"{losses}: none" in cells else next(iter(cells))
    base = cells[base_key]
    name = base_key.partition(": ")[2]
    lines = [
        f"| row | policy | loss | peak MiB | FLOPs / {name} | time / {name} | gradients |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, cell in cells.items():
        if "refused" in cell:
            lines.append(f"| {cell['what']} | {cell['source']} | {cell['loss']} | {cell['refused'][:120]} | | | |")
            continue
        ratios = paired(rounds, key, base_key)
        spent = f"{statistics.median(ratios):.2f}" if ratios else "-"
        flops = f"{cell['flops'] / base['flops']:.3f}" if base.get("flops") else "-"
        lines.append(
            f"| {cell['what']} | {cell['source']} | {cell['loss']} | {cell['peak_bytes'] / MIB:,.1f} | {flops} | "
            f"{spent} | {_gradients(cell)} |"
        )
    return lines


def _gradients(cell: Mapping[str, Any]) -> str:
    return cell["gradients"] if cell["gradients"] != "differ" else f"{cell['gradient_error']:.0e}"


def auto_pairs(cells: Mapping[str, Any], rounds: list) -> dict[str, dict[str, Any]]:
    """Compare auto with each row that its budget comes from: ratios of peak and FLOPs, and the interval of times."""
    found = {}
    for key, cell in cells.items():
        losses, _, name = key.partition(": ")
        peer = f"{losses}: {name.removeprefix('auto @ ')}"
        if not name.startswith("auto @ ") or "peak_bytes" not in cell or "peak_bytes" not in cells.get(peer, {}):
            continue
        other = cells[peer]
        found[key] = {
            "peer": peer,
            "peak": cell["peak_bytes"] / other["peak_bytes"],
            "flops": cell["flops"] / other["flops"],
            "peer_flops": other["flops"],
            "time": interval(paired(rounds, key, peer)),
        }
    return found


def auto_table(cells: Mapping[str, Any], rounds: list) -> list[str]:
    """One line a peer."""
    pairs = auto_pairs(cells, rounds)
    if not pairs:
        return []
    lines = [
        "| peer | its peak MiB | auto's peak / its | auto's FLOPs / its | auto's time / its [95%] |",
        "|---|---|---|---|---|",
    ]
    for pair in pairs.values():
        time = pair["time"]
        spent = "-" if time is None else f"{time[1]:.3f} [{time[0]:.3f}, {time[2]:.3f}]"
        peer = cells[pair["peer"]]
        lines.append(
            f"| {peer['what']} ({peer['loss']} loss) | {peer['peak_bytes'] / MIB:,.1f} | {pair['peak']:.3f} | "
            f"{pair['flops']:.3f} | {spent} |"
        )
    return lines


def compiled_table(compiled: Mapping[str, Any]) -> list[str]:
    """One line a compiled variant; times over the same strategy in eager mode, and over eager `none`."""
    lines = ["| variant | peak MiB | time / eager none [95%] | gradient error |", "|---|---|---|---|"]
    rounds = compiled["rounds"]
    for name, cell in compiled["cells"].items():
        if "refused" in cell:
            lines.append(f"| {cell['what']} | {cell['refused'][:90]} | | |")
            continue
        time = interval(paired(rounds, name, "eager none"))
        spent = "-" if time is None else f"{time[1]:.3f} [{time[0]:.3f}, {time[2]:.3f}]"
        lines.append(f"| {cell['what']} | {cell['peak_bytes'] / MIB:,.1f} | {spent} | {cell['gradient_error']:.0e} |")
    return lines


# -- the README's part ------------------------------------------------------------------------------------------------

BEGIN, END = "<!-- bench.py: begin -->", "<!-- bench.py: end -->"


def put_into_readme(text: str, found: Found) -> str:
    """Replace what stands between the two markers. Raises ValueError where they are missing."""
    check_markers(text)
    before, _, rest = text.partition(BEGIN)
    return before + "\n".join([BEGIN, *readme(found), END]) + rest.partition(END)[2]


def check_markers(text: str) -> None:
    """Raise ValueError where the two markers are missing."""
    if BEGIN not in text or END not in text.partition(BEGIN)[2]:
        raise ValueError(f"the README has no lines {BEGIN} and {END} to put the table between")


def readme(found: Found) -> list[str]:
    """The first case's peers with `auto` beside them, and a line for each other case."""
    name, *others = sorted(found, key=_order)
    one = found[name]
    cells, rounds = one["cells"], one["rounds"]
    pairs = {k: p for k, p in auto_pairs(cells, rounds).items() if k.startswith("same:")}
    base = cells.get("same: none", {})
    if "flops" not in base:
        raise ValueError(f"{name} lacks its row none, which the README's table compares with: measure it first")
    lines = [
        f"{title_of(one['case'])}:",
        "",
        "| peer | policy from | peak MiB | FLOPs / none | `auto` at that peak: FLOPs / none | its time / the peer's |",
        "|---|---|---|---|---|---|",
    ]
    for key, pair in pairs.items():
        peer, mine, time = cells[pair["peer"]], cells[key], pair["time"]
        spent = "-" if time is None else f"{time[1]:.2f}x [{time[0]:.2f}, {time[2]:.2f}]"
        lines.append(
            f"| {peer['what']} | {peer['source']} | {peer['peak_bytes'] / MIB:,.1f} | "
            f"{peer['flops'] / base['flops']:.3f} | {mine['flops'] / base['flops']:.3f} | {spent} |"
        )
    lines.append("")
    for other in others:
        ratios = [p["flops"] for p in auto_pairs(found[other]["cells"], []).values() if p["peer"] != "same: none"]
        theirs = {k: c for k, c in found[other]["cells"].items() if c["side"] == "peer" and k.startswith("same:")}
        refused = [k.partition(": ")[2] for k, c in theirs.items() if "refused" in c]
        if ratios:
            more = f"; {', '.join(refused)} failed" if refused else ""
            lines.append(
                f"- {title_of(found[other]['case'])}: `auto` runs {min(ratios):.2f} to {max(ratios):.2f} of the peers' "
                f"FLOPs at their peaks{more}"
            )
    return lines


def title_of(case: Mapping[str, Any]) -> str:
    """Name a case by its model and length."""
    return f"{case['family']} {case['num_layers']} x 256, vocabulary {case['vocab_size']:,}, T={case['seq_len']:,}"


# -- the picture ------------------------------------------------------------------------------------------------------

_STYLE = {
    "library": {"color": "#7a7a7a", "marker": "s"},
    "peer": {"color": "#c44e52", "marker": "D"},
    "ours": {"color": "#4c72b0", "marker": "o"},
}


def draw(found: Found, path: Path | BinaryIO) -> None:
    """Draw a case a column: peak against FLOPs above, peak against CPU time below; auto's points are joined."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [name for name in sorted(found, key=_order) if found[name]["cells"]]
    figure = Figure(figsize=(4.4 * max(len(names), 1), 7.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, max(len(names), 1), squeeze=False)
    for column, name in enumerate(names):
        case, cells, rounds = (found[name][key] for key in ("case", "cells", "rounds"))
        mine = {k: c for k, c in cells.items() if k.startswith("same:") and "peak_bytes" in c}
        base = "same: none"
        if base not in mine:
            continue
        flops = {k: c["flops"] / mine[base]["flops"] for k, c in mine.items()}
        times = {k: statistics.median(r) for k in mine if (r := paired(rounds, k, base))}
        _panel(axes[0][column], mine, flops)
        if times:
            _panel(axes[1][column], mine, times)
        else:
            axes[1][column].text(0.5, 0.5, "not timed", ha="center", va="center", transform=axes[1][column].transAxes)
        axes[0][column].set_title(f"{case['family']} {case['num_layers']} x 256, T={case['seq_len']:,}", fontsize=10)
        axes[1][column].set_xlabel("peak live MiB")
    axes[0][0].set_ylabel("FLOPs / none")
    axes[1][0].set_ylabel("CPU time / none")
    figure.savefig(path, dpi=110, format="png")


def _panel(axis: Any, cells: Mapping[str, Any], values: Mapping[str, float]) -> None:
    auto = sorted((cells[k]["peak_bytes"] / MIB, v) for k, v in values.items() if k.startswith("same: auto"))
    if auto:
        axis.plot(*zip(*auto, strict=True), color="#55a868", marker=".", linewidth=1.4, label="auto", zorder=1)
    names: dict[tuple[float, float], list[str]] = {}
    for key, value in values.items():
        name = key.removeprefix("same: ")
        if name.startswith("auto"):
            continue
        side = "ours" if cells[key]["side"] == "ours" else "library" if name.startswith(("library", "none")) else "peer"
        at = cells[key]["peak_bytes"] / MIB, value
        axis.scatter(*at, s=26, zorder=2, **_STYLE[side])
        names.setdefault((round(at[0], 0), round(at[1], 2)), []).append(name)
    for at, found in names.items():  # points that coincide share a label
        axis.annotate(", ".join(found), at, fontsize=6, xytext=(3, 4), textcoords="offset points")
    axis.grid(alpha=0.3)
    axis.tick_params(labelsize=8)
