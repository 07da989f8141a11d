"""The norm of all gradients, wherever their parts lie, and clipping by it.

norm = total_norm(parameters, layout)      # (): fp32; the same on all ranks
clip(parameters, norm, most=1.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from ckpt.parallel import Layout


def total_norm(parameters: Sequence[nn.Parameter], layout: Layout | None = None) -> Tensor:
    """Return the 2-norm of all gradients together.

    Each rank sums squares of its parts; sums are then added up over the mesh dimensions that a gradient is split over,
    and over no others, since copies count once.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if layout is None:
        return torch.nn.utils.get_total_norm(grads)
    by_split: dict[tuple[bool, bool], list[Tensor]] = {(s, t): [] for s in (False, True) for t in (False, True)}
    for grad in grads:
        split = _split_over(grad)
        by_split["shard" in split, "tensor" in split].append(_local(grad))
    device = grads[0].device if grads else layout.device_type
    zero = torch.zeros((), device=device)
    norms = {split: torch.nn.utils.get_total_norm(own) if own else zero for split, own in by_split.items()}
    squares = {split: norm.to(device) ** 2 for split, norm in norms.items()}
    sharded = torch.stack([squares[True, False], squares[True, True]])
    if layout.degrees.shard * layout.degrees.sequence > 1:
        dist.all_reduce(sharded, group=layout.data_mesh["shard"].get_group())
    split = torch.stack([squares[False, True], sharded[1]])
    if layout.degrees.tensor > 1:
        dist.all_reduce(split, group=layout.tensor_mesh.get_group())
    return (squares[False, False] + sharded[0] + split.sum()).sqrt()


def clip(parameters: Sequence[nn.Parameter], norm: float, most: float) -> None:
    """Scale all gradients so that their norm, `norm`, becomes `most`."""
    grads = [_local(p.grad) for p in parameters if p.grad is not None]
    share = most / (torch.tensor(norm, device=grads[0].device) + 1e-6)  # as torch's clip_grad_norm_ rounds it
    torch._foreach_mul_(grads, share.clamp(max=1.0))


def _local(grad: Tensor) -> Tensor:
    return grad.to_local() if isinstance(grad, DTensor) else grad


def _split_over(grad: Tensor) -> set[str]:
    """Name the mesh dimensions that a gradient is split over."""
    if not isinstance(grad, DTensor):
        return set()
    names = grad.device_mesh.mesh_dim_names
    return {name for name, placement in zip(names, grad.placements, strict=True) if not placement.is_replicate()}
