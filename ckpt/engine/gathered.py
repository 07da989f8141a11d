"""Run a layer outside of its turn: with its parameters gathered, and sharded again afterwards if they were.

FSDP2 gathers a layer's parameters before its forward and before its own backward. A segment's replay runs earlier
layers in a later layer's backward, when they are sharded. Calling the layer itself would gather them too, but would
also register its hooks a second time. Private names of torch 2.11 to 2.14 (`_get_fsdp_state`, `is_unsharded`) stand
here alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def gathered(layer: nn.Module) -> Iterator[None]:
    """Hold the parameters of `layer` gathered inside the block; for a layer that is not sharded, do nothing."""
    if not _is_sharded_module(layer):
        yield
        return
    groups = _parameter_groups(layer)
    # One that FSDP2 has sent for already is needed next: it stays.
    away = any(not group.is_unsharded and group._all_gather_result is None for group in groups)
    if not all(group.is_unsharded for group in groups):
        layer.unshard()
    try:
        yield
    finally:
        if away:
            layer.reshard()


def _parameter_groups(layer: nn.Module) -> list[Any]:
    """Return what FSDP2 gathers together of a layer: torch 2.11 has at most one such group."""
    state = layer._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _is_sharded_module(layer: nn.Module) -> bool:
    module = sys.modules.get("torch.distributed.fsdp")  # where it was never imported, nothing is sharded
    return module is not None and isinstance(layer, module.FSDPModule)
