"""Promise 1 on real architectures: loss and every gradient bitwise those of the plain model, dropout on.

Eleven families that differ in kind. The first batch is recorded, the second runs by the record, the third has another
length. Undo is checked by the same comparison.
"""

from __future__ import annotations

import functools
import random

import exactness
import pytest
import torch
import zoo
from engine_kit import all_strategies

import ckpt
from ckpt.plan import Decision, LayerPlan, Plan

FAMILIES = ("llama", "qwen3", "gemma2", "gemma3", "gpt2", "phi3", "mixtral", "gpt_oss", "qwen3_next", "falcon",
            "gemma3n_text")  # fmt: skip
STRATEGIES = all_strategies() | {
    "selective_matmul": ckpt.Selective("attention+matmul"),
    "by_price": ckpt.Selective("by_price", min_flops_per_byte=10),
}
SOME = ["full", "segments_replay", "selective_matmul", "offload_inputs"]
LAYERS = {"gemma3n_text": 4}
"""Its last two layers read the keys of those before."""


@functools.lru_cache(maxsize=2)
def plain(name: str, layers: int = 4, num_batches: int = 3):
    model = zoo.build(name, dropout=0.1, layers=layers)
    batches = [zoo.batch(model, 10, seed=0), zoo.batch(model, 10, seed=1), zoo.batch(model, 9, batch=1, seed=2)]
    return model, exactness.baseline(model, batches[:num_batches])


def compare(model, baseline, strategy, what: str):
    """Compare, and return the layers of the last audit."""
    comparison = exactness.compare(model, baseline, lambda m: ckpt.apply(m, strategy))
    comparison.raise_if_wrong(what)
    return comparison.audits[-1].layers


@pytest.mark.parametrize("name", FAMILIES)
def test_every_strategy_is_exact_and_undone(name):
    model, baseline = plain(name)
    assert baseline.repeatable
    for strategy, made in STRATEGIES.items():
        layers = compare(model, baseline, made, f"{name} under {strategy}")
        if strategy == "full":
            assert [layer.replays for layer in layers] == [3] * 4
        if strategy in ("keep_mm", "selective_matmul", "offload_mm"):
            assert all(layer.ops_kept for layer in layers)
    # dropout is truly on (and Mixtral's noise on its routing)
    assert exactness.draws_random_numbers(model, baseline.batches[0])


def ops_that_make_something(model, inputs) -> list[list]:
    """Return, by layer, the ops whose outputs can be kept."""
    handle = ckpt.apply(model, "full")
    model(**inputs).loss.backward()
    model.zero_grad()
    found = [[op for op in region.latest.record.ops if op.num_bytes] for region in handle.regions]
    handle.undo()
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_ten_random_keep_lists_are_exact(name):
    """By op name: any subset may be kept, random ops, casts, copies and all."""
    model, baseline = plain(name, LAYERS.get(name, 2), 2)
    rng = random.Random(name)
    layers = ops_that_make_something(model, baseline.batches[0])
    names = sorted({op.key.op for ops in layers for op in ops})
    for _ in range(10):
        keep = "+".join(rng.sample(names, rng.randrange(1, len(names))))
        compare(model, baseline, ckpt.Selective(keep), f"{name} keeping {keep}")


@pytest.mark.parametrize("name", FAMILIES)
def test_random_plans_by_key_are_exact(name):
    """By op call, another decision in each layer; some layers in segments, some not replayed at all."""
    model, baseline = plain(name, LAYERS.get(name, 2), 2)
    layers = ops_that_make_something(model, baseline.batches[0])
    for seed in range(3):
        rng = random.Random(f"{name} {seed}")
        rows = []
        for index, ops in enumerate(layers):
            decisions = {op.key: Decision.KEEP for op in ops if rng.random() < 0.4}
            segment = None if seed % 2 else index // 2
            rows.append(LayerPlan(rng.random() < 0.9, segment, rng.choice(["keep", "replay"]), decisions=decisions))
        plan = Plan.from_dict(Plan(rows).to_dict())
        compare(model, baseline, plan, f"{name}, plan {seed}")


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_are_exact(name, side):
    """Padding builds dense masks, which reach every layer as an argument."""
    model = zoo.build(name, dropout=0.1, layers=2)
    batches = []
    for seed in range(2):
        inputs = zoo.batch(model, 12, seed=seed)
        mask = torch.ones_like(inputs["input_ids"])
        mask[1, :5] = 0
        mask = mask if side == "left" else mask.flip(1)
        labels = inputs["labels"].masked_fill(mask == 0, -100)
        batches.append({**inputs, "attention_mask": mask, "labels": labels})
    baseline = exactness.baseline(model, batches)
    for strategy in SOME:
        compare(model, baseline, STRATEGIES[strategy], f"{name}, padded on the {side}, under {strategy}")


@pytest.mark.parametrize("name", ["llama", "gemma3n_text", "mixtral", "gpt2"])
@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
def test_half_precision_is_exact(name, kind):
    model = zoo.build(name, dropout=0.1, layers=LAYERS.get(name, 2))
    if kind == "bfloat16":
        model = model.bfloat16()
    inputs = [zoo.batch(model, 10, seed=n) for n in range(2)]

    def steps() -> list:
        found = []
        for seed, batch in enumerate(inputs):
            torch.manual_seed(seed)
            model.zero_grad(set_to_none=True)
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
                loss = model(**batch).loss
            loss.backward()
            found += [loss.detach(), *(p.grad for p in model.parameters())]
        return found

    expected = steps()
    for strategy in (*SOME, "keep_mm", "offload_kept"):
        handle = ckpt.apply(model, STRATEGIES[strategy])
        for value, wanted in zip(steps(), expected, strict=True):
            assert (value is None and wanted is None) or torch.equal(value, wanted), strategy
        assert not any(layer.dynamic_because for layer in handle.audit().layers)
        handle.undo()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_frozen_embeddings_are_exact(name):
    """The usual set-up of adapters: the first layer's input needs no gradient."""
    model = zoo.build(name, dropout=0.1)
    model.get_input_embeddings().requires_grad_(False)
    baseline = exactness.baseline(model, [zoo.batch(model, 10, seed=n) for n in range(2)])
    for strategy in (*SOME, "segments_keep", "keep_all"):
        compare(model, baseline, STRATEGIES[strategy], f"{name} under {strategy}")
