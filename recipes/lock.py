"""A folder held by one process at a time, so that two never write the files of one run or one sweep.

The lock is the kernel's, on the folder itself (flock): it ends with the process, however that ends, leaves no file
behind, and stays with the folder when that is renamed. Where a file system has none (some network ones), none is taken.

    held = hold(path)              # ValueError while another process has it
    ...
    release(held)
"""

from __future__ import annotations

import os
from pathlib import Path


def hold(path: Path, what: str = "run") -> int | None:
    """Take a folder; return what `release` wants. Raises ValueError while somebody else has it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return None
    held = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise ValueError(
            f"{path} is the {what} of another process, which is still at work. Wait for it, or end it first."
        ) from None
    except OSError:
        os.close(held)
        return None
    return held


def release(held: int | None) -> None:
    """Let go of a folder."""
    if held is not None:
        os.close(held)
