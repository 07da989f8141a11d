"""The key of an op: what a decision is attached to.

An op call inside a decoder layer is named by the path of the module that runs it, the op's name, and its number within
that module call. The key must survive another sequence length, LoRA, autocast, a sharded model, another attention
kernel; so names are canonical: LoRA's `base_layer` is dropped from paths, and every fused attention kernel is called
`attention`.

>>> OpKey.parse("self_attn.q_proj/mm#0")
OpKey(path='self_attn.q_proj', op='mm', nth=0)
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

ATTENTION = "attention"
# Fused attention forwards: torch's SDPA kernels (CPU flash included), FlashAttention from pip or the hub (whose
# namespaces carry a hash, `_flash_attn2_cuda_f12afc9::varlen_fwd`), and this project's own packed attention.
_ATTENTION_OP = re.compile(
    r"^(aten::_scaled_dot_product_\w+|aten::_flash_attention_forward|aten::_efficient_attention_forward"
    r"|aten::_cudnn_attention_forward|\w*flash_attn\w*::\w*fwd\w*|\w*flash_attn\w*::\w*forward\w*"
    r"|ckpt::packed_attention\w*|higher_order::flex_attention)$"
)
_PEFT_SEGMENTS = {"base_layer", "modules_to_save"}


@dataclass(frozen=True, slots=True)
class OpKey:
    """(module path inside the layer, canonical op name, n-th call of that op within that module call)."""

    path: str
    op: str
    nth: int

    def __str__(self) -> str:
        return f"{self.path}/{self.op}#{self.nth}"

    @classmethod
    def parse(cls, text: str) -> OpKey:
        match = re.fullmatch(r"([^/#]*)/([^/#]+)#(\d+)", text)
        if match is None:
            raise ValueError(f"op key {text!r} is malformed; expected 'module.path/op#n', e.g. 'self_attn.q_proj/mm#0'")
        return cls(match[1], match[2], int(match[3]))


def canonical_op(func: torch._ops.OpOverload) -> str:
    """Return the op's name as keys spell it: without namespace `aten`, overload, and with one name for attention."""
    qualified = func._schema.name if hasattr(func, "_schema") else str(func)
    if _ATTENTION_OP.match(qualified) and "backward" not in qualified:
        return ATTENTION
    return qualified.removeprefix("aten::").replace("::", ".")


def canonical_path(path: str) -> str:
    """Drop the segments that adapters insert, so that `q_proj.base_layer` and `q_proj` are one place."""
    return ".".join(part for part in path.split(".") if part not in _PEFT_SEGMENTS)
