"""What `scripts/coverage.py` checks of one architecture; test_families.py uses the same table of strategies.

for row in check_all("gemma2", ["full", "attention"]):
    row.status                                        # "exact"
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import coverage_packing
import coverage_peaks
import exactness
import zoo
from coverage_rows import Row
from torch import nn

import ckpt
from ckpt.engine.loss import attach_chunked_loss
from ckpt.layers import find_layers
from ckpt.strategies import make

SEQ_LEN = 16  # twice zoo.sizes.WINDOW: sliding windows and chunks mask something
REORDERED = 1e-6  # relative norm; tiles and chunks sum in another order
DROPOUTS = (0.1, 0.0)  # with dropout attention takes the math path, without it the fused one: both must be exact
PACKAGE = str(Path(ckpt.__file__).parent)


@dataclasses.dataclass(frozen=True)
class Check:
    """One column of the table: what is applied, how exact it must be."""

    strategy: Any
    loss: str = "full"
    tile_mlp: int = 1
    tolerance: float = 0.0
    replays: bool = True
    """Whether layers must have been run again in backward."""
    ours: bool = True
    """Whether it must be undone without a trace; if not, it is there for comparison."""
    peak: bool = False
    """Whether its peak is measured and predicted."""
    special: Callable[[nn.Module], Any] | None = None
    """Attaches it in place of `ckpt.apply`."""
    dropouts: tuple[float, ...] = DROPOUTS

    def attach(self, model: nn.Module) -> Any:
        """Put it on the model; return a handle with `undo()`."""
        if self.special is not None:
            return self.special(model)
        return ckpt.apply(model, self.strategy, loss=self.loss, tile_mlp=self.tile_mlp)


class _Stock:
    """Transformers' own full checkpointing, for comparison."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        model.activation_checkpointing_enable()

    def undo(self) -> None:
        self.model.activation_checkpointing_disable()


@dataclasses.dataclass
class _Noted:
    """A strategy in force, with what else is to be undone and told."""

    applied: ckpt.Applied
    note: Callable[[], str]
    loss: Any = None

    def audit(self) -> ckpt.Audit:
        """Count a layer that is all tiled MLP as run again if that was: its replay has nothing left to do."""
        audit, chains = self.applied.audit(), self.applied.chains
        again = {index for index, chain in chains.items() if chain.num_passes >= 2}
        layers = [dataclasses.replace(x, replays=x.calls) if x.index in again else x for x in audit.layers]
        return dataclasses.replace(audit, layers=tuple(layers))

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


def _auto(model: nn.Module) -> _Noted:
    plan, note = coverage_peaks.plan_within_half(model)
    return _Noted(ckpt.apply(model, plan), lambda: note)


CHECKS: dict[str, Check] = {
    "none": Check(make("none"), replays=False, peak=True),
    "full": Check(make("full"), peak=True),
    "every_n": Check(make("every_n", n=2)),
    "segments_keep": Check(make("segments", size=2, inner="keep")),
    "segments_replay": Check(make("segments", size=2, inner="replay")),
    "attention": Check(make("selective", keep="attention")),
    "attention+matmul+moe": Check(make("selective", keep="attention+matmul+moe"), peak=True),
    "by_price": Check(make("selective", keep="by_price", min_flops_per_byte=32.0)),
    "auto": Check(None, replays=False, special=_auto, dropouts=(0.0,)),
    "offload_inputs": Check(make("offload", target="host", what="inputs")),
    "offload_kept": Check(make("offload", target="host", what="kept", keep="attention+matmul+moe")),
    "offload_disk": Check(make("offload", target="disk", what="inputs"), dropouts=(0.1,)),
    "tiled": Check(make("full"), tile_mlp=3, tolerance=REORDERED, special=_tiled),
    "chunked": Check(make("full"), loss="chunked", tolerance=REORDERED, peak=True, special=_chunked),
    "packing": Check(make("selective", keep="attention+matmul+moe"), dropouts=(0.0,)),
    "stock": Check(None, replays=False, ours=False, special=_Stock),
}
"""Name -> check. The selective strategy appears under its keep-lists; tiled and chunked replay in full."""


def cells(strategies: Sequence[str]) -> list[tuple[str, float]]:
    """Return the (strategy, dropout) pairs that are checked, ours first: the stock one leaves hooks behind."""
    ordered = sorted(strategies, key=lambda name: not CHECKS[name].ours)
    return [(name, dropout) for dropout in DROPOUTS for name in ordered if dropout in CHECKS[name].dropouts]


def batches(model: nn.Module) -> list[dict[str, Any]]:
    """Three steps: other tokens on the second (other routing), another length on the third."""
    other = 24 if model.config.model_type == "reformer" else SEQ_LEN - 3  # reformer takes whole chunks of 8 only
    return [zoo.batch(model, length, seed=seed) for seed, length in enumerate((SEQ_LEN, SEQ_LEN, other))]


def check_all(architecture: str, strategies: Sequence[str]) -> Iterator[Row]:
    """Check one architecture under every strategy, with dropout and without, one row each as it is done."""
    wanted = cells(strategies)
    for dropout in dict.fromkeys(dropout for _, dropout in wanted):
        names = [strategy for strategy, p in wanted if p == dropout]
        try:
            model = zoo.build(architecture, dropout=dropout)
            plain = exactness.baseline(model, batches(model))
            random = exactness.draws_random_numbers(model, plain.batches[0])
        except Exception as error:
            yield from (Row(architecture, s, dropout, "error", "plain model: " + last_line(error)) for s in names)
            continue
        for strategy in names:
            row = Row(architecture, strategy, dropout, random=random, gradients=len(plain.steps[0].gradients))
            start, cpu = time.perf_counter(), time.process_time()
            if strategy == "packing":
                _check_packing(row, model)
            else:
                _check(row, model, plain, CHECKS[strategy])
            if CHECKS[strategy].peak and not dropout and row.status in ("exact", "close"):
                _compare_peaks(row, model, CHECKS[strategy])
            row.seconds, row.cpu_seconds = round(time.perf_counter() - start, 3), round(time.process_time() - cpu, 3)
            yield row


def _compare_peaks(row: Row, model: nn.Module, check: Check) -> None:
    settings = check.strategy, check.loss, check.tile_mlp
    try:
        row.peak_bytes = coverage_peaks.measured(model, *settings)
        row.predicted_peak_bytes = coverage_peaks.predicted(model, *settings)
    except Exception as error:
        row.note = "; ".join(filter(None, [row.note, f"no predicted peak: {last_line(error)}"]))


def _check_packing(row: Row, model: nn.Module) -> None:
    try:
        coverage_packing.check(row, model, CHECKS["packing"].attach)
    except Exception as error:
        row.status, row.cause = _status(error), last_line(error)


def _check(row: Row, model: nn.Module, plain: exactness.Baseline, check: Check) -> None:
    try:
        found = exactness.compare(model, plain, check.attach, tolerance=check.tolerance)
    except Exception as error:
        row.status, row.cause = _status(error), last_line(error)
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


def _status(error: Exception) -> str:
    """A ValueError that the package raises itself is a refusal."""
    ours = traceback.extract_tb(error.__traceback__)[-1].filename.startswith(PACKAGE)
    return "refused" if ours and isinstance(error, ValueError) else "error"


def last_line(error: BaseException) -> str:
    """Say what was raised and where, in one line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno})"
