"""Parameters, gradients and optimizer state sharded over ranks by torch's FSDP2, one group a decoder layer.

A layer's parameters are gathered when it runs, freed, and gathered again for its backward; what activation
checkpointing replays, it replays while they are there. Gradients are *summed* over ranks, since each rank divides its
loss by the number of labels of all of them.

    shard(model, layout, dtype="bf16")      # after ckpt.apply and compile, before the optimizer is made

`bf16` keeps fp32 shards and gathers bf16: what is updated is fp32, sums over ranks are fp32. `bf16_pure` keeps bf16
shards and sums in fp32. Serves torch 2.11 to 2.13.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from ckpt.layers import find_layers, unwrapped
from ckpt.parallel.mesh import Layout
from ckpt.precision import DTYPES, cast_in_place

POLICIES = {
    "fp32": {},
    "bf16": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "bf16_pure": {"reduce_dtype": torch.float32},
}


def shard(model: nn.Module, layout: Layout, *, dtype: str = "fp32", reshard: bool = True) -> nn.Module:
    """Shard `model` in place over `layout`'s data mesh and return it.

    reshard: free a layer's gathered parameters after its forward; False holds them until its backward has run, which
    saves one all-gather a layer and costs the whole model's parameters.

    Raises ValueError: the model is sharded already, or keeps parameters in fp32 that bf16 sharding would cast.
    """
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("this model is sharded already; shard it once, after ckpt.apply and before the optimizer.")
    kept = getattr(unwrapped(model), "_keep_in_fp32_modules_strict", None)
    if dtype == "bf16" and kept:
        raise ValueError(
            f"{type(unwrapped(model)).__name__} computes {', '.join(sorted(kept))} in fp32, and sharding in dtype=bf16 "
            "gathers a whole layer in bf16. Use dtype=fp32, or bf16_pure."
        )
    policy = MixedPrecisionPolicy(**POLICIES[dtype], cast_forward_inputs=False)
    mesh = layout.data_mesh
    place = partial(_placement, num_ranks=layout.degrees.shard * layout.degrees.sequence)
    for layer in find_layers(model):
        fully_shard(
            layer.module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard, shard_placement_fn=place
        )
    for module in _apart(model):
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # By a plain sum: gloo has no premultiplied one.
            module.set_force_sum_reduction_for_comms(True)
    return model


def _placement(parameter: nn.Parameter, num_ranks: int) -> Shard | None:
    """Split stacked experts that are fewer than the ranks along another dimension: by their number, FSDP2's default,
    some ranks would hold whole experts and the others nothing. None: the default."""
    if isinstance(parameter, DTensor) or parameter.shape[0] >= num_ranks:
        return None
    return next((Shard(dim) for dim, size in enumerate(parameter.shape) if size % num_ranks == 0), None)


def cast(model: nn.Module, dtype: str) -> None:
    """Cast the parameters of `model` in place to what their shards are kept in: for bf16 fp32, the masters that are
    updated, but for frozen ones, which are only read. Gathered copies get their dtype from the policy."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            masters = dtype == "bf16" and parameter.requires_grad
            cast_in_place(parameter, torch.float32 if masters else DTYPES[dtype])


def _apart(model: nn.Module) -> list[nn.Module]:
    """Return the embedding and the head where each has a weight of its own; tied ones stay together at the root."""
    inner = unwrapped(model)
    embedding, head = inner.get_input_embeddings(), inner.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear) or embedding.weight is head.weight:
        return []
    return [embedding, head]
