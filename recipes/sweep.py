"""A sweep: jobs run one after the other, each in a process of its own, each a row of runs/SWEEP/sweep.json.

run(cfg, [["+strategy=none"], ["+strategy=full"]], command=["python", "train.py"])
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from recipes.config import Config
from recipes.console import sweep_table
from recipes.errors import RunStopped
from recipes.manifest import SCHEMA_VERSION, scrub
from recipes.rundir import read_json, write_atomically

GRACE_SECONDS = 60


def run(cfg: Config, jobs: Sequence[Sequence[str]], command: Sequence[str], first: int = 0) -> list[dict[str, Any]]:
    """Run every job of `jobs` (their overrides) as `command OVERRIDES`, and return their rows.

    The rest run whatever becomes of one. Raises ValueError for a sweep that exists without sweep.resume, and
    RunStopped("failed") in the end if any job did not end ok.
    """
    folder = Path(cfg.runs_dir) / str(cfg.sweep.name)
    record = folder / "sweep.json"
    earlier = {row["name"]: row for row in read_json(record).get("jobs", [])}
    if folder.exists() and not cfg.sweep.resume:
        raise ValueError(
            f"{folder} exists already: run what is left of it with sweep.resume=true, or give another sweep.name."
        )
    if cfg.sweep.resume and not earlier:
        raise ValueError(
            f"sweep.resume=true, but {record} holds no sweep. Give its name with sweep.name=..., or leave resume out."
        )
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for name, overrides in zip(job_names(jobs, first), jobs, strict=True):
        if earlier.get(name, {}).get("status") == "ok":
            rows.append(earlier[name])
            continue
        _set_aside(folder / name)
        print(f"== {cfg.sweep.name}: {name}", flush=True)
        rows.append(_run_job(folder, name, overrides, command))
        _write(record, rows)
        if rows[-1]["status"] == "interrupted":
            break
    _write(record, rows)
    sweep_table(rows)
    _raise_for(rows, len(jobs), record, cfg)
    return rows


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


def _run_job(folder: Path, name: str, overrides: Sequence[str], command: Sequence[str]) -> dict[str, Any]:
    own = [word for word in overrides if word.lstrip("+").partition("=")[0] not in ("name", "runs_dir", "sweep.resume")]
    words = [*command, *own, f"name='{name}'", f"runs_dir='{folder}'"]
    start = time.monotonic()
    with subprocess.Popen(words, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, errors="replace") as job:
        code, last, interrupted = _wait(job)
    row = _row(folder / name, name, overrides, code, last, time.monotonic() - start)
    return row | {"status": "interrupted"} if interrupted and row["status"] != "ok" else row


def _wait(job: subprocess.Popen) -> tuple[int, str, bool]:
    """Pass a job's stderr on until it ends; return its exit code, its last line, and whether someone interrupted."""
    last = ""
    try:
        for line in job.stderr:
            sys.stderr.write(line)
            last = line.strip() or last
        return job.wait(), last, False
    except KeyboardInterrupt as stop:
        # Ctrl-C reached the job too; a SIGTERM reached this process alone, so it is handed on.
        if getattr(stop, "signum", None) == signal.SIGTERM:
            job.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(GRACE_SECONDS)
        job.kill()
        return job.wait(), last, True


def _row(path: Path, name: str, overrides: Sequence[str], code: int, last: str, seconds: float) -> dict[str, Any]:
    """Judge a job by its exit code and by what it wrote itself; only both together make `ok`."""
    summary = read_json(path / "summary.json")
    status, error = summary.get("status"), summary.get("error")
    if code < 0:
        status, error = "killed", f"ended by {signal.Signals(-code).name}"
    elif code == 0 and status != "ok":
        status, error = "failed", "exited with code 0 before the run had ended"
    elif code > 0 and status in (None, "running", "ok"):
        status, error = "failed", last.removeprefix("error: ") or f"exit code {code}"
    if summary and summary.get("status") == "running":
        write_atomically(
            path / "summary.json", json.dumps(summary | {"status": status, "error": error}, indent=2) + "\n"
        )
    measured = {key: summary.get(key) for key in ("peak_bytes", "tokens_per_second", "final_loss")}
    return scrub(
        {
            "name": name,
            "overrides": list(overrides),
            "status": status,
            "exit_code": code,
            "error": error,
            "seconds": round(seconds, 2),
            **measured,
        }
    )


def _set_aside(path: Path) -> None:
    """Rename what an earlier start left of a job, so that nothing is lost and the job can start afresh."""
    if path.exists():
        number = len(list(path.parent.glob(f".{path.name}.try*")))
        path.rename(path.with_name(f".{path.name}.try{number}"))


def _write(record: Path, rows: Sequence[dict[str, Any]]) -> None:
    write_atomically(record, json.dumps({"schema_version": SCHEMA_VERSION, "jobs": list(rows)}, indent=2) + "\n")


def _raise_for(rows: Sequence[dict[str, Any]], num_jobs: int, record: Path, cfg: Config) -> None:
    if rows[-1]["status"] == "interrupted":
        raise RunStopped(
            "interrupted",
            f"interrupted after {len(rows) - 1} of {num_jobs} jobs. "
            f"The rest: the same command with sweep.name={cfg.sweep.name} sweep.resume=true.",
        )
    bad = [f"{row['name']} ({row['status']})" for row in rows if row["status"] != "ok"]
    if bad:
        raise RunStopped(
            "failed",
            f"{len(bad)} of {num_jobs} jobs did not end ok: {', '.join(bad)}. Rows: {record}. "
            f"Again, these alone: the same command with sweep.name={cfg.sweep.name} sweep.resume=true.",
        )
