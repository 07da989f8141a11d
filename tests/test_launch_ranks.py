"""Ranks started on this machine: one line for a mistake, the first failure's exit code, the signal of a killed rank."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.dist
THREE_HEADS = [f"model.config.{key}=3" for key in ("num_attention_heads", "num_key_value_heads")]
THREE_HEADS += ["model.config.hidden_size=96"]
RANK = """
import os, signal, sys, time
if os.environ["RANK"] == "1":
    {what}
time.sleep(60)
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
