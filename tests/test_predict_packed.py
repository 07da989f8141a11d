"""What packed attention holds inside, scores under a soft cap, is counted in a prediction as in a real step."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config

import ckpt
from ckpt import attention
from ckpt.attention import blocks
from ckpt.fake_step import LayerMarks, traced_step
from ckpt.layers import find_layers
from ckpt.optimizers import make_optimizer
from ckpt.precision import prepare
from ckpt.simulate import Simulator
from ckpt.workload import Workload
from scripts import predict_table

WINDOW = 64
CONFIG = Gemma2Config(
    vocab_size=100, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=8,
    num_key_value_heads=4, head_dim=8, sliding_window=WINDOW, max_position_embeddings=512,
)  # fmt: skip


def workload(documents):
    return Workload(batch_size=1, seq_len=300, dtype="fp32", loss="chunked", packing="isolate", documents=documents)


def real_steps(work):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG).train()
    attention.prepare(model, "isolate")
    precision, layers = prepare(model, work.dtype), find_layers(model)
    marks = LayerMarks(layers)
    ckpt.apply(model, "full", work, loss=work.loss)
    optimizer = make_optimizer(work.optimizer, [p for _, p in precision.named_parameters()])
    batch = predict_table.batch_of(work, vocab_size=100)
    places = {layer.index: layer.index for layer in layers}
    return [traced_step(model, [batch], optimizer, precision, False, marks, places) for _ in range(2)]


def within_layers(trace):
    """(N, 5) changes of the layers' forward, and of the backward of the upper one, but for real generators' states."""
    at = {(mark.kind, mark.index): mark.position for mark in trace.marks}
    spans = (("forward", 0), ("head", 1)), (("backward", 1), ("backward", 0))
    deltas = np.concatenate([trace.deltas[at[a] : at[b]] for a, b in spans])
    return deltas[abs(deltas.sum(axis=1)) != torch.get_rng_state().nbytes]


@pytest.mark.parametrize(("documents", "elements"), [(1, 2**24), (4, 2**24), (1, 2**16)])
def test_scores_under_a_soft_cap_are_counted_change_by_change(documents, elements, monkeypatch):
    monkeypatch.setattr(blocks, "ELEMENTS", elements)
    work = workload(documents)
    simulated = Simulator(CONFIG, work, reduce=False).run("full")
    for fake, real in zip((simulated.first, simulated.steady), real_steps(work), strict=True):
        assert fake.total.max() == real.total.max()
        kernels = [[row[1:] for row in trace.rows if row.is_attention] for trace in (fake, real)]
        assert len(kernels[0]) == 6 and kernels[0] == kernels[1]  # forward, replay and backward of two layers
        if elements == 2**24:  # else there are many blocks, of which a simulation runs four
            assert np.array_equal(within_layers(fake), within_layers(real))
            assert within_layers(fake).max() >= 8 * (300 // documents) ** 2 * 4  # one head's scores, times eight
