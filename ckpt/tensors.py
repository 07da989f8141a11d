"""Find the tensors and storages behind what ops take and return, sharded and fake ones too.

Shared by the ledger and the FLOP counter. Knows torch's tensor kinds; no models.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of nested mappings, sequences, sets and dataclasses (a batch, an op's arguments)."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, list | tuple | set | frozenset):
        for value in tree:
            yield from tensors_in(value)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name))


def flat_tensors(values: Any) -> list[torch.Tensor]:
    """Return the tensors among an op's arguments or results: values, or lists of values. Cheaper than `tensors_in`."""
    if isinstance(values, torch.Tensor):
        return [values]
    found = []
    for value in values if isinstance(values, list | tuple) else ():
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += flat_tensors(value)
    return found


def storages_of(tensor: torch.Tensor) -> Iterable[tuple[torch.UntypedStorage, torch.device]]:
    """Return each storage that holds the tensor's values, with its device; subclasses (DTensor) give their inner ones.

    A fake tensor's storage is on "meta"; the tensor itself says which device it stands for.
    """
    if type(tensor) in (torch.Tensor, torch.nn.Parameter, FakeTensor) and tensor.layout is torch.strided:
        return ((tensor.untyped_storage(), tensor.device),)
    return _odd_storages(tensor)


def _odd_storages(tensor: torch.Tensor) -> Iterator[tuple[torch.UntypedStorage, torch.device]]:
    if is_traceable_wrapper_subclass(tensor):
        for inner in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(inner, torch.Tensor):  # a DTensor lists its mesh too
                yield from storages_of(inner)
    elif tensor.layout is torch.sparse_coo:
        yield from storages_of(tensor._indices())
        yield from storages_of(tensor._values())
    elif torch._C._has_storage(tensor):
        yield tensor.untyped_storage(), tensor.device


@contextmanager
def no_shape_propagation() -> Iterator[None]:
    """Hide from dispatch modes the ops that DTensor runs on fake tensors of global shape to learn an op's result.

    They compute nothing, run on the first call of a shape alone, and would count as memory and FLOPs of one device.
    Private method, by this name in torch 2.11 to 2.13; where DTensor was never imported there is nothing to hide.
    """
    module = sys.modules.get("torch.distributed.tensor._sharding_prop")
    method = "_propagate_tensor_meta_non_cached"
    original = getattr(getattr(module, "ShardingPropagator", None), method, None)
    if original is None:
        yield
        return

    @functools.wraps(original)
    def unseen(propagator: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return original(propagator, schema)

    setattr(module.ShardingPropagator, method, unseen)
    try:
        yield
    finally:
        setattr(module.ShardingPropagator, method, original)
