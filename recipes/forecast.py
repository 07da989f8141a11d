"""Before step 1: predict the run's peak, say it, record it, and warn or stop where it exceeds the device.

The prediction runs the recipe's own step on fake tensors of a model without weights, before the real one is made: a run
that does not fit is told so in seconds. It draws no random number and leaves nothing behind in the process.

    foreseen = foresee(cfg, config, device, run)        # RunStopped("predicted_oom", ...) with on_predicted_oom=error
    ckpt.apply(model, foreseen.strategy, ..., tile_mlp=foreseen.tile_mlp)      # planned once, applied as planned
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedConfig

from ckpt import strategies
from ckpt.auto import told
from ckpt.choose_tiles import choose_tiles
from ckpt.engine.media import check_room
from ckpt.fake import Unpredictable
from ckpt.hardware import Device, at_hand
from ckpt.patching import resolve
from ckpt.predict import Prediction, read
from ckpt.simulate import Simulator
from recipes.config import Config
from recipes.console import mib
from recipes.distributed_forecast import foresee_over_ranks
from recipes.errors import RunStopped, is_mistake, one_line
from recipes.planning import model_without_weights, strategy_of, target_device
from recipes.rng import rng_state, set_rng_state
from recipes.rundir import RunDir
from recipes.workload import workload_of


@dataclass(frozen=True)
class Foreseen:
    """strategy, tile_mlp: what to apply, with what was planned or chosen by prediction resolved. prediction: None where
    a run cannot be predicted."""

    strategy: Any
    tile_mlp: int | str
    prediction: Prediction | None = None


def foresee(cfg: Config, config: PreTrainedConfig, device: torch.device, run: RunDir) -> Foreseen:
    """Predict the run that `cfg` describes, for the device it runs on and, if it is another, for `hardware`.

    Raises RunStopped with status `predicted_oom` if it would not fit and `on_predicted_oom=error`; ValueError for a
    strategy that does not fit the model, and where there is no room for what it would offload.
    """
    if run.ranks.layout is not None:
        return foresee_over_ranks(cfg, run)
    target = target_device(cfg, device)
    strategy = strategy_of(cfg, target)
    if cfg.compile:
        run.console.say("not predicted: compiled layers allocate as their compiler decides")
        return Foreseen(strategy, cfg.tile_mlp)
    generators, simulator = rng_state(), None
    try:
        simulator = Simulator(model_without_weights(cfg, config), workload_of(cfg))
        if strategies.makes_plan(strategy):
            strategy = strategy.plan(simulator, simulator.work, progress=run.console.say)
            run.console.say(told(strategy.source))
        tiles = cfg.tile_mlp
        if tiles == "auto":
            tiles = choose_tiles(simulator, strategy, cfg.loss)
        ran = simulator.run(strategy, tile_mlp=tiles)
    except Exception as error:
        # A mistake is the same without a prediction. All else (an op without a fake kernel, a forward that reads
        # values) says nothing about the run.
        if is_mistake(error) and not isinstance(error, Unpredictable):
            raise
        run.console.say(f"not predicted: {one_line(error)}")
        return Foreseen(strategy, cfg.tile_mlp)
    finally:
        set_rng_state(generators)
        if simulator is not None:
            simulator.close()
    work = simulator.work.replace(tile_mlp=tiles)
    here = at_hand(device)
    prediction = read(ran, work, here)
    where = getattr(resolve(strategy), "offload", None)
    if where is not None:
        check_room(where["target"], where.get("directory"), prediction.host_bytes)
    run.update(predicted_peak_bytes=prediction.peak_bytes, predicted_step_seconds=prediction.step_seconds)
    run.describe(prediction=prediction.to_dict())
    wanted = prediction if target == here else read(ran, work, target)
    run.console.say(describe(wanted, target))
    if not wanted.fits:
        text = misfit(wanted, cfg)
        if cfg.on_predicted_oom == "error":
            raise RunStopped("predicted_oom", text)
        run.console.say(f"warning: {text}")
    return Foreseen(strategy, tiles, prediction)


def describe(prediction: Prediction, device: Device) -> str:
    """Say in one line what was predicted."""
    share = ", ".join(f"{name.replace('_', ' ')} {mib(size)}" for name, size in prediction.residents.items())
    speed = ""
    if device.is_cuda or device.is_measured:
        speed = f"; about {prediction.step_seconds:.3g} s a step (estimate)"
    return f"predicted peak {mib(prediction.peak_bytes)} of {mib(device.usable_bytes)} on {device.name}: {share}{speed}"


def misfit(prediction: Prediction, cfg: Config) -> str:
    """Say that it does not fit, by how much, and what would lower it."""
    advice = ["lower seq_len or batch_size"]
    if cfg.loss != "chunked":
        advice.append("loss=chunked")
    if cfg.tile_mlp == 1:
        advice.append("tile_mlp=auto")
    if cfg.strategy.name in ("none", "every_n", "selective"):
        advice.append("+strategy=full")
    elif cfg.strategy.name != "offload":
        advice.append("+strategy=offload")
    return (
        f"the predicted peak of {mib(prediction.peak_bytes)} is {mib(-prediction.margin_bytes)} more than "
        f"{prediction.hardware} has ({mib(prediction.device_bytes)}). To fit: {', '.join(advice)}."
    )
