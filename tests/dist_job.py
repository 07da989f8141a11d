"""What ranks do in the tests of jobs: start by the environment as under torchrun, train or fail, and leave."""

from __future__ import annotations

import os
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import ckpt
from ckpt.parallel import shard
from recipes.cli import exit_code
from recipes.config import Config
from recipes.device import choose_device
from recipes.distributed import OtherRankFailed, start_ranks
from recipes.rundir import open_run


def environment(port: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def config(folder: str) -> Config:
    return Config(name="run", runs_dir=folder, device="cpu", tracker="none")


def train_once(rank: int, port: int, folder: str) -> float:
    """One step under sharding; everything is still referenced by nobody when the ranks part."""
    environment(port)
    with start_ranks(config(folder)) as ranks:
        return _step(ranks)


def _step(ranks) -> float:
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**shape, num_attention_heads=4)).train()
    ckpt.apply(model, "full", loss="chunked")
    shard(model, ranks.layout)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.arange(24).view(2, 12)
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    optimizer.step()
    return loss.item()


def fail_on_rank_1(rank: int, port: int, folder: str) -> tuple[str, float]:
    """Rank 1 raises while rank 0 waits in a collective. Rank 0 returns what it was told, and after how long."""
    environment(port)
    start = time.monotonic()
    try:
        with start_ranks(config(folder)) as ranks, open_run(config(folder), ranks):
            if rank == 1:
                raise RuntimeError("boom on purpose")
            ranks.sum_over_rows(1.0)
    except OtherRankFailed as error:
        assert rank == 0
        return str(error), time.monotonic() - start
    except RuntimeError as error:
        assert rank == 1 and str(error) == "boom on purpose", error
        return "", 0.0
    raise AssertionError("nobody failed")


def mistake_of_rank_0(rank: int, port: int, folder: str) -> list[int]:
    """Rank 0 alone finds a mistake. Return the exit codes of all ranks."""
    environment(port)
    with start_ranks(config(folder)) as ranks:
        try:
            ranks.from_main(_refuse)
        except (ValueError, OtherRankFailed) as error:
            return ranks.gather(exit_code(error))
    raise AssertionError("nobody failed")


def _refuse() -> None:
    choose_device("abacus")
