"""What the sections of the GPU check share: the model and its step, measured peaks and times, what is asked ahead.

Predictions and plans are made by other processes while the device works; the toy makes them on the spot.

    check = Check(TOY, seconds=60); model = check.model(num_layers=2); check.peak(model, ids)
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM

from ckpt.auto import GIB
from ckpt.ledger import measure
from scripts.gpu_check_ahead import longest, planned, predicted, without_device
from scripts.gpu_check_scale import CONTEXT_SIDES, STRATEGIES, Scale


class OutOfTime(Exception):
    """The time allowed for the check is used up."""


@dataclass
class Check:
    """One run of the check. rows: what was found, see `note`."""

    scale: Scale
    seconds: float
    rows: list[dict[str, Any]] = field(default_factory=list)
    section: str = ""

    def __post_init__(self) -> None:
        self.start = time.perf_counter()
        self.device = torch.device(self.scale.device)
        self._pool: ProcessPoolExecutor | None = None
        self._made: dict[tuple, Future] = {}

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def note(self, what: str, asked: str, got: str, ok: bool | None, **figures: Any) -> None:
        """Record one finding. ok: None for figures that nothing is asked of."""
        self.rows.append({"section": self.section, "what": what, "asked": asked, "got": got, "ok": ok, **figures})
        mark = {True: "ok", False: "NOT OK", None: ""}[ok]
        print(f"[{time.perf_counter() - self.start:5.0f} s] {self.section}: {what}: {got} {mark}", flush=True)

    def heed_time(self) -> None:
        """Raise OutOfTime when the time allowed is used up."""
        if time.perf_counter() - self.start > self.seconds:
            raise OutOfTime(f"the {self.seconds:.0f} s allowed are used up")

    # -- the model and its step ---------------------------------------------------------------------------------------

    def model(self, num_layers: int) -> nn.Module:
        """Make the model in bf16 on the device, its weights drawn from a fixed seed."""
        torch.manual_seed(0)
        with self.device:
            return AutoModelForCausalLM.from_config(self.scale.config(num_layers), dtype=torch.bfloat16).train()

    def tokens(self, seq_len: int) -> torch.Tensor:
        """Make the tokens, (1, T), on the device."""
        ids = torch.randint(0, self.scale.shape["vocab_size"], (1, seq_len), generator=torch.Generator().manual_seed(1))
        return ids.to(self.device)

    def wait(self) -> None:
        """Wait for the device."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def peak(self, model: nn.Module, step: Callable[[], object], inputs: Any = ()) -> int:
        """Run a step and return its peak: the allocator's on CUDA, live bytes on a CPU."""
        if not self.is_cuda:
            with measure(model, inputs=inputs) as ledger:
                step()
            return ledger.peak_bytes
        self.wait()
        torch.cuda.reset_peak_memory_stats()
        step()
        self.wait()
        return torch.cuda.max_memory_allocated()

    def time(self, step: Callable[[], object]) -> float:
        """Return the wall-clock seconds of a step."""
        self.wait()
        start = time.perf_counter()
        step()
        self.wait()
        return time.perf_counter() - start

    def paired(self, steps: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
        """Time steps in turns, `scale.repeats` times each; return wall-clock seconds by name. Gradients last a step."""
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for round_ in range(self.scale.repeats):
            self.heed_time()
            for name in list(steps)[:: 1 if round_ % 2 else -1]:
                seconds[name].append(self.time(steps[name]))
        return seconds

    def free(self) -> None:
        """Give back what no variable holds any more."""
        gc.collect()
        if self.is_cuda:
            self.wait()
            torch.cuda.empty_cache()

    @contextmanager
    def flash(self) -> Iterator[None]:
        """Run attention by the FlashAttention kernel alone: another one must not stand in for it unseen."""
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield

    def result(self, future: Future) -> Any:
        """Wait for another process, no longer than the time allowed."""
        left = self.seconds - (time.perf_counter() - self.start)
        try:
            return future.result(timeout=max(left, 0.0))
        except TimeoutError:
            if future.done():
                raise  # its own
            raise OutOfTime(f"the {self.seconds:.0f} s allowed ended before its prediction was made") from None

    # -- other processes ----------------------------------------------------------------------------------------------

    def ask(self, function: Callable, *args: Any) -> Future:
        """Have `function(scale name, *args)` run by another process; asked twice, run once."""
        key = (function.__name__, *args)
        if key not in self._made:
            self._made[key] = self._submit(function, self.scale.name, *args)
        return self._made[key]

    def _submit(self, function: Callable, *args: Any) -> Future:
        if self.is_cuda:
            if self._pool is None:
                workers = max(1, min(8, (os.cpu_count() or 2) - 2))
                context = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(workers, mp_context=context, initializer=without_device)
            return self._pool.submit(function, *args)
        future: Future = Future()
        try:
            future.set_result(function(*args))
        except Exception as error:  # as a pool does: whoever asks for the result gets it
            future.set_exception(error)
        return future

    def ask_ahead(self, sections: Iterable[str]) -> None:
        """Ask for what the sections will need, so that other processes work while the device does."""
        if not self.is_cuda:
            return
        if {"budgets", "speed"} & set(sections):
            self.plans()
        if "peaks" in sections:
            self.predictions()
        if "context" in sections:
            self.longest()

    def plans(self) -> Future:
        """Plans of `auto`, by budget."""
        scale = self.scale
        return self.ask(planned, scale.num_layers, scale.auto_tokens, scale.num_budgets)

    def predictions(self) -> dict[tuple[tuple[int, int, int], str], Future]:
        """Predictions of the peak section, by (layers, tokens, steps) and strategy; of a process each on CUDA."""
        shares = [(name,) for name in STRATEGIES] if self.is_cuda else [tuple(STRATEGIES)]
        return {
            (at, name): self.ask(predicted, *at[:2], share)
            for at in self.scale.peaks for share in shares for name in share
        }  # fmt: skip

    def longest(self) -> dict[str, Future]:
        """The longest contexts, by side; 3% of the memory is left for the prediction's error."""
        budget = int(self.scale.context_gib * GIB * 0.97)
        return {name: self.ask(longest, budget, name, loss) for name, loss in CONTEXT_SIDES.items()}

    def close(self) -> None:
        """End the other processes, whatever they are at: Python would wait for them at its end."""
        if self._pool is not None:
            workers = list((self._pool._processes or {}).values())
            self._pool.shutdown(wait=False, cancel_futures=True)
            for worker in workers:
                worker.terminate()


def step_of(model: nn.Module, ids: torch.Tensor, **inputs: Any) -> Callable[[], torch.Tensor]:
    """Return a step: forward and backward, gradients made anew; it returns the loss."""

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
        loss.backward()
        return loss.detach()

    return step
