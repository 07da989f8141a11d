"""Layers are run once for many only where they really do the same: figures are those of the whole model."""

from types import MethodType

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import ckpt
from ckpt.layers import find_layers
from ckpt.plan import LayerPlan, Plan
from ckpt.reduce import structure_keys
from ckpt.simulate import Simulator
from ckpt.strategies import KeepPolicy, LayerPolicy

NUM_LAYERS, MIDDLE = 7, 4
SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2, "num_key_value_heads": 1,
}  # fmt: skip
WORK = ckpt.Workload(seq_len=32, dtype="fp32", loss="full")


def model_of() -> nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**SHAPE))


def share_modules(layers):
    for layer in layers[1:]:
        layer.mlp = layers[0].mlp


def share_weights(layers):
    for layer in layers[::2]:
        layer.mlp.up_proj.weight = layers[MIDDLE].mlp.up_proj.weight


def hook_one(layers):
    layers[MIDDLE].mlp.register_forward_hook(lambda module, args, output: output.exp().log())


def hook_all_with_numbers(layers):
    for i, layer in enumerate(layers):
        layer.mlp.register_forward_hook(lambda module, args, output, i=i: output.exp().log() if i == MIDDLE else None)


def give_one_a_forward(layers):
    mlp = layers[MIDDLE].mlp
    mlp.forward = MethodType(lambda self, x: type(self).forward(self, x).exp().log(), mlp)


def give_one_another_setting(layers):
    class Cut(nn.Module):
        def __init__(self, parts):
            super().__init__()
            self.parts = parts

        def forward(self, x):
            return x * torch.cat(x.split(self.parts, dim=-1), dim=-1).exp()

    for i, layer in enumerate(layers):
        layer.mlp.act_fn = Cut([16] * 4 if i == MIDDLE else [64])


CHANGES = [share_modules, share_weights, hook_one, hook_all_with_numbers, give_one_a_forward, give_one_another_setting]


@pytest.mark.parametrize("change", CHANGES)
def test_layers_that_differ_in_anything_are_run_apart(change):
    model = model_of()
    change(model.model.layers)
    keys = structure_keys(find_layers(model), model.config)
    assert keys[MIDDLE] not in keys[:MIDDLE] + keys[MIDDLE + 1 :]


class OnlyTheMiddle(KeepPolicy):
    """A user's policy that makes a difference between layers in `decide`, where it cannot be foreseen."""

    def decide(self, index, op):
        return super().decide(index, op) if index == MIDDLE else ckpt.Decision.RECOMPUTE


class Own(LayerPolicy):
    def decide(self, index, op):
        return ckpt.Decision.KEEP if index == MIDDLE and op.flops else ckpt.Decision.RECOMPUTE


def figures(model: nn.Module, strategy, reduce: bool) -> tuple[tuple, int]:
    ran = Simulator(model, WORK, reduce=reduce).run(strategy)
    return (ran.peak_bytes, ran.steady.flops(), ran.steady.flops(replayed_only=True)), ran.num_layers_run


def plain(layers):
    for layer in layers:  # hooks that one line made for every layer are the same
        layer.register_forward_hook(lambda module, args, output: None)


@pytest.mark.parametrize(
    ("change", "strategy", "is_reduced"),
    [
        (share_modules, "full", False),
        (plain, OnlyTheMiddle(ckpt.Selective("attention+matmul")), False),
        (plain, Own(ckpt.Full()), False),
        (plain, "offload", True),
    ],
    ids=["shared tensors", "derived from KeepPolicy", "derived from LayerPolicy", "equal layers"],
)
def test_figures_are_those_of_all_layers_run(change, strategy, is_reduced):
    model = model_of()
    change(model.model.layers)
    (reduced, num_layers_run), (whole, _) = (figures(model, strategy, reduce) for reduce in (True, False))
    assert reduced == whole and (num_layers_run < NUM_LAYERS) == is_reduced


def test_a_plan_brings_its_loss_and_tiles_where_equal_layers_are_run_once():
    plan = Plan([LayerPlan() for _ in range(NUM_LAYERS)], loss="chunked", tile_mlp=4)
    (reduced, num_layers_run), (whole, _) = (figures(model_of(), plan, reduce) for reduce in (True, False))
    assert reduced == whole and num_layers_run < NUM_LAYERS
    assert reduced != figures(model_of(), Plan([LayerPlan() for _ in range(NUM_LAYERS)]), True)[0]
