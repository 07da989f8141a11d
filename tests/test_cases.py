"""Faults that users of the stock stack reported, each turned into what must be right here.

The numbers are those of the project's list of such faults: 1 neutrality, 2 random state, 3 no reentrant variant, 4
proof of recompute, 5 patched forwards, 6 training mode, 7 contexts, 8 `use_cache`, 13 keep-lists, 14 every_n, 21 undo.
What other test files show of them (5 and 14 in test_patching, 7 in test_engine_contexts) is not repeated here.
"""

from __future__ import annotations

import copy

import exactness
import pytest
import torch
import zoo
from engine_kit import all_strategies
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt

STRATEGIES = all_strategies()
SOME = ["full", "segments_replay", "keep_mm", "offload_inputs"]


def check(model, batches, strategies=SOME, what=""):
    baseline = exactness.baseline(model, batches)
    assert baseline.repeatable
    for name in strategies:
        comparison = exactness.compare(model, baseline, lambda m, s=STRATEGIES[name]: ckpt.apply(m, s))
        comparison.raise_if_wrong(f"{what} under {name}")


class Count(TorchDispatchMode):
    def __init__(self, *names: str):
        super().__init__()
        self.names, self.count = names, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(name in func._schema.name for name in self.names) and "backward" not in func._schema.name
        return func(*args, **(kwargs or {}))


# ---- 1, 2: jitter, dropout, routing ------------------------------------------------------------------------------


@pytest.mark.parametrize("experts", ["eager", "grouped_mm", "batched_mm"])
def test_1_routing_noise_is_drawn_again_as_it_was(experts):
    """Mixtral's jitter decides which expert sees a token: another draw means other shapes, or other gradients."""
    model = zoo.build("mixtral", dropout=0.1, layers=2)
    model.set_experts_implementation(experts)
    assert exactness.draws_random_numbers(model, zoo.batch(model, 24))
    check(model, [zoo.batch(model, 24, seed=n) for n in range(2)], what=experts)


def test_1_attention_that_needs_the_math_path_is_exact():
    """Dropout in attention sends it there, where scores are T x T and the random op is one of many."""
    model = zoo.build("llama", dropout=0.3, layers=2)
    with Count("_scaled_dot_product_flash") as flash:
        model(**zoo.batch(model, 12))
    assert flash.count == 0
    check(model, [zoo.batch(model, 12, seed=n) for n in range(2)], STRATEGIES)


def test_2_what_is_drawn_after_a_step_does_not_depend_on_the_strategy():
    drawn = []
    for strategy in (None, *STRATEGIES.values()):
        model = zoo.build("gpt2", dropout=0.2, layers=2)
        if strategy is not None:
            ckpt.apply(model, strategy)
        torch.manual_seed(5)
        for seed in range(2):
            model(**zoo.batch(model, 8, seed=seed)).loss.backward()
        drawn.append(torch.rand(4))
    assert all(torch.equal(d, drawn[0]) for d in drawn)


