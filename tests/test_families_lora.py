"""Adapters over families that differ in kind: only LoRA's weights train, and their gradients are exact."""

from __future__ import annotations

import functools

import coverage_checks
import exactness
import pytest
import zoo

peft = pytest.importorskip("peft")

FAMILIES = (
    *("llama", "gpt2", "gemma2", "gemma3n_text", "mixtral", "gpt_neox", "deepseek_v3", "qwen3_next", "bloom", "opt"),
)
EXPERTS = ("mixtral", "qwen3_next", "deepseek_v3")  # adapters of expert weights know no dropout (peft 0.21)
DEFAULT, *SLOW = "attention+matmul+moe", "full", "segments_replay", "offload_inputs", "chunked"


@functools.lru_cache(maxsize=1)
def plain(family: str):
    """Return the family with adapters on every linear layer, and its plain steps. B is not zero: A has a gradient."""
    dropout = 0.0 if family in EXPERTS else 0.1
    settings = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=dropout, init_lora_weights=False)
    model = peft.get_peft_model(zoo.build(family, dropout=0.1), settings).train()
    return model, exactness.baseline(model, [zoo.batch(model, 16), zoo.batch(model, 13, seed=1)])


@pytest.mark.parametrize("strategy", [DEFAULT, *(pytest.param(s, marks=pytest.mark.slow) for s in SLOW)])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_gradients_are_exact(family, strategy):
    model, base = plain(family)
    trained = [name for name, gradient in base.steps[0].gradients.items() if gradient is not None]
    assert trained and all("lora_" in name for name in trained)
    check = coverage_checks.CHECKS[strategy]
    found = exactness.compare(model, base, check.attach, tolerance=check.tolerance)
    found.raise_if_wrong(f"{family} with adapters under {strategy}")
    assert not coverage_checks.unproved(model, base, found.audits[-1])
