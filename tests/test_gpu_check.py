"""scripts/gpu_check.py: all its code runs on a CPU, as a toy."""

import json
from concurrent.futures import Future

import pytest
import torch

from scripts import gpu_check
from scripts.gpu_check_scale import TOY
from scripts.gpu_check_setup import Check, OutOfTime


def run(tmp_path, *arguments):
    """Run the toy; return exit code and report."""
    code = gpu_check.main(["--toy", "--json", str(tmp_path / "report.json"), *arguments])
    return code, json.loads((tmp_path / "report.json").read_text())


def test_sections_that_need_no_prediction_pass_as_a_toy(tmp_path, capsys):
    code, report = run(tmp_path, "--only", "exact,offload,pool,packed")
    assert code == 0
    assert {row["section"] for row in report["rows"]} == {"exact", "offload", "pool", "packed"}
    asked = [row for row in report["rows"] if row["ok"] is not None]
    assert len(asked) >= 23 and all(row["ok"] for row in asked)
    printed = capsys.readouterr().out
    assert printed.strip().splitlines()[-2].startswith(f"{len(asked)} of {len(asked)} asked for were got")
    assert report["device"].startswith("CPU") and report["torch"] == torch.__version__


@pytest.mark.slow
def test_every_section_passes_as_a_toy(tmp_path):
    code, report = run(tmp_path, "--seconds", "600")
    assert code == 0, report["rows"]
    assert {row["section"] for row in report["rows"]} == set(gpu_check.SECTIONS)
    assert sum(row["ok"] is not None for row in report["rows"]) >= 35


def test_a_section_that_fails_is_recorded_and_the_others_run(tmp_path, monkeypatch):
    def broken(check):
        check.note("before", "-", "seen", None)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")

    monkeypatch.setitem(gpu_check.SECTIONS, "exact", broken)
    code, report = run(tmp_path, "--only", "exact,pool")
    assert code == 1
    first, failed, *others = report["rows"]
    assert first["what"] == "before" and failed["ok"] is False and "OutOfMemoryError" in failed["got"]
    assert {row["section"] for row in others} == {"pool"} and all(row["ok"] for row in others)


def test_wrong_gradients_would_be_seen(tmp_path, monkeypatch):
    from scripts import gpu_check_memory

    true = gpu_check_memory._gradients
    calls = []

    def off_by_a_bit(model, ids):
        calls.append(1)
        found = true(model, ids)
        return found if len(calls) != 5 else [g * 1.01 for g in found]

    monkeypatch.setattr(gpu_check_memory, "_gradients", off_by_a_bit)
    code, report = run(tmp_path, "--only", "exact")
    assert code == 1 and sum(row["ok"] is False for row in report["rows"]) == 1


def test_no_section_begins_when_the_time_is_used_up(tmp_path):
    code, report = run(tmp_path, "--only", "pool,offload", "--seconds", "0")
    assert code == 0 and [row["what"] for row in report["rows"]] == ["not finished"] * 2


def test_without_a_device_it_says_how_to_run(capsys):
    if torch.cuda.is_available():
        pytest.skip("a device is there")
    assert gpu_check.main([]) == 2
    assert "--toy" in capsys.readouterr().err


def test_unknown_section_is_named(capsys):
    with pytest.raises(SystemExit):
        gpu_check.main(["--toy", "--only", "speeed"])
    assert "speeed" in capsys.readouterr().err


@pytest.mark.slow
def test_longest_context_is_the_last_multiple_that_fits():
    from ckpt.predict import predict
    from scripts.gpu_check_ahead import longest
    from scripts.gpu_check_scale import STRATEGIES

    strategy, tiles = STRATEGIES["offload, 8 tiles"]
    peaks = {
        times: predict(
            TOY.config(TOY.num_layers), strategy, TOY.workload(times * TOY.context_tokens, tile_mlp=tiles)
        ).peak_bytes
        for times in (3, 4)
    }
    assert longest("toy", peaks[4] - 1, "offload, 8 tiles", "chunked") == 3 * TOY.context_tokens
    with pytest.raises(ValueError, match="do not fit"):
        longest("toy", 1000, "library", "full")


