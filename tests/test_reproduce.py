"""A recorded run comes out again bit by bit, and what differs is named: data, losses, peak, machine."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import yaml

from recipes.config import from_dict, to_dict
from recipes.programs import run_program
from recipes.recorded import read_run
from recipes.report.points import read_points
from recipes.reproduce import TOLERANCE, compare_runs, reproduce
from recipes.rundir import open_run

ROOT = Path(__file__).resolve().parent.parent
REFERENCES = sorted(path.parent for path in (ROOT / "results" / "reference").glob("*/config.yaml"))
TINY = {
    "name": "tiny", "init": "random", "tokenizer": "byte",
    "config": {
        "model_type": "llama", "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run of four steps on three small documents."""
    folder = tmp_path_factory.mktemp("first")
    (folder / "text").mkdir()
    for number in range(3):
        (folder / "text" / f"{number}.txt").write_text(f"Document {number}. " + "words and more words. " * 20)
    cfg = from_dict({
        "runs_dir": str(folder / "runs"), "name": "first", "tracker": "none", "steps": 4, "seq_len": 64,
        "device": "cpu", "model": TINY, "data": {"source": "text", "path": str(folder / "text"), "eval_fraction": 0.0},
        "eval": {"batches": 0}, "strategy": {"name": "selective"},
    })  # fmt: skip
    with open_run(cfg) as run:
        run_program(cfg, run)
    shutil.rmtree(run.train_state)
    return run.path


@pytest.fixture
def copy(first, tmp_path):
    """A copy of the run with a text of its own, to be spoilt."""
    shutil.copytree(first.parent.parent / "text", tmp_path / "text")
    path = shutil.copytree(first, tmp_path / "runs" / "first")
    edit(path / "config.yaml", lambda cfg: cfg["data"].update(path=str(tmp_path / "text")))
    return path


def edit(path, change):
    load, dump = (yaml.safe_load, yaml.safe_dump) if path.suffix == ".yaml" else (json.loads, json.dumps)
    values = load(path.read_text())
    change(values)
    path.write_text(dump(values))


def again(path):
    said = []
    return reproduce(path, str(path.parent), say=said.append), said


def test_a_run_is_reproduced_bit_by_bit_on_the_same_stack(copy):
    verdict, said = again(copy)
    assert verdict.reproduced
    assert verdict.text.startswith("reproduced: 4 steps, losses and gradient norms equal bit by bit")
    assert "peak" in verdict.text and "(+0.00%)" in verdict.text
    assert not any(difference.matters for difference in verdict.differences)
    assert "same stack" in said[-1]


def test_one_altered_byte_of_the_data_is_told_apart_before_anything_is_trained(copy):
    text = copy.parent.parent / "text" / "1.txt"
    raw = bytearray(text.read_bytes())
    raw[40] ^= 1
    text.write_bytes(raw)
    verdict, _ = again(copy)
    assert not verdict.reproduced and verdict.text.startswith("differs: data sha256: ")
    assert [path.name for path in copy.parent.iterdir()] == ["first"]


def test_another_seed_is_told_apart_by_its_first_loss(copy):
    edit(copy / "config.yaml", lambda cfg: cfg.update(seed=1))
    verdict, _ = again(copy)
    assert not verdict.reproduced and verdict.text.startswith("differs: loss at step 1 was ")


def test_another_stack_is_listed_and_held_to_the_tolerance(copy):
    edit(copy / "manifest.json", lambda manifest: manifest["packages"].update(torch="1.0.0"))
    verdict, said = again(copy)
    assert verdict.reproduced and any(line.startswith("torch: 1.0.0 recorded, 2.") for line in said)
    assert said[-1] == f"another stack: losses may differ by {TOLERANCE['fp32']:g}, relative (fp32)"


def altered(first, step=None, loss=0.0, peak=1.0):
    recorded = read_run(first)
    metrics = [{**m, "loss": m["loss"] * (1 + loss * (m["step"] == step))} for m in recorded.metrics]
    summary = recorded.summary | {"peak_bytes": int(recorded.summary["peak_bytes"] * peak)}
    return dataclasses.replace(recorded, metrics=metrics, summary=summary)


