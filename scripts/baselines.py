"""What `auto` is compared with: small models by architecture, and checkpointing as people set it by hand.

    for name, enable in BASELINES.items():
        undo = enable(model)            # on a plain model
        step(model, ids, ids); undo()

The selective ones are torch's own contexts (`create_selective_checkpoint_contexts`) through the library's seam, as
peers use them; "ours" are this repository's strategies of the same meaning.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

import ckpt
from ckpt.layers import find_layers

aten = torch.ops.aten
VOCAB = 512
ATTENTION = frozenset(
    {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
    }
)
MATMULS = frozenset(
    {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default, aten._grouped_mm.default}
)

Enable = Callable[[nn.Module], Callable[[], None]]


def config_of(arch: str, tokens: int, layers: int = 8, hidden: int = 256) -> PreTrainedConfig:
    """Make the small config of an architecture: vocab 512, heads of 64."""
    heads = max(1, hidden // 64)
    plain = {
        "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": hidden * 7 // 2, "num_hidden_layers": layers,
        "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4), "head_dim": 64,
        "max_position_embeddings": tokens, "pad_token_id": 0,
    }  # fmt: skip
    more = {
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen3_next": {
            "moe_intermediate_size": hidden // 2, "shared_expert_intermediate_size": hidden // 2, "num_experts": 4,
            "num_experts_per_tok": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        },
    }.get(arch, {})  # fmt: skip
    return CONFIG_MAPPING[arch](**plain, **more)


def build(config: PreTrainedConfig) -> nn.Module:
    """Build the model of a config, fp32, in training mode, from seed 0."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).float().train()


def step(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Forward and backward from no gradients; return the loss."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, labels=labels, use_cache=False).loss
    loss.backward()
    return loss.detach()


def library(n: int) -> Enable:
    """Return the library's own checkpointing of every n-th layer."""

    def enable(model: nn.Module) -> Callable[[], None]:
        model.activation_checkpointing_enable(every_n_layers=n)
        return model.activation_checkpointing_disable

    return enable


def by_layer(*kinds: Callable | None) -> Enable:
    """Return a mix: layer i gets kind i modulo their number; None leaves it unchecked."""

    def enable(model: nn.Module) -> Callable[[], None]:
        layers = [layer.module for layer in find_layers(model)]
        old = [dict(layer.__dict__) for layer in layers]
        for i, layer in enumerate(layers):
            kind = kinds[i * len(kinds) // len(layers)] if len(kinds) > 2 else kinds[i % len(kinds)]
            layer.gradient_checkpointing = kind is not None
            if kind is not None:
                layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False, **kind())

        def undo() -> None:
            for layer, values in zip(layers, old, strict=True):
                for key in ("gradient_checkpointing", "_gradient_checkpointing_func"):
                    layer.__dict__.pop(key, None)
                    if key in values:
                        layer.__dict__[key] = values[key]

        return undo

    return enable


def whole() -> dict:
    """Replay the whole layer."""
    return {}


def keeping(ops: frozenset) -> Callable[[], dict]:
    """Keep the outputs of these ops, by torch's contexts."""

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in ops else CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}


def every_second_matmul() -> dict:
    """Keep attention and every second matmul, as torchtitan does."""

    def contexts():
        seen = {False: 0, True: 0}

        def policy(ctx, op, *args, **kwargs):
            if op in MATMULS:
                seen[ctx.is_recompute] += 1
                return CheckpointPolicy.MUST_SAVE if seen[ctx.is_recompute] % 2 else CheckpointPolicy.PREFER_RECOMPUTE
            return CheckpointPolicy.MUST_SAVE if op in ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return {"context_fn": contexts}


def ours(strategy: object) -> Enable:
    """Return one of this repository's strategies."""
    return lambda model: ckpt.apply(model, strategy).undo


_attention, _matmuls = keeping(ATTENTION), keeping(ATTENTION | MATMULS)
BASELINES: dict[str, Enable] = {
    "library, every layer": library(1),
    "library, every 2nd layer": library(2),
    "library, every 4th layer": library(4),
    "attention kept": by_layer(_attention),
    "every 2nd matmul kept": by_layer(every_second_matmul),
    "all matmuls kept": by_layer(_matmuls),
    "mix: whole, attention": by_layer(whole, _attention),
    "mix: attention, matmuls": by_layer(_attention, _matmuls),
    "mix: whole, then attention, then nothing": by_layer(whole, _attention, None),
    "mix: whole, then matmuls, then nothing": by_layer(whole, _matmuls, None),
    "ours: attention": ours(ckpt.Selective("attention")),
    "ours: attention+matmul": ours(ckpt.Selective("attention+matmul")),
    "ours: every 2nd layer": ours(ckpt.EveryN(2)),
}
