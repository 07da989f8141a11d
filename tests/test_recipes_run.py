"""Every recipe's CPU-sized twin trains, with the strategy that its header's command names, and its loss falls."""

import re

import pytest

from recipes.cli import CONF, compose
from recipes.programs import run_program
from recipes.recorded import read_run
from recipes.rundir import open_run

TWINS = sorted((CONF / "recipe").glob("*_cpu.yaml"))
LONG = 1024  # tokens a row from which a twin takes more than a few seconds


def twin(path):
    tokens = int(re.search(r"^seq_len: (\d+)", path.read_text(), re.MULTILINE)[1])
    slow = tokens >= LONG or path.stem != "llama3_8b_32k_lora_cpu"  # one stands for all in the default suite
    return pytest.param(path, id=path.stem, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize("path", [twin(path) for path in TWINS])
def test_twin_trains_as_its_header_says(path, in_tmp):
    if "/peft: lora" in path.read_text():
        pytest.importorskip("peft")
    command = re.search(r"# Command: +python train.py (.+)", path.read_text())[1].split()
    cfg = compose([*command, "name=twin", "tracker=none", "device=cpu", "eval.batches=1", "save_every=-1", "steps=3"])
    with open_run(cfg) as run:
        run.console.rich.quiet = True
        run_program(cfg, run)
    run = read_run("runs/twin")
    assert run.summary["status"] == "ok" and run.summary["final_loss"] < run.summary["first_loss"]
    assert run.summary["recompute_flops"] > 0


def test_every_long_recipe_has_a_twin():
    big = {path.stem for path in (CONF / "recipe").glob("*_*.yaml") if not path.stem.endswith("_cpu")}
    assert big == {path.stem.removesuffix("_cpu") for path in TWINS} and len(big) >= 6
