"""The device that a run trains on, and how strictly it repeats itself.

device = choose_device("auto")               # cuda where there is one
be_deterministic(cfg.deterministic)
"""

from __future__ import annotations

import os

import torch


def choose_device(name: str) -> torch.device:
    """Return the device by its config name; of several GPUs that of this process's local rank.

    Raises ValueError for cuda where torch sees no GPU.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(
            f"device={name}, but torch {torch.__version__} sees no GPU. Use device=cpu, or install torch for CUDA."
        )
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def be_deterministic(wanted: bool) -> None:
    """Allow deterministic kernels only (or any again): an op without one raises. CPU runs repeat themselves anyway."""
    if wanted:
        # Read by cuBLAS at its first use: https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(wanted)
