"""Where the benchmark's figures lie: a JSON file a case, written after every cell; a run goes on where it ended.

    store = Store(folder, case); store.cells["same: trl"] = {...}; store.rounds.append({...}); store.save()
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

from recipes.lock import hold, release
from recipes.rundir import write_atomically
from scripts.bench_cases import Case


def circumstances() -> dict[str, Any]:
    """What the figures depend on beside the case: a file of other circumstances is refused."""
    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "num_threads": torch.get_num_threads(),
    }


class Store:
    """Cells and rounds of one case. cells: what was measured, by "LOSSES: ROW". rounds: CPU seconds by the same keys,
    all of one round together. compiled: what bench_compile.py measured."""

    def __init__(self, folder: Path, case: Case, fresh: bool = False):
        self.path = folder / f"{case.name}.json"
        head = {"case": json.loads(json.dumps(case.to_dict())), "circumstances": circumstances()}
        known = _read(self.path) if self.path.exists() and not fresh else {}
        changed = [name for name in head if known and known.get(name) != head[name]]
        if changed:
            raise ValueError(
                f"{self.path} was measured with another {' and '.join(changed)}. Give --fresh to measure it anew, or "
                "another folder with --out."
            )
        self.head = head
        self.cells: dict[str, dict[str, Any]] = known.get("cells", {})
        self.rounds: list[dict[str, float]] = known.get("rounds", [])
        self.compiled: dict[str, Any] = known.get("compiled", {})

    def save(self) -> None:
        """Write the file, whole or not at all."""
        values = {**self.head, "cells": self.cells, "rounds": self.rounds, "compiled": self.compiled}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(values, indent=1) + "\n")


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Read all cases of a folder, by name. Raises ValueError where there are none, or one is damaged."""
    found = {path.stem: _read(path) for path in sorted(folder.glob("*.json"))}
    if not found:
        raise ValueError(f"{folder} holds no figures: measure first, without --table, or give their folder with --out.")
    return found


def _read(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
        lacking = {"case", "circumstances", "cells", "rounds"} - set(values)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged: {error}. Restore it, or move it away and measure again.") from None
    if lacking:
        raise ValueError(f"{path} lacks {', '.join(sorted(lacking))}: no figures of this benchmark. Move it away.")
    return values


def write(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(path.suffix + ".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


@contextlib.contextmanager
def only_run(folder: Path) -> Iterator[None]:
    """Keep other runs from a folder: they would overwrite each other's figures. Raises ValueError for a second."""
    try:
        held = hold(folder)
    except ValueError:
        raise ValueError(f"another run is measuring into {folder}. Wait for it, or give --out.") from None
    try:
        yield
    finally:
        release(held)


def first_line(error: Exception) -> str:
    """Return an error's type and the first line of its message, which may be empty."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
