"""What ranks do in the tests of building: make a model once, share it out, and compare with one process's."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from dist_cells import SHAPE, whole

from ckpt.parallel import cast, make_layout, shard, split_tensors
from ckpt.precision import prepare
from recipes.config import Model, Peft
from recipes.distributed import Ranks
from recipes.distributed_build import build_once
from recipes.model import add_adapter, build_model, load_config

LARGE = SHAPE | {"vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 10}


def model_of(kind: str, folder: str | None) -> Model:
    """Random weights, or those of a folder."""
    if folder is not None:
        return Model(name=folder)
    shape = LARGE if kind == "large" else SHAPE
    architecture = {"model_type": "llama" if kind in ("tied", "large") else kind, **shape}
    if kind == "two experts":
        architecture |= {"model_type": "mixtral", "num_local_experts": 2}
    return Model(name=kind, init="random", config=architecture | {"tie_word_embeddings": kind == "tied"})


def build_on(where: torch.device, chosen: Model, peft: str):
    return add_adapter(build_model(chosen, load_config(chosen, 12), where), Peft(name=peft))


def check_parts(rank: int, degrees: dict[str, int], kind: str, dtype: str, folder: str | None, peft: str) -> int:
    """Compare every weight and buffer with one process's, bit for bit. Return how many were compared."""
    layout = make_layout(degrees)
    ranks = Ranks(rank, layout.degrees.num_ranks, layout)
    chosen = model_of(kind, folder)
    torch.manual_seed(3)
    expected = build_on(torch.device("cpu"), chosen, peft)
    torch.manual_seed(3)
    model, values = build_once(lambda where: build_on(where, chosen, peft), torch.device("cpu"), ranks)
    assert all(p.is_meta for p in model.parameters()) == (values is not None and rank > 0)
    split_tensors(model, layout)
    if layout.degrees.shards_parameters:
        cast(expected, dtype)
        cast(model, dtype)
        shard(model, layout, dtype=dtype)
        values.hand_out(model, torch.device("cpu"))
    else:
        prepare(expected, dtype)
        prepare(model, dtype)
    wanted = dict(expected.named_parameters()) | dict(expected.named_buffers())
    found = dict(model.named_parameters()) | dict(model.named_buffers())
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        same = (found[name].dtype, found[name].requires_grad) == (tensor.dtype, tensor.requires_grad)
        assert same, (name, found[name].dtype, found[name].requires_grad)
        assert torch.equal(whole(found[name].detach()), tensor.detach()), name
    layout.close()
    del model, found
    gc.collect()
    return len(wanted)


def grown_bytes(rank: int) -> list[tuple[int, int]]:
    """By rank: by how much the resident memory grew at most while the model was made and shared out, and the bytes of
    the whole model."""
    layout = make_layout({"shard": 2})
    ranks = Ranks(rank, 2, layout)
    chosen = model_of("large", None)
    with open("/proc/self/clear_refs", "w", encoding="ascii") as file:
        file.write("5")  # the high-water mark starts again from here
    before = _resident()
    model, values = build_once(lambda where: build_on(where, chosen, "none"), torch.device("cpu"), ranks)
    shard(model, layout)
    values.hand_out(model, torch.device("cpu"))
    grown = _resident("VmHWM") - before
    found: list[tuple[int, int]] = [(0, 0)] * 2
    dist.all_gather_object(found, (grown, sum(p.numel() * 4 for p in model.parameters())))
    layout.close()
    del model
    gc.collect()
    return found


def _resident(field: str = "VmRSS") -> int:
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))
