"""Put a policy into a model, reversibly, and prove that it is in force.

The seam is transformers' own: a `GradientCheckpointingLayer` calls `self._gradient_checkpointing_func(function, *args)`
where it would run its forward. We set that attribute, and the flag that enables it, on the *instances*; nothing is wrapped,
so parameter names, state dict and hooks stay as they are. Layers of a plain class get an instance `forward`.

>>> handle = apply(model, "selective")      # doctest: +SKIP
>>> loss.backward(); print(handle.audit())  # doctest: +SKIP
>>> handle.undo()                           # doctest: +SKIP
"""

from __future__ import annotations

from functools import partial
from types import MethodType

import torch
from torch import nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from ckpt import strategies
from ckpt.audit import Audit, audit_of
from ckpt.engine.chains import find_chains
from ckpt.engine.region import Region
from ckpt.engine.segments import SegmentTail
from ckpt.engine.tiles import Chain, HandThrough, RunTiled
from ckpt.layers import Layer, find_layers, unwrapped
from ckpt.plan import LayerPlan, Plan, Policy


class _MISSING:
    """Stands for an attribute that was not there. A class, because deep copies keep its identity."""



class Applied:
    """A policy in force on a model. Made by `apply`."""

    def __init__(self, model: nn.Module, policy: Policy, num_layers: int):
        self.policy = policy
        self.num_layers = num_layers
        self.regions: list[Region] = []
        self._model = model
        self._undo: list[tuple[nn.Module, str, object]] = []
        self._loss = None
        self.chains: dict[int, Chain] = {}  # by layer, its tiled MLP
        self.not_tiled: dict[int, str] = {}
        self.checked = False

    def audit(self) -> Audit:
        """Return what happened since `apply`: per layer calls, replays, ops kept and run again, bytes kept."""
        return audit_of(self)

    def plan(self) -> Plan:
        """Return the decisions in force as a Plan, by key. Call it after a step."""
        layers = [LayerPlan(replay=False) for _ in range(self.num_layers)]
        for region in self.regions:
            rule = self.policy.rule(region.index, self.num_layers)
            decisions = {}
            if region.latest is not None:
                for op in region.latest.record.ops:
                    decision = self.policy.decide(region.index, op) if op.makes else None
                    if decision is not None:
                        decisions[op.key] = decision
            layers[region.index] = LayerPlan(True, rule.segment, rule.inner, decisions)
        return Plan(layers, name=self.policy.name)

    def undo(self) -> None:
        """Put the model back as it was, attribute for attribute. Undoing twice does nothing."""
        _remove_guards(self._model, self)
        for module, key, old in reversed(self._undo):
            if old is _MISSING:
                module.__dict__.pop(key, None)
            else:
                module.__dict__[key] = old
        if self._loss is not None:
            self._loss.undo()
        self._undo, self._loss, self.chains = [], None, {}

    def _set(self, module: nn.Module, key: str, value) -> None:
        self._undo.append((module, key, module.__dict__.get(key, _MISSING)))
        module.__dict__[key] = value


def apply(
    model: nn.Module, strategy, workload=None, *, loss: str = "full", tile_mlp: int = 1, dynamic: tuple[str, ...] = ()
) -> Applied:
    """Put a strategy in force on `model`.

    Args:
        model: a Hugging Face causal LM, bare or wrapped (PEFT).
        strategy: a strategy, its name ("full"), a Policy or a Plan.
        workload: what `Auto` plans for; other strategies need none.
        loss: "full", or "chunked": `model(..., labels=...)` computes its loss without materialising logits.
        tile_mlp: tiles of the token-wise part of a layer; 1 is none.
        dynamic: patterns of layer names that are recorded at every call, for layers whose path depends on something
            that the engine cannot see.

    Raises:
        ValueError: an unknown strategy, no layer to checkpoint, an architecture that is refused, a strategy already in
            force, a class whose forward was replaced so that it no longer calls the checkpointing function.
    """
    policy = resolve(strategy, model, workload)
    layers = find_layers(model)
    inner = unwrapped(model)
    _refuse_what_is_there(model, layers)
    applied = Applied(inner, policy, len(layers))
    try:
        if tile_mlp != 1:  # before the layers are patched: tiling looks at what the plain model does
            _tile(applied, model, layers, tile_mlp)
        _patch_layers(applied, model, layers, policy, dynamic)
        if applied.regions:
            guard = _Guard(applied)
            inner.register_forward_pre_hook(guard.before, with_kwargs=True)
            inner.register_forward_hook(guard.after)
        if loss == "chunked":
            from ckpt.engine.loss import attach_chunked_loss

            applied._loss = attach_chunked_loss(model)
        elif loss not in ("full", "torch"):
            raise ValueError(f"loss={loss!r} is unknown; it is full or chunked")
    except BaseException:
        applied.undo()
        raise
    return applied


