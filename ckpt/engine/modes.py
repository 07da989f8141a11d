"""The dispatch modes of a layer call: one replays it by a program, one captures outputs that autograd does not save.

Both number the ops as the record does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt.engine.actions import (
    Feed,
    Mismatch,
    RunOnCopies,
    Skip,
    is_placeholder,
    reads_placeholder,
    same_storage,
)
from ckpt.engine.ops import IGNORED, is_parameter_cast, written_arguments
from ckpt.engine.program import Pack, Program, Stage

if TYPE_CHECKING:
    from ckpt.engine.frame import Frame


class Replay(TorchDispatchMode):
    """Run, skip or feed each op as the stage says."""

    def __init__(self, frame: Frame, stage: Stage):
        super().__init__()
        self._frame = frame
        self._actions = stage.actions
        self._wanted, self._fed = stage.wanted, stage.fed_storages
        self._ops = frame.program.record.ops
        self._index = 0
        self.ops_run = 0
        self.failed = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in IGNORED or is_parameter_cast(func, args):
            return func(*args, **kwargs)
        index = self._index
        self._index = index + 1
        if self.failed or index >= len(self._ops) or self._ops[index].func is not func:
            self._fail()
        action = self._actions.get(index)
        if isinstance(action, (Skip, Feed)):
            return action(self._frame, args, kwargs)
        if action is not None:
            self.ops_run += isinstance(action, RunOnCopies)
            try:
                return action(self._frame, args, kwargs)
            except Mismatch:
                self._fail()
        # The ops are those of the record, but what they are applied to may not be.
        writes = self._ops[index].writes
        if reads_placeholder(args, kwargs) or (writes and self._writes_what_is_fed(func, args, kwargs)):
            self._fail()
        self.ops_run += 1
        return func(*args, **kwargs)

    def check_saved(self, n: int, tensor: torch.Tensor) -> None:
        """Refuse a saved tensor that shows that other values flow here than in the record."""
        frame = self._frame
        if frame.program.packs[n] is Pack.FEED:
            storage = frame.program.record.saved[n].storage
            if storage in self._fed and not frame.is_held(storage, tensor):
                self._fail()
        elif n in self._wanted and is_placeholder(tensor):
            self._fail()

    def _writes_what_is_fed(self, func, args, kwargs) -> bool:
        held = [tensor for tensor, _ in self._frame.held.values()]
        return any(same_storage(t, h) for t in written_arguments(func, args, kwargs) for h in held)

    def _fail(self):
        self.failed = True
        raise Mismatch


class Capture(TorchDispatchMode):
    """Hold the outputs of some ops, by number."""

    def __init__(self, frame: Frame, program: Program):
        super().__init__()
        self._frame = frame
        self._ops = program.record.ops
        self._wanted = {program.record.producer[s] for s in program.captures}
        self._storages = set(program.captures)
        self._index = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func in IGNORED or is_parameter_cast(func, args):
            return out
        index = self._index
        self._index = index + 1
        if index >= len(self._ops) or self._ops[index].func is not func:
            self._wanted = frozenset()  # another path than the recorded one: the numbers mean nothing from here on
        if index in self._wanted:
            op = self._ops[index]
            for meta, tensor in zip(op.outputs, [out] if op.single_output else out, strict=True):
                if meta is not None and meta.storage in self._storages:
                    self._frame.hold(meta.storage, tensor.detach())
        return out
