"""What a model looks like from outside and inside, so that a test can say exactly what an undo left behind.

before = take(model, inputs)        # after plain steps: what those change by themselves is left out
handle = ckpt.apply(model, "full"); ...; handle.undo()
assert differences(before, take(model)) == []
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from transformers import modeling_utils
from transformers.configuration_utils import PreTrainedConfig

Snapshot = dict[str, Any]
"""'module path.attribute' -> a comparable value: plain data by value, anything else by identity (and kept alive)."""


class _Same:
    """Compares by identity, and keeps the object alive so that its address is not used again."""

    def __init__(self, value: object) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None

    def __repr__(self) -> str:
        return f"<{type(self.value).__name__} at {id(self.value):#x}>"


def take(model: nn.Module) -> Snapshot:
    """Read the attributes and hooks of modules, classes, parameters; config values; functions that modules share."""
    found: Snapshot = {}
    classes: dict[type, None] = {}
    configs: dict[int, PreTrainedConfig] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        found[f"{path}.__class__"] = _Same(type(module))
        classes.update(dict.fromkeys(type(module).__mro__))
        for key, value in vars(module).items():
            found[f"{path}.{key}"] = _plain(value)
        if isinstance(config := vars(module).get("config"), PreTrainedConfig) and id(config) not in configs:
            configs[id(config)] = config  # modules share it: once is enough
            found |= {f"{path}.config.{key}": _plain(value) for key, value in vars(config).items()}
            found |= {f"{path}.config.to_dict()[{key!r}]": value for key, value in config.to_dict().items()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        attributes = {key: _plain(value) for key, value in vars(parameter).items()}
        hooks = parameter._backward_hooks, parameter._post_accumulate_grad_hooks
        found[f"parameter {name}"] = (parameter.requires_grad, attributes, [_plain(hook or {}) for hook in hooks])
    for owner in classes:
        if owner is not object:
            for key, value in vars(owner).items():
                found[f"class {owner.__module__}.{owner.__qualname__}.{key}"] = _plain(value)
    for shared in (torch, torch.nn.functional, torch.utils.checkpoint, sys.modules[type(model).__module__]):
        for key, value in vars(shared).items():
            found[f"module {shared.__name__}.{key}"] = _Same(value)
    found["attention functions"] = {key: _Same(value) for key, value in modeling_utils.ALL_ATTENTION_FUNCTIONS.items()}
    return found


def weights(model: nn.Module) -> dict[str, Tensor]:
    """Copy the state dict."""
    return {name: value.detach().clone() for name, value in model.state_dict().items() if isinstance(value, Tensor)}


def weight_differences(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> list[str]:
    """List the names that appeared, vanished or changed between two state dicts."""
    if list(before) != list(after):
        return sorted(set(before) ^ set(after)) or ["(order of the names)"]
    return [name for name, value in before.items() if not torch.equal(value, after[name])]


def differences(before: Snapshot, after: Snapshot, ignore: frozenset[str] = frozenset()) -> list[str]:
    """Say what was added, removed or changed, one line each."""
    lines = [f"left behind: {key} = {after[key]!r:.100}" for key in after.keys() - before.keys() - ignore]
    lines += [f"gone: {key}" for key in before.keys() - after.keys() - ignore]
    for key in (before.keys() & after.keys()) - ignore:
        if before[key] != after[key]:
            lines.append(f"changed: {key}: {before[key]!r:.100} -> {after[key]!r:.100}")
    return sorted(lines)


def _plain(value: Any) -> Any:
    """Turn containers into containers of comparable values; one level of nesting at a time."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.Size):
        return value
    if isinstance(value, Mapping) and not isinstance(value, PreTrainedConfig):
        return [(key if isinstance(key, str) else _plain(key), _plain(item)) for key, item in value.items()]
    if type(value) in (list, tuple, set):
        return [_plain(item) for item in value]
    return _Same(value)
