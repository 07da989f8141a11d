"""What the attention kernels need beside tensors."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Spec(NamedTuple):
    """Score scale, window in tokens (0: none), soft cap of the scores (0: none)."""

    scale: float
    window: int = 0
    softcap: float = 0.0


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Give the dtype of the log-sum-exp for inputs of `dtype`: fp64 for fp64, else fp32, as in flash kernels."""
    return torch.float64 if dtype == torch.float64 else torch.float32
