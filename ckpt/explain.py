"""Why a layer keeps what it keeps: its ops with their two price tags and what is done with each, by kind of layer.

The price tags of an op: the bytes that keeping its results takes from forward to backward, and the FLOPs and seconds of
making them again. Owns the rows; how they look is the caller's.

    for kind in explain(prediction, device=find("h100")):
        print(kind.name, kind.layers, kind.kept_bytes, kind.replay_flops)
        for row in kind.ops: print(row.op, row.num_bytes, row.flops, row.seconds, row.decision, row.why)
    plan_of(prediction).save("plan.json")
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from ckpt.engine.program import Program
from ckpt.engine.record import ARG, Record
from ckpt.hardware import Device
from ckpt.plan import Decision, LayerPlan, Plan, Policy, Rule
from ckpt.solver.price import Price, SecondsPrice

# What is done with an op's results. FREE: nobody needs them again, so they are neither kept nor made again.
KEEP, OFFLOAD, RECOMPUTE, FREE = "keep", "offload", "recompute", "free"


class Ran(Protocol):
    """What is explained: a Prediction, or a Simulated."""

    programs: Mapping[int, Program]
    policy: Policy | None
    num_layers: int
    layer_kinds: Sequence[str]


@dataclass(frozen=True)
class OpRow:
    """One op call of a layer; views and ops that make nothing are left out.

    op: its key. num_bytes: of its results. flops, seconds: to run it once (seconds None without a device). is_saved:
    whether autograd saves its results. times_run_again: in the replay of one layer call. decision: keep, offload,
    recompute or free. why: in a few words.
    """

    op: str
    num_bytes: int
    flops: int
    seconds: float | None
    is_saved: bool
    times_run_again: int
    decision: str
    why: str

    @property
    def flops_per_byte(self) -> float:
        """FLOPs that keeping one byte saves: what is kept first."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0


@dataclass(frozen=True)
class LayerKind:
    """Layers that do the same, and one of them op by op.

    rule: "replayed", "kept whole", "segments of N". input_bytes: the layer's input, which is held for a replay.
    kept_bytes, away_bytes: held beside it, on the device and off it. replay_flops, replay_seconds: of one layer's
    replays.
    """

    name: str
    layers: tuple[int, ...]
    rule: str
    input_bytes: int
    kept_bytes: int
    away_bytes: int
    replay_flops: int
    replay_seconds: float | None
    ops: tuple[OpRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)


def explain(
    ran: Ran, *, device: Device | None = None, records: Mapping[int, Record] | None = None, price: Price | None = None
) -> list[LayerKind]:
    """List the kinds of layer in order of their first.

    ran: a Prediction or a Simulated. device: for seconds. records: what layers do that are not replayed, by number, as
    a run of "full" knows it (`simulator.run("full").programs[i].record`); without, such layers have no rows. price: of
    one op, in seconds, in place of the device's roofline.
    """
    price = price or (None if device is None else SecondsPrice(device))
    rules = [_rule(ran, i) for i in range(ran.num_layers)]
    known: dict[int, list[OpRow]] = {}  # by record: layers that were traced once share theirs
    found: dict[tuple, list[int]] = {}
    for i in range(ran.num_layers):
        program = ran.programs.get(i)
        record = program.record if program is not None else (records or {}).get(i)
        if record is None:
            rows = []
        else:
            key = id(program) if program is not None else id(record)
            rows = known.setdefault(key, _rows(record, program, price))
        found.setdefault((ran.layer_kinds[i], _said(rules, i), tuple(rows)), []).append(i)
    return [_kind(ran, name, said, rows, layers) for (name, said, rows), layers in found.items()]


