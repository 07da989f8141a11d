"""What every cell of the mesh matrix does: one step of a tiny model, spread over ranks, under one strategy.

Runs on each rank (see dist_kit); compares with one process, which every rank is by itself as well.
"""

from __future__ import annotations

import gc
import math
import tempfile

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3Config, Qwen3ForCausalLM

import ckpt
from ckpt.parallel import attend_in_sequence_shards, make_layout, shard, split_tensors
from ckpt.parallel.ulysses import shard_sequence
from ckpt.simulate import Simulator

SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
}
ROWS, TOKENS, DROPOUT = 4, 12, 0.3


def planned(kind: str, degrees: dict[str, int], dropout: float) -> dict:
    """Plan `auto` for one rank of a mesh, under a budget that some layers must be replayed for, as rank 0's process
    apart does."""
    mesh = {name: degree for name, degree in degrees.items() if degree > 1}
    rows = ROWS // math.prod(degrees.get(name, 1) for name in ("replicate", "shard"))
    work = ckpt.Workload(rows, TOKENS, dtype="fp32", optimizer=None, loss="chunked", mesh=mesh)
    simulator = Simulator(KINDS[kind][0](**SHAPE, attention_dropout=dropout), work)
    try:
        least, most = (int(simulator.run(name).steady.total.max()) for name in ("full", "none"))
        auto = ckpt.Auto(budget_gib=(least + most) / 2 / 2**30, bitwise=True)
        plan = auto.plan(simulator, work)
    finally:
        simulator.close()
    return plan.to_dict()


def strategies(plan: dict):
    """The strategies of the matrix."""
    return {
        "none": "none",
        "full": "full",
        "selective": "selective",
        "segments": ckpt.Segments(size=2),
        "segments, inner replay": ckpt.Segments(size=2, inner="replay"),
        "offload disk": ckpt.Offload(target="disk", directory=tempfile.gettempdir()),
        "auto": ckpt.Plan.from_dict(plan),
    }


def batch() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 64, (ROWS, TOKENS), generator=generator)
    labels = ids.clone()
    labels[0, :5] = -100  # ranks do not hold equally many labels
    return {"input_ids": ids, "labels": labels}


def build(kind: str, strategy, layout=None, dropout: float = 0.0, loss: str = "chunked", **changes):
    """Make the same random model on every rank; with a layout, spread it. Return (model, handle or None)."""
    torch.manual_seed(0)
    config, cls = KINDS[kind]
    model = cls(config(**SHAPE, attention_dropout=dropout, **changes)).train()
    if layout is not None:
        split_tensors(model, layout)
        attend_in_sequence_shards(model, layout)
    handle = None if strategy is None else ckpt.apply(model, strategy, loss=loss)
    if layout is not None and layout.degrees.shards_parameters:
        shard(model, layout)
    return model, handle


def step(model, inputs: dict[str, torch.Tensor], layout=None):
    """One forward and backward of all rows. Return (loss, gradients by name), whole, the same on every rank."""
    num_items = int((inputs["labels"][:, 1:] != -100).sum())
    if layout is not None:
        own = ROWS // layout.degrees.num_data
        rows = slice(layout.place.data * own, (layout.place.data + 1) * own)
        inputs = shard_sequence({name: value[rows] for name, value in inputs.items()}, layout)
    model.zero_grad(set_to_none=True)
    loss = model(**inputs, use_cache=False, num_items_in_batch=torch.tensor(num_items)).loss
    loss.backward()
    loss = loss.detach().clone()
    if layout is not None:
        layout.sum(loss)
    return loss, {name: whole(p.grad) for name, p in model.named_parameters()}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """Return the largest relative error of a gradient, and whose it is."""
    assert found.keys() == expected.keys()
    errors = {name: float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected}
    name = max(errors, key=errors.get)
    return errors[name], name


def check_cells(rank: int, degrees: dict[str, int], kind: str, plans: list[dict]) -> list[tuple[str, float, float]]:
    """Check every strategy on one mesh: against one process, and with dropout bitwise against no checkpointing.

    Return, for rank 0's report, (strategy, error of the loss, largest error of a gradient)."""
    layout = make_layout(degrees)
    inputs, figures = batch(), []
    expected_loss, expected = step(build(kind, None)[0], inputs)
    random = None
    plain, with_dropout = map(strategies, plans)
    for name, strategy in plain.items():
        model, handle = build(kind, strategy, layout)
        step(model, inputs, layout)  # the first step records, the second one runs by the record
        loss, found = step(model, inputs, layout)
        largest, where = error(found, expected)
        figures.append((name, float((loss - expected_loss).abs()), largest))
        assert abs(loss - expected_loss) <= 1e-6, (name, float(loss), float(expected_loss))
        assert largest <= 1e-5, (name, where, largest)
        check_audit(name, handle)
        audits: list = [None] * layout.degrees.num_ranks
        dist.all_gather_object(audits, handle.audit().layers)
        assert all(audit == audits[0] for audit in audits), f"{name}: ranks decide differently"

        model, _ = build(kind, with_dropout[name], layout, dropout=DROPOUT)
        drawn = []
        for _ in range(2):
            torch.manual_seed(7 + layout.place.tokens)
            drawn.append(step(model, inputs, layout))
        if random is None:
            random = drawn[1]
        for loss, found in drawn:
            assert torch.equal(loss, random[0]), f"{name}: loss with dropout"
            different = [key for key in found if not torch.equal(found[key], random[1][key])]
            assert not different, f"{name}: gradients with dropout differ: {different}"
    layout.close()
    del model, handle
    gc.collect()
    return figures


def check_audit(name: str, handle) -> None:
    """Replays must have happened, as many as the strategy asks for, and nothing may have become dynamic."""
    if name.startswith("segments"):
        linked = [all(position is not None for _, _, position, _ in region.programs) for region in handle.regions]
        assert linked == [False, True, False, True], "a segment's later layers must not hold their inputs"
    if name == "auto":
        replays = [layer.replays for layer in handle.audit().layers]
        assert sum(replays) > 0, "nothing is replayed"
        assert 0 in replays or any(layer.ops_kept for layer in handle.audit().layers), "nothing is kept"
    for layer in handle.audit().layers:
        assert layer.dynamic_because is None, (name, layer)
        assert layer.calls == 2, (name, layer)
        if name == "auto":
            assert layer.replays in (0, 2), layer
            continue
        again = name.startswith("segments, inner replay") and layer.index % 2 == 0
        assert layer.replays == (4 if again else 2), (name, layer)
        if name == "selective":
            assert layer.ops_kept == 1, layer
        if name == "offload disk":
            assert layer.away_bytes > 0 or layer.index == 3, layer  # the last layer has no time to go away
