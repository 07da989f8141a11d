"""Options that hold a layer's input, what it keeps, or both off the device, and what waiting for the link costs.

Copies overlap with the compute of about one layer: the store sends one tensor at a time and brings a layer's back while
the layer behind it is differentiated (`ckpt/engine/store.py`). What a layer's forward (on the way out) or its backward
(on the way back) cannot hide is a stall, and counts as cost.

    rooms = [Room("host", 64 * 2**30, device.link_bandwidth)]
    options += away_options(options, record, price, rooms[0])
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from ckpt.engine.program import build_program
from ckpt.engine.record import ARG, Record
from ckpt.plan import Decision
from ckpt.solver.inner import Option, ops_run, thin
from ckpt.solver.price import Price

# A floor for one NVMe drive. Nothing is measured: writing a test file would wear the drive and warm its cache.
DISK_BANDWIDTH = 2e9
# Options of a layer that are offered with what they keep off the device.
MOST_KEPT = 6
# Backward of a matmul is two matmuls.
BACKWARD_OVER_FORWARD = 2.0


@dataclass(frozen=True)
class Room:
    """Where tensors may go. target: "host" or "disk". budget_bytes: of it. bandwidth: bytes/s, each way. directory: on
    disk, None: the system's temporary folder."""

    target: str
    budget_bytes: int
    bandwidth: float
    directory: str | None = None


def away_options(options: Sequence[Option], record: Record, price: Price, room: Room) -> list[Option]:
    """Return variants of a layer's options, none of which holds more on the device than what it came from."""
    forward = sum(price(op, record) for op in record.ops)
    given = input_bytes(record)
    found = []
    for option in thin([o for o in options if o.replay], MOST_KEPT):
        ways = [(True, False)] if not option.keep else [(True, False), (False, True), (True, True)]
        for moves_input, moves_kept in ways:
            away, held, cost, flops = given if moves_input else 0, option.held_bytes, option.cost, option.flops
            if moves_kept:
                program = build_program(record, dict.fromkeys(option.keep, Decision.OFFLOAD), to_run=False)
                if not program.away_bytes:
                    continue
                away, held, flops = away + program.away_bytes, program.kept_bytes, program.replay_flops
                cost = sum(price(record.ops[i], record) for i in ops_run(program))
            stall = price.stall(away, forward, room.bandwidth)
            stall += price.stall(away, BACKWARD_OVER_FORWARD * forward + cost, room.bandwidth)
            found.append(
                dataclasses.replace(
                    option, held_bytes=held, cost=cost + stall, flops=flops, away_bytes=away, stall=stall,
                    offload_input=moves_input, offload_kept=moves_kept,
                )
            )  # fmt: skip
    return found


def input_bytes(record: Record) -> int:
    """Bytes of the layer's hidden states: the first floating-point argument is the largest that it reads."""
    return max((n for n, p in zip(record.storage_bytes, record.producer, strict=True) if p <= ARG), default=0)
