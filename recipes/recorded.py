"""Read what runs and sweeps left behind, and say in one line what is wrong with a folder that holds neither.

run = read_run("runs/NAME")            # run.config, run.manifest, run.summary, run.metrics
rows = read_sweep("runs/SWEEP")        # the rows of sweep.json
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from recipes.manifest import SCHEMA_VERSION


@dataclass(frozen=True)
class Recorded:
    """The files of one run that has begun; parts that it never wrote are empty."""

    path: Path
    config: dict[str, Any]
    manifest: dict[str, Any]
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]


def read_run(path: str | Path) -> Recorded:
    """Read a run's folder. Raises ValueError for one that holds no run, or one of another schema_version."""
    path = Path(path)
    if not path.is_dir():
        raise ValueError(f"{path} is no folder: give a run's, such as runs/NAME.")
    if (path / "sweep.json").exists():
        raise ValueError(f"{path} holds a sweep: give one of its jobs, such as {_first_run(path)}.")
    if not (path / "config.yaml").exists():
        raise ValueError(f"{path} holds no run: it has no config.yaml. Give a folder that train.py wrote.")
    try:
        config = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path / 'config.yaml'} cannot be read: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path / 'config.yaml'} holds no config.")
    manifest, summary = read_object(path / "manifest.json"), read_object(path / "summary.json")
    for name, values in (("manifest.json", manifest), ("summary.json", summary)):
        check_schema(path / name, values)
    return Recorded(path, config, manifest, summary, _lines(path / "metrics.jsonl"))


def read_sweep(path: str | Path) -> list[dict[str, Any]]:
    """Read the rows of a sweep. Raises ValueError for a folder without one, or with one of another schema_version."""
    record = Path(path) / "sweep.json"
    if not Path(path).is_dir():
        raise ValueError(f"{path} is no folder: give a sweep's, such as runs/SWEEP.")
    values = read_object(record)
    if not values:
        raise ValueError(f"{path} holds no sweep: it has no sweep.json. Give the folder of a sweep (train.py -m).")
    check_schema(record, values)
    rows = values.get("jobs")
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "name" in row for row in rows):
        raise ValueError(f"{record} has no list of jobs.")
    return rows


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if the file is not there. Raises ValueError for one that is no JSON object."""
    if not path.exists():
        return {}
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        raise ValueError(f"{path} is no JSON: it was cut short or changed by hand. Run it again.") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is no JSON object.")
    return values


def check_schema(path: Path, values: dict[str, Any]) -> None:
    """Refuse a file that another version of this program wrote."""
    version = values.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema_version {version!r}, and this program reads {SCHEMA_VERSION}: "
            "use the commit that wrote it."
        )


def _lines(path: Path) -> list[dict[str, Any]]:
    """Read the whole lines of metrics.jsonl; a kill may have cut the last one short."""
    if not path.exists():
        return []
    found = []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        if isinstance(values, dict) and "step" in values:
            found.append(values)
        elif number < len(lines):
            raise ValueError(f"line {number} of {path} is no JSON object with a step: it was changed by hand.")
    return found


def _first_run(path: Path) -> Path:
    runs = sorted(inner.parent for inner in path.glob("[!.]*/config.yaml"))  # .NAME.try0: set aside by a sweep
    return runs[0] if runs else path / "JOB"
