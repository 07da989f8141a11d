"""Train state on disk: exact, atomic, safe to read, and never worse than the save before it."""

import builtins
import errno
import json
import pickle
import random
import re
import shutil
from pathlib import Path

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM

from recipes import train_state
from recipes.config import Optim
from recipes.dcp_reader import SafeReader
from recipes.optim import build_optimizer, build_scheduler
from recipes.precision import prepare
from recipes.rng import rng_state, seed_everything, set_rng_state
from recipes.train_state import TrainState


class Rows:
    """Data that draws from the global generators, as random augmentation does."""

    def __init__(self):
        self.position = 0

    def __next__(self):
        self.position += 1
        return torch.randint(0, 64, (2, 12)) + random.randrange(1) + int(numpy.random.randint(1))

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]
        torch.rand(3), random.random()  # moving forward may draw; what was saved must win


def build(dtype="fp32", seed=0, tie=True, hidden=32, lr=1e-2, frozen=()):
    seed_everything(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=hidden,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=tie,
            attention_dropout=0.2,
            attn_implementation="eager",
        )
    ).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(part in name for part in frozen))
    precision = prepare(model, dtype)
    optim = Optim(lr=lr, schedule="cosine", warmup=2)
    optimizer = build_optimizer(precision.named_parameters(), optim)
    return TrainState(model, precision, optimizer, build_scheduler(optimizer, optim, 10), Rows(), {"tokens": 0})


def train(run, steps):
    losses = []
    for _ in range(steps):
        ids = next(run.data)
        loss = run.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        run.optimizer.step()
        run.scheduler.step()
        run.precision.after_step()
        run.precision.zero_grad()
        run.progress["tokens"] += ids.numel()
        losses.append(loss.item())
    return losses


def quiet(line):
    raise AssertionError(f"nothing should be said, but: {line}")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "bf16_pure"])
def test_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, dtype):
    whole = build(dtype)
    expected = train(whole, 7)
    first = build(dtype)
    train(first, 3)
    first.save(tmp_path, 3)
    second = build(dtype, seed=99)
    assert second.load_newest(tmp_path, quiet) == 3
    assert train(second, 4) == expected[3:]
    for (name, a), b in zip(whole.precision.named_parameters(), second.precision.named_parameters(), strict=True):
        assert torch.equal(a, b[1]), name
    assert all(torch.equal(a, b) for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True))
    assert second.progress == whole.progress and second.data.position == 7
    assert second.scheduler.get_last_lr() == whole.scheduler.get_last_lr()


def test_saving_does_not_disturb_the_run_that_saves(tmp_path):
    expected = train(build(), 4)
    saving, losses = build(), []
    for step in range(4):
        losses += train(saving, 1)
        saving.save(tmp_path, step + 1)
    assert losses == expected


def test_state_saved_before_the_first_step_resumes_as_a_fresh_run(tmp_path):
    expected = train(build(), 3)
    build().save(tmp_path, 0)
    run = build(seed=99)
    assert run.load_newest(tmp_path, quiet) == 0
    assert train(run, 3) == expected


def test_every_generator_continues():
    seed_everything(3)
    state = json.loads(json.dumps(rng_state()))
    draws = [random.random(), random.gauss(0, 1), numpy.random.standard_normal(3).tolist(), torch.rand(3).tolist()]
    set_rng_state(state)
    assert draws == [
        random.random(),
        random.gauss(0, 1),
        numpy.random.standard_normal(3).tolist(),
        torch.rand(3).tolist(),
    ]


def test_state_loads_under_another_dtype(tmp_path):
    run = build("bf16")
    train(run, 2)
    run.save(tmp_path, 2)
    other = build("fp32", seed=99)
    assert other.load_newest(tmp_path, quiet) == 2
    for name, master in run.precision.named_parameters():
        assert torch.equal(other.model.get_parameter(name), master), name


def test_learning_rate_of_the_config_holds_after_resume(tmp_path):
    run = build(lr=1e-2)
    train(run, 3)
    run.save(tmp_path, 3)
    other = build(lr=1e-3)
    other.load_newest(tmp_path, quiet)
    expected = [lr / 10 for lr in run.scheduler.get_last_lr()]
    assert other.scheduler.get_last_lr() == pytest.approx(expected)
    assert [group["lr"] for group in other.optimizer.param_groups] == other.scheduler.get_last_lr()


def test_frozen_parameters_are_not_saved(tmp_path):
    run = build("bf16", frozen=("mlp", "embed"))
    train(run, 1)
    saved = SafeReader(run.save(tmp_path, 1)).saved_shapes()
    trained = {name for name, _ in run.precision.named_parameters()}
    assert {name.removeprefix("model.") for name in saved if name.startswith("model.")} >= trained
    assert not any("mlp" in name or "embed" in name for name in saved)


