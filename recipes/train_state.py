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

import errno
import json
import os
import shutil
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from recipes.dcp_reader import SafeReader, UnusableError
from recipes.optim import move_schedule
from recipes.precision import Precision
from recipes.rng import rng_state, set_rng_state

SCHEMA_VERSION = 1
FULL_BYTES = 2**20  # a disk with less is full: the least that a train state needs


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

    def save(self, folder: Path | str, step: int, keep: int = 2) -> Path:
        """Write the state after `step` steps; drop all but the newest `keep`. Return the folder written.

        Raises OSError in one line when the disk refuses; what was saved before stays as it was.
        """
        folder = Path(folder)
        final, temporary = folder / f"step_{step:08d}", folder / f"step_{step:08d}.partial"
        try:
            if _rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
                temporary.mkdir(parents=True)
            _barrier()
            writer = dcp.FileSystemWriter(temporary, sync_files=True)
            with warnings.catch_warnings():
                # DCP says that there is no process group; a single process is what is meant here.
                warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
                dcp.save(self._tensors(), storage_writer=writer)
            _write_json(temporary / f"rank_{_rank()}.json", {"rng": rng_state(), "data": self.data.state_dict()})
            _barrier()
            if _rank() == 0:
                self._finish(temporary, final, step)
        except (OSError, CheckpointException) as error:
            is_full = shutil.disk_usage(folder).free < FULL_BYTES if folder.exists() else False
            shutil.rmtree(temporary, ignore_errors=True)
            raise _refused(folder, step, error, is_full) from error
        _barrier()
        if _rank() == 0:
            for _, old in _saved(folder)[keep:]:
                shutil.rmtree(old, ignore_errors=True)
        return final

    def load_newest(self, folder: Path | str, say=print) -> int | None:
        """Load the newest whole state under `folder` into the live objects and return its step; None without any.

        An incomplete or unreadable state is passed over for the one before it, with a line through `say`. Raises
        ValueError when there are states and none can be read, or when they belong to another model.
        """
        saved = _saved(Path(folder))
        for _, candidate in saved:
            try:
                step = self._load(candidate)
            except (UnusableError, OSError, RuntimeError, CheckpointException) as error:
                say(f"Train state {candidate} is not usable ({_reason(error)}); trying the one before it.")
                continue
            return step
        if saved:
            raise ValueError(
                f"None of the {len(saved)} train states in {folder} can be read. "
                "Start a new run, or copy back a whole one."
            )
        return None

    def _finish(self, temporary: Path, final: Path, step: int) -> None:
        sizes = {path.name: path.stat().st_size for path in sorted(temporary.iterdir())}
        _write_json(
            temporary / "state.json",
            {
                "schema_version": SCHEMA_VERSION,
                "step": step,
                "num_ranks": _num_ranks(),
                "progress": self.progress,
                "file_sizes": sizes,
            },
        )
        _sync_folder(temporary)
        if final.exists():  # saved twice at one step, as after an interruption of a resumed run
            shutil.rmtree(final)
        temporary.rename(final)
        _sync_folder(final.parent)

    def _load(self, folder: Path) -> int:
        state = _read_whole(folder)
        own = (folder / f"rank_{_rank()}.json").exists()
        rank_state = _read_json(folder / f"rank_{_rank() if own else 0}.json")
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


def _saved(folder: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of the finished saves, newest first."""
    found = []
    for path in folder.glob("step_*") if folder.is_dir() else ():
        digits = path.name.removeprefix("step_")
        if digits.isdigit() and path.is_dir():
            found.append((int(digits), path))
    return sorted(found, reverse=True)


def _read_whole(folder: Path) -> dict[str, Any]:
    state = _read_json(folder / "state.json")
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


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UnusableError(f"{path.name}: {error}") from error


def _write_json(path: Path, values: dict[str, Any]) -> None:
    with open(path, "w") as file:
        json.dump(values, file)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _refused(folder: Path, step: int, error: BaseException, is_full: bool) -> OSError:
    # torch's writer says "unexpected pos" and no errno where a disk is full (2.13, inline_container.cc).
    reason = "no space left on the disk" if is_full else _reason(error)
    refused = OSError(
        f"Cannot write the train state of step {step} to {folder} ({reason}). Free space or "
        "choose another runs_dir; states saved earlier are untouched."
    )
    refused.errno = errno.ENOSPC if is_full else getattr(_cause(error), "errno", None)
    return refused


def _cause(error: BaseException) -> BaseException:
    if isinstance(error, CheckpointException) and error.failures:
        return next(iter(error.failures.values()))[0]  # (exception, stack) of the first rank that failed
    return error


def _reason(error: BaseException) -> str:
    error = _cause(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
