"""Live bytes by storage: a dispatch mode that adds a storage when it is first seen and subtracts it when it dies.

Owns the log of one step: which storages came and went, in which phase, and what each may turn out to be. Must not know
models or optimizers (that is `ckpt/ledger.py`), and holds only weak references, so it keeps no tensor alive.
It reads sizes alone, hence works the same on real and on fake tensors.

    with LiveBytes(torch.device("cpu")) as live: step()
    live.device_bytes
"""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt.tensors import flat_tensors, storages_of
from ckpt.timeline import ACTIVATIONS, BACKWARD, FORWARD, HOST, OPTIMIZER_STEP, WORKSPACE

# Made between a backward and the next forward, outside the optimizer (the next micro-batch, or clipping's scratch):
# activations if a forward uses it, else workspace.
BETWEEN = 6

aten = torch.ops.aten
current_graph_task = torch._C._current_graph_task_id
current_node = torch._C._current_autograd_node


def _python_kernel(func: Any, args: tuple, types: Iterable[type]) -> Callable | None:
    """Return the Python function behind a torch.library.custom_op about to run on real tensors, None for other ops.

    Calling it here brings the op's scratch into view, as dispatch to the op itself would not (our packed attention with
    a soft cap holds blocks of scores). Under fake tensors such an op has a shape and no inside, unless its definition's
    `is_walked(args)` says that it can be run there too.
    """
    if (
        getattr(func, "namespace", "aten") == "aten"
        or (definition := OPDEFS.get(func.name().partition(".")[0])) is None
    ):
        return None
    is_fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    if is_fake or any(issubclass(t, FakeTensor) for t in types):
        is_walked = getattr(definition, "is_walked", None)
        if is_walked is None or not is_walked(args):
            return None
    kernels = definition._backend_fns
    device = next((t.device.type for t in flat_tensors(args)), None)
    return kernels.get(device) or kernels.get(None)


