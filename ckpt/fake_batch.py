"""The micro-batches of a step on fake tensors, with the keys that the training data has (`recipes/data`).

with mode:
    batches = fake_batches(work)        # grad_accum of them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from ckpt.attention import bounds as make_bounds
from ckpt.fake import FakeMode
from ckpt.workload import Workload


def fake_batches(work: Workload, mode: FakeMode, inputs: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """Return one micro-batch for each of a step. inputs: what they hold instead of tokens and labels."""
    bounds = _bounds(work)  # real: packed attention reads them
    with mode:
        return [_micro_batch(work, inputs, bounds) for _ in range(work.grad_accum)]


def _bounds(work: Workload) -> torch.Tensor | None:
    """Real bounds, which packed attention reads: rows of equally long documents."""
    if work.packing != "isolate":
        return None
    length = -(-work.seq_len // work.documents)
    rows = range(0, work.batch_size * work.seq_len, work.seq_len)
    starts = [row + at for row in rows for at in range(0, work.seq_len, length)]
    return make_bounds.from_starts(starts, work.batch_size, work.seq_len)


def _micro_batch(work: Workload, inputs: Mapping[str, Any] | None, bounds: torch.Tensor | None) -> dict[str, Any]:
    """Make one micro-batch, by the keys of the training data (`recipes/data`). bounds: of its documents."""
    if inputs is not None:
        return tree_map(
            lambda v: (
                torch.empty_like(v, device="cpu").requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v
            ),
            dict(inputs),
        )
    shape = (work.batch_size, work.seq_len)
    batch: dict[str, Any] = {name: torch.zeros(shape, dtype=torch.long) for name in ("input_ids", "labels")}
    if work.packing == "isolate":
        batch["position_ids"] = torch.zeros(shape, dtype=torch.long)
        batch |= dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), bounds)
        batch |= {"max_length_q": work.seq_len, "max_length_k": work.seq_len}
    return batch


def is_padded(inputs: Mapping[str, Any] | None) -> bool:
    """Whether an attention mask that is given leaves tokens out, for which masks of T x T are then made."""
    mask = _values(inputs, "attention_mask")
    return mask is not None and mask.dim() == 2 and not bool(mask.all())


def restarts(inputs: Mapping[str, Any] | None) -> bool:
    """Whether positions that are given count anew within a row: Transformers then takes it for several documents."""
    positions = _values(inputs, "position_ids")
    return positions is not None and positions.dim() == 2 and bool((positions.diff(dim=-1) != 1).any())


def _values(inputs: Mapping[str, Any] | None, name: str) -> torch.Tensor | None:
    """The tensor of that name, if it has values."""
    tensor = (inputs or {}).get(name)
    has_values = isinstance(tensor, torch.Tensor) and not isinstance(tensor, FakeTensor) and not tensor.is_meta
    return tensor if has_values else None
