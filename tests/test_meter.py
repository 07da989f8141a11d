"""Speed and utilization: what counts as tokens, as model FLOPs and as hardware FLOPs, and which steps are timed."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ckpt
from ckpt.flops import FlopCounter
from recipes import meter as meters
from recipes.meter import Meter, Peak, StepFlops, device_peak, measure_matmul, num_pairs
from recipes.probe import step_flops

CPU = torch.device("cpu")
LAYERS, HIDDEN, MLP, HEADS, KV_HEADS, SIZE, VOCAB, TOKENS, ROWS = 3, 32, 64, 4, 2, 8, 50, 16, 2


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until a test moves it: clock[0] += seconds."""
    now = [0.0]
    monkeypatch.setattr(meters.time, "perf_counter", lambda: now[0])
    return now


def batch_of(tokens=TOKENS, rows=ROWS, padding=0, starts=None):
    batch = {"input_ids": torch.zeros(rows, tokens, dtype=torch.long), "num_tokens": rows * tokens - padding}
    if starts:
        batch["cu_seq_lens_q"] = torch.tensor(starts, dtype=torch.int32)
    return batch


def timed(meter, clock, seconds, batch=None, is_probe=False):
    meter.start(is_probe)
    clock[0] += seconds
    return meter.stop([batch or batch_of()])


def test_pairs_of_packed_documents_count_each_on_its_own():
    assert num_pairs(batch_of(8, 2)) == 2 * 8 * 8 / 2
    # documents of 3, 5 and 8 tokens; the boundary is repeated to a fixed length
    assert num_pairs(batch_of(8, 2, starts=[0, 3, 8, 16, 16, 16])) == (9 + 25 + 64) / 2


def test_throughput_leaves_out_the_first_step_and_probe_steps(clock):
    meter = Meter(CPU, Peak(1e9, ""))
    timed(meter, clock, 100.0)
    assert meter.summary() == {"tokens_per_second": None, "step_seconds": None}
    timed(meter, clock, 2.0)
    timed(meter, clock, 50.0, is_probe=True)
    timed(meter, clock, 2.0, batch_of(padding=20))
    assert meter.summary() == {"tokens_per_second": (32 + 12) / 4.0, "step_seconds": 2.0}


def test_padding_is_no_token(clock):
    metrics = timed(Meter(CPU, Peak(1e9, "")), clock, 2.0, batch_of(padding=20))
    assert metrics["tokens"] == 12 and metrics["tokens_per_second"] == 6.0 and metrics["step_seconds"] == 2.0


def test_utilization_is_unknown_until_flops_were_counted_then_follows_its_formula(clock):
    meter = Meter(CPU, Peak(1000.0, ""))
    assert timed(meter, clock, 1.0)["model_flops_utilization"] is None
    meter.flops = StepFlops(
        hardware_matmul=800, hardware_attention=400, model_matmul=640, model_attention=320, positions=32, pairs=256.0
    )
    metrics = timed(meter, clock, 2.0)
    assert metrics["hardware_flops_utilization"] == 1200 / 2.0 / 1000
    assert metrics["model_flops_utilization"] == 960 / 2.0 / 1000
    # Half of the tokens are padding: model FLOPs drop, hardware FLOPs do not. Documents of 8: a quarter of the pairs.
    metrics = timed(meter, clock, 2.0, batch_of(padding=16, starts=[0, 8, 16, 24, 32]))
    assert metrics["model_flops_utilization"] == (320 + 160) / 2.0 / 1000
    assert metrics["hardware_flops_utilization"] == (800 + 200) / 2.0 / 1000


def counted(strategy, loss="full"):
    """FLOPs of one step of a tiny Llama under a strategy, as the probe counts them."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=MLP, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, attn_implementation="sdpa",
        )
    ).train()  # fmt: skip
    handle = ckpt.apply(model, strategy, loss=loss)
    ids = torch.randint(0, VOCAB, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()  # the first call records what it runs
    before = handle.audit().flops_run_again
    with FlopCounter() as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    flops = step_flops(counter, handle.audit().flops_run_again - before, [batch_of()])
    handle.undo()
    return flops, counter.total


def test_model_flops_are_three_forwards_by_hand():
    flops, total = counted("none")
    positions = ROWS * TOKENS
    layer = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KV_HEADS * SIZE + 3 * HIDDEN * MLP
    matmul = 2 * positions * (LAYERS * layer + HIDDEN * VOCAB)
    # The head's and every weight's gradient, and every input's: nothing in a Llama is left out but the embedding.
    assert flops.model_matmul == flops.hardware_matmul == 3 * matmul
    forward = 2 * 2 * ROWS * HEADS * (TOKENS * TOKENS // 2) * SIZE * LAYERS
    assert flops.model_attention == 3 * forward
    assert flops.hardware_attention == forward + 5 * forward // 2
    assert total == flops.hardware_matmul + flops.hardware_attention


@pytest.mark.parametrize(
    "strategy", ["full", ckpt.EveryN(2), ckpt.Selective("attention"), ckpt.Segments(2, "replay")], ids=repr
)
def test_model_flops_do_not_depend_on_the_strategy_and_hardware_flops_do(strategy):
    none, _ = counted("none")
    flops, _ = counted(strategy)
    assert (flops.model_matmul, flops.model_attention) == (none.model_matmul, none.model_attention)
    assert flops.hardware_matmul > none.hardware_matmul
    replays_attention = not isinstance(strategy, ckpt.Selective)
    assert (flops.hardware_attention > none.hardware_attention) is replays_attention


def test_matmul_is_measured_where_no_data_sheet_is_known():
    peak = measure_matmul(CPU, torch.float32)
    assert 1e8 < peak < 1e14
    assert device_peak(CPU, torch.float32).flops > 1e8


@pytest.mark.parametrize(
    "name, dtype, expected",
    [
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989e12),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756e12),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5e12),
        ("NVIDIA L40S", torch.bfloat16, 362e12),
    ],
)
def test_peak_of_a_gpu_is_its_data_sheets_dense_figure(monkeypatch, name, dtype, expected):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    peak = device_peak(torch.device("cuda", 0), dtype)
    assert peak.flops == expected and "data sheet" in peak.source
