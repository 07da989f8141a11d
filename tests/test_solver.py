"""The planner: its own cost model against brute force, and plans against real steps."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ckpt
from ckpt.auto import Auto, BudgetTooSmall
from ckpt.flops import FlopCounter
from ckpt.ledger import measure
from ckpt.plan import LayerPlan, Plan
from ckpt.simulate import Simulator
from ckpt.solver.floors import floor_of_layers, floor_of_segments
from ckpt.solver.frontier import Frontier
from ckpt.solver.outer import Choice, cost_of, peak_of, solve
from ckpt.solver.price import FlopsPrice
from ckpt.solver.space import Setting, Space
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


def test_a_hopeless_budget_is_known_before_any_option_is_measured():
    said: list[str] = []
    frontier = Auto(budget_gib=1, objective="flops", bitwise=True).frontier(llama_config(4), WORK, said.append)
    assert frontier.best_within(10_000) is None
    assert any("replaying every layer" in line for line in said)
    assert not any("measuring" in line or "trying segments" in line for line in said)


def test_the_budget_that_a_refusal_names_is_the_least_that_does():
    auto = Auto(budget_gib=1e-4, objective="flops", bitwise=True)
    frontier = auto.frontier(llama_config(2), WORK)
    with pytest.raises(BudgetTooSmall, match=r"loss=chunked.*strategy\.host_budget_gib") as refused:
        auto.plan_from(frontier, WORK)
    smallest = refused.value.smallest_bytes
    named = float(re.search(r"smallest plan, (\S+) GiB", str(refused.value))[1])
    assert smallest <= named * 2**30 <= smallest * 1.001
    assert frontier.best_within(smallest) is not None
    assert frontier.best_within(smallest - 1) is None


@pytest.mark.parametrize("settings", [{}, {"loss": "chunked", "tile_mlp": 4}])
def test_floors_lie_below_what_was_run(settings):
    space = Space(Simulator(llama_config(4), WORK.replace(seq_len=1024)), Setting(**settings), FlopsPrice())
    ran = space.run(Plan([LayerPlan(True, i // 2, "replay") for i in range(4)]))
    assert floor_of_segments(space, 2) <= ran.peak_bytes <= 1.25 * floor_of_segments(space, 2)
    for plan in ("full", "none"):
        assert floor_of_layers(space) <= space.run(plan).peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize("bitwise", [True, False])
def test_the_smallest_plan_is_that_of_all_plans_run(bitwise):
    frontier = Auto(budget_gib=1, objective="flops", bitwise=bitwise).frontier(llama_config(4), WORK)
    every = [*frontier.candidates, *(frontier.segmented.groups(space, 2)[-1] for space in frontier.spaces)]
    assert frontier.needed(frontier.smallest()) == min(map(frontier.needed, every))


def test_plans_in_segments_are_taken_before_dearer_ones_layer_by_layer():
    frontier = Auto(budget_gib=1, objective="flops", bitwise=True).frontier(llama_config(4), WORK.replace(seq_len=2048))
    costs = []
    smallest, largest = frontier.smallest().peak_bytes, frontier.full.peak_bytes
    # As if all plans layer by layer were those of another setting, which costs more.
    dearer = [dataclasses.replace(c, cost=c.cost * 3 + 1) for c in frontier.candidates]
    frontier.__dict__["candidates"] = dearer
    for k in range(4):
        costs.append(frontier.best_within(smallest + (largest - smallest) * k // 3).cost)
    assert costs == sorted(costs, reverse=True)
    assert frontier.best_within(largest).label.startswith("segments")


@pytest.mark.parametrize(
    "settings",
    [{}, {"budget_gib": 0}, {"budget_gib": float("nan")}, {"budget_gib": True}, {"budget_gib": 10**400},
     {"budget_fraction": 1.5}, {"budget_gib": 1, "budget_fraction": 0.5}, {"budget_gib": 1, "objective": "speed"}],
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
    *some, whole = frontier.segmented.groups(space, 2)
    ran = whole.simulated
    assert len(some) == 7 and ran.peak_bytes < space.full.peak_bytes
    assert [c.cost for c in some] == sorted(c.cost for c in some) and some[-1].cost < whole.cost
    half = some[3]
    assert sum(layer.segment is None for layer in half.plan.layers) == 8
    assert ran.peak_bytes < frontier.peak_of(half) < space.full.peak_bytes
    assert half.peak_bytes == pytest.approx(half.estimate, rel=0.02)
    assert half.simulated.steady.flops() - frontier.none.steady.flops() == half.flops
