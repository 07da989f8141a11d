"""What ranks do in the test of predicted peaks: measure real steps under the ledger."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import ckpt
from ckpt.optimizers import make_optimizer
from ckpt.parallel import attend_in_sequence_shards, make_layout, shard, split_tensors
from ckpt.parallel.ulysses import shard_sequence
from ckpt.precision import Precision, prepare

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 344,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
TOKENS = 512
STRATEGIES = ("none", "full", "selective")


def workload(mesh: dict[str, int]) -> ckpt.Workload:
    return ckpt.Workload(batch_size=1, seq_len=TOKENS, dtype="fp32", optimizer="adamw", loss="chunked", mesh=mesh)


def measured_peaks(rank: int, mesh: dict[str, int]) -> dict[str, list[int]]:
    """Return by strategy the peak of the third step on each rank."""
    layout = make_layout(mesh)
    ids = torch.randint(0, 512, (1, TOKENS), generator=torch.Generator().manual_seed(rank))
    found = {}
    for strategy in STRATEGIES:
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**SHAPE)).train()
        split_tensors(model, layout)
        attend_in_sequence_shards(model, layout)
        ckpt.apply(model, strategy, loss="chunked")
        if layout.degrees.shards_parameters:
            shard(model, layout)
            precision = Precision(model, {})
        else:
            precision = prepare(model, "fp32")
        optimizer = make_optimizer("adamw", [p for _, p in precision.named_parameters()])
        inputs = shard_sequence({"input_ids": ids, "labels": ids}, layout)

        def step(model=model, inputs=inputs, optimizer=optimizer, precision=precision):
            model(**inputs, use_cache=False).loss.backward()
            optimizer.step()
            precision.zero_grad()

        for _ in range(2):
            step()
        gc.collect()
        with ckpt.measure(model, optimizer, inputs=[inputs]) as ledger:
            step()
        found[strategy] = [0] * layout.degrees.num_ranks
        dist.all_gather_object(found[strategy], ledger.peak_bytes)
        del model, precision, optimizer, step
        gc.collect()
    layout.close()
    return found
