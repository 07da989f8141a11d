"""One call of a language-model head, captured so that it can be made later, or a chunk of tokens at a time.

Owns what must be as it was at the call: the head, autocast, gathered weights, unchanged values. Must not know how a
chunk's gradients are taken (`loss_heads`), nor losses, labels or models.

    call = HeadCall.capture(head, hidden, head.forward)
    call.compute(hidden, operations)                # the real logits, differentiable

Legend: D hidden size, V vocabulary.
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

from ckpt.engine.loss_heads import LinearChunks, ModuleChunks, Operation, Wanted, gemm_dtype


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
    backward_hooks: list[Callable[[Tensor], object]] = dataclasses.field(default_factory=list)
    """Called when backward reaches the head."""

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

    def announce_backward(self, output: Tensor) -> Tensor:
        """Call the backward hooks when a gradient comes to `output`, which stands for the logits in the graph."""
        if output.requires_grad:
            for hook in self.backward_hooks:
                output.register_hook(hook)
        return output

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
            return linear.weight.shape[0], gemm_dtype(linear, self.autocast_dtype)
        with torch.no_grad():
            row = self.forward(hidden.detach().reshape(-1, hidden.shape[-1])[:1])
        return row.shape[-1], row.dtype

    def begin(self, operations: Sequence[Operation], num_chunks: int, wanted: Wanted) -> LinearChunks | ModuleChunks:
        """Prepare to run the head over so many chunks."""
        if (linear := self.linear()) is not None:
            return LinearChunks(linear, self.autocast_dtype, operations, num_chunks, wanted)
        return ModuleChunks(self.forward, self.parameters(), operations, wanted)


def _autocast_dtype(device_type: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
