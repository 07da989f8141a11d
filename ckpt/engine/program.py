"""From a record and its decisions to a program: what packing keeps, and what a replay runs, feeds and skips.

Liveness is by storage. Backward asks for the storages that autograd saved and packing dropped; an op must run on replay
only if it makes or writes a storage that is needed, and no kept tensor can stand in for it. Everything else is skipped:
its outputs are placeholders of true shape and strides over an empty storage, which nothing that runs ever reads.

Safety rules, each learned from a wrong gradient or a crash (see TERRAIN in the design notes):
- a storage that is written in place is fed only if its final value is the only one ever read, and then the writes are
  skipped with it;
- a random op is never fed or skipped while a later random op runs, so the generator advances as in the forward;
- what decides a shape or reaches Python (`.item()`, `nonzero`) always runs, and so does what it depends on;
- writes to buffers outside the layer are not repeated, and no op may read there what the layer then overwrites;
- if a Python autograd.Function or a kernel of its own takes part, values bypass the record: nothing is skipped or fed,
  only kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from ckpt.engine.actions import Feed, RunOnCopies, Skip, SkipWrite
from ckpt.engine.liveness import Analysis, liveness, split_stages
from ckpt.engine.ops import Unreplayable
from ckpt.engine.outside import is_outside, needed_ops, outside_reads, overwritten_after_read, writes_outside
from ckpt.engine.record import ARG, CAST, EXTERNAL, Op, Record
from ckpt.plan import Decision


class Pack(IntEnum):
    """What packing does with one saved tensor."""

    PASS = 0  # not the layer's: a parameter, an argument
    KEEP = 1
    DROP = 2
    FEED = 3  # kept, and the replay needs it too


@dataclass(frozen=True)
class Source:
    """A module of the layer that returns a tensor, or is called with it."""

    module: str
    is_input: bool = False


@dataclass
class Stage:
    """A set of saved tensors that is replayed together."""

    wanted: frozenset[int]  # pack numbers
    last: int  # the replay ends at this pack
    actions: dict[int, Callable] = field(default_factory=dict)  # by op index, see `actions`; others run
    needs_mode: bool = False
    runs: tuple[int, ...] = ()  # indices of the ops that run, views apart
    flops: int = 0
    fed_storages: frozenset[int] = frozenset()
    outside_reads: frozenset[int] = frozenset()  # storages beside the arguments that the ops run here read


@dataclass
class Program:
    """What is done with each saved tensor of a layer call, and how the dropped ones are made again."""

    record: Record
    packs: list[Pack]
    stages: list[Stage]
    stage_of: dict[int, int]
    captures: dict[int, Source | None]  # storage -> where it passes (None: only a dispatch mode sees it)
    away: frozenset[int]  # storages that are held off the device
    kept_bytes: int  # on the device
    away_bytes: int
    kept_ops: frozenset[int]  # held, on the device or off it
    demoted: dict[int, str]  # op index -> why a keep decision could not be used
    outside_reads: frozenset[int]  # the same of a plain replay
    writes_outside: bool

    @property
    def is_data_dependent(self) -> bool:
        return self.record.is_data_dependent

    @property
    def ops_run(self) -> int:
        return sum(len(stage.runs) for stage in self.stages)

    @property
    def replay_flops(self) -> int:
        return sum(stage.flops for stage in self.stages)


def build_program(
    record: Record,
    decisions: Mapping[int, Decision],
    dropped_args: frozenset[int] = frozenset(),
    split: bool = True,
    to_run: bool = True,
) -> Program:
    """Build the program of one layer call.

    Args:
        record: the layer's record.
        decisions: by op index, what the policy does with the op's outputs. Missing means recompute.
        dropped_args: numbers of the layer's tensor arguments that can be brought back and are not to be held.
        split: replay parts of the layer apart where that repeats no FLOPs.
        to_run: False leaves out the actions, for those who only ask what is held and run.

    Raises:
        Unreplayable: if the layer overwrites a buffer or an argument that a replay would have to read as it was.
    """
    analysis = Analysis(record, decisions)
    packs = [_pack_code(record, s.storage, analysis.kept, dropped_args) for s in record.saved]
    dropped = [n for n, code in enumerate(packs) if code is Pack.DROP]
    if all(record.producer[record.saved[n].storage] == CAST for n in dropped):
        # Nothing else needs a replay, so parameters in another dtype are not worth one.
        packs, dropped = [Pack.PASS if code is Pack.DROP else code for code in packs], []
    groups = split_stages(record, analysis, dropped) if split else [frozenset(dropped)]
    built = [_build_stage(record, analysis, group, to_run) for group in groups if group]
    if built:
        record.once(_refuse_overwritten)
    fed = frozenset().union(*(stage.fed_storages for stage in built))
    captures = _mark_sources(record, packs, fed)
    held = {record.saved[n].storage for n, code in enumerate(packs) if code in (Pack.KEEP, Pack.FEED)} | set(captures)
    away = frozenset(held & analysis.away)
    return Program(
        record=record,
        packs=packs,
        stages=built,
        stage_of={n: k for k, stage in enumerate(built) for n in stage.wanted},
        captures=captures,
        away=away,
        kept_bytes=sum(record.storage_bytes[s] for s in held - away),
        away_bytes=sum(record.storage_bytes[s] for s in away),
        kept_ops=frozenset(record.producer[s] for s in held),
        demoted=analysis.demoted,
        outside_reads=record.once(_needed_outside_reads),
        writes_outside=record.once(_writes_anything_outside),
    )


def _needed_outside_reads(record: Record) -> frozenset[int]:
    return outside_reads(record, record.once(needed_ops))


def _writes_anything_outside(record: Record) -> bool:
    return any(writes_outside(record, op) for op in record.ops)


def _refuse_overwritten(record: Record) -> None:
    for op in record.ops:
        if any(record.producer[s] <= ARG for s in op.writes):
            raise Unreplayable(
                f"the layer writes into one of its arguments (op {op.key}), so it cannot be replayed from them. "
                "Keep this layer's activations, or make the write out of place."
            )
        if writes_outside(record, op) and not all(is_outside(record, s) for s in op.writes):
            raise Unreplayable(
                f"op {op.key} writes a buffer and a tensor of the layer at once; a replay can repeat one only. "
                "Keep this layer's activations."
            )
    storage = overwritten_after_read(record)
    if storage is not None:
        raise Unreplayable(
            "the layer reads a buffer and then overwrites it "
            f"({', '.join(str(op.key) for op in record.ops if storage in op.writes)}), so a replay would read another "
            "value. Keep this layer's activations, or write the buffer before it is read."
        )


def _pack_code(record: Record, storage: int, kept: set[int], dropped_args: frozenset[int]) -> Pack:
    producer = record.producer[storage]
    if producer == EXTERNAL:
        return Pack.PASS
    if producer <= ARG:
        return Pack.DROP if ARG - producer in dropped_args else Pack.PASS
    return Pack.KEEP if storage in kept else Pack.DROP


def _build_stage(record: Record, analysis: Analysis, wanted: frozenset[int], to_run: bool) -> Stage:
    stage = Stage(wanted=wanted, last=max(wanted))
    end = max(record.saved[n].at for n in wanted)
    if record.is_opaque:
        return _run_all(record, stage, end)
    live = liveness(record, analysis, wanted)
    stage.runs = tuple(op.index for op in record.ops[:end] if live.runs[op.index] and not op.is_view)
    stage.flops = sum(record.ops[i].flops for i in stage.runs)
    stage.fed_storages = frozenset(live.fed_storages)
    if not to_run:
        return stage
    skipped_flops = 0
    for op in record.ops[:end]:
        if op.index in live.fed:
            stage.actions[op.index] = Feed(op, live.fed[op.index])
            skipped_flops += op.flops
            stage.needs_mode = True
        elif op.is_view:
            if not all(s in live.real for s in op.reads):
                stage.actions[op.index] = Skip(op)
        elif live.runs[op.index]:
            if writes_outside(record, op):
                stage.actions[op.index] = RunOnCopies(op)
                stage.needs_mode = True
        else:
            stage.needs_mode = stage.needs_mode or writes_outside(record, op)
            stage.actions[op.index] = _skip(op, live.fed_storages, live.real)
            skipped_flops += op.flops
    stage.needs_mode = stage.needs_mode or skipped_flops > 0
    stage.outside_reads = outside_reads(record, [op for op in record.ops[:end] if live.runs[op.index]])
    if not stage.needs_mode:
        stage.actions.clear()
    return stage


def _run_all(record: Record, stage: Stage, end: int) -> Stage:
    """Build a stage that skips nothing but writes outside."""
    for op in record.ops[:end]:
        if writes_outside(record, op):
            stage.actions[op.index] = RunOnCopies(op) if op.makes else SkipWrite(op)
            stage.needs_mode = True
    stage.runs = tuple(op.index for op in record.ops[:end] if not op.is_view)
    stage.flops = sum(op.flops for op in record.ops[:end])
    stage.outside_reads = outside_reads(record, record.ops[:end])
    return stage


def _skip(op: Op, fed: set[int], real: set[int]) -> Skip | SkipWrite:
    if not op.writes:
        return Skip(op)
    storage = op.writes[0]
    return SkipWrite(op, storage if storage in fed else None, is_dead=storage not in fed and storage not in real)


def _mark_sources(record: Record, packs: list[Pack], fed: frozenset[int]) -> dict[int, Source | None]:
    """Mark the packs that hold what replays are fed with; return what must be captured beside them."""
    missing = set(fed)
    for n, code in enumerate(packs):
        storage = record.saved[n].storage
        made = record.ops[record.producer[storage]] if record.producer[storage] >= 0 else None
        if code is not Pack.KEEP or storage not in missing or made is None:
            continue
        if any(o is not None and o.storage == storage and o.dtype == record.saved[n].dtype for o in made.outputs):
            packs[n] = Pack.FEED
            missing.discard(storage)
    return {s: _source(record, s) for s in sorted(missing)}


def _source(record: Record, storage: int) -> Source | None:
    if storage in record.module_outputs:
        return Source(record.module_outputs[storage])
    return Source(record.child_inputs[storage], is_input=True) if storage in record.child_inputs else None
