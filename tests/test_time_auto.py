"""scripts/time_auto.py: plans at each baseline's peak, times in pairs. What the times are is not for a test."""

from __future__ import annotations

import pytest
import torch

from scripts import time_auto
from scripts.time_auto import Pair, main


def test_a_baseline_is_timed_beside_a_plan_at_its_peak(tmp_path, capsys):
    threads, out = torch.get_num_threads(), tmp_path / "table.md"
    try:
        main(["--tokens", "32", "--layers", "2", "--hidden", "64", "--rounds", "2", "--out", str(out),
              "--only", "library, every layer"])  # fmt: skip
    finally:
        torch.set_num_threads(threads)
    *_, row = out.read_text().splitlines()
    name, theirs, ours, ratio, interval = (cell.strip() for cell in row.strip("| ").split("|")[:5])
    assert name == "library, every layer"
    assert float(ours) <= float(theirs)
    low, high = map(float, interval.split(" to "))
    assert 0 < low <= float(ratio) <= high
    assert row in capsys.readouterr().out


def test_ratios_are_ours_over_theirs_whoever_comes_first(monkeypatch):
    monkeypatch.setattr(time_auto, "seconds", lambda model, ids, enable: enable)
    assert time_auto.ratios(None, None, 1.0, 2.0, 4) == (0.5,) * 4


@pytest.mark.parametrize(("ratios", "said"), [((0.9, 1.0, 0.95), ""), ((1.2, 1.21, 1.19), "slower")])
def test_a_row_says_where_the_whole_interval_lies_above_one(ratios, said):
    assert Pair("x", 2**20, 2**20, ratios).row().split("|")[-2].strip() == said
