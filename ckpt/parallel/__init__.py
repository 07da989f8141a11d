"""A model over several devices: the mesh, sharded parameters (FSDP2), tensor and sequence parallelism.

Order of composition, each step an error where it would be wrong silently:

    adapter -> tensor parallel -> ckpt.apply -> compile -> shard -> optimizer

    layout = make_layout({"shard": 4, "sequence": 2}, device="cuda")     # torch.distributed is initialised already
    split_tensors(model, layout)                                         # before ckpt.apply
    attend_in_sequence_shards(model, layout, implementation)
    handle = ckpt.apply(model, "selective", work, loss="chunked")
    shard(model, layout, dtype="bf16")                                   # before the optimizer
"""

from ckpt.parallel.mesh import Degrees, Layout, Place, make_layout
from ckpt.parallel.shard import cast, shard
from ckpt.parallel.tensor import check_gradients, split_tensors
from ckpt.parallel.ulysses import attend_in_sequence_shards

__all__ = [
    "Degrees", "Layout", "Place", "attend_in_sequence_shards", "cast", "check_gradients", "make_layout", "shard",
    "split_tensors",
]  # fmt: skip
