"""Packing: documents of one row never see each other, in evaluation and in training under a strategy."""

from __future__ import annotations

from typing import Any

import exactness
import torch
import zoo
from coverage_rows import Row
from torch import nn

from ckpt import attention
from ckpt.attention import bounds

ISOLATED = 1e-5  # of the largest logit: packed and alone take other kernels
LENGTHS = (7, 5, 4)


def check(row: Row, model: nn.Module, attach: exactness.Attach) -> None:
    """Fill in a row: refused with the reason, or isolated, and exact in training under what `attach` puts on."""
    if reason := attention.refusal(model):
        row.status, row.cause = "refused", reason
        return
    prepared = attention.prepare(model, "isolate")
    try:
        row.worst_error = attention.isolation_error(model)
        plain = exactness.baseline(model, [packed_batch(model)])
        found = exactness.compare(model, plain, attach)
    finally:
        prepared.undo()
    if row.worst_error > ISOLATED:
        row.status, row.cause = "differs", f"logits of packed documents differ by {row.worst_error:.2g} from each alone"
    elif problems := found.problems():
        row.status, row.cause = "differs", problems[0]
    else:
        row.status, row.note = "close", f"{prepared.num_layers} attention layers seen to obey"


def packed_batch(model: nn.Module) -> dict[str, Any]:
    """Make one batch of two rows of three documents; the first label of each document is ignored."""
    num_tokens = sum(LENGTHS)
    inputs = zoo.batch(model, num_tokens)
    starts = [row * num_tokens + sum(LENGTHS[:i]) for row in range(2) for i in range(len(LENGTHS))]
    inputs["labels"][:, [start for start in starts if start < num_tokens]] = -100
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1)
    return {**inputs, "position_ids": positions, "cu_seq_lens_q": bounds.from_starts(starts, 2, num_tokens)}
