"""What `scripts/coverage.py` checks of one architecture under one strategy; test_families.py uses the same table.

row = check("gemma2", "full", dropout=0.1)       # row.status == "exact"
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import exactness
import zoo
from coverage_rows import Row
from torch import nn

import ckpt
from ckpt.engine.loss import attach_chunked_loss
from ckpt.layers import find_layers

SEQ_LEN = 16  # twice zoo.sizes.WINDOW: sliding windows and chunks mask something
REORDERED = 1e-6  # relative norm; tiles and chunks sum in another order
PACKAGE = str(Path(ckpt.__file__).parent)


class _Stock:
    """Transformers' own full checkpointing, for comparison."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        model.activation_checkpointing_enable()

    def undo(self) -> None:
        self.model.activation_checkpointing_disable()


@dataclasses.dataclass(frozen=True)
class Check:
    """One column of the table: how to attach, how exact it must be, whether it is ours (proved and undone)."""

    attach: Callable[[nn.Module], Any]
    tolerance: float = 0.0
    ours: bool = True
    replays: bool = True
    """Whether layers must have been run again in backward."""


@dataclasses.dataclass
class _Noted:
    """A strategy in force, with what else is to be undone and told."""

    applied: ckpt.Applied
    note: Callable[[], str]
    loss: Any = None

    def audit(self) -> ckpt.Audit:
        return self.applied.audit()

    def undo(self) -> None:
        if self.loss is not None:
            self.loss.undo()
        self.applied.undo()


def _chunked(model: nn.Module) -> _Noted:
    """Full checkpointing with the loss in chunks of 7 tokens: several a batch, the last one short."""
    applied = ckpt.apply(model, "full")
    try:
        loss = attach_chunked_loss(model, chunk_tokens=7)
    except BaseException:
        applied.undo()
        raise

    def note() -> str:
        report = loss.report()
        return report["mode"] if report["mode"] == "chunked" else f"{report['mode']}: {report['reason']}"

    return _Noted(applied, note, loss)


def _tiled(model: nn.Module) -> _Noted:
    """Full checkpointing with the MLPs in three tiles, of which the last is shorter."""
    applied = ckpt.apply(model, "full", tile_mlp=3)

    def note() -> str:
        tiled = f"{len(applied.chains)} of {applied.num_layers} layers tiled"
        return "; ".join([tiled, *dict.fromkeys(applied.not_tiled.values())])

    return _Noted(applied, note)


def _apply(strategy: str, **fields: Any) -> Callable[[nn.Module], ckpt.Applied]:
    return lambda model: ckpt.apply(model, ckpt.strategies.make(strategy, **fields))


CHECKS: dict[str, Check] = {
    "stock": Check(_Stock, ours=False, replays=False),
    "none": Check(_apply("none"), replays=False),
    "full": Check(_apply("full")),
    "every_n": Check(_apply("every_n", n=2)),
    "segments_keep": Check(_apply("segments", size=2, inner="keep")),
    "segments_replay": Check(_apply("segments", size=2, inner="replay")),
    "attention": Check(_apply("selective", keep="attention")),
    "attention+matmul+moe": Check(_apply("selective", keep="attention+matmul+moe")),
    "by_price": Check(_apply("selective", keep="by_price", min_flops_per_byte=32.0)),
    "offload_inputs": Check(_apply("offload", target="host", what="inputs")),
    "offload_kept": Check(_apply("offload", target="host", what="kept", keep="attention+matmul+moe")),
    "offload_disk": Check(_apply("offload", target="disk", what="inputs")),
    "tiled": Check(_tiled, tolerance=REORDERED),
    "chunked": Check(_chunked, tolerance=REORDERED),
}
"""Name -> check. The selective strategy appears under its keep-lists; tiled and chunked replay in full."""


def batches(model: nn.Module) -> list[dict[str, Any]]:
    """Three steps: other tokens on the second (other routing), another length on the third."""
    other = 24 if model.config.model_type == "reformer" else SEQ_LEN - 3  # reformer takes whole chunks of 8 only
    return [zoo.batch(model, length, seed=seed) for seed, length in enumerate((SEQ_LEN, SEQ_LEN, other))]


def check_all(architecture: str, strategies: Sequence[str], dropouts: Sequence[float]) -> Iterator[Row]:
    """Check one architecture under every strategy with every dropout probability, one row each as it is done."""
    for dropout in dropouts:
        try:
            model = zoo.build(architecture, dropout=dropout)
            plain = exactness.baseline(model, batches(model))
            random = exactness.draws_random_numbers(model, plain.batches[0])
        except Exception as error:
            yield from (Row(architecture, s, dropout, "error", "plain model: " + _last_line(error)) for s in strategies)
            continue
        for strategy in sorted(strategies, key=lambda name: not CHECKS[name].ours):  # the stock one leaves hooks behind
            row = Row(architecture, strategy, dropout, random=random, gradients=len(plain.steps[0].gradients))
            start = time.perf_counter()
            _check(row, model, plain, CHECKS[strategy])
            row.seconds = round(time.perf_counter() - start, 3)
            yield row


def _check(row: Row, model: nn.Module, plain: exactness.Baseline, check: Check) -> None:
    try:
        found = exactness.compare(model, plain, check.attach, tolerance=check.tolerance)
    except Exception as error:
        ours = isinstance(error, ValueError) and _raised_in_package(error)
        row.status, row.cause = "refused" if ours else "error", _last_line(error)
        return
    row.worst_parameter, row.worst_error = found.worst[0], found.worst_error
    row.note = found.note
    if noisy := found.ill_conditioned:
        name = max(noisy, key=noisy.__getitem__)
        row.note += f"; {len(noisy)} gradients are no better known in fp32: {name} {noisy[name]:.2g}"
    why = ""
    if found.audits:
        _read_audit(row, found.audits[-1])
        why = unproved(model, plain, found.audits[-1])
    if not plain.repeatable:
        row.status, row.cause = "error", "the plain model is not repeatable"
    elif not found.exact:
        row.status, row.cause = "differs", found.problems()[0]
    elif check.ours and found.problems():
        row.status, row.cause = "leftover", "; ".join(found.problems()[:3])
    elif check.replays and why:
        row.status, row.cause = "unproved", why
    else:
        row.status = "close" if found.worst_error else "exact"


def _read_audit(row: Row, audit: ckpt.Audit) -> None:
    row.layers, row.replays = audit.num_layers, audit.replays
    row.ops_kept = sum(layer.ops_kept for layer in audit.layers)
    row.ops_run_again = sum(layer.ops_run_again for layer in audit.layers)


def unproved(model: nn.Module, plain: exactness.Baseline, audit: ckpt.Audit) -> str:
    """Return why an audit does not prove that layers were run again; '' if it does.

    Layers that backward never reaches are left out: blt computes its patch lengths by such.
    """
    trained = {name for name, gradient in plain.steps[0].gradients.items() if gradient is not None}
    names = {layer.index: layer.name for layer in find_layers(model)}
    silent = []
    for layer in audit.layers:
        prefix = names[layer.index] + "."
        if layer.replays < layer.calls and any(name.startswith(prefix) for name in trained):
            silent.append(names[layer.index])
    if not audit.replays:
        return "no layer was run again"
    return f"called but not run again as often: {', '.join(silent)}" if silent else ""


def _raised_in_package(error: BaseException) -> bool:
    return traceback.extract_tb(error.__traceback__)[-1].filename.startswith(PACKAGE)


def _last_line(error: BaseException) -> str:
    """Say what was raised and where, in one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno})"
