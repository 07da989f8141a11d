"""The caller's contexts: a replay sees autocast, attention backend, training mode and generators as the forward did.

Backward is called outside of them, as training loops do, or inside others.
"""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from engine_kit import MLP, Layer, Stack, all_strategies, built, example, step
from torch.nn.attention import SDPBackend, sdpa_kernel

import ckpt
from ckpt.engine.frame import Frame

STRATEGIES = all_strategies()
every_strategy = pytest.mark.parametrize("strategy", STRATEGIES)


class Dropout(Layer):
    def forward(self, x):
        h = F.dropout(F.gelu(self.a(x)), 0.3, self.training)
        return x + F.dropout(self.b(h), 0.2, self.training)


class Attention(Layer):
    def forward(self, x):
        q, k = self.a(x).unflatten(-1, (2, -1)).transpose(1, 2), self.b(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return x + F.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2).flatten(-2)


def pair(make, strategy):
    plain, patched = built(make), built(make)
    return plain, patched, ckpt.apply(patched, STRATEGIES[strategy])


def gradients(model) -> list:
    return [p.grad for p in model.parameters()]


def same(results) -> bool:
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(*results, strict=True))


def tied():
    """Weights shared by two layers: under autocast the second finds the first one's cast in the cache."""
    stack = Stack(*[MLP(bias=True) for _ in range(4)])
    stack.layers[2].a = stack.layers[0].a
    stack.layers[3].b = stack.layers[3].a
    return stack


@every_strategy
@pytest.mark.parametrize("make", [lambda: Stack(*[Dropout(bias=True) for _ in range(4)]), tied], ids=["own", "tied"])
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("backward_inside", [False, True])
def test_autocast_is_restored_whatever_its_cache_holds(make, strategy, micro_batches, backward_inside):
    plain, patched, handle = pair(make, strategy)
    for n in range(3):
        results = []
        for model in (plain, patched):
            model.zero_grad()
            torch.manual_seed(n)
            with torch.autocast("cpu", torch.bfloat16):
                loss = sum(model(example(seed=m)).float().sum() for m in range(micro_batches))
                if backward_inside:
                    loss.backward()
            if not backward_inside:
                loss.backward()
            results.append([loss.detach(), *gradients(model)])
        assert same(results), n
    assert not any(layer.dynamic_because for layer in handle.audit().layers)


@every_strategy
def test_autocast_with_a_warm_cache_and_without_one_share_a_record(strategy):
    """Evaluation inside the same autocast block casts the weights first; the next step starts cold."""
    plain, patched, handle = pair(lambda: Stack(*[MLP() for _ in range(4)]), strategy)
    for n, warm in enumerate([True, False, True, False]):
        results = []
        for model in (plain, patched):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                if warm:
                    model(example(seed=9)).float()
                loss = model(example(seed=n)).float().sum()
            loss.backward()
            results.append(gradients(model))
        assert same(results), n
    assert not any(layer.dynamic_because for layer in handle.audit().layers)


@every_strategy
def test_autocast_without_a_cache_and_changes_of_it_are_exact(strategy):
    plain, patched, _ = pair(lambda: Stack(*[MLP() for _ in range(4)]), strategy)
    uncached = {"cache_enabled": False}
    for settings in (uncached, {"enabled": False}, {"dtype": torch.float16}, {}, uncached):
        results = []
        for model in (plain, patched):
            model.zero_grad()
            with torch.autocast("cpu", **{"dtype": torch.bfloat16, **settings}):
                loss = model(example()).float().sum()
            with torch.autocast("cpu", torch.float16):  # another one around backward
                loss.backward()
            results.append(gradients(model))
        assert same(results), settings


@every_strategy
def test_bfloat16_models_are_exact(strategy):
    make = lambda: Stack(*[Dropout(bias=True) for _ in range(4)]).bfloat16()  # noqa: E731
    plain, patched, _ = pair(make, strategy)
    for n in range(3):
        x = example(seed=n).bfloat16()
        assert step(patched, x, seed=n).differences(step(plain, x, seed=n)) == []


