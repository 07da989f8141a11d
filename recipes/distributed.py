"""The ranks of a run: started, agreed, summed over, and taken down so that nothing hangs and nothing aborts.

Ranks are started by something else, which sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT for each:
torchrun, or `srun` by way of `scripts/launch/slurm.sbatch`. Without them there is one rank and no process group.

    with start_ranks(cfg) as ranks:
        rows = build_data(..., rank=ranks.data_index, world_size=ranks.num_data)
        total = ranks.sum_over_rows(num_labels)

A rank that fails says so in the job's store before it ends. The others, whose next collective breaks, find it there
and point to it instead of showing a broken connection each.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import datetime
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from recipes.config import Config, check_ranks
from recipes.errors import RunStopped, is_mistake, one_line

if TYPE_CHECKING:
    from ckpt.parallel import Layout

T = TypeVar("T")
FAILED = "ckpt/first_failure"
PATIENCE_SECONDS = 10.0
"""How long a rank with a broken connection waits for another rank's own account of what happened."""
RECORDED = "ckpt/recorded"
RECORDING_SECONDS = 60.0
"""How long the other ranks wait for rank 0, which may have a tracker to talk to."""
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class OtherRankFailed(RuntimeError):
    """A collective broke because another rank had failed, which tells why itself. is_mistake: the user's to mend."""

    def __init__(self, message: str, is_mistake: bool = False):
        super().__init__(message)
        self.is_mistake = is_mistake


