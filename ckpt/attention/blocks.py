"""Causal attention over one document in plain torch, in blocks of queries: for what no flash kernel computes.

Shapes are those of `kernels.py`; G is the number of query heads that share a key head, H // K.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ckpt.attention.spec import Spec, lse_dtype

ELEMENTS = 2**24  # scores held at once: 64 MiB in fp32


def _blocks(q: Tensor, window: int) -> list[tuple[int, int, int]]:
    """Cut queries so that one block's scores stay within `ELEMENTS`: (first query, last query + 1, first key)."""
    batch, heads, length, _ = q.shape
    chunk = max(1, min(512, ELEMENTS // (batch * heads * length)))
    starts = range(0, length, chunk)
    blocks = [(a, min(a + chunk, length), max(0, a - window + 1) if window else 0) for a in starts]
    # Later blocks see more keys, the last may be short, and a block begins while the scores of the one before stand:
    # in a simulation the last three tell the peak.
    return [blocks[0], *blocks[-3:]] if isinstance(q, FakeTensor) and len(blocks) > 4 else blocks


def _scores(q: Tensor, k: Tensor, a: int, b: int, first: int, spec: Spec) -> tuple[Tensor, Tensor | None]:
    """Masked, scaled, capped scores (B, K, G, b-a, b-first) and, with a cap, tanh of the capped ones."""
    scores = q[:, :, :, a:b] @ k[:, :, None, first:b].mT * spec.scale
    tanh = None
    if spec.softcap:
        tanh = torch.tanh(scores / spec.softcap)
        scores = tanh * spec.softcap
    distance = torch.arange(a, b, device=q.device)[:, None] - torch.arange(first, b, device=q.device)
    seen = (distance >= 0) & (distance < spec.window) if spec.window else distance >= 0
    return scores.masked_fill_(~seen, float("-inf")) if tanh is None else scores.masked_fill(~seen, float("-inf")), tanh


def _grouped(x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """(B, H, N, E) -> (B, K, G, N, E): query heads beside the key head they share."""
    return x.to(dtype).unflatten(1, (kv_heads, -1))


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Attend causally over one document in plain torch: (output (B, H, N, V), log-sum-exp (B, H, N))."""
    high = lse_dtype(q.dtype)
    qg, kg, vg = _grouped(q, k.shape[1], high), k.to(high), v.to(high)
    out, sums = q.new_empty(*qg.shape[:4], v.shape[-1]), qg.new_empty(qg.shape[:4])
    for a, b, first in _blocks(q, spec.window):
        scores, _ = _scores(qg, kg, a, b, first, spec)
        lse = scores.logsumexp(-1)
        out[:, :, :, a:b] = torch.exp(scores - lse[..., None]) @ vg[:, :, None, first:b]
        sums[:, :, :, a:b] = lse
    return out.flatten(1, 2), sums.flatten(1, 2)


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: Spec
) -> tuple[Tensor, Tensor, Tensor]:
    """Give the gradients of q, k and v of one document in plain torch, key and value heads not repeated."""
    high, kv_heads = lse_dtype(q.dtype), k.shape[1]
    qg, gg, og = (_grouped(x, kv_heads, high) for x in (q, grad, out))
    kg, vg, zg = k.to(high), v.to(high), lse.unflatten(1, (kv_heads, -1))
    delta = (gg * og).sum(-1)
    grad_q, grad_k, grad_v = torch.empty_like(qg), torch.zeros_like(kg), torch.zeros_like(vg)
    for a, b, first in _blocks(q, spec.window):
        scores, tanh = _scores(qg, kg, a, b, first, spec)
        weights = torch.exp(scores - zg[..., a:b, None])
        grad_v[:, :, first:b] += (weights.mT @ gg[:, :, :, a:b]).sum(2)
        grad_scores = weights * (gg[:, :, :, a:b] @ vg[:, :, None, first:b].mT - delta[..., a:b, None]) * spec.scale
        if tanh is not None:
            grad_scores *= 1 - tanh * tanh
        grad_q[:, :, :, a:b] = grad_scores @ kg[:, :, None, first:b]
        grad_k[:, :, first:b] += (grad_scores.mT @ qg[:, :, :, a:b]).sum(2)
    return grad_q.flatten(1, 2).to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)
