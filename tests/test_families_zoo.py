"""The zoo builds every installed architecture, and the comparison that stands on it sees what it should."""

import dataclasses

import exactness
import pytest
import snapshots
import torch
import zoo
from torch.utils.checkpoint import checkpoint
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def test_every_installed_architecture_is_built_or_known_unbuildable():
    failed = {}
    for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            model = zoo.build(name, dropout=0.1)
            assert model.training and all(p.dtype is torch.float32 for p in model.parameters())
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:200]
    unknown = {name: why for name, why in failed.items() if name not in zoo.KNOWN_UNBUILDABLE}
    assert not unknown, f"new architectures need a line in tests/zoo/overrides.py: {unknown}"
    assert set(failed) == set(zoo.KNOWN_UNBUILDABLE), "architectures listed as unbuildable are built now"


def test_representative_families_are_architectures_of_the_installed_library():
    assert set(zoo.REPRESENTATIVE) <= set(zoo.names())
    assert len(zoo.REPRESENTATIVE) >= 30


def test_a_model_is_a_function_of_its_name_and_seed():
    state = torch.get_rng_state()
    first, same, other = zoo.build("gemma2"), zoo.build("gemma2"), zoo.build("gemma2", seed=1)
    assert torch.equal(state, torch.get_rng_state())
    assert not snapshots.weight_differences(snapshots.weights(first), snapshots.weights(same))
    changed = snapshots.weight_differences(snapshots.weights(first), snapshots.weights(other))
    assert set(changed) == set(dict(first.named_parameters(remove_duplicate=False)))


def test_no_parameter_is_left_constant():
    for name in ("llama", "gpt2", "mamba2", "gemma3n_text"):
        constant = [key for key, p in zoo.build(name).named_parameters() if p.numel() > 1 and p.unique().numel() == 1]
        assert not constant, (name, constant)


@dataclasses.dataclass
class Handle:
    """A strategy that is wrong in one way."""

    undo: object


def _replay_without_random_state(model):
    model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    return Handle(model.activation_checkpointing_disable)


def _problems(attach, name="llama", dropout=0.0):
    model = zoo.build(name, dropout=dropout)
    plain = exactness.baseline(model, [zoo.batch(model, 16), zoo.batch(model, 12, seed=1)])
    assert plain.repeatable
    return exactness.compare(model, plain, attach).problems()


def test_the_comparison_is_silent_about_a_strategy_that_does_nothing():
    assert not _problems(lambda model: Handle(lambda: None), dropout=0.1)


@pytest.mark.parametrize("name", ["llama", "bart", "qwen3_next", "mixtral"])
def test_the_comparison_sees_a_replay_that_draws_other_masks(name):
    found = "\n".join(_problems(_replay_without_random_state, name, dropout=0.1))
    assert "step 1" in found and "gradients differ" in found and "random state" in found


def test_the_comparison_sees_one_wrong_gradient_and_names_it():
    def attach(model):
        hook = model.model.layers[1].mlp.up_proj.weight.register_hook(lambda grad: grad * (1 + 1e-6))
        return Handle(hook.remove)

    first, second = _problems(attach)
    assert "1 of 39 gradients differ" in first and "layers.1.mlp.up_proj.weight" in first


def test_the_comparison_sees_a_missing_gradient():
    def attach(model):
        weight = model.model.norm.weight.requires_grad_(False)
        return Handle(lambda: weight.requires_grad_(True))

    assert "model.norm.weight inf" in _problems(attach)[0]


def test_the_comparison_sees_a_changed_weight():
    def attach(model):
        with torch.no_grad():
            model.lm_head.weight[0, 0] += 1e-3
        return Handle(lambda: None)

    assert any(line == "state dict changed: lm_head.weight" for line in _problems(attach))


def test_the_comparison_sees_what_an_undo_forgets():
    def attach(model):
        layer = model.model.layers[0]
        forward = layer.forward
        layer.forward = lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)
        model.config.use_cache = False
        model.model.embed_tokens.register_forward_hook(lambda *_: None)
        return Handle(lambda: None)

    found = "\n".join(_problems(attach))
    assert "left behind: model.layers.0.forward" in found
    assert "changed: model.embed_tokens._forward_hooks" in found
    assert "changed: .config.use_cache: True -> False" in found
    assert "gradients differ" not in found


def test_the_comparison_sees_a_patched_class_and_a_patched_function(monkeypatch):
    model = zoo.build("llama")
    before = snapshots.take(model)
    cls = type(model.model.layers[0])
    monkeypatch.setattr(cls, "forward", lambda self: None)
    monkeypatch.setattr(torch.nn.functional, "silu", lambda x: x)
    found = "\n".join(snapshots.differences(before, snapshots.take(model)))
    assert "LlamaDecoderLayer.forward" in found and "module torch.nn.functional.silu" in found
