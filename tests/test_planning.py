"""plan.py: what it predicts is what training measures, what it advises can be copied, mistakes are one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_loop_recipes import SMALL

from ckpt.fake import on_meta
from ckpt.hardware import find
from ckpt.longest import MOST_TOKENS
from ckpt.plan import Plan
from ckpt.predict import predict
from ckpt.simulate import Simulator
from ckpt.workload import Workload
from recipes import planning_program, planning_rows, planning_tables
from recipes.cli import compose
from recipes.config import from_dict
from recipes.planning import with_known_shape
from recipes.workload import workload_of
from scripts import predict_table

ROOT = Path(__file__).resolve().parent.parent


def config(folder, **values):
    return from_dict({"model": SMALL, "seq_len": 64, "output": "json", "plans_dir": str(folder), **values})


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The table of some strategies on a device that only some of them fit."""
    folder = tmp_path_factory.mktemp("plans")
    patch = pytest.MonkeyPatch()
    chosen = (("none", {}), ("every_n", {"n": 2}), ("selective", {"keep": "no_op"}), ("auto", {}))
    patch.setattr(planning_rows, "STRATEGIES", chosen)
    lines = []
    patch.setattr("rich.console.Console.print", lambda self, text, **kwargs: lines.append(text))
    cfg = config(folder, seq_len=512, hardware={"name": "h100", "memory_gib": 0.083})
    planning_program.main(cfg, ["model=small", "seq_len=512", "hardware=h100", "output=json"])
    patch.undo()
    return cfg, folder, json.loads(lines[-1])


def test_table_predicts_what_predict_does_and_marks_what_fits(planned):
    cfg, _, found = planned
    rows = {row["label"]: row for row in found["rows"]}
    from recipes.model import load_config
    from recipes.planning import model_without_weights

    model = model_without_weights(cfg, load_config(cfg.model, cfg.seq_len))
    expected = predict(model, "none", workload_of(cfg), "h100")
    assert rows["none"]["peak_bytes"] == expected.peak_bytes
    assert rows["none"]["step_seconds"] == expected.step_seconds
    for row in (rows["none"], rows["every_n (n=2)"]):
        assert row["fits"] == (row["peak_bytes"] <= found["device_bytes"])
        assert row["fits"] == (row["longest_seq_len"] >= cfg.seq_len)
    assert "matched no op" in rows["selective (keep=no_op)"]["error"]


def test_auto_stands_in_the_table_planned_for_the_device_and_no_slower_than_what_fits(planned):
    cfg, _, found = planned
    rows = {row["label"]: row for row in found["rows"]}
    auto = rows["auto"]
    assert auto["fits"] and auto["strategy"] == "auto"
    assert auto["step_seconds"] <= min(row["step_seconds"] for row in rows.values() if row.get("fits"))
    assert auto["longest_is_at_least"] and auto["longest_seq_len"] == rows["every_n (n=2)"]["longest_seq_len"]
    given = dict(word.removeprefix("strategy.").split("=") for word in auto["overrides"][1:])
    assert given["hardware"] == "h100"
    assert auto["peak_bytes"] - auto["device_only_bytes"] <= float(given["budget_gib"]) * 2**30 <= found["device_bytes"]


def test_a_model_out_of_reach_is_planned_by_its_written_out_shape_and_that_is_said(tmp_path):
    hub = dict(SMALL) | {"init": "pretrained", "name": "some-owner/no-such-model"}
    said = []
    cfg = with_known_shape(config(tmp_path, model=hub), said.append)
    assert cfg.model.init == "random" and "out of reach" in said[0]
    reached = config(tmp_path)
    assert with_known_shape(reached, said.append) is reached and len(said) == 1
    for unknown in ({"config": {}}, {"name": str(tmp_path)}):  # no shape is known; a folder that holds no model
        with pytest.raises(ValueError, match="cannot be loaded"):
            with_known_shape(config(tmp_path, model=hub | unknown), said.append)


def test_table_advises_the_fastest_that_fits_and_its_command_can_be_copied(planned):
    _, _, found = planned
    fitting = [row for row in found["rows"] if row.get("fits")]
    best = min(fitting, key=lambda row: row["step_seconds"])
    assert found["best"] == best["label"]
    words = found["command"].split()
    assert words[:2] == ["python", "train.py"] and set(best["overrides"]) <= set(words)
    assert not any(word.startswith(("hardware", "output")) for word in words)
    copied = compose(words[2:])
    assert (copied.seq_len, copied.model.name) == (512, "small")


def test_table_leaves_a_picture_and_the_figures(planned):
    _, folder, found = planned
    written = folder / "all-tiny-512"
    assert (written / "memory.png").read_bytes()[:4] == b"\x89PNG"
    assert json.loads((written / "prediction.json").read_text())["rows"] == found["rows"]


