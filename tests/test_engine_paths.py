"""Layers that do not do the same at each call, and layers that look at values: exact, or refused by name.

The engine records a layer's first call and runs later ones by that record. Whatever a later call does differently,
seen or unseen, its gradients must be those of the plain model.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_kit import MLP, Keep, Layer, Stack, all_strategies, assert_exact, built, example, keep_ops, step

import ckpt
from ckpt.engine.frame import NondeterministicLayer
from ckpt.engine.ops import Unreplayable

STRATEGIES = all_strategies() | {"keep_sin": keep_ops("sin"), "keep_exp_mm": keep_ops("exp", "mm")}


class Changing(Layer):
    """Takes a path that nothing tells: neither arguments, nor flags, nor shapes."""

    path = "first"

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        u, v = a.sin(), b.sin()
        y = {
            "first": lambda: u * 2,
            "other operand": lambda: v * 2,  # the same ops, shapes and saved tensors
            "other op": lambda: u * v,
            "other function": lambda: u.cos(),
            "same shapes saved": lambda: u + 2,
            "dropout": lambda: F.dropout(u, 0.5),
            "noise, nothing saved": lambda: u + torch.rand_like(u),
            "noise, saved": lambda: u + torch.rand_like(u).sin(),
            "in place": lambda: u.mul_(2),
            "in place on the other": lambda: v.mul_(2),
            "longer": lambda: u.sin().sin().sin(),
            "shorter": lambda: a,
        }[self.path]()
        return (y.exp() + x).tanh() @ self.a.weight


PATHS = [
    "other operand", "other op", "other function", "same shapes saved", "dropout", "noise, nothing saved",
    "noise, saved", "in place", "in place on the other", "longer", "shorter",
]  # fmt: skip


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("path", PATHS)
def test_a_path_that_changes_unseen_stays_exact(path, strategy):
    def taking(*paths):
        def before(model, n):
            for layer in model.layers:
                layer.path = paths[n % len(paths)]

        return before

    make = lambda: Stack(*[Changing() for _ in range(3)])  # noqa: E731
    assert_exact(make, STRATEGIES[strategy], steps=3, before=taking("first", path))
    assert_exact(make, STRATEGIES[strategy], steps=3, before=taking(path, "first"))


def test_a_path_that_changes_makes_the_layer_dynamic_and_the_audit_says_so():
    def before(model, n):
        model.layers[1].path = ["first", "other op"][n % 2]

    handle = assert_exact(lambda: Stack(*[Changing() for _ in range(3)]), ckpt.Full(), steps=4, before=before)
    reasons = [layer.dynamic_because for layer in handle.audit().layers]
    assert reasons[0] is None and "other tensors" in reasons[1] and reasons[2] is None
    assert "dynamic: a call saved other tensors" in str(handle.audit())


class Captured(Layer):
    """Its kept matmul is saved by nobody: held by a hook on the module, while saved tensors come to differ."""

    path = 0

    def forward(self, x):
        first = x.sin() if self.path == 0 else x.sin().cos()
        h = self.a(first) + 1
        return self.b(h.sin()) * first


@pytest.mark.parametrize("policy", [keep_ops("mm"), ckpt.Offload(what="kept", keep="mm")], ids=["kept", "offloaded"])
def test_a_changing_layer_may_have_captured_outputs(policy):
    def before(model, n):
        for layer in model.layers:
            layer.path = n % 2

    assert_exact(lambda: Stack(Captured(), Captured()), policy, steps=4, before=before)


def test_a_layer_declared_dynamic_is_recorded_at_every_call():
    model = built(lambda: Stack(MLP(), MLP()))
    handle = ckpt.apply(model, "full", dynamic=("layers.1",))
    for _ in range(3):
        step(model, example())
    assert [region.counts.records for region in handle.regions] == [1, 3]
    assert handle.audit().layers[1].dynamic_because == "declared dynamic"


def test_a_dynamic_pattern_that_matches_no_layer_is_an_error():
    with pytest.raises(ValueError, match=r"dynamic='experts\.\*' matches no layer"):
        ckpt.apply(built(lambda: Stack(MLP())), "full", dynamic=("experts.*",))


# ---- layers that look at values ------------------------------------------------------------------------------------


class Item(Layer):
    def forward(self, x):
        h = self.a(x)
        return self.b(h.sin() if h.mean().item() > 0 else h.cos() * h)


class TruthOfTensor(Layer):
    def forward(self, x):
        h = self.a(x)
        return self.b(h.sin() if (h > 0.5).any() else h.tanh())


class Nonzero(Layer):
    """Eager experts: tokens are gathered by where a mask is true."""

    def forward(self, x):
        flat = self.a(x).flatten(0, 1)
        chosen = torch.nonzero(flat[:, 0] > 0)[:, 0]
        out = flat.clone()
        out.index_add_(0, chosen, self.b(flat[chosen]))
        return out.view_as(x)


class BooleanMask(Layer):
    def forward(self, x):
        h = self.a(x)
        mask = h[..., 0] > 0
        out = torch.zeros_like(h)
        out[mask] = self.b(h[mask])
        return out + x


class ToList(Layer):
    """`tolist` hands values to Python without an op; what it reads must not be skipped."""

    def forward(self, x):
        h = self.a(x)
        sizes = (h.detach().exp() > 1).sum((0, 1)).tolist()
        return torch.cat([self.b(h.sin())[..., :4] * (1 + sizes[0]), h[..., 4:].cos() * sizes[1]], dim=-1)


class Numpy(Layer):
    def forward(self, x):
        h = self.a(x)
        scale = torch.from_numpy(np.sin((h.detach() * 2).numpy()))
        return self.b(h.sin()) * scale


class OwnKernel(Layer):
    """A kernel that is given pointers and fills memory that no op wrote (Triton, pybind)."""

    def forward(self, x):
        h = self.a(x)
        out = torch.empty_like(h)
        np.copyto(out.numpy(), np.sin((h.detach() * 2).numpy()))
        return self.b(h.sin()) * out


LOOKING = [Item, TruthOfTensor, Nonzero, BooleanMask, ToList, Numpy, OwnKernel]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layer", LOOKING, ids=lambda cls: cls.__name__)
def test_layers_that_look_at_values_are_exact(layer, strategy):
    assert_exact(lambda: Stack(*[layer() for _ in range(4)]), STRATEGIES[strategy], steps=4)


@pytest.mark.parametrize("layer", [Item, TruthOfTensor, Nonzero, BooleanMask, ToList], ids=lambda cls: cls.__name__)
def test_layers_that_look_at_values_are_known_as_dynamic(layer):
    handle = assert_exact(lambda: Stack(layer(), layer()), Keep())
    assert {entry.dynamic_because for entry in handle.audit().layers} == {"its op sequence depends on data"}


@pytest.mark.parametrize("layer", [Numpy, OwnKernel], ids=lambda cls: cls.__name__)
def test_values_that_leave_torch_stop_feeding_and_the_audit_says_why(layer):
    handle = assert_exact(lambda: Stack(layer(), layer()), keep_ops("mm"))
    for entry in handle.audit().layers:
        assert entry.demoted and all("leave torch's sight" in reason for reason in entry.demoted)


def test_flags_in_arguments_are_part_of_what_a_record_stands_for():
    """A bool chooses the path, so each value has a record of its own and none is taken for the other."""

    class Flagged(Layer):
        def forward(self, x, deep=False):
            return self.b(self.a(x).sin() if deep else self.a(x))

    plain, patched = (built(lambda: Stack(Flagged(), Flagged())) for _ in range(2))
    handle = ckpt.apply(patched, Keep())
    for n in range(6):
        deep = n % 2 == 0
        assert step(patched, example(), deep=deep).differences(step(plain, example(), deep=deep)) == []
    assert [region.counts.records for region in handle.regions] == [2, 2]
    assert not any(layer.dynamic_because for layer in handle.audit().layers)


# ---- containers that layers write into -----------------------------------------------------------------------------


class SharesKeys(Layer):
    """gemma3n's and gemma4's shared keys: the first layer writes them into a dict, later ones read them."""

    def forward(self, x, box=None):
        h = self.a(x)
        if "keys" in box:
            h = h + box["keys"]
        box["keys"] = h.sin()
        return self.b(h.cos())


class AppendsToList(Layer):
    """A list inside a dict grows from layer to layer; a replay must see it as it was, and not make it longer."""

    def forward(self, x, box=None):
        h = self.a(x)
        if box["keys"]:
            h = h + box["keys"][-1].mean() + len(box["keys"])
        box["keys"].append(h.sin())
        return self.b(h.cos())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("layer, box", [(SharesKeys, dict), (AppendsToList, lambda: {"keys": []})])
def test_containers_that_layers_write_into_are_replayed_as_they_were(layer, box, strategy):
    make = lambda: Stack(*[layer() for _ in range(4)])  # noqa: E731
    assert_exact(make, STRATEGIES[strategy], call=lambda model, x: model(x, box=box()), steps=3)


def test_a_replay_does_not_touch_the_callers_containers():
    model = built(lambda: Stack(AppendsToList(), AppendsToList()))
    ckpt.apply(model, "full")
    box = {"keys": []}
    out = model(example().requires_grad_(), box=box)
    assert len(box["keys"]) == 2
    out.sum().backward()
    assert len(box["keys"]) == 2


# ---- what cannot be replayed ---------------------------------------------------------------------------------------


class WritesItsInput(Layer):
    def forward(self, x):
        x += 1
        return self.b(self.a(x).sin())


class OwnGenerator(Layer):
    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, x):
        return self.b((self.a(x) + torch.rand(x.shape, generator=self.generator)).sin())


class ReadsThenOverwrites(Layer):
    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        y = self.a(x) + self.steps
        self.steps.add_(1)
        return self.b(y.sin())


REFUSED = {
    WritesItsInput: r"layer 0 \(layers\.0, WritesItsInput\): the layer writes into one of its arguments \(op /add_#0\)",
    OwnGenerator: r"layer 0 .*draws from a generator of the layer's own",
    ReadsThenOverwrites: r"layer 0 .*reads a buffer and then overwrites it \(/add_#0\)",
}


@pytest.mark.parametrize("layer", REFUSED, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("strategy", ["full", "segments_keep", "segments_replay", "offload_inputs"])
def test_a_layer_that_cannot_be_replayed_is_refused_by_name_in_the_first_forward(layer, strategy):
    model = built(lambda: Stack(*[layer() for _ in range(3)]))
    ckpt.apply(model, all_strategies()[strategy])
    with pytest.raises(Unreplayable, match=REFUSED[layer]):
        model(example().requires_grad_() * 1)


def test_a_buffer_that_is_overwritten_does_no_harm_where_nothing_is_replayed():
    assert_exact(lambda: Stack(ReadsThenOverwrites(), ReadsThenOverwrites()), Keep(), steps=3)
    assert_exact(lambda: Stack(ReadsThenOverwrites(), ReadsThenOverwrites()), ckpt.KeepAll(), steps=3)


class Counting(Layer):
    """Another thing at every run, replays included."""

    runs = 0

    def forward(self, x):
        self.runs += 1
        h = self.a(x)
        for _ in range(self.runs % 3):
            h = h.sin()
        return self.b(h)


@pytest.mark.parametrize("strategy", ["full", "segments_keep", "segments_replay", "offload_inputs"])
def test_a_layer_that_does_something_else_when_replayed_is_an_error(strategy):
    model = built(lambda: Stack(*[Counting() for _ in range(4)]))
    ckpt.apply(model, all_strategies()[strategy])
    with pytest.raises(NondeterministicLayer, match=r"layer \d \(layers\.\d, Counting\)"):
        model.layers[0].runs = 0
        for _ in range(3):  # replays that save more tensors than the forward are seen by their shapes only
            for layer in model.layers:
                layer.runs = 1
            model(example().requires_grad_()).sum().backward()


def test_a_replay_that_saves_another_shape_is_an_error():
    class Narrowing(Layer):
        runs = 0

        def forward(self, x):
            self.runs += 1
            return self.b(x) + self.a(x)[..., : 8 - self.runs % 2].sin().sum(-1, keepdim=True)

    model = built(lambda: Stack(Narrowing(), Narrowing()))
    ckpt.apply(model, "full")
    with pytest.raises(NondeterministicLayer, match="saved tensor .* in the forward and .* in its replay"):
        model(example().requires_grad_()).sum().backward()


def test_a_layer_that_catches_exceptions_cannot_swallow_the_end_of_a_replay():
    class Catches(Layer):
        def forward(self, x):
            try:
                h = self.a(x).sin()
            except Exception:
                h = self.a(x).cos()
            try:
                return self.b(h.exp()).tanh()
            except Exception:
                return h

    for strategy in STRATEGIES.values():
        assert_exact(lambda: Stack(Catches(), Catches(), Catches()), strategy, steps=3)
