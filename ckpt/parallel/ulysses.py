"""Sequence parallelism (Ulysses): each rank holds a slice of every row's tokens; attention exchanges tokens for heads.

Outside of attention a decoder works token by token, so ranks need nothing of each other. In front of attention an
all-to-all gives each rank all tokens of some heads, behind it another gives back all heads of its tokens (Jacobs et al.
2023, arXiv:2309.14509). Heads that do not divide evenly are padded with empty ones; key/value heads that are fewer than
ranks, or do not divide, are repeated as far as needed.

    attend_in_sequence_shards(model, layout)         # after the attention implementation is chosen
    model(**shard_sequence(inputs, layout))          # tokens, positions and shifted labels of this rank

Serves transformers 5.23+. Legend: B batch, T tokens, H query heads, K key/value heads, S ranks of the sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import repeat_kv
from transformers.loss.loss_utils import ForCausalLMLoss

from ckpt.attention import NAME, NAME_EAGER, bounds
from ckpt.attention.families import refusal
from ckpt.layers import unwrapped
from ckpt.parallel.exchange import exchange
from ckpt.parallel.mesh import Layout

INNER = (NAME, NAME_EAGER, "sdpa", "flash_attention_2", "flash_attention_3")
IGNORE = -100


def attend_in_sequence_shards(model: nn.Module, layout: Layout) -> Callable[[], None]:
    """Put the exchange around the attention implementation that `model` has; return the undo.

    With one rank a sequence nothing is done. Raises ValueError for what would be silently wrong: layers that mix tokens
    outside of attention, an attention that needs a mask, a loss that takes no shifted labels.
    """
    if layout.degrees.sequence == 1:
        return lambda: None
    return attend_over(model, layout.degrees.sequence, layout.sequence_group.group_name)


def attend_over(model: nn.Module, num_ranks: int, group: str) -> Callable[[], None]:
    """As `attend_in_sequence_shards`, for a group by name: predictions have no process group."""
    base = unwrapped(model)
    _check(base)
    configs = {id(c): c for c in (vars(m).get("config") for m in model.modules()) if hasattr(c, "to_dict")}
    before = [(c, c._attn_implementation_internal) for c in configs.values()]
    inner = base.config.get_text_config(decoder=True)._attn_implementation
    if inner not in INNER:
        raise ValueError(
            f"parallel.sequence={num_ranks} with attention {inner!r}, which needs a T x T mask. Set attn=auto or sdpa."
        )
    name = f"ckpt_ulysses_{inner}_{group}"
    AttentionInterface.register(name, partial(attend, inner=inner, num_ranks=num_ranks, group=group))
    AttentionMaskInterface.register(name, _no_mask)
    for config, was in before:
        if was == inner:
            config._attn_implementation_internal = name

    def undo() -> None:
        for config, was in before:
            config._attn_implementation_internal = was

    return undo


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    *, inner: str, num_ranks: int, group: str, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attend over whole rows: query (B, H, T/S, E), key and value (B, K, T/S, E) -> (B, T/S, H, V), None."""
    if attention_mask is not None or query.shape[2] != key.shape[2]:
        raise ValueError(
            f"{type(module).__name__} attends with a mask or cached keys, which sequence parallelism does not have. "
            "Pass rows without attention_mask and use_cache=False; generate from an exported model."
        )
    window = kwargs.get("sliding_window")
    if inner == "sdpa" and window and window < query.shape[2] * num_ranks:
        raise ValueError(
            f"{type(module).__name__} attends in a window of {window} tokens, for which SDPA needs a mask; with "
            "parallel.sequence there is none. Set attn=auto."
        )
    num_heads = query.shape[1]
    query, key, value = _divisible(query, key, value, num_ranks)
    query, key, value = (exchange(x.contiguous(), 1, 2, num_ranks, group) for x in (query, key, value))
    groups = query.shape[1] // key.shape[1]
    if inner not in (NAME, NAME_EAGER) and getattr(module, "num_key_value_groups", groups) != groups:
        module = _Grouped(module, groups)
    s_aux = kwargs.get("s_aux")
    if s_aux is not None:
        kwargs["s_aux"] = _own_heads(s_aux, query.shape[1], num_ranks, group)
    out, _ = AttentionInterface()[inner](module, query, key, value, None, **kwargs)
    out = exchange(out.contiguous(), 1, 2, num_ranks, group)
    return out[:, :, :num_heads], None


