"""Promises 2 and 3: a strategy that is not in force is an error; one that is cannot be seen but by what it saves."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import types

import exactness
import pytest
import snapshots
import torch
import transformers.models.jamba.modeling_jamba as jamba
import transformers.models.llama.modeling_llama as llama
import zoo
from engine_kit import MLP, Layer, Stack, all_strategies, built, example, keep_ops, step
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

import ckpt

STRATEGIES = all_strategies()


def runs(model, inputs) -> list[int]:
    """Return how often each layer runs in one step, seen by hooks of the test's own on a submodule."""
    counts = [0] * len(model.model.layers)
    hooks = []
    for index, layer in enumerate(model.model.layers):

        def count(module, args, index=index):
            counts[index] += 1

        hooks.append(layer.input_layernorm.register_forward_pre_hook(count))
    model(**inputs).loss.backward()
    model.zero_grad()
    for hook in hooks:
        hook.remove()
    return counts


@pytest.fixture
def model():
    return zoo.build("llama", dropout=0.1)


@pytest.fixture
def inputs(model):
    return zoo.batch(model, 12)


# ---- proved ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "strategy, expected",
    [
        (ckpt.KeepAll(), [1, 1, 1, 1]),
        (ckpt.Full(), [2, 2, 2, 2]),
        (ckpt.EveryN(1), [2, 2, 2, 2]),
        (ckpt.EveryN(2), [2, 1, 2, 1]),
        (ckpt.EveryN(3), [2, 1, 1, 2]),
        (ckpt.EveryN(9), [2, 1, 1, 1]),
        (ckpt.Segments(size=2), [2, 2, 2, 2]),
        (ckpt.Segments(size=2, inner="replay"), [3, 2, 3, 2]),
        (ckpt.Selective("matmul"), [2, 2, 2, 2]),
        (ckpt.Offload(), [2, 2, 2, 2]),
    ],
    ids=repr,
)
def test_layers_run_as_often_as_the_strategy_says(model, inputs, strategy, expected):
    handle = ckpt.apply(model, strategy)
    for _ in range(2):
        assert runs(model, inputs) == expected
    audited = {layer.index: layer.replays for layer in handle.audit().layers}
    assert [1 + audited.get(index, 0) // 2 for index in range(4)] == expected
    handle.undo()
    assert runs(model, inputs) == [1, 1, 1, 1]


def test_every_n_counts_the_language_layers_alone():
    """A vision tower in front does not shift the numbers (transformers counts all its layers in one)."""
    model = zoo.build("gemma3")
    handle = ckpt.apply(model, ckpt.EveryN(2))
    names = [region.name for region in handle.regions]
    assert len(names) == 2 and all("language_model" in name for name in names)
    assert [region.index for region in handle.regions] == [0, 2]


@pytest.mark.parametrize("n", [0, -1, 2.5, True, "2", None])
def test_every_n_takes_whole_numbers_from_one(n):
    with pytest.raises(ValueError, match=r"every_n: n=.* must be a whole number, 1 or more"):
        ckpt.EveryN(n)


@pytest.mark.parametrize("keep", ["flash_attn", "attention+no_such_op", "mlp.nothing/mm#*"])
def test_a_keep_list_that_matches_no_op_is_an_error_in_the_first_forward(model, inputs, keep):
    ckpt.apply(model, ckpt.Selective(keep))
    with pytest.raises(ValueError, match="matched no op of this model"):
        model(**inputs)


def test_groups_that_match_nothing_are_an_error():
    model = zoo.build("mamba2", layers=2)
    ckpt.apply(model, "selective")
    with pytest.raises(ValueError, match="keep='attention' matched no op of this model, so everything would be"):
        model(**zoo.batch(model, 8))


def test_a_complaint_takes_the_strategy_back_each_time(model, inputs):
    for _ in range(2):
        handle = ckpt.apply(model, ckpt.Selective("no_such_op"))
        with pytest.raises(ValueError, match="matched no op"):
            model(**inputs)
        assert ckpt.applied_to(model) is None
    handle.undo()
    model(**inputs).loss.backward()


def test_a_model_without_layers_is_an_error():
    with pytest.raises(ValueError, match="Linear has no decoder layers to be checkpointed"):
        ckpt.apply(nn.Linear(2, 2), "full")


def test_reformer_is_refused_by_name():
    with pytest.raises(ValueError, match="reformer cannot be checkpointed by layers: its layers are reversible"):
        ckpt.apply(zoo.build("reformer"), "full")


@pytest.mark.parametrize(
    "strategy, message",
    [
        ("most", "strategy 'most' is unknown; there are none, full, every_n"),
        (ckpt.Full, r"strategy is the class Full; make an object of it: Full\(\)"),
        (3, "strategy must be a strategy, its name, a Policy or a Plan, not int"),
        (None, "not NoneType"),
    ],
)
def test_what_is_no_strategy_is_refused(model, strategy, message):
    with pytest.raises(ValueError, match=message):
        ckpt.apply(model, strategy)


class Mine:
    """A policy of a user's own, right but for what a test changes."""

    name, offload = "mine", None

    def __init__(self, rule=None, answer=None, offload=None):
        self._rule, self._answer, self.offload = rule or ckpt.Rule(True), answer, offload

    def rule(self, index, num_layers):
        return None if self._rule == "none" else self._rule

    def decide(self, index, op):
        return self._answer

    def complaint(self, seen, matched, dynamic):
        return None


@pytest.mark.parametrize("policy, message", [
    (Mine(rule="none"), r"rule\(\) of layer 0 returned None; it is a ckpt\.Rule"),
    (Mine(rule="full"), "returned 'full'"),
    (Mine(rule=ckpt.Rule(True, 0, "other")), "inner keep or replay"),
    (Mine(offload={}), "offload is {}; it is a table"),
    (Mine(offload="host"), "offload is 'host'"),
    (Mine(answer="other"), r"layer 0 .*decide\(\) on \S+ returned 'other'; it is keep, recompute, offload or None"),
    (Mine(answer=True), "returned True"),
    (Mine(answer="offload"), "names no target"),
])  # fmt: skip
def test_a_users_policy_that_answers_nonsense_is_refused_by_name(model, inputs, policy, message):
    with pytest.raises(ValueError, match=message):
        ckpt.apply(model, policy)
        model(**inputs)


def test_a_users_policy_may_name_its_decisions(model, inputs):
    kept = {}
    for answer in ("keep", ckpt.Decision.KEEP, "recompute", None):
        handle = ckpt.apply(model, Mine(answer=answer))
        model(**inputs).loss.backward()
        kept[answer] = [layer.ops_kept for layer in handle.audit().layers]
        handle.undo()
    assert kept["keep"] == kept[ckpt.Decision.KEEP] and min(kept["keep"]) > 0
    assert kept["recompute"] == kept[None] == [0] * len(kept[None])


def test_settings_of_another_strategy_are_refused():
    with pytest.raises(ValueError, match="strategy full has no setting 'n'; it has none"):
        ckpt.strategies.make("full", n=3)
    with pytest.raises(ValueError, match="strategy segments has no setting 'n'; it has size, inner"):
        ckpt.strategies.make("segments", n=3)
    assert ckpt.strategies.make("every_n", n=3) == ckpt.EveryN(3)


def test_a_second_strategy_is_refused_until_the_first_is_undone(model, inputs):
    for name in ("none", "full"):
        handle = ckpt.apply(model, name)
        with pytest.raises(ValueError, match=r"a strategy is in force on this model already; call handle\.undo\(\)"):
            ckpt.apply(model, "full")
        handle.undo()
    ckpt.apply(model, "full")
    with pytest.raises(ValueError, match="a strategy is in force on the model that this is a part of"):
        ckpt.apply(model.model, "full")


def test_a_failed_apply_leaves_nothing_behind(model):
    before = snapshots.take(model)
    for bad in ({"loss": "fast"}, {"tile_mlp": 0}, {"dynamic": ("nothing",)}):
        with pytest.raises(ValueError):
            ckpt.apply(model, "full", **bad)
        assert snapshots.differences(before, snapshots.take(model)) == []
        assert ckpt.applied_to(model) is None


# ---- the seam ----------------------------------------------------------------------------------------------------


def written_by_hand(self, hidden_states, attention_mask=None, position_ids=None, position_embeddings=None, **kwargs):
    """A decoder layer's forward as kernel patches write it."""
    residual = hidden_states
    hidden_states = self.input_layernorm(hidden_states)
    kwargs.pop("cache", None)
    hidden_states, _ = self.self_attn(
        hidden_states=hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings, **kwargs
    )
    hidden_states = residual + hidden_states
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def test_a_class_whose_forward_was_replaced_is_refused_by_name(model, inputs, monkeypatch):
    handle = ckpt.apply(model, "full")  # in force before the patch
    monkeypatch.setattr(llama.LlamaDecoderLayer, "forward", written_by_hand)
    with pytest.raises(ValueError, match=r"LlamaDecoderLayer\.forward was replaced \(test_patching\.written_by_hand\)"):
        model(**inputs)
    handle.undo()
    with pytest.raises(ValueError, match=r"LlamaDecoderLayer\.forward was replaced .* nothing would be recomputed"):
        ckpt.apply(model, "full")


def test_a_class_whose_forward_was_wrapped_is_refused_by_name(model, monkeypatch):
    original = llama.LlamaDecoderLayer.forward

    def wrapped(self, *args, **kwargs):
        return original(self, *args, **kwargs)

    monkeypatch.setattr(llama.LlamaDecoderLayer, "forward", wrapped)
    with pytest.raises(ValueError, match=r"LlamaDecoderLayer\.forward was replaced"):
        ckpt.apply(model, "full")


def test_one_kind_of_layer_that_lost_the_seam_is_enough(monkeypatch):
    """Half of Jamba's layers would be checkpointed, and a count over all would look healthy."""
    model = zoo.build("jamba")
    ckpt.apply(model, "full")
    kind, unwrapped = jamba.JambaAttentionDecoderLayer, jamba.JambaAttentionDecoderLayer.forward.__wrapped__
    monkeypatch.setattr(kind, "forward", lambda self, *args, **kwargs: unwrapped(self, *args, **kwargs))
    with pytest.raises(ValueError, match=r"JambaAttentionDecoderLayer\.forward was replaced"):
        model(**zoo.batch(model, 8))


def test_a_subclass_put_in_place_of_the_class_is_checkpointed(model, inputs):
    class Mine(llama.LlamaDecoderLayer):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    for when in ("before", "after"):
        if when == "after":
            handle = ckpt.apply(model, "full")
        for layer in model.model.layers:
            layer.__class__ = Mine
        if when == "before":
            handle = ckpt.apply(model, "full")
        assert runs(model, inputs) == [2, 2, 2, 2], when
        handle.undo()
        for layer in model.model.layers:
            layer.__class__ = llama.LlamaDecoderLayer


def wrap(layer):
    """Patch an instance as accelerate does: its `forward` calls the one that was there."""
    inner = layer.forward
    layer.forward = lambda *args, **kwargs: inner(*args, **kwargs)


@pytest.mark.parametrize("when", ["before", "after"])
def test_instance_patches_that_call_the_forward_they_replace_are_fine(model, inputs, when):
    plain = exactness.run_step(model, inputs)
    if when == "before":
        for layer in model.model.layers:
            wrap(layer)
    handle = ckpt.apply(model, "full")
    if when == "after":
        for layer in model.model.layers:
            wrap(layer)
    assert runs(model, inputs) == [2, 2, 2, 2]
    patched = exactness.run_step(model, inputs)
    assert all(torch.equal(patched.gradients[name], g) for name, g in plain.gradients.items())
    handle.undo()
    assert runs(model, inputs) == [1, 1, 1, 1]


def test_one_instance_that_bypasses_the_seam_is_refused_by_name(model, inputs):
    ckpt.apply(model, "full")
    layer = model.model.layers[1]
    layer.forward = types.MethodType(written_by_hand, layer)
    with pytest.raises(RuntimeError, match=r"layer 1 \(model\.layers\.1, LlamaDecoderLayer\) ran without being"):
        model(**inputs)
    del layer.__dict__["forward"]
    assert runs(model, inputs) == [2, 2, 2, 2]


def test_instances_that_all_bypass_the_seam_are_refused(model, inputs):
    for layer in model.model.layers:
        layer.forward = types.MethodType(written_by_hand, layer)
    ckpt.apply(model, "full")
    with pytest.raises(RuntimeError, match="no layer was checkpointed in this forward"):
        model(**inputs)


def test_layers_that_are_skipped_on_purpose_are_no_error():
    """Layer dropping may leave out any layer, even all of them but one."""
    model = zoo.build("opt", layer_drop=0.7)
    ckpt.apply(model, "full")
    inputs = zoo.batch(model, 8)
    for seed in range(6):
        torch.manual_seed(seed)
        try:
            model(**inputs).loss.backward()
        except RuntimeError as error:  # every layer left out: nothing was checkpointed, and that is what is said
            assert "no layer was checkpointed" in str(error)


def test_accelerates_hooks_go_together_with_a_strategy_in_either_order(model, inputs):
    hooks = pytest.importorskip("accelerate.hooks")
    plain = exactness.run_step(model, inputs)
    for when in ("before", "after"):
        handle = ckpt.apply(model, "full") if when == "after" else None
        for layer in model.model.layers:
            hooks.add_hook_to_module(layer, hooks.AlignDevicesHook(execution_device="cpu", io_same_device=True))
        handle = handle or ckpt.apply(model, "full")
        assert runs(model, inputs) == [2, 2, 2, 2]
        patched = exactness.run_step(model, inputs)
        assert all(torch.equal(patched.gradients[name], g) for name, g in plain.gradients.items())
        handle.undo()
        for layer in model.model.layers:
            hooks.remove_hook_from_module(layer)
        assert runs(model, inputs) == [1, 1, 1, 1]


# ---- Transformers' own checkpointing -----------------------------------------------------------------------------


def test_transformers_own_checkpointing_is_refused_before(model):
    model.activation_checkpointing_enable()
    with pytest.raises(ValueError, match=r"Transformers' own activation checkpointing is on\. Call model\.activation"):
        ckpt.apply(model, "full")
    model.activation_checkpointing_disable()
    ckpt.apply(model, "full").undo()


def test_a_reentrant_configuration_is_refused_with_the_rest(model):
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": True})
    with pytest.raises(ValueError, match="Transformers' own activation checkpointing is on"):
        ckpt.apply(model, "full")


@pytest.mark.parametrize(
    ("switch", "message"),
    [
        ("activation_checkpointing_enable", "switched on for LlamaDecoderLayer after .*gradient_checkpointing=False"),
        ("activation_checkpointing_disable", "no layer was checkpointed in this forward: the checkpointing function"),
    ],
)
def test_switching_it_after_a_strategy_is_refused_in_the_next_forward(model, inputs, switch, message):
    """Trainer calls the first when `activation_checkpointing=True`, which replaces our function silently."""
    handle = ckpt.apply(model, "full")
    getattr(model, switch)()
    with pytest.raises(RuntimeError, match=message):
        model(**inputs)
    handle.undo()
    assert runs(model, inputs) == [1, 1, 1, 1]


def test_another_checkpointing_function_is_refused(model):
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=lambda function, *args: function(*args))
    with pytest.raises(ValueError, match="activation checkpointing is on"):
        ckpt.apply(model, "full")


