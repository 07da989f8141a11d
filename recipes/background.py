"""Copies of a train state's tensors, and a thread that writes them while training goes on.

Owns one write at a time. Collectives of the thread run on a process group of their own: on the training's group they
would meet its collectives in another order on every rank.

    writer = Background()
    writer.start(lambda: write(copied(tensors), writer.group()))
    writer.finish()                  # waits; raises what the write raised
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


class Background:
    """At most one write under way."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._group: dist.ProcessGroup | None = None

    def group(self) -> dist.ProcessGroup | None:
        """Return the group for the thread's collectives, on the CPU; made at the first call, by all ranks together."""
        if self._group is None and dist.is_initialized():
            self._group = dist.new_group(backend="gloo")
        return self._group

    def start(self, write: Callable[[], Any]) -> None:
        """Run `write` in the thread. Call `finish` first."""

        def run() -> None:
            try:
                write()
            except BaseException as error:  # raised again by `finish`, in the thread that can act on it
                self._error = error

        # A daemon: a process that must end does not wait for a disk.
        self._thread = threading.Thread(target=run, name="train-state", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait for the write under way, if there is one, and raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error


def copied(tensors: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Copy every tensor to host memory: of a DTensor this rank's part."""
    return {outer: {name: _copied(t) for name, t in inner.items()} for outer, inner in tensors.items()}


def _copied(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor):
        # The constructor, since `from_local` would move the copy back to the mesh's device.
        return DTensor(torch.empty_like(tensor.to_local(), device="cpu").copy_(tensor.to_local()), tensor._spec,
                       requires_grad=False)  # fmt: skip
    return torch.empty_like(tensor, device="cpu").copy_(tensor)
