"""Probing a model whose weights lie elsewhere: a rank that has none finds the same tiles as the one that has them."""

import copy

import pytest
import torch
import zoo

from ckpt.engine.chain_probe import alone
from ckpt.engine.chains import find_chains
from ckpt.layers import find_layers


def found(model):
    chains = find_chains(model, [layer.module for layer in find_layers(model)])
    return [None if c is None else c.names for c in chains.chains], [n.names for n in chains.norms], chains.reasons


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "phi3", "apertus", "mixtral"])
def test_a_model_without_weights_has_the_tiles_of_the_one_with_weights(name):
    model = zoo.build(name, layers=2)
    hollow = copy.deepcopy(model).to("meta")
    before = {key: id(value) for key, value in (*hollow.named_parameters(), *hollow.named_buffers())}
    assert found(hollow) == found(model)
    assert any(found(model)[0]) or name == "mixtral"
    assert before == {key: id(value) for key, value in (*hollow.named_parameters(), *hollow.named_buffers())}


def test_a_model_with_its_weights_is_probed_as_it_is():
    model = zoo.build("llama", layers=1)
    with alone(model):
        assert all(type(p.data) is torch.Tensor for p in model.parameters())
