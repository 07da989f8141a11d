"""`batch_size=auto`: the fastest micro-batch within a budget, tokens of an optimizer step unchanged."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ckpt.auto import BudgetTooSmall
from recipes import auto_batch
from recipes.auto_batch import Tried, choose_batch
from recipes.cli import compose
from recipes.model import load_config

AUTO = ("+strategy=auto", "strategy.budget_gib=1")


def config(*words: str, strategy: tuple[str, ...] = AUTO):
    return compose(["batch_size=auto", "grad_accum=4", *strategy, *words])


def choose(monkeypatch, speeds: dict[int, tuple[float, float]]):
    """Choose with predictions given by rows: tokens a second, share of recompute; rows without one do not fit."""

    def predicted(cfg, config, strategy, say):
        if cfg.batch_size not in speeds:
            raise BudgetTooSmall("does not fit")
        return Tried(cfg.batch_size, cfg.grad_accum, *speeds[cfg.batch_size])

    monkeypatch.setattr(auto_batch, "predicted", predicted)
    said: list[str] = []
    return choose_batch(config(), None, said.append), said


def test_the_fastest_micro_batch_is_taken_and_the_rows_of_a_step_stay(monkeypatch):
    cfg, said = choose(monkeypatch, {1: (100.0, 0.0), 2: (130.0, 0.1), 4: (120.0, 0.2)})
    assert (cfg.batch_size, cfg.grad_accum) == (2, 2)
    assert "more recompute with a larger batch beats less with 1 rows" in said[-1]


def test_less_recompute_may_beat_a_larger_batch(monkeypatch):
    cfg, said = choose(monkeypatch, {1: (100.0, 0.0), 2: (90.0, 0.3)})
    assert (cfg.batch_size, cfg.grad_accum) == (1, 4)
    assert "less recompute beats a larger batch" in said[-1]


def test_a_budget_too_small_for_one_row_is_the_users_mistake(monkeypatch):
    with pytest.raises(ValueError, match="does not fit"):
        choose(monkeypatch, {})


def test_any_other_mistake_is_no_answer_to_what_fits(monkeypatch):
    def predicted(cfg, config, strategy, say):
        if cfg.batch_size == 2:
            raise ValueError("strategy.hardware='h101' is unknown")
        return Tried(cfg.batch_size, cfg.grad_accum, 100.0, 0.0)

    monkeypatch.setattr(auto_batch, "predicted", predicted)
    with pytest.raises(ValueError, match="h101"):
        choose_batch(config(), None, print)


def test_a_strategy_without_a_budget_is_refused():
    with pytest.raises(ValueError, match="batch_size=auto needs a budget"):
        choose_batch(config(strategy=("+strategy=full",)), None, print)


def test_a_number_is_left_alone():
    cfg = config("batch_size=3")
    assert choose_batch(cfg, None, print) is cfg


@pytest.mark.slow
def test_rows_are_predicted_by_plans_within_the_budget():
    said: list[str] = []
    cfg = config("seq_len=64", "grad_accum=2", "strategy.budget_gib=4", "strategy.hardware=h100")
    threads = torch.get_num_threads()
    chosen = choose_batch(cfg, load_config(cfg.model, cfg.seq_len), said.append)
    assert torch.get_num_threads() == threads
    assert chosen.batch_size * chosen.grad_accum == 2
    assert dataclasses.replace(chosen, batch_size="auto", grad_accum=2) == cfg
    assert sum("tokens/s" in line for line in said) == 2


@pytest.mark.slow
@pytest.mark.timeout(1000)
def test_a_run_trains_with_the_batch_it_chose_within_the_budget(in_tmp):
    Path("notes.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    budget = 0.031  # keeping everything takes more
    words = ["+strategy=auto", f"strategy.budget_gib={budget}", "strategy.hardware=cpu", "strategy.bitwise=true",
             "batch_size=auto", "grad_accum=2", "steps=4", "seq_len=256", "eval.batches=0", "data=text",
             "data.path=notes.txt", "tracker=none", "name=chosen", "model.config.num_hidden_layers=2"]  # fmt: skip
    train = Path(__file__).resolve().parent.parent / "train.py"
    done = subprocess.run([sys.executable, train, *words], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert "batch_size=auto: 1 x 2 micro-batches" in done.stdout
    summary = json.loads(Path("runs/chosen/summary.json").read_text())
    plan = json.loads(Path("runs/chosen/plan.json").read_text())
    assert summary["status"] == "ok"
    assert summary["peak_bytes"] <= budget * 2**30
    assert summary["batch_size"] in (1, 2)
    # What was planned, and beside it what was measured.
    assert plan["source"]["predicted_peak_bytes"] <= plan["source"]["budget_bytes"]
    assert plan["source"]["measured_peak_bytes"] == summary["peak_bytes"]
    assert summary["predicted_peak_bytes"] == pytest.approx(summary["peak_bytes"], rel=1e-5)
    assert plan["source"]["measured_step_seconds"] > 0
    assert summary["step_seconds"] > 0 and summary["predicted_step_seconds"] > 0
