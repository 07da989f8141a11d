"""The longest sequence of a run's config: found by prediction, then confirmed by real steps under a memory limit.

Owns the search over lengths, its record (longest.json, written after every length, so that a stopped search goes on)
and what a measured length is. The search on predictions alone is the library's, `ckpt.longest`.

    with open_run(cfg) as run:
        find_longest(cfg, run, start=["python", "train.py", "+strategy=full"])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from ckpt import strategies
from ckpt.auto import BudgetTooSmall
from ckpt.hardware import GIB, Device, at_hand
from ckpt.longest import Longest, longest
from ckpt.predict import predict
from recipes.config import Config, to_dict
from recipes.console import mib
from recipes.device import choose_device
from recipes.errors import RunStopped
from recipes.manifest import SCHEMA_VERSION
from recipes.model import load_config
from recipes.planning import model_without_weights, strategy_of, target_device, with_known_shape
from recipes.recorded import check_schema, read_object
from recipes.rng import rng_state, set_rng_state
from recipes.rundir import RunDir, read_json
from recipes.sweep_job import judge, quoted, run_process
from recipes.workload import workload_of

MEASURED_STEPS = 2
"""The first step records layers and makes optimizer state; the second is like all later ones."""

# What a try may differ in from another search of the same record.
_FREE = ("name", "runs_dir", "resume", "seq_len", "steps", "output", "debug", "tracker", "search", "wandb")


class Search:
    """One search and its record."""

    def __init__(self, cfg: Config, run: RunDir, device: Device):
        self.cfg, self.run, self.device = cfg, run, device
        self.budget_bytes = device.usable_bytes
        values = {key: value for key, value in to_dict(cfg).items() if key not in _FREE}
        earlier = read_object(run.path / "longest.json")
        check_schema(run.path / "longest.json", earlier)
        if earlier and (earlier["config"], earlier["budget_bytes"]) != (values, self.budget_bytes):
            raise ValueError(
                f"{run.path} holds a search with another config or budget. Give another name=..., or leave resume out."
            )
        self.record = earlier or {
            "schema_version": SCHEMA_VERSION,
            "config": values,
            "device": device.name,
            "budget_bytes": self.budget_bytes,
            "predicted": {"peaks": {}},
            "measured": {"tries": {}},
        }

    def save(self) -> None:
        """Write what is known so far."""
        self.run.save_json("longest.json", self.record)

    def predicted_peak(self, seq_len: int) -> int:
        """Predict one length, or take it from the record. What must fit the host is scaled to the device's budget."""
        peaks = self.record["predicted"]["peaks"]
        if str(seq_len) not in peaks:
            peaks[str(seq_len)] = self._predict(seq_len)
            self.save()
            self.run.console.say(f"predicted {seq_len:>10,} tokens: {mib(peaks[str(seq_len)]['peak_bytes'])}")
        found = peaks[str(seq_len)]
        peak, host = found["peak_bytes"], self.cfg.search.host_budget_gib
        return peak if host is None else max(peak, int(found["host_bytes"] / (host * GIB) * self.budget_bytes))

    def _predict(self, seq_len: int) -> dict[str, int]:
        cfg = dataclasses.replace(self.cfg, seq_len=seq_len)
        generators = rng_state()
        try:
            model, work = model_without_weights(cfg, load_config(cfg.model, seq_len)), workload_of(cfg)
            try:
                strategy = planned(cfg, model, work, self.device)
            except BudgetTooSmall:  # no plan fits: what the leanest one takes is not known, but that it is too much is
                return {"peak_bytes": self.budget_bytes + 1, "host_bytes": 0}
            found = predict(model, strategy, work, self.device)
        finally:
            set_rng_state(generators)
        return {"peak_bytes": found.peak_bytes, "host_bytes": found.host_bytes}

    def measured_fits(self, seq_len: int, start: Sequence[str]) -> bool:
        """Tell whether real steps of one length fit into the limit: run them in a process, or ask the record."""
        tries = self.record["measured"]["tries"]
        if str(seq_len) not in tries:
            tries[str(seq_len)] = self._measure(seq_len, start)
            self.save()
        found = tries[str(seq_len)]
        self.run.console.say(
            f"measured {seq_len:>11,} tokens: {found['status']}"
            + (f", peak {mib(found['peak_bytes'])}" if found["peak_bytes"] else "")
        )
        if found["status"] not in ("ok", "oom"):
            raise RunStopped(
                "failed", f"the try of {seq_len} tokens ended with {found['status']}: {found['error']}. Its folder: "
                f"{self.run.path / found['name']}",
            )  # fmt: skip
        return found["status"] == "ok"

    def _measure(self, seq_len: int, start: Sequence[str]) -> dict[str, Any]:
        number = len(list(self.run.path.glob(f"try-{seq_len}*")))
        name = f"try-{seq_len}" + (f"-{number}" if number else "")
        words = [
            *start, f"seq_len={seq_len}", f"steps={MEASURED_STEPS}", f"name={quoted(name)}",
            f"runs_dir={quoted(self.run.path)}", "resume=false",
            f"sweep.job_memory_gib={self.budget_bytes / GIB!r}", "on_predicted_oom=warn", "tracker=none",
            "eval.batches=0", "save_every=-1", "export=false",
        ]  # fmt: skip
        ended = run_process(words)
        summary = read_json(self.run.path / name / "summary.json")
        status, error = judge(ended, summary)
        if status == "interrupted" or ended.stopped:
            raise RunStopped("interrupted", f"interrupted. Go on with: resume=true name={self.run.name}")
        return {
            "name": name, "status": status, "error": error, "peak_bytes": summary.get("peak_bytes"),
            "predicted_peak_bytes": summary.get("predicted_peak_bytes"), "seconds": round(ended.seconds, 1),
        }  # fmt: skip


