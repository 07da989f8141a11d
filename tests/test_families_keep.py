"""Any set of kept ops is exact: random keep-lists over op calls, and layers that mix every kind of decision."""

import dataclasses
import functools
import zlib

import exactness
import pytest
import torch
import zoo

import ckpt
from ckpt import Decision, Rule

# test_exact_families.py does the same on eleven families that people train most.
FAMILIES = ("bloom", "cohere2", "dbrx", "doge", "lfm2", "jamba", "zamba2", "rwkv", "bart", "xlnet")


@dataclasses.dataclass(frozen=True)
class Scattered:
    """Decide by a hash of (seed, layer, op key): as scattered as decisions can be, and the same in every process."""

    seed: int
    share: float
    name: str = "scattered"

    def rule(self, index: int, num_layers: int) -> Rule:
        return Rule(replay=True)

    def decide(self, index: int, op) -> Decision:
        draw = zlib.crc32(f"{self.seed} {index} {op.key}".encode()) / 2**32
        return Decision.KEEP if draw < self.share else Decision.RECOMPUTE

    def complaint(self, seen, matched, dynamic) -> None:
        return None


@functools.cache
def plain(name: str, dropout: float):
    torch.set_num_threads(1)
    model = zoo.build(name, dropout=dropout, layers=4 if name == "gemma3n_text" else 2)
    return model, exactness.baseline(model, [zoo.batch(model, 12), zoo.batch(model, 12, seed=1)])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", FAMILIES)
def test_any_set_of_kept_ops_is_exact(name, seed):
    model, base = plain(name, 0.1 if seed % 2 else 0.0)
    policy = Scattered(seed, share=(0.1, 0.3, 0.5, 0.7, 0.9)[seed])
    found = exactness.compare(model, base, lambda m: ckpt.apply(m, policy))
    found.raise_if_wrong(f"{name}, {policy}")
    assert sum(layer.ops_kept for layer in found.audits[-1].layers) > 0


@pytest.mark.parametrize("name", ["llama", "gemma3n_text", "gpt_oss", "qwen3_next"])
def test_keeping_every_op_runs_nothing_dear_again(name):
    model, base = plain(name, 0.0)
    found = exactness.compare(model, base, lambda m: ckpt.apply(m, Scattered(0, share=1.1)))
    found.raise_if_wrong(name)
    assert found.audits[-1].flops_run_again == 0, str(found.audits[-1])
