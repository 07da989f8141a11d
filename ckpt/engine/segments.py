"""Segments: consecutive layers that hold one input between them.

The layers are called one by one by the model's own loop, so a segment is not one function. Instead each layer after the
first drops its hidden states and links to the layer before: on replay it asks that layer to run again. Whether a
layer's argument is the previous layer's output is seen by identity (FSDP2 hands on an alias of it) and version; if a
model changes it in between, the layer holds its input and starts a new segment.

`keep` (Chen et al. 2016, arXiv:1604.06174, sec. 4): the way to the last layer collects every layer's saved tensors: one
extra forward, the whole segment's activations alive at once. `replay`: the way re-creates inputs alone, then each
layer is replayed by itself: two extra forwards, one layer's activations alive.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ckpt.engine.frame import Frame


def _is_same(tensor: torch.Tensor, output: torch.Tensor) -> bool:
    """True for the tensor itself, and for an alias of all of it."""
    if tensor is output:
        return True
    return (
        type(tensor) is type(output)
        and tensor.shape == output.shape
        and tensor.stride() == output.stride()
        and tensor.storage_offset() == output.storage_offset()
        and tensor.dtype == output.dtype
        and tensor.untyped_storage()._cdata == output.untyped_storage()._cdata
    )


@dataclass(frozen=True, slots=True)
class Found:
    """Tensor argument number `position` is the output `path` of `frame`'s layer."""

    position: int
    frame: Frame
    path: int | None
    inner: str


class SegmentTail:
    """Shared by the layers of one segment: the latest call and its output."""

    def __init__(self, inner: str, first_index: int):
        self.inner = inner
        self.first_index = first_index
        self.clear()

    def clear(self) -> None:
        self._frame: weakref.ref | None = None
        self._outputs: list[tuple[int | None, weakref.ref, int]] = []  # path, tensor, version

    def __getstate__(self):
        return {"inner": self.inner, "first_index": self.first_index}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.clear()

    def find(self, tensors: list[torch.Tensor]) -> Found | None:
        """Find the latest output among a call's tensor arguments."""
        frame = None if self._frame is None else self._frame()
        if frame is None:
            return None
        for path, reference, version in self._outputs:
            output = reference()
            for position, tensor in enumerate(tensors):
                if output is not None and _is_same(tensor, output) and output._version == version:
                    return Found(position, frame, path, self.inner)
        return None

    def advance(self, frame: Frame, output) -> None:
        """Note the output of the segment's latest call; the last layer's concerns nobody."""
        if frame.region.is_last_of_segment:
            self.clear()
            return
        self._frame = weakref.ref(frame)
        if isinstance(output, torch.Tensor):
            output = {None: output}
        elif isinstance(output, tuple):
            output = dict(enumerate(output))
        else:
            output = {}
        self._outputs = [(i, weakref.ref(t), t._version) for i, t in output.items() if isinstance(t, torch.Tensor)]


class Link:
    """Makes a layer's argument again, by running the layer before."""

    def __init__(self, frame: Frame, path: int | None, inner: str):
        self._frame, self._path, self._inner = frame, path, inner

    def __call__(self) -> torch.Tensor:
        frame = self._frame
        output = frame.output_and_saved_again() if self._inner == "keep" else frame.output_again()
        tensor = output if self._path is None else output[self._path]
        return tensor.detach().requires_grad_(tensor.requires_grad)
