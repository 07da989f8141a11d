"""The number formats of training: `dtype=fp32`, `bf16` (fp32 master weights, bf16 compute) and `bf16_pure`.

Owns the cast of a model's parameters and, for `bf16`, the fp32 copy that the optimizer updates. Knows no strategy and
no data. Bytes a trainable parameter, gradients standing, AdamW included:

    dtype       parameter  master  gradient  AdamW  sum
    fp32             4        -        4       8     16
    bf16             2        4        4       8     18     and one bf16 gradient at a time, during backward
    bf16_pure        2        -        2       4      8

`bf16` uses no autocast. Autocast keeps the residual stream in fp32 and with it every kept layer input, which doubles
what activation checkpointing keeps; here parameters *are* bf16, so activations are too. What autocast protects is kept
another way: gradients of the micro-batches are summed in fp32, and the update reads and writes fp32.

    precision = prepare(model, "bf16")
    optimizer = AdamW(parameter for _, parameter in precision.named_parameters())
    loss.backward(); optimizer.step(); precision.after_step()
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator

import torch
from torch import nn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "bf16_pure": torch.bfloat16}


class Precision:
    """The parameters that the optimizer updates: the model's own, or for some of them an fp32 master.

    `masters` maps the name of a model parameter to its master; it is empty for fp32 and bf16_pure.
    """

    def __init__(self, model: nn.Module, masters: dict[str, nn.Parameter]):
        self.masters = masters
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._hooks = [
            self._trained[name].register_post_accumulate_grad_hook(_move_gradient_to(master))
            for name, master in masters.items()
        ]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name in the model, what the optimizer updates), tied weights once, frozen ones never."""
        for name, parameter in self._trained.items():
            yield name, self.masters.get(name, parameter)

    def within(self, module: nn.Module) -> Precision:
        """Return the same for the parameters that are part of `module`; their hooks are shared."""
        inside = set(map(id, module.parameters()))
        part = copy.copy(self)
        part._trained = {name: parameter for name, parameter in self._trained.items() if id(parameter) in inside}
        part.masters = {name: master for name, master in self.masters.items() if name in part._trained}
        return part

    def zero_grad(self) -> None:
        """Drop every gradient."""
        for name, parameter in self._trained.items():
            parameter.grad = None
            if name in self.masters:
                self.masters[name].grad = None

    @torch.no_grad()
    def after_step(self) -> None:
        """Round the masters into the model's parameters. Call it after each optimizer step and after a load."""
        if self.masters:
            # Local parts: split tensors and whole ones, as tensor parallelism leaves them, cannot be copied in one go.
            torch._foreach_copy_(
                [local_part(self._trained[name]) for name in self.masters],
                [local_part(master) for master in self.masters.values()],
            )

    def undo(self) -> None:
        """Take the gradient hooks off the model; its parameters stay in their dtype."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()


def prepare(model: nn.Module, dtype: str) -> Precision:
    """Cast the parameters of `model` in place and return what its optimizer must update.

    Buffers keep their dtype (rotary frequencies lose positions in bf16), and so do the parameters that the model's
    class lists in `_keep_in_fp32_modules_strict` (router gates and biases of MoE families). Masters are made from the
    weights as they are before the cast: weights loaded in fp32 keep every bit. Tied weights stay tied.

    Raises ValueError for an unknown dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} is not known. Allowed: {', '.join(DTYPES)}.")
    in_fp32 = _kept_in_fp32(model)
    masters = {}
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        target = torch.float32 if in_fp32(name) else DTYPES[dtype]
        if dtype == "bf16" and parameter.requires_grad and target != torch.float32:
            # A copy even of fp32 weights: the cast below frees the original.
            masters[name] = nn.Parameter(parameter.detach().to(torch.float32, copy=True))
        cast_in_place(parameter, target)
    return Precision(model, masters)


def cast_in_place(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Cast a parameter without making another one, and drop its gradient.

    A DTensor (tensor parallelism) keeps its local part and a note of its dtype beside what `.data` sets: without them
    it says bf16 and computes in fp32 (torch 2.11 to 2.13).
    """
    made = parameter.data.to(dtype)
    parameter.data = made
    if hasattr(parameter, "_local_tensor"):
        parameter._local_tensor, parameter._spec = made._local_tensor, made._spec
    parameter.grad = None


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a DTensor; any other tensor as it is."""
    return getattr(tensor, "_local_tensor", tensor)


def _move_gradient_to(master: nn.Parameter):
    def hook(parameter: torch.Tensor) -> None:
        if master.grad is None:
            master.grad = parameter.grad.to(torch.float32)
        else:
            master.grad.add_(parameter.grad)  # bf16 into fp32, with no fp32 copy of the summand
        parameter.grad = None

    return hook


def _kept_in_fp32(model: nn.Module):
    """Return a test of a parameter's name, as transformers' own loading in bf16 does it (modeling_utils, 5.24)."""
    names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    if not names:
        return lambda name: False
    pattern = re.compile("|".join(rf"(^|\.){name}($|\.)" for name in names))
    return lambda name: pattern.search(name) is not None
