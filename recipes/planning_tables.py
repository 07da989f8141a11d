"""How plans look on a terminal: the table of strategies, one strategy by kind of layer, the difference of two plans."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from ckpt.audit import ranges
from ckpt.explain import FREE, LayerKind, OpRow
from ckpt.plan_diff import Change
from ckpt.predict import Prediction
from recipes.config import Config
from recipes.planning_rows import Row

_SHORT = {
    "parameters": "param.", "gradients": "grad.", "optimizer_state": "optim.", "activations": "activ.",
    "workspace": "work.",
}  # fmt: skip


def show(console: Console, found: dict[str, Any], cfg: Config, folder: Path) -> None:
    """Print what plan.py found, and where it was written."""
    _widen(console)
    work = found["prediction"].workload
    console.print(
        f"{cfg.model.name}, {work.batch_size} x {work.seq_len:,} tokens x {work.grad_accum}, dtype {work.dtype}, loss "
        f"{work.loss}, peft {cfg.peft.name}; {found['device']} has {size(found['device_bytes'])} for a step",
        markup=False,
    )
    _show_all(console, found) if "rows" in found else _show_one(console, found)
    console.print(f"assumed: {'; '.join(found['prediction'].assumptions)}", markup=False)
    if work.num_ranks > 1:
        mesh = ", ".join(f"{name} {degree}" for name, degree in work.mesh.items())
        console.print(
            f"one rank of {work.num_ranks} ({mesh}): bytes and tokens/s are its own; waits: share of the "
            "step in which it waits for others",
            markup=False,
        )
    console.print(f"files: {folder}", markup=False)
    console.print(f"\n{found['command']}", markup=False)


def _show_all(console: Console, found: dict[str, Any]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("strategy", no_wrap=True)
    waits = ["waits"] if found["prediction"].workload.num_ranks > 1 else []
    for name in ("peak", *_SHORT.values(), "fits by", "again", "step", *waits, "tokens/s", "longest"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found["rows"]:
        mark = "bold green" if row is found["best"] and row.fits else None if row.fits else "dim"
        table.add_row(*_cells(row, found["positions"]), style=mark)
    console.print(table)
    for row in found["rows"]:
        if row.error:
            console.print(f"{row.label}: {row.error}", markup=False)
    beyond = [row for row in found["rows"] if _is_beyond(row.longest_tokens, found["positions"])]
    if beyond:
        console.print(f"* beyond the model's {found['positions']:,} positions: needs model.rope_scaling", markup=False)
    if found["note"]:
        console.print(found["note"], markup=False)
    else:
        console.print(f"fastest that fits: {found['best'].label}", markup=False)


def _cells(row: Row, positions: int | None) -> list[str]:
    if row.prediction is None:
        return [row.label, "no plan" if row.label == "auto" else "does not apply"]
    p = row.prediction
    tokens = "" if row.longest_tokens is None else f"{row.longest_tokens:,}" if row.longest_tokens else "none"
    if row.is_at_least:
        tokens = f">= {tokens}" if row.longest_tokens else ""
    return [
        row.label,
        size(p.peak_bytes),
        *(size(p.residents[name]) for name in _SHORT),
        f"{'' if p.fits else '-'}{size(abs(p.margin_bytes))}",
        f"{p.recompute_share:.1%}",
        seconds(p.step_seconds),
        *([f"{p.exposed_seconds / p.step_seconds:.1%}"] if p.workload.num_ranks > 1 else []),
        f"{p.tokens_per_second:,.0f}",
        tokens + ("*" if _is_beyond(row.longest_tokens, positions) else ""),
    ]


def _is_beyond(tokens: int | None, positions: int | None) -> bool:
    return tokens is not None and positions is not None and tokens > positions


def _show_one(console: Console, found: dict[str, Any]) -> None:
    p: Prediction = found["prediction"]
    for kind in found["kinds"]:
        _show_kind(console, kind)
    shares = ", ".join(f"{name.replace('_', ' ')} {size(value)}" for name, value in p.residents.items())
    verdict = "fits with" if p.fits else "too much by"
    star = "*" if _is_beyond(found["longest_seq_len"], found["positions"]) else ""
    lines = [
        f"peak {size(p.peak_bytes)} in {p.peak_phase}: {shares}",
        f"{verdict} {size(abs(p.margin_bytes))}; longest sequence that fits: {found['longest_seq_len']:,}{star}",
        f"step about {seconds(p.step_seconds)}, {p.tokens_per_second:,.0f} tokens/s (estimate); "
        f"{p.recompute_share:.1%} of its FLOPs are run again",
    ]
    if p.workload.num_ranks > 1:
        lines.append(
            f"sends {size(p.sent_bytes)} a step in {seconds(p.communication_seconds)}, of which compute waits "
            f"{seconds(p.exposed_seconds)}"
        )
    if found.get("note"):
        lines.append(found["note"])
    if p.host_bytes:
        lines.append(f"off the device: {size(p.host_bytes)}")
    if star:
        lines.append(f"* beyond the model's {found['positions']:,} positions: needs model.rope_scaling")
    console.print("\n".join(lines), markup=False)


def _show_kind(console: Console, kind: LayerKind) -> None:
    held = f"holds {size(kind.input_bytes + kind.kept_bytes)} each" + (
        f" and {size(kind.away_bytes)} off the device" if kind.away_bytes else ""
    )
    again = f", replays {kind.replay_flops / 1e12:,.3f} TFLOP" if kind.replay_flops else ""
    console.print(f"\n{kind.name}, layers {spans(kind.layers)}: {kind.rule}; {held}{again}", markup=False, style="bold")
    if not kind.ops:
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("op", no_wrap=True)
    for name in ("to keep", "GFLOP", "to make again"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("decision", no_wrap=True)
    table.add_column("why")
    for row in kind.ops:
        table.add_row(*_op_cells(row), style={FREE: "dim", "keep": "green", "offload": "cyan"}.get(row.decision))
    console.print(table)


def _op_cells(row: OpRow) -> list[str]:
    again = f" x{row.times_run_again}" if row.times_run_again > 1 else ""
    flops = f"{row.flops / 1e9:,.1f}" if row.flops else ""
    return [row.op, size(row.num_bytes), flops, seconds(row.seconds), row.decision + again, row.why]


def show_diff(console: Console, names: Sequence[str], changes: Sequence[Change]) -> None:
    """Print the changes from one plan to another."""
    _widen(console)
    if not changes:
        console.print("the two plans do the same", markup=False)
        return
    table = Table("layers", "what", *names, box=None, pad_edge=False, header_style="bold")
    for change in changes:
        table.add_row(spans(change.layers) if change.layers else "all", change.what, change.a, change.b)
    console.print(table)


def _widen(console: Console) -> None:
    """A file takes lines of any length; a terminal its own."""
    if not console.is_terminal:
        console.width = 200


def size(num_bytes: int) -> str:
    """Write bytes in the unit that reads best."""
    for unit, one in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= one:
            return f"{num_bytes / one:,.1f} {unit}"
    return f"{num_bytes} B"


def seconds(value: float | None) -> str:
    """Write seconds in the unit that reads best."""
    if value is None:
        return ""
    for unit, one in (("s", 1.0), ("ms", 1e-3)):
        if value >= one:
            return f"{value / one:,.1f} {unit}"
    return f"{value * 1e6:,.0f} us"


def spans(numbers: Sequence[int]) -> str:
    """Write layer numbers with runs joined: 0-3, 8, 10-12; every n-th as 0, 2, ..., 30."""
    steps = {b - a for a, b in pairwise(numbers)}
    if len(numbers) > 4 and len(steps) == 1 and steps != {1}:
        return f"{numbers[0]}, {numbers[1]}, ..., {numbers[-1]}"
    return ranges(numbers)
