"""Put a policy into a model, reversibly, and prove that it is in force.

The seam is transformers' own: a `GradientCheckpointingLayer` calls `self._gradient_checkpointing_func(function, *args)`
where it would run its forward. We set that attribute, and the flag that enables it, on the *instances*; nothing is
wrapped, so parameter names, state dict and hooks stay as they are. Layers of a plain class get an instance `forward`.

>>> handle = apply(model, "selective")      # doctest: +SKIP
>>> loss.backward(); print(handle.audit())  # doctest: +SKIP
>>> handle.undo()                           # doctest: +SKIP
"""

from __future__ import annotations

import fnmatch
from collections import Counter
from collections.abc import Mapping
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckpt import strategies, tiling
from ckpt.audit import Audit, audit_of
from ckpt.engine.region import Region
from ckpt.engine.segments import SegmentTail
from ckpt.engine.store import Store
from ckpt.engine.tiles import Chain
from ckpt.guard import Guard, has_own_forward, is_native, refuse_without_seam, remove_guards
from ckpt.layers import Layer, find_layers, unwrapped
from ckpt.plan import LayerPlan, Plan, Policy, Rule

if TYPE_CHECKING:
    from ckpt.compile import Compiled


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
        self.store: Store | None = None  # where offloaded tensors are
        self.chains: dict[int, Chain] = {}  # by layer, its tiled MLP
        self.norms: list[Chain] = []  # norms that are tiled by themselves
        self.not_tiled: dict[int, str] = {}
        self.checked = False
        self.compiled: Compiled | None = None  # what was lowered to the compiler

    def audit(self) -> Audit:
        """Return what happened since `apply`: per layer calls, replays, ops kept and run again, bytes kept."""
        return audit_of(self)

    def plan(self) -> Plan:
        """Return the decisions in force as a Plan, by key. Call it after a step."""
        if any(region.latest is None for region in self.regions):
            raise ValueError("the ops that decisions are about are known after a step: run one, then ask for the plan")
        if self.compiled is not None:
            return Plan(self.compiled.plan_layers(), name=self.policy.name)
        layers = [LayerPlan(replay=False) for _ in range(self.num_layers)]
        for region in self.regions:
            rule = self.policy.rule(region.index, self.num_layers)
            decisions = {}
            if region.latest is not None:
                for op in region.latest.record.ops:
                    decision = self.policy.decide(region.index, op) if op.makes else None
                    if op.key == region.middle_key:
                        decision = rule.middle
                    if decision is not None:
                        decisions[op.key] = decision
            layers[region.index] = LayerPlan(True, rule.segment, rule.inner, rule.offload_input, decisions)
        own = {name: getattr(self.policy, name, None) for name in ("offload", "loss", "tile_mlp")}
        return Plan(layers, name=self.policy.name, source=dict(getattr(self.policy, "source", {})), **own)

    def undo(self) -> None:
        """Put the model back as it was, attribute for attribute. Undoing twice does nothing."""
        remove_guards(self._model, self)
        for module, key, old in reversed(self._undo):
            if old is _MISSING:
                module.__dict__.pop(key, None)
            else:
                module.__dict__[key] = old
        if self._loss is not None:
            self._loss.undo()
        if self.store is not None:
            self.store.retire()
        self._undo, self._loss, self.store, self.chains, self.norms = [], None, None, {}, []

    def _set(self, module: nn.Module, key: str, value) -> None:
        self._undo.append((module, key, module.__dict__.get(key, _MISSING)))
        module.__dict__[key] = value


