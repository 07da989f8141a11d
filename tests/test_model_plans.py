"""The models of conf/model, on meta, planned by the very call with which a training run begins: no weight is made."""

import pytest

from ckpt.plan import Plan
from recipes.cli import compose, options
from recipes.device import choose_device
from recipes.forecast import foresee
from recipes.model import load_config
from recipes.rundir import open_run

GIB = 2**30
SHAPES = [name for name in options("model") if name not in ("hub", "small", "smollm2_135m")]


def foreseen(name, *words, seq_len=4096):
    """What `train.py model=NAME model.init=random ...` does before it makes its model; and what it recorded of it."""
    cfg = compose([f"model={name}", "model.init=random", "model.tokenizer=byte", "batch_size=1", "tracker=none",
                   f"seq_len={seq_len}", "device=cpu", "hardware=h100", f"name={name}", *words])  # fmt: skip
    with open_run(cfg) as run:
        found = foresee(cfg, load_config(cfg.model, cfg.seq_len), choose_device(cfg.device), run)
    return found, run


def test_a_models_shape_is_enough_to_say_what_a_run_of_it_takes(in_tmp, capsys):
    """Llama 3.2 1B: 1.236 B parameters, tied; fp32 masters and two AdamW moments make 12 bytes each."""
    found, run = foreseen("llama3_1b", "+strategy=selective", "dtype=bf16")
    residents = found.prediction.residents
    assert residents["optimizer_state"] == pytest.approx(12 * 1.2358e9, rel=1e-3)
    assert run.summary["predicted_peak_bytes"] == found.prediction.peak_bytes == sum(residents.values())
    assert "predicted peak" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_predicted(in_tmp, name):
    found, _ = foreseen(name, "+strategy=full")
    assert found.prediction is not None and found.prediction.peak_bytes > 4 * GIB


# The two mixtures of experts and Gemma take minutes to plan; they are predicted above.
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["llama3_1b", "llama3_8b", "mistral_7b", "qwen3_0_6b", "qwen3_8b"])
def test_every_dense_model_is_planned_within_a_budget(in_tmp, name):
    # long enough that activations, not the optimizer's step, set the peak of each
    full, none = (foreseen(name, f"+strategy={kind}", f"name={kind}", seq_len=16384)[0].prediction
                  for kind in ("full", "none"))  # fmt: skip
    budget = (full.peak_bytes + none.peak_bytes) / 2
    found, _ = foreseen(name, "+strategy=auto", f"strategy.budget_gib={budget / GIB}", seq_len=16384)
    assert full.peak_bytes < found.prediction.peak_bytes <= budget
    assert 0 < found.prediction.recompute_flops < full.recompute_flops
    plan = found.strategy
    assert any(layer.replay for layer in plan.layers)
    plan.save("plan.json")
    assert Plan.load("plan.json").layers == plan.layers
