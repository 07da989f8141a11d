"""The predicted peak of one rank against what every real rank holds."""

import math

import pytest
from dist_kit import run_ranks
from dist_peaks import SHAPE, STRATEGIES, measured_peaks, workload
from test_dist_mesh import MESHES
from transformers import LlamaConfig

from ckpt.simulate import Simulator


@pytest.mark.dist
@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_predicted_peak_of_a_rank_is_within_two_percent(mesh):
    measured = run_ranks(measured_peaks, math.prod(mesh.values()), mesh, timeout=600)
    simulator = Simulator(LlamaConfig(**SHAPE), workload(mesh))
    try:
        for strategy in STRATEGIES:
            peak = int(simulator.run(strategy).steady.total.max())
            for rank, real in enumerate(measured[strategy]):
                error = peak / real - 1
                print(f"{mesh} {strategy:<10} rank {rank} measured {real:,} predicted {peak:,} {error:+.2%}")
                assert abs(error) <= 0.02, (strategy, rank, peak, real)
    finally:
        simulator.close()
