"""The command line, from outside: exit codes, one line on stderr, files of a run. Each test starts train.py."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TINY = ["steps=2", "seq_len=64", "batch_size=1", "eval.batches=0", "data=text", "data.path=notes.txt", "tracker=none"]

pytestmark = [pytest.mark.cli, pytest.mark.timeout(600)]


@pytest.fixture
def folder(in_tmp):
    Path("notes.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    return in_tmp


def train(*words, **environment):
    return subprocess.run([sys.executable, str(ROOT / "train.py"), *words], capture_output=True, text=True, timeout=300,
                          stdin=subprocess.DEVNULL, env=os.environ | environment)  # fmt: skip


def only_run(where="runs"):
    (path,) = Path(where).iterdir()
    return path, json.loads((path / "summary.json").read_text())


@pytest.mark.parametrize(("words", "strategy"), [
    ([], "none"), (["strategy=full"], "full"), (["+strategy=full"], "full"), (["+strategy=selective"], "selective"),
])  # fmt: skip
def test_every_spelling_trains(folder, words, strategy):
    done = train(*words, *TINY)
    assert done.returncode == 0, done.stderr
    path, summary = only_run()
    assert (
        summary["status"] == "ok" and summary["strategy"] == strategy and path.name.startswith(f"{strategy}-small-64-")
    )
    files = {"config.yaml", "manifest.json", "metrics.jsonl", "summary.json", "plan.json", "memory.png", "train_state"}
    assert files <= set(os.listdir(path))
    assert "peak memory" in done.stdout and str(path) in done.stdout


def test_the_same_seed_gives_the_same_metrics(folder):
    losses = []
    for name in ("a", "b"):
        assert train("+strategy=selective", f"name={name}", *TINY).returncode == 0
        lines = [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]
        losses.append([(line["step"], line["loss"], line["grad_norm"], line["tokens"]) for line in lines])
    assert losses[0] == losses[1] and len(losses[0]) == 2


def test_a_multirun_runs_every_combination(folder):
    done = train(
        "+strategy=none,full", "-m", "seq_len=32,64", "sweep.name=s", *(word for word in TINY if "seq_len" not in word)
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(Path("runs/s/sweep.json").read_text())["jobs"]
    assert [(row["name"], row["status"]) for row in rows] == [
        ("00-none-seq_len=32", "ok"), ("01-none-seq_len=64", "ok"), ("02-full-seq_len=32", "ok"),
        ("03-full-seq_len=64", "ok")]  # fmt: skip
    assert sorted(os.listdir("runs")) == ["s"] and sorted(os.listdir()) == ["notes.txt", "runs"]


def test_a_failing_job_of_a_multirun_shows_in_the_exit_code(folder):
    done = train(
        "-m", "data.path=notes.txt,missing.txt", "sweep.name=s", *(word for word in TINY if "path" not in word)
    )
    assert done.returncode == 1
    rows = json.loads(Path("runs/s/sweep.json").read_text())["jobs"]
    assert [row["status"] for row in rows] == ["ok", "failed"] and "missing.txt" in rows[1]["error"]


# Those of the config alone stand in tests/test_config.py, in process; here one of each way out, and what runs meet.
MISTAKES = [
    ["seqlen=3"],
    ["+strategy=full", "strategy.n=3"],
    ["+strategy=foo"],
    ["steps=1,2"],
    ["a", "b"],
    ["seq_len=200000"],
    ["data.path=missing.txt"],
    ["data.path=empty.txt"],
    ["data.path=latin1.txt"],
    ["data.path=bad.jsonl"],
    ["data=chat", "data.path=silent.jsonl"],
    ["runs_dir=notes.txt"],
    ["name=taken"],
    ["resume=true", "name=nobody"],
    ["attn=flash_attention_3"],
    ["-m", "+strategy=foo,full"],
    ["--seq_len", "64"],
    ["-m", "seq_len=0,64"],
    ["model=hub", "model.name=no/such-model"],
]


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_a_mistake_is_one_line_exit_code_two_and_leaves_nothing(folder, words):
    Path("empty.txt").touch()
    Path("latin1.txt").write_bytes("caf\xe9".encode("latin-1") * 100)
    Path("bad.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    Path("silent.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}\n')
    Path("runs/taken").mkdir(parents=True)
    before = sorted(str(path) for path in folder.rglob("*"))
    keys = {word.lstrip("+").split("=")[0] for word in words}
    done = train(*(word for word in TINY if word.split("=")[0] not in keys), *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert sorted(str(path) for path in folder.rglob("*")) == before


def test_the_traceback_is_there_when_asked_for(folder):
    assert "Traceback" in train("seqlen=3", CKPT_TRACEBACK="1").stderr
    assert "Traceback" in train("seqlen=3", "debug=true").stderr


def test_help_lists_strategies_and_keys(folder):
    done = train("--help")
    assert done.returncode == 0 and "|every_n|full|none" in done.stdout and "optim.lr" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_records_and_the_run_goes_on_from_there(folder, number):
    words = ["steps=100000", "name=long", *(word for word in TINY if not word.startswith("steps"))]
    with subprocess.Popen([sys.executable, str(ROOT / "train.py"), *words], stderr=subprocess.PIPE, text=True) as job:
        metrics, deadline = Path("runs/long/metrics.jsonl"), time.monotonic() + 240
        while not (metrics.exists() and metrics.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.2)
        job.send_signal(number)
        _, errors = job.communicate(timeout=120)
    assert job.returncode == 130 and "python train.py resume=runs/long" in errors
    summary = json.loads(Path("runs/long/summary.json").read_text())
    done_steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert summary["status"] == "interrupted" and done_steps == list(range(1, len(done_steps) + 1))
    steps = done_steps[-1] + 2
    again = train("resume=runs/long", f"steps={steps}")
    assert again.returncode == 0, again.stderr
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == list(range(1, steps + 1))


def test_a_killed_run_has_lost_no_logged_step_and_goes_on_as_one_left_alone(folder):
    words = ["steps=16", "save_every=2", "optim.schedule=constant", "data.augment=mask", "+strategy=selective",
             *(word for word in TINY if not word.startswith("steps"))]  # fmt: skip
    with subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *words, "name=cut"], stdout=subprocess.DEVNULL
    ) as job:
        metrics, deadline = Path("runs/cut/metrics.jsonl"), time.monotonic() + 240
        while len(list(Path("runs/cut/train_state").glob("step_*[0-9]"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        job.kill()
    before = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert job.returncode == -signal.SIGKILL and 4 <= len(before) < 16
    assert [line["step"] for line in before] == list(range(1, len(before) + 1))
    assert train("resume=runs/cut").returncode == 0
    assert train(*words, "name=whole").returncode == 0
    cut, whole = ([json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]
                  for name in ("cut", "whole"))  # fmt: skip
    assert len(cut) == 16
    assert [(line["loss"], line["grad_norm"]) for line in cut] == [(line["loss"], line["grad_norm"]) for line in whole]
    assert [line["loss"] for line in before] == [line["loss"] for line in whole[: len(before)]]


def test_torchrun_in_front_of_a_multirun_is_refused(folder):
    done = train("-m", "+strategy=none,full", *TINY, RANK="0", WORLD_SIZE="2")
    assert done.returncode == 2 and "torchrun" in done.stderr
