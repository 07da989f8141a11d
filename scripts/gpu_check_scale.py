"""What the GPU check runs, and in which sizes: once for one H200, once for a toy that runs the same code on any CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import LlamaConfig

import ckpt

STRATEGIES: dict[str, tuple[Any, int]] = {
    "none": (ckpt.KeepAll(), 1),
    "full": (ckpt.Full(), 1),
    "full, 8 tiles": (ckpt.Full(), 8),
    "every_n 2": (ckpt.EveryN(2), 1),
    "segments keep": (ckpt.Segments(2, "keep"), 1),
    "segments replay": (ckpt.Segments(2, "replay"), 1),
    "selective": (ckpt.Selective("attention"), 1),
    "selective matmul": (ckpt.Selective("attention+matmul"), 1),
    "offload": (ckpt.Offload(target="host"), 1),
    "offload, 8 tiles": (ckpt.Offload(target="host"), 8),
}
# Whose longest context is looked for, and its loss. Library: Transformers' checkpointing of every layer.
CONTEXT_SIDES = {"library": "full", "full, 8 tiles": "chunked", "offload, 8 tiles": "chunked"}


@dataclass(frozen=True)
class Scale:
    """Sizes of all sections. peaks: (layers, tokens, steps) of the peak section. *_tokens: of the section so named.

    context_gib: memory that the longest context is looked for in; context_tokens: a length that fits, and its multiples
    are tried.
    """

    name: str
    device: str
    hardware: str | None
    shape: dict[str, int]
    num_layers: int
    exact_layers: int
    exact_tokens: int
    peaks: tuple[tuple[int, int, int], ...]
    auto_tokens: int
    num_budgets: int
    offload_tokens: tuple[int, ...]
    pool_tokens: int
    pool_steps: int
    packed_tokens: int
    context_gib: float
    context_tokens: int
    repeats: int

    def config(self, num_layers: int) -> LlamaConfig:
        return LlamaConfig(**self.shape, num_hidden_layers=num_layers, max_position_embeddings=2**21, pad_token_id=0)

    def workload(self, seq_len: int, loss: str = "chunked", tile_mlp: int = 1) -> ckpt.Workload:
        """bf16 weights, one row, forward and backward."""
        return ckpt.Workload(
            batch_size=1, seq_len=seq_len, dtype="bf16_pure", optimizer=None, loss=loss, tile_mlp=tile_mlp
        )


_8B = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "rope_theta": 500_000,
}  # fmt: skip
_TINY = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
# Few layers and, at 131,072 tokens, one step: a longer check would not end within four minutes.
H200 = Scale(
    "h200", "cuda", "h200", _8B, num_layers=4, exact_layers=2, exact_tokens=4096,
    peaks=((4, 8192, 2), (2, 32_768, 2), (2, 131_072, 1)), auto_tokens=16_384, num_budgets=5,
    offload_tokens=(16_384, 32_768), pool_tokens=8192, pool_steps=20, packed_tokens=8192,
    context_gib=24.0, context_tokens=4096, repeats=5,
)  # fmt: skip
TOY = Scale(
    "toy", "cpu", None, _TINY, num_layers=2, exact_layers=2, exact_tokens=64, peaks=((2, 64, 2),),
    auto_tokens=128, num_budgets=3, offload_tokens=(64,), pool_tokens=64, pool_steps=4, packed_tokens=64,
    context_gib=0.0011, context_tokens=64, repeats=2,
)  # fmt: skip
SCALES = {scale.name: scale for scale in (H200, TOY)}