# ---- 3: router losses, shared keys, reentrant --------------------------------------------------------------------


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_3_router_losses_reach_their_routers_once(experts):
    """The auxiliary loss is made of logits that leave the layers sideways; a replay must not add to those gathered."""
    model = zoo.build("mixtral", layers=3)
    model.set_experts_implementation(experts)
    model.router_aux_loss_coef = 1.0
    batches = [
        {**zoo.batch(model, 16, seed=n), "output_router_logits": True, "output_hidden_states": True} for n in range(2)
    ]
    check(model, batches, what=experts)
    for name in SOME:
        handle = ckpt.apply(model, STRATEGIES[name])
        output = model(**batches[0])
        gathered = len(output.router_logits), len(output.hidden_states)
        assert gathered == (3, 4)
        output.loss.backward()
        assert (len(output.router_logits), len(output.hidden_states)) == gathered
        assert output.aux_loss > 0 and all(layer.mlp.gate.weight.grad.abs().sum() > 0 for layer in model.model.layers)
        model.zero_grad()
        handle.undo()


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_3_shared_keys_keep_their_gradients(name, use_cache):
    model = zoo.build(name)
    check(model, [{**zoo.batch(model, 12, seed=n), "use_cache": use_cache} for n in range(2)], what=name)
    handle = ckpt.apply(model, "full")
    model(**{**zoo.batch(model, 12), "use_cache": use_cache}).loss.backward()
    writers = [layer.self_attn.k_proj.weight.grad for layer in model.model.layers[:2]]
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in writers)
    handle.undo()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_3_frozen_models_with_one_trained_weight_get_its_gradient(name):
    """The reentrant variant silently gives none, as no input of the layer needs a gradient."""
    model = zoo.build(name, dropout=0.1)
    model.requires_grad_(False)
    weight = [p for n, p in model.named_parameters() if ".1.mlp" in n and p.dim() == 2][-1]
    weight.requires_grad_(True)
    check(model, [zoo.batch(model, 10, seed=n) for n in range(2)], STRATEGIES, name)
    ckpt.apply(model, "full")
    model(**zoo.batch(model, 10)).loss.backward()
    assert weight.grad.abs().sum() > 0


def test_3_no_hook_is_left_on_the_embeddings():
    """Stock checkpointing makes embeddings require gradients, for the reentrant variant's sake, and leaves the hook."""
    model = zoo.build("llama", layers=2)
    model.requires_grad_(False)
    model.lm_head.weight.requires_grad_(True)
    handle = ckpt.apply(model, "full")
    hidden = model.model(input_ids=zoo.batch(model, 8)["input_ids"], use_cache=False).last_hidden_state
    assert not hidden.requires_grad
    assert not model.get_input_embeddings()._forward_hooks
    handle.undo()
    assert not model.get_input_embeddings()._forward_hooks


# ---- 4, 13: proof of recompute -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "keep, attention, grouped",
    [(None, 2, 2), ("attention", 1, 2), ("moe", 2, 1), ("attention+moe", 1, 1)],
    ids=["full", "attention", "moe", "both"],
)
def test_13_groups_cover_the_kernels_that_this_machine_runs(keep, attention, grouped):
    """The CPU's flash kernel and `_grouped_mm` are on no peer's list. Counted by a mode of the test's own."""
    model = zoo.build("mixtral", layers=2)
    ckpt.apply(model, "full" if keep is None else ckpt.Selective(keep))
    for seed in range(2):
        with Count("_scaled_dot_product") as attentions, Count("_grouped_mm") as experts:
            model(**zoo.batch(model, 12, seed=seed)).loss.backward()
        plain_experts = 2 * 2 * 3  # layers, matmuls; backward runs two more for each
        assert attentions.count == 2 * attention
        # the down projection's output is saved by nobody: a replay ends before it, unless it is fed
        assert experts.count - plain_experts in ({1: {0}, 2: {2, 4}}[grouped])


def test_13_eager_attention_keeps_its_output_not_its_scores():
    model = zoo.build("gemma2", layers=2)
    handle = ckpt.apply(model, "selective")
    model(**zoo.batch(model, 24)).loss.backward()  # more tokens than a head is wide
    for region, layer in zip(handle.regions, handle.audit().layers, strict=True):
        kept = [op for op in region.latest.record.ops if op.index in region.latest.kept_ops]
        assert layer.ops_kept == 1 and kept[0].key.op == "bmm"
        assert kept[0].outputs[0].shape[-1] == model.config.head_dim


def test_13_random_ops_may_stand_in_any_keep_list():
    model = zoo.build("gpt2", dropout=0.2, layers=2)
    baseline = exactness.baseline(model, [zoo.batch(model, 10, seed=n) for n in range(3)])
    for keep in ("empty_like", "empty_like+attention+bernoulli*", "*"):  # the mask lies in an `empty_like`
        exactness.compare(model, baseline, lambda m, k=keep: ckpt.apply(m, ckpt.Selective(k))).raise_if_wrong(keep)


