"""Devices: how much memory, how fast, and what their kernels allocate that a CPU's do not.

Owns the table, the calibration of the machine at hand, the roofline and the list of device-only allocations, each with
its source. Knows op costs (`ckpt/costs.py`) and no model.

    device = find("h100")                        # ValueError for a name that is not in the table
    device.seconds(rows)                         # an estimate
    measure_device("cpu", torch.float32)         # the same, calibrated by a few kernels; takes about a second
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from ckpt.costs import OpCost
from ckpt.links import LINKS, Links, StepTime, step_time

GIB = 1024**3

# c10/cuda/CUDACachingAllocator.h, kMinBlockSize: every allocation is rounded up to it.
_BLOCK_BYTES = 512
# The context and loaded kernels of a process that uses torch: what nvidia-smi shows beyond what torch reserves.
_CONTEXT_BYTES = GIB // 2
# Time that a kernel takes at least, launched from eager code.
_LAUNCH_SECONDS = 5e-6


@dataclass(frozen=True)
class Device:
    """One device.

    memory_bytes: what torch reports as total. flops: dense peak FLOP/s by dtype. bandwidth, link_bandwidth: bytes/s of
    its memory, and between it and the host. links: to other devices. matmul_share, attention_share, bandwidth_share:
    parts of the peaks that real kernels reach. op_seconds: least time of one op. cublas_bytes: workspace of one cuBLAS
    handle; None: no CUDA device.
    """

    name: str
    memory_bytes: int
    flops: Mapping[torch.dtype, float]
    bandwidth: float
    link_bandwidth: float
    links: Links = Links(node=LINKS["pcie4"])
    matmul_share: float = 0.75
    attention_share: float = 0.6
    bandwidth_share: float = 0.85
    op_seconds: float = _LAUNCH_SECONDS
    cublas_bytes: int | None = None
    is_measured: bool = False

    @property
    def is_cuda(self) -> bool:
        return self.cublas_bytes is not None

    @property
    def reserved_bytes(self) -> int:
        """Bytes that a process takes before a step may have any."""
        return _CONTEXT_BYTES if self.is_cuda else 0

    @property
    def usable_bytes(self) -> int:
        """Bytes that a training step may take."""
        return self.memory_bytes - self.reserved_bytes

    def seconds(self, rows: Iterable[OpCost]) -> float:
        """Estimate the time of a step: ops one after the other, each by its roofline (Williams et al. 2009), and what
        they wait for other ranks (`ckpt/links.py`)."""
        return self.step_time(rows).seconds

    def step_time(self, rows: Iterable[OpCost]) -> StepTime:
        """Estimate the same with its parts: computing, communicating, waiting."""
        return step_time(rows, self.op_time, self.links)

    def op_time(self, row: OpCost) -> float:
        """Estimate the time of one op: its FLOPs or its bytes, whichever takes longer; of a collective, its link's."""
        if row.collective is not None:
            return self.links.seconds(row.collective)
        peak = self.flops.get(row.dtype) or self.flops[torch.float32]
        share = self.attention_share if row.is_attention else self.matmul_share
        return max(row.flops / (peak * share), row.num_bytes / (self.bandwidth * self.bandwidth_share), self.op_seconds)

    def fixed_bytes(self) -> int:
        """Bytes that stand from the first step on: cuBLAS workspaces.

        aten/src/ATen/cuda/CublasHandlePool.cpp: one for each thread that multiplies, the caller's and autograd's.
        """
        return 2 * self.cublas_bytes if self.is_cuda else 0

    def scratch_bytes(self, row: OpCost) -> int:
        """Bytes that one op's kernel allocates and frees beside its results.

        FlashAttention-2's backward (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, mha_bwd): the
        query gradient in fp32 over padded lengths, one fp32 a row, and with grouped queries the key and value
        gradients of every query head.
        """
        if not (self.is_cuda and row.is_attention and "backward" in row.op and len(row.shapes) >= 4):
            return 0
        _, query, key, value = row.shapes[:4]  # (B, H, T, E), (B, K, T, E), (B, K, T, V)
        if len(query) != 4:
            return 0
        rows, heads, tokens, size = query
        padded_tokens, padded_size = -(-tokens // 128) * 128, -(-size // 32) * 32 if size <= 192 else 256
        scratch = 4 * rows * heads * padded_tokens * (padded_size + 1)
        if key[1] != heads:
            scratch += rows * heads * key[2] * (key[3] + value[3]) * row.dtype.itemsize
        return scratch

    def rounded(self, deltas: np.ndarray) -> np.ndarray:
        """Round changes of memory, gains and losses alike, to what the allocator hands out."""
        if not self.is_cuda:
            return deltas
        return np.sign(deltas) * (-(-np.abs(deltas) // _BLOCK_BYTES) * _BLOCK_BYTES)


def _cuda(name: str, gib: float, bf16: float, fp32: float, bandwidth: float, link: float, **more) -> Device:
    flops = {torch.bfloat16: bf16 * 1e12, torch.float16: bf16 * 1e12, torch.float32: fp32 * 1e12}
    small, large = 4096 * 1024 * 2 + 16 * 1024 * 8, 4096 * 8 * 1024  # CublasHandlePool.cpp: large for Hopper, Blackwell
    cublas = large if more.pop("is_new", False) else small
    node = LINKS[more.pop("nvlink")] if "nvlink" in more else link * 1e9  # without NVLink: over PCIe, as to the host
    return Device(name, int(gib * GIB), flops, bandwidth * 1e9, link * 1e9, Links(node), cublas_bytes=cublas, **more)


# FLOP/s and bandwidth: NVIDIA's data sheets, dense. Memory: the total in torch's out-of-memory messages, the least
# seen. Attention: FlashAttention-2, which torch's SDPA runs, reaches 50 to 73% of an A100 and 335 TFLOP/s of an H100
# (arXiv:2307.08691, sec. 4.1); the other shares are assumed alike.
_HOPPER = {"attention_share": 0.34, "is_new": True, "nvlink": "nvlink4"}
DEVICES: dict[str, Callable[[], Device]] = {
    "a100_40": lambda: _cuda("a100_40", 39.38, 312, 19.5, 1555, 31.5, nvlink="nvlink3"),
    "a100_80": lambda: _cuda("a100_80", 79.14, 312, 19.5, 2039, 31.5, nvlink="nvlink3"),
    "h100": lambda: _cuda("h100", 79.10, 989, 67, 3350, 63, **_HOPPER),
    "h200": lambda: _cuda("h200", 139.72, 989, 67, 4800, 63, **_HOPPER),
    "l40s": lambda: _cuda("l40s", 44.34, 362, 91.6, 864, 31.5),
    "rtx4090": lambda: _cuda("rtx4090", 23.52, 165, 82.6, 1008, 31.5),
    "rtx5090": lambda: _cuda("rtx5090", 31.36, 209.5, 104.8, 1792, 63, is_new=True),
    "cpu": lambda: _cpu(),
}
_SAME = {"a100": "a100_80", "a100_40gb": "a100_40", "a100_80gb": "a100_80", "4090": "rtx4090", "5090": "rtx5090"}


def find(name: str) -> Device:
    """Return a device by its name in the table. Raises ValueError, naming the nearest, for one that is not there."""
    key = str(name).lower().replace("-", "_").replace(" ", "_")
    key = _SAME.get(key, key)
    if key not in DEVICES:
        near = difflib.get_close_matches(key, DEVICES, n=1)
        did_you_mean = f" Did you mean {near[0]}?" if near else ""
        raise ValueError(f"hardware {name!r} is unknown.{did_you_mean} There are {', '.join(DEVICES)}, and measure.")
    return DEVICES[key]()


def find_by_cuda_name(name: str, memory_bytes: int) -> Device | None:
    """Return the table's device for what `torch.cuda.get_device_name` says, with the memory that it really has."""
    text = name.lower()
    for part, key in (("h200", "h200"), ("h100", "h100"), ("a100", "a100_80"), ("l40s", "l40s"), ("4090", "rtx4090"),
                      ("5090", "rtx5090")):  # fmt: skip
        if part in text:
            key = "a100_40" if key == "a100_80" and memory_bytes < 60 * GIB else key
            return dataclasses.replace(find(key), memory_bytes=memory_bytes)
    return None


def at_hand(device: torch.device | str) -> Device:
    """Return what a torch device is: of the table, with the memory that it really has; figures of an A100 for a CUDA
    device that is not in it."""
    device = torch.device(device)
    if device.type != "cuda":
        return _cpu()
    properties = torch.cuda.get_device_properties(device)
    known = find_by_cuda_name(properties.name, properties.total_memory)
    return known or dataclasses.replace(find("a100_80"), name=properties.name, memory_bytes=properties.total_memory)


def _cpu() -> Device:
    """The machine at hand, by rules of thumb: 40 GFLOP/s and 8 GB/s a thread. `measure_device` is better."""
    threads = torch.get_num_threads()
    flops = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), 40e9 * threads)
    return Device("cpu", memory_of_machine(), flops, 8e9 * threads, 8e9, Links(8e9), 1.0, 1.0, 1.0, op_seconds=2e-6)


def memory_of_machine() -> int:
    """Return the bytes of memory that this process may use: the machine's, or less if a control group says so."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path, encoding="ascii") as file:
                total = min(total, int(file.read()))
        except (OSError, ValueError):  # no control group, or "max"
            continue
    return total


def measure_device(device: torch.device | str, dtype: torch.dtype) -> Device:
    """Calibrate the device at hand: one matmul, one causal attention, one copy, each the best of a few.

    What is measured is what kernels reach, so that the shares are 1.
    """
    device = torch.device(device)
    size, tokens = (8192, 8192) if device.type == "cuda" else (1024, 1024)
    with torch.no_grad():
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        q = torch.randn(1, 8, tokens, 64, device=device).to(dtype)
        source, target = (torch.empty(2**26 if device.type == "cuda" else 2**24, device=device) for _ in range(2))
        matmul = 2 * size**3 / _best_of(lambda: a @ b, device)
        attention = (
            2
            * 8
            * tokens**2
            * 64
            / _best_of(lambda: torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True), device)
        )
        bandwidth = 2 * source.numel() * 4 / _best_of(lambda: target.copy_(source), device)
        tiny = torch.zeros(1, device=device)
        op_seconds = _best_of(lambda: [tiny.add_(1) for _ in range(100)], device) / 100
    basis = at_hand(device)
    flops = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), matmul)
    return dataclasses.replace(
        basis, name="measure", flops=flops, bandwidth=bandwidth, matmul_share=1.0, bandwidth_share=1.0,
        attention_share=attention / matmul, op_seconds=op_seconds, is_measured=True,
    )  # fmt: skip


def _best_of(run: Callable[[], object], device: torch.device, repeats: int = 4) -> float:
    seconds = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
