"""Run a recorded run again and compare: the machine first, then every loss, then the peak.

Owns what counts as the same stack, the tolerances, and the verdict. On the same stack losses must be equal bit by bit;
on another one they may differ by TOLERANCE, relative, since other versions, kernels and CPUs sum in another order.

    verdict = reproduce("results/reference/small_selective", runs_dir="runs", say=print)
    verdict.reproduced, verdict.text
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from recipes.config import Config, from_dict
from recipes.console import mib
from recipes.programs import run_program
from recipes.recorded import Recorded, read_run
from recipes.rundir import open_run

TOLERANCE = {"fp32": 1e-3, "bf16": 2e-2, "bf16_pure": 2e-2}
"""Largest relative difference of a loss on another stack, by dtype."""
PEAK_TOLERANCE = 0.01
COMPARED = ("loss", "grad_norm", "eval_loss")
_STACK = ("torch", "transformers", "numpy", "peft", "triton", "flash-attn", "flash-attn-3", "liger-kernel", "kernels")


class Difference(NamedTuple):
    """One thing that is not as recorded. matters: results may differ in the last bits for it."""

    what: str
    recorded: Any
    here: Any
    matters: bool

    def __str__(self) -> str:
        return f"{self.what}: {self.recorded} recorded, {self.here} here" + ("" if self.matters else " (no matter)")


@dataclass(frozen=True)
class Verdict:
    """What came of it; `text` is one line."""

    reproduced: bool
    text: str
    differences: tuple[Difference, ...]


def reproduce(path: str | Path, runs_dir: str = "runs", say: Callable[[str], None] = print) -> Verdict:
    """Run what `path` records once more, in a new folder below `runs_dir`, and compare.

    Other data ends it at once: then no loss has to agree. Raises ValueError for a folder that holds no whole run.
    """
    recorded = read_run(path)
    _refuse_unfinished(recorded)
    cfg = dataclasses.replace(
        from_dict(recorded.config), runs_dir=runs_dir, resume=False, tracker="none", export=False, save_every=-1,
        name=f"reproduce-{recorded.path.resolve().name}-{time.strftime('%Y%m%d-%H%M%S')}",
    )  # fmt: skip
    _use_recorded_threads(recorded.manifest)
    differences = list(compare_stacks(recorded.manifest, cfg))
    for difference in differences:
        say(str(difference))
    data = next((found for found in compare_data(recorded.manifest, cfg)), None)
    if data is not None:
        return Verdict(False, f"differs: {data}", (*differences, data))
    same = not any(difference.matters for difference in differences)
    say("same stack: losses must be equal bit by bit" if same else _allowance(cfg))
    with open_run(cfg) as run:
        run_program(cfg, run)
    return compare_runs(recorded, read_run(run.path), None if same else TOLERANCE[cfg.dtype], differences)


def compare_stacks(manifest: dict[str, Any], cfg: Config) -> Iterator[Difference]:
    """Compare the machine and the code with those of the record."""
    from recipes.manifest import collect

    here = collect([])
    packages, packages_here = manifest.get("packages", {}), here["packages"]
    for name in _STACK:
        yield from _compare(name, packages.get(name), packages_here.get(name))
    yield from _compare("Python", manifest.get("python"), here["python"], matters=False)
    for name, words in (("device", "device"), ("world_size", "number of ranks")):
        yield from _compare(words, manifest.get(name), here[name])
    for name, words in (("capability", "CPU capability"), ("model", "CPU"), ("threads", "threads")):
        yield from _compare(words, manifest.get("cpu", {}).get(name), here["cpu"][name])
    git, git_here = manifest.get("git") or {}, here["git"] or {}
    yield from _compare("commit", _commit(git), _commit(git_here), matters=False)
    yield from _compare("attention kernel", manifest.get("attention", {}).get("kernel"), kernel_here(cfg))


def compare_data(manifest: dict[str, Any], cfg: Config) -> Iterator[Difference]:
    """Compare the fingerprint of the training text with that of the record."""
    recorded = manifest.get("data", {})
    here = fingerprint_here(cfg)
    for name in ("files", "bytes", "sha256"):
        yield from _compare(f"data {name}", recorded.get(name), here.get(name))


def compare_runs(
    recorded: Recorded, again: Recorded, tolerance: float | None, differences: list[Difference] | None = None
) -> Verdict:
    """Compare two runs step by step, and their peaks. tolerance None: losses must be equal bit by bit."""
    found = tuple(differences or ())
    before, now = _by_step(recorded), _by_step(again)
    if before.keys() != now.keys():
        return Verdict(False, f"differs: {len(before)} steps recorded, {len(now)} now", found)
    largest, where = 0.0, ""
    for step, values in before.items():
        for name in COMPARED:
            was, is_ = values.get(name), now[step].get(name)
            if was == is_:
                continue
            off = float("inf") if was is None or is_ is None else abs(is_ - was) / max(abs(was), 1e-12)
            # Gradient norms swing more than losses; on another stack only losses are held to the tolerance.
            if tolerance is None or (name != "grad_norm" and off > tolerance):
                return Verdict(False, f"differs: {name} at step {step} was {was!r}, and is {is_!r} ({off:.1e})", found)
            if name != "grad_norm" and off > largest:
                largest, where = off, f"{name} at step {step}"
    peak, peak_now = recorded.summary.get("peak_bytes"), again.summary.get("peak_bytes")
    if (peak is None) != (peak_now is None) or (peak and abs(peak_now / peak - 1) > PEAK_TOLERANCE):
        return Verdict(False, f"differs: peak was {_mib(peak)}, and is {_mib(peak_now)} (1% is allowed)", found)
    how = f"losses within {largest:.1e} ({where})" if largest else "losses and gradient norms equal bit by bit"
    if not largest and tolerance is not None:
        how = "losses equal bit by bit"
    peaks = f", peak {_mib(peak_now)} ({peak_now / peak - 1:+.2%})" if peak else ""
    return Verdict(True, f"reproduced: {len(before)} steps, {how}{peaks}", found)


def fingerprint_here(cfg: Config) -> dict[str, Any]:
    """Read the data that a config names and return its fingerprint."""
    from recipes.assemble import build_data_of
    from recipes.model import build_tokenizer, load_config

    return build_data_of(cfg, build_tokenizer(cfg.model, load_config(cfg.model, cfg.seq_len))).fingerprint


def kernel_here(cfg: Config) -> str:
    """Name the attention kernel that a config gets on this machine."""
    from ckpt.attention import choose
    from recipes.device import choose_device
    from recipes.model import load_config
    from recipes.precision import DTYPES

    config = load_config(cfg.model, cfg.seq_len)
    device, packing = choose_device(cfg.device), cfg.data.packing
    return choose(config, cfg.attn, device=device, dtype=DTYPES[cfg.dtype], packing=packing, seq_len=cfg.seq_len).kernel


def _refuse_unfinished(recorded: Recorded) -> None:
    status = recorded.summary.get("status")
    if status is None or not recorded.manifest or not recorded.metrics:
        raise ValueError(
            f"{recorded.path} is half written: to be compared it needs manifest.json, metrics.jsonl and summary.json."
        )
    if status != "ok":
        raise ValueError(f"{recorded.path} ended with status {status}: only a run that ended ok can be reproduced.")


def _use_recorded_threads(manifest: dict[str, Any]) -> None:
    import torch

    threads = manifest.get("cpu", {}).get("threads")
    if isinstance(threads, int) and threads > 0:
        torch.set_num_threads(threads)


def _allowance(cfg: Config) -> str:
    return f"another stack: losses may differ by {TOLERANCE[cfg.dtype]:g}, relative ({cfg.dtype})"


def _compare(what: str, recorded: Any, here: Any, matters: bool = True) -> Iterator[Difference]:
    if recorded != here:
        yield Difference(what, recorded, here, matters)


def _commit(git: dict[str, Any]) -> str | None:
    return git.get("commit", "none")[:10] + (" with changes" if git.get("dirty") else "") if git else None


def _by_step(run: Recorded) -> dict[int, dict[str, Any]]:
    return {line["step"]: line for line in run.metrics}


def _mib(num_bytes: int | None) -> str:
    return "not measured" if num_bytes is None else mib(num_bytes)
