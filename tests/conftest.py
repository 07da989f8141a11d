"""Shared by all tests: one thread a worker, no network, no account, and a process left as it was found."""

import os

# Before torch is imported: two workers with OpenMP pools of two spin against each other on two cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.update(
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    WANDB_MODE="offline",
    WANDB_SILENT="true",
    TOKENIZERS_PARALLELISM="false",
)
for secret in ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "RANK", "WORLD_SIZE", "CKPT_TRACEBACK"):
    os.environ.pop(secret, None)

import random

import numpy
import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def process_as_found():
    """Start from one seed, and undo what tests change in a process: dtype, determinism, Hydra, process group."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_grad_enabled(True)
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def in_tmp(tmp_path, monkeypatch):
    """Work in an empty folder: relative paths such as runs/ land there."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
