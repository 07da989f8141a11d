"""A real limit on the memory of one run (`sweep.job_memory_gib`), so that running out is an error of that run alone.

Owns how the limit is set and what it counts. On a CPU it is RLIMIT_DATA, the memory that a process may write to; what
Python and its libraries hold already comes on top. An allocation beyond it fails inside the run, which records `oom`.
RLIMIT_AS would count libraries, reserved arenas and files mapped for reading too: 640 MiB of addresses against 217 of
memory after `import torch` (torch 2.13, Linux 6.18). On CUDA it is the share of the device that torch may allocate.

    with memory_limit(cfg):
        program(cfg, run)
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from recipes.allocator import refusal
from recipes.config import Config

GIB = 2**30
# malloc.h. Blocks from 64 KiB on are given back as soon as they are freed, so that the process holds what is alive:
# with memory kept for the next step (recipes/allocator.py) a full replay of 156 MiB held 637, with this 176.
_GIVE_BACK = {"M_MMAP_THRESHOLD": (-3, 2**16), "M_TRIM_THRESHOLD": (-1, 2**16), "M_TOP_PAD": (-2, 2**16)}


def memory_limit(cfg: Config) -> contextlib.AbstractContextManager[None]:
    """Limit what is allocated inside the block to `sweep.job_memory_gib`; without it do nothing.

    Raises ValueError where no limit can be set. Steps on a CPU are slower under a limit: freed memory is given back.
    """
    gib = cfg.sweep.job_memory_gib
    if gib is None:
        return contextlib.nullcontext()
    import torch

    on_cuda = cfg.device != "cpu" and torch.cuda.is_available()
    return _limit_cuda(gib) if on_cuda else _limit_data(gib)


@contextlib.contextmanager
def _limit_data(gib: float) -> Iterator[None]:
    if platform.system() != "Linux":
        raise ValueError(f"sweep.job_memory_gib={gib:g} on a CPU needs Linux, and this is {platform.system()}.")
    import resource

    if not refusal():
        libc = ctypes.CDLL(None)
        for number, value in _GIVE_BACK.values():
            libc.mallopt(number, value)
        libc.malloc_trim(0)  # what is held empty for later (256 MiB, with the setting for speed) would come on top
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = _data_bytes() + int(gib * GIB)
    if hard != resource.RLIM_INFINITY and limit > hard:
        raise ValueError(f"sweep.job_memory_gib={gib:g} is above this shell's own limit (ulimit -H -d). Lower it.")
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        # Before the status is written: an error holds its tensors, and writing a file needs some memory too.
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextlib.contextmanager
def _limit_cuda(gib: float) -> Iterator[None]:
    import torch

    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * GIB / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def _data_bytes() -> int:
    """Bytes that RLIMIT_DATA counts against this process now."""
    found = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) * 1024