def resolve(strategy, model=None, workload=None) -> Policy:
    """Return the policy that a strategy, a name, a Policy or a Plan stands for."""
    if isinstance(strategy, str):
        strategy = strategies.make(strategy)
    if hasattr(strategy, "rule") and hasattr(strategy, "decide"):
        return strategy
    if hasattr(strategy, "plan") and not hasattr(strategy, "policy"):
        if workload is None:
            raise ValueError(f"strategy {strategy.name} plans for a workload: ckpt.apply(model, strategy, ckpt.Workload(...))")
        return strategy.plan(model, workload)
    if hasattr(strategy, "policy"):
        return strategy.policy()
    raise ValueError(f"strategy must be a strategy, its name, a Policy or a Plan, not {type(strategy).__name__}")


def applied_to(model: nn.Module) -> Applied | None:
    """Return the handle of the strategy in force on `model` (a deep copy of a patched model has its own)."""
    for module in model.modules():
        handle = module.__dict__.get("_ckpt_applied")
        if handle is not None:
            return handle
    return None


def _patch_layers(applied: Applied, model, layers: list[Layer], policy: Policy, dynamic: tuple[str, ...]) -> None:
    import fnmatch

    rules = [policy.rule(layer.index, len(layers)) for layer in layers]
    tails: dict[int, SegmentTail] = {}
    for layer, rule in zip(layers, rules, strict=True):
        if not rule.replay:
            if layer.is_native and "gradient_checkpointing" in layer.module.__dict__:
                applied._set(layer.module, "gradient_checkpointing", False)
            continue
        region = Region(layer.module, layer.index, f"layer {layer.index} ({layer.name}, {layer.kind})", policy.decide)
        if any(fnmatch.fnmatchcase(layer.name, pattern) for pattern in dynamic):
            region.becomes_dynamic("declared dynamic")
        if rule.segment is not None:
            region.segment = tails.setdefault(rule.segment, SegmentTail(rule.inner, layer.index))
            following = rules[layer.index + 1] if layer.index + 1 < len(layers) else None
            region.is_last_of_segment = following is None or following.segment != rule.segment
        applied.regions.append(region)
        if layer.is_native:
            applied._set(layer.module, "_gradient_checkpointing_func", region)
            applied._set(layer.module, "gradient_checkpointing", True)
        else:
            applied._set(layer.module, "forward", _PlainForward(layer.module, region))
    if applied.regions:
        applied._set(applied._model, "_ckpt_applied", applied)
        _set_model_flags(applied, model)


def _tile(applied: Applied, model: nn.Module, layers: list[Layer], num_tiles: int) -> None:
    if isinstance(num_tiles, bool) or not isinstance(num_tiles, int) or num_tiles < 1:
        raise ValueError(f"tile_mlp={num_tiles!r} must be a whole number of tiles, 1 or more")
    chains, reasons = find_chains(model, [layer.module for layer in layers])
    for layer, chain, reason in zip(layers, chains, reasons, strict=True):
        if chain is None:
            applied.not_tiled[layer.index] = reason
            continue
        chain.num_tiles = num_tiles
        applied.chains[layer.index] = chain
        for position, module in enumerate(chain.modules):
            is_last = position == len(chain.modules) - 1
            applied._set(module, "forward", RunTiled(chain) if is_last else HandThrough(chain, position))
    if not applied.chains:
        raise ValueError(f"tile_mlp={num_tiles}: no layer's MLP can be tiled, since {reasons[0]}. Set tile_mlp=1.")


def _set_model_flags(applied: Applied, model: nn.Module) -> None:
    """Models and stacks that carry the flag use it to turn their cache off; positional caches reach layers otherwise."""
    for module in model.modules():
        if not isinstance(module, GradientCheckpointingLayer) and "gradient_checkpointing" in module.__dict__:
            applied._set(module, "_gradient_checkpointing_func", _run)
            applied._set(module, "gradient_checkpointing", True)


def _run(function, *args):
    return function(*args)


