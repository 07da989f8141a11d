"""Read a sweep's folder into points: one job each, with the numbers of its summary.json and the config that gave them.

Owns how jobs are labelled: by strategy, and by whatever else differs between them, the sequence length apart.

    sweep = read_points("runs/SWEEP")
    sweep.points[0].peak_bytes, sweep.series, sweep.notes
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from recipes.recorded import read_run, read_sweep

_HOW = re.compile(r"(name|runs_dir|debug|output|tracker|on_predicted_oom|log_every|save_every|sweep\..*|wandb\..*)$")


@dataclass(frozen=True)
class Point:
    """One job. index: its place in the sweep. series: what it is compared as. Missing numbers are None."""

    index: int
    name: str
    series: str
    strategy: str
    seq_len: int | None
    status: str
    error: str | None
    overrides: tuple[str, ...]
    config: str
    summary: Mapping[str, Any] = field(default_factory=dict)

    def number(self, name: str) -> float | None:
        """Return a number of summary.json."""
        value = self.summary.get(name)
        return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None

    @property
    def peak_bytes(self) -> float | None:
        return self.number("peak_bytes")

    @property
    def predicted_peak_bytes(self) -> float | None:
        return self.number("predicted_peak_bytes")

    @property
    def tokens_per_second(self) -> float | None:
        return self.number("tokens_per_second")

    @property
    def prediction_error(self) -> float | None:
        """Predicted over measured peak, less one."""
        predicted, measured = self.predicted_peak_bytes, self.peak_bytes
        return predicted / measured - 1 if predicted and measured else None

    @property
    def recompute_share(self) -> float | None:
        again, all_ = self.number("recompute_flops"), self.number("step_flops")
        return again / all_ if again is not None and all_ else None

    @property
    def residents(self) -> dict[str, float]:
        return self.summary.get("residents") or {}


@dataclass(frozen=True)
class Sweep:
    """All jobs of one folder. facts: what they were run with, by name. notes: what a reader must know to compare."""

    name: str
    points: tuple[Point, ...]
    facts: dict[str, str]
    notes: tuple[str, ...]

    @property
    def series(self) -> list[str]:
        """The compared things, in the order in which they were run."""
        return list(dict.fromkeys(point.series for point in self.points))

    @property
    def lengths(self) -> list[int]:
        """The sequence lengths, rising."""
        return sorted({point.seq_len for point in self.points if point.seq_len})

    def of(self, series: str) -> list[Point]:
        """The points of one series by rising sequence length."""
        mine = [point for point in self.points if point.series == series]
        return sorted(mine, key=lambda point: point.seq_len or 0)


def read_points(path: str | Path) -> Sweep:
    """Read a sweep's folder, or one that holds plain runs.

    Raises ValueError for a folder without either, and for files of another schema_version.
    """
    path = Path(path)
    rows = _rows(path)
    runs = {row["name"]: read_run(path / row["name"]) for row in rows if (path / row["name"] / "config.yaml").exists()}
    described = [_described(row, runs.get(row["name"])) for row in rows]
    varied = _varied(described)
    points = []
    for index, (row, values) in enumerate(zip(rows, described, strict=True)):
        run = runs.get(row["name"])
        summary = run.summary if run else row
        points.append(
            Point(
                index=index,
                name=row["name"],
                series=_label(values, varied),
                strategy=str(values.get("strategy.name", "?")),
                seq_len=values.get("seq_len"),
                status=row.get("status") or summary.get("status") or "unknown",
                error=row.get("error") or summary.get("error"),
                overrides=tuple(row.get("overrides") or ()),
                config=yaml.safe_dump(run.config, sort_keys=False) if run else "(the job wrote no config)\n",
                summary=summary,
            )
        )
    manifests = [run.manifest for run in runs.values() if run.manifest]
    return Sweep(path.resolve().name, tuple(points), _facts(described, manifests), tuple(_notes(manifests)))


def _rows(path: Path) -> list[dict[str, Any]]:
    """List the jobs of a sweep, or the runs of a folder that is no sweep."""
    if (path / "sweep.json").exists() or not path.is_dir():
        rows = read_sweep(path)
        if not rows:
            raise ValueError(f"{path} holds a sweep without a finished job: nothing can be drawn yet.")
        return rows
    if (path / "config.yaml").exists():
        raise ValueError(f"{path} holds one run: give the folder of a sweep, or one with several runs.")
    runs = [read_run(inner.parent) for inner in sorted(path.glob("[!.]*/config.yaml"))]
    if not runs:
        raise ValueError(f"{path} holds neither a sweep nor runs: give the folder that train.py -m wrote.")
    return [{"name": run.path.name} for run in runs]


def _described(row: Mapping[str, Any], run: Any) -> dict[str, Any]:
    """Flatten a job's config; of a job that wrote none, what the sweep knows."""
    if run is not None:
        return _flat(run.config)
    known = {name: row[name] for name in ("seq_len", "batch_size") if row.get(name) is not None}
    known |= {"strategy.name": row.get("strategy"), "model.name": row.get("model")}
    for word in row.get("overrides") or ():
        key, _, value = word.lstrip("+").partition("=")
        if key not in ("strategy", "model", "data", "recipe", "peft", "hardware"):
            known.setdefault(key, _value(value))
    return known


