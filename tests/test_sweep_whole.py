"""A whole sweep through train.py's launcher, four of its twelve jobs meeting bad ends (case 19 of sweeps)."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = [pytest.mark.cli, pytest.mark.timeout(1200)]

# train.py, but for what becomes of three jobs while the file `fates` is there.
PROGRAM = """
import os, sys, time
sys.path.insert(0, {root!r})
import train
from recipes.cli import main

def task(cfg):
    if os.path.exists("fates"):
        fate = (cfg.strategy.name, cfg.seq_len)
        if fate == ("full", 64):
            sys.exit(0)
        if fate == ("selective", 128):
            held = bytearray(2**28)
            raise RuntimeError(f"holding {{len(held) >> 20}} MiB")
        if fate == ("none", 256):
            with train.open_run(cfg):
                time.sleep(600)
    train.train(cfg)

main(task)
"""
WORDS = [
    "-m", "+strategy=none,full,selective", "seq_len=64,128,256,4096", "sweep.name=twelve", "steps=2", "batch_size=1",
    "eval.batches=0", "data=text", "data.path=notes.txt", "data.packing=concat", "device=cpu",
]  # fmt: skip
BAD = {"02-none-seq_len=256", "03-none-seq_len=4096", "04-full-seq_len=64", "09-selective-seq_len=128"}


def start(*words):
    return subprocess.run([sys.executable, "job.py", *WORDS, *words], capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip


def rows():
    return {row["name"]: row for row in json.loads(Path("runs/twelve/sweep.json").read_text())["jobs"]}


def kill_from_outside(name):
    """Wait until the job of that name has begun, then kill it and nothing else."""
    while not Path(f"runs/twelve/{name}/summary.json").exists():
        time.sleep(0.1)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if f"name='{name}'" in words:
            os.kill(int(process.name), signal.SIGKILL)


def test_twelve_jobs_four_bad_ends_eight_ok_and_a_second_start_runs_the_four(in_tmp):
    Path("notes.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    Path("job.py").write_text(PROGRAM.format(root=str(ROOT)))
    Path("fates").touch()
    threading.Thread(target=kill_from_outside, args=("02-none-seq_len=256",), daemon=True).start()
    # Keeping everything takes 380 MiB at 4,096 tokens, the other two strategies 160 to 170.
    # It is told so before its first step, so it is forced to try.
    done = start("sweep.job_memory_gib=0.25", "on_predicted_oom=warn")
    assert done.returncode == 1 and "4 of 12 jobs did not end ok" in done.stderr
    ends = {name: row["status"] for name, row in rows().items()}
    assert len(ends) == 12 and {name for name, status in ends.items() if status != "ok"} == BAD
    assert ends["03-none-seq_len=4096"] == "oom" and "allocate" in rows()["03-none-seq_len=4096"]["error"]
    assert ends["02-none-seq_len=256"] == "killed" and rows()["02-none-seq_len=256"]["exit_code"] == -signal.SIGKILL
    assert ends["04-full-seq_len=64"] == "failed" and "code 0 before" in rows()["04-full-seq_len=64"]["error"]
    assert ends["09-selective-seq_len=128"] == "failed"
    assert "holding 256 MiB" in rows()["09-selective-seq_len=128"]["error"]
    assert all(row["peak_bytes"] > 0 for row in rows().values() if row["status"] == "ok")
    for name in ("02-none-seq_len=256", "03-none-seq_len=4096"):  # the folder says it too
        assert json.loads(Path(f"runs/twelve/{name}/summary.json").read_text())["status"] == ends[name]
    assert f"wandb sync {Path('runs/twelve')}/*/wandb/offline-run-*" in done.stdout

    before = {name: os.stat(f"runs/twelve/{name}/metrics.jsonl").st_mtime_ns for name in set(ends) - BAD}
    Path("fates").unlink()
    done = start("sweep.job_memory_gib=2", "sweep.resume=true")
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in rows().values()] == ["ok"] * 12
    assert before == {name: os.stat(f"runs/twelve/{name}/metrics.jsonl").st_mtime_ns for name in before}
    assert done.stdout.count("== twelve: ") == 4 and Path("runs/twelve/report.html").exists()
