"""Segments: which layers run again, in which order, and what happens where the chain of layers is broken.

Chen et al. 2016 (arXiv:1604.06174) is `inner="keep"`: one extra forward. `inner="replay"` makes the inputs of a segment
again first and then replays each layer: two extra forwards for all but a segment's last layer.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from engine_kit import MLP, Keep, Layer, Stack, assert_exact, built, example, step
from torch import nn

import ckpt

INNER = pytest.mark.parametrize("inner", ["keep", "replay"])


def runs_in_backward(num_layers: int, strategy, step_number: int = 2) -> list[int]:
    """Return the layers, numbered from 1, in the order in which they run in backward."""
    order: list[int] = []

    class Noted(Layer):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, x):
            order.append(self.number)
            return x + self.b(F.gelu(self.a(x)))

    model = built(lambda: Stack(*[Noted(n + 1) for n in range(num_layers)]))
    ckpt.apply(model, strategy)
    for _ in range(step_number):
        loss = model(example().requires_grad_()).sum()
        order.clear()
        loss.backward()
    return order


@pytest.mark.parametrize("step_number", [1, 2])
def test_four_layers_in_segments_of_two_replay_three_four_one_two(step_number):
    assert runs_in_backward(4, ckpt.Segments(size=2), step_number) == [3, 4, 1, 2]


@pytest.mark.parametrize("step_number", [1, 2])
def test_twelve_layers_in_segments_of_three_replay_segment_by_segment(step_number):
    expected = [10, 11, 12, 7, 8, 9, 4, 5, 6, 1, 2, 3]
    assert runs_in_backward(12, ckpt.Segments(size=3), step_number) == expected


@pytest.mark.parametrize("step_number", [1, 2])
def test_inner_replay_makes_the_inputs_first_and_then_replays_each_layer(step_number):
    assert runs_in_backward(4, ckpt.Segments(size=2, inner="replay"), step_number) == [3, 4, 3, 1, 2, 1]
    expected = [4, 5, 6, 5, 4, 1, 2, 3, 2, 1]
    assert runs_in_backward(6, ckpt.Segments(size=3, inner="replay"), step_number) == expected


def test_full_replays_from_the_last_layer_to_the_first():
    assert runs_in_backward(4, ckpt.Full()) == [4, 3, 2, 1]


def test_every_second_layer_counts_from_layer_zero():
    assert runs_in_backward(5, ckpt.EveryN(2)) == [5, 3, 1]
    assert runs_in_backward(5, ckpt.EveryN(3)) == [4, 1]
    assert runs_in_backward(5, ckpt.EveryN(9)) == [1]


def test_a_segment_size_that_does_not_divide_leaves_a_short_last_segment():
    assert runs_in_backward(5, ckpt.Segments(size=2)) == [5, 3, 4, 1, 2]
    assert runs_in_backward(3, ckpt.Segments(size=8)) == [1, 2, 3]


def test_auto_is_the_square_root_of_the_number_of_layers():
    assert runs_in_backward(9, ckpt.Segments()) == [7, 8, 9, 4, 5, 6, 1, 2, 3]
    assert runs_in_backward(2, ckpt.Segments()) == [2, 1]


@INNER
@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_segments_of_any_size_are_exact_with_dropout(size, inner):
    class Dropout(Layer):
        def forward(self, x):
            return x + F.dropout(self.b(F.dropout(F.gelu(self.a(x)), 0.3, self.training)), 0.2, self.training)

    assert_exact(lambda: Stack(*[Dropout() for _ in range(6)]), ckpt.Segments(size=size, inner=inner), steps=3)


class Between(Stack):
    """Does something to the hidden states after every layer."""

    change = staticmethod(lambda x, first: x)

    def forward(self, x):
        first = x
        for layer in self.layers:
            x = self.change(layer(x), first)
        return x


@INNER
@pytest.mark.parametrize(
    "change",
    [
        lambda x, first: x.add_(1),  # in place: the same tensor, another value
        lambda x, first: x + 1,
        lambda x, first: x + first,
        lambda x, first: x.mul_(2) if x.shape[0] == 2 else x,
        lambda x, first: x.transpose(0, 1).contiguous().transpose(0, 1),
    ],
    ids=["add_", "add", "residual", "mul_", "strides"],
)
def test_what_a_model_does_between_layers_is_not_lost(change, inner):
    def make():
        model = Between(*[MLP() for _ in range(6)])
        model.change = change
        return model

    assert_exact(make, ckpt.Segments(size=3, inner=inner), steps=3)


@INNER
def test_a_changed_link_makes_the_layer_hold_its_input(inner):
    """Then each layer is replayed by itself: nothing of the layer before runs for it."""
    order: list[int] = []

    class Noted(MLP):
        def __init__(self, number):
            super().__init__()
            self.number = number

        def forward(self, x):
            order.append(self.number)
            return super().forward(x)

    model = built(lambda: Between(*[Noted(n + 1) for n in range(4)]))
    model.change = lambda x, first: x.add_(1)
    ckpt.apply(model, ckpt.Segments(size=2, inner=inner))
    for _ in range(2):
        loss = model(example().requires_grad_()).sum()
        order.clear()
        loss.backward()
    assert order == [4, 3, 2, 1]


class Routed(Layer):
    """Returns (hidden states, logits); the model gathers the logits, as mixtures of experts do."""

    def forward(self, x, position=0):
        h = self.a(x)
        return x + self.b(h.sin()), h.softmax(-1)


class Gathers(nn.Module):
    def __init__(self, num_layers):
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(num_layers))

    def forward(self, x):
        total = 0
        for position, layer in enumerate(self.layers):
            x, logits = layer(x, position=position)
            total = total + logits.square().mean()
        return x * total


@INNER
def test_side_outputs_that_enter_the_loss_keep_their_gradients(inner):
    assert_exact(lambda: Gathers(6), ckpt.Segments(size=3, inner=inner), steps=3)


class Skips(Stack):
    """Layer dropping: another set of layers at every step."""

    skip = ()

    def forward(self, x):
        for index, layer in enumerate(self.layers):
            if index not in self.skip:
                x = layer(x)
        return x


@INNER
def test_skipped_layers_break_no_segment(inner):
    def before(model, n):
        model.skip = [(), (1,), (0, 2), (2, 3), (5,), ()][n]

    assert_exact(lambda: Skips(*[MLP() for _ in range(6)]), ckpt.Segments(size=3, inner=inner), steps=6, before=before)


class Loops(Stack):
    """A stack that is run through several times (hrm_text, inkling2_loop)."""

    def forward(self, x):
        for _ in range(2):
            for layer in self.layers:
                x = layer(x)
        return x


@INNER
def test_layers_called_several_times_are_exact(inner):
    assert_exact(lambda: Loops(*[MLP() for _ in range(4)]), ckpt.Segments(size=2, inner=inner), steps=3)


@INNER
def test_a_plan_may_keep_ops_inside_a_segment(inner):
    policy = Keep(lambda key: key.path == "a", size=2, inner=inner)
    handle = assert_exact(lambda: Stack(*[MLP() for _ in range(4)]), policy, steps=3)
    assert all(layer.ops_kept == 1 for layer in handle.audit().layers)


@INNER
def test_an_input_of_a_segment_modified_before_backward_is_an_error(inner):
    model = built(lambda: Stack(*[MLP() for _ in range(4)]))
    ckpt.apply(model, ckpt.Segments(size=4, inner=inner))
    for _ in range(2):
        x = example().requires_grad_() * 1
        out = model(x)
        with torch.no_grad():
            x.add_(1)
        with pytest.raises(RuntimeError, match="layer 0 .*modified in place"):
            out.sum().backward()


@INNER
def test_retained_graphs_replay_again(inner):
    plain, patched = built(lambda: Stack(*[MLP() for _ in range(4)])), built(lambda: Stack(*[MLP() for _ in range(4)]))
    ckpt.apply(patched, ckpt.Segments(size=2, inner=inner))
    results = []
    for model in (plain, patched):
        x = example().requires_grad_()
        loss = model(x).sin().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"size": 0}, r"segments: size=0 must be a whole number, 1 or more or \"auto\""),
        ({"size": 2.0}, "segments: size=2.0 must be a whole number"),
        ({"size": True}, "segments: size=True must be a whole number"),
        ({"size": "many"}, "segments: size='many' must be a whole number"),
        ({"inner": "drop"}, "segments: inner='drop' is unknown; it is keep or replay"),
    ],
)
def test_wrong_settings_are_refused_with_what_is_allowed(settings, message):
    with pytest.raises(ValueError, match=message):
        ckpt.Segments(**settings)


def test_a_segment_says_in_its_audit_how_often_its_layers_ran():
    for inner, expected in (("keep", [1, 1, 1, 1]), ("replay", [2, 1, 2, 1])):
        model = built(lambda: Stack(*[MLP() for _ in range(4)]))
        handle = ckpt.apply(model, ckpt.Segments(size=2, inner=inner))
        step(model, example())
        assert [layer.replays for layer in handle.audit().layers] == expected
