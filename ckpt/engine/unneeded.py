"""Ops of a part that is run again and differentiated at once whose results nobody asks for, such as the matmul of an
MLP's last linear layer: they are skipped.

The first run is recorded, op by op; what autograd saved of it says which ops are needed (`ckpt/engine/liveness.py`).
Later runs skip the others. A part whose values may flow past the record is run as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt.engine.actions import Mismatch, Skip, reads_placeholder
from ckpt.engine.bypass import python_functions
from ckpt.engine.liveness import Analysis, liveness
from ckpt.engine.ops import IGNORED, is_parameter_cast
from ckpt.engine.record import Record, Recorder

# Batches of many lengths each need a record of their own.
_MAX_SITUATIONS = 32


class Unneeded:
    """What is skipped, by the shape and the circumstances of a run."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known | None] = {}

    def run(
        self,
        function: Callable[[torch.Tensor], torch.Tensor],
        leaf: torch.Tensor,
        modules: Sequence[nn.Module],
        situation: Any,
    ) -> torch.Tensor:
        """Return `function(leaf)` with its graph. Its own values may be missing: they are for `autograd.grad` alone."""
        key = leaf.shape, leaf.stride(), leaf.dtype, leaf.device, situation
        if key not in self._known:
            if len(self._known) >= _MAX_SITUATIONS:
                self._known.pop(next(iter(self._known)))
            output, self._known[key] = _record(function, leaf, modules)
            return output
        known = self._known[key]
        if known is not None:
            try:
                with torch.enable_grad(), _SkipDead(known):
                    return function(leaf)
            except Mismatch:
                self._known[key] = None
        with torch.enable_grad():
            return function(leaf)


class _Known:
    """The ops of one run, and what stands in for those that are dead."""

    def __init__(self, record: Record, skips: dict[int, Skip]):
        self.functions = [op.func for op in record.ops]
        self.skips = skips


class _SkipDead(TorchDispatchMode):
    def __init__(self, known: _Known):
        super().__init__()
        self._known, self._index = known, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in IGNORED or is_parameter_cast(func, args):
            return func(*args, **kwargs)
        index, self._index = self._index, self._index + 1
        if index >= len(self._known.functions) or self._known.functions[index] is not func:
            raise Mismatch
        skip = self._known.skips.get(index)
        if skip is not None:
            return skip(None, args, kwargs)
        if reads_placeholder(args, kwargs):
            raise Mismatch
        return func(*args, **kwargs)


def _record(function, leaf, modules) -> tuple[torch.Tensor, _Known | None]:
    recorder = Recorder(nn.ModuleList(modules), [leaf])

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        recorder.saved(tensor)
        # An output saved as it is would tie its node into a cycle.
        return tensor if tensor.is_leaf else tensor.detach()

    with saved_tensors_hooks(pack, lambda packed: packed), torch.enable_grad(), recorder:
        output = function(leaf)
    record = recorder.finish()
    record.custom_functions = python_functions(output, [leaf])
    skips = _dead(record)
    return output, _Known(record, skips) if any(record.ops[i].flops for i in skips) else None


def _dead(record: Record) -> dict[int, Skip]:
    """Return, by op, what stands in for it. Nothing is skipped of a record that may not show all."""
    if record.is_opaque or record.has_random or record.is_data_dependent or not record.saved:
        return {}
    made = [n for n, saved in enumerate(record.saved) if record.producer[saved.storage] >= 0]
    end = max((record.saved[n].at for n in made), default=0)
    live = liveness(record, Analysis(record, {}), made) if made else None
    skips = {}
    for op in record.ops:
        runs = op.index < end and live.runs[op.index]
        if op.writes and not runs:
            return {}
        if not runs and not (op.is_view and all(s in live.real for s in op.reads)):
            skips[op.index] = Skip(op)
    return skips