def test_4_the_audit_counts_what_ran_not_what_was_asked():
    model = zoo.build("llama", layers=2)
    handle = ckpt.apply(model, "full")
    assert [(layer.calls, layer.replays) for layer in handle.audit().layers] == [(0, 0), (0, 0)]
    loss = model(**zoo.batch(model, 8)).loss
    assert [(layer.calls, layer.replays) for layer in handle.audit().layers] == [(1, 0), (1, 0)]
    loss.backward()
    assert [(layer.calls, layer.replays) for layer in handle.audit().layers] == [(1, 1), (1, 1)]
    with Count("aten::mm") as matmuls:
        model(**zoo.batch(model, 8)).loss.backward()
    plain = zoo.build("llama", layers=2)
    with Count("aten::mm") as plain_matmuls:
        plain(**zoo.batch(model, 8)).loss.backward()
    assert matmuls.count - plain_matmuls.count == 2 * 6  # all seven of each layer but down_proj, which ends the replay


# ---- 5, 6, 7, 8 --------------------------------------------------------------------------------------------------


def test_6_evaluation_between_training_steps_costs_and_changes_nothing():
    model = zoo.build("llama", dropout=0.1, layers=2)
    inputs = zoo.batch(model, 10)
    plain = exactness.run_step(model, inputs)
    handle = ckpt.apply(model, ckpt.Selective("matmul"))
    for _ in range(2):
        patched = exactness.run_step(model, inputs)
        assert all(torch.equal(patched.gradients[name], g) for name, g in plain.gradients.items())
        replays = handle.audit().replays
        model.eval()
        with torch.no_grad():
            first = model(**inputs).loss
            with torch.inference_mode():
                assert torch.equal(model(**inputs).loss, first)
        model.train()
        assert handle.audit().replays == replays


def test_7_a_replay_in_another_default_device_context_is_the_same():
    model = zoo.build("llama", dropout=0.1, layers=2)
    inputs = zoo.batch(model, 10)
    plain = exactness.run_step(model, inputs)
    ckpt.apply(model, "full")
    torch.manual_seed(1)
    loss = model(**inputs).loss
    with torch.device("meta"):
        loss.backward()
    assert all(torch.equal(p.grad, plain.gradients[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("name", ["llama", "gpt2", "recurrent_gemma", "bloom"])
def test_8_the_cache_is_off_in_training_whatever_the_config_says(name):
    """gpt2 and recurrent_gemma hand the cache to layers by position, where stock checkpointing does not see it."""
    model = zoo.build(name, dropout=0.1)
    model.config.use_cache = True
    inputs = zoo.batch(model, 10)
    del inputs["use_cache"]
    check(model, [inputs, inputs], ["full", "segments_keep", "keep_mm"], name)
    assert model.config.use_cache is True


# ---- 21 ----------------------------------------------------------------------------------------------------------


def test_21_a_copy_taken_before_a_strategy_is_untouched_by_it():
    model = zoo.build("llama", layers=2)
    before = copy.deepcopy(model)
    ckpt.apply(model, "full")
    assert ckpt.applied_to(before) is None
    assert not any("gradient_checkpointing" in layer.__dict__ for layer in before.model.layers)
    assert not before._forward_hooks and not before._forward_pre_hooks


def test_21_strategies_of_a_sweep_do_not_add_up():
    """Stock checkpointing left a hook for each time it was switched on."""
    model = zoo.build("llama", layers=2)
    inputs = zoo.batch(model, 8)
    for _ in range(3):
        for strategy in STRATEGIES.values():
            handle = ckpt.apply(model, strategy)
            model(**inputs).loss.backward()
            handle.undo()
    assert all(not m._forward_hooks and not m._forward_pre_hooks and not m._backward_hooks for m in model.modules())
    assert ckpt.applied_to(model) is None