class _PlainForward:
    """An instance `forward` for layers that are no GradientCheckpointingLayer."""

    def __init__(self, layer: nn.Module, region: Region):
        self._layer = layer
        self._region = region
        self._forward = layer.__dict__.get("forward") or MethodType(type(layer).forward, layer)

    def __call__(self, *args, **kwargs):
        if self._layer.training and torch.is_grad_enabled():
            return self._region(partial(self._forward, **kwargs), *args)
        return self._forward(*args, **kwargs)


class _Guard:
    """Forward hooks of the model: refuse what would be wrong, prove that the layers were reached."""

    def __init__(self, applied: Applied):
        self._applied = applied
        self._calls_before = 0

    def before(self, model, args, kwargs):
        regions = self._applied.regions
        self._calls_before = sum(r.counts.calls for r in regions)
        if not torch.is_grad_enabled():
            return
        if not any(r.layer.training for r in regions) and any(p.requires_grad for p in model.parameters()):
            raise RuntimeError(
                "the model is in eval mode with gradients on, where its layers would keep all activations. Call "
                "model.train() to train, torch.no_grad() to evaluate, or handle.undo() to differentiate in eval mode."
            )
        for value in (*args, *kwargs.values()):
            if isinstance(value, Cache) and value.get_seq_length() > 0:
                raise ValueError(
                    "a filled cache was passed in training with activation checkpointing on; replaying a layer would extend "
                    "it twice. Pass the prefix as tokens or embeddings, or use strategy none."
                )
        for region in regions:
            if region.segment is not None:
                region.segment.clear()

    def after(self, model, args, output):
        applied = self._applied
        if not torch.is_grad_enabled():
            return
        trained = [r for r in applied.regions if r.layer.training]
        if trained and sum(r.counts.calls for r in applied.regions) == self._calls_before:
            kinds = ", ".join(sorted({type(r.layer).__name__ for r in trained}))
            raise RuntimeError(
                f"no layer was checkpointed in this forward: {kinds}.forward was replaced, or the checkpointing function of "
                "its instances was. Apply the strategy after such a patch and enable no second checkpointing."
            )
        if not applied.checked and trained:
            applied.checked = True
            seen = {r.index: r.keys_seen for r in applied.regions if r.counts.records}
            dynamic = {r.index for r in applied.regions if r.dynamic_because}
            complaint = applied.policy.complaint(seen, {r.index: r.matched for r in applied.regions}, dynamic)
            if complaint:
                applied.checked = False
                raise ValueError(complaint)


def _remove_guards(model: nn.Module, applied: Applied) -> None:
    """Remove the guards' hooks by whom they serve, not by handle: a deep copy of the model has copies of the hooks."""
    for hooks, extra in (
        (model._forward_pre_hooks, model._forward_pre_hooks_with_kwargs),
        (model._forward_hooks, model._forward_hooks_with_kwargs),
    ):
        for key, hook in list(hooks.items()):
            guard = getattr(hook, "__self__", None)
            if isinstance(guard, _Guard) and guard._applied is applied:
                del hooks[key]
                extra.pop(key, None)


def _refuse_what_is_there(model: nn.Module, layers: list[Layer]) -> None:
    if applied_to(model) is not None:
        raise ValueError("a strategy is in force on this model already; call handle.undo() first")
    stock = [m for m in model.modules() if isinstance(m.__dict__.get("_gradient_checkpointing_func"), partial)]
    if any(m.__dict__.get("gradient_checkpointing") for m in stock):
        raise ValueError(
            "Transformers' own activation checkpointing is on. Call model.activation_checkpointing_disable(), and leave "
            "activation_checkpointing out of TrainingArguments: it would replace this strategy silently."
        )
    for layer in layers:
        if layer.is_native and "forward" in layer.module.__dict__:
            continue  # an instance patch: accelerate's hooks call the class's forward, which `after` verifies
        forward = type(layer.module).forward
        if layer.is_native and not _is_seam(forward):
            raise ValueError(
                f"{layer.kind}.forward was replaced ({forward.__module__}.{forward.__qualname__}), so it no longer calls the "
                "checkpointing function and nothing would be recomputed. Patch instances instead of the class, or apply "
                "that patch before Transformers builds the class."
            )


def _is_seam(forward) -> bool:
    """True if `forward` is the wrapper that GradientCheckpointingLayer puts around a class's forward."""
    code = getattr(forward, "__code__", None)
    return code is not None and code.co_name == "forward_with_checkpointing"


__all__ = ["Applied", "apply", "applied_to", "resolve"]
