"""Which ops of a step talk to other ranks: what they do, with whom, and how many bytes that takes.

Owns the list of collectives and how their arguments are read. Knows no link and no time: see `ckpt/links.py`.

    found = collective_of(func, args, kwargs)        # None for an op that stays on its rank
    found.sent_bytes                                 # what a rank sends, and receives, at least
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, ALL_TO_ALL = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"

# FSDP2 and torch's collectives in place come as c10d ops; those that a layer waits for (DTensor, tensor parallelism) as
# functional ones; the sequence exchange is an op of this package. torch 2.11 to 2.13.
_KINDS = {
    "c10d::_allgather_base_": ALL_GATHER,
    "c10d::allgather_into_tensor_coalesced_": ALL_GATHER,
    "c10d::_reduce_scatter_base_": REDUCE_SCATTER,
    "c10d::reduce_scatter_tensor_coalesced_": REDUCE_SCATTER,
    "c10d::allreduce_": ALL_REDUCE,
    "c10d::allreduce_coalesced_": ALL_REDUCE,
    "c10d::alltoall_base_": ALL_TO_ALL,
    "_c10d_functional::all_gather_into_tensor": ALL_GATHER,
    "_c10d_functional::reduce_scatter_tensor": REDUCE_SCATTER,
    "_c10d_functional::all_reduce": ALL_REDUCE,
    "_c10d_functional::all_reduce_": ALL_REDUCE,
    "_c10d_functional::all_to_all_single": ALL_TO_ALL,
    "ckpt::exchange": ALL_TO_ALL,
}
_GROUP_ARGUMENTS = ("process_group", "group_name", "group")
_NAMESPACES = ("c10d", "_c10d_functional", "ckpt")


class Collective(NamedTuple):
    """One collective.

    kind: ALL_GATHER, .... num_bytes: of the whole tensor: what a rank has after gathering and before scattering; what
    it reduces; what it exchanges, its own part included. ranks: who takes part, by number in the job. is_awaited: the
    op's result is needed at once (False: FSDP2 sends for it ahead, or collects it later).
    """

    kind: str
    num_bytes: int
    ranks: tuple[int, ...]
    is_awaited: bool

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank sends, and receives, at least (Thakur et al. 2005: a ring takes no more)."""
        n = len(self.ranks)
        return self.num_bytes * (n - 1) // n * (2 if self.kind == ALL_REDUCE else 1)


def collective_of(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> Collective | None:
    """Return what an op call exchanges with other ranks; None if it does not, or if its group has one rank."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace not in _NAMESPACES or (kind := _KINDS.get(schema.name)) is None:
        return None
    named = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | dict(kwargs)
    ranks = _ranks_of(next(named[name] for name in _GROUP_ARGUMENTS if name in named))
    if len(ranks) < 2:
        return None
    sizes = [sum(_bytes(t) for t in _tensors(value)) for value in named.values()]
    num_bytes = max(sizes)  # of input and output the larger one is the whole
    if func.namespace == "_c10d_functional" and kind == ALL_GATHER:
        num_bytes *= len(ranks)  # its output is no argument
    return Collective(kind, num_bytes, ranks, func.namespace != "c10d")


def only_waits(func: Any) -> bool:
    """Whether an op only waits for a collective: it moves nothing itself."""
    return func is torch.ops._c10d_functional.wait_tensor.default


def _ranks_of(group: Any) -> tuple[int, ...]:
    import torch.distributed as dist

    if isinstance(group, str):
        group = dist.distributed_c10d._resolve_process_group(group)
    elif not isinstance(group, dist.ProcessGroup):
        group = dist.ProcessGroup.unbox(group)
    return tuple(dist.get_process_group_ranks(group))


def _tensors(value: Any) -> list[torch.Tensor]:
    """Tensors of one argument, which is one, a list of them (allreduce_), or none."""
    values = value if isinstance(value, (list, tuple)) else [value]
    return [v for v in values if isinstance(v, torch.Tensor)]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
