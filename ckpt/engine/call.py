"""The arguments of one layer call, held so that the layer can be run again as it was.

Tensors are held as they are; lists and dicts are copied, because layers write into them (shared key/value states): a
replay must read what the forward read, and must not write where later layers look. A cache is dropped, since writing it
twice would change it. An argument that can be made again (the output of the layer before, within a segment) is not held
but linked.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from copy import copy
from functools import partial
from typing import Any

import torch
from transformers.cache_utils import Cache


class Call:
    """One call `function(*args, **kwargs)` of a layer."""

    __slots__ = ("_function", "_args", "_kwargs", "_versions", "_link", "_slot", "device")

    def __init__(self, function: Callable, args: tuple, keep_cache: bool = False):
        kwargs: dict[str, Any] = {}
        if isinstance(function, partial):
            function, args, kwargs = function.func, function.args + args, function.keywords
        if not keep_cache:
            args = tuple(None if isinstance(a, Cache) else a for a in args)
            kwargs = {k: None if isinstance(v, Cache) else v for k, v in kwargs.items()}
        self._function, self._args, self._kwargs = function, args, kwargs
        self._link = self._slot = None
        tensors = self.tensors()
        devices = {t.device.type: t.device for t in reversed(tensors)}
        self.device = next((d for kind, d in devices.items() if kind != "cpu"), torch.device("cpu"))
        self._versions = [(t, t._version) for t in tensors]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensor arguments in a fixed order: positional, then by keyword, containers in place."""
        return list(_tensors((self._args, self._kwargs)))

    def signature(self) -> tuple:
        """What the op sequence of a call may depend on, as far as it can be seen without running it. Numbers count by
        type only: lengths that change from batch to batch must not make a new signature each time."""
        return tuple(_signature(a) for a in self._args), tuple((k, _signature(v)) for k, v in self._kwargs.items())

    def link(self, tensor: torch.Tensor, link) -> bool:
        """Do not hold `tensor` but ask `link()` for it on replay. False if it is no direct argument of the call."""
        for slot, value in [*enumerate(self._args), *self._kwargs.items()]:
            if value is tensor:
                self._slot, self._link = slot, link
                self._versions = [(t, v) for t, v in self._versions if t is not tensor]
                return True
        return False

    def is_direct(self, tensor: torch.Tensor) -> bool:
        """True if the tensor is an argument itself, not inside a container."""
        return any(value is tensor for value in (*self._args, *self._kwargs.values()))

    def first(self):
        """Run with the caller's own containers; keep copies of what they were."""
        args, kwargs = self._args, self._kwargs
        self._args, self._kwargs = tuple(map(_copied, args)), {k: _copied(v) for k, v in kwargs.items()}
        if self._link is not None:
            self._set(None)
        return self._function(*args, **kwargs)

    def again(self):
        """Run once more, on copies. `prepare` must have been called if an argument is linked."""
        return self._function(*map(_copied, self._args), **{k: _copied(v) for k, v in self._kwargs.items()})

    def prepare(self) -> None:
        """Fetch the linked argument, if there is one and it is not there yet."""
        if self._link is not None:
            link, self._link = self._link, None
            self._set(link())

    def check_versions(self, name: str) -> None:
        for tensor, version in self._versions:
            if tensor._version != version:
                raise RuntimeError(
                    f"{name}: an argument of shape {tuple(tensor.shape)} was modified in place after the layer was "
                    "called, so the layer cannot be replayed. Keep this layer's activations, or write out of place."
                )

    def _set(self, value) -> None:
        if isinstance(self._slot, int):
            self._args = self._args[: self._slot] + (value,) + self._args[self._slot + 1 :]
        else:
            self._kwargs = {**self._kwargs, self._slot: value}


def _copied(value):
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_copied, value))
    if isinstance(value, UserDict):  # gemma's shared keys and values
        return copy(value)
    return value


def _tensors(value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, (dict, UserDict)):
        for item in value.values():
            yield from _tensors(item)


def _signature(value):
    if isinstance(value, torch.Tensor):
        return type(value), value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, (tuple, list)):
        return type(value), tuple(map(_signature, value))
    if isinstance(value, (dict, UserDict)):
        return dict, tuple((k, _signature(v)) for k, v in value.items())
    if value is None or isinstance(value, (bool, str)):
        return value
    return type(value)
