"""From a run's config to the step that the library plans and predicts.

work = workload_of(cfg)
"""

from __future__ import annotations

from ckpt.workload import Workload
from recipes.config import Config, parallel_degrees


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
        mesh=mesh_of(cfg),
    )


def mesh_of(cfg: Config) -> dict[str, int] | None:
    """Return the degrees of the mesh where they are given; None for one rank, and for "as many as are started"."""
    degrees = {name: degree for name, degree in parallel_degrees(cfg).items() if degree > 1}
    return degrees or None
