"""Tensor parallelism beside one process, over micro-batches: what every rank holds whole gets its whole gradient."""

import dist_tensor
import pytest
from dist_kit import run_ranks

pytestmark = pytest.mark.dist


def test_gradients_of_norms_and_activations_inside_split_layers_are_those_of_one_process():
    found = []
    for num_ranks, mesh in ((2, {"tensor": 2}), (4, {"shard": 2, "tensor": 2})):
        found += run_ranks(dist_tensor.check_architectures, num_ranks, mesh, ["qwen3", "apertus"], timeout=300)
    assert len(found) == 4
    for mesh, name, largest, where in found:
        print(f"{mesh:>24} {name:<12} {largest:.1e} {where}")
        assert largest <= 1e-5, (mesh, name, where, largest)


def test_a_gradient_that_the_plan_forgets_to_sum_is_refused_on_every_rank():
    run_ranks(dist_tensor.check_forgotten, 2, timeout=300)
