"""Where a layer falls into two halves: one tensor that, kept, lets each be replayed without the other.

In most decoder layers it is the sum of the residual stream and the attention's output, which the norm in front of the
MLP reads. Once it is kept (off the device, where layer inputs are offloaded), the attention is replayed after the MLP
has been differentiated: the working sets of the two are never alive together, and the attention's output projection is
not run again.

Only a record can tell: which tensors pass from one child module to another, and what a replay would run with each.
"""

from __future__ import annotations

from collections.abc import Mapping

from ckpt.engine.liveness import MIN_BYTES_TO_SPLIT, Analysis
from ckpt.engine.program import Program, build_program
from ckpt.engine.record import Record
from ckpt.plan import Decision

# The norm in front of the MLP may stand on either side: what that changes is not worth the attention's projection.
NEAR = 1.25


def middle_op(
    record: Record, decisions: Mapping[int, Decision], dropped_args: frozenset[int] = frozenset()
) -> tuple[int | None, str | None]:
    """Return the op that makes the tensor between the halves, or None and why there is none.

    Looked at are tensors that a child module of the layer is called with, which repeat no FLOPs and make the largest
    part smaller. Of those that come near the smallest largest part, the one that leaves fewest FLOPs to be run again is
    taken.
    """
    if record.is_opaque:
        return None, "values may pass by the record"
    if record.has_random:
        return None, "it draws random numbers"
    if record.is_data_dependent:
        return None, "its path depends on data"
    without = build_program(record, decisions, dropped_args)
    dropped = {record.saved[n].storage for stage in without.stages for n in stage.wanted}
    if sum(record.storage_bytes[s] for s in dropped) < MIN_BYTES_TO_SPLIT:
        return None, f"less than {MIN_BYTES_TO_SPLIT / 2**20:.0f} MiB are made again"
    candidates: list[tuple[int, int, int]] = []  # bytes of the largest part, FLOPs, op
    for storage in record.child_inputs:
        index = record.producer[storage]
        if decisions.get(index, Decision.RECOMPUTE) is not Decision.RECOMPUTE or len(record.ops[index].makes) > 1:
            continue
        kept = {**decisions, index: Decision.KEEP}
        if storage not in Analysis(record, kept).feedable:
            continue
        program = build_program(record, kept, dropped_args)
        part = _largest_part(program)
        if part < _largest_part(without) and program.replay_flops <= without.replay_flops:
            candidates.append((part, program.replay_flops, index))
    if not candidates:
        return None, "no single tensor parts it"
    near = NEAR * min(candidates)[0]
    return min((flops, part, index) for part, flops, index in candidates if part <= near)[2], None


def _largest_part(program: Program) -> int:
    """Return the most bytes that are made again at once."""
    record = program.record
    parts = ({record.saved[n].storage for n in stage.wanted} for stage in program.stages)
    return max((sum(record.storage_bytes[s] for s in part) for part in parts), default=0)
