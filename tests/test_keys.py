"""The key of an op names one place in a layer, whatever changes around it: length, adapters, autocast, kernels."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
import zoo
from engine_kit import MLP, Layer, Stack, assert_exact, built, example, keep_ops, step
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ckpt
from ckpt.engine.keys import ATTENTION, OpKey, canonical_op, canonical_path

words = st.text(alphabet="abcdefghijklmnopqrstuvwxyz_0123456789", min_size=1, max_size=8)


@given(st.lists(words, max_size=4).map(".".join), words, st.integers(0, 999))
def test_a_key_is_read_back_from_its_text(path, op, nth):
    key = OpKey(path, op, nth)
    assert OpKey.parse(str(key)) == key


MALFORMED = ["", "mm", "mlp/mm", "mlp/mm#", "mlp/mm#x", "mlp/mm#-1", "a/b/mm#0", "mlp/mm#0 ", "mlp#0/mm"]


@pytest.mark.parametrize("text", MALFORMED)
def test_malformed_keys_are_refused_with_an_example(text):
    with pytest.raises(ValueError, match=re.escape("expected 'module.path/op#n', e.g. 'self_attn.q_proj/mm#0'")):
        OpKey.parse(text)


@pytest.mark.parametrize(
    "name",
    [
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    ],
)
def test_every_fused_attention_of_torch_is_called_attention(name):
    op = getattr(torch.ops.aten, name, None)
    if op is None:
        pytest.skip("this torch has no such op")
    assert canonical_op(getattr(op, op.overloads()[0])) == ATTENTION


def test_hub_kernels_are_recognised_by_their_pattern():
    """Namespaces of kernels from the hub carry a hash."""

    class Named:
        def __init__(self, name):
            self._schema = type("Schema", (), {"name": name})

    for name in ("_flash_attn2_cuda_f12afc9::varlen_fwd", "flash_attn::_flash_attn_forward", "_flash_attn3_589cb::fwd"):
        assert canonical_op(Named(name)) == ATTENTION
    for name in ("flash_attn::_flash_attn_backward", "_flash_attn2_cuda_f12afc9::bwd", "other::fwd"):
        assert canonical_op(Named(name)) != ATTENTION
    assert canonical_op(Named("other::fwd")) == "other.fwd"
    assert canonical_op(Named("aten::mm")) == "mm"


def test_adapters_do_not_move_a_module():
    assert canonical_path("self_attn.q_proj.base_layer") == "self_attn.q_proj"
    assert canonical_path("self_attn.q_proj.lora_A.default") == "self_attn.q_proj.lora_A.default"
    assert canonical_path("") == ""


def test_the_same_op_is_numbered_within_each_module_call():
    class Layered(Layer):
        def forward(self, x):
            h = self.a(x).sin() + self.b(x).sin()
            return self.a(h).sin()

    model = built(lambda: Stack(Layered()))
    handle = ckpt.apply(model, "full")
    step(model, example())
    keys = [str(op.key) for op in handle.regions[0].latest.record.ops if op.key.op in ("mm", "sin")]
    # `a` is called twice: both calls number from 0, as a decision on a module's op holds for each of its calls
    assert keys == ["a/mm#0", "/sin#0", "b/mm#0", "/sin#1", "a/mm#0", "/sin#2"]


def test_calls_of_one_op_are_kept_apart():
    """Keeping by op name alone could not tell the first sine from the third."""

    class Sines(Layer):
        def forward(self, x):
            return self.b((self.a(x).sin() * 2).sin().sin())

    for nth in range(3):
        policy = ckpt.Selective(keep=f"/sin#{nth}")
        handle = assert_exact(lambda: Stack(Sines(), Sines()), policy)
        assert [layer.ops_kept for layer in handle.audit().layers] == [1, 1]


def test_parameter_casts_do_not_shift_numbers():
    """Autocast casts a weight at its first use only, so the casts are left out of the numbering."""
    model = built(lambda: Stack(MLP(bias=True)))
    seen = []
    for enabled in (False, True):
        handle = ckpt.apply(model, "full")
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model(example().requires_grad_()).float().sum().backward()
        seen.append({key for key in handle.regions[0].keys_seen if key.op != "_to_copy"})
        handle.undo()
    assert seen[0] == seen[1]


FAMILIES = ["llama", "qwen3", "gemma2", "gpt2", "phi3", "mixtral", "falcon", "deepseek_v3"]


def keys_with_outputs(model, inputs, autocast=False) -> list[set[OpKey]]:
    """Return, by layer, the keys that a decision can be attached to: ops that make something."""
    handle = ckpt.apply(model, "full")
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(**inputs).loss.backward()
    found = [{op.key for op in region.latest.record.ops if op.makes} for region in handle.regions]
    handle.undo()
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_survive_another_length(name):
    model = zoo.build(name, dropout=0.1, layers=2)
    assert keys_with_outputs(model, zoo.batch(model, 16)) == keys_with_outputs(model, zoo.batch(model, 23))


@pytest.mark.parametrize("name", FAMILIES)
def test_keys_of_what_is_worth_keeping_survive_autocast(name):
    model = zoo.build(name, dropout=0.1, layers=2)
    inputs = zoo.batch(model, 16)
    without, within = keys_with_outputs(model, inputs), keys_with_outputs(model, inputs, autocast=True)
    for plain, cast in zip(without, within, strict=True):
        assert plain <= cast | {key for key in plain if key.op in ("_to_copy", "clone")}
        assert {key.op for key in cast - plain} <= {"_to_copy", "clone"}


def test_keys_survive_adapters():
    peft = pytest.importorskip("peft")
    plain = zoo.build("llama", layers=2)
    inputs = zoo.batch(plain, 16)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], lora_dropout=0.1)
    adapted = peft.get_peft_model(zoo.build("llama", layers=2), config).train()
    for before, after in zip(keys_with_outputs(plain, inputs), keys_with_outputs(adapted, inputs), strict=True):
        assert before <= after
        assert all("q_proj" in key.path or "down_proj" in key.path for key in after - before)


def test_keys_survive_frozen_weights_and_checkpointed_neighbours():
    model = zoo.build("llama", layers=2)
    inputs = zoo.batch(model, 16)
    before = keys_with_outputs(model, inputs)
    model.model.layers[0].requires_grad_(False)
    assert keys_with_outputs(model, inputs) == before


def test_plain_layers_have_keys_too():
    """ctrl's layers are no GradientCheckpointingLayer."""
    model = zoo.build("ctrl", layers=2)
    for keys in keys_with_outputs(model, zoo.batch(model, 16)):
        assert OpKey("multi_head_attention.Wq", "addmm", 0) in keys


def test_the_key_of_a_module_reached_under_two_names_is_its_first_name():
    class Twice(Layer):
        def __init__(self):
            super().__init__()
            self.again = self.a

        def forward(self, x):
            return self.again(F.gelu(self.a(x)))

    model = built(lambda: Stack(Twice()))
    handle = ckpt.apply(model, keep_ops("mm"))
    step(model, example())
    assert {str(k) for k in handle.regions[0].keys_seen if k.op == "mm"} == {"a/mm#0"}


def test_modules_that_are_not_called_by_call_attribute_their_ops_to_the_layer():
    class Direct(nn.Module):
        def forward(self, x):
            return x.sin()

    class CallsForward(Layer):
        def __init__(self):
            super().__init__()
            self.direct = Direct()

        def forward(self, x):
            return self.direct.forward(self.a(x))

    handle = assert_exact(lambda: Stack(CallsForward()), "full")
    assert OpKey("", "sin", 0) in handle.regions[0].keys_seen
