"""Layers written out in full, each with one trap in it, must give bitwise the gradients of the plain model.

Promise 1. Every trap is one that some released architecture contains, or that torch's own selective contexts fail on.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from engine_kit import MLP, Keep, Layer, Stack, all_strategies, assert_exact, built, example, keep_ops, step
from torch import nn

import ckpt

LAYERS = 4


class InPlaceOnLinear(Layer):
    """mm -> _unsafe_view -> add_: the write reaches the matmul's storage through a view (gemma3n's AltUp)."""

    def forward(self, x):
        h = self.a(x)
        h += x
        return self.b(h.sin())


class InPlaceThenUnsaved(Layer):
    """The written matmul is saved by nobody, so what feeds the replay is captured, before the write."""

    def forward(self, x):
        h = self.a(x)
        h += x
        h = h * 2
        return self.b(h.sin()) * x


class ReluInPlace(Layer):
    def forward(self, x):
        return self.b(torch.relu_(self.a(x)))


class SavedThenWritten(Layer):
    """The sine saves its input's value before a copy of it is written."""

    def forward(self, x):
        h = self.a(x)
        y = h.sin()
        h = h.clone()
        h[..., 0] = 0
        return self.b(y * h)


class ScoresInPlace(Layer):
    """baddbmm-like attention: scores are shifted in place (bloom, gpt_oss)."""

    def forward(self, x):
        scores = torch.bmm(self.a(x), x.transpose(1, 2)).add_(1).mul_(0.5)
        return self.b(scores.softmax(-1) @ x)


class SliceWrites(Layer):
    """Expert outputs are gathered by writes into slices of one buffer."""

    def forward(self, x):
        out = torch.zeros_like(x)
        out[:, :2] = self.a(x[:, :2])
        out[:, 2:] += self.b(x[:, 2:])
        return out.tanh() + x


class ForeachWrites(Layer):
    """One op that writes two tensors at once cannot be skipped in part."""

    def forward(self, x):
        h, g = self.a(x), self.b(x)
        with torch.no_grad():
            u, v = h * 2, g * 3
            torch._foreach_add_([u, v], 1.0)
        return (h * u).sin() + (g * v).cos()


class Dropout(Layer):
    def forward(self, x):
        h = F.dropout(F.gelu(self.a(x)), 0.3, self.training)
        return x + F.dropout(self.b(h), 0.2, self.training)


class RoutingNoise(Layer):
    """Mixtral's jitter: multiplied by a fresh tensor filled in place from the generator."""

    def forward(self, x):
        noisy = x * torch.empty_like(x).uniform_(0.9, 1.1)
        return x + self.b(self.a(noisy).sin()) * F.dropout(torch.ones_like(x), 0.5)


class CalledTwice(Layer):
    def forward(self, x):
        return self.a(self.a(x).sin()).cos() * x


class ReturnsTuple(Layer):
    def forward(self, x):
        return self.a(x).sin() + x, x.detach()


class Unused(Layer):
    """Ops whose results nobody reads, and a matmul after the last saved tensor."""

    def forward(self, x):
        self.b(x).exp()
        return x + self.a(x)


class NoGradPart(Layer):
    def forward(self, x):
        with torch.no_grad():
            gate = self.a(x).sigmoid() > 0.5
        return torch.where(gate, self.b(x), x).tanh()


class Chunks(Layer):
    """Views of one output that end in different places."""

    def forward(self, x):
        gate, up = self.a(x).chunk(2, dim=-1)
        return self.b(torch.cat([F.silu(gate) * up, up], dim=-1)) + x


