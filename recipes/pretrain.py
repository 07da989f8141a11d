"""Pretrain a causal language model: loss on every token of packed documents, all parameters trained.

python train.py +strategy=selective
python train.py +strategy=selective model=llama3_8b model.init=random model.tokenizer=byte seq_len=8192 dtype=bf16

The program below is the whole recipe, in the order things happen.
"""

from __future__ import annotations

from recipes.assemble import (
    apply_strategy,
    make_train_state,
    read_data,
    resume,
    set_attention,
    set_batch,
    set_precision,
    shard,
    split_tensors,
)
from recipes.config import Config
from recipes.device import be_deterministic, choose_device
from recipes.distributed_build import build_once
from recipes.forecast import foresee
from recipes.loop import train
from recipes.meter import Meter, device_peak
from recipes.model import build_model, build_tokenizer, describe, export, load_config
from recipes.precision import DTYPES
from recipes.probe import Probe
from recipes.rng import seed_everything
from recipes.rundir import RunDir


def main(cfg: Config, run: RunDir) -> None:
    """Train as `cfg` says and leave everything that is known of it in `run`."""
    if cfg.peft.name != "none":
        raise ValueError(
            f"peft.name={cfg.peft.name} trains adapters on a model that is trained already: use recipe=finetune."
        )
    device = choose_device(cfg.device)
    be_deterministic(cfg.deterministic)
    config = load_config(cfg.model, cfg.seq_len)
    cfg = set_batch(cfg, config, run)
    tokenizer = build_tokenizer(cfg.model, config)
    data = read_data(cfg, tokenizer, run)
    foreseen = foresee(cfg, config, device, run)

    seed_everything(cfg.seed)
    model, whole = build_once(lambda where: build_model(cfg.model, config, where), device, run.ranks)
    run.console.say(describe(model, cfg.model))
    split_tensors(model, run)
    precision = set_precision(cfg, model, run)
    set_attention(cfg, model, device, run)
    handle = apply_strategy(cfg, model, foreseen, run)
    precision = shard(cfg, model, precision, run, whole, device)
    state = make_train_state(cfg, model, precision, data)
    start = resume(cfg, state, run)

    peak = device_peak(device, DTYPES[cfg.dtype])
    run.describe(utilization=peak.to_dict())
    meter = Meter(device, peak)
    probe = Probe(cfg, handle, model, state.optimizer, run, meter, start)
    train(cfg, state, data, run, meter, probe, start)

    run.update(unigram_entropy=data.unigram_entropy)
    if cfg.export:
        export(model, tokenizer, run.path / "export", run.ranks)
