"""The optimizers that a prediction knows by name, as objects whose step runs on fake tensors.

Owns names and state sizes. AdamW, Adafactor and SGD are torch's own, in the form that allocates least: fused, or one
parameter at a time. 8-bit AdamW is a stand-in: its state has the sizes that bitsandbytes gives it, its step changes
nothing.

    optimizer = make_optimizer("adamw", model.parameters())
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable

import torch
from torch import nn

from ckpt.precision import local_part

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

# bitsandbytes/optim/optimizer.py, Optimizer2State: smaller parameters keep fp32 states; absmax is one fp32 a block.
_MIN_8BIT_NUMEL, _BLOCK = 4096, 256


def make_optimizer(name: str | Factory, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make an optimizer by its name in `Workload.optimizer`, or by the function given there.

    Raises ValueError where a function returns no torch optimizer, or one whose step needs a closure, and for Adafactor
    over sharded parameters.
    """
    parameters = list(parameters)
    if callable(name):
        made = name(parameters)
        if not isinstance(made, torch.optim.Optimizer):
            raise ValueError(
                f"workload: optimizer returned a {type(made).__name__}; it must return a torch.optim.Optimizer"
            )
        needed = [p.name for p in inspect.signature(made.step).parameters.values() if p.default is p.empty]
        if needed:
            raise ValueError(
                f"workload: optimizer {type(made).__name__} asks for a {needed[0]} in step(), and a training step has "
                "none to give; use an optimizer whose step() needs no argument"
            )
        return made
    groups = _by_mesh(parameters)
    if name == "adamw":
        return torch.optim.AdamW(groups, fused=True)
    is_sharded = any(hasattr(parameter, "device_mesh") for parameter in parameters)
    if name == "sgd":  # the fused update has no rule for sharded tensors (torch 2.11 to 2.13)
        return torch.optim.SGD(groups, fused=not is_sharded, foreach=False if is_sharded else None)
    if name == "adafactor":
        if is_sharded:
            raise ValueError(
                "workload: optimizer='adafactor' cannot update sharded parameters (torch 2.11 to 2.13 refuse its norms "
                "of them); with a mesh use adamw, adamw8bit or sgd"
            )
        return torch.optim.Adafactor(groups)
    return AdamW8bitSizes(groups)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[dict[str, list[nn.Parameter]]]:
    """Tensors that lie on different meshes, or on none, cannot share a fused update."""
    groups: dict[object, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [{"params": group} for group in groups.values()]


class AdamW8bitSizes(torch.optim.Optimizer):
    """The memory of bitsandbytes' AdamW8bit: two bytes a weight and two fp32 a block of 256; its arithmetic is left
    out."""

    def __init__(self, parameters: Iterable[nn.Parameter]):
        super().__init__(parameters, {})
        self.qmap: torch.Tensor | None = None

    @torch.no_grad()
    def step(self, closure=None) -> None:
        """Make the states that are not there yet."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None or self.state[p]:
                    continue
                if p.numel() < _MIN_8BIT_NUMEL:
                    self.state[p] = {key: torch.zeros_like(p, dtype=torch.float32) for key in ("state1", "state2")}
                    continue
                if self.qmap is None:
                    self.qmap = torch.zeros(2, 256, device=p.device)
                for k in ("1", "2"):
                    self.state[p][f"state{k}"] = torch.zeros_like(p, dtype=torch.uint8)
                    self.state[p][f"absmax{k}"] = torch.zeros(-(-local_part(p).numel() // _BLOCK), device=p.device)
