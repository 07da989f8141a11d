"""The benchmark's models and sizes: one `Case` each, and how its model and batch are made.

Knows no strategy and no peer. A case's model is made from one seed, so that all its rows start from equal weights.

    case = CASES["llama"]; model = case.model(); ids, labels = case.batch()
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from ckpt.workload import Workload

_HIDDEN_256 = {
    "hidden_size": 256, "intermediate_size": 896, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64,
}  # fmt: skip
PEERS = ("library 1", "library 2", "library 4", "trl", "torchtitan", "torchtitan + attention", "nemo")
OURS = ("full", "segments", "selective", "selective matmul", "offload disk")
ALL = ("none", *PEERS, *OURS, *(f"auto @ {name}" for name in ("none", *PEERS)))
TIMED = tuple(f"same: {name}" for name in ("none", *PEERS, "full", "selective", *ALL[-len(PEERS) - 1 :]))
BEST = ("none", *PEERS[:4], "full", "full tiled", "auto @ library 1", "auto @ trl")


@dataclass(frozen=True)
class Case:
    """One model at one length, fp32, one row, forward and backward.

    rounds: rounds of timing in which every timed row runs once. same, best: the rows to run with one loss for all, and
    with each side's own. timed: which of them are timed.
    """

    name: str
    family: str
    num_layers: int
    vocab_size: int
    seq_len: int
    rounds: int = 5
    same: tuple[str, ...] = ALL
    best: tuple[str, ...] = BEST
    timed: tuple[str, ...] = TIMED
    more: dict[str, Any] = field(default_factory=dict)

    def model(self) -> PreTrainedModel:
        """Make the model in training mode, its weights drawn from a fixed seed."""
        config = CONFIG_MAPPING[self.family](
            **_HIDDEN_256,
            num_hidden_layers=self.num_layers,
            vocab_size=self.vocab_size,
            pad_token_id=0,
            max_position_embeddings=self.seq_len,
            **self.more,
        )
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).train()

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Make tokens and labels, (1, T) each and equal, as two tensors: the planner counts two."""
        ids = torch.randint(0, self.vocab_size, (1, self.seq_len), generator=torch.Generator().manual_seed(1))
        return ids, ids.clone()

    def workload(self, loss: str, tile_mlp: int) -> Workload:
        """Describe the step to the planner."""
        return Workload(batch_size=1, seq_len=self.seq_len, dtype="fp32", optimizer=None, loss=loss, tile_mlp=tile_mlp)

    def to_dict(self) -> dict[str, Any]:
        """Return what its figures depend on; which rows are run and timed may change."""
        names = ("name", "family", "num_layers", "vocab_size", "seq_len", "more")
        return {name: getattr(self, name) for name in names}


# The long case takes a minute a step: its rows are those that its figure is about.
_LONG = ("none", "library 1", "trl", "auto @ library 1", "auto @ trl")
_LONG_BEST = ("library 1", "full tiled", "auto tiled")
_LONG_TIMED = tuple(f"best: {name}" for name in _LONG_BEST)
CASES = {
    case.name: case
    for case in (
        Case("llama", "llama", 4, 512, 4096),
        Case("llama_long", "llama", 8, 32_000, 8192, rounds=5, same=_LONG, best=_LONG_BEST, timed=_LONG_TIMED),
        Case("qwen3", "qwen3", 4, 512, 2048),
        Case("gemma2", "gemma2", 4, 512, 1024, more={"sliding_window": 512, "query_pre_attn_scalar": 64}),
        Case("mixtral", "mixtral", 4, 512, 1024, more={"num_local_experts": 4, "num_experts_per_tok": 2}),
    )
}
QUICK = Case(
    "quick", "llama", 2, 64, 128, rounds=2, best=("library 1", "full tiled"),
    same=("none", "library 1", "torchtitan + attention", "full", "offload disk"),
)  # fmt: skip
