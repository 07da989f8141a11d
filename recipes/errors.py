"""What an exception means for a run: its status, whether it is the user's to mend, and how it reads in one line.

raise RunStopped("nan", "loss is NaN at step 12. Lower optim.lr.")
status_of(MemoryError())      # "oom"
"""

from __future__ import annotations

import errno
import traceback
from pathlib import Path

from recipes.manifest import scrub

STATUSES = ("running", "ok", "oom", "predicted_oom", "killed", "timeout", "interrupted", "nan", "failed")
OURS = [Path(__file__).resolve().parents[1] / name for name in ("ckpt", "recipes", "scripts")]


class RunStopped(Exception):
    """Ends a run with a status of its own; the message says why and what to do."""

    def __init__(self, status: str, message: str):
        super().__init__(message)
        if status not in STATUSES:
            raise ValueError(f"status={status!r} is not one of {', '.join(STATUSES)}.")
        self.status = status


def status_of(error: BaseException) -> str:
    """Name the status that an exception means."""
    if isinstance(error, RunStopped):
        return error.status
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "oom" if is_out_of_memory(error) else "failed"


def is_mistake(error: BaseException) -> bool:
    """Tell whether an error is the user's to mend: a ValueError raised by our own code, whose message says how.

    One out of a library is a failure like any other: its message may need the traceback.
    """
    if not isinstance(error, ValueError):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return not frames or any(Path(frames[-1].f_code.co_filename).is_relative_to(folder) for folder in OURS)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether device or host memory ran out. torch's CPU allocator raises a RuntimeError (c10 alloc_cpu.cpp)."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def is_disk_full(error: BaseException) -> bool:
    """Tell whether a write failed for want of space."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def one_line(error: BaseException) -> str:
    """Say what an exception said, in one line and without secrets."""
    text = " ".join(str(error).split())
    if is_disk_full(error) and len(error.args) == 1:
        return scrub(text)  # our own words, see train_state
    if is_disk_full(error):
        where = f" for {error.filename}" if error.filename else ""
        text = f"no space left on the disk{where}: free some, or give a folder on another disk with runs_dir=..."
    elif not text or not (is_mistake(error) or isinstance(error, RunStopped)):
        text = f"{type(error).__name__}: {text}".rstrip(": ")
    return scrub(text)
