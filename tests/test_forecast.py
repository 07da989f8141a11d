"""Every run is predicted before its first step: said, recorded beside what is measured, refused if asked for."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch
from test_loop_recipes import losses, run_program, text  # noqa: F401

from ckpt.engine import media
from ckpt.fake import Unpredictable
from ckpt.hardware import DEVICES
from recipes import forecast, pretrain
from recipes.config import Hardware
from recipes.errors import RunStopped


def summary_of(run):
    return json.loads((run.path / "summary.json").read_text())


@pytest.mark.parametrize(
    "values",
    [
        pytest.param({"strategy": {"name": "full"}, "grad_accum": 2, "dtype": "bf16"}, marks=pytest.mark.slow),
        {"strategy": {"name": "selective"}, "tile_mlp": "auto", "loss": "full"},
        pytest.param(
            {"strategy": {"name": "auto", "budget_gib": 0.02, "objective": "flops"}, "steps": 3},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["full", "tiles", "auto"],
)
def test_a_run_records_the_peak_that_it_will_have(tmp_path, text, values):  # noqa: F811
    run, _ = run_program(tmp_path, text, seq_len=256, **values)
    summary = summary_of(run)
    assert abs(summary["predicted_peak_bytes"] / summary["peak_bytes"] - 1) < 0.001
    recorded = json.loads((run.path / "manifest.json").read_text())["prediction"]
    assert recorded["peak_bytes"] == summary["predicted_peak_bytes"] and recorded["hardware"] == "cpu"


def test_predicting_changes_no_bit_of_the_run(tmp_path, text, monkeypatch):  # noqa: F811
    values = {"strategy": {"name": "selective"}, "model": _with_dropout()}
    values["data"] = {"source": "text", "path": text, "packing": "none", "augment": "crop"}
    _, predicted = run_program(tmp_path, text, name="a", **values)

    def nothing(cfg, config, device, run):
        return forecast.Foreseen(forecast.strategies.make("selective"), 1)

    monkeypatch.setattr(pretrain, "foresee", nothing)
    _, plain = run_program(tmp_path, text, name="b", **values)
    assert losses(predicted) == losses(plain)


def _with_dropout():
    from test_loop_recipes import SMALL

    return {**SMALL, "config": {**SMALL["config"], "attention_dropout": 0.1}}


def test_a_run_that_would_not_fit_ends_before_its_first_step_if_asked_to(tmp_path, text):  # noqa: F811
    values = {"hardware": {"memory_gib": 0.0001}, "on_predicted_oom": "error"}
    with pytest.raises(RunStopped, match="predicted peak of .* more than cpu has .* To fit: ") as caught:
        run_program(tmp_path, text, **values)
    assert caught.value.status == "predicted_oom"
    summary = json.loads((tmp_path / "runs" / "run" / "summary.json").read_text())
    assert summary["status"] == "predicted_oom" and summary["predicted_peak_bytes"] > 0.0001 * 2**30
    assert summary["first_loss"] is None and not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


def test_a_run_that_would_not_fit_is_warned_about_and_goes_on(tmp_path, text, monkeypatch):  # noqa: F811
    said = _listen(monkeypatch)
    run, lines = run_program(tmp_path, text, hardware={"memory_gib": 0.0001}, steps=3)
    assert len(lines) == 3 and run.status == "ok"
    assert any(line.startswith("warning: the predicted peak of") for line in said)


def test_hardware_names_another_device_that_is_judged_while_the_record_stays_comparable(tmp_path, text, monkeypatch):  # noqa: F811
    said = _listen(monkeypatch)
    run, _ = run_program(tmp_path, text, hardware={"name": "h100"}, steps=3)
    assert any("on h100" in line and "s a step (estimate)" in line for line in said)
    summary = summary_of(run)
    assert abs(summary["predicted_peak_bytes"] / summary["peak_bytes"] - 1) < 0.001


@pytest.mark.parametrize("error", [Unpredictable("op nonzero decides"), RuntimeError("no fake kernel")])
def test_a_run_that_cannot_be_predicted_goes_on_and_says_why(tmp_path, text, monkeypatch, error):  # noqa: F811
    said = _listen(monkeypatch)

    def refuse(*args, **kwargs):
        raise error

    monkeypatch.setattr(forecast, "Simulator", refuse)
    run, _ = run_program(tmp_path, text, steps=3)
    assert run.status == "ok" and summary_of(run)["predicted_peak_bytes"] is None
    assert any(line.startswith("not predicted: ") and str(error) in line for line in said)


def test_a_strategy_that_fits_no_op_is_refused_before_weights_are_made(tmp_path, text, monkeypatch):  # noqa: F811
    monkeypatch.setattr(pretrain, "build_model", lambda *args: pytest.fail("the model was made"))
    with pytest.raises(ValueError, match="matched no op"):
        run_program(tmp_path, text, strategy={"name": "selective", "keep": "no_such_op"})


def test_the_config_knows_every_device_of_the_table():
    names = next(f.type for f in dataclasses.fields(Hardware) if f.name == "name")
    assert {name.strip(" '\"") for name in names.removeprefix("Literal[").rstrip("]").split(",")} == {
        "auto", "measure", *DEVICES
    }  # fmt: skip


def _listen(monkeypatch):
    said = []
    from recipes.console import Console

    monkeypatch.setattr(Console, "say", lambda self, line: said.append(line))
    return said


def test_generators_are_where_they_were(tmp_path, text, monkeypatch):  # noqa: F811
    states = []
    real = forecast.foresee

    def watched(*args):
        states.append(torch.get_rng_state())
        foreseen = real(*args)
        states.append(torch.get_rng_state())
        return foreseen

    monkeypatch.setattr(pretrain, "foresee", watched)
    run_program(tmp_path, text, steps=1)
    assert torch.equal(*states)


@pytest.mark.parametrize("target", ["host", "disk"])
def test_a_run_without_room_for_what_it_offloads_is_refused_before_its_first_step(tmp_path, text, monkeypatch, target):  # noqa: F811
    monkeypatch.setattr(media, "available_memory", lambda: 1000)
    monkeypatch.setattr(media.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match=r"offload: \d\.\d\d GiB do not fit .* where 0.00 GiB are free"):
        run_program(tmp_path, text, strategy={"name": "offload", "target": target})
