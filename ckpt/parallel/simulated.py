"""One rank of many, simulated in one process: a fake process group, and a fake model spread over its ranks.

What a rank holds and gathers is then what FSDP2, the tensor-parallel plan and the exchange really do, on tensors
without data. Collectives of the group return at once. One such group can be open at a time, and none beside a real one.

    ranks = FakeRanks({"shard": 8})
    spread(model, ranks.layout, work)
    ...
    ranks.close()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod

import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh

from ckpt.parallel.mesh import Degrees, Layout
from ckpt.parallel.shard import cast, shard
from ckpt.parallel.tensor import split_tensors
from ckpt.parallel.ulysses import attend_in_sequence_shards
from ckpt.precision import Precision, prepare
from ckpt.workload import Workload


class FakeRanks:
    """The process group and layout of ranks that are not there; this process is rank 0. Close it."""

    def __init__(self, mesh: Mapping[str, int]):
        if dist.is_initialized():
            if dist.get_backend() != "fake":
                raise ValueError(
                    "a workload with a mesh is simulated on a process group of its own, and this process has joined "
                    "one already: predict before init_process_group, or in another process."
                )
            dist.destroy_process_group()  # that of an earlier simulation, which nobody closed
        from torch.testing._internal.distributed.fake_pg import FakeStore

        num_ranks = prod(mesh.values())
        dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
        try:
            self.layout: Layout | None = Layout(Degrees.resolve(mesh, num_ranks), "cpu")
        except BaseException:
            dist.destroy_process_group()
            raise

    def close(self) -> None:
        """Take the group down. Closing twice does nothing."""
        if self.layout is not None:
            self.layout.close()
            self.layout = None
            if dist.is_initialized() and dist.get_backend() == "fake":
                dist.destroy_process_group()


def spread(model: nn.Module, layout: Layout, work: Workload) -> Precision:
    """Spread a fake model as a run does; return what its optimizer updates. Call it inside the fake mode."""
    split_tensors(model, layout)
    attend_in_sequence_shards(model, layout)
    if not layout.degrees.shards_parameters:
        return prepare(model, work.dtype)
    cast(model, work.dtype)
    with _real_meshes():
        shard(model, layout, dtype=work.dtype)
    model._get_fsdp_state()._lazy_init()  # now: layers may be left out of the model when it runs
    return Precision(model, {})


@contextmanager
def _real_meshes() -> Iterator[None]:
    """Let FSDP2 join its mesh with the tensor-parallel one, whose ranks it looks up by value (torch 2.11 to 2.13)."""
    concatenate = DeviceMesh.__dict__["_concatenate"]

    def on_real_tensors(meshes):
        with unset_fake_temporarily():
            return concatenate.__func__(meshes)

    DeviceMesh._concatenate = staticmethod(on_real_tensors)
    try:
        yield
    finally:
        DeviceMesh._concatenate = concatenate
