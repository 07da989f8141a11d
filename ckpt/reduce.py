"""Which layers of a deep model need no tracing, because others do the same.

Owns the comparison of layers. A layer's key is what its class, shapes, settings and the policy make of it; where keys
repeat with some period over many layers, three or four periods stand for all. `Trace.repeat` checks on the traced step
that they really do the same, so a key that misses a difference costs time, not truth.

    chosen = choose_layers(keys_of(layers, config), policy_keys)      # None: trace them all
    chosen.kept, chosen.repeats
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ckpt.layers import Layer
from ckpt.plan import Plan, Policy
from ckpt.strategies import KeepPolicy, LayerPolicy, OffloadPolicy
from ckpt.trace import Repeat


def num_periods(period: int, gathers_ahead: bool = False) -> int:
    """Periods that are traced. The model's first and last layer may differ from all others, and each layer that stands
    for more must have another one a period away that proves it.

    gathers_ahead: FSDP2 gathers, in a layer's backward, the parameters of the one two before it, so that the second
    layer differs too.
    """
    return (4 if period == 1 else 3) + (gathers_ahead and period <= 2)


_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_NOT_A_DIFFERENCE = frozenset({"layer_idx", "layer_index", "block_idx", "training", "_is_hf_initialized"})


@dataclass(frozen=True)
class Chosen:
    """kept: numbers of the layers that are traced. repeats: in terms of the traced ones. sources: for every layer of
    the model, which traced one stands for it."""

    kept: tuple[int, ...]
    repeats: tuple[Repeat, ...]
    sources: tuple[int, ...]


def structure_keys(layers: Sequence[Layer], config: Any) -> list[Hashable]:
    """Return, layer by layer, what its modules, parameters and the per-layer lists of the config say of it.

    A layer that shares tensors with another is like no other: what both hold counts once.
    """
    lists = [tuple(v) for v in vars(config).values() if isinstance(v, (list, tuple)) and len(v) == len(layers)]
    held = [{id(t) for t in (*layer.module.parameters(), *layer.module.buffers())} for layer in layers]
    owners = Counter(tensor for tensors in held for tensor in tensors)
    return [
        (
            _module_key(layer.module),
            tuple(str(v[layer.index]) for v in lists),
            layer.index if any(owners[tensor] > 1 for tensor in tensors) else None,
        )
        for layer, tensors in zip(layers, held, strict=True)
    ]


def policy_keys(policy: Policy, num_layers: int) -> list[Hashable] | None:
    """Return, layer by layer, what the policy does with it; None for a policy that cannot be asked without ops: a
    user's, classes derived from ours included, may decide by layer in `decide`."""
    if type(policy) not in (Plan, LayerPolicy, KeepPolicy, OffloadPolicy):
        return None
    rules = [policy.rule(i, num_layers) for i in range(num_layers)]
    sizes: dict[int, list[int]] = {}
    for i, rule in enumerate(rules):
        if rule.segment is not None:
            sizes.setdefault(rule.segment, []).append(i)
    keys: list[Hashable] = []
    for i, rule in enumerate(rules):
        members = sizes.get(rule.segment, [])
        place = (i - members[0], len(members)) if members else None
        decisions = frozenset(policy.layers[i].decisions.items()) if isinstance(policy, Plan) else None
        is_last = i == num_layers - 1  # offloading leaves the last layer's on the device
        keys.append(
            (
                rule.replay,
                rule.inner,
                rule.offload_input,
                rule.middle,
                place,
                decisions,
                is_last and getattr(policy, "offload", None) is not None,
            )
        )
    return keys


def choose_layers(
    structure: Sequence[Hashable], policy: Sequence[Hashable], gathers_ahead: bool = False
) -> Chosen | None:
    """Choose the layers to trace. None if that would be all of them.

    The traced layers stand in the places of the first ones, and models look up what kind of layer comes next by place:
    so their structure must be that of the first layers, else None.
    """
    numbers: dict[Hashable, int] = {}
    keys = [numbers.setdefault(pair, len(numbers)) for pair in zip(structure, policy, strict=True)]
    kept: list[int] = []
    repeats: list[Repeat] = []
    sources: list[int] = []
    at = 0
    while at < len(keys):
        period, count = _longest_run(keys, at, gathers_ahead)
        traced = num_periods(period, gathers_ahead)
        drop = count - traced
        first = len(kept)
        if drop < 1:
            kept.append(at)
            sources.append(first)
            at += 1
            continue
        before, end = (traced - 1) * period, at + count * period
        repeated = first + before - period
        kept += [*range(at, at + before), *range(end - period, end)]
        repeats.append(Repeat(repeated, period, drop))
        sources += range(first, first + before)
        sources += [repeated + k % period for k in range(drop * period)]
        sources += range(first + before, first + before + period)
        at = end
    if len(kept) == len(keys) or any(structure[i] != structure[k] for i, k in enumerate(kept)):
        return None
    return Chosen(tuple(kept), tuple(repeats), tuple(sources))


def _longest_run(keys: Sequence[int], at: int, gathers_ahead: bool) -> tuple[int, int]:
    """Return (period, number of periods) of the run from `at` that saves most layers."""

    def saved(period: int, count: int) -> int:
        return (count - num_periods(period, gathers_ahead)) * period

    best = (1, 1)
    for period in range(1, (len(keys) - at) // 4 + 1):
        end = at + period
        while end < len(keys) and keys[end] == keys[end - period]:
            end += 1
        count = (end - at) // period
        if saved(period, count) > max(0, saved(*best)):
            best = (period, count)
    return best


def _module_key(layer: torch.nn.Module) -> Hashable:
    parts = []
    for name, module in layer.named_modules():
        own = tuple((k, _described(v)) for k, v in vars(module).items() if k not in _NOT_A_DIFFERENCE)
        tensors = tuple(
            (k, tuple(t.shape), t.stride(), t.dtype, t.requires_grad)
            for k, t in (*module._parameters.items(), *module._buffers.items())
            if t is not None
        )
        hooks = tuple(_code_of(hook) for kind in _HOOKS for hook in vars(module)[kind].values())
        parts.append((name, type(module), own, tensors, hooks))
    return tuple(parts)


def _described(value: Any) -> Hashable:
    """What an attribute says that can make a difference: plain values, alone or in a row, and functions put on an
    instance."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (tuple, list)) and all(isinstance(part, _PLAIN) for part in value):
        return tuple(value)
    return _code_of(value) if callable(value) and not isinstance(value, (type, torch.nn.Module)) else None


def _code_of(function: Any) -> Hashable:
    """What a function runs, with the plain values that it carries: equal for those that one line made for each layer,
    unless it gave them numbers."""
    carried: list[Any] = []
    while isinstance(function, functools.partial):
        carried += [*function.args, *function.keywords.values()]
        function = function.func
    function = getattr(function, "__func__", function)
    carried += getattr(function, "__defaults__", None) or ()
    carried += (cell.cell_contents for cell in getattr(function, "__closure__", None) or ())
    return getattr(function, "__code__", type(function)), tuple(v for v in carried if isinstance(v, _PLAIN))
