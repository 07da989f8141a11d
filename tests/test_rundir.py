"""The files of a run: whole or not there, true to how it ended, and without secrets."""

import errno
import json
import os
from pathlib import Path

import pytest
import torch
import yaml

from ckpt.plan import LayerPlan, Plan
from recipes import manifest, rundir
from recipes.config import from_dict
from recipes.device import choose_device
from recipes.distributed import Ranks
from recipes.errors import RunStopped, is_mistake, one_line, status_of
from recipes.rundir import STATUSES, default_name, open_run, read_json, write_atomically

HF_TOKEN = "hf_" + "aB3dE5gH7jK9" * 2
HEX_KEY = "0123456789abcdef0123456789abcdef01234567"


def config(**values):
    return from_dict({"tracker": "none", "name": "run", "model": {"name": "small"}, **values})


def summary():
    return json.loads(Path("runs/run/summary.json").read_text())


def metrics():
    return [json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]


def test_a_finished_run_has_its_files(in_tmp):
    with open_run(config(seq_len=64)) as run:
        run.describe(data_fingerprint="abc")
        run.log({"step": 1, "loss": 5.0})
        run.log({"step": 2, "loss": 4.0})
        run.finish("ok", first_loss=5.0, final_loss=4.0)
    assert sorted(os.listdir("runs/run")) == ["config.yaml", "manifest.json", "metrics.jsonl", "summary.json"]
    assert [line["loss"] for line in metrics()] == [5.0, 4.0]
    assert summary()["status"] == "ok" and summary()["final_loss"] == 4.0 and summary()["seq_len"] == 64
    assert set(rundir.SUMMARY_FIELDS) <= set(summary())
    found = json.loads(Path("runs/run/manifest.json").read_text())
    assert found["data_fingerprint"] == "abc" and found["schema_version"] == 1
    assert found["packages"]["torch"].startswith(torch.__version__.split("+")[0])
    assert found["cpu"]["threads"] == torch.get_num_threads()


def test_the_saved_config_makes_the_same_run_again(in_tmp):
    cfg = config(strategy={"name": "every_n", "n": 3}, optim={"betas": [0.8, 0.9]})
    with open_run(cfg):
        pass
    assert from_dict(yaml.safe_load(Path("runs/run/config.yaml").read_text())) == cfg


def test_leaving_the_block_means_ok(in_tmp):
    with open_run(config()):
        assert summary()["status"] == "running"
    assert summary()["status"] == "ok"


def test_each_line_of_metrics_is_on_disk_when_log_returns(in_tmp):
    with open_run(config()) as run:
        for step in range(1, 4):
            run.log({"step": step})
            assert len(metrics()) == step


