"""Find the decoder layers of a causal LM, in the order they are numbered.

A decoder layer is what transformers checkpoints: an instance of `GradientCheckpointingLayer` inside the language
decoder. Vision and audio towers are left alone. A few old architectures have layers of a plain class; they are found
as the longest `ModuleList` whose items are of one class and own parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

# Architectures that cannot be replayed exactly, with the reason a user sees.
REFUSED = {
    "reformer": "its layers are reversible and run a backward of their own, which already recomputes activations",
}

# Submodules whose layers belong to another modality and are not part of the language decoder.
_OTHER_TOWERS = ("vision", "visual", "audio", "image", "speech", "vqmodel", "codec", "perceiver")


@dataclass(frozen=True, slots=True)
class Layer:
    """One decoder layer. name: within the model that was given."""

    index: int
    name: str
    module: nn.Module
    is_native: bool  # a GradientCheckpointingLayer, which calls the function we give it

    @property
    def kind(self) -> str:
        return type(self.module).__name__


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the Hugging Face model inside wrappers such as PEFT's (or `model` itself)."""
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return model
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            return module
    return model


def find_layers(model: nn.Module) -> list[Layer]:
    """Return the decoder layers of `model`, numbered from 0.

    Raises:
        ValueError: if the architecture is refused by name, or no layer is found.
    """
    inner = unwrapped(model)
    config = getattr(inner, "config", None)
    model_type = getattr(config, "model_type", type(inner).__name__)
    if model_type in REFUSED:
        raise ValueError(f"{model_type} cannot be checkpointed by layers: {REFUSED[model_type]}. Train it as it is.")
    names = {id(m): name for name, m in model.named_modules()}
    modules = _native_layers(inner) or _plain_layers(inner)
    if not modules:
        raise ValueError(
            f"{type(inner).__name__} has no decoder layers to be checkpointed: no GradientCheckpointingLayer and "
            "no ModuleList of equal layers. Give a causal LM of Hugging Face Transformers."
        )
    return [
        Layer(i, names.get(id(m), f"layer {i}"), m, isinstance(m, GradientCheckpointingLayer))
        for i, m in enumerate(modules)
    ]


def _decoder(model: nn.Module) -> nn.Module:
    get = getattr(model, "get_decoder", None)
    try:
        decoder = get() if get is not None else None
    except (NotImplementedError, AttributeError):
        decoder = None
    return decoder if isinstance(decoder, nn.Module) else model


def _native_layers(model: nn.Module) -> list[nn.Module]:
    for root in dict.fromkeys((_decoder(model), model)):
        found: list[nn.Module] = []
        inside: set[int] = set()
        for name, module in root.named_modules():
            if id(module) in inside or any(part in name.lower() for part in _OTHER_TOWERS):
                continue
            if isinstance(module, GradientCheckpointingLayer):
                found.append(module)
                inside.update(id(m) for m in module.modules() if m is not module)
        if found:
            return found
    return []


def _plain_layers(model: nn.Module) -> list[nn.Module]:
    best: list[nn.Module] = []
    for module in _decoder(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) > len(best):
            children = list(module)
            if len({type(c) for c in children}) == 1 and any(True for _ in children[0].parameters()):
                best = children
    return best if _is_layer_like(best) else []


def _is_layer_like(modules: list[nn.Module]) -> bool:
    return bool(modules) and not isinstance(modules[0], (nn.Linear, nn.Embedding, nn.LayerNorm))


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the first parameter, the CPU if there is none."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))
