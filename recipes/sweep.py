"""A sweep: jobs run one after the other, each in a process of its own, each a row of runs/SWEEP/sweep.json.

Owns the order, the names and the record; what becomes of one process stands in recipes/sweep_job.py, what is drawn of a
sweep in recipes/report.

    run(configs, [["+strategy=none"], ["+strategy=full"]], command=["python", "train.py"])
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.config import Config, to_dict
from recipes.console import sweep_table
from recipes.errors import RunStopped
from recipes.lock import hold, release
from recipes.manifest import SCHEMA_VERSION, scrub
from recipes.recorded import read_sweep
from recipes.rundir import read_json, write_atomically
from recipes.sweep_job import Ended, judge, quoted, run_process
from recipes.tracking import open_tracker

Row = dict[str, Any]
FINISHED = ("ok", "predicted_oom")
"""Statuses that a second start leaves alone. A job that was predicted not to fit is an answer, not a failure."""

_FROM_SUMMARY = ("peak_bytes", "predicted_peak_bytes", "tokens_per_second", "final_loss")
# Overrides that change how a job is run, not what it computes.
_HOW = re.compile(r"\+*(name|runs_dir|debug|output|on_predicted_oom|sweep\.(?!ranks)\w+)=")


def run(configs: Sequence[Config], jobs: Sequence[Sequence[str]], command: Sequence[str], first: int = 0) -> list[Row]:
    """Run every job of `jobs` (their overrides, one config each) as `command OVERRIDES`, and return their rows.

    The rest run whatever becomes of one. `first`: number of the first job, above 0 when Hydra hands a sweep over in
    parts. Raises ValueError for a sweep that exists without sweep.resume or that another process is at work on, and
    RunStopped in the end if any job did not end ok (or was interrupted).
    """
    cfg = configs[0]
    folder = Path(cfg.runs_dir) / str(cfg.sweep.name)
    rows = {row["name"]: row for row in _earlier(folder, cfg.sweep.resume, first)}
    names = job_names(jobs, first)
    forced = any(_is_forced(overrides) for overrides in jobs)
    done = {_what(row["overrides"]): row for row in rows.values() if _is_finished(row, forced)}
    _refuse_other_jobs(rows, names, jobs, done, cfg)
    folder.mkdir(parents=True, exist_ok=True)
    held = hold(folder, "sweep")
    try:
        asked = _run_jobs(configs, jobs, names, command, folder, rows, done)
    finally:
        release(held)
    _write(folder, rows.values())
    sweep_table(asked)
    if asked[-1]["status"] != "interrupted":
        _report(folder, cfg)
    _say_sync(folder)
    _raise_for(asked, len(jobs), folder, cfg)
    return asked


def _run_jobs(
    configs: Sequence[Config], jobs: Sequence[Sequence[str]], names: Sequence[str], command: Sequence[str],
    folder: Path, rows: dict[str, Row], done: Mapping[frozenset[str], Row],
) -> list[Row]:  # fmt: skip
    """Run what is not done, each job's row into `rows` and the file; return the rows of all that were asked for."""
    asked = []
    for name, overrides, job in zip(names, jobs, configs, strict=True):
        if _what(overrides) in done:
            asked.append(done[_what(overrides)])
            continue
        _write(folder, rows.values())
        _set_aside(folder / name)
        print(f"== {job.sweep.name}: {name}", flush=True)
        ended = run_process(_words(command, overrides, name, folder), _seconds(job.sweep.job_timeout_minutes))
        rows[name] = _row(folder / name, name, overrides, job, ended)
        asked.append(rows[name])
        if rows[name]["status"] == "interrupted":
            break
    return asked


def by_torchrun(ranks: int) -> list[str]:
    """Return what stands between the interpreter and the program, so that a job runs on several ranks."""
    if ranks == 1:
        return []
    return ["-m", "recipes.launch", "--standalone", f"--nproc-per-node={ranks}"]


def job_names(jobs: Sequence[Sequence[str]], first: int = 0) -> list[str]:
    """Name each job by what differs between the jobs, such as `01-full-seq_len=512`."""
    columns = list(zip(*jobs, strict=True))
    varied = [len(set(column)) > 1 for column in columns]
    names = []
    for number, overrides in enumerate(jobs, start=first):
        words = [f"{number:02d}"]
        for override in (word for word, varies in zip(overrides, varied, strict=True) if varies):
            key, _, value = override.lstrip("+").partition("=")
            value = re.sub(r"[^\w.+-]+", "_", value).strip("_")[:40]
            words.append(value if key in ("strategy", "model", "data", "recipe") else f"{key.split('.')[-1]}={value}")
        names.append("-".join(words))
    return names


def _earlier(folder: Path, resume: bool, first: int) -> list[Row]:
    """Read the rows of an earlier start, or of an earlier part of this one."""
    record = folder / "sweep.json"
    if resume and not record.exists():
        raise ValueError(
            f"sweep.resume=true, but {record} holds no sweep. Give its name with sweep.name=..., or leave resume out."
        )
    if folder.exists() and not resume and not first:
        raise ValueError(
            f"{folder} exists already: run what is left of it with sweep.resume=true, or give another sweep.name."
        )
    return read_sweep(folder) if record.exists() else []