def test_torchs_checkpoint_wrapper_is_refused(model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model.model.layers[2] = checkpoint_wrapper(model.model.layers[2])
    with pytest.raises(ValueError, match=r"model\.layers\.2 is wrapped by torch's checkpoint_wrapper"):
        ckpt.apply(model, "full")


# ---- invisible ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, strategy",
    [("llama", name) for name in STRATEGIES]
    + [(name, s) for name in ("gpt2", "ctrl", "gemma3n_text") for s in ("full", "segments_keep", "keep_mm")],
)
def test_undo_restores_every_attribute(name, strategy):
    model = zoo.build(name, dropout=0.1)
    inputs = zoo.batch(model, 8)
    exactness.run_step(model, inputs)
    before = snapshots.take(model)
    weights = snapshots.weights(model)
    handle = ckpt.apply(model, STRATEGIES[strategy])
    names = [n for n, _ in model.named_parameters()], [n for n, _ in model.named_modules()], list(model.state_dict())
    exactness.run_step(model, inputs)
    handle.undo()
    assert snapshots.differences(before, snapshots.take(model)) == []
    assert snapshots.weight_differences(weights, snapshots.weights(model)) == []
    assert names == ([n for n, _ in model.named_parameters()], [n for n, _ in model.named_modules()], list(weights))
    handle.undo()  # twice does nothing
    assert snapshots.differences(before, snapshots.take(model)) == []


