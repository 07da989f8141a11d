"""The packed attention as Transformers sees it: an attention function and its mask function, registered together.

A name without a mask function would drop masks silently (transformers#45811), a name with "flash" in it switches on
code meant for FlashAttention: hence both, and `ckpt_packed`. Boundaries arrive as the keyword `cu_seq_lens_q`,
which Transformers hands from `model.forward` down to the attention function; without it each row is one document.

Cached decoding (keys longer than queries) and padded batches outside of training are none of this op's business:
they go to the implementation that the model would have used, SDPA (`ckpt_packed`) or its own eager function
(`ckpt_packed_eager`).
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from ckpt.attention import bounds as make_bounds
from ckpt.attention.op import packed_attention

NAME = "ckpt_packed"
NAME_EAGER = "ckpt_packed_eager"

# Keywords that ride along to attention functions and change nothing this op computes.
_HARMLESS = frozenset(
    {
        "cache",
        "cache_position",
        "labels",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_value",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "shift_labels",
        "use_cache",
    }
)

witness: ContextVar[Witness | None] = ContextVar("ckpt_attention_witness", default=None)


class Witness:
    """Collects, over one forward, which attention modules called with boundaries and which window each asked for."""

    def __init__(self) -> None:
        self.windows: dict[nn.Module, int] = {}
        self.unbounded: list[nn.Module] = []

    def see(self, module: nn.Module, bounded: bool, window: int) -> None:
        """Record one call of the attention function."""
        self.windows[module] = window
        if not bounded:
            self.unbounded.append(module)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    fallback: str = "sdpa",
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend causally within documents: query (B, H, T, E), key (B, K, T, E), value (B, K, T, V) -> (B, T, H, V), None.

    Raises ValueError for what would come out wrong: dropout, bidirectional attention, a position bias or another
    tensor that this op does not know, an attention mask together with boundaries.
    """
    bounded = cu_seq_lens_q is not None
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        if bounded:
            raise ValueError(
                f"{_who(module)} was given document boundaries together with an attention mask or cached keys (queries "
                f"{query.shape[2]}, keys {key.shape[2]}). Pass packed rows without attention_mask and use_cache=False."
            )
        return _fall_back(
            fallback,
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            sliding_window=sliding_window,
            softcap=softcap,
            is_causal=is_causal,
            s_aux=s_aux,
            **kwargs,
        )
    _refuse(module, query, key, value, dropout, is_causal, cu_seq_lens_q, cu_seq_lens_k, kwargs)
    if torch.is_autocast_enabled(query.device.type):  # as SDPA does; an own op is not on autocast's list
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    batch, _, tokens, size = query.shape
    window = sliding_window or 0
    if not torch.compiler.is_compiling() and (seen_by := witness.get()) is not None:
        seen_by.see(module, bounded, window)
    bounds = cu_seq_lens_q.to(torch.int32) if bounded else make_bounds.of_rows(batch, tokens, query.device)
    out, _ = packed_attention(
        query,
        key,
        value,
        bounds,
        s_aux,
        int(max_length_q or tokens),
        size**-0.5 if scaling is None else float(scaling),
        window if window < tokens else 0,
        float(softcap or 0.0),
    )
    return out, None


def make_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    fallback: str = "sdpa",
    **kwargs: Any,
) -> Tensor | None:
    """Build no mask for rows without padding; the fallback's for cached decoding and for padded rows."""
    if use_vmap:
        raise ValueError(
            "attn=ckpt_packed knows causal attention and sliding windows; this model adds a mask function of its own. "
            "Use attn=sdpa, with data.packing=concat or none."
        )
    whole = attention_mask is None or bool(attention_mask.all())
    if kv_length == q_length and isinstance(q_offset, int) and q_offset == 0 and whole:
        return None
    build = {"sdpa": sdpa_mask, "eager": eager_mask}[fallback]
    return build(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        attention_mask=attention_mask,
        use_vmap=use_vmap,
        **kwargs,
    )


def _who(module: nn.Module) -> str:
    return type(module).__name__


def _refuse(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    is_causal: bool | None,
    bounds: Tensor | None,
    key_bounds: Tensor | None,
    extra: dict[str, Any],
) -> None:
    """Raise ValueError for anything that this op would silently compute wrong."""
    if dropout:
        raise ValueError(
            f"{_who(module)} asks for attention dropout {dropout}, which packed attention does not have. Set the "
            "model's attention dropout to 0 (for example model.config.attention_dropout=0.0), or use attn=sdpa with "
            "data.packing=concat or none."
        )
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"{_who(module)} is bidirectional; packed attention is causal. Use attn=sdpa.")
    if extra.get("output_attentions"):
        raise ValueError(
            "packed attention never holds the attention weights. Drop output_attentions, or use attn=eager."
        )
    if bounds is not None and key_bounds is not None and key_bounds.shape != bounds.shape:
        raise ValueError(
            "cu_seq_lens_k differs from cu_seq_lens_q; packed attention is self-attention: pass the same boundaries."
        )
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads % kv_heads or value.shape[1] != kv_heads:
        raise ValueError(
            f"{_who(module)} has {heads} heads of queries for {kv_heads} of keys and {value.shape[1]} of values. Let "
            "the number of key-value heads divide that of the heads (model.config.num_key_value_heads)."
        )
    if query.dtype != value.dtype and not torch.is_autocast_enabled(query.device.type):
        raise ValueError(
            f"{_who(module)} computes queries in {query.dtype} and values in {value.dtype}. Load the model in one "
            "dtype, "
            "or train under autocast (dtype=bf16)."
        )
    unknown = sorted(name for name, x in extra.items() if isinstance(x, Tensor) and name not in _HARMLESS)
    if unknown:
        raise ValueError(
            f"{_who(module)} hands {', '.join(unknown)} to its attention function, which packed attention would "
            "ignore. "
            "Use the model's own attention (attn=sdpa or eager), with data.packing=concat or none."
        )


def _fall_back(name: str, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Run the attention function that the model would have used."""
    kwargs = {key: x for key, x in kwargs.items() if x is not None}
    if name == "sdpa":
        return sdpa_attention_forward(module, *args, **kwargs)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        raise ValueError(
            f"{_who(module)} has no eager attention function beside it; undo packed attention before generating."
        )
    return eager(module, *args, **kwargs)


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, make_mask)
AttentionInterface.register(NAME_EAGER, partial(attend, fallback="eager"))
AttentionMaskInterface.register(NAME_EAGER, partial(make_mask, fallback="eager"))