@pytest.mark.parametrize(("change", "tolerance", "says"), [
    ({"step": 3, "loss": 1e-9}, None, "differs: loss at step 3 was"),
    ({"step": 3, "loss": 1e-4}, 1e-3, "reproduced: 4 steps, losses within 1.0e-04 (loss at step 3)"),
    ({"step": 2, "loss": 2e-3}, 1e-3, "differs: loss at step 2 was"),
    ({"peak": 1.009}, None, "reproduced"),
    ({"peak": 1.02}, None, "differs: peak was"),
    ({"peak": 0.98}, 1e-3, "differs: peak was"),
])  # fmt: skip
def test_losses_and_peaks_are_held_to_their_tolerance(first, change, tolerance, says):
    assert compare_runs(read_run(first), altered(first, **change), tolerance).text.startswith(says)


def test_a_run_cut_short_differs(first):
    recorded = read_run(first)
    short = dataclasses.replace(recorded, metrics=recorded.metrics[:3])
    assert "4 steps recorded, 3 now" in compare_runs(recorded, short, None).text


def spoil(path, what):
    match what:
        case "missing":
            shutil.rmtree(path)
        case "empty":
            shutil.rmtree(path)
            path.mkdir()
        case "running":
            edit(path / "summary.json", lambda summary: summary.update(status="running"))
        case "half":
            (path / "metrics.jsonl").unlink()
        case "numbers":
            (path / "metrics.jsonl").write_text("3\n4\n")
        case "binary":
            (path / "metrics.jsonl").write_bytes(b"\xff\xfe\n" + (path / "metrics.jsonl").read_bytes())
        case "torn":
            (path / "summary.json").write_text('{"status": "o')
        case "schema":
            edit(path / "manifest.json", lambda manifest: manifest.update(schema_version=99))
        case "sweep":
            (path / "sweep.json").write_text('{"schema_version": 1, "jobs": []}')
        case "yaml":
            (path / "config.yaml").write_text("a: [")
        case "key":
            edit(path / "config.yaml", lambda cfg: cfg.update(seqlen=3))


def test_what_a_sweep_set_aside_is_no_run_to_give(copy):
    sweep = copy.parent
    (sweep / "sweep.json").write_text('{"schema_version": 1, "jobs": []}')
    shutil.copytree(copy, sweep / ".a.try0")
    with pytest.raises(ValueError, match=r"holds a sweep: give one of its jobs, such as .*/runs/first\."):
        read_run(sweep)
    (sweep / "sweep.json").unlink()
    assert [point.name for point in read_points(sweep).points] == ["first"]


@pytest.mark.parametrize(("what", "says"), [
    ("missing", "is no folder"), ("empty", "holds no run"), ("running", "ended with status running"),
    ("half", "is half written"), ("torn", "is no JSON"), ("schema", "schema_version 99, and this program reads 1"),
    ("numbers", "line 1 of .* no JSON object with a step"), ("binary", "line 1 of .* no JSON object"),
    ("sweep", "holds a sweep: give one of its jobs"), ("yaml", "cannot be read"), ("key", "seqlen is no key"),
])  # fmt: skip
def test_a_folder_without_a_whole_run_is_one_clear_line(copy, what, says):
    spoil(copy, what)
    with pytest.raises(ValueError, match=says) as caught:
        again(copy)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", REFERENCES, ids=lambda path: path.name)
def test_reference_runs_are_reproduced_from_a_fresh_clone(path, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    verdict = reproduce(path, str(tmp_path), say=print)
    assert verdict.reproduced, verdict.text
    assert to_dict(from_dict(read_run(path).config))["data"]["path"].startswith("results/reference/")


def test_there_are_reference_runs_and_they_are_small():
    assert len(REFERENCES) >= 2
    files = [file for path in REFERENCES for file in path.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 40_000
