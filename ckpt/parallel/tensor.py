"""Tensor parallelism by transformers' own plans: each rank holds a slice of every layer's heads and MLP columns.

    split_tensors(model, layout)        # after the adapter, before ckpt.apply; the model is built alike on every rank

Embedding and head are left whole: the loss then never needs (T, V) logits (`loss=chunked`), and tied weights stay tied.
Linear layers compute on their local slices, so that the engine sees plain ops, and the all-reduce behind attention and
MLP as one op of the layer, which is replayed or kept by its key. Private names of transformers 5.23 and 5.24
(`_resolve_parallel_plans`, `_hf_quantized_needs_local_tp`) stand here alone.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

from ckpt.layers import unwrapped
from ckpt.parallel.mesh import Layout


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
    apply_tensor_parallelism(base, layout.tensor_mesh, plan)
    for name, style in plan.items():
        if style in ("colwise", "rowwise") and isinstance(module := _get(base, name), nn.Linear):
            module._hf_quantized_needs_local_tp = True  # "compute on local slices"


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
