"""The recipes of conf/recipe: each CPU twin trains as its header says."""

import contextlib
import json
import math
import re
import shlex

import pytest

import train
from recipes.cli import CONF, compose

TWINS = sorted((CONF / "recipe").glob("*_cpu.yaml"))


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


def test_every_recipe_of_a_size_has_its_twin():
    big = {file.stem for file in (CONF / "recipe").glob("*_*.yaml")} - {file.stem for file in TWINS}
    assert {f"{name}_cpu" for name in big} == {file.stem for file in TWINS} and len(big) >= 6
