"""The directory of one run: its name, its files, its status. Rank 0 writes; on other ranks every call does nothing.

Owns config.yaml, manifest.json, metrics.jsonl and summary.json, and is the one door to the tracker. JSON files are
written beside and renamed, so that a reader never sees half of one; metrics.jsonl, flushed line by line, is the truth.

    with open_run(cfg) as run:                 # an exception inside records its status and goes on
        run.describe(data_fingerprint="...")   # more lines for manifest.json
        run.log({"step": 1, "loss": 5.9})
        run.finish("ok", peak_bytes=...)       # without it, leaving the block means "ok"
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from recipes.config import Config, check_ranks, to_dict
from recipes.console import Console
from recipes.distributed import ONE, Ranks, agreed
from recipes.errors import STATUSES, is_disk_full, is_mistake, one_line, status_of
from recipes.errors import RunStopped as RunStopped
from recipes.lock import hold, release
from recipes.manifest import SCHEMA_VERSION, collect, scrub
from recipes.resuming import differences, read_config
from recipes.tracking import NoTracker, Tracker, open_tracker

SUMMARY_FIELDS = (
    "error",
    "peak_bytes",
    "predicted_peak_bytes",
    "residents",
    "tokens_per_second",
    "step_seconds",
    "predicted_step_seconds",
    "first_loss",
    "final_loss",
    "recompute_flops",
    "step_flops",
)


class RunDir:
    """Files of one run. Made by `open_run`."""

    def __init__(self, path: Path, ranks: Ranks, console: Console, summary: dict[str, Any]):
        self.path = path
        self.ranks = ranks
        self.writes = ranks.is_main
        self.console = console
        self.summary = summary
        self.manifest: dict[str, Any] = {}
        self.tracker: Tracker = NoTracker()
        self.logged = False
        self.held: int | None = None
        self.had_folder = True  # runs_dir was there before

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def status(self) -> str:
        return self.summary["status"]

    @property
    def train_state(self) -> Path:
        """Folder of the weights and optimizer states on disk."""
        return self.path / "train_state"

    def describe(self, **fields: Any) -> None:
        """Add fields to manifest.json."""
        self.manifest |= scrub(fields)
        self.save_json("manifest.json", self.manifest)

    def log(self, metrics: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl and hand the same values to the tracker. `metrics` must hold `step`."""
        if not self.writes:
            return
        line = json.dumps(scrub(metrics))
        with open(self.path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(line + "\n")
        self.logged = True
        self.tracker.log(metrics)

    def rewind(self, step: int) -> None:
        """Drop the lines of metrics.jsonl after `step`, or cut short by a kill: a resumed run logs them again."""
        path = self.path / "metrics.jsonl"
        if self.writes and path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
            write_atomically(path, "".join(line + "\n" for line in kept))

    def save_json(self, name: str, value: Any, durable: bool = True) -> None:
        """Write one JSON file of the run, whole or not at all."""
        if self.writes:
            write_atomically(self.path / name, json.dumps(value, indent=2) + "\n", durable)

    def update(self, **fields: Any) -> None:
        """Change fields of summary.json while the run goes on."""
        self._summarise(fields, durable=False)

    def finish(self, status: str = "ok", **fields: Any) -> None:
        """Record how the run ended, and close the tracker."""
        if status not in STATUSES:
            raise ValueError(f"status={status!r} is not one of {', '.join(STATUSES)}.")
        self._summarise({"status": status, "ended_at": _now(), **fields}, durable=True)
        self.tracker.finish(self.summary)

    def _summarise(self, fields: Mapping[str, Any], durable: bool) -> None:
        self.summary |= scrub(fields)
        self.save_json("summary.json", self.summary, durable)

    def fail(self, error: BaseException) -> None:
        """Record an exception: its status and, in one line, what it said."""
        self.finish(status_of(error), error=one_line(error))


@contextlib.contextmanager
def open_run(cfg: Config, ranks: Ranks = ONE) -> Iterator[RunDir]:
    """Make the run's directory (or, with resume, open it), and record how the block ends. One directory for all ranks.

    A mistake of the user or a full disk found before the first logged step leaves nothing behind, and a run that was to
    be resumed as it was. Raises ValueError for a name that exists without resume, one that does not with it, a
    run that another process is at work on, and a directory that cannot be written.
    """
    run = _enter(cfg, ranks)
    before = _contents(run.path) if cfg.resume and run.writes else {}
    try:
        if run.writes:
            _write_first_files(run, cfg)
        yield run
        if run.status == "running":
            run.finish("ok")
    except BaseException as caught:
        error = ranks.explain(caught)
        if run.status == "running":
            if (is_mistake(error) or is_disk_full(error)) and not run.logged:
                run.tracker.finish({"status": "failed"})
                _put_back(run, before) if cfg.resume else _remove(run)
            else:
                # A full disk is the likeliest reason to be here and to fail here: the first error must get through.
                with contextlib.suppress(OSError):
                    run.fail(error)
        if error is not caught:
            raise error from caught
        raise
    finally:
        release(run.held)


def default_name(cfg: Config) -> str:
    """strategy-model-seq_len-start time, in characters that every file system and shell takes."""
    model = re.sub(r"[^\w.-]+", "_", Path(cfg.model.name).name) or "model"
    return f"{cfg.strategy.name}-{model}-{cfg.seq_len}-{time.strftime('%Y%m%d-%H%M%S')}"


def write_atomically(path: Path, text: str, durable: bool = True) -> None:
    """Write `text` to `path` so that a reader finds the old file or the new one, and no other file is left.

    durable: wait until the disk has it; without, a power cut (no crash, no kill) may cost the last version.
    """
    # Not by mkstemp, whose files nobody else may read: who may is the umask's to say.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _enter(cfg: Config, ranks: Ranks) -> RunDir:
    summary = {
        "status": "running",
        **dict.fromkeys(SUMMARY_FIELDS),
        "strategy": cfg.strategy.name,
        "seq_len": cfg.seq_len,
        "batch_size": cfg.batch_size,
        "schema_version": SCHEMA_VERSION,
        "started_at": _now(),
    }
    check_ranks(cfg, ranks.num_ranks)
    automatic = cfg.name is None
    cfg = agreed(cfg, ranks, default_name)
    path = Path(cfg.runs_dir) / (cfg.name or default_name(cfg))

    def take() -> int | None:
        _find(path) if cfg.resume else _make(path, automatic)
        return hold(path)

    had_folder = path.parent.exists()
    held = ranks.from_main(take)
    run = RunDir(path, ranks, Console(cfg.output), summary)
    run.had_folder = had_folder
    run.held = held if run.writes else None
    return run


def _find(path: Path) -> None:
    if not (path / "config.yaml").exists():
        raise ValueError(f"resume=true, but {path} holds no run. Give the run's name (name=...), or leave resume out.")


def _make(path: Path, automatic: bool) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir()
    except FileExistsError:
        if path.parent.is_dir():
            what = "wait a second" if automatic else f"continue it with resume={path}"
            raise ValueError(f"{path} exists already: {what}, or give another name=...") from None
        raise ValueError(f"runs_dir={str(path.parent)!r} is no folder. Give another runs_dir=...") from None
    except OSError as error:
        raise ValueError(
            f"cannot make {path}: {error.strerror}. Give a folder that you may write to: runs_dir=..."
        ) from None


def _write_first_files(run: RunDir, cfg: Config) -> None:
    earlier = read_json(run.path / "manifest.json")
    config = scrub(to_dict(cfg) | {"name": run.name})
    if cfg.resume:
        run.summary["first_loss"] = read_json(run.path / "summary.json").get("first_loss")
        for line in differences(read_config(run.path), config):
            run.console.say(f"resumed with a change: {line}")
    write_atomically(run.path / "config.yaml", yaml.safe_dump(config, sort_keys=False))
    run.manifest = collect(sys.orig_argv[1:]) | {"seed": cfg.seed, "num_resumes": earlier.get("num_resumes", -1) + 1}
    run.save_json("manifest.json", run.manifest)
    run.save_json("summary.json", run.summary)
    run.tracker = open_tracker(cfg, run.path, config, earlier.get("tracker", {}).get("id"))
    if run.tracker.facts:
        run.describe(tracker=run.tracker.facts)
    run.console.say(run.tracker.notice)


def _contents(path: Path) -> dict[str, str]:
    """Read what `_write_first_files` overwrites."""
    files = (path / name for name in ("config.yaml", "manifest.json", "summary.json"))
    return {file.name: file.read_text(encoding="utf-8") for file in files if file.exists()}


def _put_back(run: RunDir, contents: Mapping[str, str]) -> None:
    """Undo `_write_first_files` of a run that was to be resumed: what it had come to, and its config, still hold."""
    with contextlib.suppress(OSError):
        for name, text in contents.items():
            write_atomically(run.path / name, text)


def _remove(run: RunDir) -> None:
    if run.writes:
        shutil.rmtree(run.path, ignore_errors=True)
        if not run.had_folder:
            with contextlib.suppress(OSError):
                run.path.parent.rmdir()  # only if nothing else is in it


def read_json(path: Path) -> dict[str, Any]:
    """Read one of our JSON files; {} if it is not there or cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
