"""From a record and its decisions to a program: what packing keeps, and what a replay runs, feeds and skips.

Liveness is by storage. Backward asks for the storages that autograd saved and packing dropped; an op must run on replay
only if it makes or writes a storage that is needed, and no kept tensor can stand in for it. Everything else is skipped:
its outputs are placeholders of true shape and strides over an empty storage, which nothing that runs ever reads.

Safety rules, each learned from a wrong gradient or a crash (see TERRAIN in the design notes):
- a storage that is written in place is fed only if its final value is the only one ever read, and then the writes are
  skipped with it;
- a random op is never fed or skipped while a later random op runs, so the generator advances as in the forward;
- what decides a shape or reaches Python (`.item()`, `nonzero`) always runs, and so does what it depends on;
- writes to buffers outside the layer are not repeated;
- if a Python autograd.Function takes part, kernels may bypass the record: nothing is skipped or fed, only kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from ckpt.engine.record import ARG, CAST, EXTERNAL, Op, Record, TensorMeta


class Pack(IntEnum):
    """What packing does with one saved tensor."""

    PASS = 0  # not the layer's: a parameter, an argument
    KEEP = 1
    DROP = 2
    FEED = 3  # kept, and the replay needs it too


class Skip:
    """Return placeholders instead of running the op."""

    def __init__(self, op: Op):
        self._outputs = [None if o is None else _placeholder(o) for o in op.outputs]
        self._single = op.single_output
        self._container = list if _returns_list(op) else tuple

    def __call__(self, frame, args, kwargs):
        if self._single:
            return self._outputs[0].detach()
        return self._container(None if t is None else t.detach() for t in self._outputs)


class SkipWrite:
    """Return the tensor that would have been written, as it is."""

    def __init__(self, op: Op):
        self._op = op

    def __call__(self, frame, args, kwargs):
        if not self._op.outputs:
            return None
        if self._op.single_output:
            return kwargs["out"] if "out" in kwargs else args[0]
        raise NotImplementedError(f"cannot skip {self._op.func}, which writes in place and returns several tensors")


class Feed:
    """Return the kept tensors as the op's outputs."""

    def __init__(self, op: Op, storages: set[int]):
        self._metas = op.outputs
        self._single = op.single_output
        self._fed = storages
        self._placeholders = [None if o is None or o.storage in storages else _placeholder(o) for o in op.outputs]

    def __call__(self, frame, args, kwargs):
        outputs = [
            p.detach() if p is not None else None if m is None else frame.held_as(m)
            for m, p in zip(self._metas, self._placeholders, strict=True)
        ]
        return outputs[0] if self._single else tuple(outputs)


@dataclass
class Stage:
    """A set of saved tensors that is replayed together."""

    wanted: frozenset[int]  # pack numbers
    last: int  # the replay ends at this pack
    actions: dict[int, Callable] = field(default_factory=dict)  # op index -> Skip, SkipWrite or Feed; others run
    needs_mode: bool = False
    ops_run: int = 0
    flops: int = 0
    fed_storages: frozenset[int] = frozenset()


@dataclass
class Program:
    record: Record
    packs: list[Pack]
    stages: list[Stage]
    stage_of: dict[int, int]
    captures: dict[int, str | None]  # storage -> module whose output it is (None: only a dispatch mode sees it)
    kept_bytes: int
    kept_ops: frozenset[int]
    demoted: dict[int, str]  # op index -> why a keep decision could not be used

    @property
    def is_data_dependent(self) -> bool:
        return self.record.is_data_dependent

    @property
    def replay_flops(self) -> int:
        return sum(stage.flops for stage in self.stages)


def build_program(
    record: Record, keep: Mapping[int, bool], dropped_args: frozenset[int] = frozenset(), stages=None
) -> Program:
    """Build the program of one layer call.

    Args:
        record: the layer's record.
        keep: by op index, True where the policy keeps the op's outputs. Missing means recompute.
        dropped_args: numbers of the layer's tensor arguments that can be made again and are not to be held.
        stages: groups of pack numbers to replay apart, in any order; None replays all at once.
    """
    analysis = _Analysis(record, keep)
    packs = [_pack_code(record, s.storage, analysis.kept, dropped_args) for s in record.saved]
    dropped = [n for n, code in enumerate(packs) if code is Pack.DROP]
    if all(record.producer[record.saved[n].storage] == CAST for n in dropped):
        # Nothing else needs a replay, so parameters in another dtype are not worth one.
        packs, dropped = [Pack.PASS if code is Pack.DROP else code for code in packs], []
    groups = [frozenset(g) & frozenset(dropped) for g in stages] if stages else [frozenset(dropped)]
    built = [_build_stage(record, analysis, group) for group in groups if group]
    fed = frozenset().union(*(stage.fed_storages for stage in built))
    captures = _mark_sources(record, packs, fed)
    held = {record.saved[n].storage for n, code in enumerate(packs) if code in (Pack.KEEP, Pack.FEED)} | set(captures)
    return Program(
        record=record,
        packs=packs,
        stages=built,
        stage_of={n: k for k, stage in enumerate(built) for n in stage.wanted},
        captures=captures,
        kept_bytes=sum(record.storage_bytes[s] for s in held),
        kept_ops=frozenset(record.producer[s] for s in held),
        demoted=analysis.demoted,
    )


def _pack_code(record: Record, storage: int, kept: set[int], dropped_args: frozenset[int]) -> Pack:
    producer = record.producer[storage]
    if producer == EXTERNAL:
        return Pack.PASS
    if producer <= ARG:
        return Pack.DROP if ARG - producer in dropped_args else Pack.PASS
    return Pack.KEEP if storage in kept else Pack.DROP


