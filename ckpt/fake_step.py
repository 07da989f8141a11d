"""One optimizer step, and the same step traced: by the ledger, with the cost of every op and the place of every layer.

Owns the order of a step and what is noted of it. The step is the training loop's (batch, loss, backward, update,
gradients dropped), on real tensors as on fake ones; knows no strategy.

    train_step(model, batches, optimizer, precision)
    trace = traced_step(model, batches, optimizer, precision, marks)
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ckpt.costs import CostMode, in_backward
from ckpt.layers import Layer, unwrapped
from ckpt.ledger import measure
from ckpt.precision import Precision
from ckpt.trace import Mark, Trace

Batch = Mapping[str, Any]


def train_step(
    model: nn.Module,
    batches: Iterable[Batch],
    optimizer: torch.optim.Optimizer | None,
    precision: Precision,
    hold_gradients: bool = False,
) -> None:
    """Run forward and backward of every micro-batch, then the update; gradients are dropped last, unless held.

    Raises ValueError if the model computes no loss.
    """
    for batch in batches:
        loss = getattr(model(**batch, **_no_cache(model, batch)), "loss", None)
        if loss is None:
            raise ValueError(f"{type(unwrapped(model)).__name__} computed no loss: give labels among the inputs")
        loss.backward()
    if optimizer is not None:
        optimizer.step()
        precision.after_step()
    if not hold_gradients:
        precision.zero_grad()


def _no_cache(model: nn.Module, batch: Batch) -> dict[str, bool]:
    """Training needs no cache of keys and values; some models build one unless told."""
    accepted = inspect.signature(unwrapped(model).forward).parameters.values()
    takes = any(p.name == "use_cache" or p.kind is p.VAR_KEYWORD for p in accepted)
    return {"use_cache": False} if takes and "use_cache" not in batch else {}


class LayerMarks:
    """Hooks on a model's layers that tell when the forward and the backward of each begin. They hold no tensor."""

    def __init__(self, layers: Sequence[Layer]):
        self._listener = None
        self._last = layers[-1].index if layers else -1
        for layer in layers:
            layer.module.register_forward_pre_hook(lambda module, args, i=layer.index: self._tell("forward", i))
            layer.module.register_forward_hook(lambda module, args, output, i=layer.index: self._after(i, output))

    @contextmanager
    def to(self, listener, last: int) -> Iterator[None]:
        """Call `listener(kind, layer index)` inside the block; `last` is the layer that the head follows."""
        self._listener, self._last = listener, last
        try:
            yield
        finally:
            self._listener = None

    def _tell(self, kind: str, index: int) -> None:
        # A layer that is run again in backward tells nothing.
        if self._listener is not None and (kind == "backward" or in_backward() == -1):
            self._listener(kind, index)

    def _after(self, index: int, output: Any) -> None:
        if self._listener is None or in_backward() != -1:
            return
        if index == self._last:
            self._tell("head", index)
        found = output if isinstance(output, (tuple, list)) else (output,)
        tensor = next((t for t in found if isinstance(t, torch.Tensor) and t.requires_grad), None)
        if tensor is not None:
            tensor.register_hook(lambda gradient: self._tell("backward", index))


def traced_step(
    model: nn.Module,
    batches: Sequence[Batch],
    optimizer: torch.optim.Optimizer | None,
    precision: Precision,
    hold_gradients: bool,
    layer_marks: LayerMarks,
    places: Mapping[int, int],
) -> Trace:
    """Run one step under the ledger. `places`: number of each layer that takes part, by its index in the whole model.

    Of three micro-batches or more, two are run: the others do the same as the second, and count in the costs.
    """
    marks: list[Mark] = []
    ledger = measure(model, optimizer, inputs=batches)
    costs = CostMode(ledger)

    def mark(kind: str, index: int) -> None:
        marks.append(Mark(kind, index, ledger.position, len(costs.rows)))

    def announced() -> Iterator[Batch]:
        mark("batch", 0)
        yield batches[0]
        if len(batches) > 1:
            mark("batch", 1)
            with costs.counting(len(batches) - 1):
                yield batches[1]

    last = max(places, key=places.get) if places else -1
    with _no_collection(), layer_marks.to(lambda kind, i: mark(kind, places[i]), last), ledger, costs:
        train_step(model, announced(), optimizer, precision, hold_gradients)
    return _trace(ledger, costs, marks)


def _trace(ledger: Any, costs: CostMode, marks: list[Mark]) -> Trace:
    timeline = ledger.full_timeline
    return Trace(
        start=timeline.bytes[0],
        deltas=np.diff(timeline.bytes, axis=0),
        host=np.diff(ledger.full_host),
        phase=timeline.phase[1:],
        rows=costs.rows,
        marks=marks,
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the cycle collector from choosing when tensors die: two equal steps are then equal event by event."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