def test_undo_between_forward_and_backward_leaves_that_step_exact(model, inputs):
    plain = exactness.run_step(model, inputs)
    handle = ckpt.apply(model, "full")
    torch.manual_seed(1)
    loss = model(**inputs).loss
    handle.undo()
    loss.backward()
    assert all(torch.equal(p.grad, plain.gradients[name]) for name, p in model.named_parameters())


def test_names_hooks_and_state_dict_are_those_of_the_plain_model(model, inputs, tmp_path):
    before = (list(model.state_dict()), [n for n, _ in model.named_modules()], model.config.to_dict())
    ckpt.apply(model, "selective", dynamic=())
    assert (list(model.state_dict()), [n for n, _ in model.named_modules()], model.config.to_dict()) == before
    assert not model.get_input_embeddings()._forward_hooks
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["use_cache"] is True
    assert not {key for key in saved if "checkpoint" in key or "ckpt" in key}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert ckpt.applied_to(loaded) is None
    assert snapshots.weight_differences(snapshots.weights(model), snapshots.weights(loaded)) == []


@pytest.mark.parametrize("use_cache", [False, True])
def test_a_copys_config_keeps_its_value_of_use_cache(use_cache, tmp_path):
    model = zoo.build("llama", layers=2)
    model.config.use_cache = use_cache
    ckpt.apply(model, "full")
    model(**zoo.batch(model, 8)).loss.backward()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["use_cache"] is use_cache


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3_next", "gemma3n_text", "mixtral", "bloom", "opt"])
def test_generating_in_training_mode_gives_what_eval_gives(name):
    """Stock checkpointing drops gpt2's cache there, so that each token sees the last one alone."""
    model = zoo.build(name)
    tokens = zoo.batch(model, 8)["input_ids"]
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.eval().generate(tokens, **settings)
    handle = ckpt.apply(model.train(), "full")
    assert torch.equal(model.generate(tokens, **settings), expected)
    assert handle.audit().replays == 0
    exactness.run_step(model, zoo.batch(model, 8))
    assert handle.audit().replays == 4
    assert torch.equal(model.generate(tokens, **settings), expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bloom"])
def test_training_with_a_cache_asked_for_is_exact(name):
    """`use_cache` is on by default in most configs."""
    model = zoo.build(name, dropout=0.1)
    inputs = zoo.batch(model, 12)
    plain = exactness.baseline(model, [inputs, inputs])
    for value in (True, None):
        asked = dataclasses.replace(plain, batches=[{**inputs, "use_cache": value}] * 2)
        for strategy in (ckpt.Full(), ckpt.EveryN(2), ckpt.Segments(size=2)):
            comparison = exactness.compare(model, asked, lambda m, s=strategy: ckpt.apply(m, s))
            comparison.raise_if_wrong(f"{value} {strategy}")


def test_a_filled_cache_is_refused_in_training(model, inputs):
    ckpt.apply(model, "full")
    with torch.no_grad():
        cache = model(inputs["input_ids"], use_cache=True).cache
    assert cache.get_seq_length() > 0
    with pytest.raises(ValueError, match="a filled cache was passed in training with activation checkpointing on"):
        model(input_ids=inputs["input_ids"], labels=inputs["labels"], cache=cache)
    empty = DynamicCache(config=model.config)
    model(input_ids=inputs["input_ids"], labels=inputs["labels"], cache=empty).loss.backward()


def test_a_deep_copy_trains_its_own_layers_and_has_its_own_handle(model, inputs):
    handle = ckpt.apply(model, "selective")
    exactness.run_step(model, inputs)
    copied = copy.deepcopy(model)
    own = ckpt.applied_to(copied)
    assert own is not handle and ckpt.applied_to(model) is handle
    assert own.audit().replays == 0
    theirs = {id(m) for m in model.modules()}
    assert all(id(region.layer) not in theirs for region in own.regions)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    plain = zoo.build("llama", dropout=0.1)
    expected = exactness.run_step(plain, inputs)
    for _ in range(2):
        step_of_copy = exactness.run_step(copied, inputs)
        assert all(torch.equal(step_of_copy.gradients[name], g) for name, g in expected.gradients.items())
    assert own.audit().replays == 8 and handle.audit().replays == 4
    own.undo()
    assert ckpt.applied_to(copied) is None and ckpt.applied_to(model) is handle
    assert runs(copied, inputs) == [1, 1, 1, 1] and runs(model, inputs) == [2, 2, 2, 2]


def test_undoing_the_original_leaves_a_copy_in_force(model, inputs):
    handle = ckpt.apply(model, ckpt.Segments(size=2))
    copied = copy.deepcopy(model)
    handle.undo()
    assert runs(model, inputs) == [1, 1, 1, 1] and runs(copied, inputs) == [2, 2, 2, 2]
    copied_again = copy.deepcopy(copied)
    ckpt.applied_to(copied).undo()
    assert runs(copied, inputs) == [1, 1, 1, 1] and runs(copied_again, inputs) == [2, 2, 2, 2]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whole_models_can_be_pickled_in_force(strategy):
    if isinstance(STRATEGIES[strategy], type(keep_ops())):
        pytest.skip("the test's own policy holds a local function")
    model = zoo.build("llama", layers=2)
    inputs = zoo.batch(model, 8)
    ckpt.apply(model, STRATEGIES[strategy])
    expected = exactness.run_step(model, inputs)
    read = pickle.loads(pickle.dumps(model))
    found = exactness.run_step(read, inputs)
    assert all(torch.equal(found.gradients[name], g) for name, g in expected.gradients.items())
    ckpt.applied_to(read).undo()
    assert ckpt.applied_to(read) is None and ckpt.applied_to(model) is not None


def test_models_of_one_config_do_not_share_a_strategy():
    config = zoo.config("llama")
    first, second = AutoModelForCausalLM.from_config(config).train(), AutoModelForCausalLM.from_config(config).train()
    inputs = zoo.batch(first, 8)
    ckpt.apply(first, "full")
    assert first.is_activation_checkpointing and not second.is_activation_checkpointing
    assert runs(first, inputs) == [2, 2, 2, 2] and runs(second, inputs) == [1, 1, 1, 1]
    assert ckpt.applied_to(second) is None
    ckpt.apply(second, ckpt.EveryN(2))
    assert runs(first, inputs) == [2, 2, 2, 2] and runs(second, inputs) == [2, 1, 2, 1]


def test_strategies_can_follow_each_other_in_one_process(model, inputs):
    plain = exactness.baseline(model, [inputs, inputs])
    for _ in range(2):
        for name, strategy in STRATEGIES.items():
            exactness.compare(model, plain, lambda m, s=strategy: ckpt.apply(m, s)).raise_if_wrong(name)


# ---- training and eval mode --------------------------------------------------------------------------------------


def test_gradients_in_eval_mode_are_refused(model, inputs):
    ckpt.apply(model, "full")
    model.eval()
    with pytest.raises(RuntimeError, match="the model is in eval mode with gradients on, where layers would keep all"):
        model(**inputs)
    with torch.no_grad():
        model(**inputs)
    model.train()
    assert runs(model, inputs) == [2, 2, 2, 2]


def test_one_layer_in_eval_mode_is_refused_by_name(model, inputs):
    ckpt.apply(model, "full")
    model.model.layers[1].eval()
    with pytest.raises(RuntimeError, match=r"layer 1 \(model\.layers\.1, LlamaDecoderLayer\) is in eval mode"):
        model(**inputs)


def test_frozen_layers_in_eval_mode_below_all_gradients_are_fine(model, inputs):
    model.requires_grad_(False)
    model.model.layers[2:].requires_grad_(True)
    model.model.layers[:2].eval()
    ckpt.apply(model, "full")
    assert runs(model, inputs) == [1, 1, 2, 2]


def test_frozen_models_in_eval_mode_whose_inputs_need_gradients_are_refused(model, inputs):
    model.requires_grad_(False).eval()
    ckpt.apply(model, "full")
    embeddings = model.get_input_embeddings()(inputs["input_ids"]).requires_grad_()
    with pytest.raises(RuntimeError, match="eval mode with gradients on"):
        model(inputs_embeds=embeddings, labels=inputs["labels"])


def test_models_fresh_from_disk_are_refused_until_they_train(model, inputs, tmp_path):
    """`from_pretrained` returns a model in eval mode, where stock checkpointing silently does nothing."""
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ckpt.apply(loaded, "full")
    with pytest.raises(RuntimeError, match=r"Call model\.train\(\) to train"):
        loaded(**inputs)
    assert runs(loaded.train(), inputs) == [2, 2, 2, 2]


# ---- adapters ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_adapters_are_exact_whichever_was_first(when, dropout):
    peft = pytest.importorskip("peft")
    settings = {"lora_dropout": dropout, "use_dora": dropout == 0.0, "init_lora_weights": False}
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], **settings)

    def adapted(strategy):
        model = zoo.build("llama", layers=3)
        if strategy is not None and when == "before":
            ckpt.apply(model, strategy)
        torch.manual_seed(3)
        wrapped = peft.get_peft_model(model, config).train()
        if strategy is not None and when == "after":
            ckpt.apply(wrapped, strategy)
        return wrapped

    plain = adapted(None)
    inputs = zoo.batch(plain.base_model.model, 12)
    expected = [exactness.run_step(plain, inputs, seed) for seed in range(2)]
    assert any("lora" in name and g is not None and g.abs().sum() > 0 for name, g in expected[0].gradients.items())
    for name, strategy in STRATEGIES.items():
        wrapped = adapted(strategy)
        for seed in range(2):
            found = exactness.run_step(wrapped, inputs, seed).gradients
            for key, gradient in expected[seed].gradients.items():
                assert (found[key] is None and gradient is None) or torch.equal(found[key], gradient), (name, key)
        assert {n for n, _ in wrapped.named_parameters()} == {n for n, _ in plain.named_parameters()}