def _refuse_other_jobs(
    rows: Mapping[str, Row], names: Sequence[str], jobs: Sequence[Sequence[str]], done: Mapping, cfg: Config
) -> None:
    """Refuse to put another job in the place of one that this sweep holds already."""
    for name, overrides in zip(names, jobs, strict=True):
        there, now = _what(rows[name]["overrides"]) if name in rows else None, _what(overrides)
        if there is None or there == now or now in done:
            continue
        raise ValueError(
            f"sweep {cfg.sweep.name} ran its job {name} with {' '.join(sorted(there - now)) or 'fewer overrides'}, and "
            f"now it is asked for with {' '.join(sorted(now - there)) or 'fewer'}. Give another sweep.name."
        )


def _is_finished(row: Row, forced: bool) -> bool:
    return row["status"] in FINISHED and not (row["status"] == "predicted_oom" and forced)


def _is_forced(overrides: Sequence[str]) -> bool:
    """Tell whether a job is to run even if it is predicted not to fit."""
    return any(word.lstrip("+") == "on_predicted_oom=warn" for word in overrides)


def _what(overrides: Sequence[str]) -> frozenset[str]:
    """What a job computes, to know it again whatever its number: its overrides, less how it is run."""
    return frozenset(word.lstrip("+") for word in scrub(list(overrides)) if not _HOW.match(word))


def _words(command: Sequence[str], overrides: Sequence[str], name: str, folder: Path) -> list[str]:
    """Write a job's command line: what it was asked for, and what makes it a job of this sweep.

    It stops itself where it is predicted not to fit, into its memory limit if it has one, unless it is told otherwise.
    """
    given = {word.lstrip("+").partition("=")[0]: word for word in overrides}
    own = [word for key, word in given.items() if key not in ("name", "runs_dir", "sweep.resume")]
    if "on_predicted_oom" not in given:
        own.append("on_predicted_oom=error")
    if "sweep.job_memory_gib" in given and "hardware.memory_gib" not in given:
        own.append(f"hardware.memory_gib={given['sweep.job_memory_gib'].partition('=')[2]}")
    return [*command, *own, f"name={quoted(name)}", f"runs_dir={quoted(folder)}"]


def _row(path: Path, name: str, overrides: Sequence[str], cfg: Config, ended: Ended) -> Row:
    summary = read_json(path / "summary.json")
    status, error = judge(ended, summary, cfg.sweep.job_timeout_minutes)
    if summary and (summary.get("status"), summary.get("error")) != (status, error):
        write_atomically(
            path / "summary.json", json.dumps(summary | {"status": status, "error": error}, indent=2) + "\n"
        )
    return scrub(
        {
            "name": name,
            "overrides": list(overrides),
            "strategy": cfg.strategy.name,
            "model": cfg.model.name,
            "seq_len": cfg.seq_len,
            "batch_size": cfg.batch_size,
            "status": status,
            "exit_code": ended.code,
            "error": error,
            "seconds": round(ended.seconds, 2),
            **{key: summary.get(key) for key in _FROM_SUMMARY},
        }
    )


def _set_aside(path: Path) -> None:
    """Rename what an earlier start left of a job, so that nothing is lost and the job can start afresh.

    Raises ValueError while the job of an earlier start, killed itself, is still at work there.
    """
    if path.exists():
        release(hold(path))
        number = len(list(path.parent.glob(f".{path.name}.try*")))
        path.rename(path.with_name(f".{path.name}.try{number}"))


def _write(folder: Path, rows: Sequence[Row]) -> None:
    text = json.dumps({"schema_version": SCHEMA_VERSION, "jobs": list(rows)}, indent=2)
    write_atomically(folder / "sweep.json", text + "\n")


def _report(folder: Path, cfg: Config) -> None:
    """Draw the sweep, and log the drawings and the rows to a W&B run of their own in the sweep's group."""
    from recipes.report import write_report  # matplotlib: half a second that a sweep refused need not pay

    page = write_report(folder)
    print(f"report: {page}", flush=True)
    figures = folder / "report"
    tracker = open_tracker(cfg, figures, scrub(to_dict(cfg)), kind="report")
    for picture in sorted(figures.glob("*.png")):
        tracker.picture(picture.stem, picture)
    rows = read_json(folder / "sweep.json")["jobs"]
    columns = ("name", "strategy", "seq_len", "status", "error", *_FROM_SUMMARY)
    tracker.table("jobs", columns, [[row.get(column) for column in columns] for row in rows])
    tracker.finish({"status": "ok"})


def _say_sync(folder: Path) -> None:
    """Say how the jobs that W&B tracked offline are uploaded, all in one group."""
    if any(folder.glob("*/wandb/offline-run-*")):
        print(f"W&B: offline. Upload all jobs with: wandb sync {folder}/*/wandb/offline-run-*", flush=True)


def _seconds(minutes: float | None) -> float | None:
    return None if minutes is None else 60 * minutes


def _raise_for(rows: Sequence[Row], num_jobs: int, folder: Path, cfg: Config) -> None:
    again = f"the same command with sweep.name={cfg.sweep.name} sweep.resume=true."
    if rows[-1]["status"] == "interrupted":
        raise RunStopped("interrupted", f"interrupted after {len(rows) - 1} of {num_jobs} jobs. The rest: {again}")
    bad = [f"{row['name']} ({row['status']})" for row in rows if row["status"] not in FINISHED]
    if bad:
        raise RunStopped(
            "failed",
            f"{len(bad)} of {num_jobs} jobs did not end ok: {', '.join(bad)}. Rows: {folder / 'sweep.json'}. "
            f"Again, these alone: {again}",
        )
