"""The op `ckpt::exchange`: an all-to-all that splits one dimension over the ranks of a group and joins another.

One op with a fake kernel and a backward of its own, rather than torch's functional collectives: those hand out
asynchronous wrapper tensors, which pass values by the engine's record. So a policy sees one op, with a key
(`self_attn/ckpt.exchange#0`), bytes, and no FLOPs; it may be kept or replayed like any other, and runs without a
process group on fake tensors.

    heads = exchange(x, 1, 2, 4, group.group_name)     # (B, H, T/4, E) -> (B, H/4, T, E)
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


@torch.library.custom_op("ckpt::exchange", mutates_args=())
def exchange(x: Tensor, split: int, join: int, num_ranks: int, group: str) -> Tensor:
    """Send the k-th of `num_ranks` parts of dimension `split` to the group's rank k; join what comes along `join`.

    `split` must divide evenly. `group`: name of a process group. All ranks must give tensors of one shape.
    """
    parts = x.unflatten(split, (num_ranks, -1)).movedim(split, 0).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=dist.distributed_c10d._resolve_process_group(group))
    return received.movedim(0, join).flatten(join, join + 1).contiguous()


@exchange.register_fake
def _(x: Tensor, split: int, join: int, num_ranks: int, group: str) -> Tensor:
    shape = list(x.shape)
    shape[split] //= num_ranks
    shape[join] *= num_ranks
    return x.new_empty(shape)


def _remember(ctx, inputs, output) -> None:
    _, ctx.split, ctx.join, ctx.num_ranks, ctx.group = inputs


def _differentiate(ctx, gradient: Tensor):
    return exchange(gradient, ctx.join, ctx.split, ctx.num_ranks, ctx.group), None, None, None, None


exchange.register_autograd(_differentiate, setup_context=_remember)
