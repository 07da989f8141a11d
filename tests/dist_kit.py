"""Run a function on several ranks, with a deadline that nothing outlives.

Ranks are forked from a fork server that has torch and transformers imported, so that a spawn costs a fraction of a
second. They meet through a file, talk over gloo, and have one thread each. Whatever happens, when `run_ranks` returns
no process of its own is left.

    run_ranks(check_something, 2, argument, timeout=60)      # check_something(rank, argument) on each of two ranks
"""

from __future__ import annotations

import datetime
import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

PRELOAD = ["torch", "transformers", "torch.distributed.fsdp", "torch.distributed.tensor", "ckpt", "dist_kit"]
COLLECTIVE_TIMEOUT = 120  # seconds that a rank waits for the others


class RankFailed(AssertionError):
    """A rank raised, died, or the deadline passed; the message holds the first failing rank's traceback."""


def run_ranks(function: Callable[..., None], num_ranks: int, *args: Any, timeout: float = 120, group: bool = True):
    """Call `function(rank, *args)` on each of `num_ranks` processes; return what rank 0 returned.

    group: make the default process group first (gloo), and take it down cleanly afterwards. Raises RankFailed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory() as folder:
        pipes, ranks = [], []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main, args=(function, rank, num_ranks, args, folder, theirs, group), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            ranks.append(process)
        try:
            return _collect(pipes, ranks, deadline, timeout)
        finally:
            for process in ranks:
                if process.is_alive():
                    process.kill()
                process.join()


def _collect(pipes, ranks, deadline: float, timeout: float):
    results: dict[int, Any] = {}
    left = dict(enumerate(pipes))
    while left:
        ready = wait(list(left.values()), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(left)} did not end within {timeout:g} s")
        for rank, pipe in [(rank, pipe) for rank, pipe in left.items() if pipe in ready]:
            try:
                ok, value = pipe.recv()
            except EOFError:
                ranks[rank].join(5)
                raise RankFailed(f"rank {rank} died with exit code {ranks[rank].exitcode}") from None
            if not ok:
                raise RankFailed(f"rank {rank} failed:\n{value}")
            results[rank] = value
            del left[rank]
    for rank, process in enumerate(ranks):
        process.join(max(0.1, deadline - time.monotonic()))
        if process.exitcode != 0:
            raise RankFailed(f"rank {rank} had finished, and ended with exit code {process.exitcode}")
    return results[0]


def _rank_main(function, rank: int, num_ranks: int, args: tuple, folder: str, pipe, group: bool) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        if group:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/meet",
                rank=rank,
                world_size=num_ranks,
                timeout=datetime.timedelta(seconds=COLLECTIVE_TIMEOUT),
            )
        value = function(rank, *args)
        if group:
            gc.collect()
            dist.barrier()
            dist.destroy_process_group()
        pipe.send((True, value))
        if dist.is_initialized():  # left behind after a failure that the function expected; taking it down could wait
            os._exit(0)
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        pipe.close()
        os._exit(1)
