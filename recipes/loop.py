"""The training loop, in the order things happen: batch, loss, backward, clip, update, measure, evaluate, log, save.

Owns one optimizer step and what surrounds it. Knows nothing of activation checkpointing: whatever `ckpt.apply` did to
the model, the loop is the same.

The loss of an optimizer step is the sum of its micro-batches' losses over all ranks, each divided by the number of
labels that count in *all* of them (shifted, not -100): `grad_accum` and the number of ranks change memory, never the
gradient's meaning, whatever the rows hold. All ranks decide alike: on stopping, on NaN, on which step it is.

    train(cfg, state, data, run, start=0)          # raises RunStopped for NaN and for SIGTERM or Ctrl-C
"""

from __future__ import annotations

import contextlib
import inspect
import math
import signal
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from recipes.config import Config
from recipes.data import Data, model_inputs
from recipes.distributed import ONE, Ranks
from recipes.gradients import clip as scale_gradients
from recipes.gradients import total_norm
from recipes.meter import Meter
from recipes.probe import Probe
from recipes.rng import rng_state, set_rng_state
from recipes.rundir import RunDir, RunStopped
from recipes.train_state import TrainState

Batch = dict[str, Any]
NEVER = -1
"""`save_every` of a run whose weights nobody wants, such as one that only measures."""


def train(cfg: Config, state: TrainState, data: Data, run: RunDir, meter: Meter, probe: Probe, start: int = 0) -> None:
    """Run the optimizer steps after `start`, up to `cfg.steps`; leave what was learned of the run in its summary.

    Raises RunStopped: `nan` when loss or gradient stop being finite (the weights are those of the step before), and
    `interrupted` after a signal, once the step is finished and its train state saved.
    """
    state.progress.setdefault("tokens", 0)
    ranks, scales = run.ranks, loss_takes_num_items(state.model, run.ranks)
    _check_loss(state.model, scales, ranks)
    with until_signal() as signalled, run.console.progress(cfg.steps, start) as tick:
        for step in range(start + 1, cfg.steps + 1):
            last = step == cfg.steps
            measured = probe.due(step)
            meter.start(measured or step == probe.profiled)
            batches = [next(data.train) for _ in range(cfg.grad_accum)]
            with probe.measure(batches) if measured else contextlib.nullcontext(), probe.profile(step):
                loss, grad_norm = optimizer_step(
                    state, batches, cfg.optim.clip, scales, step, ranks, is_first=step == start + 1
                )
            metrics = {"step": step, "loss": loss, "grad_norm": grad_norm, **meter.stop(batches, ranks.sum_over_rows)}
            stopping = ranks.any(signalled)
            if measured:
                probe.record(step)

            state.progress["tokens"] += metrics["tokens"]
            metrics |= {"total_tokens": state.progress["tokens"], "learning_rate": state.scheduler.get_last_lr()[0]}
            state.progress.setdefault("first_loss", loss)
            if cfg.eval.batches and (last or (cfg.eval.every and step % cfg.eval.every == 0)):
                metrics["eval_loss"] = evaluate(state.model, data.eval(cfg.eval.batches), scales, ranks)
            if last or stopping or "eval_loss" in metrics or step % cfg.log_every == 0:
                run.log(metrics)
                run.update(
                    first_loss=state.progress["first_loss"],
                    final_loss=loss,
                    **meter.summary(),
                    **{name: metrics[name] for name in ("eval_loss",) if name in metrics},
                )
            tick(step, loss=loss, tokens_per_second=metrics["tokens_per_second"])
            due = last or stopping or (cfg.save_every > 0 and step % cfg.save_every == 0)
            if due and cfg.save_every != NEVER:
                state.save(run.train_state, step, wait=last or stopping or not cfg.save_async)
            if stopping and not last:
                why = signalled[0] if signalled else "another rank's signal"
                saved = f"its train state is saved. Go on with: python train.py resume={run.path}"
                if cfg.save_every == NEVER:
                    saved = f"nothing is saved (save_every={NEVER})."
                raise RunStopped("interrupted", f"{why} after step {step} of {cfg.steps}; {saved}")


def optimizer_step(
    state: TrainState, batches: list[Batch], clip: float, scales: bool, step: int, ranks: Ranks = ONE,
    is_first: bool = False,
) -> tuple[float, float]:  # fmt: skip
    """Make one optimizer step of micro-batches and return (loss per labelled token, gradient norm before clipping).

    Before anything is updated raises RunStopped with status `nan` and, in the first step, ValueError if ranks of
    `tensor` do not get equal gradients of what they hold alike.
    """
    model, parameters = state.model, [parameter for _, parameter in state.precision.named_parameters()]
    model.train()
    num_items = int(ranks.sum_over_rows(sum(batch["num_labels"] for batch in batches))[0])
    loss = torch.zeros((), device=device_of(model))
    for batch in batches:
        part = batch_loss(model, batch, num_items, len(batches) * ranks.num_data, scales, ranks)
        if part is not None:
            part.backward()
            loss += part.detach()
    if is_first and ranks.layout is not None:
        from ckpt.parallel import check_gradients

        check_gradients(state.precision.named_parameters(), ranks.layout)
    norm = total_norm(parameters, ranks.layout).item()
    loss = ranks.sum_over_tokens(loss.item())[0]
    if not math.isfinite(loss) or not math.isfinite(norm):
        state.precision.zero_grad()
        raise RunStopped(
            "nan",
            f"loss {loss} with gradient norm {norm} at step {step}; the weights are still those of step "
            f"{step - 1}. Lower optim.lr, lengthen optim.warmup, or set optim.clip.",
        )
    if clip and norm > clip:
        scale_gradients(parameters, norm, clip)
    state.optimizer.step()
    state.scheduler.step()
    state.precision.after_step()
    state.precision.zero_grad()
    return loss, norm


