"""Tensor parallelism by transformers' own plans: each rank holds a slice of every layer's heads and MLP columns.

    split_tensors(model, layout)        # after the adapter, before ckpt.apply; the model is built alike on every rank

Embedding and head are left whole: the loss then never needs (T, V) logits (`loss=chunked`), and tied weights stay tied.
Linear layers compute on their local slices, so that the engine sees plain ops, and the all-reduce behind attention and
MLP as one op of the layer, which is replayed or kept by its key. Private names of transformers 5.23 and 5.24
(`_resolve_parallel_plans`, `_hf_quantized_needs_local_tp`) stand here alone.

Parameters that every rank holds whole but uses on its own heads or columns (norms of heads) have a part of their
gradient on each rank, and these parts are summed. `check_gradients` finds the ones that no plan names.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from ckpt.layers import unwrapped
from ckpt.parallel.mesh import Layout

_PARTIAL = "replicated_with_grad_allreduce"
_ROUNDING = 0.02  # of a gradient's norm, that kernels may differ by between ranks; a forgotten sum is off by far more


def split_tensors(model: nn.Module, layout: Layout) -> None:
    """Split the layers of `model` in place over `layout`'s tensor mesh; with one rank do nothing.

    Every rank must hold the same weights. Raises ValueError: no plan for this architecture, heads that do not divide,
    an adapter, or a model that a strategy or sharding is in force on already.
    """
    num_ranks = layout.degrees.tensor
    if num_ranks == 1:
        return
    base = unwrapped(model)
    plan = check(model, num_ranks)
    names = [name for name, style in plan.items() if style == _PARTIAL]
    apply_tensor_parallelism(base, layout.tensor_mesh, {name: plan[name] for name in plan if name not in names})
    for module in map(partial(_get, base), names):
        if isinstance(module, nn.Module):  # its parameters stand in the plan as well
            _sum_gradients(module, layout.tensor_mesh.get_group())
    for name, style in plan.items():
        if style in ("colwise", "rowwise") and isinstance(module := _get(base, name), nn.Linear):
            module._hf_quantized_needs_local_tp = True  # "compute on local slices"


def _sum_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum what each backward adds to the gradients of a module's own parameters over the ranks.

    In place of the style's own way, which sums the gradient that has been accumulated: with several micro-batches it
    counts the first ones again and again (transformers 5.24). Hooked at the first forward: until then parameters are
    replaced, by those of shards too.
    """
    forward, hooked = module.forward, {}

    def summed(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()  # autograd may have given the same tensor to somebody else
        dist.all_reduce(gradient, group=group)
        return gradient

    def with_hooks(*args, **kwargs):
        if torch.is_grad_enabled():
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and hooked.get(name) is not parameter:
                    parameter.register_hook(summed)
                    hooked[name] = parameter
        return forward(*args, **kwargs)

    module.forward = with_hooks


def check_gradients(named_parameters: Iterable[tuple[str, nn.Parameter]], layout: Layout) -> None:
    """Check, after a backward, that gradients of what every rank of the tensor mesh holds whole are equal there.

    A collective. Raises ValueError on every rank: transformers' plan forgot one, whose ranks would drift apart.
    """
    if layout.degrees.tensor == 1:
        return
    whole = {name: p.grad for name, p in named_parameters if p.grad is not None and not _is_split(p.grad)}
    if not whole:
        return
    norms = torch.stack(torch._foreach_norm([g.to_local() if isinstance(g, DTensor) else g for g in whole.values()]))
    norms = norms.float()
    largest, least = norms.clone(), norms.clone()
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=layout.tensor_mesh.get_group())
    dist.all_reduce(least, dist.ReduceOp.MIN, group=layout.tensor_mesh.get_group())
    differs = torch.tensor([float((largest - least > _ROUNDING * largest).any())], device=norms.device)
    dist.all_reduce(differs, dist.ReduceOp.MAX)
    if not differs.item():
        return
    apart = [name for name, far in zip(whole, (largest - least > _ROUNDING * largest).tolist(), strict=True) if far]
    raise ValueError(
        f"parallel.tensor={layout.degrees.tensor} leaves each rank a part of the gradient of {len(apart)} parameters "
        f"({', '.join(apart[:1]) or 'on other ranks'}), which transformers' plan for this architecture forgets. Use "
        "parallel.shard or parallel.sequence."
    )


def _is_split(gradient: Tensor) -> bool:
    """Whether ranks of the tensor mesh hold different parts of a gradient."""
    if not isinstance(gradient, DTensor):
        return False
    names = gradient.device_mesh.mesh_dim_names
    return any(n == "tensor" and not p.is_replicate() for n, p in zip(names, gradient.placements, strict=True))


def check(model: nn.Module, num_ranks: int) -> dict[str, str]:
    """Return the plan, module or parameter name -> style, after checking that it fits. Raises ValueError."""
    from ckpt.patching import applied_to

    base = unwrapped(model)
    name = type(base).__name__
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("this model is sharded already: split its tensors before it is sharded (tensor, then shard).")
    if applied_to(model) is not None:
        raise ValueError(
            "a strategy is in force on this model, and knows its layers as they are: split tensors before ckpt.apply."
        )
    if base is not model:
        raise ValueError(
            f"parallel.tensor={num_ranks} with an adapter: transformers' plans split plain linear layers only. Use "
            "parallel.shard for LoRA."
        )
    try:
        plan, _, _ = base._resolve_parallel_plans(DistributedConfig(tp_size=num_ranks))
    except ValueError as error:
        raise ValueError(
            f"parallel.tensor={num_ranks} does not fit {name}, for which transformers has no tensor-parallel plan. Use "
            "parallel.shard."
        ) from error
    plan |= dict.fromkeys(_forgotten(base, plan), _PARTIAL)
    whole = [id(m) for m in (base.get_input_embeddings(), base.get_output_embeddings()) if m is not None]
    plan = {key: style for key, style in plan.items() if not _is_of(base, key, whole)}
    config = base.config.get_text_config(decoder=True)
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % num_ranks:
            raise ValueError(
                f"parallel.tensor={num_ranks} does not divide the {heads} of {name}'s {field}. Use "
                f"{_divisors(heads, num_ranks)}, or parallel.sequence, which takes any number of heads."
            )
    return plan


def _forgotten(base: nn.Module, plan: dict[str, str]) -> list[str]:
    """Name activation functions with parameters between split linear layers (Apertus's xIELU), which no plan names."""
    rowwise = {name.rpartition(".")[0] for name, style in plan.items() if style == "rowwise"}
    return [
        name
        for name, module in base.named_modules()
        if name.rpartition(".")[2] == "act_fn" and name.rpartition(".")[0] in rowwise and name not in plan
        and any(True for _ in module.parameters(recurse=False))
    ]  # fmt: skip


def _divisors(heads: int, below: int) -> str:
    fits = [str(n) for n in range(1, below) if heads % n == 0]
    return "parallel.tensor=" + " or ".join(fits)


def _is_of(base: nn.Module, key: str, modules: list[int]) -> bool:
    """True if `key` names one of the modules or a parameter of one."""
    found = _get(base, key)
    owner = found if isinstance(found, nn.Module) else _get(base, key.rpartition(".")[0])
    return id(owner) in modules


def _get(base: nn.Module, name: str):
    for part in name.split(".") if name else ():
        base = getattr(base, part)
    return base
