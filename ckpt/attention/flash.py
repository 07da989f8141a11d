"""Flash attention on CUDA with variable lengths, and on CPU for one document at a time.

Both are torch's own (private) ops, as of 2.11 to 2.13. Shapes are those of `kernels.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ckpt.attention.spec import Spec

aten = torch.ops.aten


def _flat(x: Tensor, size: int) -> Tensor:
    """(B, heads, T, size') -> (B*T, heads, size), zero-padded: without a copy where memory is (B, T, heads, size)."""
    return (
        F.pad(x, (0, size - x.shape[-1])).transpose(1, 2).flatten(0, 1)
        if x.shape[-1] < size
        else x.transpose(1, 2).flatten(0, 1)
    )


def _flash_size(q: Tensor, v: Tensor) -> int:
    """Head size that flash runs at: one for q, k and v (MLA has two), a multiple of 8."""
    return -(-max(q.shape[-1], v.shape[-1]) // 8) * 8


def _window(spec: Spec) -> dict[str, int]:
    return {"window_size_left": spec.window - 1, "window_size_right": 0} if spec.window else {}


def varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, max_length: int, spec: Spec
) -> tuple[Tensor, Tensor]:
    """Attend within all documents of all rows at once: (output (B, T, H, V), log-sum-exp (H, B*T))."""
    size = _flash_size(q, v)
    flat = [_flat(x, size) for x in (q, k, v)]
    out, lse, *_ = aten._flash_attention_forward(
        *flat, bounds, bounds, max_length, max_length, 0.0, True, False, scale=spec.scale, **_window(spec)
    )
    out = out[..., : v.shape[-1]].contiguous()
    return out.view(q.shape[0], q.shape[2], q.shape[1], v.shape[-1]), lse


def varlen_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bounds: Tensor, max_length: int, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradients of q, k and v, key and value heads not repeated."""
    size = _flash_size(q, v)
    flat = [_flat(x, size) for x in (grad.transpose(1, 2), q, k, v, out.transpose(1, 2))]
    rng, unused = q.new_zeros(2, dtype=torch.uint64), q.new_empty(0)  # dropout is 0: never read
    grads = aten._flash_attention_backward(
        *flat, lse, bounds, bounds, max_length, max_length, 0.0, True, rng, unused, scale=spec.scale, **_window(spec)
    )
    return tuple(
        g[..., : x.shape[-1]].contiguous().view(x.shape[0], x.shape[2], x.shape[1], -1).transpose(1, 2)
        for g, x in zip(grads, (q, k, v), strict=True)
    )


def _same_size(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Zero-pad head sizes to the largest: CPU flash wants one (MLA has two). Zeros add nothing to scores or outputs."""
    size = max(x.shape[-1] for x in tensors)
    return tuple(F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x for x in tensors)


def _blocks(length: int, window: int) -> list[tuple[int, int, int]]:
    """Cut a document's queries so that each block's keys fit a window: (first query, last query + 1, first key).

    The first `window` queries are plain causal attention; a later block of c queries sees c + window - 1 keys.
    """
    if not window or length <= window:
        return [(0, length, 0)]
    chunk = min(512, max(64, window // 4))
    later = range(window, length, chunk)
    return [(0, window, 0)] + [(a, min(a + chunk, length), a - window + 1) for a in later]


def _band(queries: int, window: int, like: Tensor) -> Tensor:
    """Additive mask (queries, queries + window - 1): query i sees keys i to i + window - 1 of its block."""
    ones = like.new_ones(queries, queries + window - 1, dtype=torch.bool)
    return torch.where(ones.triu().tril(window - 1), 0.0, float("-inf")).to(like.dtype)


def cpu_forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Attend causally over one document (or equal ones): (output (B, H, N, V), log-sum-exp (B, H, N))."""
    size = v.shape[-1]
    q, k, v = _same_size(q, k, v)
    flash, band, parts = aten._scaled_dot_product_flash_attention_for_cpu, None, []
    for a, b, first in _blocks(q.shape[2], spec.window):
        if a == 0:
            parts.append(flash(q[:, :, :b], k[:, :, :b], v[:, :, :b], 0.0, True, scale=spec.scale))
            continue
        if band is None or band.shape[0] != b - a:
            band = _band(b - a, spec.window, q)
        parts.append(
            flash(q[:, :, a:b], k[:, :, first:b], v[:, :, first:b], 0.0, False, attn_mask=band, scale=spec.scale)
        )
    if len(parts) == 1:
        return parts[0][0][..., :size], parts[0][1]
    return torch.cat([o for o, _ in parts], 2)[..., :size], torch.cat([z for _, z in parts], 2)


def cpu_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradients of q, k and v of one document (or equal ones), key and value heads not repeated."""
    sizes = [x.shape[-1] for x in (q, k, v)]
    grad, q, k, v, out = _same_size(grad, q, k, v, out)
    flash, blocks = aten._scaled_dot_product_flash_attention_for_cpu_backward, _blocks(q.shape[2], spec.window)
    if len(blocks) == 1:
        grads = flash(grad, q, k, v, out, lse, 0.0, True, scale=spec.scale)
        return tuple(g[..., :size] for g, size in zip(grads, sizes, strict=True))
    # A key is seen from several blocks: sum its gradient in the precision of the log-sum-exp.
    grad_q, grad_k, grad_v = (
        torch.empty_like(q),
        torch.zeros_like(k, dtype=lse.dtype),
        torch.zeros_like(v, dtype=lse.dtype),
    )
    band = None
    for a, b, first in blocks:
        if a > 0 and (band is None or band.shape[0] != b - a):
            band = _band(b - a, spec.window, q)
        part = flash(
            grad[:, :, a:b],
            q[:, :, a:b],
            k[:, :, first:b],
            v[:, :, first:b],
            out[:, :, a:b],
            lse[:, :, a:b],
            0.0,
            a == 0,
            attn_mask=band if a else None,
            scale=spec.scale,
        )
        grad_q[:, :, a:b] = part[0]
        grad_k[:, :, first:b] += part[1]
        grad_v[:, :, first:b] += part[2]
    return tuple(g[..., :size].to(q.dtype) for g, size in zip((grad_q, grad_k, grad_v), sizes, strict=True))
