"""How a language-model head maps hidden states to logits, and how gradients come back, a chunk of tokens at a time.

Owns the two ways to run a head on a chunk: by hand for a plain `nn.Linear`, through autograd for anything else (LoRA,
quantised heads, MLPs). Must not know losses, labels or models.

    chunks = LinearChunks(lm_head, autocast_dtype, operations, num_chunks, Wanted(any=True, hidden=True))
    logits, pull_back = chunks.logits(hidden[:512])     # the caller turns logits into their gradient, in place
    grad_hidden = pull_back(logits)                     # the head's own gradients add up in chunks.gradients()

Legend: C tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from ckpt.engine.loops import turns

Operation = Callable[[Tensor], Tensor]
"""What the model does to its logits, row by row: (..., V) -> (..., V')."""
PullBack = Callable[[Tensor], Tensor | None]
"""Gradient of the chunk's logits (C, V'), may be overwritten -> gradient of its hidden states (C, D), if asked for."""

# Rows of the vocabulary whose bf16 partial gradient is in flight at once: keeps the temporary at a few MiB.
_VOCAB_BLOCK = 8192


@dataclasses.dataclass(frozen=True)
class Widen:
    """A cast of the logits. A class of its own, because the usual one, to fp32, costs nothing: the softmax does it."""

    dtype: torch.dtype

    def __call__(self, logits: Tensor) -> Tensor:
        return logits.to(self.dtype)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which gradients the chunks are to make: none, the head's alone, the hidden states' too."""

    any: bool
    hidden: bool


def gemm_dtype(linear: nn.Linear, autocast_dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of the head's GEMM: the weight's, or autocast's, which leaves fp64 alone."""
    dtype = linear.weight.dtype
    return dtype if autocast_dtype is None or dtype == torch.float64 else autocast_dtype


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which softmax and sums run: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


class LinearChunks:
    """A plain linear head: one GEMM forward, two backward, gradients added where they stay."""

    def __init__(
        self,
        linear: nn.Linear,
        autocast_dtype: torch.dtype | None,
        operations: Sequence[Operation],
        num_chunks: int,
        wanted: Wanted,
    ) -> None:
        self._dtype = gemm_dtype(linear, autocast_dtype)
        self._casts = autocast_dtype is not None  # without autocast hidden states of another dtype are an error
        self._weight = linear.weight.detach().to(self._dtype)
        self._bias = None if linear.bias is None else linear.bias.detach().to(self._dtype)
        self._operations = () if _only_widens(operations, self._dtype) else tuple(operations)
        self._wanted = wanted
        self._buffer: Tensor | None = None
        self._is_first = True
        exact = accumulation_dtype(self._dtype)
        # A sum of many bf16 products in bf16 loses digits with every chunk; one product alone is rounded once anyway.
        total = exact if num_chunks > 1 else self._dtype
        self._weight_grad = self._bias_grad = None
        if wanted.any and linear.weight.requires_grad:
            self._weight_grad = torch.empty_like(self._weight, dtype=total, memory_format=torch.contiguous_format)
        if wanted.any and self._bias is not None and linear.bias.requires_grad:
            self._bias_grad = torch.zeros_like(self._bias, dtype=exact)

    def logits(self, hidden: Tensor) -> tuple[Tensor, PullBack]:
        if self._casts:
            hidden = hidden.to(self._dtype)
        if self._buffer is None:
            self._buffer = hidden.new_empty(hidden.shape[0], self._weight.shape[0])
        raw = self._buffer[: hidden.shape[0]]
        with _no_autocast(hidden):
            if self._bias is None:
                torch.mm(hidden, self._weight.t(), out=raw)
            else:
                torch.addmm(self._bias, hidden, self._weight.t(), out=raw)
        if not self._operations:
            return raw, lambda gradient: self._pull_back(hidden, gradient)
        with torch.set_grad_enabled(self._wanted.any):
            leaf = raw.detach().requires_grad_(self._wanted.any)
            logits = leaf
            for operation in self._operations:
                logits = operation(logits)

        def pull_back(gradient: Tensor) -> Tensor | None:
            (of_raw,) = torch.autograd.grad(logits, leaf, gradient.to(logits.dtype))
            return self._pull_back(hidden, of_raw)

        return _writable_copy(logits), pull_back

    def _pull_back(self, hidden: Tensor, gradient: Tensor) -> Tensor | None:
        with _no_autocast(hidden):
            if self._bias_grad is not None:
                self._bias_grad.add_(gradient.sum(0, dtype=self._bias_grad.dtype))
            if self._weight_grad is not None:
                self._add_weight_gradient(hidden, gradient)
            return gradient @ self._weight if self._wanted.hidden else None

    def _add_weight_gradient(self, hidden: Tensor, gradient: Tensor) -> None:
        add, self._is_first = not self._is_first, False
        if self._weight_grad.dtype == self._dtype:
            total = self._weight_grad
            torch.addmm(total, gradient.t(), hidden, beta=int(add), out=total)
            return
        for start in turns(range(0, self._weight_grad.shape[0], _VOCAB_BLOCK), gradient):
            total = self._weight_grad[start : start + _VOCAB_BLOCK]
            part = gradient[:, start : start + _VOCAB_BLOCK].t() @ hidden
            total.add_(part) if add else total.copy_(part)

    def gradients(self) -> list[Tensor]:
        if self._is_first and self._weight_grad is not None:
            self._weight_grad.zero_()
        return [gradient for gradient in (self._weight_grad, self._bias_grad) if gradient is not None]


class ModuleChunks:
    """Any other head, through autograd: its trainable tensors' gradients are summed in fp32."""

    def __init__(
        self,
        forward: Callable[[Tensor], Tensor],
        parameters: list[Tensor],
        operations: Sequence[Operation],
        wanted: Wanted,
    ) -> None:
        self._forward, self._operations = forward, operations
        self._parameters = parameters if wanted.any else []
        self._wanted = wanted
        self._totals = [
            torch.zeros_like(parameter, dtype=accumulation_dtype(parameter.dtype)) for parameter in self._parameters
        ]

    def logits(self, hidden: Tensor) -> tuple[Tensor, PullBack]:
        with torch.set_grad_enabled(self._wanted.any):
            leaf = hidden.detach().requires_grad_(self._wanted.any)
            logits = self._forward(leaf)
            for operation in self._operations:
                logits = operation(logits)

        def pull_back(gradient: Tensor) -> Tensor:
            found = torch.autograd.grad(
                logits, [leaf, *self._parameters], gradient.to(logits.dtype), allow_unused=True, materialize_grads=True
            )
            for total, part in zip(self._totals, found[1:], strict=True):
                total.add_(part)
            return found[0]

        return _writable_copy(logits), pull_back

    def gradients(self) -> list[Tensor]:
        return self._totals


Chunks = LinearChunks | ModuleChunks


def _writable_copy(logits: Tensor) -> Tensor:
    """Copy what backward may still need, so that the caller can turn logits into their gradient in place."""
    return logits.detach().to(accumulation_dtype(logits.dtype), copy=True)


def _only_widens(operations: Sequence[Operation], dtype: torch.dtype) -> bool:
    return all(
        isinstance(operation, Widen) and operation.dtype in (dtype, accumulation_dtype(dtype))
        for operation in operations
    )


def _no_autocast(tensor: Tensor) -> contextlib.AbstractContextManager:
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()
