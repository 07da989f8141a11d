"""FLOPs of fused attention, whichever kernel runs it: torch's SDPA kernels, FlashAttention, flex, our packed attention.

Owns the count of query-key pairs and the layouts of the kernels. Reads shapes and named arguments only; document bounds
and block masks are read where they are real tensors. `ckpt/flops.py` is the door.

Shapes: B rows, H query heads, S queries and K keys a row, E query and key head size, V value head size.
With P query-key pairs a head: forward is two matmuls, 2*P*(E + V) FLOPs; backward is five, one of them the scores
again, 2*P*(3*E + 2*V) (Dao et al., FlashAttention, appendix B). A mask given as a tensor counts as the full matrix: no
kernel skips anything for it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

CAUSAL_CONVENTION = (
    "Causal attention over T tokens counts T*T/2 query-key pairs a head, half of the full matrix (the diagonal is not "
    "rounded up); a window of w tokens counts T*T/2 - (T-w)*(T-w)/2; packed documents count each on its own."
)

_HEADS_FIRST = re.compile(  # queries (B, H, S, E)
    r"aten::(_scaled_dot_product_\w*attention\w*|_cudnn_attention_(forward|backward))|ckpt::packed_attention\w*"
)
_TOKENS_FIRST = re.compile(  # queries (B, S, H, E), or (tokens, H, E) with cumulative lengths
    r"aten::_(flash|efficient)_attention_(forward|backward)\w*|torch_attn::_varlen_attn\w*"
    # pip's `flash_attn::_flash_attn_varlen_forward`, `flash_attn_3::_flash_attn_forward`, the hub's hashed
    # `_flash_attn2_cuda_f12afc9::varlen_fwd`; not their inference entry, whose cache is no training's business
    r"|\w*flash_attn\w*::(?!\w*kvcache)\w*(fwd|forward|bwd|backward)\w*"
)
# The names that kernels give to the same thing.
_QUERY, _KEY, _VALUE = ("query", "q"), ("key", "k"), ("value", "v")
_BOUNDS_Q = ("cu_seqlens_q", "cum_seq_q", "cu_seq_q", "bounds")
_BOUNDS_K = ("cu_seqlens_k", "cum_seq_k", "cu_seq_k")
_LONGEST = ("max_seqlen_q", "max_q", "max_length")
_CAUSAL = ("is_causal", "causal")


def attention_layout(name: str) -> str | None:
    """Say by a kernel's name where it keeps heads, "heads first" or "tokens first"; None if it is no attention."""
    if _HEADS_FIRST.fullmatch(name):
        return "heads first"
    return "tokens first" if _TOKENS_FIRST.fullmatch(name) else None


def twice_pairs(
    queries: int, keys: int, *, causal: bool, left: int = 0, right: int = 0, bottom_right: bool = False
) -> int:
    """Return twice the query-key pairs of one head (an integer where the pairs may be halves).

    left, right: keys a query sees on that side, itself included; 0 for all. causal is right=1 without its diagonal.
    bottom_right: with unequal lengths the last query sees all keys (FlashAttention); else the first sees one (SDPA).
    """
    if causal and queries != keys and not bottom_right:
        if queries < keys:
            keys = queries
        else:  # the queries beyond the last key see every key
            return 2 * (queries - keys) * keys + twice_pairs(keys, keys, causal=True, left=left)
    if causal:
        queries = min(queries, keys)
        offset = keys - queries  # keys that the first query sees besides its own
        twice = queries * (2 * keys - queries)
        if 0 < left < keys:
            twice -= (keys - left) ** 2 - max(offset - left, 0) ** 2
        return twice
    twice = 2 * queries * keys
    for side in (left, right):
        if 0 < side < keys:
            twice -= (keys - side) ** 2
    return max(twice, 0)


