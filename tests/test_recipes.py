"""The recipes of conf/recipe: each CPU twin trains as its header says."""

import contextlib
import json
import math
import re
import shlex

import pytest

import train
from ckpt import strategies
from ckpt.predict import predict
from recipes.cli import CONF, compose
from recipes.model import load_config
from recipes.planning import model_without_weights, target_device
from recipes.workload import workload_of

RECIPES = sorted((CONF / "recipe").glob("*_*.yaml"))
TWINS = [file for file in RECIPES if file.stem.endswith("_cpu")]


def command(file):
    """The words of the command in a recipe's header."""
    line = re.search(r"# Command: +(.+)", file.read_text())[1]
    words = shlex.split(line.partition("train.py")[2])
    return words


def marked(file):
    """One twin stands for all in the default suite; with 1,024 tokens a row and more they take minutes."""
    slow = file.stem != "llama3_8b_32k_lora_cpu"
    return pytest.param(file, id=file.stem, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("file", [marked(file) for file in TWINS])
def test_a_twin_trains_by_its_headers_command_to_its_headers_result(in_tmp, file):
    if "/peft: lora" in file.read_text():
        pytest.importorskip("peft")
    cfg = compose([*command(file), "tracker=none", "name=twin", "device=cpu"])
    with contextlib.redirect_stdout(None):
        train.train(cfg)
    summary = json.loads((in_tmp / "runs/twin/summary.json").read_text())
    lines = [json.loads(line) for line in (in_tmp / "runs/twin/metrics.jsonl").read_text().splitlines()]
    assert summary["status"] == "ok" and len(lines) == cfg.steps == 2
    assert all(line["loss"] == pytest.approx(math.log(384), abs=0.3) for line in lines)
    assert summary["recompute_flops"] > 0
    adapter = in_tmp / "runs/twin/export/adapter_model.safetensors"
    assert adapter.exists() is (cfg.peft.name == "lora")


@pytest.mark.slow
@pytest.mark.parametrize("file", [file for file in RECIPES if file not in TWINS], ids=lambda file: file.stem)
def test_a_recipe_fits_its_headers_device_with_its_headers_peak(in_tmp, file):
    """Predicted, for one rank: no such device is at hand. The shape is that of conf/model, so no hub is asked."""
    header = file.read_text()
    memory, peak = (float(re.search(pattern, header)[1]) for pattern in (r" (\d+) GiB", r"a peak of ([\d.]+) GiB"))
    cfg = compose([*command(file), "model.init=random", f"hardware={ {80: 'h100', 141: 'h200'}[memory] }"])
    model = model_without_weights(cfg, load_config(cfg.model, cfg.seq_len))
    strategy = strategies.make(cfg.strategy.name, **cfg.strategy.fields)
    found = predict(model, strategy, workload_of(cfg), target_device(cfg, "cpu"))
    assert found.fits and found.peak_bytes / 2**30 == pytest.approx(peak, abs=0.06)
    if on_host := re.search(r"and (\d+) GiB on the host", header):
        assert found.host_bytes / 2**30 == pytest.approx(float(on_host[1]), abs=0.6)


def test_every_recipe_of_a_size_has_its_twin():
    big = {file.stem for file in RECIPES if file not in TWINS}
    assert {f"{name}_cpu" for name in big} == {file.stem for file in TWINS} and len(big) >= 6
