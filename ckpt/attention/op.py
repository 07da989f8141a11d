"""The op `ckpt::packed_attention`: attention within documents, opaque to autograd, dispatch modes and compilers.

What happens inside depends on how many documents there are; what a mode, a fake run or the engine sees is one op
forward and one op backward, with shapes that depend on the inputs' shapes alone. A layer's op sequence is therefore
the same from batch to batch.

    out, lse = packed_attention(q, k, v, bounds, sinks=None, max_length=T, scale=0.125, window=0, softcap=0.0)

Shapes are those of `kernels.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from ckpt.attention import kernels
from ckpt.attention.spec import Spec, lse_dtype


@torch.library.custom_op("ckpt::packed_attention", mutates_args=())
def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    sinks: Tensor | None,
    max_length: int,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Attend causally within each document.

    `bounds`: int32 starts of the documents in the flattened B*T tokens, ending in B*T; equal neighbours are
    empty documents.
    `max_length`: upper bound of the documents' lengths. `window`: tokens a query sees, itself included, 0 for all.
    `softcap`: scores become softcap * tanh(scores / softcap), 0 for none. `sinks`: one extra logit a head (H,).
    Returns the output (B, T, H, V), contiguous, and the log-sum-exp (H, B*T), which carries no gradient.
    """
    return kernels.forward(query, key, value, bounds, max_length, Spec(scale, window, softcap), sinks)


@packed_attention.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bounds: Tensor,
    sinks: Tensor | None,
    max_length: int,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, _ = query.shape
    return (
        query.new_empty(batch, tokens, heads, value.shape[-1]),
        query.new_empty(heads, batch * tokens, dtype=lse_dtype(query.dtype)),
    )


@torch.library.custom_op("ckpt::packed_attention_backward", mutates_args=())
def packed_attention_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    sinks: Tensor | None,
    max_length: int,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Give the gradients of query, key, value and sinks (empty without sinks) for the gradient of the output."""
    return kernels.backward(grad, query, key, value, out, lse, bounds, max_length, Spec(scale, window, softcap), sinks)


@packed_attention_backward.register_fake
def _(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    bounds: Tensor,
    sinks: Tensor | None,
    max_length: int,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    like = [x.new_empty(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2) for x in (query, key, value)]
    return *like, query.new_empty(0) if sinks is None else torch.empty_like(sinks)


def _remember(ctx, inputs, output) -> None:
    query, key, value, bounds, sinks, *ctx.settings = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(query, key, value, out, lse, bounds, sinks)


def _differentiate(ctx, grad: Tensor | None, _grad_lse: None):
    if grad is None:
        return (None,) * 9
    query, key, value, out, lse, bounds, sinks = ctx.saved_tensors
    *grads, grad_sinks = packed_attention_backward(grad, query, key, value, out, lse, bounds, sinks, *ctx.settings)
    return *grads, None, None if sinks is None else grad_sinks, None, None, None, None


packed_attention.register_autograd(_differentiate, setup_context=_remember)


def _is_walked(args: tuple) -> bool:
    """Whether a simulation runs what is inside, to see its scratch: blocks of scores with a soft cap, the same on every
    device. Other kernels have next to none, and a CPU's is not a GPU's. Where documents begin must be known."""
    bounds = next(x for x in args if isinstance(x, Tensor) and x.dtype == torch.int32)
    return args[-1] != 0.0 and not (isinstance(bounds, FakeTensor) and bounds.constant is None)


packed_attention.is_walked = packed_attention_backward.is_walked = _is_walked  # asked by ckpt/live.py
