"""From a run's config to the step that the library plans and predicts.

work = workload_of(cfg)
"""

from __future__ import annotations

from ckpt.workload import Workload
from recipes.config import Config


def workload_of(cfg: Config) -> Workload:
    """Return the step that `cfg` asks for, as strategies that plan and predictions need it."""
    return Workload(
        batch_size=cfg.batch_size,
        seq_len=cfg.seq_len,
        dtype=cfg.dtype,
        optimizer="adamw",
        grad_accum=cfg.grad_accum,
        loss=cfg.loss,
        tile_mlp=cfg.tile_mlp,
        packing=cfg.data.packing,
    )
