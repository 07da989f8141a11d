"""Where a store's bytes lie: pinned host memory, or a file.

A medium makes slots, writes a device tensor into one and reads one into a device tensor, both returning an event (None
when done). Waiting for an event never makes the compute stream copy.
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


class Host:
    """Host memory: pinned and copied on a stream of its own beside CUDA; plain memory beside the CPU."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._buffers: list[torch.Tensor] = []

    def check_room(self, num_bytes: int) -> None:
        available = _available_memory()
        if available is not None and num_bytes > available:
            raise RuntimeError(
                f"offload: {num_bytes / _GIB:.2f} GiB do not fit the host's memory, {available / _GIB:.2f} GiB "
                "available. Offload to disk (strategy.target=disk), shorten seq_len, or keep less."
            )

    def new_slot(self, num_bytes: int) -> torch.Tensor:
        self.check_room(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._cuda)

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
            raise ValueError(
                f"offload: cannot write in {self._directory!r}: {error.strerror}. Set strategy.directory to a folder that "
                "exists and may be written to."
            ) from None
        os.unlink(path)
        self._file = handle
        self._size = 0
        self._thread = ThreadPoolExecutor(1, "ckpt-offload")
        self._end = weakref.finalize(self, _end_disk, self._thread, handle)

    def check_room(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self._directory).free
        if num_bytes > free:
            raise RuntimeError(
                f"offload: {num_bytes / _GIB:.2f} GiB do not fit on disk, {free / _GIB:.2f} GiB are free in "
                f"{self._directory!r}. Set strategy.directory to another disk, shorten seq_len, or keep less."
            )

    def new_slot(self, num_bytes: int) -> tuple[int, int]:
        begin = self._size
        try:
            os.posix_fallocate(self._file, begin, max(num_bytes, 1))
        except OSError:
            self.check_room(num_bytes)
            raise
        self._size = begin + num_bytes
        return begin, num_bytes

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


def _available_memory() -> int | None:
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
