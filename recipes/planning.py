"""What a prediction needs of a config: the model without its weights, the workload, the device. No weight is loaded.

Used by every training run before its first step (`recipes/forecast.py`) and by plan.py.

    model = model_without_weights(cfg, load_config(cfg.model, cfg.seq_len))
    ckpt.predict(model, "selective", workload_of(cfg), target_device(cfg, "cpu"))
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ckpt import hardware, strategies
from ckpt.attention import choose, prepare
from ckpt.auto import Auto
from ckpt.hardware import GIB, Device
from ckpt.links import LINKS
from ckpt.predict import as_device
from recipes.config import Config
from recipes.hub import Unreachable
from recipes.loop import unwrapped
from recipes.model import add_adapter, build_model, load_config
from recipes.precision import DTYPES


def model_without_weights(cfg: Config, config: PreTrainedConfig) -> nn.Module:
    """Make what a run of `cfg` trains, on meta: the model, its adapter, its attention.

    Raises ValueError for what the run would refuse too: packing that a family cannot isolate, an adapter that fits no
    module.
    """
    model = add_adapter(build_model(cfg.model, config, "meta"), cfg.peft)
    # Kernels differ in speed and scratch, not in what they save: whichever flash kernel a run takes, its tensors are
    # those of the CPU's.
    requested = cfg.attn if cfg.attn in ("sdpa", "eager") else "auto"
    packing = cfg.data.packing
    chosen = choose(unwrapped(model), requested, dtype=DTYPES[cfg.dtype], packing=packing, seq_len=cfg.seq_len)
    prepare(model, packing, chosen.implementation)
    return model


def with_known_shape(cfg: Config, say: Callable[[str], None]) -> Config:
    """Return `cfg` to plan by: where a hub's model is out of reach (no network, no licence accepted yet), the shape
    that `model.config` writes out for it, which is said. A folder that cannot be read stays an error.

    Raises ValueError as `load_config` does.
    """
    try:
        load_config(cfg.model, 1)
    except Unreachable as error:
        if error.is_folder or not cfg.model.config:
            raise
        say(f"{cfg.model.name} is out of reach: planned by the shape that model.config gives")
        return dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, init="random"))
    return cfg


def refuse_what_is_not_predicted(cfg: Config) -> None:
    """Raise ValueError for a key whose effect on memory is not predicted. A degree of -1 plans one rank alone."""
    if cfg.compile:
        raise ValueError("compile=true is not predicted: compiled layers allocate as their compiler decides.")


def target_device(cfg: Config, device: torch.device | str) -> Device:
    """Return the device that predictions of a run on `device` are for, by `hardware.name`, `hardware.memory_gib` and
    `parallel.link`."""
    name = cfg.hardware.name
    chosen = hardware.at_hand(device) if name == "auto" else as_device(name, cfg.dtype)
    node = chosen.links.node if cfg.parallel.link == "auto" else LINKS[cfg.parallel.link]
    links = dataclasses.replace(chosen.links, node=node, node_ranks=cfg.parallel.node_ranks)
    chosen = dataclasses.replace(chosen, links=links)
    if cfg.hardware.memory_gib is None:
        return chosen
    return dataclasses.replace(chosen, memory_bytes=int(cfg.hardware.memory_gib * GIB) + chosen.reserved_bytes)


def strategy_of(cfg: Config, device: Device) -> Any:
    """Return the strategy that `cfg` names; `auto` plans for `device` unless strategy.hardware names another."""
    strategy = strategies.make(cfg.strategy.name, **cfg.strategy.fields)
    if isinstance(strategy, Auto) and strategy.hardware is None:
        return dataclasses.replace(strategy, hardware=device)
    return strategy
