"""What a strategy did: counted, not read off a flag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckpt.patching import Applied


@dataclass(frozen=True, slots=True)
class LayerAudit:
    """One layer since `apply`. Layers that are not replayed are not listed.

    calls: forwards with gradients. replays: times the layer ran again in backward.
    ops: op calls of a forward. ops_kept: of which outputs are held. ops_run_again: summed over all replays.
    kept_bytes: held on the device from the latest forward to its backward, beside the layer's input. away_bytes: held
    off it, the input included.
    undecided: ops that the policy says nothing of (they are recomputed), over all recorded calls.
    unmatched: keys of a plan that found no op.
    demoted: keep decisions that could not make the replay cheaper, by reason.
    """

    index: int
    name: str
    calls: int
    replays: int
    ops: int
    ops_kept: int
    ops_run_again: int
    flops_run_again: int
    kept_bytes: int
    away_bytes: int
    undecided: int
    unmatched: int
    demoted: dict[str, int]
    dynamic_because: str | None


@dataclass(frozen=True)
class Audit:
    """What a strategy did, layer by layer. Printed, it is a table."""

    policy: str
    num_layers: int
    layers: tuple[LayerAudit, ...]
    compiled: str = ""  # where layers are compiled: what was traced, since nothing can be counted

    @property
    def replays(self) -> int:
        return sum(layer.replays for layer in self.layers)

    @property
    def kept_bytes(self) -> int:
        return sum(layer.kept_bytes for layer in self.layers)

    @property
    def flops_run_again(self) -> int:
        return sum(layer.flops_run_again for layer in self.layers)

    def __str__(self) -> str:
        if self.compiled:
            return f"{self.policy}: {self.compiled}"
        lines = [
            f"{self.policy}: {len(self.layers)} of {self.num_layers} layers checkpointed",
            f"{'layer':>5} {'calls':>6} {'replays':>8} {'ops':>5} {'kept':>5} {'run again':>10} {'kept MiB':>9}"
            "  remarks",
        ]
        for layer in self.layers:
            remarks = [f"dynamic: {layer.dynamic_because}"] if layer.dynamic_because else []
            remarks += [f"{layer.unmatched} keys of the plan found no op"] if layer.unmatched else []
            if layer.away_bytes:
                remarks.append(f"{layer.away_bytes / 2**20:.2f} MiB off the device")
            remarks += [f"{n} kept ops not fed: {reason}" for reason, n in layer.demoted.items()]
            lines.append(
                f"{layer.index:>5} {layer.calls:>6} {layer.replays:>8} {layer.ops:>5} {layer.ops_kept:>5} "
                f"{layer.ops_run_again:>10} {layer.kept_bytes / 2**20:>9.2f}  {'; '.join(remarks)}"
            )
        return "\n".join(lines)


def audit_of(applied: Applied) -> Audit:
    """Read the counts of a handle's layers."""
    layers = tuple(
        LayerAudit(
            index=region.index,
            name=region.name,
            calls=region.counts.calls,
            replays=region.counts.replays,
            ops=region.counts.ops_seen,
            ops_kept=region.counts.ops_kept,
            ops_run_again=region.counts.ops_run_again,
            flops_run_again=region.counts.flops_run_again,
            kept_bytes=region.counts.kept_bytes,
            away_bytes=region.counts.away_bytes,
            undecided=region.counts.undecided,
            unmatched=_num_unmatched(applied, region),
            demoted=dict(region.counts.demoted),
            dynamic_because=region.dynamic_because,
        )
        for region in applied.regions
    )
    compiled = "" if applied.compiled is None else str(applied.compiled)
    return Audit(applied.policy.name, applied.num_layers, layers, compiled)


def _num_unmatched(applied: Applied, region) -> int:
    unmatched = getattr(applied.policy, "unmatched", None)
    return 0 if unmatched is None or not region.counts.records else len(unmatched(region.index, region.keys_seen))
