"""What ranks do in the tests of tensor parallelism: architectures with parameters that each rank holds whole but uses
on its own heads or columns, over two micro-batches, against one process."""

from __future__ import annotations

import gc

import pytest
import torch
import zoo
from dist_cells import error, whole

import ckpt
from ckpt.parallel import check_gradients, make_layout, shard, split_tensors, tensor

MICRO_BATCHES = 2


def gradients(model, layout=None) -> dict[str, torch.Tensor]:
    """Gradients of several micro-batches, each of two rows; ranks that have rows of their own take one."""
    for seed in range(MICRO_BATCHES):
        inputs = zoo.batch(model, 16, seed=seed)
        num_items = torch.tensor(inputs["labels"][:, 1:].numel())
        if layout is not None and layout.degrees.num_data == 2:
            row = slice(layout.place.data, layout.place.data + 1)
            inputs |= {name: inputs[name][row] for name in ("input_ids", "labels")}
        model(**inputs, num_items_in_batch=num_items).loss.backward()
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def check_architectures(rank: int, mesh: dict[str, int], names: list[str]) -> list[tuple[str, str, float, str]]:
    """Return (mesh, architecture, largest relative error of a gradient, whose)."""
    layout, found = make_layout(mesh), []
    for name in names:
        expected = gradients(zoo.build(name))
        model = zoo.build(name)
        split_tensors(model, layout)
        ckpt.apply(model, "selective", loss="chunked")
        if layout.degrees.shards_parameters:
            shard(model, layout)
        got = gradients(model, layout)
        check_gradients(model.named_parameters(), layout)
        found.append((str(layout.degrees), name, *error(got, expected)))
    layout.close()
    del model
    gc.collect()
    return found


def check_forgotten(rank: int) -> None:
    """Without the sum a plan forgets, each rank has a part of a gradient: every rank must say so."""
    layout = make_layout({"tensor": 2})
    as_planned, tensor._forgotten = tensor._forgotten, lambda base, plan: []
    model = zoo.build("apertus")
    split_tensors(model, layout)
    tensor._forgotten = as_planned
    gradients(model)
    with pytest.raises(ValueError, match=r"parallel.tensor=2 leaves each rank a part .* 8 parameters .*act_fn.alpha_"):
        check_gradients(model.named_parameters(), layout)
    layout.close()
    del model
    gc.collect()
