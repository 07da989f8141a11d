"""Degrees of parallelism, a rank's place among them, and the device meshes and groups made of them.

Ranks are numbered with tensor parallelism innermost (the chattiest), then sequence, shard and replicate:

    rank = ((replicate * num_shard + shard) * num_sequence + sequence) * num_tensor + tensor

Ranks of one sequence hold different tokens of the same rows, so to parameters they are data-parallel like any other:
FSDP2 shards over `shard` and `sequence` together. Knows no model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

NAMES = ("replicate", "shard", "sequence", "tensor")


@dataclass(frozen=True)
class Place:
    """Where one rank stands. data: which rows it trains on. tokens: which tokens; ranks that share it compute alike."""

    data: int
    sequence: int
    tensor: int
    tokens: int


@dataclass(frozen=True)
class Degrees:
    """How many ranks each kind of parallelism spans; their product is the number of ranks."""

    replicate: int = 1
    shard: int = 1
    sequence: int = 1
    tensor: int = 1

    @classmethod
    def resolve(cls, wanted: Mapping[str, int], num_ranks: int) -> Degrees:
        """Fill in a degree of -1 and check that all ranks are used.

        Raises ValueError: an unknown name, or degrees whose product is not the number of ranks.
        """
        if unknown := set(wanted) - set(NAMES):
            raise ValueError(f"parallel.{min(unknown)} is unknown; there are {', '.join(NAMES)}.")
        degrees = dict.fromkeys(NAMES, 1) | dict(wanted)
        open_ended = [name for name, degree in degrees.items() if degree == -1]
        if len(open_ended) > 1:
            raise ValueError("parallel: only one degree can be -1, the ranks that the others leave.")
        product = math.prod(degree for degree in degrees.values() if degree != -1)
        spelled = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree not in (1, -1)) or "1"
        if open_ended:
            if num_ranks % product:
                raise ValueError(
                    f"{num_ranks} ranks cannot be divided by {spelled} = {product}. Start a multiple of {product}."
                )
            degrees[open_ended[0]] = num_ranks // product
        elif product != num_ranks:
            there = "is one" if num_ranks == 1 else f"are {num_ranks}"
            raise ValueError(
                f"the parallel degrees, {spelled}, need {product} ranks, and there {there}. Start {product} "
                "(torchrun --nproc-per-node), or set parallel.shard=-1 to take all there are."
            )
        return cls(**degrees)

    @property
    def num_ranks(self) -> int:
        return self.replicate * self.shard * self.sequence * self.tensor

    @property
    def num_data(self) -> int:
        """Ranks with rows of their own."""
        return self.replicate * self.shard

    @property
    def num_tokens(self) -> int:
        """Ranks with tokens of their own: gradients are summed over these."""
        return self.replicate * self.shard * self.sequence

    @property
    def shards_parameters(self) -> bool:
        """Whether FSDP2 is needed: parameters or gradients are shared between ranks with different tokens."""
        return self.num_tokens > 1

    def place(self, rank: int) -> Place:
        """Return where `rank` stands."""
        tokens, tensor = divmod(rank, self.tensor)
        data, sequence = divmod(tokens, self.sequence)
        return Place(data, sequence, tensor, tokens)

    def to_dict(self) -> dict[str, int]:
        return asdict(self)

    def __str__(self) -> str:
        return " x ".join(f"{name} {degree}" for name, degree in asdict(self).items() if degree > 1) or "1 rank"


class Layout:
    """The degrees over the ranks of the default process group, with the meshes and groups that they need."""

    def __init__(self, degrees: Degrees, device_type: str):
        self.degrees = degrees
        self.device_type = device_type
        self.place = degrees.place(dist.get_rank())
        shape = (degrees.replicate, degrees.shard * degrees.sequence, degrees.tensor)
        self._mesh: DeviceMesh | None = init_device_mesh(
            device_type, shape, mesh_dim_names=("replicate", "shard", "tensor")
        )
        self._sequence: DeviceMesh | None = None
        if degrees.sequence > 1:
            shape = (degrees.num_data, degrees.sequence, degrees.tensor)
            self._sequence = init_device_mesh(device_type, shape, mesh_dim_names=("data", "sequence", "tensor"))

    @property
    def data_mesh(self) -> DeviceMesh:
        """What parameters are sharded over: (shard,), or (replicate, shard)."""
        return self._mesh["replicate", "shard"] if self.degrees.replicate > 1 else self._mesh["shard"]

    @property
    def tensor_mesh(self) -> DeviceMesh:
        return self._mesh["tensor"]

    @property
    def sequence_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the parts of the same rows; None without sequence parallelism."""
        return None if self._sequence is None else self._sequence["sequence"].get_group()

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum a plain tensor, in place, over all ranks with tokens of their own; the same on every rank."""
        dist.all_reduce(values)
        return values.div_(self.degrees.tensor) if self.degrees.tensor > 1 else values

    def close(self) -> None:
        """Let go of the meshes: a process that keeps one beyond its process group may abort at exit."""
        self._mesh = self._sequence = None


def make_layout(wanted: Mapping[str, int], device: torch.device | str = "cpu") -> Layout:
    """Make the layout of the default process group's ranks. Raises ValueError as `Degrees.resolve` does."""
    return Layout(Degrees.resolve(wanted, dist.get_world_size()), torch.device(device).type)