class LiveBytes(TorchDispatchMode):
    """Log every storage of `device`'s type that an op touches, and its end.

    phase: FORWARD, BACKWARD or OPTIMIZER_STEP, in which the next change is logged. The owner announces forwards and
    optimizer steps (`enter_forward`, `enter_optimizer`); backward is read off autograd.
    """

    supports_higher_order_operators = True  # flex_attention and the like pass through; their results are counted

    def __init__(self, device: torch.device):
        super().__init__()
        self.device_type = device.type
        self.phase = FORWARD
        self.device_bytes = 0
        self.host_bytes = 0
        self.deltas = array("q")  # one entry a change: bytes, storage id, phase
        self.ids = array("q")
        self.phases = bytearray()
        self.residents = bytearray()  # one entry a storage id
        self._sizes = array("q")
        self._births = array("q")  # serial of the autograd node at work when the storage appeared
        self._live: dict[int, tuple[int, weakref.ref]] = {}  # StorageImpl address -> id, weak reference
        self._forward_depth = self._optimizer_depth = 0
        self._optimizer_task = -1
        self._node: tuple[str, int] | None = None
        self._node_serial = 0
        self._join: frozenset[int] | None = None

    # -- the log ------------------------------------------------------------------------------------------------------

    def _log(self, index: int, delta: int) -> None:
        self.deltas.append(delta)
        self.ids.append(index)
        self.phases.append(self.phase)
        if self.residents[index] == HOST:
            self.host_bytes += delta
        else:
            self.device_bytes += delta

    def new_id(self, resident: int) -> int:
        """Open an account that is no storage (bytes that only the caller sees); change it with `change`."""
        self.residents.append(resident)
        self._sizes.append(0)
        self._births.append(self._node_serial)
        return len(self.residents) - 1

    def change(self, index: int, delta: int) -> None:
        """Log `delta` bytes on an account."""
        self._join = None
        self._sizes[index] += delta
        self._log(index, delta)

    def _see(self, storage: torch.UntypedStorage, resident: int) -> tuple[int, bool]:
        """Return the storage's id and whether it is new; log it if so."""
        key = storage._cdata
        known = self._live.get(key)
        if known is not None:
            return known[0], False
        index = self.new_id(resident)
        self._live[key] = (index, weakref.ref(storage, lambda _: self._freed(key, index)))
        self.change(index, storage.nbytes())
        return index, True

    def _freed(self, key: int, index: int) -> None:
        self._live.pop(key, None)
        size, join, self._join = self._sizes[index], self._join, None
        self._sizes[index] = 0
        self._log(index, -size)
        # Under any dispatch mode autograd joins two gradients out of place (TensorSubclassLikeUtils.h); on plain
        # tensors it adds into the older one. Put the older one's end before the sum, as in the step we speak for.
        if join and index in join and size == self.deltas[-2] and self._births[index] != self._node_serial:
            for log in (self.deltas, self.ids):
                log[-1], log[-2] = log[-2], log[-1]

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Log the new size of a storage that is tracked; call after any in-place resize."""
        known = self._live.get(storage._cdata)
        if known is not None and (delta := storage.nbytes() - self._sizes[known[0]]):
            self.change(known[0], delta)

    def claim(self, tensor: torch.Tensor, resident: int) -> None:
        """Say what a tensor's storages are. Of several claims the lowest number stands (see RESIDENTS)."""
        for storage, device in storages_of(tensor):
            if resident != HOST and device.type != self.device_type:
                continue
            index, _ = self._see(storage, resident)
            if resident == HOST and self.residents[index] != HOST:
                self.device_bytes -= self._sizes[index]
                self.host_bytes += self._sizes[index]
                self.residents[index] = HOST
            elif resident < self.residents[index] != HOST:
                self.residents[index] = resident

    def final_residents(self) -> bytes:
        """One resident a storage id, with what stayed open decided."""
        return self.residents.replace(bytes([BETWEEN]), bytes([WORKSPACE]))

    def drop(self) -> None:
        """Forget the living storages, so that their end is no longer logged."""
        self._live.clear()

    # -- phases -------------------------------------------------------------------------------------------------------

    def enter_forward(self) -> bool:
        """Announce a forward of the whole model; False if it is a replay inside backward, which stays backward."""
        if not self._forward_depth and current_graph_task() != -1:
            return False
        self._forward_depth += 1
        self.phase = FORWARD
        return True

    def leave_forward(self) -> None:
        """End what `enter_forward` began."""
        self._forward_depth -= 1

    def enter_optimizer(self) -> None:
        """Announce an optimizer step."""
        if not self._optimizer_depth:
            self._optimizer_task = current_graph_task()
        self._optimizer_depth += 1
        self.phase = OPTIMIZER_STEP

    def leave_optimizer(self) -> None:
        """End what `enter_optimizer` began."""
        self._optimizer_depth -= 1

    def _advance(self) -> int:
        """Set the phase for the op about to run; return the resident a new storage starts as."""
        task = current_graph_task()
        if self._forward_depth:
            self.phase = FORWARD
        elif self._optimizer_depth and task == self._optimizer_task:
            self.phase = OPTIMIZER_STEP
        elif task != -1:
            self.phase = BACKWARD
            node = current_node()
            name = (node.name(), node._sequence_nr()) if node is not None else None
            if name != self._node:
                self._node, self._node_serial = name, self._node_serial + 1
        elif self.phase != FORWARD:
            if not torch.is_grad_enabled():
                self.phase = OPTIMIZER_STEP  # clipping and hand-written updates follow backward under no_grad
            return BETWEEN
        return ACTIVATIONS if self.phase == FORWARD else WORKSPACE

    # -- ops ----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # let the subclass (DTensor) unwrap itself: its inner ops come back here
        self._join = None
        resident = self._advance()
        kernel = _python_kernel(func, args, types)
        if kernel is None:
            out = func(*args, **(kwargs or {}))
        else:
            with self:
                out = kernel(*args, **(kwargs or {}))
            self._join = None
        given = flat_tensors(args) + (flat_tensors(list(kwargs.values())) if kwargs else [])
        made = flat_tensors(out)
        if resident == BETWEEN and self._starts_forward(given, made):
            self.phase, resident = FORWARD, ACTIVATIONS
        schema = getattr(func, "_schema", None)
        if schema is not None and schema.is_mutable:
            for tensor in given:
                for storage, _ in storages_of(tensor):
                    self.resized(storage)
        for tensor in given:
            self._touch(tensor, resident)
        new = [index for tensor in made for index in self._touch(tensor, resident)]
        if func is aten.add.Tensor and self.phase == BACKWARD and len(new) == 1 and len(given) == 2:
            known = (self._live.get(s._cdata) for t in given for s, _ in storages_of(t))
            self._join = frozenset(entry[0] for entry in known if entry is not None)
        return out

    def _touch(self, tensor: torch.Tensor, resident: int) -> list[int]:
        """See a tensor that an op took or made; return the ids of the storages that are new."""
        new = []
        for storage, device in storages_of(tensor):
            if device.type != self.device_type:
                continue
            index, is_new = self._see(storage, resident)
            if is_new:
                new.append(index)
            elif self.phase == FORWARD and self.residents[index] == BETWEEN:
                self.residents[index] = ACTIVATIONS
        return new

    def _starts_forward(self, given: list[torch.Tensor], made: list[torch.Tensor]) -> bool:
        """Whether an op after backward begins a forward that nobody announced (submodules called directly).

        It does if autograd records it and its result is a new storage (`loss.detach()` for a log line is none).
        """
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in given):
            return False
        return any(s._cdata not in self._live for t in made for s, _ in storages_of(t))
