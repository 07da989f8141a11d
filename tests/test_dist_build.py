"""A model over ranks is made once: weights are one process's, and no rank but the first ever holds it whole."""

import math

import dist_build
import pytest
from dist_kit import run_ranks

from recipes.model import build_model, load_config

pytestmark = pytest.mark.dist

CASES = {
    "tied, bf16": ({"shard": 2}, "tied", "bf16", "none"),
    "mixtral": ({"replicate": 2}, "mixtral", "fp32", "none"),
    "fewer experts than ranks": ({"shard": 4}, "two experts", "fp32", "none"),
    "tensor parallel": ({"tensor": 2}, "qwen3", "bf16", "none"),
    "both": ({"shard": 2, "tensor": 2}, "qwen3", "bf16_pure", "none"),
    "adapter": ({"sequence": 2}, "llama", "bf16", "lora"),
}


@pytest.mark.parametrize("case", CASES)
def test_every_rank_gets_its_part_of_the_weights_of_one_process(case, tmp_path):
    degrees, kind, dtype, peft = CASES[case]
    folder = None
    if case == "adapter":  # on weights of a folder
        chosen = dist_build.model_of(kind, None)
        folder = str(tmp_path / "weights")
        build_model(chosen, load_config(chosen, 12)).save_pretrained(folder)
    num_ranks = math.prod(degrees.values())
    compared = run_ranks(dist_build.check_parts, num_ranks, degrees, kind, dtype, folder, peft, timeout=280)
    assert compared > 30


def test_only_rank_0_holds_the_whole_model():
    (first, whole), (second, _) = run_ranks(dist_build.grown_bytes, 2, timeout=280)
    print(
        f"whole model {whole / 2**20:.0f} MiB; grown by {first / 2**20:.0f} on rank 0, {second / 2**20:.0f} on rank 1"
    )
    assert second < 0.8 * whole < whole < first
