"""The programs pretrain and finetune, whole: real text, the real engine, the files of a run."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from ckpt.plan import Plan
from recipes import finetune, pretrain, probe
from recipes.config import from_dict
from recipes.dcp_reader import SafeReader
from recipes.rundir import open_run

SMALL = {
    "name": "tiny",
    "init": "random",
    "tokenizer": "byte",
    "config": {
        "model_type": "llama",
        "vocab_size": 384,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    },
}


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for number in range(12):
        words = " ".join(f"word{(number * k) % 17}" for k in range(40 + 30 * number))
        (folder / f"{number}.txt").write_text(f"Document {number}. {words}.")
    return str(folder)


def run_program(tmp_path, text, program=pretrain.main, name="run", **values):
    """Run a recipe; return the run and its logged lines."""
    values = {
        "runs_dir": str(tmp_path / "runs"),
        "name": name,
        "tracker": "none",
        "steps": 5,
        "seq_len": 64,
        "device": "cpu",
        "model": SMALL,
        "data": {"source": "text", "path": text, "eval_fraction": 0.2},
        "optim": {"lr": 5e-3, "warmup": 0.2},
        "eval": {"batches": 2},
    } | values
    cfg = from_dict(values)
    with open_run(cfg) as run:
        run.console.rich.quiet = run.console.results.quiet = True
        program(cfg, run)
    return run, [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]


def losses(lines):
    return [(line["step"], line["loss"], line["grad_norm"], line.get("eval_loss")) for line in lines]


def test_run_leaves_every_file_and_field(tmp_path, text):
    run, lines = run_program(tmp_path, text, strategy={"name": "selective"})
    assert {path.name for path in run.path.iterdir()} == {
        "config.yaml", "manifest.json", "plan.json", "metrics.jsonl", "summary.json", "memory.png", "train_state",
    }  # fmt: skip
    assert (run.path / "memory.png").read_bytes()[:4] == b"\x89PNG"
    summary = json.loads((run.path / "summary.json").read_text())
    assert summary["status"] == "ok"
    assert summary["first_loss"] == lines[0]["loss"] and summary["final_loss"] == lines[-1]["loss"]
    assert sum(summary["residents"].values()) == summary["peak_bytes"] > 0
    assert 0 < summary["recompute_flops"] < summary["step_flops"]
    assert summary["tokens_per_second"] > 0 and summary["unigram_entropy"] > 1
    assert {
        "step", "loss", "tokens", "tokens_per_second", "model_flops_utilization", "hardware_flops_utilization",
        "step_seconds", "peak_allocated_bytes", "peak_reserved_bytes",
    } <= set(lines[-1])  # fmt: skip
    assert lines[-1]["hardware_flops_utilization"] > lines[-1]["model_flops_utilization"] > 0
    assert lines[-1]["peak_allocated_bytes"] == summary["peak_bytes"]
    plan = Plan.load(run.path / "plan.json")
    assert len(plan.layers) == 3 and plan.source["strategy"] == {"name": "selective"}
    assert {op for _, op, decision in probe.plan_rows(plan) if decision == "keep"} == {"self_attn/attention#0"}
    manifest = json.loads((run.path / "manifest.json").read_text())
    assert manifest["attention"]["implementation"] == "ckpt_packed"
    assert manifest["data"]["sha256"]
    assert manifest["utilization"]["peak_flops"] > 0 and "Model FLOPs" in manifest["utilization"]["convention"]


@pytest.mark.parametrize("loss", ["chunked", pytest.param("full", marks=pytest.mark.slow)])
def test_every_strategy_logs_the_same_losses_bit_for_bit(tmp_path, text, loss):
    strategies = [
        {"name": "none"},
        {"name": "full"},
        {"name": "every_n", "n": 2},
        {"name": "segments", "size": 2, "inner": "replay"},
        {"name": "selective", "keep": "attention+matmul"},
    ]
    logged = {}
    for number, strategy in enumerate(strategies):
        _, lines = run_program(tmp_path, text, name=str(number), strategy=strategy, loss=loss, grad_accum=2)
        logged[number] = losses(lines)
    assert all(lines == logged[0] for lines in logged.values())


def test_replaying_lowers_the_measured_peak_and_costs_flops(tmp_path, text):
    shape = {"seq_len": 512, "steps": 3, "data": {"source": "text", "path": text, "packing": "concat"}}
    kept, _ = run_program(tmp_path, text, name="none", **shape)
    full, _ = run_program(tmp_path, text, name="full", strategy={"name": "full"}, **shape)
    assert full.summary["peak_bytes"] < 0.7 * kept.summary["peak_bytes"]
    assert kept.summary["recompute_flops"] == 0 < full.summary["recompute_flops"]
    assert full.summary["step_flops"] - full.summary["recompute_flops"] == kept.summary["step_flops"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_measuring_a_step_changes_nothing(tmp_path, text, dtype, monkeypatch):
    _, measured = run_program(tmp_path, text, name="a", dtype=dtype, measure_every=1)
    monkeypatch.setattr(probe.Probe, "due", lambda self, step: False)
    _, plain = run_program(tmp_path, text, name="b", dtype=dtype)
    assert losses(measured) == losses(plain)
    assert measured[-1]["peak_allocated_bytes"] > 0 and plain[-1]["peak_allocated_bytes"] is None


def test_resumed_program_continues_exactly_with_augmentation_and_low_precision(tmp_path, text):
    values = {
        "dtype": "bf16",
        "grad_accum": 2,
        "save_every": 2,
        "strategy": {"name": "selective"},
        "data": {"source": "text", "path": text, "eval_fraction": 0.2, "augment": "mask"},
        "optim": {"lr": 5e-3, "schedule": "constant"},
    }
    _, expected = run_program(tmp_path, text, name="whole", steps=7, **values)
    run_program(tmp_path, text, name="halves", steps=4, **values)
    _, lines = run_program(tmp_path, text, name="halves", steps=7, resume=True, **values)
    # The run cut at step 4 evaluated there, because that was its end.
    assert [line[:3] for line in losses(lines)] == [line[:3] for line in losses(expected)]
    assert lines[-1]["eval_loss"] == expected[-1]["eval_loss"]


def test_resume_without_a_train_state_or_beyond_the_last_step_is_refused(tmp_path, text):
    run, _ = run_program(tmp_path, text, steps=3)
    with pytest.raises(ValueError, match="has done 3 steps, and steps=3. Raise steps"):
        run_program(tmp_path, text, steps=3, resume=True)
    for path in run.train_state.iterdir():
        path.rename(path.with_suffix(".partial"))
    with pytest.raises(ValueError, match="holds no train state"):
        run_program(tmp_path, text, steps=5, resume=True)


def test_resume_on_other_data_is_refused(tmp_path, text):
    run_program(tmp_path, text, steps=3)
    with pytest.raises(ValueError, match="seed was 0, is 1"):
        run_program(tmp_path, text, steps=5, resume=True, seed=1)


def test_finetune_with_lora_saves_an_adapter_and_resumes_exactly(tmp_path, text):
    peft = pytest.importorskip("peft")
    base = tmp_path / "base"
    run, _ = run_program(tmp_path, text, name="base", export=True)
    (run.path / "export").rename(base)
    values = {
        "program": finetune.main,
        "model": {"name": str(base)},
        "peft": {"name": "lora", "rank": 2, "dropout": 0.1},
        "dtype": "bf16",
        "strategy": {"name": "full"},
        "optim": {"lr": 5e-3, "schedule": "constant"},
    }
    run, expected = run_program(tmp_path, text, name="lora", steps=6, **values)
    assert run.summary["eval_loss"] < run.summary["eval_loss_before"]
    assert {path.name for path in (run.path / "export").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    saved = SafeReader(run.train_state / "step_00000006").saved_shapes()
    assert saved and all("lora_" in name for name in saved)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    ids = torch.arange(40)[None]
    before = plain(ids).logits
    assert not torch.equal(peft.PeftModel.from_pretrained(plain, run.path / "export")(ids).logits, before)
    run_program(tmp_path, text, name="again", steps=3, **values)
    _, lines = run_program(tmp_path, text, name="again", steps=6, resume=True, **values)
    assert [line[:3] for line in losses(lines)] == [line[:3] for line in losses(expected)]


def test_finetune_on_chats_learns_the_assistants_tokens(tmp_path, text):
    chats = tmp_path / "chats.jsonl"
    with open(chats, "w") as file:
        for number in range(20):
            turns = [("user", f"What is {number}?"), ("assistant", f"It is {'odd' if number % 2 else 'even'}.")]
            file.write(json.dumps({"messages": [{"role": role, "content": said} for role, said in turns]}) + "\n")
    run, lines = run_program(
        tmp_path,
        text,
        program=finetune.main,
        data={"source": "chat", "path": str(chats), "eval_fraction": 0.2},
        strategy={"name": "selective"},
        steps=20,
        seq_len=128,
    )
    assert run.summary["eval_loss"] < run.summary["eval_loss_before"] - 1
    assert (run.path / "export" / "model.safetensors").exists() is False  # export is the recipe file's choice


def test_exported_model_loads_in_plain_transformers_and_keeps_its_config(tmp_path, text):
    run, _ = run_program(tmp_path, text, export=True, strategy={"name": "full"}, dtype="bf16")
    config = json.loads((run.path / "export" / "config.json").read_text())
    assert config["use_cache"] is True and "attn_implementation" not in json.dumps(config)
    loaded = AutoModelForCausalLM.from_pretrained(run.path / "export", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    assert loaded(torch.arange(40)[None]).logits.isfinite().all()


def test_pretraining_refuses_adapters(tmp_path, text):
    with pytest.raises(ValueError, match="use recipe=finetune"):
        run_program(tmp_path, text, peft={"name": "lora"})
    assert not (tmp_path / "runs").exists()


def test_mistake_in_the_model_leaves_no_run_directory(tmp_path, text):
    with pytest.raises(ValueError, match="seq_len=8192 is beyond the 4096 positions"):
        run_program(tmp_path, text, seq_len=8192)
    assert not (tmp_path / "runs").exists()


def test_compiled_layers_with_a_strategy_that_has_no_tags_are_refused(tmp_path, text):
    with pytest.raises(ValueError, match="compile=True with strategy segments"):
        run_program(tmp_path, text, compile=True, strategy={"name": "segments"})


@pytest.mark.slow
def test_compiled_layers_train_to_the_same_losses_under_a_strategy(tmp_path, text):
    settings = {"steps": 3, "compile": True}
    _, none = run_program(tmp_path / "none", text, **settings, strategy={"name": "none"})
    _, kept = run_program(tmp_path / "kept", text, **settings, strategy={"name": "selective"})
    assert [line["loss"] for line in kept] == pytest.approx([line["loss"] for line in none], rel=1e-5)
