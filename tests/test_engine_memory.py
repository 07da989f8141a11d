"""What is alive, counted: kept bytes, layer inputs, and nothing that outlives its step.

Legend: B batch, T tokens, D hidden size, L layers.
"""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from engine_kit import MLP, Keep, Layer, Stack, all_strategies, built, example
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import ckpt
from ckpt.engine.frame import Frame
from ckpt.ledger import measure

STRATEGIES = all_strategies()


class Dropout(Layer):
    def forward(self, x):
        return x + F.dropout(self.b(F.dropout(F.gelu(self.a(x)), 0.3, self.training)), 0.2, self.training)


class Alive(TorchDispatchMode):
    """Counts, at every op, how many of the noted storages are alive; remembers the most."""

    def __init__(self):
        super().__init__()
        self.most = 0
        self._noted: dict[int, StorageWeakRef] = {}

    def note(self, tensor: torch.Tensor) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._noted.setdefault(reference.cdata, reference)

    def now(self) -> int:
        self._noted = {cdata: ref for cdata, ref in self._noted.items() if not ref.expired()}
        return len(self._noted)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.most = max(self.most, self.now())
        return func(*args, **(kwargs or {}))


def most_inputs_alive(strategy, num_layers: int, phase: str) -> int:
    """Return the most layer inputs alive at once in a phase of the second step, re-made ones included."""
    alive = Alive()

    class Noting(Layer):
        def forward(self, x):
            alive.note(x)
            return (x + self.b(F.gelu(self.a(x)))).sin()

    model = built(lambda: Stack(*[Noting() for _ in range(num_layers)]))
    ckpt.apply(model, strategy)
    for _ in range(2):
        loss, alive.most = None, 0
        with alive:
            loss = model(example().requires_grad_()).sum()
        if phase == "forward":
            continue
        alive.most = 0
        with alive:
            loss.backward()
    return alive.most


def test_sixteen_layers_in_segments_of_four_hold_at_most_eight_inputs():
    assert most_inputs_alive(ckpt.Segments(size=4, inner="replay"), 16, "backward") <= 8
    assert most_inputs_alive(ckpt.Full(), 16, "backward") == 16


@pytest.mark.parametrize("size, segments", [(4, 4), (3, 6), (5, 4), (1, 16), (16, 1)])
def test_a_segment_holds_one_input(size, segments):
    """At the end of forward: one input a segment, and the one that the running layer reads."""
    for inner in ("keep", "replay"):
        most = most_inputs_alive(ckpt.Segments(size=size, inner=inner), 16, "forward")
        assert segments <= most <= segments + 1, inner


def test_auto_segments_are_about_the_square_root_of_the_layers():
    assert most_inputs_alive(ckpt.Segments(inner="replay"), 16, "backward") <= 8
    assert most_inputs_alive(ckpt.Segments(), 9, "forward") <= 4


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("with_backward", [True, False], ids=["trained", "dropped"])
def test_fifty_steps_leave_nothing_alive(strategy, with_backward):
    """The collector is off: a step may not even leave a cycle behind."""
    model = built(lambda: Stack(*[Dropout() for _ in range(4)]))
    handle = ckpt.apply(model, STRATEGIES[strategy])

    def one_step():
        loss = model(example()).sum()
        if with_backward:
            loss.backward()
            model.zero_grad(set_to_none=True)

    def living() -> tuple[int, int]:
        objects = gc.get_objects()
        return sum(issubclass(type(o), torch.Tensor) for o in objects), sum(type(o) is Frame for o in objects)

    gc.collect()
    _, others = living()  # a failure elsewhere keeps its frames in a traceback
    gc.disable()
    try:
        for _ in range(3):
            one_step()
        before = living()
        for _ in range(47):
            one_step()
        assert living() == before
        assert before[1] == others
    finally:
        gc.enable()
    if handle.store is not None:
        assert handle.store.bytes_now == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_ledger_sees_the_same_peak_at_the_last_step_as_at_the_second(strategy):
    model = built(lambda: Stack(*[Dropout() for _ in range(4)]))
    ckpt.apply(model, STRATEGIES[strategy])
    x = example(2, 64, 8)
    peaks = []
    for _ in range(12):
        with measure(model, inputs=[x]) as ledger:
            model(x).sum().backward()
        model.zero_grad(set_to_none=True)
        peaks.append((ledger.peak_bytes, ledger.end_bytes))
    assert len(set(peaks[1:])) == 1


