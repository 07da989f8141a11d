"""What ranks do in the tests of whole runs: the program of train.py on tiny models, from its command line on."""

from __future__ import annotations

import json
import os

import pytest

SHAPE = {
    "vocab_size": 397,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
LENGTHS = (5, 17, 32, 33, 40, 64, 90, 11)  # rows of 32 tokens: boundaries on the edges of shards and off them


def words(folder: str, kind: str, **fields) -> list[str]:
    """Command line of a run of four steps on short texts."""
    shape = ",".join(f"{key}:{value}" for key, value in {"model_type": kind, **SHAPE, **fields}.items())
    return [
        *("device=cpu", "tracker=none", "model.init=random", f"model.name={kind}", f"model.config={{{shape}}}"),
        *("model.tokenizer=byte", "seq_len=32", "data=text", f"data.path={folder}/texts", "data.eval_fraction=0.2"),
        *("steps=4", "optim.lr=0.01", "optim.clip=0.5", "optim.warmup=1", "eval.batches=3", "eval.every=2"),
        *("save_every=-1", f"runs_dir={folder}/runs"),
    ]


def train(rank: int, port: int, overrides: list[str]) -> list[tuple[float, float, float | None]]:
    """Run train.py's program, without its forecast. Return (loss, gradient norm, held-out loss) by step."""
    from ckpt import strategies
    from recipes import finetune, pretrain
    from recipes.cli import compose
    from recipes.distributed import start_ranks
    from recipes.forecast import Foreseen
    from recipes.programs import run_program
    from recipes.rundir import open_run

    def unforeseen(cfg, *_):
        return Foreseen(strategies.make(cfg.strategy.name, **cfg.strategy.fields), cfg.tile_mlp)

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    cfg = compose(overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrain, "foresee", unforeseen)
        patch.setattr(finetune, "foresee", unforeseen)
        with start_ranks(cfg) as ranks, open_run(cfg, ranks) as run:
            run_program(cfg, run)
    rows = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["grad_norm"], row.get("eval_loss")) for row in rows]