def apply(
    model: nn.Module,
    strategy,
    workload=None,
    *,
    loss: str = "full",
    tile_mlp: int | str = 1,
    dynamic: tuple[str, ...] = (),
    compile: bool | Mapping[str, Any] = False,
) -> Applied:
    """Put a strategy in force on `model`.

    Args:
        model: a Hugging Face causal LM, bare or wrapped (PEFT).
        strategy: a strategy, its name ("full"), a Policy or a Plan.
        workload: what `Auto` plans for; other strategies need none.
        loss: "full", or "chunked": `model(..., labels=...)` computes its loss without materialising logits.
        tile_mlp: tiles of the token-wise part of a layer; 1 is none. "auto" takes the fewest that no longer set
            the peak predicted for the workload.
        dynamic: patterns of layer names that are recorded at every call, for layers whose path depends on something
            that the engine cannot see.
        compile: True compiles the decoder layers and lowers the strategy to the compiler; a mapping gives arguments
            of `torch.compile`. What cannot be lowered (offload, segments, tiles, plans) is refused.

    Raises:
        ValueError: an unknown strategy, no layer to checkpoint, an architecture that is refused, a strategy already in
            force, a class whose forward was replaced so that it no longer calls the checkpointing function.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch module, not {type(model).__name__}")
    dynamic = (dynamic,) if isinstance(dynamic, str) else tuple(dynamic)
    if compile and strategies.makes_plan(strategy):
        raise ValueError(f"compile=True with strategy {strategy.name}: plans cannot be lowered. Use compile=False.")
    layers = find_layers(model)
    _refuse_what_is_there(model, layers)  # before a plan is made, which takes time
    policy = resolve(strategy, model, workload)
    # A plan that was made together with them brings its own.
    loss, tile_mlp = getattr(policy, "loss", None) or loss, getattr(policy, "tile_mlp", None) or tile_mlp
    inner = unwrapped(model)
    if tile_mlp == "auto":
        tile_mlp = 1 if compile else tiling.auto_tiles(model, policy, workload, loss)  # compiled layers cannot be tiled
    applied = Applied(inner, policy, len(layers))
    try:
        if compile is not False:
            from ckpt.compile import lower  # imported when asked for: it brings the compiler

            applied.compiled = lower(applied, layers, policy, tile_mlp, dynamic, compile)
        else:
            if tile_mlp is True or tile_mlp != 1:  # before the layers are patched: it runs the plain model
                tiling.tile(applied, model, layers, tile_mlp)
            _patch_layers(applied, model, layers, policy, dynamic)
        applied._set(inner, "_ckpt_applied", applied)
        if applied.regions:
            Guard(applied, _set_model_flags(applied, model)).attach(inner)
        elif applied.compiled is not None and applied.compiled.watched:
            applied.compiled.guard(applied, _set_model_flags(applied, model)).attach(inner)
        if loss == "chunked":
            from ckpt.engine.loss import attach_chunked_loss

            applied._loss = attach_chunked_loss(model)
        elif loss != "full":
            raise ValueError(f"loss={loss!r} is unknown; it is full or chunked")
    except BaseException:
        applied.undo()
        raise
    return applied


def resolve(strategy, model=None, workload=None) -> Policy:
    """Return the policy that a strategy, a name, a Policy or a Plan stands for."""
    if isinstance(strategy, str):
        strategy = strategies.make(strategy)
    if isinstance(strategy, type):
        raise ValueError(f"strategy is the class {strategy.__name__}; make an object of it: {strategy.__name__}()")
    if hasattr(strategy, "rule") and hasattr(strategy, "decide"):
        return strategy
    if strategies.makes_plan(strategy):
        if workload is None:
            raise ValueError(
                f"strategy {strategy.name} plans for a workload: ckpt.apply(model, strategy, ckpt.Workload(...))"
            )
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
    for pattern in dynamic:
        if not any(fnmatch.fnmatchcase(layer.name, pattern) for layer in layers):
            raise ValueError(f"dynamic={pattern!r} matches no layer; they are named {layers[0].name!r} and so on")
    rules = [policy.rule(layer.index, len(layers)) for layer in layers]
    for index, rule in enumerate(rules):
        if not isinstance(rule, Rule) or rule.inner not in ("keep", "replay"):
            raise ValueError(
                f"the policy's rule() of layer {index} returned {rule!r}; it is a ckpt.Rule, with inner keep or replay"
            )
    where = getattr(policy, "offload", None)
    if where is not None:
        if not isinstance(where, Mapping) or "target" not in where:
            raise ValueError(f'the policy\'s offload is {where!r}; it is a table such as {{"target": "host"}}')
        applied.store = Store(where["target"], where.get("directory"))
    num_alike = Counter((rule.replay, rule.offload_input) for rule in rules)
    tails: dict[int, SegmentTail] = {}
    for layer, rule in zip(layers, rules, strict=True):
        if not rule.replay:
            if layer.is_native and "gradient_checkpointing" in layer.module.__dict__:
                applied._set(layer.module, "gradient_checkpointing", False)
            continue
        region = Region(layer.module, layer.index, f"layer {layer.index} ({layer.name}, {layer.kind})", policy.decide)
        if any(fnmatch.fnmatchcase(layer.name, pattern) for pattern in dynamic):
            region.becomes_dynamic("declared dynamic")
        if rule.offload_input and applied.store is None:
            raise ValueError(f"the policy offloads the input of layer {layer.index} and names no target, host or disk")
        region.store, region.offloads_input, region.middle = applied.store, rule.offload_input, rule.middle
        region.num_alike = num_alike[rule.replay, rule.offload_input]
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


def _set_model_flags(applied: Applied, model: nn.Module) -> list[nn.Module]:
    """Set the flag of models and stacks that carry one, and return them. They use it to turn their cache off;
    positional caches reach layers otherwise."""
    flagged = [m for m in model.modules() if not is_native(m) and "gradient_checkpointing" in m.__dict__]
    for module in flagged:
        applied._set(module, "_gradient_checkpointing_func", _run)
        applied._set(module, "gradient_checkpointing", True)
    return flagged


def _run(function, *args):
    return function(*args)


class _PlainForward:
    """An instance `forward` for layers that are no GradientCheckpointingLayer."""

    def __init__(self, layer: nn.Module, region: Region):
        self._layer = layer
        self._region = region
        self._own = layer.__dict__.get("forward")

    def __call__(self, *args, **kwargs):
        forward = self._own or MethodType(type(self._layer).forward, self._layer)
        if self._layer.training and torch.is_grad_enabled():
            return self._region(partial(forward, **kwargs), *args)
        return forward(*args, **kwargs)


def _refuse_what_is_there(model: nn.Module, layers: list[Layer]) -> None:
    if applied_to(model) is not None:
        raise ValueError("a strategy is in force on this model already; call handle.undo() first")
    for name, module in model.named_modules():
        function = module.__dict__.get("_gradient_checkpointing_func")
        if function is not None and module.__dict__.get("gradient_checkpointing"):
            if function is _run or isinstance(function, Region):
                raise ValueError("a strategy is in force on the model that this is a part of; call handle.undo() first")
            raise ValueError(
                "Transformers' own activation checkpointing is on. Call model.activation_checkpointing_disable(), and "
                "leave activation_checkpointing out of TrainingArguments: it would replace this strategy silently."
            )
        if type(module).__name__ == "CheckpointWrapper":  # by name: not every build of torch has torch.distributed
            raise ValueError(f"{name} is wrapped by torch's checkpoint_wrapper and would be replayed twice. Unwrap it.")
    for layer in layers:
        if has_own_forward(layer.module):
            continue  # accelerate's hooks call the class's forward; the guard sees whether it was reached
        if layer.is_native:
            refuse_without_seam(type(layer.module))


__all__ = ["Applied", "apply", "applied_to", "resolve"]
