"""How a language-model head maps hidden states to logits, and how gradients come back, a chunk of tokens at a time.

Owns the captured call of a head (`HeadCall`) and the two ways to run it on a chunk: by hand for a plain `nn.Linear`,
through autograd for anything else (LoRA, quantised heads, MLPs). Must not know losses, labels or models.

    chunk = HeadCall.capture(head, hidden, head.forward).begin(operations, hidden, num_chunks, want_grad=True)
    logits, pull_back = chunk.logits(hidden[:512])     # the caller turns logits into their gradient, in place
    grad_hidden = pull_back(logits)                    # the head's own gradients add up in chunk.gradients()

Legend: C tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ckpt.engine.loops import turns

Operation = Callable[[Tensor], Tensor]
"""What the model does to its logits, row by row: (..., V) -> (..., V')."""
PullBack = Callable[[Tensor], Tensor]
"""Gradient of the chunk's logits (C, V'), may be overwritten -> gradient of the chunk's hidden states (C, D)."""

# Rows of the vocabulary whose bf16 partial gradient is in flight at once: keeps the temporary at a few MiB.
_VOCAB_BLOCK = 8192


@dataclasses.dataclass(frozen=True)
class Widen:
    """A cast of the logits. A class of its own, because the usual one, to fp32, costs nothing: the softmax does it."""

    dtype: torch.dtype

    def __call__(self, logits: Tensor) -> Tensor:
        return logits.to(self.dtype)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which softmax and sums run: fp32, or fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


@dataclasses.dataclass(eq=False)
class HeadCall:
    """One call of a head, as it was made: the module, what is called for it, autocast, and its tensors' versions.

    Logits may be asked for long after the forward (a metric, a second loss term), outside of the caller's autocast, or
    after the optimizer moved the weights. The first is restored; the second is an error, never other values.
    """

    head: nn.Module
    forward: Callable[[Tensor], Tensor]
    is_own_forward: bool
    """Whether `forward` is the head class's own, and no wrapper's of another library."""
    device_type: str
    autocast_dtype: torch.dtype | None
    versions: list[tuple[Tensor, int]]

    @classmethod
    def capture(
        cls, head: nn.Module, hidden: Tensor, forward: Callable[[Tensor], Tensor], is_own_forward: bool = True
    ) -> HeadCall:
        call = cls(head, forward, is_own_forward, hidden.device.type, _autocast_dtype(hidden.device.type), [])
        for tensor in (hidden, *head.parameters()):
            call.watch(tensor)
        return call

    def watch(self, tensor: Tensor) -> None:
        """Remember the tensor's version, so that a later write to it is noticed."""
        if not tensor.is_inference():
            self.versions.append((tensor, tensor._version))

    def check_unchanged(self) -> None:
        if any(tensor._version != version for tensor, version in self.versions):
            raise RuntimeError(
                "The logits of a model with loss='chunked' are computed when they are read, and the head's weights or "
                "inputs have changed since the forward. Read outputs.logits before optimizer.step(), call the model "
                "without labels, or use loss='full'."
            )

    def linear(self) -> nn.Linear | None:
        """Return the head if it is a plain linear layer, whose three GEMMs we can run ourselves."""
        head = self.head
        plain = self.is_own_forward and isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward
        return head if plain and head.weight.is_floating_point() else None

    def parameters(self) -> list[Tensor]:
        """List the trainable tensors that the head reads. Parametrised weights count as what they compute to."""
        if (linear := self.linear()) is not None:
            found = [linear.weight] if linear.bias is None else [linear.weight, linear.bias]
        else:
            found = list(self.head.parameters())
        return [tensor for tensor in found if tensor.requires_grad]

    @contextlib.contextmanager
    def ready(self) -> Iterator[None]:
        """Restore the caller's autocast, and gather a head that FSDP2 sharded apart and freed after its own forward."""
        sharded = [parameter for parameter in self.head.parameters() if isinstance(parameter, DTensor)]
        if sharded and not isinstance(self.head, FSDPModule):
            raise RuntimeError(
                "The logits of a model with loss='chunked' are computed when they are read, and FSDP has freed the "
                "head's weights since the forward. Read outputs.logits before backward, call the model without labels, "
                "or use loss='full'."
            )
        for parameter in sharded:
            self.watch(parameter)
        if sharded:
            self.head.unshard()
        try:
            with self._autocast():
                yield
        finally:
            if sharded:
                self.head.reshard()

    def _autocast(self) -> contextlib.AbstractContextManager:
        if _autocast_dtype(self.device_type) == self.autocast_dtype:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None)

    def compute(self, hidden: Tensor, operations: Sequence[Operation]) -> Tensor:
        """Return the real logits, (..., V), differentiable where gradients are on."""
        self.check_unchanged()
        with self.ready():
            logits = self.forward(hidden)
            for operation in operations:
                logits = operation(logits)
        return logits

    def row_independence_error(self, hidden: Tensor) -> str | None:
        """Say why rows cannot be computed apart, or None. Tries four rows; a plain linear layer needs no trial."""
        if self.linear() is not None or isinstance(hidden, FakeTensor):
            return None
        rows = hidden.detach().reshape(-1, hidden.shape[-1])[:4]
        with torch.no_grad():
            whole = self.forward(rows)
            parts = [self.forward(rows[:1]), self.forward(rows[1:])] if rows.shape[0] > 1 else [whole]
        if not isinstance(whole, Tensor) or whole.dim() != 2:
            return "the head does not map (tokens, hidden) to (tokens, vocab)"
        tolerance = 16 * torch.finfo(whole.dtype).eps
        if not torch.allclose(whole, torch.cat(parts), rtol=tolerance, atol=tolerance * float(whole.abs().max())):
            return "a row of the head's output depends on other rows"
        return None

    def shape_of_row(self, hidden: Tensor) -> tuple[int, torch.dtype]:
        """Return the vocabulary size and the dtype of this head's output."""
        if (linear := self.linear()) is not None:
            return linear.out_features, self.autocast_dtype or linear.weight.dtype
        with torch.no_grad():
            row = self.forward(hidden.detach().reshape(-1, hidden.shape[-1])[:1])
        return row.shape[-1], row.dtype

    def begin(self, operations: Sequence[Operation], hidden: Tensor, num_chunks: int, want_grad: bool) -> Chunks:
        """Prepare to run the head over the chunks of `hidden`."""
        if (linear := self.linear()) is not None:
            return _LinearChunks(linear, self.autocast_dtype, operations, hidden, num_chunks, want_grad)
        return _ModuleChunks(self.forward, self.parameters(), operations, want_grad)


