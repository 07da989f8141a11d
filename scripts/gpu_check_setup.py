"""What the sections of the GPU check share: sizes, the model and its step, measured peaks and times, predictions.

A `Scale` holds every size, once for one H200 and once for a toy that runs the same code on any CPU. Predictions and plans
are made by other processes while the device works; the toy makes them on the spot.

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
from transformers import AutoModelForCausalLM, LlamaConfig

import ckpt
from ckpt.auto import GIB, Auto
from ckpt.hardware import find
from ckpt.ledger import measure
from ckpt.predict import read
from ckpt.simulate import Simulator

STRATEGIES: dict[str, tuple[Any, int]] = {
    "none": (ckpt.KeepAll(), 1),
    "full": (ckpt.Full(), 1),
    "full, 8 tiles": (ckpt.Full(), 8),
    "every_n 2": (ckpt.EveryN(2), 1),
    "segments keep": (ckpt.Segments(2, "keep"), 1),
    "segments replay": (ckpt.Segments(2, "replay"), 1),
    "selective": (ckpt.Selective("attention"), 1),
    "selective matmul": (ckpt.Selective("attention+matmul"), 1),
    "offload": (ckpt.Offload(target="host"), 1),
    "offload, 8 tiles": (ckpt.Offload(target="host"), 8),
}
# Whose longest context is looked for, and its loss. Library: Transformers' checkpointing of every layer.
CONTEXT_SIDES = {"library": "full", "full, 8 tiles": "chunked", "offload, 8 tiles": "chunked"}


@dataclass(frozen=True)
class Scale:
    """Sizes of all sections. peaks: (layers, tokens, steps) of the peak section. *_tokens: of the section so named.

    context_gib: memory that the longest context is looked for in; context_tokens: a length that fits, and its multiples
    are tried.
    """

    name: str
    device: str
    hardware: str | None
    shape: dict[str, int]
    num_layers: int
    exact_layers: int
    exact_tokens: int
    peaks: tuple[tuple[int, int, int], ...]
    auto_tokens: int
    num_budgets: int
    offload_tokens: tuple[int, ...]
    pool_tokens: int
    pool_steps: int
    packed_tokens: int
    context_gib: float
    context_tokens: int
    repeats: int

    def config(self, num_layers: int) -> LlamaConfig:
        return LlamaConfig(**self.shape, num_hidden_layers=num_layers, max_position_embeddings=2**21, pad_token_id=0)

    def workload(self, seq_len: int, loss: str = "chunked", tile_mlp: int = 1) -> ckpt.Workload:
        """bf16 weights, one row, forward and backward."""
        return ckpt.Workload(
            batch_size=1, seq_len=seq_len, dtype="bf16_pure", optimizer=None, loss=loss, tile_mlp=tile_mlp
        )


_8B = {
    "vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "rope_theta": 500_000,
}  # fmt: skip
_TINY = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
# Few layers and, at 131,072 tokens, one step: a longer check would not end within four minutes.
H200 = Scale(
    "h200", "cuda", "h200", _8B, num_layers=4, exact_layers=2, exact_tokens=4096,
    peaks=((4, 8192, 2), (2, 32_768, 2), (2, 131_072, 1)), auto_tokens=16_384, num_budgets=5,
    offload_tokens=(16_384, 32_768), pool_tokens=8192, pool_steps=20, packed_tokens=8192,
    context_gib=24.0, context_tokens=4096, repeats=5,
)  # fmt: skip
TOY = Scale(
    "toy", "cpu", None, _TINY, num_layers=2, exact_layers=2, exact_tokens=64, peaks=((2, 64, 2),),
    auto_tokens=128, num_budgets=3, offload_tokens=(64,), pool_tokens=64, pool_steps=4, packed_tokens=64, context_gib=0.0011, context_tokens=64, repeats=2,
)  # fmt: skip
SCALES = {scale.name: scale for scale in (H200, TOY)}


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

    # -- the model and its step -----------------------------------------------------------------------------------------

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

    # -- other processes --------------------------------------------------------------------------------------------------

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
                self._pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_without_device)
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
        """End the other processes."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)


def step_of(model: nn.Module, ids: torch.Tensor, **inputs: Any) -> Callable[[], torch.Tensor]:
    """Return a step: forward and backward, gradients made anew; it returns the loss."""

    def step() -> torch.Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(input_ids=ids, labels=ids, use_cache=False, **inputs).loss
        loss.backward()
        return loss.detach()

    return step


# -- run by other processes, which have no device ------------------------------------------------------------------------


def _without_device() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)


def predicted(scale_name: str, num_layers: int, seq_len: int, names: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """Predict one length under some strategies, kernel workspaces of the device included."""
    scale = SCALES[scale_name]
    device = None if scale.hardware is None else find(scale.hardware)
    simulator = Simulator(scale.config(num_layers), scale.workload(seq_len))
    made = {}
    for name in names:
        strategy, tiles = STRATEGIES[name]
        prediction = read(simulator.run(strategy, tile_mlp=tiles), simulator.work, device)
        made[name] = prediction.to_dict()
    return made


def planned(scale_name: str, num_layers: int, seq_len: int, num_budgets: int) -> list[tuple[int, dict]]:
    """Plan for budgets from the peak of `full` to that of `none`, in equal steps.

    Return (budget in bytes, plan), the device's own workspaces in the budget but not in what is planned.
    """
    from ckpt.solver.frontier import Frontier

    scale = SCALES[scale_name]
    work = scale.workload(seq_len)
    extra = 0 if scale.hardware is None else find(scale.hardware).fixed_bytes()
    frontier = Frontier(Simulator(scale.config(num_layers), work), Auto(budget_gib=1.0, objective="flops").price())
    least, most = frontier.full.peak_bytes, frontier.none.peak_bytes
    plans = []
    for k in range(num_budgets):
        budget = least + (most - least) * k // (num_budgets - 1)
        auto = Auto(budget_gib=budget / GIB, objective="flops")
        plans.append((budget + extra, auto.plan_from(frontier, work).to_dict()))
    return plans


def longest(scale_name: str, budget_bytes: int, name: str, loss: str) -> int:
    """Return the longest context whose predicted peak fits, a multiple of `context_tokens`; peaks rise with length.

    name: of STRATEGIES, or "library": Transformers' own checkpointing of every layer, with full logits.
    """
    scale = SCALES[scale_name]
    device = None if scale.hardware is None else find(scale.hardware)
    strategy, tiles = STRATEGIES.get(name, (None, 1))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(scale.config(scale.num_layers), dtype=torch.bfloat16).train()
    if name == "library":
        model.activation_checkpointing_enable()

    def peak(times: int) -> int:
        simulator = Simulator(model, scale.workload(times * scale.context_tokens, loss))
        return read(simulator.run(strategy, tile_mlp=tiles), simulator.work, device).peak_bytes

    known = {times: peak(times) for times in (1, 2)}
    if known[1] > budget_bytes:
        raise ValueError(f"{name}: {scale.context_tokens} tokens do not fit {budget_bytes / GIB:.3g} GiB")
    while True:  # the peak is nearly a line, so a few guesses along it find the last multiple that fits
        fits = max(times for times, found in known.items() if found <= budget_bytes)
        if fits + 1 in known:
            return fits * scale.context_tokens
        low, high = sorted(known)[-2:] if fits == max(known) else (fits, min(t for t in known if t > fits))
        slope = (known[high] - known[low]) / (high - low)
        guess = fits + int((budget_bytes - known[fits]) / slope)
        guess = max(fits + 1, min(guess, 4 * fits if fits == max(known) else high - 1))
        known[guess] = peak(guess)
