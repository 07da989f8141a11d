"""A simulated step is the real one: the same ops with the same FLOPs and bytes, in the same order, replays included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.fake_step import LayerMarks, traced_step
from ckpt.layers import find_layers
from ckpt.optimizers import make_optimizer
from ckpt.precision import prepare
from ckpt.predict import predict
from ckpt.simulate import Simulator
from ckpt.workload import Workload
from scripts.predict_table import CONFIGS, batch_of, build, config_of

WORK = Workload(batch_size=1, seq_len=48, dtype="fp32", loss="chunked")


def real_steps(name, strategy):
    """Two traced steps on real tensors, made as the simulator makes them."""
    model = build(name)
    precision = prepare(model, WORK.dtype)
    marks = LayerMarks(find_layers(model))
    ckpt.apply(model, strategy, WORK, loss=WORK.loss)
    optimizer = make_optimizer(WORK.optimizer, [p for _, p in precision.named_parameters()])
    places = {layer.index: layer.index for layer in find_layers(model)}
    batch = batch_of(WORK)
    return [traced_step(model, [batch], optimizer, precision, False, marks, places) for _ in range(2)]


def ops(trace):
    """List the ops. A real chunked loss whose own gradient is 1 leaves out the product with it, which a fake one cannot
    know: one op in place for each gradient, no memory."""
    rows = [(row.op, row.flops, row.num_bytes, row.dtype, row.is_replay) for row in trace.rows]
    at = next(i for i, row in enumerate(rows) if row[0] == "ones_like") + 1
    scaled = [row for row in rows[at : at + 2] if row[0] == "mul_"]
    return rows[:at] + rows[at + len(scaled) :]


SLOW = {"qwen3", "gpt2", "phi3", "qwen3_next"}  # seconds each


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in CONFIGS])
def test_fake_and_real_steps_run_the_same_ops(name):
    strategy = "selective"
    simulated = Simulator(config_of(name), WORK, reduce=False).run(strategy)
    first, steady = real_steps(name, strategy)
    for real, fake in ((first, simulated.first), (steady, simulated.steady)):
        assert len(ops(fake)) > 200 and any(row.is_replay for row in fake.rows)
        assert ops(fake) == ops(real)


@settings(max_examples=3, deadline=None)
@given(
    tokens=st.integers(8, 2000), more=st.integers(1, 500), rows=st.integers(1, 3), more_rows=st.integers(0, 2),
    strategy=st.sampled_from(["none", "full", "selective"]), loss=st.sampled_from(["chunked", "full"]),
)  # fmt: skip
def test_more_tokens_or_rows_never_predict_less(tokens, more, rows, more_rows, strategy, loss):
    config = config_of("llama")
    config.num_hidden_layers = 1
    less = WORK.replace(seq_len=tokens, batch_size=rows, loss=loss)
    longer = less.replace(seq_len=tokens + more)
    wider = less.replace(batch_size=rows + more_rows)
    peak = predict(config, strategy, less).peak_bytes
    assert predict(config, strategy, longer).peak_bytes >= peak
    assert predict(config, strategy, wider).peak_bytes >= peak


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"hardware": "b100"}, "hardware 'b100' is unknown. Did you mean h100"),
        ({"strategy": "ful"}, "ful"),
        ({"model": torch.nn.Linear(2, 2)}, "layer"),
        ({"model": "llama"}, "needs a model, a Transformers config or a model on meta, got str"),
        ({"work": {"seq_len": 64}}, "needs a ckpt.Workload, got dict"),
        ({"work": 64, "hardware": "h100"}, "needs a ckpt.Workload, got int"),
        ({"inputs": 5}, "inputs must be the forward's arguments by name, got int"),
    ],
)
def test_what_cannot_be_predicted_is_named(arguments, said):
    given = {"model": config_of("llama"), "strategy": "full", "work": WORK.replace(seq_len=8)} | arguments
    with pytest.raises(ValueError, match=said) as caught:
        predict(given["model"], given["strategy"], given["work"], given.get("hardware"), inputs=given.get("inputs"))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"mesh": 8}, "mesh=8 must be degrees by name"),
        ({"mesh": [("shard", 2)]}, "must be degrees by name"),
        ({"hold_gradients": "no"}, "hold_gradients='no' must be True or False"),
        ({"seq_len": 2**29 + 1}, "more tokens than the 536870912"),
        ({"seq_len": 2**62, "batch_size": 2**9}, "lower seq_len"),
    ],
)
def test_a_workload_that_cannot_be_meant_is_named(values, said):
    with pytest.raises(ValueError, match=said):
        WORK.replace(**values)


def test_the_most_tokens_that_a_workload_takes_end_in_a_figure_or_one_line():
    work = WORK.replace(seq_len=2**29)
    assert predict(config_of("llama"), "full", work).peak_bytes > 2**29 * 128 * 4
    eager = config_of("gemma2")
    eager.num_attention_heads = 64
    with pytest.raises(ValueError, match="takes 2\\^63 bytes or more .*lower seq_len"):
        predict(eager, "full", work)


def test_a_config_that_cannot_be_built_is_named():
    config = config_of("llama")
    config.num_attention_heads = 0
    with pytest.raises(ValueError, match="LlamaConfig cannot be built: "):
        predict(config, "full", WORK)
