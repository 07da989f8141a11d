"""What a training step is asked to do, apart from the model and the strategy: shapes, dtype, optimizer, loss.

Owns the names and their meaning; `predict`, `Auto` and the programs read it. Knows no model.

    work = Workload(batch_size=1, seq_len=131072, dtype="bf16", optimizer="adamw", grad_accum=8)
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.precision import DTYPES

OPTIMIZERS = ("adamw", "adamw8bit", "adafactor", "sgd")
LOSSES = ("chunked", "full")
PACKINGS = ("none", "concat", "isolate")
ROUTINGS = ("balanced",)
MOST_TOKENS = 2**29  # of one forward; above, bytes of T x T tensors are no 64-bit numbers any more
DEGREES = ("replicate", "shard", "tensor", "sequence")


@dataclass(frozen=True)
class Workload:
    """One optimizer step on one rank.

    batch_size, seq_len: rows and tokens a row of one forward and backward.
    dtype: "fp32", "bf16" (fp32 master weights, bf16 compute) or "bf16_pure", as in `ckpt/precision.py`.
    optimizer: "adamw" (fused), "adamw8bit", "adafactor", "sgd", or a function from a list of parameters to a torch
        optimizer; None: forward and backward alone.
    grad_accum: micro-batches a step. From the second on, gradients are held when the forward begins.
    loss, tile_mlp: as `ckpt.apply` takes them. With strategy None nothing is applied, so they say nothing: the model
        computes its loss as it does.
    packing: "isolate": rows hold several documents, kept apart by packed attention; "concat" and "none": plain rows.
    documents: with "isolate", documents a row, equally long. Attention with a soft cap needs scratch, most of it for
        one long document; and its FLOPs are those of the documents.
    hold_gradients: gradients stand already when the step begins (an earlier micro-batch, or zeroed in place).
    mesh: degrees by name, such as {"shard": 8}; peaks are then those of one rank.
    routing: how tokens choose experts. "balanced": all experts get equally many. Grouped matmuls need the same memory
        however tokens are routed; experts that run one by one do not.

    Raises ValueError for a value that is not allowed, saying what is.
    """

    batch_size: int = 1
    seq_len: int = 8192
    dtype: str = "bf16"
    optimizer: str | Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer] | None = "adamw"
    grad_accum: int = 1
    loss: str = "chunked"
    tile_mlp: int | str = 1
    packing: str = "none"
    documents: int = 1
    hold_gradients: bool = False
    mesh: Mapping[str, int] | None = None
    routing: str = "balanced"

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("seq_len", 2), ("grad_accum", 1), ("documents", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"workload: {name}={value!r} must be a whole number, {least} or more")
        if self.batch_size * self.seq_len > MOST_TOKENS:
            raise ValueError(
                f"workload: batch_size={self.batch_size} of seq_len={self.seq_len} are more tokens than the "
                f"{MOST_TOKENS} that a prediction can count; lower seq_len"
            )
        if not isinstance(self.hold_gradients, bool):
            raise ValueError(f"workload: hold_gradients={self.hold_gradients!r} must be True or False")
        _one_of("dtype", self.dtype, tuple(DTYPES))
        _one_of("loss", self.loss, LOSSES)
        _one_of("packing", self.packing, PACKINGS)
        _one_of("routing", self.routing, ROUTINGS)
        if self.documents > 1 and self.packing != "isolate":
            raise ValueError(f"workload: documents={self.documents} needs packing='isolate', not {self.packing!r}")
        if isinstance(self.optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"workload: optimizer is a {type(self.optimizer).__name__} that has its parameters already; give its "
                "name, or a function that makes one of a list of parameters"
            )
        if self.optimizer is not None and not callable(self.optimizer):
            _one_of("optimizer", self.optimizer, OPTIMIZERS, " or None, or a function that makes one")
        tiles = self.tile_mlp
        if tiles != "auto" and (isinstance(tiles, bool) or not isinstance(tiles, int) or tiles < 1):
            raise ValueError(f"workload: tile_mlp={tiles!r} must be a whole number, 1 or more, or 'auto'")
        if self.mesh is not None and not isinstance(self.mesh, Mapping):
            raise ValueError(f"workload: mesh={self.mesh!r} must be degrees by name, such as {{'shard': 8}}, or None")
        for name, degree in (self.mesh or {}).items():
            _one_of("mesh", name, DEGREES)
            if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
                raise ValueError(f"workload: mesh degree {name}={degree!r} must be a whole number, 1 or more")

    @property
    def num_ranks(self) -> int:
        """Ranks of the mesh; 1 without one."""
        return math.prod((self.mesh or {}).values())

    @property
    def num_tokens(self) -> int:
        """Tokens of one optimizer step on one rank."""
        return self.batch_size * self.seq_len * self.grad_accum

    def replace(self, **changes: Any) -> Workload:
        """Return a copy with some values changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON; a function as optimizer by its name."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        if callable(self.optimizer):
            values["optimizer"] = getattr(self.optimizer, "__name__", type(self.optimizer).__name__)
        values["mesh"] = None if self.mesh is None else dict(self.mesh)
        return values


def _one_of(name: str, value: Any, allowed: tuple[str, ...], more: str = "") -> None:
    if value not in allowed:
        raise ValueError(f"workload: {name}={value!r} is unknown; it is {', '.join(allowed)}{more}")
