"""Strategies x meshes against one process: one spawn a mesh runs all its cells (tests/dist_cells.py).

Loss within 1e-6, gradients within 1e-5 of one process in fp32; with dropout bitwise equal to the same mesh without
checkpointing. `auto` is planned for one rank of the mesh and must be the same on all.
"""

import math

import pytest
from dist_cells import DROPOUT, check_cells, planned
from dist_kit import run_ranks

MESHES = {
    "replicate 2": {"replicate": 2},
    "shard 2": {"shard": 2},
    "tensor 2": {"tensor": 2},
    "sequence 2": {"sequence": 2},
    "shard 2 x tensor 2": {"shard": 2, "tensor": 2},
    "shard 2 x sequence 2": {"shard": 2, "sequence": 2},
}
CELLS = [(mesh, "llama") for mesh in MESHES]
CELLS += [(mesh, kind) for kind in ("qwen3", "mixtral") for mesh in ("shard 2", "sequence 2", "tensor 2")]


@pytest.mark.dist
@pytest.mark.timeout(600)  # planning `auto` on a busy machine
@pytest.mark.parametrize("mesh, kind", CELLS)
def test_every_strategy_on_a_mesh_equals_one_process(mesh, kind):
    degrees = MESHES[mesh]
    num_ranks = math.prod(degrees.values())
    plans = [planned(kind, degrees, dropout) for dropout in (0.0, DROPOUT)]
    for name, loss, gradient in run_ranks(check_cells, num_ranks, degrees, kind, plans, timeout=300):
        print(f"{mesh:>22} {kind:<8} {name:<24} loss {loss:.1e} gradients {gradient:.1e}")