class Ranks:
    """One rank's view of all ranks. Without a layout there is one, and every call is trivial."""

    def __init__(self, rank: int = 0, num_ranks: int = 1, layout: Layout | None = None):
        self.rank, self.num_ranks, self.layout = rank, num_ranks, layout
        self._explained: BaseException | None = None

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    @property
    def data_index(self) -> int:
        """Which rows this rank trains on; ranks that share rows have the same."""
        return 0 if self.layout is None else self.layout.place.data

    @property
    def num_data(self) -> int:
        return 1 if self.layout is None else self.layout.degrees.num_data

    @property
    def num_tokens(self) -> int:
        """Ranks with tokens of their own."""
        return 1 if self.layout is None else self.layout.degrees.num_tokens

    @property
    def token_index(self) -> int:
        """This rank's number among them: ranks that must draw the same dropout masks have the same."""
        return 0 if self.layout is None else self.layout.place.tokens

    @property
    def num_sequence(self) -> int:
        return 1 if self.layout is None else self.layout.degrees.sequence

    def sum_over_rows(self, *values: float) -> list[float]:
        """Sum values that each rank counted over its whole rows."""
        if self.layout is None:
            return list(values)
        share = self.layout.degrees.sequence
        return [value / share for value in self.sum_over_tokens(*values)]

    def sum_over_tokens(self, *values: float) -> list[float]:
        """Sum values that each rank counted over its own tokens. fp64; the same on all ranks."""
        if self.layout is None:
            return list(values)
        import torch

        return self.layout.sum(torch.tensor(values, dtype=torch.float64, device=self._device)).tolist()

    def any(self, flag: object) -> bool:
        """Tell whether any rank has `flag` set."""
        return bool(flag) if self.layout is None else self.sum_over_tokens(float(bool(flag)))[0] > 0

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank."""
        if self.layout is None:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.num_ranks
        dist.all_gather_object(values, value)
        return values

    def from_main(self, make: Callable[[], T]) -> T:
        """Call `make` on rank 0 alone and return its result on every rank. Its error is raised on every rank."""
        if self.layout is None:
            return make() if self.is_main else None
        import torch.distributed as dist

        shared: list[Any] = [None, None]
        if self.is_main:
            try:
                shared = [make(), None]
            except Exception as error:
                shared = [None, error]
                dist.broadcast_object_list([None, (one_line(error), is_mistake(error))], src=0)
                raise
        dist.broadcast_object_list(shared, src=0)
        if shared[1] is not None:
            raise OtherRankFailed(f"rank 0: {shared[1][0]}", is_mistake=shared[1][1])
        return shared[0]

    @property
    def _device(self) -> str:
        return "cpu" if self.layout is None else self.layout.device_type

    # ---- failures ----------------------------------------------------------------------------------------------

    def explain(self, error: BaseException) -> BaseException:
        """Return what to record of an error: itself, or that another rank failed first, which broke ours.

        The first rank to fail prints its traceback, so that it stands above whatever the others say.
        """
        if self.layout is None:
            return error
        _ignore_terminations()
        if error is self._explained or isinstance(error, (RunStopped, OtherRankFailed)):
            return error
        first = self._first_failure(error)
        self._explained = error if first is None else OtherRankFailed(first)
        return self._explained

    def _first_failure(self, error: BaseException) -> str | None:
        """Claim to be the first failure (None), or return what the first one was."""
        import torch.distributed as dist

        own = f"rank {self.rank}: {one_line(error)}"
        broken = _is_broken_connection(error)
        try:
            store = dist.distributed_c10d._get_default_store()
            deadline = time.monotonic() + (PATIENCE_SECONDS if broken else 0)
            while time.monotonic() < deadline and not store.check([FAILED]):
                time.sleep(0.05)
            if broken and not store.check([FAILED]):  # killed, or stalled: then no rank is to blame for what it says
                return f"another rank was ended or stalled, and could not say why ({one_line(error)})"
            first = store.compare_set(FAILED, "", own).decode()
        except Exception:  # the store went down with its rank: then nobody can tell
            return None if isinstance(error, KeyboardInterrupt) else "another rank ended; see above"
        if first != own:
            return None if is_mistake(error) else first  # all ranks make the same mistake: it is not another's
        if not is_mistake(error) and not isinstance(error, KeyboardInterrupt):
            print(f"[rank {self.rank}] failed:", file=sys.stderr)
            traceback.print_exception(error)
            sys.stderr.flush()
        return None

    def leave_after_main(self) -> None:
        """Wait, on other ranks, until rank 0 has recorded how the run stopped: the launcher ends all when one ends."""
        import torch.distributed as dist

        with contextlib.suppress(Exception):  # the store goes down with rank 0
            store = dist.distributed_c10d._get_default_store()
            if self.is_main:
                store.set(RECORDED, "")
            else:
                store.wait([RECORDED], datetime.timedelta(seconds=RECORDING_SECONDS))


ONE = Ranks()


@contextlib.contextmanager
def start_ranks(cfg: Config) -> Iterator[Ranks]:
    """Join the ranks that the launcher started and lay them out by `cfg.parallel`; leave cleanly.

    After an error nothing is waited for: the process group is left as it is and the process should end.
    """
    num_ranks = int(os.environ.get("WORLD_SIZE", 1))
    check_ranks(cfg, num_ranks)
    if num_ranks == 1:
        yield ONE
        return
    end_with_launcher()
    import torch
    import torch.distributed as dist

    from ckpt.parallel import make_layout
    from recipes.device import choose_device

    device = choose_device(cfg.device)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=datetime.timedelta(seconds=cfg.parallel.timeout_seconds),
    )
    layout = make_layout(
        {name: getattr(cfg.parallel, name) for name in ("replicate", "shard", "sequence", "tensor")}, device
    )
    ranks = Ranks(dist.get_rank(), num_ranks, layout)
    try:
        yield ranks
    except BaseException as error:
        explained = ranks.explain(error)
        if isinstance(explained, RunStopped):
            ranks.leave_after_main()
        if explained is not error:
            raise explained from error
        raise
    # Models and meshes that outlive the process group made one two-rank run in five abort at exit (torch 2.13, gloo).
    layout.close()
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def agreed(cfg: Config, ranks: Ranks, default_name: Callable[[Config], str]) -> Config:
    """Return the config with the run's name filled in, the same on all ranks."""
    if cfg.name is not None or ranks.layout is None:
        return cfg
    return dataclasses.replace(cfg, name=ranks.from_main(lambda: default_name(cfg)))


def end_with_launcher() -> None:
    """Have the kernel send this rank SIGTERM when torchrun is gone: killed outright, it would leave its ranks behind,
    each in a session of its own, training on (Linux, torch 2.11 to 2.13)."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _ignore_terminations() -> None:
    """Let a rank that is about to end say why: the launcher sends SIGTERM to all ranks as soon as one has ended."""
    with contextlib.suppress(ValueError):  # outside the main thread there are no handlers
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _is_broken_connection(error: BaseException) -> bool:
    """Tell whether an error may be another rank's end, seen from here."""
    names = {cls.__name__ for cls in type(error).__mro__}
    if names & {"DistError", "DistBackendError", "DistNetworkError", "DistStoreError"}:
        return True
    text = str(error).lower()
    words = ("gloo", "connection closed", "connection reset", "broken pipe", "nccl", "timed out", "process group")
    return isinstance(error, (RuntimeError, OSError)) and any(word in text for word in words)