def _value(text: str) -> Any:
    """Read an override's value as YAML; what is none (a glob, a hidden secret) is text."""
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _flat(values: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    found = {}
    for name, value in values.items():
        path = f"{where}{name}"
        found |= _flat(value, f"{path}.") if isinstance(value, Mapping) else {path: value}
    return found


def _varied(described: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the keys that differ between jobs which have them, the sequence length and the strategy's name apart."""
    keys = dict.fromkeys(key for values in described for key in values)
    found = []
    for key in keys:
        if _HOW.match(key) or key in ("seq_len", "strategy.name"):
            continue
        if len({repr(values[key]) for values in described if key in values}) > 1:
            found.append(key)
    if "model.name" in found:  # its name stands for the rest of it
        found = [key for key in found if not key.startswith("model.") or key == "model.name"]
    return found


def _label(values: Mapping[str, Any], varied: Sequence[str]) -> str:
    words = [str(values.get("strategy.name", "?"))]
    for key in varied:
        if key in values:
            words.append(str(values[key]) if key == "model.name" else f"{key.removeprefix('strategy.')}={values[key]}")
    return " ".join(words)


def _facts(described: Sequence[Mapping[str, Any]], manifests: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Say what all jobs share, and list what they do not."""

    def shared(values: Sequence[Any]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or "unknown"

    facts = {
        "model": shared([values.get("model.name") for values in described]),
        "dtype": shared([values.get("dtype") for values in described]),
        "batch size": shared([values.get("batch_size") for values in described]),
        "loss": shared([values.get("loss") for values in described]),
        "device": shared([_device(manifest) for manifest in manifests]),
        "torch": shared([_torch(manifest) for manifest in manifests]),
        "transformers": shared([manifest.get("packages", {}).get("transformers") for manifest in manifests]),
        "commit": shared([_commit(manifest) for manifest in manifests]),
    }
    return {name: value for name, value in facts.items() if value != "unknown"}


def _notes(manifests: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warn of jobs that were not made alike."""
    found = []
    for what, read in (("commits", _commit), ("devices", _device), ("torch versions", _torch)):
        different = dict.fromkeys(str(read(manifest)) for manifest in manifests)
        if len(different) > 1:
            found.append(f"Mixed: these jobs ran with different {what} ({', '.join(different)}). Compare with care.")
    return found


def _device(manifest: Mapping[str, Any]) -> str | None:
    if manifest.get("device") != "cpu":
        return manifest.get("device")
    cpu = manifest.get("cpu", {})
    return f"{cpu.get('model', 'CPU')}, {cpu.get('threads')} thread{'s' * (cpu.get('threads') != 1)}"


def _torch(manifest: Mapping[str, Any]) -> str | None:
    return manifest.get("packages", {}).get("torch")


def _commit(manifest: Mapping[str, Any]) -> str | None:
    git = manifest.get("git") or {}
    return f"{git['commit'][:10]}{' with changes' if git.get('dirty') else ''}" if git.get("commit") else None