class _Analysis:
    """Which storages are kept, and which of them may stand in for their op on replay."""

    def __init__(self, record: Record, keep: Mapping[int, bool]):
        self.kept = {s for op in record.ops if keep.get(op.index) for s in op.makes}
        self.demoted: dict[int, str] = {}
        self.writers: dict[int, list[int]] = defaultdict(list)
        self.readers: dict[int, list[int]] = defaultdict(list)
        for op in record.ops:
            for s in op.writes:
                self.writers[s].append(op.index)
            for s in op.reads:
                if s not in op.writes and not op.is_view:
                    self.readers[s].append(op.index)
        self.opaque = bool(record.custom_functions)
        self.feedable = set()
        for s in self.kept:
            reason = self._not_feedable(record, s)
            if reason is None:
                self.feedable.add(s)
            else:
                self.demoted[record.producer[s]] = reason

    def _not_feedable(self, record: Record, storage: int) -> str | None:
        if self.opaque:
            return "a Python autograd.Function takes part in this layer"
        producer = record.ops[record.producer[storage]]
        writers = [record.ops[i] for i in self.writers[storage]]
        if producer.is_random or any(w.is_random for w in writers):
            return "drawn from a generator"
        if producer.is_data_dependent:
            return "its shape depends on data"
        if not writers:
            return None
        if len(producer.makes) > 1:
            return "written in place, and made together with other tensors"
        last = writers[-1].index
        if any(r < last for r in self.readers[storage]):
            return "read before it is written in place"
        if any(s.storage == storage and s.at <= last for s in record.saved):
            return "saved before it is written in place"
        if any(len(w.writes) > 1 or not w.single_output for w in writers):
            return "written in place by an op of several outputs"
        return None


def _build_stage(record: Record, analysis: _Analysis, wanted: frozenset[int]) -> Stage:
    saved = record.saved
    stage = Stage(wanted=wanted, last=max(wanted))
    end = max(saved[n].at for n in wanted)
    if analysis.opaque:
        stage.ops_run, stage.flops = end, sum(op.flops for op in record.ops[:end])
        return stage
    wanted_after: dict[int, list[int]] = defaultdict(list)
    for n in wanted:
        wanted_after[saved[n].at].append(saved[n].storage)
    needed: set[int] = set()
    real: set[int] = set()  # storages with data on replay
    fed_all: set[int] = set()
    live: dict[int, bool] = {}
    random_follows = False
    for op in reversed(record.ops[:end]):
        needed.update(wanted_after[op.index + 1])
        asked = needed.intersection(op.makes)
        if asked and asked <= analysis.feedable and not (op.is_random and random_follows):
            stage.actions[op.index] = Feed(op, asked)
            fed_all |= asked
            real |= asked
            needed -= asked
            live[op.index] = False
            continue
        writes_fed = any(s in analysis.feedable for s in op.writes)
        writes_outside = any(record.producer[s] == EXTERNAL for s in op.writes)
        runs = (
            op.is_data_dependent
            or bool(asked)
            or (not writes_fed and not writes_outside and any(s in needed for s in op.writes))
            or (op.is_random and random_follows)
            or (not op.writes and all(o is None for o in op.outputs))
        )
        live[op.index] = runs
        if runs:
            needed.update(op.reads)
            real.update(op.makes)
            random_follows = random_follows or op.is_random
        needed.difference_update(op.makes)
    outside = {s for s, p in enumerate(record.producer) if p < 0}
    real |= outside
    skipped_flops = 0
    for op in record.ops[:end]:
        if op.index in stage.actions:
            skipped_flops += op.flops
            stage.needs_mode = True
        elif op.is_view:
            if not all(s in real for s in op.reads):
                stage.actions[op.index] = Skip(op)
        elif live[op.index]:
            stage.ops_run += 1
            stage.flops += op.flops
        else:
            if any(record.producer[s] == EXTERNAL for s in op.writes):
                stage.needs_mode = True
            stage.actions[op.index] = SkipWrite(op) if op.writes else Skip(op)
            skipped_flops += op.flops
    stage.needs_mode = stage.needs_mode or skipped_flops > 0
    stage.fed_storages = frozenset(fed_all)
    if not stage.needs_mode:
        stage.actions.clear()
    return stage


def _mark_sources(record: Record, packs: list[Pack], fed: frozenset[int]) -> dict[int, str | None]:
    """Mark the packs that hold what replays are fed with; return what must be captured beside them."""
    missing = set(fed)
    for n, code in enumerate(packs):
        storage = record.saved[n].storage
        made = record.ops[record.producer[storage]] if record.producer[storage] >= 0 else None
        if code is Pack.KEEP and storage in missing and made is not None:
            if any(o is not None and o.storage == storage and o.dtype == record.saved[n].dtype for o in made.outputs):
                packs[n] = Pack.FEED
                missing.discard(storage)
    return {s: record.module_outputs.get(s) for s in sorted(missing)}


def _placeholder(meta: TensorMeta) -> torch.Tensor:
    """A tensor of true shape, strides and dtype over an empty storage. True strides matter: SDPA chooses its kernel by
    them. It is made once and handed out as aliases."""
    tensor = torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=meta.device)
    tensor.untyped_storage().resize_(0)
    return tensor


def _returns_list(op: Op) -> bool:
    returns = op.func._schema.returns
    return len(returns) == 1 and str(returns[0].type).startswith("List")
