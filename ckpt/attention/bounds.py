"""Where documents begin: `cu_seq_lens` of one length for all batches of a run, read off starts or off position_ids.

    bounds = from_starts([0, 5, 12], batch=1, tokens=16)      # tensor([0, 5, 12, 16, 16, ...], dtype=torch.int32)

Knows nothing of attention or models.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def num_slots(batch: int, tokens: int, documents: int) -> int:
    """Give the length of the bounds: the same for all batches unless one holds more documents than usual, then doubled.

    FlashAttention launches a grid over slots, empty ones included: one slot for 256 tokens costs little and
    covers most text.
    """
    slots = batch * max(16, tokens // 256)
    while slots < documents:
        slots *= 2
    return slots + 1


def from_starts(starts: Sequence[int], batch: int, tokens: int) -> Tensor:
    """Make the int32 bounds of documents that start at these places of the flattened batch * tokens tokens.

    Row starts must be among them (ValueError): a document never spans two rows.
    """
    total = batch * tokens
    missing = set(range(0, total, tokens)) - set(starts)
    if missing:
        raise ValueError(
            f"rows start at {sorted(missing)[:4]} of the flattened batch, where no document starts. Start a "
            f"document with each row of {tokens} tokens."
        )
    bounds = torch.full((num_slots(batch, tokens, len(starts)),), total, dtype=torch.int32)
    bounds[: len(starts)] = torch.tensor(sorted(starts), dtype=torch.int32)
    return bounds


def of_rows(batch: int, tokens: int, device: torch.device) -> Tensor:
    """Make the int32 bounds of rows that hold one document each."""
    return torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=device)


def from_positions(position_ids: Tensor, batch: int) -> Tensor:
    """Read the bounds off position_ids (B or 1, T): a document starts where a position does not follow the last."""
    tokens = position_ids.shape[-1]
    position_ids = position_ids.expand(batch, tokens)
    starts = torch.ones_like(position_ids, dtype=torch.bool)
    starts[:, 1:] = position_ids.diff(dim=-1) != 1
    return from_starts(starts.flatten().nonzero().flatten().tolist(), batch, tokens).to(position_ids.device)
