"""The ways a model is called in training: masks, caches, extra outputs, frozen parts, contexts, evaluation between."""

import functools

import coverage_checks
import exactness
import pytest
import torch
import zoo
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import ckpt

FAMILIES = ("llama", "gpt2", "gemma3n_text", "mixtral", "qwen3_next", "bart")
STRATEGIES = ("segments_replay", "attention+matmul+moe", "offload_kept")


def call(model, seed=0, length=16, **changes):
    """Run one forward on a batch with some arguments changed (None: left out)."""
    inputs = {**zoo.batch(model, length, seed=seed), **changes}
    return model(**{key: value for key, value in inputs.items() if value is not None})


def mask(left: int = 0, right: int = 0):
    found = torch.ones(2, 16, dtype=torch.long)
    found[0, :left] = 0
    found[0, 16 - right :] = 0
    return found


def two_forwards_before_their_backwards(model):
    first, second = call(model).loss, call(model, seed=1, length=13).loss
    first.backward()
    second.backward()


def forwards_without_backward(model):
    for seed in range(3):
        call(model, seed)
    call(model, seed=3).loss.backward()


def padded_right_then_left_then_not_at_all(model):
    for attention_mask in (mask(right=6), mask(left=5), None):
        call(model, attention_mask=attention_mask).loss.backward()


def with_the_default_cache(model):
    call(model, use_cache=None).loss.backward()


def hidden_states_in_the_loss(model):
    output = call(model, output_hidden_states=True)
    (output.loss + sum(hidden.pow(2).mean() for hidden in output.hidden_states)).backward()


def an_early_hidden_state_alone(model):
    call(model, output_hidden_states=True).hidden_states[2].pow(2).mean().backward()


def attention_probabilities_in_the_loss(model):
    model.set_attn_implementation("eager")
    output = call(model, output_attentions=True)
    (output.loss + sum(a.pow(2).mean() for a in output.attentions if a is not None)).backward()


def under_autocast(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = call(model).loss
    loss.backward()


def under_a_chosen_attention_kernel(model):
    with sdpa_kernel(SDPBackend.MATH):
        loss = call(model).loss
    loss.backward()


def with_most_parameters_frozen(model):
    for position, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(position % 5 == 3)
    call(model).loss.backward()


def with_frozen_embeddings(model):
    model.get_input_embeddings().requires_grad_(False)
    call(model).loss.backward()


def evaluated_between_forward_and_backward(model):
    loss = call(model).loss
    model.eval()
    with torch.no_grad():
        call(model, seed=2, length=9)
    model.train()
    loss.backward()


def backward_twice(model):
    loss = call(model).loss
    loss.backward(retain_graph=True)
    loss.backward()


def some_gradients_only(model):
    chosen = [p for name, p in model.named_parameters() if ".1." in name]
    gradients = torch.autograd.grad(call(model).loss, chosen, allow_unused=True)
    for parameter, gradient in zip(chosen, gradients, strict=True):
        parameter.grad = gradient


USES = [
    two_forwards_before_their_backwards,
    forwards_without_backward,
    padded_right_then_left_then_not_at_all,
    with_the_default_cache,
    hidden_states_in_the_loss,
    an_early_hidden_state_alone,
    attention_probabilities_in_the_loss,
    under_autocast,
    under_a_chosen_attention_kernel,
    with_most_parameters_frozen,
    with_frozen_embeddings,
    evaluated_between_forward_and_backward,
    backward_twice,
    some_gradients_only,
]


def gradients_after(name: str, use, strategy: str | None = None):
    """Return the gradients that a use leaves behind, the random state after it, and how often layers were run again."""
    model = zoo.build(name, dropout=0.1)
    handle = None if strategy is None else coverage_checks.CHECKS[strategy].attach(model)
    torch.manual_seed(1)
    use(model)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return gradients, torch.get_rng_state(), 0 if handle is None else handle.audit().replays


@functools.cache
def plain(name: str, use):
    return gradients_after(name, use)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_use_leaves_the_plain_gradients(name, use, strategy):
    assert_same_gradients(name, use, strategy)


@pytest.mark.parametrize("strategy", ["full", *STRATEGIES])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "dbrx"])
def test_the_routers_auxiliary_loss_keeps_its_gradient(name, strategy):
    def use(model):
        output = call(model, output_router_logits=True)
        assert output.aux_loss.requires_grad
        output.loss.backward()

    assert_same_gradients(name, use, strategy)


@pytest.mark.parametrize("strategy", ["full", *STRATEGIES])
@pytest.mark.parametrize("name", ["opt", "bart", "xglm"])
def test_layers_that_are_dropped_at_random_are_exact(name, strategy):
    model = zoo.build(name, layer_drop=0.5)
    base = exactness.baseline(model, [zoo.batch(model, 12, seed=seed) for seed in range(2)])
    assert all(None in step.gradients.values() for step in base.steps), "no layer was dropped"
    exactness.compare(model, base, coverage_checks.CHECKS[strategy].attach).raise_if_wrong(f"{name} under {strategy}")


def test_a_step_that_drops_every_layer_is_no_error():
    model = zoo.build("opt", layer_drop=1.0)
    base = exactness.baseline(model, [zoo.batch(model, 12)])
    handle = coverage_checks.CHECKS["full"].attach(model)
    step = exactness.run_step(model, base.batches[0])
    assert torch.equal(step.loss, base.steps[0].loss) and handle.audit().replays == 0


@pytest.mark.parametrize("keep", ["attention", "mul", "add+mul"])
@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_shared_keys_and_values_survive_a_second_backward(name, keep):
    """Layers hand keys and values on in a container: a replay must not put what it skipped in their place."""

    def gradients(strategy):
        model = zoo.build(name, dropout=0.1)
        if strategy is not None:
            ckpt.apply(model, strategy)
        torch.manual_seed(1)
        loss = call(model).loss
        loss.backward(retain_graph=True)
        loss.backward()
        return {key: parameter.grad for key, parameter in model.named_parameters()}

    expected, found = gradients(None), gradients(ckpt.Selective(keep=keep))
    assert all(_equal(gradient, expected[key]) for key, gradient in found.items())


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layers_output_written_in_place_by_a_hook_is_exact(name):
    def use(model):
        layers = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == 4][-1]
        for layer in layers[:-1]:
            layer.register_forward_hook(halve)
        call(model).loss.backward()

    def halve(layer, args, output):
        (output[0] if isinstance(output, tuple) else output).mul_(0.5)

    assert_same_gradients(name, use, "attention+matmul+moe")


def assert_same_gradients(name, use, strategy):
    expected, random_state, _ = plain(name, use)
    found, random_state_found, replays = gradients_after(name, use, strategy)
    wrong = [key for key, g in found.items() if not _equal(g, expected[key])]
    assert not wrong, f"{len(wrong)} of {len(found)} gradients differ: {wrong[:5]}"
    assert torch.equal(random_state, random_state_found), "the random state afterwards is another"
    assert replays, "nothing was run again"


def _equal(gradient, expected) -> bool:
    return gradient is expected if gradient is None or expected is None else torch.equal(gradient, expected)
