"""In other people's trainers: the README's examples, run as they stand there, and what else those trainers do."""

import contextlib
import functools
import io
import json
import re
from pathlib import Path

import pytest
import torch
from readme import block, blocks
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, TrainerCallback, set_seed
from transformers.utils import logging

import ckpt

HEADING = "In your own trainer"
SHAPE = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "attention_dropout": 0.1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


@pytest.fixture(autouse=True)
def on_a_quiet_cpu(in_tmp, monkeypatch):
    """Give trainers a CPU, no tracker and a fresh accelerate state; keep their progress bars out of the report."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    logging.disable_progress_bar()
    yield
    logging.enable_progress_bar()
    forget_accelerate()


def forget_accelerate():
    from accelerate.state import AcceleratorState, GradientState, PartialState

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def make_model():
    set_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).train()


def make_rows(count=8, tokens=48):
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, 384, (tokens,), generator=generator) for _ in range(count)]
    return [{"input_ids": ids, "labels": ids} for ids in rows]


def names():
    """What the README's examples take as given."""
    from datasets import Dataset

    rows = make_rows()
    texts = Dataset.from_dict({"text": [f"number {i}: " + "la " * (i % 7 + 3) for i in range(16)]})
    return {
        "model": make_model(),
        "ids": torch.arange(64)[None],
        "train_dataset": rows,
        "eval_dataset": rows[:2],
        "texts": texts,
        "tokenizer": ByT5Tokenizer(),
        "loader": torch.utils.data.DataLoader(rows, batch_size=2),
    }


def run(code):
    """Run a block; return its names and the losses it came by: the trainer's log, or the numbers that it printed."""
    forget_accelerate()
    space, printed = names(), io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), space)
    if "trainer" not in space:
        return space, [float(line) for line in re.findall(r"^\d+\.\d+$", printed.getvalue(), re.M)]
    logged = ("loss", "grad_norm", "eval_loss", "mean_token_accuracy", "entropy")
    return space, [entry[key] for entry in space["trainer"].state.log_history for key in logged if key in entry]


@torch.no_grad()
def logits(model):
    return model.eval()(torch.arange(40)[None]).logits


def without_ckpt(code):
    shorter = re.sub(r"^handle = ckpt\.apply\(.*\n", "", code, flags=re.M)
    assert shorter != code
    return shorter


@functools.cache
def plain(marker):
    """The losses of an example without us, and the weights that it ends with."""
    space, losses = run(without_ckpt(block(HEADING, marker)))
    return losses, {name: p.detach().clone() for name, p in space["model"].named_parameters()}


TRAINER, TRL, ACCELERATE = "import Trainer,", "SFTTrainer", "import Accelerator"


@pytest.mark.parametrize("marker", [TRAINER, TRL, ACCELERATE])
def test_the_readmes_trainer_gives_the_losses_that_it_gives_without_us(marker):
    expected, _ = plain(marker)
    space, ours = run(block(HEADING, marker))
    assert len(ours) >= 4 and ours == pytest.approx(expected, rel=1e-6)
    assert all(layer.replays >= 4 for layer in space["handle"].audit().layers)


@pytest.mark.parametrize("strategy", ["full", "segments", "offload"])
@pytest.mark.parametrize("marker", [TRAINER, TRL, ACCELERATE])
def test_trainers_train_bit_for_bit_as_without_us(marker, strategy):
    expected, weights = plain(marker)
    code = re.sub(r"ckpt\.apply\([^)]*\)", f'ckpt.apply(model, "{strategy}")', block(HEADING, marker))
    space, ours = run(code)
    assert ours == expected and len(ours) >= 4
    for name, parameter in space["model"].named_parameters():
        assert torch.equal(parameter, weights[name]), name


def test_the_readmes_first_block_leaves_the_model_as_it_was():
    before = make_model().__dict__.keys()
    space, _ = run(blocks(HEADING)[0])
    assert space["model"].__dict__.keys() == before and space["loss"].isfinite()
    assert all(layer.replays == 1 for layer in space["handle"].audit().layers)


@pytest.mark.slow
def test_the_readmes_plan_is_saved_loaded_and_in_force():
    space, _ = run(block(HEADING, "Plan.load"))
    assert ckpt.applied_to(space["model"]).policy.to_dict() == space["plan"].to_dict()


@pytest.mark.parametrize("marker", [TRAINER, ACCELERATE])
def test_what_a_trainer_saves_is_what_it_saves_without_us_and_loads_with_equal_logits(marker):
    """Trainer itself writes use_cache=false into the config that it saves (TrainingArguments.use_cache)."""
    saved, code = Path("out/final/config.json"), block(HEADING, marker)
    run(without_ckpt(code))
    expected = json.loads(saved.read_text())
    space, _ = run(code)
    assert json.loads(saved.read_text()) == expected and expected["use_cache"] is (marker == ACCELERATE)
    assert torch.equal(logits(LlamaForCausalLM.from_pretrained("out/final")), logits(space["model"]))


def test_an_adapter_that_trl_saves_loads_in_plain_peft_with_equal_logits():
    from peft import PeftModel

    space, _ = run(block(HEADING, TRL))
    loaded = PeftModel.from_pretrained(make_model(), "out/adapter")
    assert torch.equal(logits(loaded), logits(space["model"]))
    assert not torch.equal(logits(loaded), logits(make_model()))


@pytest.mark.parametrize("marker", [TRAINER, TRL])
def test_a_trainers_own_checkpointing_is_refused_in_the_first_step_and_named(marker):
    """SFTConfig switches it on by default: what happens to those who forget."""
    code = block(HEADING, marker).replace("gradient_checkpointing=False", "gradient_checkpointing=True")
    code = code.replace('TrainingArguments("out"', 'TrainingArguments("out", activation_checkpointing=True')
    with pytest.raises(RuntimeError, match="SFTConfig where it is on by default, set gradient_checkpointing=False"):
        run(code)


class Generate(TrainerCallback):
    """Generates in the middle of training, in the training mode that the trainer left."""

    def __init__(self):
        self.said = []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        with torch.no_grad():
            ids = model.generate(torch.arange(3, 9)[None], max_new_tokens=6, do_sample=False, pad_token_id=0)
        self.said.append(ids.tolist())


def trained(strategy, folder, resume=False, **apply):
    """Train with Trainer, generating after each step; stop after two of four steps, or resume from there."""
    from transformers import Trainer, TrainingArguments

    model, callback = make_model(), Generate()
    model.config.attention_dropout = 0.0
    handle = ckpt.apply(model, strategy, **apply) if strategy else None
    args = TrainingArguments(folder, max_steps=4, save_steps=2, logging_steps=1, learning_rate=1e-2)
    trainer = Trainer(model, args, train_dataset=make_rows(32), callbacks=[callback])
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resume else None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, callback.said, dict(model.named_parameters()), handle


def test_generating_and_resuming_within_trainer_change_nothing():
    losses, said, weights, _ = trained(None, "plain")
    for resume in (False, True):
        ours, ours_said, ours_weights, handle = trained("selective", "ours", resume=resume)
        assert ours == losses and ours_said == said[-len(ours_said) :]
        assert all(torch.equal(weights[name], ours_weights[name]) for name in weights)
        assert handle.audit().layers[0].calls == (2 if resume else 4)


def test_applying_a_strategy_draws_no_random_numbers():
    model = make_model()
    before = torch.get_rng_state()
    ckpt.apply(model, "selective", loss="chunked", tile_mlp=4).undo()
    assert torch.equal(torch.get_rng_state(), before)