def test_one_strategy_is_shown_op_by_op_and_saved_as_a_plan(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(planning_program, "search_longest", lambda *args: 8192)
    cfg = config(tmp_path, strategy={"name": "selective"}, output="table", hardware={"name": "h100"})
    planning_program.main(cfg, [])
    text = capsys.readouterr().out
    for part in (
        "layers 0-2: replayed",
        "self_attn/attention#0",
        "keep",
        "nobody reads it again",
        "8,192*",
        "+strategy=selective",
    ):
        assert part in text
    plan = Plan.load(str(tmp_path / "selective-tiny-64" / "plan.json"))
    assert len(plan.layers) == 3
    planning_program.diff([str(tmp_path / "selective-tiny-64")] * 2)
    assert "the two plans do the same" in capsys.readouterr().out


def test_one_rank_of_many_is_planned_with_its_share_of_the_states(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(planning_program, "search_longest", lambda *args: 8192)
    found = {}
    for shard in (1, 2):
        mesh = {"parallel": {"shard": shard}, "hardware": {"name": "h100"}}
        cfg = config(tmp_path, strategy={"name": "full"}, output="table", **mesh)
        planning_program.main(cfg, [f"parallel.shard={shard}"])
        text = capsys.readouterr().out
        written = json.loads((tmp_path / "full-tiny-64" / "prediction.json").read_text())
        found[shard] = written["residents"]["optimizer_state"]
    assert "one rank of 2 (shard 2)" in text and "scripts/launch/torchrun.sh +strategy=full" in text
    assert found[2] == pytest.approx(found[1] / 2, rel=0.02)


def test_nothing_fits_says_what_would_help(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(planning_rows, "STRATEGIES", (("none", {}),))
    cfg = config(tmp_path, output="table", hardware={"name": "h100", "memory_gib": 0.0001})
    planning_program.main(cfg, [])
    text = capsys.readouterr().out
    assert "Nothing fits h100" in text and "peft=lora" in text and "none" in text


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"compile": True}, "compile=true is not predicted"),
        ({"model": {**SMALL, "config": {"model_type": "llamma"}}}, "no architecture.*Did you mean 'llama'"),
        ({"model": {**SMALL, "config": {"model_type": "vit"}}}, "no causal language model"),
        ({"seq_len": 100_000}, "beyond the 4096 positions"),
        ({"plans_dir": "/proc/plans"}, "cannot make /proc/plans"),
    ],
)
def test_mistakes_are_one_line(tmp_path, monkeypatch, values, said):
    monkeypatch.setattr(planning_rows, "STRATEGIES", (("none", {}),))
    monkeypatch.setattr(planning_rows, "search_longest", lambda *args: 64)
    with pytest.raises(ValueError, match=said) as caught:
        planning_program.main(config(tmp_path, **values), [])
    assert "\n" not in str(caught.value)


def test_a_forward_that_reads_values_names_the_op(tmp_path, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    original = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: original(self, x) * (2 if x.sum() > 0 else 1))
    with pytest.raises(ValueError, match=r"cannot be predicted: op .*lets the values of a tensor decide"):
        planning_program.main(config(tmp_path), [])


def test_diff_needs_two_plans(tmp_path):
    with pytest.raises(ValueError, match="takes two plans, got 1"):
        planning_program.diff(["a"])
    with pytest.raises(ValueError, match="holds no plan"):
        planning_program.diff([str(tmp_path), str(tmp_path)])


def test_layer_numbers_read_well():
    assert planning_tables.spans([0, 1, 2, 5]) == "0-2, 5"
    assert planning_tables.spans(list(range(0, 32, 2))) == "0, 2, ..., 30"
    assert planning_tables.spans([3]) == "3"


@pytest.mark.cli
def test_the_command_line_plans_and_refuses(tmp_path):
    def run(*words):
        return subprocess.run(
            [sys.executable, ROOT / "plan.py", *words], capture_output=True, text=True, cwd=tmp_path, timeout=280
        )

    ran = run("+strategy=full", "seq_len=128", "output=json", "hardware=rtx4090")
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["strategy"] == "full" and "predicting full" in ran.stderr
    wrong = run("hardware=h900")
    assert wrong.returncode == 2 and wrong.stderr.startswith("error: hardware=h900 is unknown")
    assert run("diff", "x").returncode == 2


def test_the_longest_sequence_ends_with_positions_that_are_learned():
    config = predict_table.config_of("gpt2")
    config.max_position_embeddings, config.num_hidden_layers = 200, 1
    simulator = Simulator(config, Workload(batch_size=1, seq_len=64, dtype="fp32"))
    device = find("cpu")
    _, prediction = planning_rows.predicted(simulator, "full", device)
    found = planning_rows.search_longest(simulator, "full", simulator.work, device, prediction)
    assert found == 192  # lengths are multiples of 64
    assert planning_rows._most_tokens(on_meta(predict_table.config_of("llama"))) == MOST_TOKENS
