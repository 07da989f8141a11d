"""What ranks do in the tests of train states: a tiny run over any number of ranks, saved, killed and resumed."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import torch
from dist_cells import KINDS, SHAPE

import ckpt
from ckpt.parallel import make_layout, shard, split_tensors
from recipes.config import Optim
from recipes.distributed import ONE, Ranks
from recipes.loop import optimizer_step
from recipes.model import gathered_state
from recipes.optim import build_optimizer, build_scheduler
from recipes.precision import Precision
from recipes.train_state import TrainState, _Save

ROWS = 4


class Rows:
    """Four rows a step, whatever the number of ranks; each rank takes its own."""

    def __init__(self, ranks: Ranks):
        self.ranks, self.position = ranks, 0

    def __next__(self) -> dict:
        ids = torch.randint(0, 64, (ROWS, 12), generator=torch.Generator().manual_seed(100 + self.position))
        self.position += 1
        labels = ids.clone()
        labels[0, :4] = -100  # ranks do not hold equally many labels
        own = ROWS // self.ranks.num_data
        ids, labels = (x[self.ranks.data_index * own :][:own] for x in (ids, labels))
        return {"input_ids": ids, "labels": labels, "num_labels": int((labels[:, 1:] != -100).sum())}

    def state_dict(self) -> dict:
        return {"position": self.position}

    def load_state_dict(self, state: dict) -> None:
        self.position = state["position"]


def start(degrees: dict[str, int] | None, kind: str = "llama", seed: int = 0) -> tuple[TrainState, Ranks]:
    """Make the tiny run, on one rank (None) or over the ranks of the process group."""
    ranks = ONE
    if degrees is not None:
        layout = make_layout(degrees)
        ranks = Ranks(torch.distributed.get_rank(), layout.degrees.num_ranks, layout)
    torch.manual_seed(seed)
    config, cls = KINDS[kind]
    model = cls(config(**SHAPE, tie_word_embeddings=kind == "llama")).train()
    if degrees is not None:
        split_tensors(model, layout)
    ckpt.apply(model, "selective", loss="chunked")
    if degrees is not None and layout.degrees.shards_parameters:
        shard(model, layout)
    precision = Precision(model, {})
    optim = Optim(lr=1e-2, warmup=2, clip=0.5)
    optimizer = build_optimizer(precision.named_parameters(), optim)
    return TrainState(model, precision, optimizer, build_scheduler(optimizer, optim, 10), Rows(ranks)), ranks


def run(state: TrainState, ranks: Ranks, steps: int) -> list[float]:
    """Train, clipping by the global norm; return the losses."""
    losses = []
    for step in range(steps):
        losses.append(optimizer_step(state, [next(state.data)], 0.5, True, step, ranks)[0])
    return losses


def end(state: TrainState, ranks: Ranks) -> None:
    """Let go of all that must not outlive the process group."""
    if ranks.layout is not None:
        ranks.layout.close()
    state.__dict__.clear()
    gc.collect()


def save_and_go_on(rank: int, degrees: dict[str, int], folder: str, kind: str = "llama") -> list[float]:
    """Six steps, saved after the third by a thread that writes while the fourth runs. Return the losses."""
    expected = run(*start(None, kind), 6)
    state, ranks = start(degrees, kind)
    losses = run(state, ranks, 3)
    state.save(folder, 3, wait=False)
    losses += run(state, ranks, 3)
    state.finish()
    for found, wanted in zip(losses, expected, strict=True):
        assert abs(found - wanted) <= 1e-6, (losses, expected)
    whole = gathered_state(state.model, ranks)
    if rank == 0:
        one, _ = start(None, kind)
        one.model.load_state_dict(whole)  # names and shapes are those of the plain model
    assert bool(whole) == (rank == 0)
    end(state, ranks)
    return losses


def resume(rank: int, degrees: dict[str, int] | None, folder: str, kind: str = "llama") -> list[float]:
    """Resume what was saved after step 3 and return the losses of three more steps."""
    state, ranks = start(degrees, kind, seed=99)
    assert state.load_newest(folder, say=print) == 3
    losses = run(state, ranks, 3)
    end(state, ranks)
    return losses


def die_while_saving(rank: int, folder: str) -> None:
    """Save after step 3; then rank 1 dies in the middle of the save after step 5."""
    state, ranks = start({"shard": 2})
    run(state, ranks, 3)
    state.save(folder, 3)
    run(state, ranks, 2)
    if rank == 1:
        write = _Save._write_tensors

        def write_and_die(self):
            write(self)
            os._exit(9)

        _Save._write_tensors = write_and_die
    state.save(folder, 5)


def fill_one_disk(rank: int, folder: str) -> str:
    """Save; then the disk of rank 1 alone refuses: every rank must learn of it, and the first state stays."""
    state, ranks = start({"shard": 2})
    run(state, ranks, 1)
    state.save(folder, 1)
    if rank == 1:

        def refuse(self):
            raise OSError(28, "No space left on device")

        _Save._write_own = refuse
    try:
        state.save(folder, 2)
    except OSError as error:
        assert error.errno == 28, error
        assert sorted(path.name for path in Path(folder).iterdir()) == ["step_00000001"]
        return str(error)
    finally:
        end(state, ranks)
    raise AssertionError("a full disk on rank 1 went unnoticed")
