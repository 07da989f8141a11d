"""The rows of plan.py's table: every strategy predicted for one run, and the longest sequence that each would bear.

Owns which strategies stand in the table and what is computed of each. Knows nothing of how it looks.

    table = plan_rows(cfg, model, device, say=print)
    best(table).command
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ckpt import strategies
from ckpt.choose_tiles import choose_tiles
from ckpt.fake import Unpredictable
from ckpt.hardware import DEVICES, GIB, Device
from ckpt.layers import unwrapped
from ckpt.longest import MOST_TOKENS, longest
from ckpt.positions import learned_positions
from ckpt.predict import Prediction, read
from ckpt.simulate import Simulator
from ckpt.workload import Workload
from recipes.config import Config
from recipes.errors import one_line
from recipes.workload import workload_of

Say = Callable[[str], None]

STRATEGIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("none", {}),
    ("every_n", {"n": 2}),
    ("selective", {"keep": "attention+matmul"}),
    ("selective", {}),
    ("full", {}),
    ("segments", {}),
    ("segments", {"inner": "replay"}),
    ("offload", {}),
    ("auto", {}),  # budget and hardware: the device's
)
MOST_PLANS = 4
"""Budgets that `auto` is given, each less what the plan before it was over."""
_CONTAINED = ("none", "every_n", "full")
"""Strategies that are among `auto`'s plans by themselves."""


@dataclass(frozen=True)
class Row:
    """One strategy. label: its name and fields. words: as overrides. prediction: None where `error` says why.
    longest_tokens: the longest sequence that fits; None where it was not looked for. is_at_least: longer ones may fit
    too: `auto` would have to be planned anew for each."""

    label: str
    words: tuple[str, ...]
    prediction: Prediction | None = field(repr=False)
    longest_tokens: int | None = None
    error: str | None = None
    tile_mlp: int | str = 1
    is_at_least: bool = False

    @property
    def fits(self) -> bool:
        """Whether it fits the device."""
        return self.prediction is not None and bool(self.prediction.fits)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        predicted = {} if self.prediction is None else self.prediction.to_dict()
        mine = {"label": self.label, "overrides": list(self.words), "longest_seq_len": self.longest_tokens}
        mine["longest_is_at_least"] = self.is_at_least
        return {**mine, "error": self.error, **predicted}


def plan_rows(
    cfg: Config, model: nn.Module, device: Device, say: Say, search: bool = True, keep: Sequence[str] = ()
) -> list[Row]:
    """Predict every strategy, and with `search` the longest sequence of each. `keep`: only these names.

    A strategy that does not fit the model has its reason in its row. Raises ValueError where the model itself cannot be
    predicted.
    """
    simulator = Simulator(model, workload_of(cfg))
    chosen = [(name, fields) for name, fields in STRATEGIES if not keep or name in keep]
    rows = []
    try:
        for number, (name, fields) in enumerate(chosen, 1):
            label, words = label_of(name, fields), words_of(name, fields)
            say(f"predicting {label} ({number} of {len(chosen)})")
            try:
                if name == "auto":
                    rows.append(_auto_row(rows, simulator, device, say))
                else:
                    rows.append(_row(label, words, strategies.make(name, **fields), simulator, device, search))
            except Unpredictable:
                raise
            except ValueError as error:
                rows.append(Row(label, words, None, error=one_line(error)))
    finally:
        simulator.close()
    return rows


def _row(
    label: str,
    words: tuple[str, ...],
    strategy: Any,
    simulator: Simulator,
    device: Device,
    search: bool,
) -> Row:
    work, prediction = predicted(simulator, strategy, device)
    longest_tokens = None
    if search:
        longest_tokens = search_longest(simulator, strategy, work, device, prediction)
    return Row(label, words, prediction, longest_tokens, tile_mlp=work.tile_mlp)


