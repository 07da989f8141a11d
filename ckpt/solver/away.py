"""Options that hold a layer's input, what it keeps or some of that off the device, and what waiting for the link costs.

Copies overlap with the compute of about one layer: the store sends one tensor at a time and brings a layer's back while
the layer behind it is differentiated (`ckpt/engine/store.py`). What a layer's forward (on the way out) or its backward
(on the way back) cannot hide is a stall, and counts as cost.

    rooms = [Room("host", 64 * 2**30, device.link_bandwidth)]
    options += away_options(options, record, price, rooms[0])
"""

from __future__ import annotations

import dataclasses
import math
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
    """Return variants of a layer's options, none of which holds more on the device than what it came from: the input
    moved, all that is kept, both, and, where the link has no time for all, as much as it has time for."""
    forward, given = sum(price(op, record) for op in record.ops), input_bytes(record)

    def waits(num_bytes: int) -> bool:
        return price.stall(num_bytes, forward, room.bandwidth) > price.stall(num_bytes, math.inf, room.bandwidth)

    found = []
    for option in thin([o for o in options if o.replay], MOST_KEPT):
        ways = dict.fromkeys([(True, frozenset()), (False, option.keep), (True, option.keep)])
        for with_input in (False, True):
            moved: set[int] = set()
            away = given if with_input else 0
            for i in sorted(option.keep, key=lambda i: -record.ops[i].num_bytes):
                if not waits(away + record.ops[i].num_bytes):
                    moved.add(i)
                    away += record.ops[i].num_bytes
            ways[with_input, frozenset(moved)] = None
        for moves_input, moved in ways:
            made = _moving(option, moves_input, moved, record, price)
            if made is None:
                continue
            stall = price.stall(made.away_bytes, forward, room.bandwidth)
            stall += price.stall(made.away_bytes, BACKWARD_OVER_FORWARD * forward + made.cost, room.bandwidth)
            found.append(dataclasses.replace(made, cost=made.cost + stall, stall=stall))
    return found


def _moving(option: Option, moves_input: bool, moved: frozenset[int], record: Record, price: Price) -> Option | None:
    """Return the option with some of what it holds moved; None if nothing would be. Waiting is not in its cost yet."""
    away, held, cost, flops = input_bytes(record) if moves_input else 0, option.held_bytes, option.cost, option.flops
    if moved:
        what = {i: Decision.OFFLOAD if i in moved else Decision.KEEP for i in option.keep}
        program = build_program(record, what, to_run=False)
        if not program.away_bytes:
            return None
        away, held, flops = away + program.away_bytes, program.kept_bytes, program.replay_flops
        cost = sum(price(record.ops[i], record) for i in ops_run(program))
    if not away:
        return None
    return dataclasses.replace(
        option, held_bytes=held, cost=cost, flops=flops, away_bytes=away, offload_input=moves_input, moved=moved
    )


def input_bytes(record: Record) -> int:
    """Bytes of the layer's hidden states: the first floating-point argument is the largest that it reads."""
    return max((n for n, p in zip(record.storage_bytes, record.producer, strict=True) if p <= ARG), default=0)