def fused_attention_flops(name: str, values: Mapping[str, Any]) -> int:
    """Return the FLOPs of one call of a fused kernel, its arguments given by name. 0 without query, key and value."""
    query, key, value = (_first(values, names) for names in (_QUERY, _KEY, _VALUE))
    if not all(isinstance(t, Tensor) for t in (query, key, value)):
        return 0
    heads_first = attention_layout(name) == "heads first"
    if query.dim() == 3:  # (tokens, H, E): the rows are documents
        (tokens, heads, size), keys, rows = query.shape, key.shape[0], 1
    elif heads_first:
        (rows, heads, tokens, size), keys = query.shape, key.shape[2]
    else:
        (rows, tokens, heads, size), keys = query.shape, key.shape[1]
    packed = name.startswith("ckpt::")
    causal = packed or bool(_first(values, _CAUSAL)) or values.get("custom_mask_type") in (1, 2)
    left, right = _window(values)
    causal = causal or right == 1
    pairs = functools.partial(
        twice_pairs,
        causal=causal,
        left=left,
        right=right,
        bottom_right=not heads_first and values.get("custom_mask_type") != 1,
    )
    bounds_q, bounds_k = _first(values, _BOUNDS_Q), _first(values, _BOUNDS_K)
    # SDPA's backward entries take bounds too, which mean something for nested tensors alone.
    if bounds_q is None or bounds_q.numel() < 2 or (heads_first and not packed):
        twice = rows * pairs(tokens, keys)
    elif _is_real(bounds_q):
        lengths_q = _lengths(bounds_q)
        lengths_k = _lengths(bounds_k) if isinstance(bounds_k, Tensor) and _is_real(bounds_k) else lengths_q
        twice = sum(pairs(q, k) for q, k in zip(lengths_q, lengths_k, strict=True))
    else:
        longest = _first(values, _LONGEST)
        longest = int(longest) if longest else tokens
        whole, rest = divmod(tokens, min(longest, tokens))
        twice = rows * (whole * pairs(min(longest, tokens), min(longest, tokens)) + pairs(rest, rest))
    return heads * twice * _sizes(name, size, value.shape[-1])


def flex_attention_flops(name: str, args: tuple, kwargs: Mapping[str, Any]) -> int:
    """Return the FLOPs of flex_attention or its backward (higher-order ops: query, key, value first).

    A real block mask is read: full blocks count in full, partly masked ones half, so that a causal mask over whole
    blocks comes to exactly T*T/2. Under fake tensors it is taken to be causal.
    """
    query, key, value = args[:3]
    rows, heads, queries, size = query.shape
    keys = key.shape[2]
    mask = next((a for a in (*args, *kwargs.values()) if isinstance(a, tuple) and len(a) > 8), None)
    first = next((i for i, a in enumerate(mask or ()) if isinstance(a, Tensor)), None)
    if first is None or not _is_real(mask[first]):
        twice = rows * heads * twice_pairs(queries, keys, causal=True)
    elif mask[-3] >= 1 << 30:  # torch's stand-in for no mask: one partly masked block of 2**30 tokens
        twice = rows * heads * twice_pairs(queries, keys, causal=False)
    else:
        partial, whole = mask[first], mask[first + 2]
        block = min(mask[-3], queries) * min(mask[-2], keys)
        blocks = int(partial.sum()) + (0 if whole is None else 2 * int(whole.sum()))
        twice = blocks * block * (rows // partial.shape[0]) * (heads // partial.shape[1])
    return twice * _sizes(name, size, value.shape[-1])


def _sizes(name: str, size: int, value_size: int) -> int:
    """Head-size factor of the matmuls: E + V forward, 3E + 2V backward."""
    backward = "backward" in name or "bwd" in name
    return 3 * size + 2 * value_size if backward else size + value_size


def _window(values: Mapping[str, Any]) -> tuple[int, int]:
    """Return the keys that a query sees on the left and right, itself included; 0 for all.

    FlashAttention counts the keys beside the query's own and writes -1 or None for all; packed attention and the
    efficient kernel count the query's own in, and write 0 or None for all.
    """
    if (own := values.get("window")) is not None or isinstance(own := values.get("window_size"), int):
        return max(own, 0), 0
    pair = values.get("window_size") or (values.get("window_size_left"), values.get("window_size_right"))
    left, right = (0 if side is None or side < 0 else int(side) + 1 for side in pair)
    return left, right


def _first(values: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((values[name] for name in names if values.get(name) is not None), None)


def _lengths(bounds: Tensor) -> list[int]:
    """Read the documents' lengths, unseen by modes: a simulation gives fake tensors with real bounds."""
    with _disable_current_modes():
        return bounds.diff().tolist()


def _is_real(tensor: Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.device.type != "meta"
