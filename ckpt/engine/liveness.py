"""Which ops a replay must run: by storage, backwards from what backward asks for.

Owns the analysis of a record alone; what is done with it (placeholders, feeding) is the program's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpt.engine.outside import is_outside
from ckpt.engine.record import Op, Record
from ckpt.plan import Decision

# A layer is replayed in parts only if the largest part is at most this share of the whole: each part costs some
# elementwise work again.
WORTH_SPLITTING = 0.8
# Below this many dropped bytes a layer is replayed whole: walking its code again would cost more than it frees.
MIN_BYTES_TO_SPLIT = 8 * 2**20


class Analysis:
    """Which storages are kept, and which of them may stand in for their op on replay."""

    def __init__(self, record: Record, decisions: Mapping[int, Decision]):
        chosen = {op.index: decisions.get(op.index, Decision.RECOMPUTE) for op in record.ops if op.makes}
        self.kept = {s for i, d in chosen.items() if d is not Decision.RECOMPUTE for s in record.ops[i].makes}
        self.demoted: dict[int, str] = {}
        self.readers, self.writers = record.once(Record.reads_and_writes)
        self.feedable = set()
        for s in self.kept:
            reason = self._not_feedable(record, s)
            if reason is None:
                self.feedable.add(s)
            else:
                self.demoted[record.producer[s]] = reason
        # What is written in place is not sent away: its copy would be of some moment in between.
        self.away = {s for s in self.kept if chosen[record.producer[s]] is Decision.OFFLOAD and not self.writers.get(s)}

    def _not_feedable(self, record: Record, storage: int) -> str | None:
        if record.custom_functions:
            return "a Python autograd.Function takes part in this layer"
        if record.bypasses:
            return f"values leave torch's sight in this layer ({record.bypasses[0]})"
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


@dataclass
class Liveness:
    """What a replay for some saved tensors does. runs: by op index. fed: by op index, the storages that stand in for
    it. real: storages that have data."""

    runs: dict[int, bool] = field(default_factory=dict)
    fed: dict[int, set[int]] = field(default_factory=dict)
    real: set[int] = field(default_factory=set)

    @property
    def fed_storages(self) -> set[int]:
        return set().union(*self.fed.values())


def _musts(record: Record) -> list[tuple[Op, bool, tuple[int, ...]]]:
    """Return each op, whether it runs in every replay, and what it writes inside the layer."""
    found = []
    for op in record.ops:
        written = tuple(s for s in op.writes if not is_outside(record, s))
        must = (
            op.is_data_dependent
            or (not op.writes and all(o is None for o in op.outputs))
            or (len(op.writes) > 1 and bool(written))  # all of it or nothing
        )
        found.append((op, must, written))
    return found


def liveness(record: Record, analysis: Analysis, wanted: Iterable[int]) -> Liveness:
    """Return what must run to make the saved tensors `wanted` (pack numbers) again."""
    saved = record.saved
    end = max(saved[n].at for n in wanted)
    wanted_after: dict[int, list[int]] = defaultdict(list)
    for n in wanted:
        wanted_after[saved[n].at].append(saved[n].storage)
    for at, storage in record.python_reads:
        wanted_after[at].append(storage)
    found = Liveness()
    needed: set[int] = set()
    random_follows = False
    feedable = analysis.feedable
    for op, must_run, written in reversed(record.once(_musts)[:end]):
        if op.index + 1 in wanted_after:
            needed.update(wanted_after[op.index + 1])
        is_drawn = op.is_random and random_follows
        asked = needed.intersection(op.makes) if op.makes else None
        if asked and asked <= feedable and not is_drawn:
            found.fed[op.index] = asked
            found.real |= asked
            needed -= asked
            found.runs[op.index] = False
            continue
        runs = must_run or bool(asked) or is_drawn
        if not runs and written and feedable.isdisjoint(op.writes):
            runs = not needed.isdisjoint(written)
        found.runs[op.index] = runs
        if runs:
            needed.update(op.reads)
            found.real.update(op.makes)
            random_follows = random_follows or op.is_random
        needed.difference_update(op.makes)
    found.real.update(s for s, p in enumerate(record.producer) if p < 0)
    return found


def split_stages(record: Record, analysis: Analysis, dropped: list[int]) -> list[frozenset[int]]:
    """Split the dropped saved tensors into parts to be replayed apart, where that repeats no FLOPs.

    Backward asks for the last part first; the earlier parts are not alive while it works. A cut lies where the layer
    goes from one of its child modules to another. Without a kept tensor behind the attention, say, only the norm in
    front of it can be made again for nothing; with one, attention and MLP part.
    """
    whole = frozenset(dropped)
    if not whole or record.is_opaque or record.has_random or record.is_data_dependent:
        return [whole]
    if sum(record.storage_bytes[s] for s in {record.saved[n].storage for n in whole}) < MIN_BYTES_TO_SPLIT:
        return [whole]
    flops: dict[frozenset[int], int] = {}

    def flops_of(part: frozenset[int]) -> int:
        if part not in flops:
            runs = liveness(record, analysis, part).runs
            flops[part] = sum(record.ops[i].flops for i, live in runs.items() if live)
        return flops[part]

    def bytes_of(part: frozenset[int]) -> int:
        return sum(record.storage_bytes[s] for s in {record.saved[n].storage for n in part})

    def split(part: frozenset[int]) -> list[frozenset[int]]:
        best, limit = None, WORTH_SPLITTING * bytes_of(part)
        for cut in cuts:
            front = frozenset(n for n in part if record.saved[n].at <= cut)
            back = part - front
            if not front or not back:
                continue
            larger = max(bytes_of(front), bytes_of(back))
            if larger < limit and flops_of(front) + flops_of(back) <= flops_of(part):
                best, limit = (front, back), larger
        return [part] if best is None else [*split(best[0]), *split(best[1])]

    places = [op.key.path.split(".")[0] for op in record.ops]
    cuts = [i for i in range(1, len(places)) if places[i] != places[i - 1]]
    return split(whole)
