"""Train states over ranks: saved on two, resumed on one and on four; a rank that dies or a disk that is full."""

import time
from pathlib import Path

import dist_state
import pytest
from dist_kit import RankFailed, run_ranks

pytestmark = pytest.mark.dist


def test_saved_on_two_ranks_resumes_on_one_and_on_four(tmp_path):
    losses = run_ranks(dist_state.save_and_go_on, 2, {"shard": 2}, str(tmp_path), timeout=600)
    for degrees in ({"shard": 2}, {"shard": 4}, {"shard": 2, "tensor": 2}):
        num_ranks = 4 if degrees != {"shard": 2} else 2
        resumed = run_ranks(dist_state.resume, num_ranks, degrees, str(tmp_path), timeout=600)
        assert resumed == pytest.approx(losses[3:], abs=1e-6), degrees
    assert dist_state.resume(0, None, str(tmp_path)) == pytest.approx(losses[3:], abs=1e-6)


def test_a_rank_that_dies_while_saving_costs_only_the_steps_since_the_last_save(tmp_path):
    start = time.monotonic()
    with pytest.raises(RankFailed, match="rank [01]"):
        run_ranks(dist_state.die_while_saving, 2, str(tmp_path), timeout=600)
    assert time.monotonic() - start < 400  # and no hang
    assert [path.name for path in tmp_path.glob("step_*") if not path.name.endswith("partial")] == ["step_00000003"]
    expected = dist_state.run(*dist_state.start(None), 6)
    assert dist_state.resume(0, None, str(tmp_path)) == pytest.approx(expected[3:], abs=1e-6)


def test_a_full_disk_on_one_rank_is_told_to_all_and_spoils_nothing(tmp_path):
    said = run_ranks(dist_state.fill_one_disk, 2, str(tmp_path), timeout=600)
    assert "rank 1" in said and "No space left" in said
    assert [path.name for path in Path(tmp_path).iterdir()] == ["step_00000001"]
