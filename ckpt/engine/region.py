"""One decoder layer under a policy: the function that is called in place of its forward.

Holds the layer's programs, one a signature, and counts what really happens. Knows nothing of how it was put in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ckpt.engine.call import Call
from ckpt.engine.context import Surroundings
from ckpt.engine.frame import Frame
from ckpt.engine.halves import middle_op
from ckpt.engine.keys import OpKey
from ckpt.engine.media import NoRoom
from ckpt.engine.ops import Unreplayable
from ckpt.engine.program import Program, build_program
from ckpt.engine.record import Op, Record
from ckpt.engine.segments import Link, SegmentTail
from ckpt.engine.store import Store
from ckpt.plan import Decision

# Batches of many lengths each need a record of their own; beyond this many the oldest is forgotten and recorded again.
MAX_PROGRAMS = 32


@dataclass
class Counts:
    """What happened in one layer since `apply` (or since the last reset)."""

    calls: int = 0
    records: int = 0
    replays: int = 0
    ops_run_again: int = 0
    flops_run_again: int = 0
    ops_seen: int = 0
    ops_kept: int = 0
    kept_bytes: int = 0  # of the latest call, on the device
    away_bytes: int = 0  # of the latest call, off the device, its input included
    demoted: Counter = field(default_factory=Counter)
    undecided: int = 0


class Region:
    """Callable with the signature of transformers' `_gradient_checkpointing_func`: (function, *args)."""

    def __init__(self, layer: torch.nn.Module, index: int, name: str, decide: Callable[[int, Op], Decision | None]):
        self.layer = layer
        self.index = index
        self.name = name
        self.decide = decide
        self.segment: SegmentTail | None = None
        self.is_last_of_segment = False
        self.store: Store | None = None  # where offloaded tensors go
        self.offloads_input = False
        self.middle = Decision.RECOMPUTE  # what is done with the tensor between the layer's halves
        self.num_alike = 1  # layers that send as much away as this one, itself included
        self.keep_cache = bool(getattr(layer, "_can_checkpoint_with_cache", False))
        self.dynamic_because: str | None = None
        self._fresh()

    @property
    def surroundings(self) -> Surroundings:
        """Made at first use: while a model is copied, its layers are not complete."""
        if self._surroundings is None:
            self._surroundings = Surroundings(self.layer)
        return self._surroundings

    def _fresh(self) -> None:
        self.counts = Counts()
        self.programs: dict[tuple, Program] = {}
        self.latest: Program | None = None
        self.op_names: set[str] = set()
        self.keys_seen: set = set()
        self.middle_key: OpKey | None = None  # of the op that makes it, in the latest record
        self.no_middle_because: str | None = None
        self.matched = 0  # ops that the policy keeps or offloads, over all records
        self._surroundings: Surroundings | None = None

    def __getstate__(self):
        # Programs hold placeholders and weak references; a copied or unpickled layer records anew.
        transient = ("programs", "latest", "counts", "_surroundings", "op_names", "keys_seen", "matched")
        transient += ("middle_key", "no_middle_because")
        return {k: v for k, v in self.__dict__.items() if k not in transient}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self._fresh()

    def __call__(self, function, *args):
        call = Call(function, args, self.keep_cache)
        settings = self.surroundings.capture(call.device.type)
        tensors = call.tensors()
        linked = None if self.segment is None else self.segment.find(tensors)
        position = None if linked is None else linked.position
        if position is None and self.offloads_input:
            position = next((k for k, t in enumerate(tensors) if t.is_floating_point() and call.is_direct(t)), None)
        signature = (call.signature(), settings, position, self._grad_flags())
        self.counts.calls += 1
        program = None if self.dynamic_because else self.programs.get(signature)
        frame = Frame(self, call, settings, program)
        if linked is not None:
            if not call.link(tensors[position], Link(linked.frame, linked.path, linked.inner)):
                position = None
        elif position is not None:
            self.counts.away_bytes = tensors[position].untyped_storage().nbytes()
            call.link(tensors[position], frame.send_input_away(tensors[position]))
        del tensors
        if program is not None:
            output = frame.run()
        else:
            output = self._record(frame, signature, frozenset() if position is None else frozenset([position]))
        if self.segment is not None:
            self.segment.advance(frame, output)
        if frame.program is not None:
            self.counts.kept_bytes = frame.program.kept_bytes
            self.counts.away_bytes = frame.program.away_bytes + (self.counts.away_bytes if self.offloads_input else 0)
        return output

    def _record(self, frame: Frame, signature: tuple, dropped: frozenset[int]):
        self.counts.records += 1
        try:
            output, record, decisions = frame.record(self._decision)
            if self.has_middle:
                self._decide_on_middle(record, decisions, dropped)
            program = build_program(record, decisions, dropped)
        except Unreplayable as error:
            raise Unreplayable(f"{self.name}: {error}") from None
        if self.store is not None:
            self._check_room(program)
        frame.settle(program)
        self.latest = program
        self.op_names.update(op.key.op for op in record.ops)
        self.keys_seen.update(op.key for op in record.ops)
        self.counts.ops_seen = len(record.ops)
        self.counts.ops_kept = len(program.kept_ops)
        for reason in program.demoted.values():
            self.counts.demoted[reason] += 1
        if record.is_data_dependent:
            self.becomes_dynamic("its op sequence depends on data")
        elif self.dynamic_because is None:
            if len(self.programs) >= MAX_PROGRAMS:
                self.programs.pop(next(iter(self.programs)))
            self.programs[signature] = program
        return output

    def _check_room(self, program: Program) -> None:
        """Raise NoRoom, in the first of the layers, if all of them together would send more away than there is room
        for."""
        own = program.away_bytes + (self.counts.away_bytes if self.offloads_input else 0)
        try:
            self.store.check_room(own * self.num_alike)
        except NoRoom as error:
            raise NoRoom(f"{error} ({self.num_alike} layers offload {own / 2**20:.1f} MiB each.)") from None

    @property
    def has_middle(self) -> bool:
        """Whether the tensor between the halves is to be held, where there is one."""
        return self.middle is not Decision.RECOMPUTE and self.dynamic_because is None

    def _decide_on_middle(self, record: Record, decisions: dict[int, Decision], dropped: frozenset[int]) -> None:
        index, self.no_middle_because = middle_op(record, decisions, dropped)
        self.middle_key = None if index is None else record.ops[index].key
        if index is not None:
            decisions[index] = self.middle

    def _decision(self, op: Op) -> Decision:
        decision = self.decide(self.index, op)
        if decision is not None and type(decision) is not Decision:
            decision = _as_decision(decision, f"{self.name}: the policy's decide() on {op.key}")
        if decision is None:
            self.counts.undecided += 1
        elif decision is not Decision.RECOMPUTE:
            self.matched += 1
        if decision is Decision.OFFLOAD and self.store is None:
            raise ValueError(f"{self.name}: the policy offloads {op.key} and names no target, host or disk")
        return decision or Decision.RECOMPUTE

    def _grad_flags(self) -> tuple[bool, ...]:
        return tuple(p.requires_grad for p in self.layer.parameters())

    def becomes_dynamic(self, reason: str) -> None:
        """From now on every call is recorded: slower, and right whatever the layer does."""
        if self.dynamic_because is None:
            self.dynamic_because = reason
            self.programs.clear()

    def count_replay(self, stage, mode, program: Program | None, is_first: bool = True) -> None:
        """Count a replay; a layer replayed in parts counts once, with its first part."""
        counts = self.counts
        counts.replays += is_first
        if stage is not None:
            counts.ops_run_again += mode.ops_run if mode is not None else len(stage.runs)
            counts.flops_run_again += stage.flops
        elif program is not None:
            counts.ops_run_again += len(program.record.ops)
            counts.flops_run_again += sum(op.flops for op in program.record.ops)


def _as_decision(answer: object, what: str) -> Decision:
    """Return what a user's policy means: a Decision may be given by its name."""
    try:
        return Decision(answer)
    except ValueError:
        raise ValueError(f"{what} returned {answer!r}; it is keep, recompute, offload or None") from None
