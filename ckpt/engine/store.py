"""Stores: where offloaded tensors live, and how they come back.

A store takes a tensor's whole storage, so views, slices, transposes and shared storages round-trip exactly, and gives a
`Ticket`. Buffers are pooled by size and make room for other sizes: nothing grows from step to step, nor with batches of
ever other lengths. On CUDA copies run on a stream of their own, to
and from pinned memory; the compute stream only waits for events. On CPU (and under fake tensors, where nothing is
copied) the same bookkeeping holds, so what is predicted is what happens: at most one tensor is on its way out at any
time, and what was offloaded by one layer call is brought back when the layer after it begins its backward.

Ideas: DeepSpeed's and torchtune's activation offloading (pooled pinned buffers, one layer ahead).
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from typing import Any, NamedTuple

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ckpt import ledger
from ckpt.engine.media import Disk, Host, check_room


class _Buffer(NamedTuple):
    """A medium's slot of `size` bytes, and the part of it that is used."""

    size: int
    slot: Any
    part: Any


class Ticket:
    """One storage that lives off the device. When the last reference dies, its buffer returns to the pool."""

    __slots__ = ("_store", "_slot", "_group", "_device", "_ready", "_live", "num_bytes", "_finalizer", "__weakref__")

    def __init__(self, store: Store, buffer: _Buffer | None, group: Group, device: torch.device, num_bytes: int):
        self._store, self._group, self._device, self.num_bytes = store, group, device, num_bytes
        self._slot = None if buffer is None else buffer.part
        self._ready = None  # (bytes, event) on its way back or arrived
        self._live: weakref.ref | None = None
        self._finalizer = weakref.finalize(self, store._give_back, num_bytes, buffer)

    def prefetch(self) -> None:
        if self._ready is None and self._on_device() is None:
            self._ready = self._store._bring_back(self._slot, self.num_bytes, self._device)

    def fetch(self) -> torch.Tensor:
        """Return the storage's bytes, (num_bytes,) uint8 on the device. Starts bringing back the group before."""
        tensor = self._on_device()
        if tensor is None:
            self.prefetch()
            self._group.prefetch_previous()
            tensor, event = self._ready
            self._ready = None
            self._store._wait(event)
            self._live = weakref.ref(tensor)
        return tensor

    def view(self, dtype: torch.dtype, shape, stride, offset: int) -> torch.Tensor:
        """Return a tensor of the given geometry over the storage; `offset` counts elements."""
        return self.fetch().view(dtype).as_strided(shape, stride, offset)

    def _on_device(self) -> torch.Tensor | None:
        return None if self._live is None else self._live()


class Group:
    """Tickets that backward needs together (a layer's input, or what is kept of it), and those sent before them, which
    it needs next."""

    def __init__(self, previous: Group | None):
        self._previous = None if previous is None else weakref.ref(previous)
        self._tickets: list[weakref.ref] = []

    def add(self, ticket: Ticket) -> None:
        self._tickets.append(weakref.ref(ticket))

    def prefetch_previous(self) -> None:
        previous = None if self._previous is None else self._previous()
        if previous is None:
            return
        for reference in previous._tickets:
            ticket = reference()
            if ticket is not None:
                ticket.prefetch()


