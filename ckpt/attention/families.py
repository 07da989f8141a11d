"""Which model families can keep packed documents apart, and why the others cannot.

Most reasons are read off the model: layer types of the config, classes of its layers, the signature of its forward.
What cannot be read off stands in `_REASONS` by model type. What neither catches is caught by `prepare`, at the
first forward.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM

# Values of config.layer_types (and of its older spellings) that this attention computes.
_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention", "attention"})
_LAYER_TYPE_FIELDS = ("layer_types", "layers_block_type", "block_types", "attention_types", "attn_types")
_DROPOUT_FIELDS = (
    "attention_dropout",
    "attn_pdrop",
    "attention_probs_dropout_prob",
    "attn_dropout",
    "attn_dropout_prob",
    "attention_dropout_prob",
)

# Classes that mix tokens along the sequence without attention: state would run from one document into the next.
_STATEFUL = re.compile(
    r"(?i:mamba|rwkv|recurrent|rglru|deltanet|shortconv|conv1d$|lightning|linearattention|lstm|retention|timemix)|SSM"
)
_NOT_STATEFUL = frozenset({"Conv1D"})  # GPT-2's name for a linear layer

# By model type, what cannot be read off.
_REASONS: dict[str, str] = {
    "doge": "it adds a learned bias to every attention score",
    "gemma4_assistant": "it continues another model's row, from the states of that model",
    "gemma4_unified_assistant": "it continues another model's row, from the states of that model",
    "git": "it calls its own attention",
    "mllama": "its cross-attention layers read an image, not the row",
    "mllama_text_model": "its cross-attention layers read an image, not the row",
    "nemotron": "its decoder layers do not hand keywords on, so that document boundaries cannot reach its attention",
    "reformer": "its LSH and chunked attention work on the whole row",
    "stablelm": "its decoder layers do not hand keywords on, so that document boundaries cannot reach its attention",
}


def text_config(config: Any) -> Any:
    """Give the decoder's part of a composite config."""
    get = getattr(config, "get_text_config", None)
    return get(decoder=True) if get else config


def decoder(model: nn.Module) -> nn.Module:
    """Give the module that holds the decoder layers, without the vision and audio towers of a composite model."""
    get = getattr(model, "get_decoder", None)
    found = get() if get else None
    return model if found is None else found


def layer_types(config: Any) -> list[str]:
    """List the kind of each layer as the config spells it; empty where it does not."""
    for field in _LAYER_TYPE_FIELDS:
        kinds = getattr(config, field, None)
        if isinstance(kinds, (list, tuple)) and kinds and all(isinstance(kind, str) for kind in kinds):
            return list(kinds)
    return []


def model_class(model: Any) -> type | None:
    """Give the class behind a module (PEFT's wrapper aside) or a config; None where a config has no causal LM."""
    if isinstance(model, nn.Module):
        return type(unwrap(model))
    found = AutoModelForCausalLM._model_mapping.get(type(model), None)
    return found[0] if isinstance(found, tuple) else found


def unwrap(model: nn.Module) -> nn.Module:
    """Give the Transformers model inside a PEFT model; any other module is its own."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def refusal(model: Any) -> str | None:
    """Say in half a sentence why this model cannot keep packed documents apart; None when nothing speaks against it.

    `model`: a module, or a config, of which less can be read off.
    """
    whole = unwrap(model).config if isinstance(model, nn.Module) else model
    config, kind = text_config(whole), model_class(model)
    for name in (whole.model_type, config.model_type):
        if name in _REASONS:
            return _REASONS[name]
    if whole.is_encoder_decoder:
        return "an encoder-decoder's cross-attention knows no document boundaries"
    other = sorted(set(layer_types(config)) - _ATTENTION_TYPES)
    if other:
        return f"its {' and '.join(other)} layers are not causal attention over a document or a window of it"
    modules = list(decoder(unwrap(model)).modules()) if isinstance(model, nn.Module) else []
    names = {type(m).__name__ for m in modules} - _NOT_STATEFUL
    stateful = sorted(name for name in names if _STATEFUL.search(name))
    if stateful:
        return f"its {stateful[0]} carries state along the row, from one document into the next"
    if kind is None:
        return "Transformers has no causal language model for it"
    if not kind._can_set_attn_implementation():
        return "its attention is written into the model and cannot be exchanged (it has no AttentionInterface)"
    parameters = inspect.signature(kind.forward).parameters
    if not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return (
            f"{kind.__name__}.forward takes no further keywords, so that document boundaries cannot reach its attention"
        )
    if "position_ids" not in parameters or any(hasattr(m, "create_position_ids_from_input_ids") for m in modules):
        return "it counts positions itself, over the whole row, and they would not restart with each document"
    return None


def check_isolation(model: Any) -> None:
    """Raise ValueError, by name, for a module or config whose family cannot keep packed documents apart."""
    reason, kind = refusal(model), model_class(model)
    if reason:
        config = unwrap(model).config if isinstance(model, nn.Module) else model
        name = getattr(kind, "__name__", type(config).__name__)
        raise ValueError(
            f"packing=isolate cannot keep documents apart in {name} ({config.model_type}): {reason}. Set "
            "data.packing=none (one document a row) or concat (documents see each other)."
        )


def dropout_in(config: Any) -> tuple[str, float] | None:
    """Find an attention dropout above 0 in the config: (field, value)."""
    config = text_config(config)
    for field in _DROPOUT_FIELDS:
        value = getattr(config, field, None)
        if isinstance(value, (int, float)) and value > 0:
            return field, value
    return None
