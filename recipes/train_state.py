"""Train state: all that a run needs to go on as if it had never stopped, written so that a crash can never spoil it.

Owns `runs/NAME/train_state/`: one folder a saved step, `step_00000100/`, with

    state.json           schema version, step, the loop's counters, and the size of every other file
    rank_0.json          of each rank: random generators, data position
    .metadata, *.distcp  torch.distributed.checkpoint: parameters (fp32 masters where there are some), optimizer state

Tensors are keyed by parameter name, so that a state loads under another dtype and on another number of ranks. Frozen
parameters are not saved: they come from where the model came from. Neither is the schedule, a function of the step.

A folder appears under its final name by one rename, after everything in it reached the disk. Nothing read here is
executed: JSON, tensors with `weights_only`, and DCP's metadata by an unpickler that knows DCP's own classes and no
others.

    state = TrainState(model, precision, optimizer, scheduler, data.train)
    state.save(folder, step=100)
    step = state.load_newest(folder)      # 100; None where the folder holds no train state
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from recipes.background import Background, copied
from recipes.dcp_reader import SafeReader, UnusableError
from recipes.optim import move_schedule
from recipes.precision import Precision
from recipes.rng import rng_state, set_rng_state
from recipes.state_files import (
    SCHEMA_VERSION,
    cause_of,
    is_disk_full,
    read_json,
    read_whole,
    reason_of,
    refused,
    saved_steps,
    sync_folder,
)
from recipes.state_files import write_json as _write_json


@dataclass
class TrainState:
    """References to the live objects of a run; saves them and puts saved values back into them.

    `data` has `state_dict()` (JSON-able) and `load_state_dict()`. `progress` is JSON-able, the loop's own counters.
    """

    model: nn.Module
    precision: Precision
    optimizer: torch.optim.Optimizer
    scheduler: Any
    data: Any
    progress: dict[str, Any] = field(default_factory=dict)
    _background: Background = field(default_factory=Background, repr=False)

    def save(self, folder: Path | str, step: int, keep: int = 2, wait: bool = True) -> Path:
        """Write the state after `step` steps; drop all but the newest `keep`. Return the folder that holds it then.

        wait: with False, copy the state to host memory and return; a thread writes the copy. A later `save` or
        `finish` waits for it, and raises what went wrong.

        Raises OSError in one line when the disk of any rank refuses; what was saved before stays as it was.
        """
        self.finish()
        tensors = self._tensors() if wait else copied(self._tensors())
        own = {"rng": rng_state(), "data": self.data.state_dict()}
        save = _Save(Path(folder), step, keep, tensors, own, dict(self.progress), self._background.group())
        if wait:
            save.write()
        else:
            self._background.start(save.write)
        return save.final

    def finish(self) -> None:
        """Wait for a save that is under way. Raises OSError as `save` does."""
        self._background.finish()

    def load_newest(self, folder: Path | str, say=print) -> int | None:
        """Load the newest whole state under `folder` into the live objects and return its step; None without any.

        An incomplete or unreadable state is passed over for the one before it, with a line through `say`. Raises
        ValueError when there are states and none can be read, or when they belong to another model.
        """
        saved = saved_steps(Path(folder))
        for _, candidate in saved:
            try:
                step = self._load(candidate)
            except (UnusableError, OSError, RuntimeError, CheckpointException) as error:
                say(f"Train state {candidate} is not usable ({reason_of(error)}); trying the one before it.")
                continue
            return step
        if saved:
            raise ValueError(
                f"None of the {len(saved)} train states in {folder} can be read. "
                "Start a new run, or copy back a whole one."
            )
        return None

    def _load(self, folder: Path) -> int:
        state = read_whole(folder)
        own = (folder / f"rank_{_rank()}.json").exists()
        rank_state = read_json(folder / f"rank_{_rank() if own else 0}.json")
        reader = SafeReader(folder)
        tensors = self._tensors()
        _check_same_model(folder, tensors, reader.saved_shapes())
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.load(tensors, storage_reader=reader)
        self.precision.after_step()
        move_schedule(self.optimizer, self.scheduler, state["step"])
        self.progress.update(state["progress"])
        self.data.load_state_dict(rank_state["data"])  # the position is the same on every rank
        if own:  # a rank that did not exist then keeps the generators that its seed gave it
            set_rng_state(rank_state["rng"])  # last: moving the data forward may draw numbers
        return state["step"]

    def _tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """Name every tensor of the state, each storage once. Loading copies into these very tensors."""
        trained = dict(self.precision.named_parameters())
        parameters = {id(p) for p in self.model.parameters()}
        buffers = {
            name: value
            for name, value in self.model.state_dict(keep_vars=True).items()
            if isinstance(value, torch.Tensor) and id(value) not in parameters
        }
        tensors = {"model": {name: p.detach() for name, p in trained.items()} | buffers}
        for name, parameter in trained.items():
            tensors["optimizer." + name] = _adam_state(self.optimizer, parameter)
        return tensors


@dataclass
class _Save:
    """One state on its way to disk, holding all that is written, so that a thread can write it while training goes on.

    All ranks write into one folder; rank 0 renames it once every rank has said that its part is there.
    """

    folder: Path
    step: int
    keep: int
    tensors: dict[str, dict[str, torch.Tensor]]
    own: dict[str, Any]
    progress: dict[str, Any]
    group: dist.ProcessGroup | None

    @property
    def final(self) -> Path:
        return self.folder / f"step_{self.step:08d}"

    @property
    def temporary(self) -> Path:
        return self.folder / f"step_{self.step:08d}.partial"

    def write(self) -> None:
        """Write everything, or nothing that counts. Raises OSError on every rank if one could not write."""
        try:
            for part in (self._begin, self._write_tensors, self._write_own, self._rename):
                self._together(part)
        except (OSError, CheckpointException) as error:
            is_full = is_disk_full(self.folder)
            shutil.rmtree(self.temporary, ignore_errors=True)
            raise refused(self.folder, self.step, error, is_full) from error
        if _rank() == 0:
            for _, old in saved_steps(self.folder)[self.keep :]:
                shutil.rmtree(old, ignore_errors=True)

    def _together(self, part: Callable[[], None]) -> None:
        """Run a part on all ranks; where one could not, none goes on."""
        error = None
        try:
            part()
        except (OSError, CheckpointException) as caught:
            error = caught
        if self.group is None:
            said = [None]
        else:
            said = [None] * dist.get_world_size()
            reason = None if error is None else (getattr(cause_of(error), "errno", None), reason_of(error))
            dist.all_gather_object(said, reason, group=self.group)
        if error is not None:
            raise error
        for rank, reason in enumerate(said):
            if reason is not None:
                raise OSError(reason[0], f"rank {rank}: {reason[1]}")

    def _begin(self) -> None:
        if _rank() == 0:
            shutil.rmtree(self.temporary, ignore_errors=True)
            self.temporary.mkdir(parents=True)

    def _write_tensors(self) -> None:
        writer = dcp.FileSystemWriter(self.temporary, sync_files=True)
        with warnings.catch_warnings():
            # DCP says that there is no process group; a single process is what is meant here.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp.save(self.tensors, storage_writer=writer, process_group=self.group)

    def _write_own(self) -> None:
        _write_json(self.temporary / f"rank_{_rank()}.json", self.own)

    def _rename(self) -> None:
        if _rank() != 0:
            return
        temporary, final = self.temporary, self.final
        sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        _write_json(
            temporary / "state.json",
            {
                "schema_version": SCHEMA_VERSION,
                "step": self.step,
                "num_ranks": _num_ranks(),
                "progress": self.progress,
                "file_sizes": sizes,
            },
        )
        sync_folder(temporary)
        earlier = final.with_name(final.name + ".old")
        shutil.rmtree(earlier, ignore_errors=True)
        if final.exists():  # saved twice at one step; deleted only when it has been replaced, in case of a kill
            final.rename(earlier)
        temporary.rename(final)
        sync_folder(final.parent)
        shutil.rmtree(earlier, ignore_errors=True)


def _adam_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    """Return AdamW's state of one parameter, made as AdamW itself would before its first step."""
    state = optimizer.state[parameter]
    if not state:
        fused = optimizer.defaults.get("fused")
        state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu")
        state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def _check_same_model(folder: Path, tensors: dict[str, dict[str, torch.Tensor]], found: dict[str, list[int]]) -> None:
    wanted = {f"{outer}.{name}": list(value.shape) for outer, inner in tensors.items() for name, value in inner.items()}
    if wanted == found:
        return
    name = min(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    raise ValueError(
        f"{folder} was saved from another model: {name} is {found.get(name, 'absent')} there and "
        f"{wanted.get(name, 'absent')} here. Resume with the config of that run, or give the new run "
        "another name."
    )


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