def find_longest(cfg: Config, run: RunDir, start: Sequence[str]) -> dict[str, Any]:
    """Find the longest sequence for the config's model, strategy, device and budgets; return what the summary says.

    start: the command of one try, to which its length and limit are added. Raises ValueError where not even one
    `search.step` of tokens is predicted to fit.
    """
    here = choose_device(cfg.device)
    target = target_device(cfg, here)
    search = Search(with_known_shape(cfg, run.console.say), run, target)
    search.save()
    most = min(cfg.search.most, positions_of(search.cfg))
    found = longest(search.predicted_peak, search.budget_bytes, step=cfg.search.step, most=most)
    if not found.seq_len:
        raise ValueError(
            f"not even {cfg.search.step} tokens fit into {mib(search.budget_bytes)}: they are predicted to take "
            f"{mib(found.peak_bytes)}. Raise hardware.memory_gib, lower search.step, or choose another strategy."
        )
    result = _predicted(search, found, most)
    search.record["predicted"] |= result
    search.save()
    run.update(**result, predicted_peak_bytes=result["longest_predicted_peak_bytes"])
    if should_measure(cfg, target, at_hand(here)):
        measured = confirm(lambda n: search.measured_fits(n, start), found.seq_len, cfg.search.step, most)
        best = search.record["measured"]["tries"].get(str(measured), {})
        result |= {"longest_measured": measured, "longest_measured_peak_bytes": best.get("peak_bytes")}
        search.record["measured"] |= {key: result[key] for key in ("longest_measured", "longest_measured_peak_bytes")}
        search.save()
        run.update(**result, peak_bytes=best.get("peak_bytes"))
    return result


def planned(cfg: Config, model: Any, work: Any, device: Device) -> Any:
    """Return the strategy to predict; one that plans by a budget is planned first."""
    strategy = strategy_of(cfg, device)
    return strategy.plan(model, work) if strategies.makes_plan(strategy) else strategy


def confirm(fits: Callable[[int], bool], predicted: int, step: int, most: int) -> int:
    """Find the longest length that really fits, near the predicted one: 0 if not even `step` does.

    Goes up or down from the prediction in growing strides until one fits and one does not, then halves what is between.
    """
    good, bad, stride, at = 0, most + step, step, predicted
    while bad - good > step:
        if fits(at):
            good = at
        else:
            bad = at
        if bad > most:
            at = min(good + stride, most // step * step)
            if at <= good:
                break
        elif good == 0 and bad - stride > 0:
            at = bad - stride
        else:
            at = (good + bad) // 2 // step * step
        stride *= 2
    return good


def should_measure(cfg: Config, target: Device, here: Device) -> bool:
    """Tell whether real steps are to be run: by default where the device that is asked for is the one at hand."""
    if cfg.search.confirm == "auto":
        return target.name == here.name
    return cfg.search.confirm == "yes"


def positions_of(cfg: Config) -> int:
    """Return how many positions the model has, stretched ones included."""
    config = load_config(cfg.model, 2).get_text_config(decoder=True)
    return getattr(config, "max_position_embeddings", None) or cfg.search.most


def _predicted(search: Search, found: Longest, most: int) -> dict[str, Any]:
    peak = search.record["predicted"]["peaks"][str(found.seq_len)]
    return {
        "longest_predicted": found.seq_len,
        "longest_predicted_peak_bytes": peak["peak_bytes"],
        "longest_predicted_host_bytes": peak["host_bytes"],
        "budget_bytes": search.budget_bytes,
        "capped_by": None
        if not found.is_capped
        else ("search.most" if most == search.cfg.search.most else "positions"),
    }