def test_not_a_number_is_null_in_json(in_tmp):
    with open_run(config()) as run:
        run.log({"step": 1, "loss": float("nan"), "nested": [float("inf")]})
    assert metrics() == [{"step": 1, "loss": None, "nested": [None]}]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RuntimeError("boom"), "failed"),
        (MemoryError(), "oom"),
        (torch.OutOfMemoryError("CUDA out of memory"), "oom"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), "oom"),
        (KeyboardInterrupt(), "interrupted"),
        (SystemExit(0), "failed"),
        (RunStopped("nan", "loss is NaN at step 3"), "nan"),
        (RunStopped("predicted_oom", "does not fit"), "predicted_oom"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_how_a_run_ended_is_its_status(in_tmp, error, status):
    with pytest.raises(type(error)), open_run(config()) as run:
        run.log({"step": 1})
        raise error
    assert summary()["status"] == status
    assert summary()["error"] and "\n" not in summary()["error"]


def test_torchs_own_cpu_allocator_error_is_an_oom():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert status_of(caught.value) == "oom"


def test_every_status_of_the_design_is_known_and_no_other():
    assert set(STATUSES) == {
        "running",
        "ok",
        "oom",
        "predicted_oom",
        "killed",
        "timeout",
        "interrupted",
        "nan",
        "failed",
    }
    with pytest.raises(ValueError, match="status='fine'"):
        RunStopped("fine", "")


def test_a_mistake_before_the_first_step_leaves_nothing(in_tmp):
    with pytest.raises(ValueError), open_run(config()):
        from_dict({"seqlen": 1})
    assert os.listdir() == []


def test_a_mistake_beside_other_runs_leaves_those(in_tmp):
    with open_run(config(name="first")):
        pass
    with pytest.raises(ValueError), open_run(config()):
        from_dict({"seqlen": 1})
    assert os.listdir("runs") == ["first"]


def test_a_value_error_of_a_library_is_a_failure_and_keeps_its_files(in_tmp):
    with pytest.raises(ValueError), open_run(config()):
        json.loads("{")
    assert summary()["status"] == "failed" and summary()["error"].startswith("JSONDecodeError: ")


def test_only_our_own_value_errors_are_the_users_mistake():
    for mistake, call in ((True, lambda: from_dict({"seqlen": 1})), (False, lambda: int("x")), (False, lambda: 1 / 0)):
        with pytest.raises(Exception) as caught:
            call()
        # A frame of this test stands innermost for int("x"), as a library's would.
        assert is_mistake(caught.value) is mistake


def test_an_existing_name_is_an_error_and_left_alone(in_tmp):
    with open_run(config()) as run:
        run.log({"step": 1})
    before = {name: Path(f"runs/run/{name}").read_text() for name in os.listdir("runs/run")}
    with pytest.raises(ValueError, match=r"runs/run exists already: continue it with resume=runs/run"):
        with open_run(config()):
            pass
    assert {name: Path(f"runs/run/{name}").read_text() for name in os.listdir("runs/run")} == before


def test_a_run_that_another_process_is_at_work_on_is_not_resumed_beside_it(in_tmp):
    with open_run(config()) as run:
        run.log({"step": 1})
        before = {file.name: file.read_text() for file in run.path.iterdir()}
        with pytest.raises(ValueError, match="runs/run is the run of another process"), open_run(config(resume=True)):
            pass
        assert {file.name: file.read_text() for file in run.path.iterdir()} == before
    with open_run(config(resume=True)):
        pass


def test_resume_goes_on_in_the_same_directory(in_tmp):
    with pytest.raises(KeyboardInterrupt), open_run(config()) as run:
        run.log({"step": 1})
        run.update(first_loss=5.0)
        raise KeyboardInterrupt
    with open_run(config(resume=True)) as run:
        assert run.summary["first_loss"] == 5.0
        run.log({"step": 2})
    assert [line["step"] for line in metrics()] == [1, 2]
    assert summary()["status"] == "ok" and read_json(run.path / "manifest.json")["num_resumes"] == 1


def test_resume_without_such_a_run_is_an_error(in_tmp):
    with pytest.raises(ValueError, match="resume=true, but runs/run holds no run"), open_run(config(resume=True)):
        pass
    assert os.listdir() == []


def test_rewind_drops_later_steps_and_a_torn_line(in_tmp):
    with open_run(config()) as run:
        for step in range(1, 6):
            run.log({"step": step})
        with open("runs/run/metrics.jsonl", "a") as file:
            file.write('{"step": 6, "lo')
        run.rewind(3)
        run.log({"step": 4})
    assert [line["step"] for line in metrics()] == [1, 2, 3, 4]


@pytest.mark.parametrize("had_folder", [True, False])
def test_a_refused_run_takes_away_what_it_made_and_no_more(in_tmp, had_folder):
    if had_folder:
        os.mkdir("mine")
    with pytest.raises(ValueError, match="abacus"), open_run(config(runs_dir="mine")):
        choose_device("abacus")
    assert os.listdir() == (["mine"] if had_folder else []) and not (had_folder and os.listdir("mine"))


@pytest.mark.parametrize("runs_dir", ["file", "file/deeper"])
def test_a_runs_dir_that_cannot_be_made_is_an_error(in_tmp, runs_dir):
    Path("file").touch()
    with pytest.raises(ValueError, match="runs_dir="), open_run(config(runs_dir=runs_dir)):
        pass
    assert os.listdir() == ["file"]


def test_a_full_disk_at_the_start_leaves_nothing(in_tmp, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as caught, open_run(config()):
        pass
    assert "runs_dir=" in one_line(caught.value) and os.listdir() == []


def test_a_full_disk_later_keeps_what_was_logged(in_tmp, monkeypatch):
    real = os.replace

    def full(source, target):
        if os.path.exists("full"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(source, target)

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space left"), open_run(config()) as run:
        run.log({"step": 1})
        Path("full").touch()
        run.update(final_loss=1.0)
    assert len(metrics()) == 1
    assert not [name for name in os.listdir("runs/run") if name.startswith(".")]


def test_a_write_that_fails_keeps_the_old_file_and_leaves_no_other(in_tmp, monkeypatch):
    write_atomically(in_tmp / "a.json", "old")

    def fail(source, target):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError):
        write_atomically(in_tmp / "a.json", "new")
    assert os.listdir() == ["a.json"] and Path("a.json").read_text() == "old"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_who_may_read_a_runs_files_is_the_umasks_to_say(in_tmp, umask, mode):
    before = os.umask(umask)
    try:
        with open_run(config()) as run:
            run.log({"step": 1})
        Plan([LayerPlan()]).save(run.path / "plan.json")
    finally:
        os.umask(before)
    files = {path.name: path.stat().st_mode & 0o777 for path in run.path.iterdir()}
    assert files == dict.fromkeys(("config.yaml", "manifest.json", "summary.json", "metrics.jsonl", "plan.json"), mode)


def test_the_default_name_says_what_runs():
    cfg = from_dict({"model": {"name": "meta-llama/Llama-3.1-8B"}, "seq_len": 65536, "strategy": {"name": "full"}})
    assert default_name(cfg).startswith("full-Llama-3.1-8B-65536-20")


def test_other_ranks_write_nothing(in_tmp, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    with open_run(config(tracker="wandb"), Ranks(rank=1, num_ranks=2)) as run:
        run.log({"step": 1})
        run.describe(x=1)
        run.update(final_loss=1.0)
        run.console.say("hello")
        run.console.end(run.summary, run.path)
    assert os.listdir() == [] and capsys.readouterr().out == ""


def test_no_secret_reaches_any_file(in_tmp, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", HEX_KEY)
    monkeypatch.setenv("MY_SERVICE_TOKEN", "plain-looking-secret")
    monkeypatch.setattr(
        "sys.orig_argv",
        [
            "python",
            "train.py",
            f"model.name=https://user:{HF_TOKEN}@host/model",
            "hub_token=abc123",
            "+x=plain-looking-secret",
        ],
    )
    cfg = config(model={"name": "m", "config": {"hub_token": "seen-nowhere", "note": f"key {HEX_KEY}"}})
    with pytest.raises(RuntimeError), open_run(cfg) as run:
        run.describe(note=HF_TOKEN, api_key="seen-nowhere", url="https://user:seen-nowhere@host/x")
        run.log({"step": 1, "note": "plain-looking-secret"})
        raise RuntimeError(f"401 for {HF_TOKEN}")
    text = "".join(path.read_text() for path in run.path.rglob("*") if path.is_file())
    for secret in (HF_TOKEN, HEX_KEY, "plain-looking-secret", "seen-nowhere", "abc123"):
        assert secret not in text
    assert "***" in text


def test_what_only_sounds_like_a_secret_stays():
    plain = {
        "tokenizer": "byte",
        "tokens": 5,
        "eos_token_id": 1,
        "eos_token": "</s>",
        "tokens_per_second": 9.5,
        "command": "x tokenizer=byte",
    }
    assert manifest.scrub(plain) == plain


def test_the_commit_of_a_model_stays_so_that_the_run_can_be_resumed(monkeypatch):
    named = {
        "model": {"revision": HEX_KEY, "name": f"/root/.cache/huggingface/hub/models--a--b/snapshots/{HEX_KEY}"},
        "command": f"python train.py model.revision={HEX_KEY} \"++model.revision='{HEX_KEY}'\"",
    }
    assert manifest.scrub(named) == named
    assert HEX_KEY not in str(manifest.scrub({"revision": f"x {HEX_KEY}", "key": HEX_KEY, "url": f"https://h/{HEX_KEY}"}))
    monkeypatch.setenv("WANDB_API_KEY", HEX_KEY)
    assert HEX_KEY not in str(manifest.scrub(named))


def test_the_commit_is_recorded_whole():
    git = manifest.collect(["train.py"])["git"]
    assert git is None or len(git["commit"]) == 40


def test_the_command_is_what_was_typed(in_tmp, monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["/usr/bin/python3", "train.py", "+strategy=full", "name=a b"])
    with open_run(config()) as run:
        pass
    assert run.manifest["command"] == "python train.py +strategy=full 'name=a b'"


def test_degrees_without_their_ranks_are_refused_before_anything_is_written(in_tmp):
    with pytest.raises(ValueError, match="parallel.shard=8 needs 8 ranks"), open_run(config(parallel={"shard": 8})):
        pass
    with (
        pytest.raises(ValueError, match="parallel.sequence=3. Choose a multiple"),
        open_run(config(parallel={"sequence": 3}), Ranks(num_ranks=3)),
    ):
        pass
    assert os.listdir() == []
