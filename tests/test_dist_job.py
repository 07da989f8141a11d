"""Jobs of several ranks: they end cleanly, and when one fails the others say whose fault it was."""

import json
import socket

import dist_job
import pytest
from dist_kit import run_ranks

from recipes.cli import USAGE_ERROR

pytestmark = pytest.mark.dist


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_twenty_two_rank_runs_in_a_row_end_cleanly(tmp_path):
    losses = set()
    for _ in range(20):
        losses.add(run_ranks(dist_job.train_once, 2, free_port(), str(tmp_path), timeout=300, group=False))
    assert len(losses) == 1


def test_a_failing_rank_is_named_to_the_others_and_in_the_summary(tmp_path):
    said, seconds = run_ranks(dist_job.fail_on_rank_1, 2, free_port(), str(tmp_path), timeout=300, group=False)
    assert said == "rank 1: RuntimeError: boom on purpose"
    assert seconds < 60
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and "rank 1: RuntimeError: boom on purpose" in summary["error"]


def test_a_mistake_that_rank_0_finds_is_a_mistake_on_every_rank(tmp_path):
    codes = run_ranks(dist_job.mistake_of_rank_0, 2, free_port(), str(tmp_path), timeout=300, group=False)
    assert codes == [USAGE_ERROR, USAGE_ERROR]
