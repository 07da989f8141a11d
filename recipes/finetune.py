"""Fine-tune a causal language model from real weights, on text or chats, all of it or a low-rank adapter.

python train.py recipe=finetune model=smollm2_135m +strategy=selective
python train.py recipe=llama3_8b_32k_lora +strategy=selective
python train.py recipe=finetune model=hub model.name=FOLDER data=chat data.path=chats.jsonl peft=lora +strategy=full

The program below is the whole recipe, in the order things happen. What is trained ends in runs/NAME/export/: an adapter
that peft loads, or a model that Transformers loads.
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
from recipes.loop import evaluate, loss_takes_num_items, train
from recipes.meter import Meter, device_peak
from recipes.model import add_adapter, build_model, build_tokenizer, describe, export, load_config
from recipes.precision import DTYPES
from recipes.probe import Probe
from recipes.rng import seed_everything
from recipes.rundir import RunDir


def main(cfg: Config, run: RunDir) -> None:
    """Train as `cfg` says and leave everything that is known of it in `run`."""
    device = choose_device(cfg.device)
    be_deterministic(cfg.deterministic)
    config = load_config(cfg.model, cfg.seq_len)
    cfg = set_batch(cfg, config, run)
    tokenizer = build_tokenizer(cfg.model, config)
    data = read_data(cfg, tokenizer, run)
    foreseen = foresee(cfg, config, device, run)

    seed_everything(cfg.seed)
    model, whole = build_once(
        lambda where: add_adapter(build_model(cfg.model, config, where), cfg.peft), device, run.ranks
    )
    run.console.say(describe(model, cfg.model))
    split_tensors(model, run)
    precision = set_precision(cfg, model, run)
    set_attention(cfg, model, device, run)
    handle = apply_strategy(cfg, model, foreseen, run)
    precision = shard(cfg, model, precision, run, whole, device)
    state = make_train_state(cfg, model, precision, data)
    start = resume(cfg, state, run)

    if start == 0 and cfg.eval.batches:
        scales = loss_takes_num_items(model, run.ranks)
        loss_before = evaluate(model, data.eval(cfg.eval.batches), scales, run.ranks)
        run.update(eval_loss_before=loss_before)
        if loss_before is not None:
            run.console.say(f"held-out loss before training: {loss_before:.3f}")
    peak = device_peak(device, DTYPES[cfg.dtype])
    run.describe(utilization=peak.to_dict())
    meter = Meter(device, peak)
    probe = Probe(cfg, handle, model, state.optimizer, run, meter, start)
    train(cfg, state, data, run, meter, probe, start)

    if cfg.export or cfg.peft.name != "none":
        export(model, tokenizer, run.path / "export", run.ranks)
