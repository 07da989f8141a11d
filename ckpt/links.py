"""How long ranks take to talk: the links between devices, and what of it a step cannot hide.

Owns the link table, the time of one collective and the order in which a step's ops and collectives run. Knows op costs
(`ckpt/costs.py`), no model.

    links = Links(node=LINKS["nvlink4"])
    links.seconds(collective)
    step_time(rows, op_time, links).exposed

The model of a step, two queues that run side by side:

- compute runs the ops one after the other. A collective whose result the layer waits for (tensor and sequence
  parallelism) runs there too, wholly exposed, as often as a replay repeats it;
- FSDP2's gathers and reductions run on a queue of their own, one at a time. A layer's gather starts when the gather
  before it has been taken over by its layer, so that it has one layer's compute to hide behind; the layer waits for
  the rest. A reduction starts when its gradients are there; the next one's are not copied before it is done; the
  optimizer waits for the last.

What compute waits is the exposed time. Collectives are bandwidth and a fixed latency; links are shared by nobody else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ckpt.collectives import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, Collective

if TYPE_CHECKING:
    from ckpt.costs import OpCost

# Bytes/s that one device sends, and at the same time receives. Data sheets of NVIDIA's A100 (NVLink 3, 600 GB/s both
# ways together), H100 and H200 (NVLink 4, 900), B200 (NVLink 5, 1,800); PCIe 4.0 and 5.0 x16 (PCI-SIG); one 400 Gb/s
# port a device between nodes (InfiniBand NDR or 400GbE, as in the DGX H100's data sheet).
LINKS: dict[str, float] = {
    "nvlink3": 300e9,
    "nvlink4": 450e9,
    "nvlink5": 900e9,
    "pcie4": 31.5e9,
    "pcie5": 63e9,
    "400g": 50e9,
}
NODE_RANKS = 8
_SHARE = 0.8  # of these that NCCL reaches on large messages; assumed
_LATENCY_SECONDS = 2e-5  # of one collective; assumed


@dataclass(frozen=True)
class Links:
    """What connects the ranks. node, network: bytes/s one way of one device, to others of its node and beyond it.
    node_ranks: ranks of one node; they are numbered node by node."""

    node: float
    network: float = LINKS["400g"]
    node_ranks: int = NODE_RANKS
    share: float = _SHARE
    latency_seconds: float = _LATENCY_SECONDS

    def seconds(self, collective: Collective) -> float:
        """Estimate one collective's time.

        Rings (all-gather, reduce-scatter, all-reduce) over several nodes enter and leave a node through the ports of
        all the group's m ranks there: min(node, m * network). In an all-to-all over n ranks each sends (n - m) / n of
        its bytes through its own port, beside (m - 1) / n within its node.
        """
        n = len(collective.ranks)
        m = max(Counter(rank // self.node_ranks for rank in collective.ranks).values())
        if collective.kind == ALL_TO_ALL:
            part = collective.num_bytes / n
            moving = max((m - 1) * part / self.node, (n - m) * part / self.network)
        else:
            moving = collective.sent_bytes / (self.node if m == n else min(self.node, m * self.network))
        return moving / self.share + self.latency_seconds

    def describe(self, num_ranks: int) -> str:
        """Say what is assumed of the links between so many ranks."""
        said = f"{min(num_ranks, self.node_ranks)} ranks a node at {self.node * self.share / 1e9:.0f} GB/s each way"
        if num_ranks > self.node_ranks:
            said += f", {self.network * self.share / 1e9:.0f} GB/s a rank between nodes"
        return f"{said} ({self.share:.0%} of the data sheets')"


class StepTime(NamedTuple):
    """Seconds of a step: in all, of its ops, of its collectives, and of what compute waits for them."""

    seconds: float
    compute: float
    communication: float

    @property
    def exposed(self) -> float:
        """Seconds that compute waits for other ranks."""
        return self.seconds - self.compute


def step_time(rows: Iterable[OpCost], op_time: Callable[[OpCost], float], links: Links) -> StepTime:
    """Run the two queues over the ops of a step, in the order of issue. op_time: of an op that stays on its rank."""
    rows = list(rows)
    kinds = _side_queue(rows)
    last_reduction = max((i for i, kind in kinds.items() if kind != ALL_GATHER), default=-1)
    queues = _Queues()
    compute = communication = 0.0
    for i, row in enumerate(rows):
        seconds = (op_time(row) if row.collective is None else links.seconds(row.collective)) * row.weight
        if row.collective is None:
            compute += seconds
        else:
            communication += seconds
        if i not in kinds:
            queues.compute(row.op, seconds)
        elif kinds[i] == ALL_GATHER:
            queues.gather(seconds)
        else:
            queues.reduce(seconds)
        if i == last_reduction:
            queues.wait_for_reductions()
    return StepTime(queues.now, compute, communication)


class _Queues:
    """The clocks of the two queues. now: of compute. free: when the other queue is done with what it was given."""

    def __init__(self) -> None:
        self.now = self.free = 0.0
        self._taken_over = self._reduced = 0.0
        self._gathers: list[float] = []  # ends of those that no layer has taken over yet

    def compute(self, op: str, seconds: float) -> None:
        if op == _TAKE_OVER and self._gathers:
            self.now = self._taken_over = max(self.now, self._gathers.pop(0))
        elif op == _COPY_GRADIENTS:
            self.wait_for_reductions()
        self.now += seconds

    def gather(self, seconds: float) -> None:
        self.free = max(self.free, self._taken_over) + seconds
        self._gathers.append(self.free)

    def reduce(self, seconds: float) -> None:
        self.free = self._reduced = max(self.free, self.now) + seconds

    def wait_for_reductions(self) -> None:
        self.now = max(self.now, self._reduced)


# FSDP2's ops that copy a gathered layer out of its buffer, and gradients into theirs (torch 2.11 to 2.13).
_TAKE_OVER = "fsdp.split_with_sizes_copy"
_COPY_GRADIENTS = "fsdp.chunk_cat"


def _side_queue(rows: Sequence[OpCost]) -> dict[int, str]:
    """Return place and kind of the collectives that run beside compute."""
    found = {i: row.collective for i, row in enumerate(rows) if row.collective is not None}
    # The backward of tensor parallelism reduces by c10d ops as FSDP2 does; its forward tells whose they are.
    awaited = {c.ranks for c in found.values() if c.is_awaited and c.kind == ALL_REDUCE}
    return {
        i: c.kind
        for i, c in found.items()
        if not c.is_awaited and not (c.kind == ALL_REDUCE and c.ranks in awaited) and c.kind != ALL_TO_ALL
    }
