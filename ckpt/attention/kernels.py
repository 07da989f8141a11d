"""Causal attention over many documents in one row: three kernels behind one pair of functions.

`forward` and `backward` are what the opaque op of `op.py` runs on real tensors. No kernel ever holds an S x S matrix:

| kernel | taken for | memory beyond inputs and outputs |
|---|---|---|
| `varlen` | CUDA, half precision, head size <= 256, no soft cap | none (FlashAttention's variable-length entry) |
| `flash_cpu` | CPU, no soft cap | one document's output; with a window, one band mask of (chunk, chunk + window) |
| `math` | all else: soft cap, fp32 on CUDA | one block of scores, `blocks.ELEMENTS` numbers |

Attention sinks (GPT-OSS) need no kernel of their own. With z the log-sum-exp of the scores and s the sink, the sink
scales the output by exp(z - z'), z' = logaddexp(z, s); and since flash backward rebuilds probabilities from the
log-sum-exp it is given and subtracts rowsum(grad_out * out), handing it z' and the scaled output gives the
gradients of attention with the sink.

Shapes: B rows, T tokens a row, H query heads, K key/value heads (H % K == 0), E query/key head size, V value head
size, N tokens of one document. Queries (B, H, T, E), keys (B, K, T, E), values (B, K, T, V); outputs (B, T, H, V),
log-sum-exp (H, B*T).
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ckpt.attention import blocks, flash
from ckpt.attention.spec import Spec, lse_dtype

_FORWARD = {"flash_cpu": flash.cpu_forward, "math": blocks.forward}
_BACKWARD = {"flash_cpu": flash.cpu_backward, "math": blocks.backward}


def choose(query: Tensor, value: Tensor, softcap: float) -> str:
    """Name the kernel for these inputs: `varlen`, `flash_cpu` or `math`. Reads device, dtype and head sizes only."""
    if softcap:
        return "math"
    if query.device.type == "cpu":
        return "flash_cpu"
    half = query.dtype in (torch.bfloat16, torch.float16)
    return "varlen" if query.device.type == "cuda" and half and max(query.shape[-1], value.shape[-1]) <= 256 else "math"


def forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, max_length: int, spec: Spec, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Attend within each document: (output (B, T, H, V), log-sum-exp (H, B*T)). `bounds`: int32 starts, then B*T."""
    q, k, v = (_rows(x) for x in (q, k, v))
    kernel = choose(q, v, spec.softcap)
    if kernel == "varlen":
        out, lse = flash.varlen_forward(q, k, v, bounds, max_length, spec)
    else:
        out, lse = _by_document_forward(kernel, q, k, v, bounds, spec)
    if sinks is not None:
        with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
        out.mul_(torch.exp(lse - with_sink).t().reshape(*out.shape[:3], 1).to(out.dtype))
        lse = with_sink
    return out, lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    max_length: int,
    spec: Spec,
    sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give the gradients of q, k, v (laid out (B, T, heads, size) in memory) and of the sinks (empty without them)."""
    grad, q, k, v = grad.contiguous(), _rows(q), _rows(k), _rows(v)
    kernel = choose(q, v, spec.softcap)
    if kernel == "varlen":
        grads = flash.varlen_backward(grad, q, k, v, out, lse, bounds, max_length, spec)
    else:
        grads = _by_document_backward(kernel, grad, q, k, v, out, lse, bounds, spec)
    if sinks is None:
        return *grads, q.new_empty(0)
    delta = torch.einsum("bthv,bthv->hbt", grad.to(lse.dtype), out.to(lse.dtype)).flatten(1)
    grad_sinks = -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum(1)
    return *grads, grad_sinks.to(sinks.dtype)


def _rows(x: Tensor) -> Tensor:
    """Make the elements of a head neighbours in memory, as flash kernels want them; no copy where they are."""
    return x if x.stride(-1) == 1 else x.contiguous()


def documents(bounds: Tensor, batch: int, tokens: int) -> list[tuple[int, int, int]]:
    """List (row, start, end) of each document. Empty documents are skipped; neighbours never merge.

    Raises ValueError when `bounds` does not run from 0 to batch * tokens, or a document crosses the end of a row.
    """
    with unset_fake_temporarily():  # a simulation gives fake tensors with real bounds
        starts = bounds.tolist()
    if starts[0] != 0 or starts[-1] != batch * tokens or any(b < a for a, b in pairwise(starts)):
        raise ValueError(
            f"cu_seq_lens_q must rise from 0 to batch * tokens = {batch * tokens}, padding included; got "
            f"{starts[:4]}...{starts[-2:]}. Count the padding as a document of its own."
        )
    found = []
    for start, end in pairwise(starts):
        if start == end:
            continue
        row = start // tokens
        if end > (row + 1) * tokens:
            raise ValueError(
                f"a document covers tokens {start} to {end} of the flattened batch, across the end of row {row} "
                f"({tokens} tokens a row). Start each row with a document boundary."
            )
        found.append((row, start - row * tokens, end - row * tokens))
    return found


def _by_document_forward(
    kernel: str, q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, spec: Spec
) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = q.shape
    attend = _FORWARD[kernel]
    found = documents(bounds, batch, tokens)
    if all(start == 0 and end == tokens for _, start, end in found):  # whole rows: no copy
        out, lse = attend(q, k, v, spec)
        return out.transpose(1, 2).contiguous(), lse.transpose(0, 1).flatten(1).contiguous()
    out = q.new_empty(batch, tokens, heads, v.shape[-1])
    lse = q.new_empty(heads, batch * tokens, dtype=lse_dtype(q.dtype))
    for row, start, end in found:
        one = (slice(row, row + 1), slice(None), slice(start, end))
        o, z = attend(q[one], k[one], v[one], spec)
        out[row, start:end] = o[0].transpose(0, 1)
        lse[:, row * tokens + start : row * tokens + end] = z[0]
    return out, lse


def _by_document_backward(
    kernel: str, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, tokens, _ = q.shape
    attend = _BACKWARD[kernel]
    grad, out = grad.transpose(1, 2), out.transpose(1, 2)
    lse = lse.view(heads, batch, tokens).transpose(0, 1)
    found = documents(bounds, batch, tokens)
    if all(start == 0 and end == tokens for _, start, end in found):
        grads = attend(grad, q, k, v, out, lse, spec)
        return tuple(g.transpose(1, 2).contiguous().transpose(1, 2) for g in grads)
    grads = tuple(x.new_empty(batch, tokens, x.shape[1], x.shape[3]).transpose(1, 2) for x in (q, k, v))
    for row, start, end in found:
        one = (slice(row, row + 1), slice(None), slice(start, end))
        for whole, part in zip(grads, attend(*(x[one] for x in (grad, q, k, v, out, lse)), spec), strict=True):
            whole[one] = part
    return grads
