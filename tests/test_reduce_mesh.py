"""Under a mesh, too, equal layers are traced once and the figures stay those of tracing all."""

import numpy as np
import pytest
from transformers import LlamaConfig

from ckpt.simulate import Simulator
from ckpt.workload import Workload

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip


def simulated(mesh, strategy, reduce):
    work = Workload(batch_size=1, seq_len=64, dtype="bf16", loss="chunked", mesh=mesh)
    simulator = Simulator(LlamaConfig(**SHAPE), work, reduce=reduce)
    try:
        return simulator.run(strategy)
    finally:
        simulator.close()


@pytest.mark.parametrize(
    ("mesh", "strategy", "num_traced"),
    [
        ({"shard": 2}, "full", 5),
        ({"shard": 2}, "none", 5),
        pytest.param({"shard": 2, "replicate": 2}, "selective", 5, marks=pytest.mark.slow),
        pytest.param({"sequence": 2}, "selective", 5, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_sharded_layers_traced_once_give_the_step_of_all(mesh, strategy, num_traced):
    whole, reduced = (simulated(mesh, strategy, reduce) for reduce in (False, True))
    assert (whole.num_layers_run, reduced.num_layers_run) == (8, num_traced)
    assert reduced.peak_bytes == whole.peak_bytes
    assert reduced.steady.flops() == whole.steady.flops()
    for a, b in ((whole.first, reduced.first), (whole.steady, reduced.steady)):
        assert np.array_equal(a.bytes[a.before_optimizer], b.bytes[b.before_optimizer])
