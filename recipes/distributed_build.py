"""A model that is made once, on rank 0, and of which the other ranks never hold more than their part.

Every rank but the first builds on meta, shards that, and gets its part of each weight as rank 0 sends it, one weight at
a time. So weights are those of one process, bit for bit, wherever they come from. Host memory: the whole model once a
job and, on each rank, its shards and the largest weight.

    model, whole = build_once(build, device, ranks)       # build(device); "meta" must make the same modules
    ...                                                   # tensor parallel, ckpt.apply, shard
    whole.hand_out(model, device)

Serves FSDP2 of torch 2.11 to 2.13, whose `to_empty` keeps tied weights tied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from recipes.distributed import Ranks


def build_once(
    build: Callable[[torch.device], nn.Module], device: torch.device, ranks: Ranks
) -> tuple[nn.Module, Whole | None]:
    """Make the model: on `device`, or, where ranks will share its parameters, whole on rank 0 and on meta elsewhere.

    Returns it with what is to be handed out after sharding, if anything. An error of rank 0 is raised on every rank.
    """
    if ranks.layout is None or not ranks.layout.degrees.shards_parameters:
        return build(device), None
    made: list[nn.Module] = []
    ranks.from_main(lambda: made.append(build(torch.device("cpu"))))
    model = made[0] if ranks.is_main else build(torch.device("meta"))
    return model, Whole(model, ranks.is_main)


class Whole:
    """The values of a model, held by rank 0 until every rank has its part."""

    def __init__(self, model: nn.Module, is_main: bool):
        self._is_main = is_main
        self._values = {name: p.data for name, p in model.named_parameters()} if is_main else {}

    @torch.no_grad()
    def hand_out(self, model: nn.Module, device: torch.device) -> None:
        """Fill each rank's part of every parameter, and every buffer; a collective, to be called once."""
        if not self._is_main:
            model.to_empty(device=device)
        for name, parameter in model.named_parameters():
            whole = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            if self._is_main:
                whole.copy_(self._values.pop(name))
            dist.broadcast(whole, src=0)
            _fill(parameter, whole)
        self._hand_out_others(model, device)

    def _hand_out_others(self, model: nn.Module, device: torch.device) -> None:
        """Buffers and tensors that are plain attributes, whole on every rank: on meta nobody computed them."""
        own = list(_other_tensors(model))
        modules = dict(model.named_modules())
        listed = [[(other.path, other.name, other.tensor.shape, other.tensor.dtype) for other in own]]
        dist.broadcast_object_list(listed, src=0)
        for position, (path, name, shape, dtype) in enumerate(listed[0]):
            value = torch.empty(shape, dtype=dtype, device=device)
            if self._is_main:
                value.copy_(own[position].tensor)
            dist.broadcast(value, src=0)
            module = modules[path]
            (module._buffers if name in module._buffers else vars(module))[name] = value


class _Other(NamedTuple):
    path: str
    name: str
    tensor: torch.Tensor


def _other_tensors(model: nn.Module) -> Iterator[_Other]:
    for path, module in model.named_modules():
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if isinstance(value, torch.Tensor):
                yield _Other(path, name, value)


def _fill(parameter: nn.Parameter, whole: torch.Tensor) -> None:
    """Copy this rank's part of a parameter out of the whole of it."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(whole)
        return
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    part = whole[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]
    parameter.to_local().copy_(part)
