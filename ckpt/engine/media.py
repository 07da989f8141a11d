"""Where a store's bytes lie: pinned host memory, or a file.

A medium makes slots and drops them, writes a device tensor into a part of one and reads it into a device tensor, both
returning an event (None when done). Waiting for an event never makes the compute stream copy.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch.utils._python_dispatch import _disable_current_modes

_GIB = 2**30


class NoRoom(ValueError):
    """What is to be offloaded does not fit."""


class Host:
    """Host memory: pinned and copied on a stream of its own beside CUDA; plain memory beside the CPU."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._buffers: list[torch.Tensor] = []

    def new_slot(self, num_bytes: int) -> torch.Tensor:
        check_room("host", None, num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._cuda)

    def part(self, slot: torch.Tensor, num_bytes: int) -> torch.Tensor:
        return slot[:num_bytes]

    def drop(self, slot: torch.Tensor) -> None:
        """Nothing to do: its memory goes with the last reference, once copies to and from it are over."""

    def write(self, slot: torch.Tensor, source: torch.Tensor):
        if not self._cuda:
            with _disable_current_modes():
                slot.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(self._stream), _disable_current_modes():
            slot.copy_(source, non_blocking=True)
            return self._stream.record_event()

    def read(self, slot: torch.Tensor, target: torch.Tensor):
        if not self._cuda:
            with _disable_current_modes():
                target.copy_(slot)
            return None
        # The target was allocated on the compute stream: what it held before must be done with.
        self._stream.wait_stream(torch.cuda.current_stream(target.device))
        with torch.cuda.stream(self._stream), _disable_current_modes():
            target.copy_(slot, non_blocking=True)
            return self._stream.record_event(torch.cuda.Event(enable_timing=True))

    def wait_written(self, event) -> None:
        torch.cuda.current_stream().wait_event(event)

    def wait(self, event):
        """Make the compute stream wait; return a pair of events that tells for how long, once they are over."""
        stream = torch.cuda.current_stream()
        before = stream.record_event(torch.cuda.Event(enable_timing=True))
        stream.wait_event(event)
        return before, stream.record_event(torch.cuda.Event(enable_timing=True))

    def resolve_stalls(self, pairs: list) -> float:
        if not pairs:
            return 0.0
        torch.cuda.synchronize()
        return sum(before.elapsed_time(after) for before, after in pairs) / 1000

    def close(self) -> None:
        if self._cuda:
            self._stream.synchronize()


