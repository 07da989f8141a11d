"""scripts/launch: shellcheck, and a dry run of the Slurm script with stand-ins for srun, scontrol and Python."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.cli
LAUNCH = Path(__file__).resolve().parent.parent / "scripts" / "launch"

SRUN = """#!/usr/bin/env bash
# Two tasks of one node, one after the other; the first exit code that is not 0 is srun's.
echo "srun $1" >>calls
shift
code=0
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 "$@" || code=$?
done
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>calls
if [[ $1 == show ]]; then echo node1; echo node2; fi
"""
PYTHON = """#!/usr/bin/env bash
echo "rank $RANK local $LOCAL_RANK of $WORLD_SIZE at $MASTER_ADDR: ${*:2}" >>calls
sleep "${NAP:-0}"
exit "${CODE:-0}"
"""


@pytest.fixture
def cluster(tmp_path):
    """A folder with the stand-ins first on the PATH."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


def environment(cluster, **more):
    return os.environ | {
        "PATH": f"{cluster / 'bin'}:{os.environ['PATH']}",
        "CKPT_ROOT": str(cluster),
        "PYTHON": str(cluster / "bin" / "python"),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "node[1-2]",
        **more,
    }


def sbatch(cluster, *words, **more):
    done = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sbatch"), *words], env=environment(cluster, **more), cwd=cluster, timeout=60,
        capture_output=True, text=True,
    )  # fmt: skip
    calls = cluster / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_shellcheck_finds_nothing():
    scripts = sorted(map(str, LAUNCH.iterdir()))
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True, timeout=60)
    assert len(scripts) == 2 and done.returncode == 0, done.stdout


def test_every_task_gets_its_rank_and_the_first_node(cluster):
    done, calls = sbatch(cluster, "name=long", "+strategy=full", "model.name=a b")
    assert done.returncode == 0, done.stderr
    assert "srun --kill-on-bad-exit=1" in calls
    assert [line for line in calls if line.startswith("rank")] == [
        f"rank {rank} local {rank} of 2 at node1: name=long +strategy=full model.name=a b" for rank in (0, 1)
    ]


def test_a_run_with_a_train_state_is_resumed(cluster):
    state = cluster / "runs" / "long" / "train_state" / "step_00000003" / "state.json"
    state.parent.mkdir(parents=True)
    state.touch()
    done, calls = sbatch(cluster, "name=long", "steps=9")
    assert done.returncode == 0, done.stderr
    assert calls[-1].endswith("at node1: resume=runs/long steps=9")


def test_a_run_that_died_before_its_first_save_is_put_aside(cluster):
    (cluster / "runs" / "long").mkdir(parents=True)
    done, calls = sbatch(cluster, "name=long")
    assert done.returncode == 0 and calls[-1].endswith(": name=long")
    assert [path.name.partition(".")[0] for path in (cluster / "runs").iterdir()] == ["long"]
    assert not (cluster / "runs" / "long").exists()


def test_an_interrupted_job_is_queued_again_and_a_failed_one_is_not(cluster):
    done, calls = sbatch(cluster, "name=long", CODE="130")
    assert done.returncode == 0 and calls[-1] == "scontrol requeue 4711"
    done, calls = sbatch(cluster, "name=long", CODE="1")
    assert done.returncode == 1 and calls[-1].startswith("rank 1")


def test_the_batch_shell_outlives_sigterm_and_queues_the_job_again(cluster):
    job = subprocess.Popen(
        ["bash", str(LAUNCH / "slurm.sbatch"), "name=long"], env=environment(cluster, NAP="2", CODE="130"),
        cwd=cluster, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while "rank" not in ((cluster / "calls").read_text() if (cluster / "calls").exists() else ""):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    job.send_signal(signal.SIGTERM)
    _, said = job.communicate(timeout=60)
    assert job.returncode == 0 and "SIGTERM" in said
    assert (cluster / "calls").read_text().splitlines()[-1] == "scontrol requeue 4711"


def test_a_run_without_a_name_is_refused(cluster):
    done, calls = sbatch(cluster, "+strategy=full")
    assert done.returncode == 2 and "name=" in done.stderr and not calls