@every_strategy
def test_the_replay_uses_the_attention_backend_of_the_forward(strategy):
    """Flash and math give other bits, so gradients tell which one a replay took."""
    plain, patched, _ = pair(lambda: Stack(*[Attention() for _ in range(4)]), strategy)
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        results = []
        for model in (plain, patched):
            model.zero_grad()
            with sdpa_kernel(backend):
                loss = model(example(2, 33, 8)).sin().sum()
            loss.backward()
            results.append(gradients(model))
        assert same(results), backend
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.math_sdp_enabled()


@every_strategy
def test_switching_to_eval_before_backward_changes_nothing(strategy):
    plain, patched, _ = pair(lambda: Stack(*[Dropout() for _ in range(4)]), strategy)
    for n in range(2):
        results = []
        for model in (plain, patched):
            model.train()
            model.zero_grad()
            torch.manual_seed(n)
            loss = model(example()).sum()
            model.eval()
            loss.backward()
            assert not any(m.training for m in model.modules())
            results.append(gradients(model))
        assert same(results)


@every_strategy
def test_the_default_dtype_of_the_forward_holds_in_the_replay(strategy):
    class MakesConstants(Layer):
        def forward(self, x):
            return self.b((self.a(x) * torch.tensor(1.1)).double() * torch.linspace(0, 1, 8)).sin().to(x.dtype)

    make = lambda: Stack(*[MakesConstants() for _ in range(3)]).double()  # noqa: E731
    plain, patched, _ = pair(make, strategy)
    for dtype in (torch.float64, torch.float32, torch.float64):
        results = []
        for model in (plain, patched):
            model.zero_grad()
            torch.set_default_dtype(dtype)
            loss = model(example().double()).sum()
            torch.set_default_dtype(torch.float32)
            loss.backward()
            results.append(gradients(model))
        assert torch.get_default_dtype() is torch.float32
        assert same(results)


@every_strategy
def test_backward_leaves_the_generator_alone(strategy):
    """What the caller draws between forward and backward, and after it, is what he would draw without checkpointing."""
    _, patched, _ = pair(lambda: Stack(*[Dropout() for _ in range(4)]), strategy)
    for _ in range(2):
        loss = patched(example()).sum()
        torch.manual_seed(11)
        expected = torch.rand(3)
        state = torch.get_rng_state()
        loss.backward()
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(11)
        assert torch.equal(torch.rand(3), expected)


def test_generator_states_are_held_only_where_random_numbers_are_drawn():
    for make, drawn in ((Dropout, True), (MLP, False)):
        model = built(lambda make=make: Stack(make(), make()))
        ckpt.apply(model, "full")
        others = {id(o) for o in gc.get_objects() if type(o) is Frame}
        for _ in range(2):
            out = model(example().requires_grad_())
            frames = [o for o in gc.get_objects() if type(o) is Frame and id(o) not in others]
            assert [frame.rng is not None for frame in frames] == [drawn, drawn]
            del out, frames


@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_changing_the_attention_implementation_before_backward_changes_nothing(name):
    import zoo

    model = zoo.build(name, dropout=0.1, layers=2)
    inputs = zoo.batch(model, 16)
    losses = []
    for strategy in (None, ckpt.Full(), ckpt.Selective(), ckpt.Segments(size=2)):
        handle = None if strategy is None else ckpt.apply(model, strategy)
        for implementation, other in (("eager", "sdpa"), ("sdpa", "eager"), ("eager", "sdpa")):
            model.set_attn_implementation(implementation)
            model.zero_grad()
            torch.manual_seed(0)
            loss = model(**inputs).loss
            model.set_attn_implementation(other)
            loss.backward()
            losses.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
        if handle is not None:
            handle.undo()
    for k in range(3, len(losses)):
        assert all(torch.equal(a, b) for a, b in zip(losses[k], losses[k % 3], strict=True)), k