class _LinearChunks:
    """A plain linear head: one GEMM forward, two backward, gradients added where they stay."""

    def __init__(
        self,
        linear: nn.Linear,
        autocast_dtype: torch.dtype | None,
        operations: Sequence[Operation],
        hidden: Tensor,
        num_chunks: int,
        want_grad: bool,
    ) -> None:
        self._dtype = autocast_dtype or linear.weight.dtype
        self._weight = linear.weight.detach().to(self._dtype)
        self._bias = None if linear.bias is None else linear.bias.detach().to(self._dtype)
        self._operations = () if _only_widens(operations, self._dtype) else tuple(operations)
        self._want_grad = want_grad
        self._buffer: Tensor | None = None
        self._is_first = True
        exact = accumulation_dtype(self._dtype)
        # A sum of many bf16 products in bf16 loses digits with every chunk; one product alone is rounded once anyway.
        total = exact if num_chunks > 1 else self._dtype
        self._weight_grad = self._bias_grad = None
        if want_grad and linear.weight.requires_grad:
            self._weight_grad = torch.empty_like(self._weight, dtype=total, memory_format=torch.contiguous_format)
        if want_grad and self._bias is not None and linear.bias.requires_grad:
            self._bias_grad = torch.zeros_like(self._bias, dtype=exact)

    def logits(self, hidden: Tensor) -> tuple[Tensor, PullBack]:
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
        with torch.set_grad_enabled(self._want_grad):
            leaf = raw.detach().requires_grad_(self._want_grad)
            logits = leaf
            for operation in self._operations:
                logits = operation(logits)

        def pull_back(gradient: Tensor) -> Tensor:
            (of_raw,) = torch.autograd.grad(logits, leaf, gradient.to(logits.dtype))
            return self._pull_back(hidden, of_raw)

        return _writable_copy(logits), pull_back

    def _pull_back(self, hidden: Tensor, gradient: Tensor) -> Tensor:
        with _no_autocast(hidden):
            if self._bias_grad is not None:
                self._bias_grad.add_(gradient.sum(0, dtype=self._bias_grad.dtype))
            if self._weight_grad is not None:
                self._add_weight_gradient(hidden, gradient)
            return gradient @ self._weight

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


class _ModuleChunks:
    """Any other head, through autograd: its trainable tensors' gradients are summed in fp32."""

    def __init__(
        self, forward: Callable[[Tensor], Tensor], parameters: list[Tensor], operations: Sequence[Operation], want: bool
    ) -> None:
        self._forward, self._operations = forward, operations
        self._parameters = parameters if want else []
        self._want_grad = want
        self._totals = [
            torch.zeros_like(parameter, dtype=accumulation_dtype(parameter.dtype)) for parameter in self._parameters
        ]

    def logits(self, hidden: Tensor) -> tuple[Tensor, PullBack]:
        with torch.set_grad_enabled(self._want_grad):
            leaf = hidden.detach().requires_grad_(self._want_grad)
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


Chunks = _LinearChunks | _ModuleChunks


def _writable_copy(logits: Tensor) -> Tensor:
    """Copy what backward may still need, so that the caller can turn logits into their gradient in place."""
    return logits.detach().to(accumulation_dtype(logits.dtype), copy=True)


def _only_widens(operations: Sequence[Operation], dtype: torch.dtype) -> bool:
    return all(
        isinstance(operation, Widen) and operation.dtype in (dtype, accumulation_dtype(dtype))
        for operation in operations
    )


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def _no_autocast(tensor: Tensor) -> contextlib.AbstractContextManager:
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()
