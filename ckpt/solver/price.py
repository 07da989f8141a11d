"""What planning minimises: FLOPs run again, or seconds by a device's roofline, stalls of the link included.

Owns the unit of cost: of one op, of a whole step, of waiting. Knows no plan.

    price = SecondsPrice(find("h100"))
    price(op, record)               # of running one op of a record again
    price.stall(2**30, 0.01, 63e9)  # of moving 1 GiB while compute lasts 0.01 s
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from ckpt.costs import OpCost
from ckpt.engine.keys import ATTENTION
from ckpt.engine.record import Op, Record
from ckpt.hardware import Device

# A price of moving a byte beside which all else counts more: of two plans that cost the same, the one that moves less.
_TIE = 1e-9


class Price(Protocol):
    """Costs in one unit."""

    def __call__(self, op: Op, record: Record) -> float:
        """Cost of running one op of a layer."""

    def of_step(self, rows: Iterable[OpCost]) -> float:
        """Cost of all ops of a step."""

    def stall(self, moved_bytes: int, compute: float, bandwidth: float) -> float:
        """Cost of moving bytes one way while `compute`, in this unit, is there to hide it."""


class FlopsPrice:
    """FLOPs; among equals, fewer bytes moved. The second part stays below one FLOP of any matmul worth the name."""

    def __call__(self, op: Op, record: Record) -> float:
        return op.flops + _TIE * bytes_moved(op, record)

    def of_step(self, rows: Iterable[OpCost]) -> float:
        return float(sum(row.flops * row.weight for row in rows))

    def stall(self, moved_bytes: int, compute: float, bandwidth: float) -> float:
        return _TIE * moved_bytes


class SecondsPrice:
    """Seconds by the device's roofline: the longer of computing and moving, at least what launching takes; of a
    collective, what its link takes."""

    def __init__(self, device: Device):
        self.device = device

    def __call__(self, op: Op, record: Record) -> float:
        device = self.device
        if op.collective is not None:
            return device.links.seconds(op.collective)
        dtype = next((o.dtype for o in op.outputs if o is not None), torch.float32)
        peak = device.flops.get(dtype) or device.flops[torch.float32]
        share = device.attention_share if op.key.op == ATTENTION else device.matmul_share
        moving = bytes_moved(op, record) / (device.bandwidth * device.bandwidth_share)
        return max(op.flops / (peak * share), moving, device.op_seconds)

    def of_step(self, rows: Iterable[OpCost]) -> float:
        return self.device.seconds(rows)

    def stall(self, moved_bytes: int, compute: float, bandwidth: float) -> float:
        # Copies contend with kernels for memory and start late: even a hidden one is not free.
        seconds = moved_bytes / bandwidth
        return max(0.0, seconds - compute) + 0.01 * seconds


def bytes_moved(op: Op, record: Record) -> int:
    """Bytes an op reads and writes; views move none."""
    if op.is_view:
        return 0
    return sum(record.storage_bytes[s] for s in dict.fromkeys((*op.reads, *op.makes, *op.writes)))
