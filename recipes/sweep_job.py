"""One job of a sweep: a process started, watched and judged, whatever becomes of it.

Owns the time limit, the signals, and the step from an exit code and the files left behind to a status.

    ended = run_process(["python", "train.py", "steps=3"], timeout_seconds=600)
    status, error = judge(ended, summary)
"""

from __future__ import annotations

import collections
import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GRACE_SECONDS = 60
"""What a job gets after SIGTERM to finish its step and save its train state."""

_DRAIN_SECONDS = 5  # a grandchild may hold the pipe open after the job is gone
_OUT_OF_MEMORY = re.compile(r"MemoryError|OutOfMemoryError|out of memory|std::bad_alloc|[Cc]an(no|')t allocate memory")


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    code: as Popen gives it, negative for a signal. tail: its last lines on stderr. stopped: "timeout" or "interrupted"
    if it was stopped from here, else "". oom_kills: processes that the kernel's out-of-memory killer ended meanwhile.
    """

    code: int
    tail: tuple[str, ...]
    seconds: float
    stopped: str = ""
    oom_kills: int = 0

    @property
    def last_line(self) -> str:
        """The last line on stderr that says something."""
        return next((line for line in reversed(self.tail) if line), "")


def run_process(words: Sequence[str], timeout_seconds: float | None = None) -> Ended:
    """Run a command to its end, passing its stderr on; stop it after `timeout_seconds`, or when we are told to stop."""
    start, kills_before = time.monotonic(), _oom_kills()
    # No `with Popen`: it would close the pipe, and wait for whoever still reads it.
    job = subprocess.Popen(words, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, errors="replace")
    stopped = ""
    with _passing_on(job) as tail:
        try:
            job.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            stopped = "timeout"
            job.terminate()
        except KeyboardInterrupt as stop:
            stopped = "interrupted"
            # Ctrl-C reached the job too; a SIGTERM reached this process alone, so it is handed on.
            if getattr(stop, "signum", None) == signal.SIGTERM:
                job.terminate()
        if stopped:
            with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                job.wait(GRACE_SECONDS)
            job.kill()
            job.wait()
    return Ended(job.returncode, tuple(tail), time.monotonic() - start, stopped, _oom_kills() - kills_before)


def quoted(value: object) -> str:
    """Write a value as one quoted string of Hydra's grammar, for the command line of a job."""
    return "'" + str(value).replace("'", "\\'") + "'"


def judge(ended: Ended, summary: Mapping[str, Any], timeout_minutes: float | None = None) -> tuple[str, str | None]:
    """Name a job's status and error by its exit code and by what it wrote itself; only both together make `ok`."""
    status, error = summary.get("status"), summary.get("error")
    if ended.code == 0 and status == "ok":
        return "ok", None
    if ended.stopped == "timeout":
        return "timeout", f"stopped after {timeout_minutes:g} minutes (sweep.job_timeout_minutes)"
    if ended.stopped:
        return ended.stopped, error
    ran_out = any(_OUT_OF_MEMORY.search(line) for line in ended.tail)
    if ended.code < 0:
        name = signal.Signals(-ended.code).name
        if ended.code == -signal.SIGKILL and ended.oom_kills:
            return "oom", "ended by the kernel's out-of-memory killer"
        if ended.code == -signal.SIGABRT and ran_out:
            return "oom", ended.last_line
        return "killed", f"ended by {name}"
    if ended.code == 0:
        return "failed", "exited with code 0 before the run had ended"
    if status in (None, "running", "ok"):
        return "oom" if ran_out else "failed", ended.last_line.removeprefix("error: ") or f"exit code {ended.code}"
    return status, error


@contextlib.contextmanager
def _passing_on(job: subprocess.Popen) -> Iterator[collections.deque[str]]:
    """Copy a job's stderr to ours while it runs; yields its last lines."""
    tail: collections.deque[str] = collections.deque(maxlen=40)

    def copy() -> None:
        for line in job.stderr:
            sys.stderr.write(line)
            tail.append(line.strip())

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    try:
        yield tail
    finally:
        thread.join(_DRAIN_SECONDS)
        if not thread.is_alive():  # closing what a thread reads would wait for it
            job.stderr.close()


def _oom_kills() -> int:
    """Count what the kernel has ended for want of memory in this control group; 0 where that cannot be read."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError):
            found = re.search(r"^oom_kill (\d+)$", Path(path).read_text(), re.MULTILINE)
            return int(found[1]) if found else 0
    return 0
