"""The parts of a run put together, in the one order that works:

    prediction -> adapter -> tensor parallel -> number format -> attention -> ckpt.apply -> compile -> shard
    -> optimizer -> train state

The prediction first: it needs no weights. Adapters next: they add modules inside the layers. Tensors are split while
they are plain. The number format before `ckpt.apply`, so that what is measured has its final dtype. Compilation after
it, since it captures what is there. Sharding replaces every parameter, so the optimizer comes last: it must hold those
that are trained in the end. `pretrain.py` and `finetune.py` are the programs that use these parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

import ckpt
from ckpt import parallel
from ckpt.attention import choose, watch_masks
from ckpt.attention import prepare as prepare_attention
from recipes.config import Config
from recipes.data import Data, build_data
from recipes.distributed import ONE, Ranks
from recipes.distributed_build import Whole
from recipes.forecast import Foreseen
from recipes.loop import unwrapped
from recipes.optim import build_optimizer, build_scheduler
from recipes.precision import DTYPES, Precision, prepare
from recipes.rng import seed_everything
from recipes.rundir import RunDir
from recipes.train_state import TrainState
from recipes.workload import workload_of


def build_data_of(cfg: Config, tokenizer: Any, ranks: Ranks = ONE) -> Data:
    """Build the data that `cfg.data` describes, this rank's rows of it."""
    chosen = cfg.data
    return build_data(
        chosen.source, tokenizer=tokenizer, seq_len=cfg.seq_len, batch_size=cfg.batch_size, packing=chosen.packing,
        path=chosen.path, name=chosen.name, subset=chosen.subset, split=chosen.split, column=chosen.column,
        max_documents=chosen.max_documents, eval_fraction=chosen.eval_fraction, shuffle=chosen.shuffle,
        streaming=chosen.streaming, augment=chosen.augment, seed=cfg.seed,
        rank=ranks.data_index, world_size=ranks.num_data,
    )  # fmt: skip


def read_data(cfg: Config, tokenizer: Any, run: RunDir) -> Data:
    """Build the run's data and note its fingerprint in the manifest."""
    data = build_data_of(cfg, tokenizer, run.ranks)
    run.describe(data=data.fingerprint)
    return data


def split_tensors(model: nn.Module, run: RunDir) -> None:
    """Split the layers over the ranks of `parallel.tensor`, and say how all ranks are laid out.

    Raises ValueError for fused weights, as a mixture of experts has them.
    """
    layout = run.ranks.layout
    if layout is None:
        return
    parallel.split_tensors(model, layout)
    for name, parameter in model.named_parameters():
        # One rank's part of a fused weight is not one block of it, which is all that a train state can describe.
        if any(type(placement).__name__ == "_StridedShard" for placement in getattr(parameter, "placements", ())):
            raise ValueError(
                f"parallel.tensor={layout.degrees.tensor} splits the fused weight {name}, which a train state cannot "
                "hold yet. Use parallel.shard or parallel.sequence."
            )
    run.console.say(f"ranks {layout.degrees.num_ranks}: {layout.degrees}")
    run.describe(parallel=layout.degrees.to_dict())


def set_precision(cfg: Config, model: nn.Module, run: RunDir) -> Precision:
    """Cast the model to `dtype`. Sharding in bf16 keeps fp32 shards, which are the masters, and gathers bf16."""
    layout = run.ranks.layout
    if cfg.dtype != "bf16" or layout is None or not layout.degrees.shards_parameters:
        return prepare(model, cfg.dtype)
    parallel.cast(model, cfg.dtype)
    return Precision(model, {})


def shard(
    cfg: Config, model: nn.Module, precision: Precision, run: RunDir, whole: Whole | None, device: torch.device
) -> Precision:
    """Shard parameters, gradients and optimizer state over ranks, and give each rank its part of the weights; return
    what the optimizer must update then.

    Each rank then draws dropout masks of its own, but for those that compute the same tokens.
    """
    ranks = run.ranks
    if ranks.layout is None:
        return precision
    seed_everything(cfg.seed + ranks.token_index)
    if not ranks.layout.degrees.shards_parameters:
        return precision
    precision.undo()
    parallel.shard(model, ranks.layout, dtype=cfg.dtype, reshard=cfg.parallel.reshard)
    if whole is not None:
        whole.hand_out(model, device)
    return Precision(model, {})


def set_batch(cfg: Config, config: PreTrainedConfig, run: RunDir) -> Config:
    """Return the config with what batch_size=auto stands for, and note it."""
    if cfg.batch_size != "auto":
        return cfg
    from recipes.auto_batch import choose_batch

    chosen = choose_batch(cfg, config, run.console.say)
    run.update(batch_size=chosen.batch_size)
    run.describe(batch={"batch_size": chosen.batch_size, "grad_accum": chosen.grad_accum})
    return chosen


def set_attention(cfg: Config, model: nn.Module, device: torch.device, run: RunDir) -> None:
    """Choose the attention kernel for this model, device and packing; say and note which one runs, and why."""
    packing = cfg.data.packing
    choice = choose(
        unwrapped(model), cfg.attn, device=device, dtype=DTYPES[cfg.dtype], packing=packing, seq_len=cfg.seq_len
    )
    choice.activate()
    prepare_attention(model, packing, choice.implementation)
    if run.ranks.layout is not None:
        parallel.attend_in_sequence_shards(model, run.ranks.layout)
    watch_masks(model, forbid=cfg.attn == "flash", say=run.console.say)
    run.console.say(f"attention {choice}")
    run.describe(attention={"implementation": choice.implementation, "kernel": choice.kernel, "why": choice.why})


def apply_strategy(cfg: Config, model: nn.Module, foreseen: Foreseen, run: RunDir) -> ckpt.Applied:
    """Put the chosen strategy in force as it was planned, and compile the decoder layers if asked to.

    Raises ValueError for a strategy that torch.compile cannot be told of.
    """
    chosen = cfg.strategy
    work = workload_of(cfg)
    handle = ckpt.apply(
        model, foreseen.strategy, work, loss=cfg.loss, tile_mlp=foreseen.tile_mlp, compile=cfg.compile
    )
    for key, given in (("loss", cfg.loss), ("tile_mlp", cfg.tile_mlp)):
        own = getattr(handle.policy, key, None)
        if own not in (None, given):
            run.console.say(f"{key}={own}, as the plan was made with, in place of {given}")
    if chosen.name == "none":
        run.console.say("strategy none: every activation is kept; +strategy=selective replays layers, attention kept")
    return handle


def make_train_state(cfg: Config, model: nn.Module, precision: Precision, data: Data) -> TrainState:
    """Make optimizer and schedule, and bundle what a train state holds."""
    optimizer = build_optimizer(precision.named_parameters(), cfg.optim)
    return TrainState(model, precision, optimizer, build_scheduler(optimizer, cfg.optim, cfg.steps), data.train)


def resume(cfg: Config, state: TrainState, run: RunDir) -> int:
    """Load the newest whole train state if asked to; return the number of steps done.

    Raises ValueError when there is none, or when the run has reached `steps` already.
    """
    if not cfg.resume:
        return 0
    step = state.load_newest(run.train_state, say=run.console.say)
    if step is None:
        raise ValueError(f"resume=true, but {run.train_state} holds no train state. Start anew under another name.")
    if step >= cfg.steps:
        raise ValueError(f"run {run.name} has done {step} steps, and steps={cfg.steps}. Raise steps to train on.")
    run.rewind(step)
    run.console.say(f"resumed {run.name} after step {step}")
    return step
