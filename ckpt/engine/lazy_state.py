"""What lazy logits remember, and what became of them. Data only; `lazy_logits` and `lazy_functions` act on it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from ckpt.engine.loss_call import HeadCall
from ckpt.engine.loss_heads import Operation


@dataclasses.dataclass
class Stats:
    """What became of the lazy logits of one forward."""

    chunk_tokens: int | None = None
    """As asked for; None: by shape."""
    num_lazy: int = 0
    num_chunked: int = 0
    tokens_per_chunk: int = 0
    refused: str | None = None
    """Why the head's output is not lazy."""
    made_real_by: list[str] = dataclasses.field(default_factory=list)
    """Names of the functions that needed real logits."""


@dataclasses.dataclass(eq=False)
class State:
    """Rows of logits, (..., V): `operations` applied to the head's output for `hidden`, (..., D)."""

    call: HeadCall
    hidden: Tensor
    operations: tuple[Operation, ...]
    stats: Stats
    grad_mode: bool
    """Whether gradients were on when the model made the logits, and nobody has detached them."""
    family: dict[str, bool]
    """Shared by all lazy views of the same logits; `viewed` once there is more than one."""
    real: Tensor | None = None
    real_grad_mode: bool = False
    written: bool = False
    """Whether `real` was written in place: then it is the value, and cannot be computed again."""

    def wants_graph(self) -> bool:
        """Whether real logits made now must be differentiable."""
        return self.grad_mode and torch.is_grad_enabled()

    def is_real(self) -> bool:
        """Whether the real logits exist already, in a way that serves the present grad mode."""
        return self.real is not None and (self.written or self.real_grad_mode or not self.wants_graph())


def is_lazy(value: Any) -> bool:
    """Return whether `value` is a LazyLogits, real or not yet."""
    return isinstance(value, Tensor) and isinstance(getattr(value, "state", None), State)