def test_tied_weights_are_saved_once(tmp_path):
    saved = SafeReader(build(tie=True).save(tmp_path, 0)).saved_shapes()
    assert "model.model.embed_tokens.weight" in saved and "model.lm_head.weight" not in saved


def test_only_the_newest_two_are_kept(tmp_path):
    run = build()
    for step in (1, 2, 3):
        run.save(tmp_path, step)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000002", "step_00000003"]


def test_no_train_state_is_none(tmp_path):
    assert build().load_newest(tmp_path / "absent", quiet) is None
    assert build().load_newest(tmp_path, quiet) is None


def truncate(path: Path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path):
    content = bytearray(path.read_bytes())
    for position in range(len(content) // 2, len(content), 997):
        content[position] ^= 0xFF
    path.write_bytes(bytes(content))


@pytest.mark.parametrize("name", ["state.json", "rank_0.json", ".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("damage", [Path.unlink, truncate, flip], ids=["missing", "truncated", "flipped"])
def test_damaged_newest_state_falls_back_to_the_last_whole_one(tmp_path, name, damage):
    run = build()
    expected = []
    for step in (1, 2):
        expected = train(run, 1)
        run.save(tmp_path, step)
    damage(tmp_path / "step_00000002" / name)
    other, said = build(seed=99), []
    assert other.load_newest(tmp_path, said.append) == 1
    assert len(said) == 1 and "step_00000002 is not usable" in said[0] and "\n" not in said[0]
    assert train(other, 1) == expected


def test_all_states_damaged_is_an_error_and_no_fresh_start(tmp_path):
    truncate(build().save(tmp_path, 1) / "state.json")
    with pytest.raises(ValueError, match="None of the 1 train states"):
        build().load_newest(tmp_path, lambda line: None)


def test_a_save_that_was_cut_off_is_not_taken_for_a_state(tmp_path):
    run = build()
    run.save(tmp_path, 1)
    (tmp_path / "step_00000001").rename(tmp_path / "step_00000002.partial")
    assert build().load_newest(tmp_path, quiet) is None
    run.save(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000002"]


def test_a_kill_while_a_state_is_saved_again_at_its_step_costs_nothing(tmp_path, monkeypatch):
    run = build()
    train(run, 1)
    run.save(tmp_path, 1)
    deleted = shutil.rmtree

    def killed(path, **options):
        found = Path(path).exists()
        deleted(path, **options)
        if found:
            raise KeyboardInterrupt

    monkeypatch.setattr("recipes.train_state.shutil.rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        run.save(tmp_path, 1)
    monkeypatch.undo()
    assert build(seed=99).load_newest(tmp_path, quiet) == 1
    run.save(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_full_disk_leaves_the_earlier_state_and_says_so(tmp_path, monkeypatch):
    run = build()
    run.save(tmp_path, 1)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(train_state, "_write_json", full)
    with pytest.raises(OSError, match="Cannot write the train state of step 2.*No space left.*Free space") as caught:
        run.save(tmp_path, 2)
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    monkeypatch.undo()
    monkeypatch.setattr(dcp.FileSystemWriter, "write_data", full)
    with pytest.raises(OSError, match="No space left") as caught:
        run.save(tmp_path, 2)
    assert caught.value.errno == errno.ENOSPC
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


@pytest.mark.parametrize(
    "change, found",
    [({"hidden": 64}, r"is \[64, 32\] there and \[64, 64\] here"), ({"tie": False}, "lm_head.weight is absent there")],
)
def test_state_of_another_model_is_refused_by_name(tmp_path, change, found):
    build().save(tmp_path, 1)
    with pytest.raises(ValueError, match="saved from another model") as caught:
        build(**change).load_newest(tmp_path, quiet)
    assert re.search(found, str(caught.value))


class Payload:
    def __reduce__(self):
        return builtins.exec, ("raise SystemError('executed')",)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps(Payload()),
        b"ctorch.distributed.checkpoint\nsave\n.",
        b"ctorch.distributed.checkpoint.metadata\nEnum\n.",  # imported there, not defined there
        b"ctorch\nload\n.",
        b"cnumpy\ndtype\n.",
    ],
    ids=["exec", "function", "imported", "torch", "numpy"],
)
def test_nothing_in_a_train_state_is_executed(tmp_path, content):
    run = build()
    run.save(tmp_path, 1)
    good = run.save(tmp_path, 2)
    (good / ".metadata").write_bytes(content)
    state = json.loads((good / "state.json").read_text())
    state["file_sizes"][".metadata"] = len(content)
    (good / "state.json").write_text(json.dumps(state))
    said = []
    assert build().load_newest(tmp_path, said.append) == 1
    assert "which no train state needs" in said[0]
