"""Random layers under random policies, bitwise against the plain model: what no list of traps thought of."""

from __future__ import annotations

import itertools
import random
import zlib

import pytest
import torch
from engine_kit import WIDTH, Keep, Stack, built, example, step
from random_layers import VOCABULARY, RandomLayer

import ckpt
from ckpt.engine import program
from ckpt.plan import Decision, Rule

SHAPES = [(2, 5, WIDTH), (2, 5, WIDTH), (1, 7, WIDTH), (2, 5, WIDTH)]
"""One recorded, one run by the record, another length, back again."""


def chance(*what) -> float:
    """Return a number in [0, 1) that is a function of its arguments alone."""
    return zlib.crc32(" ".join(map(str, what)).encode()) / 2**32


class RandomPolicy(Keep):
    """Keeps a share of all ops by key, in segments or not, and moves half of it away if it may."""

    def __init__(self, seed: int):
        rng = random.Random(seed)
        self.seed, self.share = seed, rng.choice([0.0, 0.3, 0.7, 1.0])
        kind = rng.choice(["single", "keep", "replay", "offload"])
        super().__init__(size=2 if kind in ("keep", "replay") else None, inner="replay" if kind == "replay" else "keep")
        self.offload = {"target": "host"} if kind == "offload" else None

    def rule(self, index, num_layers):
        rule = super().rule(index, num_layers)
        away = self.offload is not None and chance(self.seed, "input", index) < 0.5
        return Rule(rule.replay, rule.segment, rule.inner, offload_input=away)

    def decide(self, index, op):
        value = chance(self.seed, index, op.key)
        if value >= self.share:
            return Decision.RECOMPUTE
        return Decision.OFFLOAD if self.offload is not None and value < self.share / 2 else Decision.KEEP


def any_split(seed: int):
    """Return a way of replaying a layer in parts. Any is right; the engine's own chooses those that cost nothing."""

    def split(record, analysis, dropped):
        rng = random.Random(f"{seed} {len(record.ops)} {dropped}")
        parts: list[set[int]] = [set() for _ in range(rng.randrange(1, 4))]
        for n in dropped:
            rng.choice(parts).add(n)
        return [frozenset(part) for part in parts]

    return split


def plain_steps(make):
    """Return the plain model's steps, or None where torch itself refuses the program or its numbers overflow."""
    model = built(make)
    try:
        steps = [step(model, example(*shape, seed=n), seed=n) for n, shape in enumerate(SHAPES)]
    except RuntimeError:
        return None
    values = [t for s in steps for t in s.tensors.values() if t is not None]
    return steps if all(torch.isfinite(t).all() for t in values) else None


def check(seed: int, kind: str, monkeypatch) -> bool:
    make = lambda: Stack(*[RandomLayer(seed * 3 + k, kind) for k in range(3)])  # noqa: E731
    expected = plain_steps(make)
    if expected is None:
        return False
    for trial in range(2):
        policy = RandomPolicy(seed * 10 + trial)
        with monkeypatch.context() as patch:
            if chance(seed, trial) < 0.7:
                patch.setattr(program, "split_stages", any_split(seed))
            model = built(make)
            ckpt.apply(model, policy)
            for n, shape in enumerate(SHAPES):
                wrong = step(model, example(*shape, seed=n), seed=n).differences(expected[n])
                where = f"seed {seed}, {kind}, policy {policy.seed}, step {n}"
                assert not wrong, f"{where}: {wrong}\n" + "\n".join(str(layer.program) for layer in model.layers)
    return True


@pytest.mark.parametrize("kind", VOCABULARY)
def test_random_layers_are_exact_under_random_policies(kind, monkeypatch):
    done = sum(itertools.islice((1 for seed in itertools.count() if check(seed, kind, monkeypatch)), 18))
    assert done == 18


@pytest.mark.slow
@pytest.mark.parametrize("kind", VOCABULARY)
@pytest.mark.parametrize("part", range(8))
def test_many_random_layers_are_exact_under_random_policies(kind, part, monkeypatch):
    assert sum(check(seed, kind, monkeypatch) for seed in range(1000 + part * 100, 1100 + part * 100)) > 30
