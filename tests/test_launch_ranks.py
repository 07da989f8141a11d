"""Ranks started on this machine: one line for a mistake, the first failure's exit code, the signal of a killed rank."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist
ROOT = Path(__file__).resolve().parent.parent
THREE_HEADS = [f"model.config.{key}=3" for key in ("num_attention_heads", "num_key_value_heads")]
THREE_HEADS += ["model.config.hidden_size=96"]
RANK = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    {what}
time.sleep(60)
"""

RUN = """
import os, signal, sys, time
from recipes.cli import main
from recipes.config import Config
from recipes.distributed import start_ranks
from recipes.rundir import open_run

def job(cfg: Config) -> None:
    with start_ranks(cfg) as ranks, open_run(cfg, ranks) as run:
        run.logged = True
        ranks.sum_over_rows(1.0)
        open(f"pid_{ranks.rank}", "w").write(str(os.getpid()))
        if cfg.seed == 1 and ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if cfg.seed == 1:
            ranks.sum_over_rows(1.0)
        time.sleep(120)

main(job)
"""


def launch(tmp_path, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "recipes.launch", "--standalone", "--nproc-per-node", "2", *words],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip


@pytest.mark.parametrize(
    "what, code, said",
    [
        ("sys.exit(2)", 2, ""),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "error: rank 1 was ended by SIGKILL\n"),
    ],
)
def test_the_first_failure_ends_all_ranks_with_its_exit_code(tmp_path, what, code, said):
    program = tmp_path / "rank.py"
    program.write_text(RANK.format(what=what))
    done = launch(tmp_path, str(program))
    assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize(
    "words, said",
    [
        (["parallel.shard=3"], "the parallel degrees, shard 3, need 3 ranks, and there are 2."),
        (["parallel.sequence=2", "seq_len=63"], "seq_len=63 cannot be divided over parallel.sequence=2."),
        (
            ["parallel.tensor=2", *THREE_HEADS],
            "parallel.tensor=2 does not divide the 3",
        ),
    ],
)
def test_a_mistake_is_one_line_of_one_rank(tmp_path, words, said):
    done = launch(
        tmp_path, "train.py", "device=cpu", "model.init=random", "tracker=none", "steps=2", "seq_len=64",
        f"runs_dir={tmp_path}", *words,
    )  # fmt: skip
    errors = [line for line in done.stderr.splitlines() if line.startswith("error")]
    assert done.returncode == 2 and len(errors) == 1 and said in errors[0], done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def start(tmp_path: Path, seed: int) -> subprocess.Popen:
    (tmp_path / "run.py").write_text(RUN)
    words = ["device=cpu", "tracker=none", "name=run", f"seed={seed}", f"runs_dir={tmp_path}"]
    return subprocess.Popen(
        [sys.executable, "-m", "recipes.launch", "--standalone", "--nproc-per-node", "2", "run.py", *words],
        cwd=tmp_path, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_a_rank_that_is_killed_leaves_a_run_that_is_recorded_as_failed(tmp_path):
    job = start(tmp_path, seed=1)
    _, said = job.communicate(timeout=240)
    assert job.returncode == 137 and "error: rank 1 was ended by SIGKILL" in said
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and "another rank was ended" in summary["error"], summary
    assert "Traceback" not in said


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells children of their parent's end on Linux only")
def test_ranks_end_with_a_launcher_that_is_killed(tmp_path):
    job = start(tmp_path, seed=0)
    deadline = time.monotonic() + 240
    while len(pids := [int(text) for path in tmp_path.glob("pid_*") if (text := path.read_text())]) < 2:
        assert time.monotonic() < deadline and job.poll() is None
        time.sleep(0.1)
    job.send_signal(signal.SIGKILL)
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline, "ranks were left behind"
        time.sleep(0.1)
    job.communicate()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "interrupted"
