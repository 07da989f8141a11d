"""Small stacks of checkpointed layers written out in the tests, and the comparison that all of them share.

    class Sine(Layer):
        def forward(self, x):
            return self.a(x).sin()

    assert_exact(lambda: Stack(Sine(), Sine()), ckpt.Selective(keep="mm"))

A `Layer` is a `GradientCheckpointingLayer`, the kind that Transformers' decoder layers are, so `ckpt.apply` treats a
`Stack` like any model. What is compared: outputs, the gradients of all parameters and inputs, buffers, and the random
state afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

import ckpt
from ckpt.engine.keys import OpKey
from ckpt.plan import Decision, Rule

WIDTH = 8


class Layer(GradientCheckpointingLayer):
    """Two square linear layers, for subclasses to use as they like."""

    def __init__(self, bias: bool = False, width: int = WIDTH):
        super().__init__()
        self.a = nn.Linear(width, width, bias=bias)
        self.b = nn.Linear(width, width, bias=bias)


class MLP(Layer):
    """x + b(gelu(a(x))): the plainest layer that is worth replaying."""

    def forward(self, x):
        return x + self.b(nn.functional.gelu(self.a(x)))


class Stack(nn.Module):
    """Runs layers one after the other. Keyword arguments go to each of them."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x, **kwargs):
        for layer in self.layers:
            x = layer(x, **kwargs)
            if isinstance(x, tuple):
                x = x[0]
        return x


class Keep:
    """A policy that keeps the ops for which `choose(key)` is true; `segment` as in `Segments`."""

    name = "test"

    def __init__(self, choose: Callable[[OpKey], bool] = lambda key: True, size: int | None = None, inner="keep"):
        self._choose, self._size, self._inner = choose, size, inner

    def rule(self, index: int, num_layers: int) -> Rule:
        return Rule(True, None if self._size is None else index // self._size, self._inner)

    def decide(self, index, op):
        return Decision.KEEP if self._choose(op.key) else Decision.RECOMPUTE

    def complaint(self, seen, matched, dynamic):
        return None


def keep_ops(*names: str) -> Keep:
    """Keep all ops of these names, wherever they are."""
    return Keep(lambda key: key.op in names)


@dataclasses.dataclass
class Result:
    """What one step left behind. `tensors` is compared bitwise."""

    tensors: dict[str, Tensor | None]

    def differences(self, expected: Result) -> list[str]:
        wrong = []
        for name, value in expected.tensors.items():
            got = self.tensors.get(name)
            if (got is None) != (value is None):
                wrong.append(f"{name}: {'missing' if got is None else 'unexpected'}")
            elif value is not None and not torch.equal(got, value):
                error = (got.double() - value.double()).norm() / value.double().norm()
                wrong.append(f"{name}: relative error {error:.2g}")
        return wrong


def step(model: nn.Module, *inputs, seed: int = 0, call: Callable | None = None, **kwargs) -> Result:
    """Run forward and backward once. `call(model, *inputs, **kwargs)` replaces the plain forward."""
    inputs = [t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs]
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    out = model(*inputs, **kwargs) if call is None else call(model, *inputs, **kwargs)
    # A weighted sum: a plain one sends ones back, which hides swapped gradients.
    weights = torch.linspace(0.5, 1.5, out.numel(), dtype=out.dtype).view(out.shape)
    (out * weights).sum().backward()
    found: dict[str, Tensor | None] = {"output": out.detach().clone(), "random state": torch.get_rng_state()}
    found |= {f"input {i}": t.grad for i, t in enumerate(inputs)}
    found |= {f"gradient {name}": p.grad for name, p in model.named_parameters()}
    found |= {f"buffer {name}": b.clone() for name, b in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    return Result(found)


def example(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape or (2, 5, WIDTH), generator=torch.Generator().manual_seed(seed))


def built(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a model in training mode, its weights a function of the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().train()


def assert_exact(make, strategy, *shapes: tuple[int, ...], steps: int = 2, before=lambda model, n: None, **kwargs):
    """Compare steps under a strategy with those of an equal plain model, bitwise; return the handle.

    The first call of a layer is recorded, later ones run its program: hence two steps, or more. `before(model, n)` runs
    before step n on both models. Gives the handle still in force, for its audit.
    """
    plain, patched = built(make), built(make)
    handle = ckpt.apply(patched, strategy)
    for n in range(steps):
        inputs = [example(*shape, seed=n) for shape in (shapes or ((2, 5, WIDTH),))]
        before(plain, n), before(patched, n)
        expected = step(plain, *inputs, seed=n, **kwargs)
        wrong = step(patched, *inputs, seed=n, **kwargs).differences(expected)
        assert not wrong, f"step {n}: " + "; ".join(wrong)
    return handle


def all_strategies() -> dict[str, object]:
    """One of each kind, by a name for the test's id."""
    return {
        "none": ckpt.KeepAll(),
        "full": ckpt.Full(),
        "every_2": ckpt.EveryN(2),
        "segments_keep": ckpt.Segments(size=2),
        "segments_replay": ckpt.Segments(size=2, inner="replay"),
        "keep_all": Keep(),
        "keep_mm": keep_ops("mm", "addmm", "bmm"),
        "offload_inputs": ckpt.Offload(),
        "offload_kept": ckpt.Offload(what="kept", keep="*"),
        "offload_mm": ckpt.Offload(what="kept", keep="*mm"),
    }
