"""Speed and utilization of optimizer steps: tokens/s, MFU and HFU, and the peak FLOP/s that both divide by.

Owns the clock of a step. Probe steps and the first step of a process are left out of the run's throughput.

    meter = Meter(device, device_peak(device, dtype))
    meter.start(); ...; metrics = meter.stop(batches)        # seconds, tokens, tokens/s, utilization
    meter.flops = StepFlops(...)                             # from a probe step; until then utilization is None

What the figures mean stands in CONVENTION, and in every manifest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt.flops import CAUSAL_CONVENTION

CONVENTION = (
    "Tokens are those that are not padding. Model FLOPs (MFU) are what a step needs once: forward, and backward with "
    "nothing run again. Hardware FLOPs (HFU) are all that ran, replayed layers and the scores that a fused attention "
    "backward makes again included. Both count contractions alone, a multiply-add as two. "
    f"{CAUSAL_CONVENTION} Utilization divides by the device's dense peak in the dtype of the matmuls. FLOPs of a probe "
    "step are counted op by op; other steps are scaled from it, matmuls by tokens, attention by query-key pairs."
)

Batch = dict[str, Any]

# Dense peak FLOP/s of the makers' data sheets: (part of the device name, bf16, fp32 outside tensor cores).
_PEAKS = (
    ("H200", 989e12, 67e12),
    ("GH200", 989e12, 67e12),
    ("H100 PCIe", 756e12, 51e12),
    ("H100 NVL", 835e12, 60e12),
    ("H100", 989e12, 67e12),
    ("H20", 148e12, 44e12),
    ("B200", 2250e12, 75e12),
    ("A100", 312e12, 19.5e12),
    ("A40", 149.7e12, 37.4e12),
    ("A10", 125e12, 31.2e12),
    ("L40S", 362e12, 91.6e12),
    ("L4", 121e12, 30.3e12),
    ("RTX 4090", 165e12, 82.6e12),
    ("RTX 3090", 71e12, 35.6e12),
)


@dataclass(frozen=True)
class Peak:
    """FLOP/s that a device could do at most, and how that is known."""

    flops: float
    source: str

    def to_dict(self) -> dict[str, Any]:
        """Return what the manifest says of utilization."""
        return {"peak_flops": self.flops, "peak_source": self.source, "convention": CONVENTION}


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one measured step, and what it computed, to scale other steps from.

    positions: tokens computed, padding included. pairs: query-key pairs of one head of one layer.
    """

    hardware_matmul: int
    hardware_attention: int
    model_matmul: int
    model_attention: int
    positions: int
    pairs: float

    def model(self, tokens: int, pairs: float) -> float:
        """Model FLOPs of a step that trains on `tokens` tokens."""
        return self.model_matmul * tokens / self.positions + self.model_attention * pairs / self.pairs

    def hardware(self, positions: int, pairs: float) -> float:
        """Hardware FLOPs of a step that computes `positions` tokens."""
        return self.hardware_matmul * positions / self.positions + self.hardware_attention * pairs / self.pairs


@dataclass
class Meter:
    """Times steps on one device."""

    device: torch.device
    peak: Peak
    flops: StepFlops | None = None
    peak_bytes: dict[str, int | None] = field(
        default_factory=lambda: {"peak_allocated_bytes": None, "peak_reserved_bytes": None}
    )
    _started: float = 0.0
    _is_probe: bool = False
    _is_first: bool = True
    _seconds: float = 0.0
    _tokens: int = 0
    _steps: int = 0
    _model_flops: float = 0.0

    def start(self, is_probe: bool = False) -> None:
        """Begin a step."""
        self._is_probe = is_probe
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
        self._started = time.perf_counter()

    def stop(self, batches: list[Batch], over_ranks: Callable[..., list[float]] | None = None) -> dict[str, Any]:
        """End the step that computed `batches`; return its metrics by the names of metrics.jsonl.

        Tokens are those of all ranks, summed by `over_ranks`; utilization and peaks are this rank's.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self.peak_bytes = {
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(self.device),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(self.device),
            }
        seconds = time.perf_counter() - self._started
        tokens, pairs = sum(batch["num_tokens"] for batch in batches), sum(map(num_pairs, batches))
        positions = sum(batch["input_ids"].numel() for batch in batches)
        model = self.flops.model(tokens, pairs) if self.flops else None
        hardware = self.flops.hardware(positions, pairs) if self.flops else None
        if over_ranks is not None:
            tokens = int(over_ranks(tokens)[0])
        if not self._is_probe and not self._is_first:
            self._seconds += seconds
            self._tokens += tokens
            self._steps += 1
        self._is_first = False
        return {
            "tokens": tokens,
            "tokens_per_second": tokens / seconds,
            "model_flops_utilization": self._utilization(model, seconds),
            "hardware_flops_utilization": self._utilization(hardware, seconds),
            "step_seconds": seconds,
            **self.peak_bytes,
        }

    def summary(self) -> dict[str, Any]:
        """Return throughput and mean time over the steps that count; None before there is one."""
        return {
            "tokens_per_second": self._tokens / self._seconds if self._seconds else None,
            "step_seconds": self.mean_seconds,
        }

    @property
    def mean_seconds(self) -> float | None:
        """Mean time of the steps that count so far; None before there is one."""
        return self._seconds / self._steps if self._steps else None

    def _utilization(self, flops: float | None, seconds: float) -> float | None:
        return None if flops is None else flops / seconds / self.peak.flops


def num_pairs(batch: Batch) -> float:
    """Query-key pairs of one head over a batch, causal: T * T / 2 a document, or a row where there are none."""
    rows, tokens = batch["input_ids"].shape
    if "cu_seq_lens_q" not in batch:
        return rows * tokens * tokens / 2
    return float(batch["cu_seq_lens_q"].diff().double().square().sum()) / 2


def device_peak(device: torch.device, dtype: torch.dtype) -> Peak:
    """Return the dense peak FLOP/s of a device: from its data sheet, else measured with one matmul."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for part, half, single in _PEAKS:
            if part in name:
                flops = half if dtype in (torch.bfloat16, torch.float16) else single
                return Peak(flops, f"data sheet of {part}")
    return Peak(measure_matmul(device, dtype), "fastest of a few square matmuls, measured at the start")


def measure_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of a few square matmuls, with the threads that training uses."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = (
        torch.randn(size, size, device=device, dtype=dtype, generator=torch.Generator(device).manual_seed(0))
        for _ in range(2)
    )
    seconds = []
    for _ in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        a @ b
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size**3 / min(seconds)