@pytest.mark.parametrize("strategy", ["full", "segments_keep", "segments_replay", "keep_mm", "keep_all"])
def test_layers_that_are_recorded_at_every_call_leave_nothing_alive(strategy):
    class Looks(Layer):
        def forward(self, x):
            h = self.a(x)
            return self.b(h.sin() if h.mean().item() > 0 else h.cos() * h)

    model = built(lambda: Stack(*[Looks() for _ in range(4)]))
    ckpt.apply(model, STRATEGIES[strategy])
    gc.collect()
    gc.disable()
    try:
        counts = []
        for n in range(8):
            model(example()).sum().backward()
            model.zero_grad(set_to_none=True)
            if n in (1, 7):
                counts.append(sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects()))
        assert counts[0] == counts[1]
    finally:
        gc.enable()


def test_programs_of_many_lengths_are_forgotten_beyond_a_limit():
    from ckpt.engine.region import MAX_PROGRAMS

    model = built(lambda: Stack(MLP()))
    handle = ckpt.apply(model, "full")
    for t in range(1, MAX_PROGRAMS + 5):
        model(example(1, t, 8).requires_grad_()).sum().backward()
    assert len(handle.regions[0].programs) == MAX_PROGRAMS


# ---- bytes ---------------------------------------------------------------------------------------------------------


def held_after_forward(num_layers: int, strategy, dtype=torch.bfloat16) -> int:
    """Return the bytes alive between forward and backward of the second step, beside the model and its input."""
    model = built(lambda: Stack(*[MLP(width=16) for _ in range(num_layers)]).to(dtype))
    ckpt.apply(model, strategy)
    x = example(2, 32, 16).to(dtype).requires_grad_()
    model(x).sum().backward()
    model.zero_grad(set_to_none=True)
    x.grad = None
    with measure(model, inputs=[x]) as ledger:
        loss = model(x).sum()
    del loss
    return ledger.end_bytes


def test_full_holds_one_bf16_activation_a_layer():
    """B * T * D * 2 bytes each, and nothing else that grows with the layers."""
    B, T, D = 2, 32, 16
    few, many = held_after_forward(4, ckpt.Full()), held_after_forward(7, ckpt.Full())
    parameters = 3 * 2 * 16 * 16 * 2
    assert many - few - parameters == 3 * B * T * D * 2


def test_one_kept_output_costs_one_activation_a_layer():
    B, T, D = 2, 32, 16
    kept = Keep(lambda key: (key.path, key.op, key.nth) == ("a", "mm", 0))
    for num_layers in (1, 4):
        more = held_after_forward(num_layers, kept) - held_after_forward(num_layers, ckpt.Full())
        assert more == num_layers * B * T * D * 2


def test_the_audit_counts_kept_ops_and_bytes():
    B, T, D = 2, 5, 8
    expected = {
        "none kept": (Keep(lambda key: False), 0, 0),
        "one kept": (Keep(lambda key: str(key) == "a/mm#0"), 1, B * T * D * 4),
        # gelu saves its input and the second matmul its own; the sum is saved by nobody
        "all kept": (Keep(), 2, 2 * B * T * D * 4),
    }
    for name, (policy, num_ops, num_bytes) in expected.items():
        model = built(lambda: Stack(MLP(), MLP(), MLP()))
        handle = ckpt.apply(model, policy)
        for _ in range(2):
            model(example(B, T, D).requires_grad_()).sum().backward()
            for layer in handle.audit().layers:
                assert (layer.ops_kept, layer.kept_bytes) == (num_ops, num_bytes), name
        assert handle.audit().kept_bytes == 3 * num_bytes


def test_a_kept_output_that_neither_backward_nor_replay_needs_is_not_held():
    """The last matmul of a layer: TERRAIN calls it dead weight."""
    policy = Keep(lambda key: str(key) == "b/mm#0")
    model = built(lambda: Stack(MLP(), MLP()))
    handle = ckpt.apply(model, policy)
    model(example().requires_grad_()).sum().backward()
    assert handle.audit().kept_bytes == 0
