"""Attention within packed documents, without a mask, and the choice of the attention kernel.

    choice = choose(model, "auto", device="cuda", dtype=torch.bfloat16, packing="isolate", seq_len=131072)
    print(choice)      # ckpt_packed: torch's FlashAttention-2 with variable lengths. FlashAttention-3: ...
    prepared = prepare(model, "isolate", choice.implementation)
    ...
    prepared.undo()

Importing this package registers `ckpt_packed` and `ckpt_packed_eager` with Transformers and the op
`ckpt::packed_attention` with torch.
"""

from ckpt.attention.check import isolation_error
from ckpt.attention.choose import Choice, choose, watch_masks
from ckpt.attention.families import refusal
from ckpt.attention.interface import NAME, NAME_EAGER
from ckpt.attention.op import packed_attention
from ckpt.attention.prepare import Prepared, prepare

__all__ = [
    "NAME",
    "NAME_EAGER",
    "Choice",
    "Prepared",
    "choose",
    "isolation_error",
    "packed_attention",
    "prepare",
    "refusal",
    "watch_masks",
]
