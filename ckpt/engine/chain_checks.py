"""What keeps a chain of modules from being run in tiles, looked for when tiles are put in and again at every forward.

In tiles a chain's last module does the work of all of them, in backward a second time. So a hook between them would see
and change other tensors than without tiles, and a dropout would draw other masks in backward than in the forward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn


def why_random(module: nn.Module) -> str | None:
    """Dropout inside the chain would draw its masks tile by tile, other masks than without tiles."""
    for m in module.modules():
        if isinstance(m, nn.Dropout) and m.p > 0:
            return f"its MLP has dropout {m.p}, whose masks would be drawn tile by tile"
    return None


def why_hooked(modules: Sequence[nn.Module]) -> str | None:
    """Only what enters the first module and leaves the last is as without tiles: other hooks but the engine's own
    would be called with something else. A chain of one module bears them all."""
    if len(modules) == 1:
        return None
    for position, m in enumerate(modules):
        hooks = [m._backward_hooks, m._backward_pre_hooks]
        hooks += [m._forward_pre_hooks] if position > 0 else []
        hooks += [m._forward_hooks] if position < len(modules) - 1 else []
        if any(_is_foreign(hook) for found in hooks for hook in _values(found)):
            return f"a hook on {type(m).__name__} stands between the modules that a tile runs at once"
    return None


def why_replaced(owner: nn.Module | None, names: Sequence[str], modules: Sequence[nn.Module]) -> str | None:
    """A chain's modules rely on each other; one that stands alone may go without harm."""
    if owner is None or len(modules) == 1:
        return None
    for name, module in zip(names, modules, strict=True):
        if owner._modules.get(name) is not module:
            return f"{name} was replaced"
    return None


def _values(hooks) -> Iterable:
    return () if not hooks else hooks.values()


def _is_foreign(hook) -> bool:
    return not (getattr(hook, "__module__", None) or "").startswith("ckpt.")