def test_asked_twice_is_run_once():
    calls = []

    def count(scale_name, value):
        calls.append(value)
        return scale_name

    check = Check(TOY, 10)
    assert check.ask(count, 1) is check.ask(count, 1) and check.ask(count, 2).result() == "toy"
    assert calls == [1, 2]


def test_what_ends_the_check_leaves_the_findings_of_the_sections_before(tmp_path, monkeypatch):
    def ended(check):
        raise KeyboardInterrupt

    monkeypatch.setitem(gpu_check.SECTIONS, "offload", ended)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, "--only", "pool,offload")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["sections"] == ["pool", "offload"] and list(report["seconds"]) == ["pool"] and report["rows"]


def test_a_failure_without_a_message_is_recorded(tmp_path, monkeypatch):
    def broken(check):
        raise AssertionError

    monkeypatch.setitem(gpu_check.SECTIONS, "exact", broken)
    code, report = run(tmp_path, "--only", "exact")
    assert code == 1 and report["rows"][0]["got"] == "AssertionError"


def test_a_prediction_that_does_not_come_ends_the_section_in_time():
    check = Check(TOY, 0.05)
    with pytest.raises(OutOfTime, match="before its prediction was made"):
        check.result(Future())
    done = Future()
    done.set_result(3)
    assert check.result(done) == 3  # what is there is taken even then


def test_a_report_that_cannot_be_written_is_told_at_the_start(capsys):
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(["--toy", "--json", "/dev/null/report.json"])
    assert ended.value.code == 2 and "/dev/null/report.json" in capsys.readouterr().err


def test_mfu_leaves_out_the_scores_that_a_fused_backward_makes_again(tmp_path, monkeypatch):
    from scripts import gpu_check_speed

    seen = []
    true = gpu_check_speed.step_flops

    def seeing(*arguments):
        seen.append(true(*arguments))
        return seen[-1]

    monkeypatch.setattr(gpu_check_speed, "step_flops", seeing)
    _, report = run(tmp_path, "--only", "speed")
    (counted,) = seen
    assert 0 < counted.model_attention < counted.hardware_attention
    needed = counted.model_matmul + counted.model_attention
    assert {row["model_flops"] for row in report["rows"]} == {needed}


@pytest.mark.slow
def test_plans_for_the_device_are_predicted_within_their_budgets_there():
    from ckpt.hardware import find
    from ckpt.plan import Plan
    from ckpt.predict import read
    from ckpt.simulate import Simulator
    from scripts.gpu_check_ahead import planned
    from scripts.gpu_check_scale import H200

    simulator = Simulator(H200.config(H200.num_layers), H200.workload(H200.auto_tokens))
    for budget, plan in planned("h200", H200.num_layers, H200.auto_tokens, H200.num_budgets):
        prediction = read(simulator.run(Plan.from_dict(plan)), simulator.work, find("h200"))
        assert max(prediction.peak_bytes, prediction.first_step_peak_bytes) <= budget


@pytest.mark.cli
def test_other_processes_predict_for_the_device_and_end_when_told():
    from scripts.gpu_check_ahead import predicted
    from scripts.gpu_check_scale import H200

    check = Check(H200, 120)
    made = check.result(check.ask(predicted, 2, 1024, ("full",)))
    assert made["full"]["device_only_bytes"] > 0
    check.ask(predicted, 2, 2048, ("full",))  # not waited for
    (worker, *_) = check._pool._processes.values()
    check.close()
    worker.join(20)
    assert not worker.is_alive()


@pytest.mark.parametrize("name, ok", [("NVIDIA H200", True), ("NVIDIA H100 80GB HBM3", False)])
def test_another_device_than_the_predictions_are_for_is_told(name, ok):
    from scripts.gpu_check_scale import H200

    check = Check(H200, 10)
    gpu_check.note_device(check, name)
    assert [(row["got"], row["ok"]) for row in check.rows] == [(name, ok)]
