"""Cross entropy over chunks of tokens: no (N, V) tensor ever exists, forward or backward.

Owns the arithmetic: which positions count, the loop, the softmax, the autograd node. Must not know models.

    loss = chunked_cross_entropy(call, operations, hidden, target, reduction="mean", chunk_tokens=512)

The gradient of a summed or averaged loss is known up to a factor as soon as a chunk's logits are, so it is taken while
they exist: three head GEMMs a chunk, none repeated, and backward only multiplies by the incoming gradient
(the idea of Liger-Kernel's fused linear cross entropy, arXiv:2410.10989).

Legend: N positions, C of them in a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ckpt.engine.loops import turns
from ckpt.engine.loss_call import HeadCall
from ckpt.engine.loss_heads import Operation, Wanted, accumulation_dtype

# Shorter chunks slow the head's GEMMs: on a busy Xeon core, V=32,000, D=1024, by 15% at 256 tokens, 10% at 512, none at
# 1024. At D=256 the softmax saves what 512 tokens lose.
_MIN_AUTO_TOKENS, _MAX_START_TOKENS = 512, 1024

# The fp32 softmax runs over so many bytes at a time: what a CPU core's cache holds; enough to fill an accelerator.
_SOFTMAX_BYTES_CPU = 2 * 2**20
_SOFTMAX_BYTES_ACCELERATOR = 128 * 2**20

# Positions without a label are left out when they are more than one in so many; below, gathering costs what it saves.
_GATHER_FROM = 16


@dataclasses.dataclass(frozen=True)
class Reduction:
    """The meaning of `torch.nn.functional.cross_entropy`'s arguments of the same names."""

    kind: str = "mean"
    ignore_index: int = -100
    label_smoothing: float = 0.0


def auto_chunk_tokens(num_tokens: int, hidden_size: int, vocab_size: int) -> int:
    """Return a power of two: enough tokens for the head's GEMMs, from 512 to 1024 by hidden size; more if it is cheap.

    Cheap is a chunk whose logits in fp32 take no more bytes than the hidden states of all tokens in bf16: longer chunks
    touch the head's weight gradient less often, which matters where GEMMs are fast. Shapes alone decide, so that a
    prediction on another device chunks alike.
    """
    enough = min(max(hidden_size, _MIN_AUTO_TOKENS), _MAX_START_TOKENS)
    cheap = num_tokens * hidden_size // (2 * vocab_size)
    return 1 << (max(enough, cheap).bit_length() - 1)


def chunked_cross_entropy(
    call: HeadCall,
    operations: Sequence[Operation],
    hidden: Tensor,
    target: Tensor,
    reduction: Reduction,
    chunk_tokens: int,
) -> Tensor:
    """Return the cross entropy of the head's logits for `hidden` (N, D) and class indices `target` (N,): a scalar.

    As `torch.nn.functional.cross_entropy`, except that the result is fp32 (fp64 for fp64 logits) and that a batch
    without a label gives 0.
    """
    call.check_unchanged()
    with call.ready():
        parameters = call.parameters()
        job = _Job(call, tuple(operations), reduction, chunk_tokens, torch.is_grad_enabled(), bool(parameters))
        loss = _ChunkedCrossEntropy.apply(job, hidden, target.to(hidden.device), *parameters)
    return call.announce_backward(loss)


@dataclasses.dataclass(frozen=True, eq=False)
class _Job:
    call: HeadCall
    operations: tuple[Operation, ...]
    reduction: Reduction
    chunk_tokens: int
    grad_enabled: bool
    trains_head: bool


@dataclasses.dataclass
class _Positions:
    """Which rows are computed: all of them (`rows` None), or the gathered ones; `labelled` masks those that count."""

    rows: Tensor | None
    labelled: Tensor | None
    count: Tensor

    @classmethod
    def of(cls, target: Tensor, ignore_index: int) -> _Positions:
        labelled = target != ignore_index
        count = labelled.sum()
        # On fake tensors the number of labels is unknown: compute all, as for a batch that is labelled throughout.
        if isinstance(target, FakeTensor) or target.is_meta:
            return cls(None, labelled, count)
        num_labelled, num_positions = int(count), target.shape[0]
        if num_labelled == num_positions:
            return cls(None, None, count)
        if (num_positions - num_labelled) * _GATHER_FROM > num_positions:
            return cls(labelled.nonzero().squeeze(1), None, count)
        return cls(None, labelled, count)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, job: _Job, hidden: Tensor, target: Tensor, *parameters: Tensor) -> Tensor:
        wants_hidden = job.grad_enabled and hidden.requires_grad
        wanted = Wanted(any=wants_hidden or (job.grad_enabled and job.trains_head), hidden=wants_hidden)
        loss, of_hidden, of_head = _run(job, hidden, target, wanted)
        ctx.gradients = (of_hidden, of_head) if wanted.any else None
        ctx.dtypes = [parameter.dtype for parameter in parameters]
        return loss

    @staticmethod
    def backward(ctx, incoming: Tensor):
        if torch.is_grad_enabled():
            raise RuntimeError("loss='chunked' has no second derivative (create_graph=True). Use loss='full'.")
        if ctx.gradients is None:
            raise RuntimeError(
                "Backward reached the chunked loss a second time. Its gradients are made in the forward and handed out "
                "once, to save memory: sum the losses before backward, or use loss='full'."
            )
        of_hidden, of_head = ctx.gradients
        ctx.gradients = None
        # Scaled before the cast: a bf16 head's gradient is rounded once. Where looking is free, 1 is not multiplied.
        look = incoming.device.type == "cpu" and not isinstance(incoming, FakeTensor)
        if not (look and incoming.item() == 1):
            for gradient in (of_hidden, *of_head):
                if gradient is not None:
                    gradient.mul_(incoming)
        return None, of_hidden, None, *(total.to(dtype) for total, dtype in zip(of_head, ctx.dtypes, strict=True))


