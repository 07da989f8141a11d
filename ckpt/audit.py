"""What a strategy did: counted, not read off a flag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    middle: key of the op whose output lies between the layer's halves and is held for them to be replayed apart; None
    if that was not asked for or there is none: no_middle_because.
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
    middle: str | None = None
    no_middle_because: str | None = None


@dataclass(frozen=True, slots=True)
class TileAudit:
    """The token-wise part of one layer that runs in tiles.

    modules: through which the hidden states pass. num_passes: how often the part ran for each token, backward included:
    2, or 3 where something behind it needs its output. only_part: the layer keeps its activations, and this part alone
    is replayed.
    """

    index: int
    modules: tuple[str, ...]
    num_tiles: int
    num_passes: float
    only_part: bool


@dataclass(frozen=True, slots=True)
class OffloadAudit:
    """What lived off the device since `apply`: moved_bytes in all, peak_bytes at once; stall_seconds that compute
    waited for it to come back."""

    target: str
    moved_bytes: int
    peak_bytes: int
    stall_seconds: float


@dataclass(frozen=True)
class Audit:
    """What a strategy did, layer by layer. Printed, it is a table.

    tiles: the parts that run in tiles; not_tiled: why other layers' do not; num_norms_tiled: norms that stand alone.
    offload: None if nothing may live off the device.
    """

    policy: str
    num_layers: int
    layers: tuple[LayerAudit, ...]
    tiles: tuple[TileAudit, ...] = ()
    not_tiled: Mapping[int, str] = field(default_factory=dict)
    num_norms_tiled: int = 0
    offload: OffloadAudit | None = None
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
            if layer.middle:
                remarks.append(f"halves replayed apart, at {layer.middle}")
            elif layer.no_middle_because:
                remarks.append(f"halves replayed together: {layer.no_middle_because}")
            remarks += [f"{n} kept ops not fed: {reason}" for reason, n in layer.demoted.items()]
            lines.append(
                f"{layer.index:>5} {layer.calls:>6} {layer.replays:>8} {layer.ops:>5} {layer.ops_kept:>5} "
                f"{layer.ops_run_again:>10} {layer.kept_bytes / 2**20:>9.2f}  {'; '.join(remarks)}"
            )
        return "\n".join([*lines, *self._tile_lines(), *self._offload_lines()])

    def _tile_lines(self) -> list[str]:
        """Say alike layers together."""
        said: dict[str, list[int]] = {}
        for tile in self.tiles:
            line = f"{' > '.join(tile.modules)} in {tile.num_tiles} tiles, run {tile.num_passes:.3g} times"
            line += ", as what lies behind it needs its output" if tile.num_passes > 2 else ""
            line += "; the layer keeps its activations, this part alone is replayed" if tile.only_part else ""
            said.setdefault(line, []).append(tile.index)
        for index, reason in self.not_tiled.items():
            said.setdefault(f"not tiled: {reason}", []).append(index)
        lines = [f"layers {ranges(indices)}: {line}" for line, indices in said.items()]
        return [*lines, f"{self.num_norms_tiled} norms in tiles"] if self.num_norms_tiled else lines

    def _offload_lines(self) -> list[str]:
        away = self.offload
        if away is None:
            return []
        return [
            f"offloaded to {away.target}: {away.moved_bytes / 2**20:.1f} MiB in all, {away.peak_bytes / 2**20:.1f} MiB "
            f"at once; waited {away.stall_seconds:.3f} s for it"
        ]


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
            middle=None if region.middle_key is None else str(region.middle_key),
            no_middle_because=region.no_middle_because,
        )
        for region in applied.regions
    )
    compiled = "" if applied.compiled is None else str(applied.compiled)
    replayed = {region.index for region in applied.regions}
    tiles = tuple(
        TileAudit(index, chain.names, chain.num_tiles, chain.num_passes, only_part=index not in replayed)
        for index, chain in applied.chains.items()
    )
    return Audit(
        applied.policy.name,
        applied.num_layers,
        layers,
        tiles=tiles,
        not_tiled=dict(applied.not_tiled),
        num_norms_tiled=len(applied.norms),
        offload=_offload_of(applied),
        compiled=compiled,
    )


def _offload_of(applied: Applied) -> OffloadAudit | None:
    store = applied.store
    if store is None:
        return None
    return OffloadAudit(store.target, store.moved_bytes, store.peak_bytes, store.stall_seconds)


def ranges(numbers: Sequence[int]) -> str:
    """Write rising numbers as ranges: 0-3, 7."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _num_unmatched(applied: Applied, region) -> int:
    unmatched = getattr(applied.policy, "unmatched", None)
    return 0 if unmatched is None or not region.counts.records else len(unmatched(region.index, region.keys_seen))