def test_saved_adapters_have_the_names_of_the_plain_model(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj"])
    wrapped = peft.get_peft_model(zoo.build("llama", layers=2), config)
    plain_keys = set(peft.get_peft_model_state_dict(wrapped))
    ckpt.apply(wrapped, "selective")
    assert set(peft.get_peft_model_state_dict(wrapped)) == plain_keys
    wrapped.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(zoo.build("llama", layers=2), tmp_path)
    assert set(peft.get_peft_model_state_dict(again)) == plain_keys


# ---- layers of a plain class -------------------------------------------------------------------------------------


class PlainLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 8)

    def forward(self, x):
        return self.a(x).sin()


class PlainStack(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(PlainLayer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layers_of_a_plain_class_are_found_and_exact(strategy):
    plain, patched = built(PlainStack), built(PlainStack)
    handle = ckpt.apply(patched, STRATEGIES[strategy])
    for n in range(2):
        assert step(patched, example(seed=n)).differences(step(plain, example(seed=n))) == []
    handle.undo()
    assert all("forward" not in layer.__dict__ for layer in patched.layers)


def test_a_plain_class_replaced_after_a_strategy_is_followed(monkeypatch):
    model = built(PlainStack)
    ckpt.apply(model, "full")
    monkeypatch.setattr(PlainLayer, "forward", lambda self, x: self.a(x).cos())
    plain = built(PlainStack)
    assert step(model, example()).differences(step(plain, example())) == []


def test_the_handle_of_strategy_none_can_be_asked_for_and_undone():
    model = built(lambda: Stack(MLP()))
    handle = ckpt.apply(model, "none")
    assert ckpt.applied_to(model) is handle
    handle.undo()
    assert ckpt.applied_to(model) is None


def test_users_hooks_on_layers_run_once_and_stay():
    calls = []

    class Watched(Layer):
        def forward(self, x):
            return self.b(self.a(x).sin())

    model = built(lambda: Stack(Watched(), Watched()))
    model.layers[0].register_forward_hook(lambda module, args, output: calls.append("layer"))
    handle = ckpt.apply(model, "full")
    step(model, example())
    assert calls == ["layer"]
    handle.undo()
    assert len(model.layers[0]._forward_hooks) == 1 and not model._forward_hooks
