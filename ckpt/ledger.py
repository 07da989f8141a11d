"""The memory ledger of one training step: exact live bytes by storage, split into five residents.

Owns `measure` and `Ledger`. Knows modules and optimizers; must not know strategies or the engine, so that a measured
step and a predicted one (fake tensors) pass through the same code.

    with ckpt.measure(model, optimizer, inputs=batch) as ledger:
        step()                                   # forward, backward, optimizer step
    ledger.peak_bytes, ledger.residents, ledger.timeline

What the residents are (each storage is one of them for its whole life, decided when the step is over):

parameters       parameters and buffers of the model
gradients        whatever is some parameter's `.grad`, from the moment its storage was made
optimizer_state  what the optimizer holds after its step, and parameters of its own (fp32 master weights)
activations      the rest of what forward made, the inputs included, whether or not backward needs it
workspace        the rest of what backward (replayed layers included) and the optimizer made

CPU and fake tensors: peak_bytes counts the bytes of storages that ops take and return, as an unobserved step holds them
(tests compare it with the profiler's allocation events and with the process's resident set). Scratch inside a kernel is
not in it. CUDA: peak_bytes is the allocator's peak; what the ledger does not see of it (rounding, kernel workspaces)
is workspace.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from ckpt.ledger_hooks import compiled_modules, optimizer_tensors, steppers, storage_resizes, wrap_step
from ckpt.live import LiveBytes
from ckpt.tensors import no_shape_propagation, tensors_in
from ckpt.timeline import (
    ACTIVATIONS,
    GRADIENTS,
    HOST,
    OPTIMIZER_STATE,
    PARAMETERS,
    PHASES,
    RESIDENTS,
    WORKSPACE,
    Timeline,
    resolve,
)

MAX_TIMELINE_POINTS = 20_000


def measure(model: nn.Module, optimizer: Any = None, *, inputs: Any = ()) -> Ledger:
    """Measure one step run inside the returned context.

    model: the module trained; its device is the one measured (CPU, CUDA, or fake tensors standing for either).
    optimizer: a torch optimizer, a wrapper around one (anything with `.step`), or a list of them; None for no step.
    inputs: the batch, in any nesting of mappings and sequences. What is given counts from the start, as activations;
    tensors not given count from the first op that uses them.

    Under fake tensors enter FakeTensorMode first. Raises ValueError for a model that is no module, lives on meta, or
    holds compiled code on a CPU (whose allocations no dispatch mode sees), and where a ledger is open already.
    """
    return Ledger(model, optimizer, inputs=inputs)


def current() -> Ledger | None:
    """Return the ledger that is open around the caller, if any (an offload engine books host bytes on it)."""
    for mode in reversed(_get_current_dispatch_mode_stack()):
        if isinstance(mode, _LedgerMode):
            return mode.ledger
    return None


class _LedgerMode(LiveBytes):
    """The dispatch mode of a ledger, which knows its ledger so that `current` needs no global."""

    def __init__(self, device: torch.device, ledger: Ledger):
        super().__init__(device)
        self.ledger = ledger


class Ledger:
    """A step's live bytes. Use once, as a context; the results stand when the context has closed, also after an error.

    peak_bytes: most bytes alive at once. residents: the five shares of them, in the order of RESIDENTS; they sum to it.
    peak_phase: forward, backward or optimizer. start_bytes, end_bytes: alive when the step began and ended.
    timeline: see Timeline, at most MAX_TIMELINE_POINTS points; full_timeline: every change.
    host_bytes, disk_bytes: most bytes offloaded at once to the host's memory and to disk (not in peak_bytes);
    full_host: (N,) offloaded bytes, wherever they are, along full_timeline.
    tracked_peak_bytes: the ledger's own peak; equals peak_bytes except on CUDA, where peak_bytes is
    peak_allocated_bytes, the allocator's, and peak_reserved_bytes stands beside it (None elsewhere).
    """

    peak_bytes: int
    residents: dict[str, int]
    peak_phase: str
    start_bytes: int
    end_bytes: int
    timeline: Timeline
    full_timeline: Timeline
    full_host: np.ndarray
    host_bytes: int
    disk_bytes: int
    tracked_peak_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None

    def __init__(self, model: nn.Module, optimizer: Any = None, *, inputs: Any = ()):
        if not isinstance(model, nn.Module):
            raise ValueError(f"measure needs an nn.Module, got {type(model).__name__}. Give the model that is trained.")
        tensors = [*model.parameters(), *model.buffers(), *tensors_in(inputs)]
        self.device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
        if self.device.type == "meta":
            raise ValueError(
                "measure got a model on the meta device, whose tensors have no bytes. "
                "Swap its parameters for fake ones (ckpt.predict does) or move it to a real device."
            )
        if self.device.type == "cpu" and (compiled := next(compiled_modules(model), None)) is not None:
            raise ValueError(
                f"measure cannot see what compiled code allocates on a CPU ({compiled} is compiled). "
                "Measure the model before torch.compile, or on CUDA, whose allocator reports it."
            )
        steppers(optimizer)  # refuses what is no optimizer, before anything is hooked
        self._has_allocator = self.device.type == "cuda" and not any(isinstance(t, FakeTensor) for t in tensors)
        self.model, self.optimizer, self._inputs = model, optimizer, inputs
        self._mode: _LedgerMode | None = None
        self._stack = ExitStack()
        self._num_before = 0
        self._away_accounts: dict[bool, int] = {}  # on disk or not

    # -- while the step runs ------------------------------------------------------------------------------------------

    @property
    def live_bytes(self) -> int:
        """Bytes alive on the device at this moment of the step."""
        return self._open().device_bytes

    @property
    def position(self) -> int:
        """Changes logged since the step began: the index in `full_timeline` of the state at this moment."""
        return len(self._open().deltas) - self._num_before

    def note_host(self, delta: int, on_disk: bool = False) -> None:
        """Book bytes that an offload engine holds outside tensors (a pinned pool, a file); negative when given back."""
        mode = self._open()
        if on_disk not in self._away_accounts:
            self._away_accounts[on_disk] = mode.new_id(HOST)
        mode.change(self._away_accounts[on_disk], delta)

    def count_as_host(self, tensor: torch.Tensor) -> None:
        """Count a tensor's storage as offloaded, until it is freed, instead of as live on the device."""
        self._open().claim(tensor, HOST)

    def _open(self) -> _LedgerMode:
        if self._mode is None:
            raise RuntimeError("this ledger is not open. Use it inside `with ckpt.measure(...) as ledger:`.")
        return self._mode

    def __enter__(self) -> Ledger:
        if current() is not None:
            raise ValueError("a ledger is open already, and two would count the same step. Close the outer one first.")
        if hasattr(self, "peak_bytes") or self._mode is not None:
            raise ValueError("a ledger measures one step. Call ckpt.measure again for another.")
        self._mode = mode = _LedgerMode(self.device, self)
        self._claim_known()
        for tensor in tensors_in(self._inputs):
            mode.claim(tensor, ACTIVATIONS)
        self._inputs = ()
        self._num_before = len(mode.deltas)
        with ExitStack() as stack:
            self._hook_model(stack)
            self._hook_optimizer(stack)
            stack.enter_context(storage_resizes(mode))
            stack.enter_context(no_shape_propagation())
            if self._has_allocator:
                torch.cuda.synchronize(self.device)
                torch.cuda.reset_peak_memory_stats(self.device)
            stack.enter_context(mode)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()
        mode, self._mode = self._mode, None
        self._claim_known(mode)
        mode.drop()
        self._close(mode)
        self.model = self.optimizer = None

    # -- who is who ---------------------------------------------------------------------------------------------------

    def _claim_known(self, mode: _LedgerMode | None = None) -> None:
        """Claim what the model and the optimizer hold at this moment."""
        mode = mode or self._open()
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            mode.claim(tensor, PARAMETERS)
        self._claim_gradients(mode)
        for tensor in optimizer_tensors(self.optimizer):
            mode.claim(tensor, OPTIMIZER_STATE)

    def _claim_gradients(self, mode: _LedgerMode) -> None:
        for parameter in (*self.model.parameters(), *optimizer_tensors(self.optimizer)):
            # Reading .grad of a non-leaf warns; optimizer state never has one.
            if parameter.is_leaf and parameter.grad is not None:
                mode.claim(parameter.grad, GRADIENTS)

    def _hook_model(self, stack: ExitStack) -> None:
        """Announce forwards of the model, and claim each gradient as autograd hands it over."""
        mode, depth = self._open(), []

        def before(*_: Any) -> None:
            depth.append(mode.enter_forward())

        def after(*_: Any) -> None:
            if depth and depth.pop():
                mode.leave_forward()

        def handed_over(parameter: torch.Tensor) -> None:
            if parameter.grad is not None:
                mode.claim(parameter.grad, GRADIENTS)

        stack.callback(self.model.register_forward_pre_hook(before, prepend=True).remove)
        stack.callback(self.model.register_forward_hook(after, always_call=True).remove)
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.is_leaf:
                stack.callback(parameter.register_post_accumulate_grad_hook(handed_over).remove)

    def _hook_optimizer(self, stack: ExitStack) -> None:
        """Announce optimizer steps, of the optimizer given and of those it wraps."""
        mode = self._open()

        def before(*_: Any) -> None:
            self._claim_gradients(mode)
            mode.enter_optimizer()

        def after(*_: Any) -> None:
            for tensor in optimizer_tensors(self.optimizer):
                mode.claim(tensor, OPTIMIZER_STATE)
            mode.leave_optimizer()

        for stepper in steppers(self.optimizer):
            if "_optimizer_step_pre_hooks" in vars(stepper):
                stack.callback(stepper.register_step_pre_hook(before).remove)
                stack.callback(stepper.register_step_post_hook(after).remove)
            else:
                stack.callback(wrap_step(stepper, before, after))

    # -- when it is over ----------------------------------------------------------------------------------------------

    def _close(self, mode: _LedgerMode) -> None:
        residents = np.frombuffer(mode.final_residents(), dtype=np.int8)
        ids = np.frombuffer(mode.ids, dtype=np.int64)
        deltas = np.frombuffer(mode.deltas, dtype=np.int64)
        phases = np.frombuffer(bytes(mode.phases), dtype=np.int8)
        self.full_timeline, host = resolve(deltas, residents[ids], phases, self._num_before)
        self.timeline = self.full_timeline.thin(MAX_TIMELINE_POINTS)
        total, at = self.full_timeline.total, self.full_timeline.peak_index
        self.start_bytes, self.end_bytes, self.tracked_peak_bytes = int(total[0]), int(total[-1]), int(total[at])
        self.peak_phase = PHASES[self.full_timeline.phase[at]]
        on_disk = np.cumsum(np.append(0, np.where(ids == self._away_accounts.get(True, -1), deltas, 0)))
        on_disk = on_disk[self._num_before :]
        self.full_host, self.host_bytes, self.disk_bytes = host, int((host - on_disk).max()), int(on_disk.max())
        tracked = dict(zip(RESIDENTS, map(int, self.full_timeline.bytes[at]), strict=True))
        allocated, self.peak_reserved_bytes = _allocator_peaks(self.device) if self._has_allocator else (None, None)
        self.residents = tracked if allocated is None else split_allocated(tracked, allocated)
        self.peak_bytes = self.peak_allocated_bytes = sum(self.residents.values())


def split_allocated(tracked: Mapping[str, int], allocated_bytes: int) -> dict[str, int]:
    """Split an allocator's peak by the ledger's shares; what the ledger did not see is workspace.

    Where the ledger saw more than the allocator gave out (memory of another allocator), the ledger's figure stands:
    a resident never shrinks.
    """
    unseen = max(allocated_bytes - sum(tracked.values()), 0)
    return {name: share + (unseen if name == RESIDENTS[WORKSPACE] else 0) for name, share in tracked.items()}


def _allocator_peaks(device: torch.device) -> tuple[int, int]:
    """Return CUDA's peak (allocated, reserved) bytes since the reset."""
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
