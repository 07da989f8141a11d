"""How long a row a model's positions allow: those of a table end where it does, rotary ones nowhere.

check_positions(model, work)        # ValueError beyond the table
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from torch import nn

from ckpt.layers import unwrapped
from ckpt.workload import Workload

# Of absolute positions, of the text: relative ones clamp or repeat.
_TABLE = re.compile(r"(wpe|positions?_emb\w*|embed_positions)$")
_OTHER = re.compile(r"relative|vision|image|audio")


def learned_positions(model: nn.Module) -> int | None:
    """Return how many tokens a row may have by the model's table of positions; None without one."""
    config = getattr(unwrapped(model), "config", None)
    text = config.get_text_config(decoder=True) if config is not None else None
    if getattr(text, "rope_parameters", None):
        return None
    said = getattr(text, "max_position_embeddings", None)
    return min((rows if said is None else min(rows, said) for rows in _tables(model)), default=None)


def check_positions(model: nn.Module, work: Workload) -> None:
    """Raise ValueError if rows have positions that the model's table lacks. Packed documents count anew each."""
    limit = learned_positions(model)
    if limit is not None and -(-work.seq_len // work.documents) > limit:
        raise ValueError(
            f"seq_len={work.seq_len} is beyond the {limit} positions of {type(unwrapped(model)).__name__}, whose table "
            "ends there. Lower seq_len, or build a model with more (max_position_embeddings in its config)."
        )


def _tables(model: nn.Module) -> Iterator[int]:
    """Positions of each table. Where one has a row for padding, counting starts behind it (roberta)."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _is_table(path):
            yield module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1)
    for path, buffer in model.named_buffers():  # gptj, codegen
        if _is_table(path) and buffer.dim() == 2:
            yield buffer.shape[0]


def _is_table(path: str) -> bool:
    return _TABLE.search(path) is not None and _OTHER.search(path) is None
