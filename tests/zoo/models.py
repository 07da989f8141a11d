"""Tiny random models and their batches, by architecture name (the model_type of the causal-LM mapping)."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.configuration_utils import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from . import sizes
from .configs import Shape, make_config
from .overrides import OVERRIDES

KNOWN_UNBUILDABLE: dict[str, str] = {}
"""Architecture -> why no tiny model of it can be built here. Empty with transformers 5.24; a test keeps it honest."""

_DECODER_OF = {"musicgen": "MusicgenForCausalLM", "musicgen_melody": "MusicgenMelodyForCausalLM"}
"""The mapping names the composite's config; its causal LM takes the decoder's config, which no auto class maps."""

_SAME_MODEL = {"dots3_note": "dots3_note_text"}
"""Built through another config of the same model class: the composite's vision config insists on its 27 real layers."""

_ENCODER_STATES = {
    **dict.fromkeys(
        (
            *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "musicgen_decoder"),
            *("musicgen_melody_decoder", "mvp", "pegasus", "plbart", "prophetnet", "trocr"),
        ),
        "encoder_hidden_states",
    ),
    "whisper": "encoder_outputs",
    "mllama_text_model": "cross_attention_states",
}
"""model_type -> the argument that feeds its cross-attention: states that require a gradient, as beside an encoder."""


def names() -> list[str]:
    """Return every architecture of the installed transformers' causal-LM mapping, sorted."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config(name: str, dropout: float = 0.0, layers: int = 4, layer_drop: float = 0.0) -> PreTrainedConfig:
    """Build the tiny config of one architecture."""
    if name not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ValueError(f"{name!r} is no causal LM of transformers {transformers.__version__}: see zoo.names()")
    made = make_config(CONFIG_MAPPING[_SAME_MODEL.get(name, name)], Shape(layers, dropout, layer_drop), OVERRIDES)
    if name in _DECODER_OF:
        return made.decoder
    if name == "gemma3n":
        _use_stand_in_tower(made, Shape(layers, dropout))
    if hasattr(made, "is_decoder") and not made.is_encoder_decoder:
        made.is_decoder = True  # bert and its kin attend both ways otherwise
    return made


def _use_stand_in_tower(made: PreTrainedConfig, shape: Shape) -> None:
    """Give Gemma 3n SigLIP's vision tower: its own needs timm, whose torchvision does not import beside a CPU torch.

    Text alone never calls the tower. Written past the dataclass's type check, which wants the timm config.
    """
    tower = make_config(CONFIG_MAPPING["siglip_vision_model"], shape, OVERRIDES)
    for key in ("vocab_size", "vocab_offset", "rms_norm_eps"):
        setattr(tower, key, getattr(made.vision_config, key))
    made.__dict__["vision_config"] = tower


def build(name: str, dropout: float = 0.0, seed: int = 0, layers: int = 4, layer_drop: float = 0.0) -> PreTrainedModel:
    """Build a tiny fp32 model on the CPU, in training mode, its weights a function of (name, layers, seed) alone.

    The caller's random state is left as it was.
    """
    made = config(name, dropout, layers, layer_drop)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if name in _DECODER_OF:
            model = getattr(transformers, _DECODER_OF[name])(made)
        else:
            model = AutoModelForCausalLM.from_config(made)
        vary_weights(model, seed)
    return model.float().train()


@torch.no_grad()
def vary_weights(model: nn.Module, seed: int) -> None:
    """Add noise to every parameter: constant ones (norms, biases, gates) hide wrong gradients behind symmetry."""
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.parameters():
        scale = 0.05 if parameter.dim() > 1 else 0.1  # 0.05 * sqrt(64 inputs) = 0.4: activations stay of order one
        parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)


def batch(model: PreTrainedModel, seq_len: int, batch: int = 2, seed: int = 0) -> dict[str, Any]:
    """Make the keyword arguments of one training forward: (batch, seq_len) random tokens, labels, no cache, no mask."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    kind = model.config.model_type
    tokens = torch.randint(3, sizes.FIRST_SPECIAL, (batch, seq_len), generator=generator)
    inputs: dict[str, Any] = {"input_ids": tokens, "labels": tokens.clone(), "use_cache": False}
    if kind in ("musicgen_decoder", "musicgen_melody_decoder"):  # one row of tokens a codebook
        books = model.config.num_codebooks
        tokens = torch.randint(3, sizes.FIRST_SPECIAL, (batch, books, seq_len), generator=generator)
        inputs |= {"input_ids": tokens.flatten(0, 1), "labels": tokens.transpose(1, 2).contiguous()}
    if kind == "git":  # its loss skips the image's positions, present or not
        size = model.config.vision_config.image_size
        inputs["pixel_values"] = normal(batch, 3, size, size)
    if kind in ("gemma4_assistant", "gemma4_unified_assistant"):
        inputs |= _main_model_states(model, batch, seq_len, normal)
    if kind in _ENCODER_STATES:
        states = normal(batch, 6, sizes.HIDDEN).requires_grad_()
        name = _ENCODER_STATES[kind]
        inputs[name] = (states,) if name == "encoder_outputs" else states
    return inputs


def _main_model_states(model: PreTrainedModel, batch: int, seq_len: int, normal) -> dict[str, Any]:
    """Gemma 4 assistants continue the main model: its embeddings and the keys and values of its last layers."""
    text = model.config.get_text_config()
    attention = {layer.self_attn.layer_type: layer.self_attn for layer in model.model.layers}

    def one(head_dim: int) -> Tensor:
        return normal(batch, text.num_key_value_heads, seq_len, head_dim).requires_grad_()

    shared = {kind: (one(module.head_dim), one(module.head_dim)) for kind, module in attention.items()}
    return {
        "inputs_embeds": normal(batch, seq_len, 2 * model.config.backbone_hidden_size),
        "shared_kv_states": shared,
        # transformers 5.24 slices per-layer inputs that an assistant lacks, unless this is a tensor
        "logits_to_keep": torch.arange(seq_len),
    }


def tensors_of(inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a batch that require a gradient, named by their place in it."""
    found: dict[str, Tensor] = {}

    def walk(name: str, value: Any) -> None:
        if isinstance(value, Tensor) and value.requires_grad:
            found[name] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(f"{name}.{key}", item)
        elif isinstance(value, list | tuple):
            for index, item in zip(itertools.count(), value):
                walk(f"{name}.{index}", item)

    walk("batch", inputs)
    return found
