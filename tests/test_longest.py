"""The longest sequence that fits is the one that trying every length would find, by few predictions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ckpt
from ckpt.longest import longest, longest_that_fits
from ckpt.predict import predict
from ckpt.simulate import Simulator
from ckpt.workload import Workload
from scripts.predict_table import config_of

STRATEGIES = ("full", None)


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 500)), min_size=1, max_size=4),
    budget=st.integers(0, 600_000),
    step=st.integers(1, 40),
    most=st.integers(40, 400),
    asked=st.integers(1, 600),
    check_next=st.booleans(),
)
def test_finds_what_trying_every_length_finds(pieces, budget, step, most, asked, check_next):
    def peak(tokens):  # what a step's peak is: the highest of a few straight lines
        return max(fixed + slope * tokens for fixed, slope in pieces)

    fitting = [n for n in range(step, most + 1, step) if peak(n) <= budget]
    found = longest(peak, budget, step=step, most=most, known={asked: peak(asked)}, check_next=check_next)
    assert found.seq_len == max(fitting, default=0)
    assert found.peak_bytes == peak(found.seq_len or step)
    assert found.is_capped == (found.seq_len == most // step * step)


def test_steps_in_the_peak_do_not_mislead_it():
    def peak(tokens):
        return -(-tokens // 700) * 700 + (tokens // 5000) ** 2

    expected = max(n for n in range(1, 60_000) if peak(n) <= 40_321)
    assert longest(peak, 40_321, step=1, most=100_000).seq_len == expected


def test_needs_few_predictions_over_any_range():
    tried = []

    def peak(tokens):
        tried.append(tokens)
        return max(60_000_000, 20_000_000 + 431 * tokens)

    assert longest(peak, 90_000_000, step=1024, check_next=False).seq_len == 70_000_000 // 431 // 1024 * 1024
    assert len(tried) <= 7
    tried.clear()
    for asked in (1024, 131_072, 1_000_000):
        longest(peak, 90_000_000, known={asked: peak(asked)}, at_zero=20_000_000, check_next=False)
    assert len(tried) <= 12


def test_the_longest_that_is_predicted_to_fit_fits_and_the_next_does_not():
    config = config_of("llama")
    config.num_hidden_layers = 1
    work = Workload(dtype="fp32", optimizer=None)
    budget = predict(config, "full", work.replace(seq_len=3000)).peak_bytes
    found = longest_that_fits(config, "full", work, budget_bytes=budget, step=128)
    assert found.seq_len == 3000 // 128 * 128 and found.peak_bytes <= budget
    assert predict(config, "full", work.replace(seq_len=found.seq_len + 128)).peak_bytes > budget
    assert len(found.peaks) <= 6


def test_needs_a_device_or_a_budget():
    with pytest.raises(ValueError, match="needs hardware, or a budget"):
        longest_that_fits(None, "full", ckpt.Workload())
    with pytest.raises(ValueError, match="step=0"):
        longest(lambda n: n, 5, step=0)


@pytest.mark.parametrize(
    "fields",
    [{"packing": "isolate", "documents": 3, "grad_accum": 2}, {"mesh": {"sequence": 2}}],
    ids=["packed", "sequence"],
)
def test_a_simulator_at_another_length_predicts_what_a_new_one_does(fields):
    config = config_of("llama")
    config.num_hidden_layers = 2
    work = Workload(batch_size=2, seq_len=96, dtype="bf16", loss="chunked", **fields)
    alone = [_steps(config, work), _steps(config, work.replace(seq_len=640))]
    simulator = Simulator(config, work)
    try:
        with simulator.at_length(640):
            longer = [simulator.run(strategy) for strategy in STRATEGIES]
        as_before = [simulator.run(strategy) for strategy in STRATEGIES]
    finally:
        simulator.close()
    assert simulator.work is work
    for new, shared in zip(alone, (as_before, longer), strict=True):
        for one, other in zip(new, shared, strict=True):
            assert (one.steady.total == other.steady.total).all() and one.first.flops() == other.first.flops()


def _steps(config, work):
    simulator = Simulator(config, work)
    try:
        return [simulator.run(strategy) for strategy in STRATEGIES]
    finally:
        simulator.close()


def test_a_simulator_with_inputs_keeps_their_length():
    inputs = {"input_ids": torch.zeros(1, 8, dtype=torch.long), "labels": torch.zeros(1, 8, dtype=torch.long)}
    simulator = Simulator(config_of("llama"), Workload(seq_len=8), inputs=inputs)
    with pytest.raises(ValueError, match="inputs= has their length"), simulator.at_length(16):
        pass