def _run(job: _Job, hidden: Tensor, target: Tensor, wanted: Wanted) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """Loop over chunks. Returns the loss, the gradient of `hidden` (N, D) or None, and the head's gradients."""
    reduction = job.reduction
    positions = _Positions.of(target, reduction.ignore_index)
    rows, labelled = positions.rows, positions.labelled
    num_rows = hidden.shape[0] if rows is None else rows.shape[0]
    starts = range(0, num_rows, job.chunk_tokens)
    head = job.call.begin(job.operations, len(starts), wanted)
    total = hidden.new_zeros((), dtype=accumulation_dtype(hidden.dtype))
    scale = positions.count.clamp(min=1).to(total.dtype).reciprocal() if reduction.kind == "mean" else None
    of_hidden = None
    if wanted.hidden:
        make = torch.empty_like if rows is None else torch.zeros_like
        of_hidden = make(hidden, memory_format=torch.contiguous_format)

    for start in turns(starts, hidden):
        span = slice(start, min(start + job.chunk_tokens, num_rows))
        chosen = span if rows is None else rows[span]
        x, y = hidden[chosen], target[chosen]
        mask = None if labelled is None else labelled[span]
        if mask is not None:
            y = y.where(mask, 0)
        logits, pull_back = head.logits(x)
        losses = softmax_(logits, y, reduction.label_smoothing, scale, wanted.any, mask)
        total = total + losses.sum()
        gradient = pull_back(logits) if wanted.any else None
        if of_hidden is not None:
            of_hidden[chosen] = gradient.to(of_hidden.dtype)
    if scale is not None:
        total = total * scale
    return total, of_hidden, head.gradients() if wanted.any else []


def softmax_(
    logits: Tensor, target: Tensor, smoothing: float, scale: Tensor | None, want_grad: bool, mask: Tensor | None
) -> Tensor:
    """Return the losses (C,) of `logits` (C, V) and overwrite these with the gradient of `scale` times the losses' sum.

    Runs in fp32 over blocks of rows that stay in cache; `logits` may be bf16. Where `mask` (C,) is false, loss and
    gradient are 0. With `want_grad=False` the logits are left as scratch.
    """
    exact = accumulation_dtype(logits.dtype)
    num_rows, vocab_size = logits.shape
    budget = _SOFTMAX_BYTES_CPU if logits.device.type == "cpu" else _SOFTMAX_BYTES_ACCELERATOR
    size = max(1, budget // (vocab_size * exact.itemsize))
    losses = torch.empty(num_rows, dtype=exact, device=logits.device)
    blocks = range(0, num_rows, size)
    for start in turns(blocks, logits):
        span = slice(start, start + size)
        block, index = logits[span], target[span].unsqueeze(1)
        values = block.to(exact)
        values.sub_(values.amax(1, keepdim=True))
        loss = values.gather(1, index).mul_(smoothing - 1)
        if smoothing:
            loss.sub_(values.mean(1, keepdim=True).mul_(smoothing))
        sums = values.exp_().sum(1, keepdim=True)
        loss.add_(sums.log())
        factor = _row_factor(scale, mask, span)
        if mask is not None:
            loss = loss.where(mask[span, None], 0)
        losses[span] = loss.squeeze(1)
        if want_grad:
            _softmax_to_gradient_(values, sums, index, smoothing, factor)
            if block.dtype != exact:
                block.copy_(values)
    return losses


def _row_factor(scale: Tensor | None, mask: Tensor | None, span: slice) -> Tensor | None:
    """Return what the block's gradient rows are multiplied by, broadcast to (rows, 1) or (), or None for 1."""
    if mask is None:
        return scale
    rows = mask[span, None]
    return rows if scale is None else rows * scale


def _softmax_to_gradient_(values: Tensor, sums: Tensor, index: Tensor, smoothing: float, factor: Tensor | None) -> None:
    """Turn exp(logits - max) into d loss / d logits = softmax - (1 - s) onehot - s / V, times `factor`, in place."""
    factor = None if factor is None else factor.to(values.dtype)  # the hidden states of an fp64 model are wider
    hot = torch.full_like(sums, smoothing - 1)
    inverse = sums.reciprocal()
    if factor is not None:
        hot, inverse = hot * factor, inverse * factor
    values.mul_(inverse)
    values.scatter_add_(1, index, hot)
    if smoothing:
        values.sub_(smoothing / values.shape[1] * (1 if factor is None else factor))