def batch_loss(
    model: nn.Module, batch: Batch, num_items: int, num_batches: int, scales: bool, ranks: Ranks = ONE
) -> torch.Tensor | None:
    """Return the share of one micro-batch of one rank in the step's loss: the sum over its labels, divided by
    `num_items`.

    None when the model takes means by itself and has nothing to take one of; on several ranks a zero, since all must
    run the same layers. A router's auxiliary loss is a mean over tokens already, so a micro-batch brings
    1 / num_batches of it, counted over ranks with rows of their own, and a rank with a part of the rows its part of
    that.
    """
    device = device_of(model)
    inputs = model_inputs(batch, device)
    num_batches *= ranks.num_sequence
    if ranks.layout is not None:
        inputs = shard_sequence(inputs, ranks)
    if not scales:
        if batch["num_labels"] == 0:
            return None if ranks.layout is None else model(**inputs, use_cache=False).logits.float().mean() * 0
        return model(**inputs, use_cache=False).loss * (batch["num_labels"] / num_items)
    # A tensor, as Trainer passes it: a number would make torch.compile compile again for each new value.
    out = model(**inputs, use_cache=False, num_items_in_batch=torch.tensor(max(num_items, 1), device=device))
    if num_batches > 1 and getattr(out, "aux_loss", None) is not None:
        weight = unwrapped(model).config.get_text_config().router_aux_loss_coef
        return out.loss - weight * out.aux_loss * (1 - 1 / num_batches)
    return out.loss


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], scales: bool, ranks: Ranks = ONE) -> float | None:
    """Return the mean loss per labelled token over all ranks; None without any label. Leaves generators and the mode
    alone."""
    generators, training = rng_state(), model.training
    model.eval()
    total, num_items = 0.0, 0
    for batch in batches:
        loss = batch_loss(model, batch, batch["num_labels"], 1, scales, ranks)
        if loss is not None and batch["num_labels"]:
            total += loss.item() * batch["num_labels"]
            num_items += batch["num_labels"]
    model.train(training)
    set_rng_state(generators)
    total, num_items = ranks.sum_over_tokens(total)[0], ranks.sum_over_rows(num_items)[0]
    return total / num_items if num_items else None


@torch.no_grad()
def loss_takes_num_items(model: nn.Module, ranks: Ranks = ONE) -> bool:
    """Tell whether the model divides its loss by `num_items_in_batch`, by trying: some accept it and ignore it."""
    accepts = inspect.signature(unwrapped(model).forward).parameters
    if not any(p.kind is inspect.Parameter.VAR_KEYWORD or p.name == "num_items_in_batch" for p in accepts.values()):
        return False
    generators, training = rng_state(), model.training
    model.eval()
    ids = torch.zeros(1, 4 * ranks.num_sequence, dtype=torch.long, device=device_of(model))
    inputs = {"input_ids": ids, "labels": ids}
    if ranks.layout is not None:
        inputs = shard_sequence(inputs, ranks)
    # Compiled layers run as they are here: a first compilation of four tokens would make the second one dynamic.
    with torch.compiler.set_stance("force_eager"):
        by_one, by_two = (
            model(**inputs, use_cache=False, num_items_in_batch=torch.tensor(count, device=ids.device)).loss.item()
            for count in (1, 2)
        )
    model.train(training)
    set_rng_state(generators)
    return not math.isclose(by_one, by_two, rel_tol=1e-3)


def shard_sequence(inputs: dict[str, Any], ranks: Ranks) -> dict[str, Any]:
    """Return this rank's slice of a batch's rows where ranks share them; else the batch as it is."""
    from ckpt.parallel.ulysses import shard_sequence as sliced

    return sliced(inputs, ranks.layout)


def _check_loss(model: nn.Module, scales: bool, ranks: Ranks) -> None:
    if ranks.num_sequence > 1 and not scales:
        raise ValueError(
            f"parallel.sequence={ranks.num_sequence} needs a loss that divides by num_items_in_batch, and "
            f"{type(unwrapped(model)).__name__}'s takes a mean of its own tokens. Use parallel.shard."
        )


@contextlib.contextmanager
def until_signal() -> Iterator[list[str]]:
    """Note SIGTERM and SIGINT instead of dying of them; the list yielded then holds the signal's name.

    A second signal ends the step that runs, as KeyboardInterrupt. Outside the main thread, where Python has no
    handlers, nothing is changed.
    """
    seen: list[str] = []

    def note(number: int, frame: FrameType | None) -> None:
        if seen:
            raise KeyboardInterrupt
        seen.append(signal.Signals(number).name)

    try:
        before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:
        before = {}
    try:
        yield seen
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def device_of(model: nn.Module) -> torch.device:
    """Return the device that the model's inputs go to."""
    return next(model.parameters()).device


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the Transformers model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