class _Grouped:
    """The attention module, with the number of query heads a key head as it is after the exchange."""

    def __init__(self, module: nn.Module, num_groups: int):
        self._module = module
        self.num_key_value_groups = num_groups

    def __getattr__(self, name: str):
        return getattr(self._module, name)


def _divisible(query: Tensor, key: Tensor, value: Tensor, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Make head counts divide by the ranks, so that each rank's query heads find their key heads with it."""
    num_heads, num_kv = query.shape[1], key.shape[1]
    missing = -num_heads % num_ranks
    if not missing and num_kv % num_ranks == 0:
        return query, key, value
    if not missing and num_ranks % num_kv == 0:  # a rank's query heads share one key head
        return query, repeat_kv(key, num_ranks // num_kv), repeat_kv(value, num_ranks // num_kv)
    key, value = (repeat_kv(x, num_heads // num_kv) for x in (key, value))
    if missing:
        query, key, value = (nn.functional.pad(x, (0, 0, 0, 0, 0, missing)) for x in (query, key, value))
    return query, key, value


def _own_heads(per_head: Tensor, num_own: int, num_ranks: int, group: str) -> Tensor:
    """Return this rank's part of a parameter with one value a query head (attention sinks)."""
    rank = torch.distributed.distributed_c10d._resolve_process_group(group).rank()
    per_head = nn.functional.pad(per_head, (0, num_own * num_ranks - per_head.shape[0]))
    return per_head[rank * num_own : (rank + 1) * num_own]


def _no_mask(*, attention_mask: Tensor | None = None, use_vmap: bool = False, **kwargs: Any) -> None:
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("parallel.sequence takes no padded rows: pad on the right, and pass no attention_mask.")
    if use_vmap:
        raise ValueError("this model adds a mask function of its own, which parallel.sequence does not have.")


def _check(base: nn.Module) -> None:
    if reason := refusal(base):
        raise ValueError(
            f"parallel.sequence does not fit {type(base).__name__} ({base.config.model_type}): {reason}. Use "
            "parallel.shard."
        )
    loss = getattr(base, "loss_function", None)
    loss = getattr(loss, "original", loss)
    if loss is not None and loss is not ForCausalLMLoss:
        raise ValueError(
            f"parallel.sequence does not fit {type(base).__name__}: its loss takes no shifted labels. Use "
            "parallel.shard."
        )


def shard_sequence(inputs: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """Return this rank's slice of a batch: (B, T/S) tokens, positions, and labels that were shifted before slicing.

    Document boundaries (`cu_seq_lens_*`) stay those of the whole rows. Raises ValueError if T does not divide.
    """
    num_ranks, own = layout.degrees.sequence, layout.place.sequence
    if num_ranks == 1:
        return inputs
    rows, tokens = inputs["input_ids"].shape
    if tokens % num_ranks:
        raise ValueError(
            f"rows of {tokens} tokens cannot be divided over parallel.sequence={num_ranks}. Choose a seq_len that is a "
            f"multiple of {num_ranks}."
        )
    inputs = dict(inputs)
    part = slice(own * (tokens // num_ranks), (own + 1) * (tokens // num_ranks))
    if inputs.get("position_ids") is None:
        device = inputs["input_ids"].device
        inputs["position_ids"] = torch.arange(tokens, device=device).expand(rows, tokens)
        if inputs.get("cu_seq_lens_q") is None:  # read off the slice, rows would end with it
            inputs["cu_seq_lens_q"] = bounds.of_rows(rows, tokens, device)
    if inputs.get("labels") is not None:
        shifted = nn.functional.pad(inputs["labels"], (0, 1), value=IGNORE)[:, 1:]
        inputs["labels"] = inputs["shift_labels"] = shifted
    for name in ("input_ids", "position_ids", "labels", "shift_labels"):
        if inputs.get(name) is not None:
            inputs[name] = inputs[name][:, part].contiguous()
    return inputs
