"""Backward in all the ways autograd allows: twice, in part, of a gradient, in another thread, after an error.

What torch refuses (a saved tensor modified in place) must be refused here too, and what it computes must be the same.
"""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from engine_kit import MLP, Keep, Layer, Stack, all_strategies, built, example, keep_ops, step
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt


class Dropout(Layer):
    def forward(self, x):
        h = F.dropout(F.gelu(self.a(x)), 0.3, self.training)
        return x + F.dropout(self.b(h), 0.2, self.training)


STRATEGIES = all_strategies()
REPLAYING = [name for name in STRATEGIES if name not in ("none", "keep_all", "offload_kept")]


def pair(make, strategy):
    plain, patched = built(make), built(make)
    ckpt.apply(patched, STRATEGIES[strategy])
    return plain, patched


def same(results) -> bool:
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backward_may_run_again_over_a_retained_graph(strategy):
    results = []
    for model in pair(lambda: Stack(*[Dropout() for _ in range(4)]), strategy):
        for n in range(2):
            model.zero_grad()
            torch.manual_seed(n)
            x = example().requires_grad_()
            loss = model(x).sin().sum()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            loss.backward()
        results.append([x.grad, torch.get_rng_state(), *(p.grad for p in model.parameters())])
    assert same(results)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_some_inputs_then_of_others(strategy):
    results = []
    for model in pair(lambda: Stack(*[Dropout() for _ in range(4)]), strategy):
        found = []
        for n in range(2):
            torch.manual_seed(n)
            x = example().requires_grad_()
            loss = model(x).sin().sum()
            found += torch.autograd.grad(loss, [model.layers[2].a.weight], retain_graph=True)
            found += torch.autograd.grad(loss, [model.layers[3].b.weight, x], retain_graph=True)
            found += torch.autograd.grad(loss, list(model.parameters()))
        results.append(found)
    assert same(results)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_gradients_of_gradients_are_exact(strategy):
    results = []
    for model in pair(lambda: Stack(*[MLP() for _ in range(4)]), strategy):
        for _ in range(2):
            model.zero_grad()
            x = example().requires_grad_()
            (gradient,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
            gradient.pow(2).sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert same(results)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_backward_may_run_in_another_thread(strategy):
    plain, patched = pair(lambda: Stack(*[Dropout() for _ in range(4)]), strategy)
    for n in range(2):
        for model in (plain, patched):
            model.zero_grad()
            torch.manual_seed(n)
            loss = model(example()).sum()
            thread = threading.Thread(target=loss.backward)
            thread.start()
            thread.join()
        assert all(torch.equal(p.grad, q.grad) for p, q in zip(plain.parameters(), patched.parameters(), strict=True))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_outer_saved_tensor_hooks_change_nothing(strategy):
    results = []
    for model in pair(lambda: Stack(*[Dropout() for _ in range(4)]), strategy):
        for n in range(2):
            model.zero_grad()
            torch.manual_seed(n)
            with torch.autograd.graph.save_on_cpu():
                loss = model(example()).sin().sum()
            loss.backward()
        results.append([p.grad for p in model.parameters()])
    assert same(results)


# ---- modified in place between forward and backward ------------------------------------------------------------------


class AddsBias(Layer):
    """The bias is needed by no backward of its own, so torch would not notice; a replay reads it again."""

    def forward(self, x):
        return (self.a(x) + self.b.bias).sin().cos()


@pytest.mark.parametrize("strategy", REPLAYING)
def test_a_parameter_modified_before_the_replay_is_an_error(strategy):
    model = built(lambda: Stack(*[AddsBias(bias=True) for _ in range(4)]))
    ckpt.apply(model, STRATEGIES[strategy])
    for _ in range(2):
        out = model(example())
        with torch.no_grad():
            model.layers[0].b.bias.mul_(2)
        with pytest.raises(RuntimeError, match="layer 0 .* modified in place between the layer's forward and its"):
            out.sum().backward()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_weight_modified_before_backward_is_an_error_as_in_torch(strategy):
    model = built(lambda: Stack(*[MLP() for _ in range(4)]))
    ckpt.apply(model, STRATEGIES[strategy])
    for _ in range(2):
        out = model(example())
        with torch.no_grad():
            model.layers[0].b.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            out.sum().backward()


@pytest.mark.parametrize("strategy", [name for name in STRATEGIES if name != "offload_inputs"])
def test_an_input_modified_before_backward_is_an_error_as_in_torch(strategy):
    """Offloaded inputs are copies: what the caller does to the original does not reach them."""
    model = built(lambda: Stack(*[MLP() for _ in range(4)]))
    ckpt.apply(model, STRATEGIES[strategy])
    for _ in range(2):
        x = example().requires_grad_() * 1
        out = model(x)
        with torch.no_grad():
            x.mul_(2)
        with pytest.raises(RuntimeError, match="modified"):
            out.sum().backward()


def test_a_kept_output_modified_before_backward_is_an_error():
    class Exposes(Layer):
        def forward(self, x):
            self.seen = self.a(x)
            return self.b(self.seen.sin())

    model = built(lambda: Stack(Exposes(), Exposes()))
    ckpt.apply(model, keep_ops("mm", "sin"))
    for _ in range(2):
        out = model(example())
        with torch.no_grad():
            model.layers[1].seen.mul_(2)
        with pytest.raises(RuntimeError, match="modified in place"):
            out.sum().backward()


def test_an_optimizer_that_steps_inside_backward_is_exact():
    """Parameters are updated as soon as their gradient is there, while earlier layers are still to be replayed."""
    results = []
    for strategy in STRATEGIES:
        model = built(lambda: Stack(*[Dropout() for _ in range(4)]))
        ckpt.apply(model, STRATEGIES[strategy])
        for p in model.parameters():
            optimizer = torch.optim.SGD([p], lr=0.1)

            def update(parameter, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            p.register_post_accumulate_grad_hook(update)
        for n in range(3):
            torch.manual_seed(n)
            model(example(seed=n)).sin().sum().backward()
        results.append([p.detach().clone() for p in model.parameters()])
    for strategy, weights in zip(STRATEGIES, results, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(weights, results[0], strict=True)), strategy


# ---- errors and interrupts -------------------------------------------------------------------------------------------


class Fails(Dropout):
    fails = False

    def forward(self, x):
        out = super().forward(x)
        if self.fails:
            raise OSError("no more of this")
        return out


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_step_after_a_forward_that_failed_is_clean(strategy):
    plain, patched = pair(lambda: Stack(*[Fails() for _ in range(4)]), strategy)
    for at in range(3):  # while recording, then while running a program
        patched.layers[2].fails = True
        with pytest.raises(OSError, match="no more of this"):
            patched(example().requires_grad_())
        patched.layers[2].fails = False
        expected = step(plain, example(seed=at), seed=at)
        assert step(patched, example(seed=at), seed=at).differences(expected) == []
    assert not any(layer.dynamic_because for layer in ckpt.applied_to(patched).audit().layers)
    assert not torch.nn.modules.module._global_forward_hooks and not torch.nn.modules.module._global_forward_pre_hooks
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    assert torch._C._len_torch_function_stack() == 0
    assert all(not m._forward_hooks for layer in patched.layers for m in layer.modules())


@pytest.mark.parametrize("strategy", REPLAYING)
@pytest.mark.parametrize("n", [0, 1])
def test_a_step_after_an_interrupted_replay_is_clean(strategy, n):
    """Ctrl-C may hit anywhere in a replay: generators, training flags and modes must be as the caller left them."""

    class Interruptible(Dropout):
        interrupt = False

        def forward(self, x):
            out = super().forward(x)
            if self.interrupt:
                raise KeyboardInterrupt
            return out.sin().sin()

    plain, patched = pair(lambda: Stack(*[Interruptible() for _ in range(4)]), strategy)
    for m in range(n):
        step(patched, example(seed=m), seed=m)
    loss = patched(example().requires_grad_()).sum()
    patched.eval()
    for layer in patched.layers:
        layer.interrupt = True
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(m.training for m in patched.modules())
    assert torch.utils._python_dispatch._get_current_dispatch_mode_stack() == []
    for layer in patched.layers:
        layer.interrupt = False
    patched.train()
    assert step(patched, example(seed=3), seed=3).differences(step(plain, example(seed=3), seed=3)) == []


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_nothing_runs_again_without_gradients(strategy):
    model = built(lambda: Stack(*[MLP() for _ in range(4)]))
    handle = ckpt.apply(model, STRATEGIES[strategy])
    with torch.no_grad():
        model(example())
    with torch.inference_mode():
        model(example())
    assert all(layer.calls == 0 and layer.replays == 0 for layer in handle.audit().layers)


def test_forward_without_backward_costs_no_replay():
    model = built(lambda: Stack(*[MLP() for _ in range(4)]))
    handle = ckpt.apply(model, "full")
    for _ in range(3):
        model(example().requires_grad_())
    assert [layer.calls for layer in handle.audit().layers] == [3] * 4
    assert handle.audit().replays == 0


class CountsOps(TorchDispatchMode):
    def __init__(self, name: str):
        super().__init__()
        self.name, self.count = name, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func._schema.name == f"aten::{self.name}"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "policy, matmuls_again, gelus_again",
    [(ckpt.Full(), 4, 4), (keep_ops("mm"), 0, 4), (Keep(), 0, 0), (ckpt.KeepAll(), 0, 0)],
    ids=["full", "matmuls kept", "all kept", "none"],
)
def test_what_runs_again_is_seen_by_an_independent_count(policy, matmuls_again, gelus_again):
    """Four layers of two matmuls and a gelu. The second matmul is saved by nobody, so a replay ends before it."""
    model = built(lambda: Stack(*[MLP() for _ in range(4)]))
    ckpt.apply(model, policy)
    for _ in range(2):
        with CountsOps("mm") as matmuls, CountsOps("gelu") as gelus:
            model(example().requires_grad_()).sum().backward()
        assert matmuls.count == 8 + 16 + matmuls_again  # backward: the gradient of each matmul's input and weight
        assert gelus.count == 4 + gelus_again