class Attention(Layer):
    def forward(self, x):
        q, k = self.a(x).unflatten(-1, (2, -1)).transpose(1, 2), self.b(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return x + F.scaled_dot_product_attention(q, k, q, is_causal=True).transpose(1, 2).flatten(-2)


class OwnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.T, x.flatten(0, 1).T @ g.flatten(0, 1)


class CallsOwnFunction(Layer):
    """A kernel of its own, as Liger and fla have: its ops never reach the dispatcher as such."""

    def forward(self, x):
        return self.b(OwnFunction.apply(self.a(x).sin(), self.a.weight).tanh())


class OwnFunctionWritesBuffer(CallsOwnFunction):
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls.add_(1)
        return super().forward(x)


class NestedCheckpoint(Layer):
    def forward(self, x):
        part = lambda t: self.b(F.dropout(self.a(t).sin(), 0.2)).tanh()  # noqa: E731
        return x + torch.utils.checkpoint.checkpoint(part, x, use_reentrant=False)


class CountsTokens(Layer):
    """A statistic kept in a buffer, as load-balancing routers do. A replay must not count twice."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen.add_(x.detach().mean())
        return self.b(self.a(x).sin())


class RunningAverage(CountsTokens):
    """The average is read, but by nothing that the output depends on."""

    def forward(self, x):
        self.seen.copy_(self.seen * 0.9 + x.detach().mean() * 0.1)
        return self.b(self.a(x).sin())


class BufferWrittenThenRead(CountsTokens):
    def forward(self, x):
        self.seen.add_(1)
        return self.b((self.a(x) + self.seen).sin())


class BatchNorm(Layer):
    """Its running statistics are written without the schema saying so."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        return self.b(self.norm(self.a(x).transpose(1, 2)).transpose(1, 2).sin())


class Frozen(MLP):
    def __init__(self):
        super().__init__()
        self.a.weight.requires_grad_(False)


class Scalar(Layer):
    """A zero-dimensional parameter, an empty tensor, an integer output on the way."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        order = self.a(x).argsort(dim=-1)
        return (self.b(x).gather(-1, order) * self.scale).sin() + torch.cat([x, x[:, :0]], dim=1)


TRAPS = [
    MLP, InPlaceOnLinear, InPlaceThenUnsaved, ReluInPlace, SavedThenWritten, ScoresInPlace, SliceWrites, ForeachWrites,
    Dropout, RoutingNoise, CalledTwice, ReturnsTuple, Unused, NoGradPart, Chunks, Attention, CallsOwnFunction,
    OwnFunctionWritesBuffer, NestedCheckpoint, CountsTokens, RunningAverage, BufferWrittenThenRead, BatchNorm, Frozen,
    Scalar,
]  # fmt: skip


@pytest.mark.parametrize("strategy", all_strategies())
@pytest.mark.parametrize("trap", TRAPS, ids=lambda cls: cls.__name__)
def test_gradients_are_bitwise_those_of_the_plain_model(trap, strategy):
    assert_exact(lambda: Stack(*[trap() for _ in range(LAYERS)]), all_strategies()[strategy])


@pytest.mark.parametrize("trap", [InPlaceOnLinear, InPlaceThenUnsaved, ReluInPlace, ScoresInPlace, MLP])
@pytest.mark.parametrize("bias", [False, True])
def test_kept_matmuls_with_and_without_bias_survive_writes(trap, bias):
    """`terrain: SAC and in-place writes`: mm and addmm reach the write by different views."""
    handle = assert_exact(lambda: Stack(*[trap(bias=bias) for _ in range(2)]), keep_ops("mm", "addmm", "bmm"), steps=3)
    assert all(layer.ops_kept for layer in handle.audit().layers)


def test_kept_matmuls_are_not_run_again():
    handle = assert_exact(lambda: Stack(MLP(), MLP()), keep_ops("mm"))
    plain = assert_exact(lambda: Stack(MLP(), MLP()), ckpt.Full())
    assert sum(layer.flops_run_again for layer in handle.audit().layers) == 0
    assert all(layer.flops_run_again > 0 for layer in plain.audit().layers)


def test_everything_kept_is_never_replayed():
    handle = assert_exact(lambda: Stack(MLP(), MLP()), Keep(), steps=3)
    assert handle.audit().replays == 0


def test_one_op_kept_in_one_layer_leaves_the_others_replayed():
    policy = Keep(lambda key: (key.path, key.op) == ("a", "mm"))
    policy.decide = lambda index, op, inner=policy.decide: inner(index, op) if index == 1 else ckpt.Decision.RECOMPUTE
    handle = assert_exact(lambda: Stack(MLP(), MLP(), MLP()), policy)
    assert [layer.ops_kept for layer in handle.audit().layers] == [0, 1, 0]
    assert [layer.replays for layer in handle.audit().layers] == [2, 2, 2]


def test_random_ops_that_are_kept_still_advance_the_generator():
    policy = keep_ops("native_dropout", "bernoulli_", "uniform_", "empty_like", "mul", "div_")
    for trap in (Dropout, RoutingNoise):
        assert_exact(lambda trap=trap: Stack(*[trap() for _ in range(3)]), policy, steps=3)


def test_a_layer_shared_by_all_positions_is_exact():
    def albert():
        layer = Dropout()
        return Stack(layer, layer, layer, layer)

    for strategy in all_strategies().values():
        assert_exact(albert, strategy, steps=3)


def test_weights_tied_between_layers_are_exact():
    def tied():
        stack = Stack(*[MLP() for _ in range(4)])
        stack.layers[2].a = stack.layers[0].a
        return stack

    for strategy in all_strategies().values():
        assert_exact(tied, strategy)


def test_hooks_that_change_an_output_are_applied_once():
    """A captured output must be the module's own, or the hook would be applied to it again on replay."""

    class Hooked(Layer):
        def __init__(self):
            super().__init__()
            self.a.register_forward_hook(lambda module, args, output: output * 2)

        def forward(self, x):
            return self.b((self.a(x) + 1).sin())

    for strategy in all_strategies().values():
        assert_exact(lambda: Stack(Hooked(), Hooked()), strategy, steps=3)


def test_full_backward_hooks_on_submodules_fire_once_a_step():
    seen: list[str] = []

    class Watched(MLP):
        def __init__(self):
            super().__init__()
            self.b.register_full_backward_hook(lambda module, grad_in, grad_out: seen.append("b"))

    for strategy in all_strategies().values():
        seen.clear()
        assert_exact(lambda: Stack(Watched(), Watched()), strategy, steps=2)
        assert len(seen) == 2 * 2 * 2  # layers, steps, models


@pytest.mark.parametrize("strategy", all_strategies())
def test_lengths_batches_and_strides_may_change_from_call_to_call(strategy):
    plain, patched = (built(lambda: Stack(*[Dropout() for _ in range(4)])) for _ in range(2))
    ckpt.apply(patched, all_strategies()[strategy])
    inputs = [example(b, t, 8) for b, t in ((2, 5), (1, 3), (3, 1), (1, 1), (2, 5), (5, 2), (0, 5))]
    inputs.append(example(2, 8, 5).transpose(1, 2))
    for n, x in enumerate(inputs):
        assert step(patched, x, seed=n).differences(step(plain, x, seed=n)) == []


@pytest.mark.parametrize("strategy", all_strategies())
def test_keyword_arguments_may_change_from_call_to_call(strategy):
    class Flexible(Layer):
        def forward(self, x, mask=None, scale=1.0, flag=False):
            h = self.a(x) * scale
            if mask is not None:
                h = h.masked_fill(mask, 0.0)
            return self.b(h.sin() if flag else h.cos()) + x

    plain, patched = (built(lambda: Stack(*[Flexible() for _ in range(4)])) for _ in range(2))
    ckpt.apply(patched, all_strategies()[strategy])
    mask = torch.zeros(2, 5, 8, dtype=torch.bool)
    mask[..., 1] = True
    calls = [{}, {"flag": True}, {"mask": mask}, {"scale": 2.0}, {"scale": 3}, {"mask": mask[:1], "flag": True}, {}]
    for kwargs in calls:
        assert step(patched, example(), **kwargs).differences(step(plain, example(), **kwargs)) == []


@pytest.mark.parametrize("strategy", all_strategies())
def test_two_forwards_before_their_backwards_do_not_mix(strategy):
    plain, patched = (built(lambda: Stack(*[Dropout() for _ in range(4)])) for _ in range(2))
    ckpt.apply(patched, all_strategies()[strategy])

    def two(model, x):
        first, second = model(x), model(x * 2)
        return second * 0.5 + first

    for n in range(3):
        expected = step(plain, example(seed=n), call=two)
        assert step(patched, example(seed=n), call=two).differences(expected) == []


@pytest.mark.parametrize("strategy", all_strategies())
def test_gradients_accumulate_over_micro_batches(strategy):
    plain, patched = (built(lambda: Stack(*[Dropout() for _ in range(4)])) for _ in range(2))
    ckpt.apply(patched, all_strategies()[strategy])
    for model in (plain, patched):
        torch.manual_seed(0)
        for n in range(4):
            model(example(seed=n)).sin().sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), patched.parameters(), strict=True))


@pytest.mark.parametrize("strategy", all_strategies())
def test_frozen_layers_below_trained_ones_are_exact(strategy):
    def partly_frozen():
        stack = Stack(*[MLP() for _ in range(4)])
        stack.layers[:2].requires_grad_(False)
        return stack

    plain, patched = built(partly_frozen), built(partly_frozen)
    ckpt.apply(patched, all_strategies()[strategy])
    for _ in range(2):  # inputs need no gradient here, as behind frozen embeddings
        for model in (plain, patched):
            model.zero_grad()
            model(example()).sum().backward()
        for p, q in zip(plain.parameters(), patched.parameters(), strict=True):
            assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("strategy", all_strategies())
def test_freezing_a_layer_between_steps_is_seen(strategy):
    def before(model, n):
        model.layers[1].requires_grad_(n % 2 == 0)

    assert_exact(lambda: Stack(*[MLP() for _ in range(4)]), all_strategies()[strategy], steps=4, before=before)
