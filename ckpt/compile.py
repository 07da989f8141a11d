"""Compile the decoder layers of a model with a policy in force: lower it to tags, refuse what has none.

`ckpt.apply(model, "selective", compile=True)` ends here. Layers are compiled one by one: equal ones share a graph, and
the head and its loss stay as they are. What is replayed is then in the compiled backward graph, where nothing can count
it: the audit says what was traced, `tests/test_compile.py` counts nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ckpt.compile_tags import NOT_COMPILED, Tags
from ckpt.guard import refuse_eval, refuse_filled_cache
from ckpt.layers import Layer
from ckpt.plan import Decision, LayerPlan, Policy, Rule
from ckpt.strategies import KeepPolicy, LayerPolicy

if TYPE_CHECKING:
    from ckpt.patching import Applied


def lower(
    applied: Applied,
    layers: list[Layer],
    policy: Policy,
    tile_mlp: Any,
    dynamic: tuple[str, ...],
    options: bool | Mapping[str, Any],
) -> Compiled:
    """Lower the policy into the layers and compile each; `applied` undoes it.

    options: True, or keyword arguments of `torch.compile` (backend, mode, fullgraph, dynamic).
    Raises ValueError for what no tag can express.
    """
    if options is not True and not isinstance(options, Mapping):
        raise ValueError(f"compile={options!r} must be True, False, or a mapping of torch.compile's arguments")
    rules = [policy.rule(layer.index, len(layers)) for layer in layers]
    replayed = [layer for layer, rule in zip(layers, rules, strict=True) if rule.replay]
    _refuse(policy, rules, replayed, tile_mlp, dynamic)
    compiled = Compiled(Tags(policy), rules, [_Watched(layer.module, layer.index, layer.name) for layer in replayed])
    function, own_call = _lowered(compiled.tags), _own_call()  # one of each for all layers: equal ones share a graph
    for layer, rule in zip(layers, rules, strict=True):
        if rule.replay:
            applied._set(layer.module, "_gradient_checkpointing_func", function)
            applied._set(layer.module, "gradient_checkpointing", True)
        elif layer.is_native and "gradient_checkpointing" in layer.module.__dict__:
            applied._set(layer.module, "gradient_checkpointing", False)
        call = torch.compile(MethodType(own_call, layer.module), **({} if options is True else options))
        applied._set(layer.module, "_compiled_call_impl", call)
    return compiled


def _refuse(policy: Policy, rules: list[Rule], replayed: list[Layer], tile_mlp: Any, dynamic: tuple[str, ...]) -> None:
    own = "decides op by op for each layer, which would take a graph per layer"
    reasons = {
        "offloads, and compiled code moves nothing off the device": getattr(policy, "offload", None) is not None,
        "replays several layers as one, and each is compiled alone": any(r.segment is not None for r in rules),
        own: not isinstance(policy, (LayerPolicy, KeepPolicy)),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(
                f"compile=True with strategy {policy.name}: it {reason}. Use compile=False, or one of the strategies "
                "none, full, every_n, selective."
            )
    if tile_mlp != 1:
        raise ValueError(f"compile=True with tile_mlp={tile_mlp!r}: compiled layers cannot be tiled. Set tile_mlp=1.")
    if dynamic:
        raise ValueError(f"compile=True with dynamic={dynamic!r}: compiled layers are not recorded. Leave dynamic out.")
    if plain := next((layer for layer in replayed if not layer.is_native), None):
        raise ValueError(
            f"compile=True with strategy {policy.name}: {plain.kind} is no GradientCheckpointingLayer of Transformers, "
            "so it has no place where a policy is lowered. Use compile=False, or strategy none."
        )


@dataclass(frozen=True)
class _Watched:
    """A replayed layer, as the guard's checks name it."""

    layer: nn.Module
    index: int
    name: str


@dataclass(eq=False)
class Compiled:
    """What was lowered. watched: the layers that the compiler replays."""

    tags: Tags
    rules: list[Rule]
    watched: list[_Watched]

    def guard(self, applied: Applied, flagged: list[nn.Module]) -> CompiledGuard:
        """Make the hooks that check forwards. flagged: modules that look at their `gradient_checkpointing`."""
        return CompiledGuard(applied, self, flagged)

    def plan_layers(self) -> list[LayerPlan]:
        """Return the decisions in force, layer by layer. Raises ValueError before the first step."""
        if self.watched and not self.tags.num_traced:
            raise ValueError("the ops that decisions are about are known after a step: run one, then ask for the plan")
        decisions = self.tags.decisions
        return [LayerPlan(rule.replay, decisions=dict(decisions) if rule.replay else {}) for rule in self.rules]

    def __str__(self) -> str:
        kept = sum(decision is Decision.KEEP for decision in self.tags.decisions.values())
        return (
            f"compiled, {len(self.watched)} of {len(self.rules)} layers replayed by the compiler, "
            f"{kept} of {len(self.tags.decisions)} ops of a layer kept (executions in compiled code are not counted)"
        )


def _lowered(tags: Tags) -> Callable[..., Any]:
    def contexts():
        return tags.contexts()

    def lowered(function, *args):
        if not torch.compiler.is_compiling():
            raise RuntimeError(NOT_COMPILED)
        return checkpoint(function, *args, use_reentrant=False, context_fn=contexts)

    return lowered


def _own_call() -> Callable[..., Any]:
    """Make a function that calls a module as the module calls itself, with code of its own.

    Dynamo keeps graphs by code, and guards on a function's code, not on what it closes over: with `Module._call_impl`
    a model would run graphs made for an earlier policy or for another model, and share their limit of 8 recompilations.
    """

    def call(self, *args, **kwargs):
        return self._call_impl(*args, **kwargs)

    call.__code__ = call.__code__.replace()
    return call


class CompiledGuard:
    """Hooks of a model with compiled layers that are replayed: refuse what would be wrong, check the first step."""

    def __init__(self, applied: Applied, compiled: Compiled, flagged: list[nn.Module]):
        self._applied, self._compiled, self._flagged = applied, compiled, flagged

    def attach(self, model: nn.Module) -> None:
        model.register_forward_pre_hook(self.before, with_kwargs=True)
        model.register_forward_hook(self.after)
        model.register_forward_hook(self.always, always_call=True)

    def before(self, model, args, kwargs):
        if not torch.is_grad_enabled():
            self._set_flags(False)  # as in `Guard`: stacks drop their cache by this flag, gradients or not
            return
        refuse_eval(model, self._compiled.watched, [*args, *kwargs.values()])
        refuse_filled_cache((*args, *kwargs.values()))

    def after(self, model, args, output):
        applied, tags = self._applied, self._compiled.tags
        if applied.checked or not torch.is_grad_enabled():
            return
        applied.checked = True
        complaint = applied.policy.complaint({0: tags.seen}, {0: tags.matched}, set())
        if not tags.num_traced:
            complaint = "no layer was compiled with its checkpointing function: a `forward` put on it does not call it"
        if complaint:
            applied.undo()
            raise ValueError(complaint)

    def always(self, model, args, output):
        self._set_flags(True)

    def _set_flags(self, value: bool) -> None:
        for module in self._flagged:
            module.gradient_checkpointing = value
