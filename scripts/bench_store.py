"""Where the benchmark's figures lie: a JSON file a case, written after every cell; a run goes on where it ended.

    store = Store(folder, case); store.cells["same: trl"] = {...}; store.rounds.append({...}); store.save()
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch
import transformers

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
        known = json.loads(self.path.read_text()) if self.path.exists() and not fresh else {}
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
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(values, indent=1) + "\n")
        os.replace(partial, self.path)


def load(folder: Path) -> dict[str, dict[str, Any]]:
    """Read all cases of a folder, by name."""
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
