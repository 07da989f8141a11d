"""AdamW and the learning-rate schedule, from `optim.*`.

optimizer = build_optimizer(precision.named_parameters(), cfg.optim)
scheduler = build_scheduler(optimizer, cfg.optim, cfg.steps)
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import get_scheduler

from recipes.config import Optim

MIN_LR_SHARE = 0.1
"""Floor of `cosine_with_min_lr`, as a share of the peak learning rate."""


def build_optimizer(named_parameters: Iterable[tuple[str, nn.Parameter]], optim: Optim) -> torch.optim.AdamW:
    """Make AdamW with decay on matrices alone: norms, biases and scalars are shifted to zero by decay, not regularised.

    Fused wherever torch has it (CPU too): one pass over memory and no temporaries of the size of the model.
    Raises ValueError when nothing is trainable.
    """
    parameters = [parameter for _, parameter in named_parameters]
    if not parameters:
        raise ValueError(
            "The model has no trainable parameter. Unfreeze some, or train an adapter with peft.name=lora."
        )
    # Tensors that lie on different meshes, or on none, cannot share a fused update.
    groups: dict[tuple, dict] = {}
    for p in parameters:
        decay = optim.weight_decay if p.ndim >= 2 else 0.0
        group = groups.setdefault((p.ndim >= 2, getattr(p, "device_mesh", None)), {"params": [], "weight_decay": decay})
        group["params"].append(p)
    return torch.optim.AdamW(
        [groups[key] for key in sorted(groups, key=lambda key: not key[0])],
        lr=optim.lr,
        betas=tuple(optim.betas),
        eps=optim.eps,
        fused=all(_fused_serves(p) for p in parameters),
    )


def _fused_serves(parameter: nn.Parameter) -> bool:
    return parameter.device.type in ("cpu", "cuda", "xpu", "mps") and parameter.is_floating_point()


def build_scheduler(optimizer: torch.optim.Optimizer, optim: Optim, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """Make transformers' schedule of that name over `steps` optimizer steps, with linear warm-up.

    `warmup` below 1 is a share of `steps`, else a number of steps. Raises ValueError when it is more than all of them.
    """
    warmup_steps = round(optim.warmup * steps) if optim.warmup < 1 else int(optim.warmup)
    if warmup_steps > steps:
        raise ValueError(
            f"optim.warmup={warmup_steps} steps is more than steps={steps}. Lower optim.warmup, raise steps, or give "
            "warm-up as a share below 1."
        )
    specific = {"min_lr_rate": MIN_LR_SHARE} if optim.schedule == "cosine_with_min_lr" else None
    return get_scheduler(optim.schedule, optimizer, warmup_steps, steps, scheduler_specific_kwargs=specific)


def move_schedule(optimizer: torch.optim.Optimizer, scheduler: torch.optim.lr_scheduler.LambdaLR, step: int) -> None:
    """Put a schedule where it stands after `step` steps. A LambdaLR is a function of the step and of nothing else."""
    scheduler.last_epoch, scheduler._step_count = step, step + 1
    scheduler._last_lr = [
        base * rule(step) for base, rule in zip(scheduler.base_lrs, scheduler.lr_lambdas, strict=True)
    ]
    for group, lr in zip(optimizer.param_groups, scheduler._last_lr, strict=True):
        group["lr"] = lr
