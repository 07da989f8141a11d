"""Watch a patched model's forwards: refuse what would be wrong, prove that the layers were reached.

Forward hooks of the model. They know the layers that a strategy replays, and nothing of what is kept of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from ckpt.engine.region import Region

if TYPE_CHECKING:
    from ckpt.patching import Applied


class Guard:
    """The hooks of one `Applied`."""

    def __init__(self, applied: Applied, flagged: list[nn.Module]):
        self._applied = applied
        self._flagged = flagged  # models and stacks that look at their `gradient_checkpointing`
        self._calls_before: dict[int, int] = {}
        self._ran: set[int] = set()
        self._watches: list = []

    def attach(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after)
        model.register_forward_hook(self.always, always_call=True)

    def before(self, model, args, kwargs):
        regions = self._applied.regions
        if not torch.is_grad_enabled():
            # Stacks with the flag on drop their cache whenever they train, with gradients or not: generation in
            # training mode would see the last token alone (gpt2 and others, transformers 5.24).
            self._set_flags(False)
            return
        self._calls_before = {r.index: r.counts.calls for r in regions}
        refuse_eval(model, regions, [*args, *kwargs.values()])
        refuse_filled_cache((*args, *kwargs.values()))
        for kind in {type(r.layer): None for r in regions if is_native(r.layer) and not has_own_forward(r.layer)}:
            refuse_without_seam(kind)
        for region in regions:
            if region.segment is not None:
                region.segment.clear()
            if is_native(region.layer) and has_own_forward(region.layer):
                self._watches.append(region.layer.register_forward_pre_hook(_Note(self._ran, region.index)))

    def after(self, model, args, output):
        applied = self._applied
        trained = [r for r in applied.regions if r.layer.training]
        if not torch.is_grad_enabled() or not trained:
            return
        missed = [r for r in trained if r.counts.calls == self._calls_before.get(r.index)]
        if len(missed) == len(trained) and not _drops_layers(model):
            kinds = ", ".join(sorted({type(r.layer).__name__ for r in trained}))
            if any(_stock_checkpoints(r.layer) for r in trained):
                raise RuntimeError(
                    f"Transformers' own checkpointing was switched on for {kinds} after ckpt.apply and replaced its "
                    "strategy. In TrainingArguments, or TRL's SFTConfig where it is on by default, set "
                    "gradient_checkpointing=False; elsewhere leave activation_checkpointing_enable() out."
                )
            raise RuntimeError(
                f"no layer was checkpointed in this forward: the checkpointing function of {kinds} was replaced, or a "
                "`forward` put on its instances does not call it. Enable no second checkpointing, and let such a patch "
                "call the forward it replaces."
            )
        for region in missed:
            if region.index in self._ran:
                raise RuntimeError(
                    f"{region.name} ran without being checkpointed: the `forward` put on the instance does not call "
                    "the class's. Let that patch call the forward it replaces."
                )
        if not applied.checked:
            applied.checked = True
            seen = {r.index: r.keys_seen for r in applied.regions if r.counts.records}
            dynamic = {r.index for r in applied.regions if r.dynamic_because}
            complaint = applied.policy.complaint(seen, {r.index: r.matched for r in applied.regions}, dynamic)
            if complaint:
                applied.undo()  # the model is left as it was: nobody may hold the handle
                raise ValueError(complaint)

    def always(self, model, args, output):
        self._set_flags(True)
        for watch in self._watches:
            watch.remove()
        self._watches.clear()
        self._ran.clear()
        if self._applied.store is not None:
            self._applied.store.end_of_forward()

    def _set_flags(self, value: bool) -> None:
        for module in self._flagged:
            module.gradient_checkpointing = value


class _Note:
    """Forward pre-hook that says that a layer ran."""

    def __init__(self, ran: set[int], index: int):
        self._ran, self._index = ran, index

    def __call__(self, module, args):
        self._ran.add(self._index)


def remove_guards(model: nn.Module, applied: Applied) -> None:
    """Remove the guard's hooks by whom they serve, not by handle: a deep copy of the model has copies of the hooks."""
    for hooks, extras in (
        (model._forward_pre_hooks, (model._forward_pre_hooks_with_kwargs,)),
        (model._forward_hooks, (model._forward_hooks_with_kwargs, model._forward_hooks_always_called)),
    ):
        for key, hook in list(hooks.items()):
            guard = getattr(hook, "__self__", None)
            if getattr(guard, "_applied", None) is applied:
                del hooks[key]
                for extra in extras:
                    extra.pop(key, None)


def is_native(layer: nn.Module) -> bool:
    """True for a layer that calls the checkpointing function it is given."""
    return isinstance(layer, GradientCheckpointingLayer)


def has_own_forward(layer: nn.Module) -> bool:
    """True if the instance has a `forward` of its own, such as accelerate's hooks: it calls the class's, or not."""
    return layer.__dict__.get("forward") is not None


def _stock_checkpoints(layer: nn.Module) -> bool:
    """True if the layer checkpoints itself with a function that is not ours, as Trainer's flag makes it do."""
    function = layer.__dict__.get("_gradient_checkpointing_func")
    return is_native(layer) and layer.gradient_checkpointing and not isinstance(function, (Region, type(None)))


def refuse_without_seam(kind: type) -> None:
    """Raise ValueError if the class's `forward` is not the wrapper that GradientCheckpointingLayer puts around it."""
    forward = kind.forward
    code = getattr(forward, "__code__", None)
    if code is None or code.co_name != "forward_with_checkpointing":
        raise ValueError(
            f"{kind.__name__}.forward was replaced ({forward.__module__}.{forward.__qualname__}), so it no longer "
            "calls the checkpointing function and nothing would be recomputed. Patch instances instead of the class, "
            "or apply that patch before Transformers builds the class."
        )


def refuse_filled_cache(inputs: Iterable) -> None:
    """Raise ValueError if a cache that holds tokens is among a training forward's arguments."""
    if any(isinstance(value, Cache) and value.get_seq_length() > 0 for value in inputs):
        raise ValueError(
            "a filled cache was passed in training with activation checkpointing on; replaying a layer would "
            "extend it twice. Pass the prefix as tokens or embeddings, or use strategy none."
        )


def refuse_eval(model: nn.Module, regions: list[Region], inputs: list) -> None:
    """Layers in eval mode are not checkpointed: refuse those that would keep their activations."""
    resting = [r for r in regions if not r.layer.training]
    if not resting:
        return
    last = resting[-1]
    later = {id(p) for r in regions if r.index > last.index for p in r.layer.parameters()}
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    tied = model.get_input_embeddings() if head is not None and hasattr(model, "get_input_embeddings") else None
    if head is not None and tied is not None and getattr(tied, "weight", None) is not getattr(head, "weight", None):
        later |= {id(p) for p in head.parameters()}
    reaches = any(p.requires_grad and id(p) not in later for p in model.parameters())
    if reaches or any(t.requires_grad for t in _tensors(inputs)):
        which = "the model is" if len(resting) == len(regions) else f"{last.name} is"
        raise RuntimeError(
            f"{which} in eval mode with gradients on, where layers would keep all activations. Call model.train() to "
            "train, torch.no_grad() to evaluate, or handle.undo() to differentiate in eval mode."
        )


def _tensors(values) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())


def _drops_layers(model: nn.Module) -> bool:
    """True if the model may skip layers at random in training (LayerDrop): then all of them may be missed by chance."""
    config = getattr(model, "config", None)
    return any((getattr(config, name, 0) or 0) > 0 for name in ("layerdrop", "layer_drop", "decoder_layerdrop"))
