"""What a ledger hangs on a model's surroundings, and takes off again: storage resizes, optimizer steps.

Owns the knowledge of what an optimizer may look like. Knows no residents: `ckpt/ledger.py` decides what things are.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ckpt.live import LiveBytes
from ckpt.tensors import tensors_in


@contextmanager
def storage_resizes(mode: LiveBytes) -> Iterator[None]:
    """Report `storage.resize_` to `mode` (FSDP frees parameters with it): it is no op, so no dispatch mode sees it."""
    cls = torch.UntypedStorage
    before, original = vars(cls).get("resize_"), cls.resize_

    @functools.wraps(original)
    def resize_(storage: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        result = original(storage, *args, **kwargs)
        mode.resized(storage)
        return result

    cls.resize_ = resize_
    try:
        yield
    finally:
        if before is None:
            del cls.resize_
        else:
            cls.resize_ = before


def compiled_modules(model: nn.Module) -> Iterator[str]:
    """Yield the names of compiled modules, by torch.compile(model) or model.compile()."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")  # importing it takes a second, and is what compiling does
    for name, module in model.named_modules():
        is_compiled = dynamo is not None and isinstance(module, dynamo.OptimizedModule)
        if is_compiled or module._compiled_call_impl is not None:
            yield name or type(module).__name__


def steppers(optimizer: Any) -> list[Any]:
    """The objects whose `.step` is an optimizer step: the optimizer given and optimizers it holds (wrappers, lists)."""
    found: dict[int, Any] = {}

    def visit(obj: Any, is_top: bool) -> None:
        if isinstance(obj, list | tuple):
            for item in obj:
                visit(item, is_top)
        elif obj is not None and id(obj) not in found and (is_top or isinstance(obj, torch.optim.Optimizer)):
            if not callable(getattr(obj, "step", None)):
                raise ValueError(f"measure got an optimizer without step(): {type(obj).__name__}. Give it, or None.")
            found[id(obj)] = obj
            for value in list(getattr(obj, "__dict__", {}).values()):
                visit(value, False)

    visit(optimizer, True)
    return list(found.values())


def optimizer_tensors(optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield what optimizers hold: state, parameters of their own (the model's among them), a wrapper's attributes."""
    for stepper in steppers(optimizer):
        for value in list(vars(stepper).values()):
            yield from tensors_in(value)


def wrap_step(stepper: Any, before: Callable[[], None], after: Callable[[], None]) -> Callable[[], None]:
    """Call `before` and `after` around `stepper.step` of one object; returns the undo."""
    step, own = stepper.step, vars(stepper).get("step")

    @functools.wraps(step)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before()
        try:
            return step(*args, **kwargs)
        finally:
            after()

    stepper.step = wrapped

    def undo() -> None:
        if own is None:
            del stepper.step
        else:
            stepper.step = own

    return undo
