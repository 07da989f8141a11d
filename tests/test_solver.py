"""The planner: its own cost model against brute force, and plans against real steps."""

from __future__ import annotations

import itertools

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ckpt
from ckpt.auto import Auto
from ckpt.flops import FlopCounter
from ckpt.ledger import measure
from ckpt.plan import LayerPlan, Plan
from ckpt.simulate import Simulator
from ckpt.solver.frontier import Frontier
from ckpt.solver.outer import Choice, cost_of, peak_of, solve
from ckpt.workload import Workload

NUM_TOKENS = 256
WORK = Workload(batch_size=1, seq_len=NUM_TOKENS, dtype="fp32", optimizer=None, loss="full")


def llama_config(layers: int = 3) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=64,
        intermediate_size=224,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=64,
        max_position_embeddings=NUM_TOKENS,
    )


def random_layers(generator: torch.Generator, layers: int, choices: int) -> list[list[Choice]]:
    def number(most: int) -> int:
        return int(torch.randint(1, most, (1,), generator=generator))

    return [
        [
            Choice(held=number(40), forward=number(60), backward=number(90), cost=float(number(50)))
            for _ in range(choices)
        ]
        for _ in range(layers)
    ]


@pytest.mark.parametrize("seed", range(12))
def test_the_outer_program_equals_exhaustive_search(seed):
    generator = torch.Generator().manual_seed(seed)
    layers = random_layers(generator, 5, 4)
    for budget in (90, 120, 150, 200, 400):
        plans = itertools.product(range(4), repeat=5)
        fitting = [p for p in plans if peak_of(layers, 20, p) <= budget]
        found = solve(layers, 20, budget)
        if not fitting:
            assert found is None
        else:
            assert peak_of(layers, 20, found) <= budget
            assert cost_of(layers, found) == min(cost_of(layers, p) for p in fitting)


@pytest.fixture(scope="module")
def frontier() -> Frontier:
    return Frontier(Simulator(llama_config(), WORK, reduce=False), Auto(budget_gib=1, objective="flops").price())


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(llama_config()).train()


def run(model, plan):
    """One recorded and one steady step under a plan: the higher measured peak, executed FLOPs, loss and gradients."""
    ids = torch.arange(NUM_TOKENS)[None] % 64
    labels = ids.clone()
    handle = ckpt.apply(model, plan)
    try:
        peaks = []
        for _ in range(2):
            model.zero_grad(set_to_none=True)
            with measure(model, inputs=(ids, labels)) as ledger, FlopCounter() as counter:
                loss = model(input_ids=ids, labels=labels, use_cache=False).loss
                loss.backward()
            peaks.append(ledger.peak_bytes)
    finally:
        handle.undo()
    return max(peaks), counter.total, [loss.detach(), *(p.grad.clone() for p in model.parameters())]


@pytest.mark.slow
def test_every_budget_is_kept_costs_only_fall_and_gradients_stay(frontier, model):
    _, flops_of_none, expected = run(model, "none")
    smallest, largest = frontier.peak_of(frontier.smallest()), frontier.none.peak_bytes
    last = None
    for k in range(4):
        budget = smallest + (largest - smallest) * k // 3
        best = frontier.best_within(budget)
        peak, flops, values = run(model, best.plan)
        assert peak <= budget
        assert last is None or flops <= last
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
        last = flops
    assert last == flops_of_none


@pytest.mark.slow
@pytest.mark.parametrize("baseline", ["full", "every_n", "selective", "matmuls"])
def test_no_baseline_costs_less_at_its_own_peak(frontier, model, baseline):
    strategies = {
        "every_n": ckpt.EveryN(2),
        "selective": ckpt.Selective(),
        "matmuls": ckpt.Selective("attention+matmul"),
    }
    peak, flops, _ = run(model, strategies.get(baseline, baseline))
    assert run(model, frontier.best_within(peak).plan)[1] <= flops


@pytest.mark.slow
def test_a_budget_below_the_smallest_plan_names_it_and_the_way_out():
    with pytest.raises(ValueError, match=r"below the smallest plan, 0\.00\d+ GiB.*loss=chunked"):
        Auto(budget_gib=1e-4, objective="flops", bitwise=True).plan(llama_config(2), WORK)


@pytest.mark.parametrize(
    "settings",
    [{}, {"budget_gib": 0}, {"budget_gib": float("nan")}, {"budget_gib": True}, {"budget_fraction": 1.5},
     {"budget_gib": 1, "budget_fraction": 0.5}, {"budget_gib": 1, "objective": "speed"}],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match="auto: "):
        Auto(**settings)


def test_auto_is_a_strategy_like_any_other(model):
    handle = ckpt.apply(model, Auto(budget_gib=1.0, objective="flops"), WORK)
    try:
        assert handle.policy.source["budget_bytes"] == 2**30
        assert handle.policy.source["binds"] == "nothing"
        assert not handle.regions
    finally:
        handle.undo()


def test_plans_with_segments_in_front_lie_between_replayed_layers_and_segments_alone():
    work = WORK.replace(seq_len=4096)  # so that inputs weigh more than gradients
    frontier = Auto(budget_gib=1, objective="flops", bitwise=True).frontier(llama_config(16), work)
    space = frontier.space
    ran = space.run(Plan([LayerPlan(True, i // 2, "replay") for i in range(16)]))
    *some, whole = frontier._segmented(space, 2, ran)
    assert len(some) == 7 and ran.peak_bytes < space.full.peak_bytes
    assert [c.cost for c in some] == sorted(c.cost for c in some) and some[-1].cost < whole.cost
    half = some[3]
    assert sum(layer.segment is None for layer in half.plan.layers) == 8
    assert ran.peak_bytes < frontier.peak_of(half) < space.full.peak_bytes
    assert half.peak_bytes == pytest.approx(half.estimate, rel=0.02)
    assert half.simulated.steady.flops() - frontier.none.steady.flops() == half.flops
