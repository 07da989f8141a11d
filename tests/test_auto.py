"""What `auto` promises of its plans: optimal under its own model, exact, within every budget, offload included."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest
import torch
import zoo
from engine_kit import Layer, Stack
from test_solver import NUM_TOKENS, WORK, llama_config
from transformers import LlamaForCausalLM

import ckpt
from ckpt.auto import GIB, Auto, told
from ckpt.engine.program import build_program
from ckpt.hardware import find
from ckpt.ledger import measure
from ckpt.plan import Decision, LayerPlan, Plan
from ckpt.simulate import Simulator
from ckpt.solver.away import Room, away_options
from ckpt.solver.inner import inner_frontier
from ckpt.solver.outer import solve
from ckpt.solver.peaks import LayerPeaks, spans
from ckpt.solver.price import FlopsPrice, SecondsPrice
from ckpt.solver.space import Setting, Space
from recipes.cli import compose
from recipes.planning import strategy_of, target_device

ARCHITECTURES = ["llama", "qwen3", "mixtral", "qwen3_next", "gemma2"]


class Three(Layer):
    """Three matmuls whose results are read more than once."""

    def __init__(self):
        super().__init__()
        self.c = torch.nn.Linear(8, 32, bias=False)

    def forward(self, x):
        wide = self.c(x)
        return x + self.b(self.a(x).sin() * wide[..., :8]) * wide.exp()[..., :8]


def record_of(model: torch.nn.Module, *inputs: torch.Tensor):
    """Record the first layer of a stack."""
    handle = ckpt.apply(model, "full")
    model(*inputs).sum().backward()
    record = handle.regions[0].latest.record
    handle.undo()
    return record


def test_the_inner_frontier_equals_exhaustive_search_on_a_small_layer():
    record = record_of(Stack(Three(), Three()).train(), torch.randn(2, 4, 8, requires_grad=True))
    price = FlopsPrice()
    keepable = [op.index for op in record.ops if op.makes]
    best: dict[int, int] = {}
    for size in range(len(keepable) + 1):
        for keep in itertools.combinations(keepable, size):
            program = build_program(record, dict.fromkeys(keep, Decision.KEEP))
            best[program.kept_bytes] = min(best.get(program.kept_bytes, 10**18), program.replay_flops)
    frontier = inner_frontier(record, price)
    assert len(best) > 3
    for held, flops in best.items():
        assert min(o.flops for o in frontier if o.held_bytes <= held) <= flops


def test_plans_equal_exhaustive_search_over_all_options_of_three_layers():
    space = Space(Simulator(llama_config(3), WORK, reduce=False), Setting(), FlopsPrice())
    choices = [c[:: max(1, len(c) // 5)] for c in space.choices]
    space.options = [options[:: max(1, len(options) // 5)] for options in space.options]
    every = list(itertools.product(*(range(len(c)) for c in choices)))

    def peak(plan):
        space.choices = choices
        return space.estimate(plan)

    peaks = {plan: peak(plan) for plan in every}
    costs = {plan: sum(c[k].cost for c, k in zip(choices, plan, strict=True)) for plan in every}
    low, high = min(peaks.values()), max(peaks.values())
    for k in range(6):
        budget = low + (high - low) * k // 5
        found = solve(choices, space.peaks.loss, budget)
        assert peaks[tuple(found)] <= budget
        assert costs[tuple(found)] == pytest.approx(min(costs[p] for p in every if peaks[p] <= budget), rel=1e-12)


def random_plan(handle_plan: Plan, records, generator: random.Random) -> Plan:
    """Treat each layer in one of all ways: not replayed, or replayed with any of its ops kept or sent to disk."""
    layers = []
    for record in records:
        if generator.random() < 0.2:
            layers.append(LayerPlan(replay=False))
            continue
        ops = [op for op in record.ops if op.makes]
        chosen = generator.sample(ops, generator.randint(0, len(ops)))
        ways = [Decision.KEEP, Decision.OFFLOAD] if generator.random() < 0.3 else [Decision.KEEP]
        layers.append(
            LayerPlan(
                decisions={op.key: generator.choice(ways) for op in chosen}, offload_input=generator.random() < 0.3
            )
        )
    return Plan(layers, offload={"target": "disk", "directory": None})


@pytest.mark.parametrize("name", ["llama", *(pytest.param(n, marks=pytest.mark.slow) for n in ARCHITECTURES[1:])])
def test_twenty_random_plans_leave_every_gradient_bitwise(name):
    model = zoo.build(name, layers=3 if name != "qwen3_next" else 4).train()
    inputs = zoo.batch(model, 12)

    def gradients():
        model.zero_grad(set_to_none=True)
        torch.manual_seed(3)
        loss = model(**inputs).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    expected = gradients()
    handle = ckpt.apply(model, "full")
    gradients()
    records, plan = [region.latest.record for region in handle.regions], handle.plan()
    handle.undo()
    generator = random.Random(0)
    replays = 0
    for _ in range(20):
        handle = ckpt.apply(model, random_plan(plan, records, generator))
        for _ in range(2):  # a recorded and a steady step
            values = gradients()
            assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(values, expected, strict=True))
        replays += sum(row.replays for row in handle.audit().layers)
        handle.undo()
    assert replays > 20


def step_of(model, plan) -> tuple[int, int, list[torch.Tensor]]:
    """Return the higher peak of two steps, the most bytes off the device, loss and gradients."""
    ids = torch.arange(NUM_TOKENS)[None] % 64
    labels, peaks = ids.clone(), []
    handle = ckpt.apply(model, plan)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        with measure(model, inputs=(ids, labels)) as ledger:
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            loss.backward()
        peaks.append(ledger.peak_bytes)
    away = 0 if handle.store is None else handle.store.peak_bytes
    handle.undo()
    return max(peaks), away, [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.slow
def test_offload_stays_within_device_and_disk_and_seconds_never_rise():
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(4)).train()
    _, _, expected = step_of(model, "none")
    disk_gib = 2**-10  # 1 MiB
    auto = Auto(budget_gib=1, disk_budget_gib=disk_gib, bitwise=True, hardware="cpu")
    frontier = auto.frontier(llama_config(4), WORK)
    smallest, largest = frontier.peak_of(frontier.smallest()), frontier.none.peak_bytes
    assert smallest <= frontier.full.peak_bytes
    seconds, moved = [], []
    for k in range(4):
        budget = smallest + (largest - smallest) * k // 3
        planned = Auto(budget_gib=budget / GIB, disk_budget_gib=disk_gib, bitwise=True, hardware="cpu")
        plan = planned.plan_from(frontier, WORK)
        peak, away, values = step_of(model, Plan.from_dict(plan.to_dict()))
        assert peak <= budget
        assert away <= disk_gib * GIB
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))
        seconds.append(plan.source["recompute_cost"])
        moved.append(away)
    assert seconds == sorted(seconds, reverse=True)
    assert moved[0] > 0
    assert moved[-1] == 0  # all fits: offload is declined


@pytest.mark.slow
def test_a_tight_budget_tiles_the_mlp_and_the_plan_brings_its_tiles():
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(2)).train()
    _, _, expected = step_of(model, "none")
    auto = Auto(budget_gib=1, objective="flops")
    frontier = auto.frontier(llama_config(2), WORK)
    smallest = frontier.smallest()
    peak, _, values = step_of(model, Plan.from_dict(smallest.plan.to_dict()))
    assert smallest.plan.tile_mlp > 1
    assert peak <= smallest.peak_bytes < frontier.full.peak_bytes
    for a, b in zip(values, expected, strict=True):
        assert (a - b).norm() <= 1e-6 * b.norm()


@pytest.mark.parametrize(("loss", "tiles", "vocab"), [("chunked", 1, 2048), ("full", 4, 64), ("full", "auto", 64)])
def test_a_plan_brings_the_loss_and_tiles_it_was_made_with(loss, tiles, vocab):
    config = llama_config(2)
    config.vocab_size = vocab
    model, work = LlamaForCausalLM(config).train(), WORK.replace(loss=loss, tile_mlp=tiles)
    auto = Auto(budget_gib=1, objective="flops", bitwise=True)
    frontier = auto.frontier(model, work)
    plan = dataclasses.replace(auto, budget_gib=frontier.none.peak_bytes / GIB).plan_from(frontier, work)
    assert plan.loss == loss and tiles in (plan.tile_mlp, "auto")
    assert frontier.none.peak_bytes < Simulator(model, WORK).run("none").peak_bytes  # with full loss, untiled
    peak, _, _ = step_of(model, Plan.from_dict(plan.to_dict()))  # applied with no word of loss and tiles
    assert peak == plan.source["predicted_peak_bytes"] <= plan.source["budget_bytes"]


@pytest.mark.parametrize("frozen", [1, 2])
def test_frozen_layers_in_front_are_planned_within_the_budget(frozen):
    model = LlamaForCausalLM(llama_config(2)).train()
    for module in (model.model.embed_tokens, *model.model.layers[:frozen]):
        module.requires_grad_(False)
    _, _, expected = step_of(model, "none")
    auto = Auto(budget_gib=1, objective="flops", bitwise=True)
    frontier = auto.frontier(model, WORK)
    for budget in (frontier.needed(frontier.smallest()), frontier.none.peak_bytes):
        plan = dataclasses.replace(auto, budget_gib=budget / GIB).plan_from(frontier, WORK)
        peak, _, values = step_of(model, plan)
        assert peak <= budget
        assert all(torch.equal(a, b) for a, b in zip(values, expected, strict=True))


@pytest.mark.parametrize("frozen", [0, 3])
def test_peaks_by_layer_are_the_same_where_one_layer_is_run_for_many(frozen):
    model = LlamaForCausalLM(llama_config(10)).train()
    for module in (model.model.embed_tokens, *model.model.layers[:frozen]):
        module.requires_grad_(frozen == 0)
    whole, reduced = (Simulator(model, WORK, reduce=reduce).run("full") for reduce in (False, True))
    assert reduced.num_layers_run < whole.num_layers_run == 10
    for name, value in vars(LayerPeaks.of(whole)).items():
        assert np.array_equal(value, getattr(LayerPeaks.of(reduced), name)), name


@pytest.mark.parametrize("accum", [1, 2])
def test_peaks_by_layer_count_the_step_that_records(accum):
    work = dataclasses.replace(WORK, grad_accum=accum)
    ran = Simulator(llama_config(), work, reduce=False).run("full")
    peaks = LayerPeaks.of(ran)
    later = LayerPeaks.of(dataclasses.replace(ran, first=ran.steady))
    assert np.array_equal(peaks.held, later.held)
    if accum == 1:  # else gradients, which stand from the second micro-batch on, outweigh what recording holds
        assert (peaks.forward > later.forward).all()
        before = np.concatenate([[0], np.cumsum(peaks.held)[:-1]])
        forward = ran.first.total[: spans(ran.first, ran.num_layers)[1][0]]
        assert (peaks.forward + before).max() == forward.max()
    most = [peaks.elsewhere, peaks.held.sum() + peaks.loss]
    for i, needs in enumerate(np.maximum(peaks.forward, peaks.backward)):
        most.append(needs + peaks.held[:i].sum())
    assert max(most) == ran.peak_bytes


def test_plans_of_one_frontier_keep_what_each_says_of_its_making():
    auto = Auto(budget_gib=1, objective="flops", bitwise=True)
    frontier = auto.frontier(llama_config(2), WORK)
    first = auto.plan_from(frontier, WORK)
    second = dataclasses.replace(auto, budget_gib=2).plan_from(frontier, WORK)
    assert (first.source["budget_bytes"], second.source["budget_bytes"]) == (GIB, 2 * GIB)


def test_a_simulator_of_another_workload_is_refused():
    with pytest.raises(ValueError, match="another workload than its own"):
        Auto(budget_gib=1).plan(Simulator(llama_config(2), WORK), WORK.replace(seq_len=128))


def test_planning_tells_its_progress_and_what_binds():
    said: list[str] = []
    config = llama_config(2)
    full = Simulator(config, WORK).run("full").peak_bytes
    plan = Auto(budget_gib=1.2 * full / GIB, objective="flops", bitwise=True).plan(config, WORK, progress=said.append)
    assert any("checking a plan" in line for line in said)
    assert plan.source["binds"] == "memory"
    assert plan.source["predicted_peak_bytes"] <= 1.2 * full < plan.source["next_budget_bytes"]


def test_a_slow_link_takes_as_much_of_what_a_layer_keeps_as_it_has_time_for():
    record = record_of(Stack(Three(), Three()).train(), torch.randn(2, 4, 8, requires_grad=True))
    price = SecondsPrice(find("cpu"))
    options = inner_frontier(record, price)
    forward = sum(price(op, record) for op in record.ops)
    all_kept = max(o.held_bytes for o in options)
    slow = Room("host", 2**30, all_kept / forward / 2)  # of what the fullest option holds, half
    found = away_options(options, record, price, slow)
    in_part = [o for o in found if o.is_moved_in_part]
    assert in_part and all(o.moved < o.keep for o in in_part)
    for option in in_part:
        whole = next(o for o in found if o.keep == option.keep == o.moved and o.offload_input == option.offload_input)
        assert option.stall < whole.stall and whole.held_bytes < option.held_bytes
    fast = Room("host", 2**30, 1e3 * all_kept / forward)
    assert not any(o.is_moved_in_part for o in away_options(options, record, price, fast))


def test_tiles_left_to_auto_are_chosen_once_and_stand_in_the_plan():
    work = WORK.replace(tile_mlp="auto")
    left = Auto(budget_gib=1, objective="flops").frontier(llama_config(2), work)
    assert left.space.setting == Setting(tile_mlp=1)
    assert {space.setting.tile_mlp for space in left.spaces} > {1}
    held = Auto(budget_gib=1, objective="flops", bitwise=True)
    frontier = held.frontier(llama_config(2), work)
    assert frontier.space.setting.tile_mlp > 1 and len(frontier.spaces) == 1
    assert held.plan_from(frontier, work).tile_mlp == frontier.space.setting.tile_mlp


def test_seconds_say_whose_they_are():
    said: list[str] = []
    plan = Auto(budget_gib=1).plan(llama_config(2), WORK, progress=said.append)
    assert said[0] == "seconds are estimated for h100 (none was named: strategy.hardware)"
    assert told(plan.source).endswith("least seconds of h100 (none was named: strategy.hardware)")
    named = Auto(budget_fraction=0.5, hardware=dataclasses.replace(find("cpu"), memory_bytes=2 * GIB))
    assert named.budget_bytes() == GIB
    assert named.plan(llama_config(2), WORK).source["device"] == "cpu"
    counted = Auto(budget_gib=1, objective="flops").plan(llama_config(2), WORK)
    assert counted.source["device"] is None and told(counted.source).endswith("least FLOPs run again")


@pytest.mark.parametrize(("words", "device"), [((), "cpu"), (("hardware=rtx4090",), "rtx4090"),
                                               (("strategy.hardware=a100",), "a100_80")])  # fmt: skip
def test_recipes_plan_for_the_device_that_the_run_is_for(words, device):
    cfg = compose(["+strategy=auto", "strategy.budget_fraction=0.5", "hardware.memory_gib=6", *words])
    auto = strategy_of(cfg, target_device(cfg, "cpu"))
    assert auto.device().name == device
    assert auto.budget_bytes() == (3 * GIB if device != "a100_80" else find("a100_80").usable_bytes // 2)
    assert auto.device_said() == device


@pytest.mark.parametrize(
    "settings",
    [{"host_budget_gib": -1}, {"disk_budget_gib": float("inf")}, {"disk_budget_gib": 10**400}, {"bitwise": 1}],
)
def test_offload_budgets_and_bitwise_are_checked(settings):
    with pytest.raises(ValueError, match=f"auto: {next(iter(settings))}="):
        Auto(budget_gib=1, **settings)