class Store:
    """Takes storages off the device. `target`: "host" or "disk" (a file in `directory`)."""

    def __init__(self, target: str, directory: str | None = None):
        if target not in ("host", "disk"):
            raise ValueError(f"offload: target={target!r} is unknown; it is host or disk")
        self.target, self.directory = target, directory
        self._fresh()

    def _fresh(self) -> None:
        self._medium = None
        self._pool: dict[int, list] = defaultdict(list)
        self._latest: weakref.ref | None = None
        self._leaving = None  # (tensor, event): the one tensor on its way out
        self._slot_bytes = 0  # of all buffers, in use or pooled
        self.moved_bytes = 0
        self.bytes_now = 0
        self.peak_bytes = 0
        self._stalls: list = []
        self._stall_seconds = 0.0

    def __getstate__(self):
        return {"target": self.target, "directory": self.directory}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._fresh()

    def open_group(self) -> Group:
        """Begin a group."""
        group = Group(None if self._latest is None else self._latest())
        self._latest = weakref.ref(group)
        return group

    def put(self, tensor: torch.Tensor, group: Group) -> Ticket:
        """Send the tensor's storage away. The caller lets go of the tensor; the copy holds it as long as it must."""
        self._settle()
        tensor = tensor.detach()  # its graph is not ours to keep alive
        num_bytes = tensor.untyped_storage().nbytes()
        fake = isinstance(tensor, FakeTensor)
        buffer = None if fake else self._take(num_bytes, tensor.device)
        ticket = Ticket(self, buffer, group, tensor.device, num_bytes)
        group.add(ticket)
        if fake:
            self._leaving = (tensor, None)
        else:
            with _disable_current_modes():  # a mode that numbers the layer's ops must not count this
                source = whole_storage(tensor)
            self._leaving = (tensor, self._medium.write(buffer.part, source))
        self.moved_bytes += num_bytes
        self._note(num_bytes)
        return ticket

    def end_of_forward(self) -> None:
        """Let go of the last tensor on its way out."""
        self._settle()

    @property
    def stall_seconds(self) -> float:
        """Time that compute waited for tensors to come back."""
        if self._medium is not None:
            self._stall_seconds += self._medium.resolve_stalls(self._stalls)
            self._stalls.clear()
        return self._stall_seconds

    def check_room(self, num_bytes: int) -> None:
        """Raise NoRoom if `num_bytes` in all do not fit the host's memory or the disk, what is held already included.
        Under fake tensors nothing is written, so there is nothing to check."""
        if num_bytes > self._slot_bytes and torch._guards.detect_fake_mode() is None:
            check_room(self.target, self.directory, num_bytes - self._slot_bytes)

    def retire(self) -> None:
        """Free the buffers if nothing is out any more; else the last ticket's end does, for a backward may follow."""
        if self.bytes_now == 0:
            self.close()

    def close(self) -> None:
        """Free all buffers. Tickets that are still out become useless."""
        if self._medium is not None:
            self._medium.close()
        self._fresh()

    def _open(self, device: torch.device):
        if self._medium is None:
            self._medium = Host(device) if self.target == "host" else Disk(self.directory, device)
        return self._medium

    def _take(self, num_bytes: int, device: torch.device) -> _Buffer:
        medium = self._open(device)
        size = min((s for s, free in self._pool.items() if free and num_bytes <= s <= 2 * num_bytes), default=None)
        if size is not None:
            slot = self._pool[size].pop()
        else:
            self._make_room(num_bytes)
            size = num_bytes
            with _disable_current_modes():  # host buffers are not device memory: no ledger counts them
                slot = medium.new_slot(size)
            self._slot_bytes += size
        with _disable_current_modes():
            return _Buffer(size, slot, medium.part(slot, num_bytes))

    def _make_room(self, num_bytes: int) -> None:
        """Drop free buffers, the largest first, so that a new one leaves all of them within the most that was ever
        out at once."""
        most = max(self.peak_bytes, self.bytes_now + num_bytes)
        for size in sorted(self._pool, reverse=True):
            free = self._pool[size]
            while free and self._slot_bytes + num_bytes > most:
                self._medium.drop(free.pop())
                self._slot_bytes -= size
            if not free:
                del self._pool[size]

    def _give_back(self, num_bytes: int, buffer: _Buffer | None) -> None:
        self._note(-num_bytes)
        if buffer is not None and self._medium is not None:
            self._pool[buffer.size].append(buffer.slot)

    def _bring_back(self, slot, num_bytes: int, device: torch.device):
        target = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return target, None if slot is None else self._medium.read(slot, target)

    def _wait(self, event) -> None:
        if event is None:
            return
        start = time.perf_counter()
        token = self._medium.wait(event)
        if token is not None:
            self._stalls.append(token)
        else:
            self._stall_seconds += time.perf_counter() - start

    def _settle(self) -> None:
        leaving, self._leaving = self._leaving, None  # first: a write that failed must not fail every later step
        if leaving is not None and leaving[1] is not None:
            self._medium.wait_written(leaving[1])

    def _note(self, delta: int) -> None:
        self.bytes_now += delta
        self.peak_bytes = max(self.peak_bytes, self.bytes_now)
        open_ledger = ledger.current()
        if open_ledger is not None:
            open_ledger.note_host(delta, on_disk=self.target == "disk")


def whole_storage(tensor: torch.Tensor) -> torch.Tensor:
    """Return all bytes of the tensor's storage, (nbytes,) uint8."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