def _auto_row(others: Sequence[Row], simulator: Simulator, device: Device, say: Say) -> Row:
    """Plan for the device's memory, as `+strategy=auto` does, less what only its kernels and allocator take."""
    known = [row for row in others if row.prediction is not None]
    room = device.usable_bytes
    fields: dict[str, Any] = {"hardware": device.name} if device.name in DEVICES else {}
    frontier = strategies.make("auto", **_within(room), **fields).frontier(
        simulator, simulator.work, progress=lambda text: say(f"auto: {text}")
    )
    for _ in range(MOST_PLANS):
        given = {**_within(room), **fields}
        plan = strategies.make("auto", **given).plan_from(frontier, simulator.work)
        work, prediction = predicted(simulator, plan, device)
        if prediction.fits:
            break
        room += prediction.margin_bytes  # what the device takes beside live bytes is known once there is a plan
    lengths = [row.longest_tokens for row in known if row.label.split()[0] in _CONTAINED]
    tokens = max((n for n in lengths if n is not None), default=None)
    words = words_of("auto", given)
    return Row("auto", words, prediction, tokens, tile_mlp=work.tile_mlp, is_at_least=True)


def _within(num_bytes: int) -> dict[str, float]:
    return {"budget_gib": math.floor(num_bytes / GIB * 1000) / 1000}


def predicted(simulator: Simulator, strategy: Any, device: Device) -> tuple[Workload, Prediction]:
    """Predict one strategy; return the workload too, with the number of tiles that was chosen."""
    work = simulator.work
    if work.tile_mlp == "auto":
        work = work.replace(tile_mlp=choose_tiles(simulator, strategy, work.loss))
    return work, read(simulator.run(strategy, tile_mlp=work.tile_mlp), work, device)


def search_longest(simulator: Simulator, strategy: Any, work: Workload, device: Device, known: Prediction) -> int:
    """Return the longest sequence that fits the device; 0 if not even the shortest tried does.

    work: the simulator's, with the number of tiles that all lengths have. known: the prediction of this strategy for
    it.
    """
    most = _most_tokens(simulator.model)
    step = min(1024 if work.seq_len >= 8192 else 64, most)
    standing = sum(known.residents[name] for name in ("parameters", "gradients", "optimizer_state"))

    def peak_of(tokens: int) -> int:
        with simulator.at_length(tokens):
            ran = simulator.run(strategy, tile_mlp=work.tile_mlp)
        return read(ran, work, device).peak_bytes

    peaks = {work.seq_len: known.peak_bytes}
    found = longest(peak_of, device.usable_bytes, step=step, most=most, known=peaks, at_zero=standing, check_next=False)
    return found.seq_len


def _most_tokens(model: nn.Module) -> int:
    """Rotary positions can be stretched, learned ones end where their table does."""
    config = unwrapped(model).config.get_text_config(decoder=True)
    if getattr(config, "rope_parameters", None):
        return MOST_TOKENS
    said = getattr(config, "max_position_embeddings", None)
    return min(said or MOST_TOKENS, learned_positions(model) or MOST_TOKENS)


def best(rows: Sequence[Row]) -> Row | None:
    """The fastest row that fits; of equally fast ones the first. None if nothing fits."""
    fitting = [row for row in rows if row.fits]
    return min(fitting, key=lambda row: row.prediction.step_seconds, default=None)


def smallest(rows: Sequence[Row]) -> Row | None:
    """The row with the lowest peak; None if no strategy could be predicted."""
    known = [row for row in rows if row.prediction is not None]
    return min(known, key=lambda row: row.prediction.peak_bytes, default=None)


def label_of(name: str, fields: Mapping[str, Any]) -> str:
    """Name a strategy with the fields that are not its defaults."""
    said = ", ".join(f"{key}={value}" for key, value in fields.items() if value is not None)
    return f"{name} ({said})" if said else name


def words_of(name: str, fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The overrides that select a strategy."""
    return (f"+strategy={name}", *(f"strategy.{key}={value}" for key, value in fields.items() if value is not None))


def what_holds_most(row: Row) -> str:
    """Say in one line what keeps the smallest plan from fitting, and what would lower that."""
    residents = row.prediction.residents
    states = residents["parameters"] + residents["gradients"] + residents["optimizer_state"]
    if states > row.prediction.device_bytes:
        return (
            f"Parameters, gradients and optimizer state alone take {states / GIB:,.1f} GiB: train an adapter "
            "(peft=lora recipe=finetune), in dtype=bf16_pure, or on more devices (parallel.shard=N)."
        )
    return "Lower seq_len or batch_size, use tile_mlp=auto, or more devices (parallel.shard=N)."