class Disk:
    """A file without a name: it is unlinked as soon as it is open, so nothing is left behind, not even by a crash.

    Written and read by a thread, through the page cache, which does not count as this process's memory."""

    def __init__(self, directory: str | None, device: torch.device):
        self._directory = directory or tempfile.gettempdir()
        try:
            handle, path = tempfile.mkstemp(prefix="ckpt-offload-", dir=self._directory)
        except OSError as error:
            raise _cannot_write(self._directory, error) from None
        os.unlink(path)
        self._file = handle
        self._size = 0
        self._free: list[tuple[int, int]] = []  # (begin, bytes) of dropped slots, in order
        self._thread = ThreadPoolExecutor(1, "ckpt-offload")
        self._end = weakref.finalize(self, _end_disk, self._thread, handle)

    def new_slot(self, num_bytes: int) -> tuple[int, int]:
        for k, (begin, size) in enumerate(self._free):
            if size >= num_bytes:
                self._free[k : k + 1] = [(begin + num_bytes, size - num_bytes)] if size > num_bytes else []
                return begin, num_bytes
        at_end = bool(self._free) and sum(self._free[-1]) == self._size
        begin = self._free[-1][0] if at_end else self._size
        try:
            os.posix_fallocate(self._file, begin, max(num_bytes, 1))
        except OSError as error:
            check_room("disk", self._directory, num_bytes)
            raise NoRoom(
                f"offload: the file in {self._directory!r} cannot grow from {begin / _GIB:.2f} GiB by "
                f"{num_bytes / _GIB:.2f} GiB: {error.strerror}. Raise that limit, or set directory to another disk."
            ) from None
        if at_end:
            self._free.pop()
        self._size = begin + num_bytes
        return begin, num_bytes

    def part(self, slot: tuple[int, int], num_bytes: int) -> tuple[int, int]:
        return slot[0], num_bytes

    def drop(self, slot: tuple[int, int]) -> None:
        """Let other slots lie where this one was. The thread does one thing after the other: it is done with it."""
        merged: list[tuple[int, int]] = []
        for begin, size in sorted([*self._free, slot]):
            if merged and sum(merged[-1]) == begin:
                begin, size = merged[-1][0], merged.pop()[1] + size
            if size:
                merged.append((begin, size))
        self._free = merged

    def write(self, slot: tuple[int, int], source: torch.Tensor) -> Future:
        with _disable_current_modes():
            source = source.cpu()
        return self._thread.submit(self._transfer, os.pwritev, slot, source)

    def read(self, slot: tuple[int, int], target: torch.Tensor) -> Future:
        if target.device.type == "cpu":
            return self._thread.submit(self._transfer, os.preadv, slot, target)
        return self._thread.submit(self._read_to_device, slot, target)

    def _read_to_device(self, slot, target: torch.Tensor) -> None:
        buffer = torch.empty(slot[1], dtype=torch.uint8, pin_memory=True)
        self._transfer(os.preadv, slot, buffer)
        target.copy_(buffer)

    def _transfer(self, call, slot: tuple[int, int], tensor: torch.Tensor) -> None:
        begin, num_bytes = slot
        view = memoryview(tensor.numpy())
        done = 0
        while done < num_bytes:
            moved = call(self._file, [view[done : done + 2**30]], begin + done)
            if moved == 0:
                raise RuntimeError("offload: the disk file ended early")
            done += moved

    def wait_written(self, event: Future) -> None:
        event.result()

    def wait(self, event: Future) -> None:
        event.result()

    def resolve_stalls(self, pairs: list) -> float:
        return 0.0

    def close(self) -> None:
        self._end()


def _end_disk(thread: ThreadPoolExecutor, file: int) -> None:
    thread.shutdown(wait=True)
    os.close(file)


def check_room(target: str, directory: str | None, num_bytes: int) -> None:
    """Raise NoRoom if `num_bytes` more do not fit the host's memory or the disk; nothing is written to find out."""
    if target == "host":
        free, where = available_memory(), "the host's memory"
        remedy = "Offload to disk (target=disk)"
    else:
        directory = directory or tempfile.gettempdir()
        try:
            free = shutil.disk_usage(directory).free
        except OSError as error:
            raise _cannot_write(directory, error) from None
        where, remedy = f"the disk of {directory!r}", "Set directory to another disk"
    if free is not None and num_bytes > free:
        raise NoRoom(
            f"offload: {num_bytes / _GIB:.2f} GiB do not fit {where}, where {free / _GIB:.2f} GiB are free. "
            f"{remedy}, shorten seq_len, or keep less."
        )


def _cannot_write(directory: str, error: OSError) -> NoRoom:
    return NoRoom(
        f"offload: cannot write in {directory!r}: {error.strerror}. Set strategy.directory to a folder that exists and "
        "may be written to."
    )


def available_memory() -> int | None:
    """Return the bytes that this process may still take of the host's memory, within its container; None if the system
    does not tell."""
    found = [n for n in (_of_machine(), _of_container()) if n is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _of_container(root: str = "/sys/fs/cgroup") -> int | None:
    """Read cgroup v2: the limit less what is used, but for file pages that the kernel can drop."""
    limit = next(iter(_lines(f"{root}/memory.max")), "max")
    used = next(iter(_lines(f"{root}/memory.current")), None)
    if limit == "max" or used is None:
        return None
    cached = dict(line.split() for line in _lines(f"{root}/memory.stat"))
    return max(0, int(limit) - int(used) + int(cached.get("inactive_file", 0)))


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []
