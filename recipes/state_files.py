"""The files of a train state: found, read with suspicion, written so that they are on the disk.

Knows no tensors; `recipes/train_state.py` says what the files hold.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from recipes.dcp_reader import UnusableError

SCHEMA_VERSION = 1
FULL_BYTES = 2**20  # a disk with less is full: the least that a train state needs


def saved_steps(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of the finished saves, newest first."""
    found = []
    for path in folder.glob("step_*") if folder.is_dir() else ():
        digits = path.name.removeprefix("step_")
        if digits.isdigit() and path.is_dir():
            found.append((int(digits), path))
    return sorted(found, reverse=True)


def read_whole(folder: Path) -> dict[str, Any]:
    """Read state.json and check every file it lists. Raises UnusableError."""
    state = read_json(folder / "state.json")
    if state.get("schema_version") != SCHEMA_VERSION:
        raise UnusableError(f"schema_version {state.get('schema_version')}, this version reads {SCHEMA_VERSION}")
    if not {"step", "progress", "file_sizes"} <= state.keys():
        raise UnusableError("state.json lacks fields")
    for name, size in state["file_sizes"].items():
        path = folder / name
        if not path.exists():
            raise UnusableError(f"{name} is missing")
        if path.stat().st_size != size:
            raise UnusableError(f"{name} has {path.stat().st_size} bytes of {size}")
    return state


def read_json(path: Path) -> dict[str, Any]:
    """Read one JSON file. Raises UnusableError."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnusableError(f"{path.name}: {error}") from error


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write one JSON file, and see it onto the disk."""
    with open(path, "w") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """See a folder's entries onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_disk_full(folder: Path) -> bool:
    """Tell whether the disk under a folder is full. torch's writer may say "unexpected pos" then, with no errno (2.13,
    inline_container.cc)."""
    return folder.exists() and shutil.disk_usage(folder).free < FULL_BYTES


def refused(folder: Path, step: int, error: BaseException, is_full: bool) -> OSError:
    """Make the one-line OSError of a disk that refuses."""
    reason = "no space left on the disk" if is_full else reason_of(error)
    found = OSError(
        f"Cannot write the train state of step {step} to {folder} ({reason}). Free space or "
        "choose another runs_dir; states saved earlier are untouched."
    )
    found.errno = errno.ENOSPC if is_full else getattr(cause_of(error), "errno", None)
    return found


def cause_of(error: BaseException) -> BaseException:
    """Return what stands behind an error: of DCP's collection, the first rank's."""
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]  # (exception, stack) of the first rank that failed
    return error


def reason_of(error: BaseException) -> str:
    """Say an error's kind and first line."""
    error = cause_of(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
