"""Predicted against measured peaks on the CPU, by architecture, strategy, length, loss and packing: the error table.

    PYTHONPATH=. python scripts/predict_table.py [--models llama,gpt2] [--lengths 512,4096] [--strategies auto]

Every cell makes two real optimizer steps (forward, backward, AdamW) under `ckpt.measure` and takes the higher peak,
then predicts the same. Cells that docs/prediction.csv has for these versions are not run again (`--fresh` forgets
them), so it goes on where it was ended; docs/prediction.md and the README's table are written last. All of it takes
about 40 minutes of one core; rows of 4096 tokens under gemma2's eager attention need 6 GiB.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

import ckpt
from ckpt import attention
from ckpt.attention import bounds
from ckpt.fake_step import train_step
from ckpt.ledger import measure as open_ledger
from ckpt.optimizers import make_optimizer
from ckpt.precision import prepare
from ckpt.predict import Prediction, predict
from ckpt.simulate import Simulator
from ckpt.workload import Workload
from scripts import predict_rows
from scripts.predict_rows import Cell

_PLAIN = {
    "vocab_size": 1000, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 8192, "pad_token_id": 0,
}  # fmt: skip
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _PLAIN,
    "qwen3": _PLAIN,
    "gemma2": _PLAIN
    | {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 256},
    "gpt2": {"vocab_size": 1000, "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 8192, "attn_pdrop": 0.0},
    "mixtral": {**_PLAIN, **_EXPERTS},
    "phi3": {**_PLAIN, "sliding_window": None},
    "qwen3_next": {
        **_PLAIN, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 4,
        "num_experts_per_tok": 2, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}  # fmt: skip
STRATEGIES: dict[str, Any] = {  # and "auto", planned for each cell
    "none": "none",
    "full": "full",
    "every_n": ckpt.EveryN(2),
    "segments": ckpt.Segments(2),
    "segments replay": ckpt.Segments(2, "replay"),
    "selective": ckpt.Selective(),
    "selective +matmul": ckpt.Selective("attention+matmul"),
    "offload": ckpt.Offload(target="disk"),
}
AUTO = "auto"
LENGTHS = (512, 4096)
MIB = 2**20
ROOT = Path(__file__).resolve().parent.parent
NUM_DOCUMENTS = 5


def work_of(cell: Cell) -> Workload:
    """Return the cell's step: fp32, one row, AdamW."""
    return Workload(
        batch_size=1, seq_len=cell.seq_len, dtype="fp32", loss=cell.loss, packing=cell.packing,
        documents=NUM_DOCUMENTS if cell.packing == "isolate" else 1,
    )  # fmt: skip


def config_of(name: str) -> PreTrainedConfig:
    """Make the small config of an architecture."""
    return CONFIG_MAPPING[name](**CONFIGS[name])


def cells(models: list[str], lengths: list[int], strategies: list[str]) -> Iterator[Cell]:
    """List the cells of the table; packing only where documents can be kept apart."""
    for model, length in itertools.product(models, lengths):
        can_pack = attention.refusal(AutoModelForCausalLM.from_config(config_of(model))) is None
        for strategy, loss in itertools.product(strategies, ("full", "chunked")):
            for packing in ("none", "isolate") if can_pack else ("none",):
                yield Cell(model, strategy, length, loss, packing)


def build(name: str) -> nn.Module:
    """Make the real model, its weights drawn from a fixed seed."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config_of(name)).train()


def batch_of(work: Workload, vocab_size: int = 1000) -> dict[str, Any]:
    """Make a micro-batch of random tokens, in as many documents a row as the workload says."""
    shape = (work.batch_size, work.seq_len)
    ids = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": ids.clone()}
    if work.packing == "isolate":
        length = -(-work.seq_len // work.documents)
        starts = [row * work.seq_len + at for row in range(work.batch_size) for at in range(0, work.seq_len, length)]
        edges = bounds.from_starts(starts, *shape)
        positions = (torch.arange(work.seq_len) % length).expand(shape).contiguous()
        batch |= {"position_ids": positions, "cu_seq_lens_q": edges, "cu_seq_lens_k": edges}
        batch |= {"max_length_q": work.seq_len, "max_length_k": work.seq_len}
    return batch


def measure(model: nn.Module, strategy: Any, work: Workload) -> int:
    """Make two real steps and return the higher peak in bytes. strategy None: the model as it is."""
    if work.packing == "isolate":
        attention.prepare(model, "isolate")
    precision = prepare(model, work.dtype if work.optimizer or work.dtype == "fp32" else "bf16_pure")
    if strategy is not None:
        ckpt.apply(model, strategy, work, loss=work.loss, tile_mlp=work.tile_mlp)
    parameters = [p for _, p in precision.named_parameters()]
    optimizer = None if work.optimizer is None else make_optimizer(work.optimizer, parameters)
    if work.hold_gradients:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
    peaks = []
    for _ in range(2):
        batches = [batch_of(work) for _ in range(work.grad_accum)]
        with open_ledger(model, optimizer, inputs=batches) as ledger:
            train_step(model, batches, optimizer, precision, work.hold_gradients)
        peaks.append(ledger.peak_bytes)
    return max(peaks)


def run(cell: Cell) -> tuple[int, Prediction, float]:
    """Return the measured peak, the prediction, and the seconds that it took."""
    strategy = planned(cell) if cell.strategy == AUTO else STRATEGIES[cell.strategy]
    measured = measure(build(cell.model), strategy, work_of(cell))
    start = time.process_time()
    predicted = predict(config_of(cell.model), strategy, work_of(cell))
    return measured, predicted, time.process_time() - start


def planned(cell: Cell) -> ckpt.Plan:
    """Plan for half way between what replaying every layer needs and what keeping everything does."""
    simulator = Simulator(config_of(cell.model), work_of(cell))
    full, none = (simulator.run(name).peak_bytes for name in ("full", "none"))
    auto = ckpt.Auto(budget_gib=(full + none) / 2 / 2**30, objective="flops", bitwise=True)
    return auto.plan(simulator, work_of(cell))


def main() -> None:
    """Run the cells that are missing, then write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(CONFIGS))
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--strategies", default=",".join((*STRATEGIES, AUTO)))
    parser.add_argument("--fresh", action="store_true", help="run cells again that are known")
    parser.add_argument("--csv", type=Path, default=ROOT / "docs" / "prediction.csv")
    parser.add_argument("--markdown", type=Path, default=ROOT / "docs" / "prediction.md")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows = {} if asked.fresh else predict_rows.load(asked.csv)
    chosen = cells(asked.models.split(","), [int(n) for n in asked.lengths.split(",")], asked.strategies.split(","))
    for cell in chosen:
        if cell in rows:
            continue
        measured, predicted, seconds = run(cell)
        rows[cell] = predict_rows.Row(measured / MIB, predicted.peak_bytes / MIB)
        predict_rows.save(asked.csv, rows)
        print(f"{cell}  {rows[cell]}  {seconds:.1f} s", flush=True)
    asked.markdown.write_text(predict_rows.markdown(rows), encoding="utf-8")
    asked.readme.write_text(predict_rows.put_into_readme(asked.readme.read_text("utf-8"), rows), encoding="utf-8")
    print(f"wrote {asked.markdown}, and the table in {asked.readme}")


if __name__ == "__main__":
    main()