def plan_of(ran: Ran, source: dict[str, Any] | None = None) -> Plan:
    """Return the decisions of a run as a Plan, by key, as `Applied.plan` does after a real step.

    Raises ValueError for a run without a policy (strategy None on a model that has none in force).
    """
    if ran.policy is None:
        raise ValueError("no strategy was in force, so there is no plan: predict with a strategy")
    layers = []
    for i in range(ran.num_layers):
        rule, program = ran.policy.rule(i, ran.num_layers), ran.programs.get(i)
        if not rule.replay:
            layers.append(LayerPlan(replay=False))
            continue
        decisions: dict[Any, Decision] = {}
        for op in program.record.ops if program is not None else ():
            decision = ran.policy.decide(i, op) if op.makes else None
            if decision is not None:
                decisions[op.key] = decision
        layers.append(LayerPlan(True, rule.segment, rule.inner, rule.offload_input, decisions))
    own = {name: getattr(ran.policy, name, None) for name in ("offload", "loss", "tile_mlp")}
    return Plan(layers, ran.policy.name, dict(source or {}), **own)


def _rule(ran: Ran, index: int) -> Rule:
    if ran.policy is not None:
        return ran.policy.rule(index, ran.num_layers)
    return Rule(replay=index in ran.programs)


def _said(rules: Sequence[Rule], index: int) -> str:
    rule = rules[index]
    if not rule.replay:
        return "kept whole"
    if rule.segment is None:
        return "replayed, input offloaded" if rule.offload_input else "replayed"
    members = [i for i, other in enumerate(rules) if other.segment == rule.segment]
    first = ", first" if members[0] == index and len(members) > 1 else ""
    return f"segment of {len(members)}{first}, inner {rule.inner}"


def _kind(ran: Ran, name: str, said: str, rows: tuple[OpRow, ...], layers: list[int]) -> LayerKind:
    program = ran.programs.get(layers[0])
    again = [row for row in rows if row.times_run_again]
    seconds = None
    if rows and rows[0].seconds is not None:
        seconds = sum(row.seconds * row.times_run_again for row in again)
    held_input = 0
    if program is not None and ("segment" not in said or "first" in said or "of 1" in said):
        record = program.record
        held_input = sum(size for size, made in zip(record.storage_bytes, record.producer, strict=False) if made == ARG)
    return LayerKind(
        name=name,
        layers=tuple(layers),
        rule=said,
        input_bytes=held_input,
        kept_bytes=program.kept_bytes if program is not None else sum(r.num_bytes for r in rows if r.decision == KEEP),
        away_bytes=0 if program is None else program.away_bytes,
        replay_flops=0 if program is None else program.replay_flops,
        replay_seconds=seconds,
        ops=rows,
    )


def _rows(record: Record, program: Program | None, price: Price | None) -> list[OpRow]:
    saved = {s.storage for s in record.saved}
    runs = [i for stage in program.stages for i in stage.runs] if program is not None else []
    rows = []
    for op in record.ops:
        if op.is_view or not op.makes or not op.num_bytes:
            continue
        is_saved, times = any(s in saved for s in op.makes), runs.count(op.index)
        if program is None:
            decision = KEEP if is_saved else FREE
        elif op.index in program.kept_ops:
            decision = OFFLOAD if any(s in program.away for s in op.makes) else KEEP
        else:
            decision = RECOMPUTE if times else FREE
        row = OpRow(
            op=str(op.key),
            num_bytes=op.num_bytes,
            flops=op.flops,
            seconds=None if price is None else price(op, record),
            is_saved=is_saved,
            times_run_again=times,
            decision=decision,
            why="",
        )
        rows.append(_with_reason(row, None if program is None else program.demoted.get(op.index), program is None))
    return rows


def _with_reason(row: OpRow, demoted: str | None, is_whole: bool) -> OpRow:
    price = f"{row.flops_per_byte:,.0f} FLOPs a byte" if row.flops else "no FLOPs, bandwidth alone"
    if demoted is not None:
        why = f"was to be kept: {demoted}"
    elif row.decision == FREE:
        why = "nobody reads it again"
    elif is_whole:
        why = "its layer is not replayed"
    elif row.decision == RECOMPUTE and not row.is_saved:
        why = f"{price}; others are made from it"
    else:
        why = price
    return OpRow(**{**asdict(row), "why": why})
