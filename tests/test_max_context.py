"""The longest sequence: what is predicted to fit does fit, one step more does not, and a stopped search goes on."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from recipes import longest
from recipes.config import from_dict
from recipes.errors import RunStopped
from recipes.recorded import read_run
from recipes.rundir import open_run

ROOT = Path(__file__).resolve().parent.parent
TINY = {
    "name": "tiny", "init": "random", "tokenizer": "byte",
    "config": {
        "model_type": "llama", "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    },
}  # fmt: skip


def config(**values):
    return from_dict({
        "name": "search", "tracker": "none", "device": "cpu", "batch_size": 1, "model": TINY,
        "strategy": {"name": "full"}, "hardware": {"memory_gib": 0.004}, "search": {"step": 64, "confirm": "no"},
        "data": {"packing": "concat"},
    } | values)  # fmt: skip


def search(start=(), **values):
    cfg = config(**values)
    with open_run(cfg) as run:
        run.console.rich.quiet = True
        found = longest.find_longest(cfg, run, start)
    return found, json.loads((run.path / "longest.json").read_text())


def test_longest_predicted_fits_and_one_step_more_does_not(in_tmp):
    found, record = search()
    peaks = {int(length): tried["peak_bytes"] for length, tried in record["predicted"]["peaks"].items()}
    best = found["longest_predicted"]
    assert best >= 256 and best % 64 == 0
    assert peaks[best] <= found["budget_bytes"] == int(0.004 * 2**30) < peaks[best + 64]
    assert "longest_measured" not in found and record["predicted"]["longest_predicted"] == best
    assert read_run("runs/search").summary["longest_predicted"] == best


def test_a_stopped_search_goes_on_from_its_record(in_tmp, monkeypatch):
    found, record = search()
    monkeypatch.setattr(longest.Search, "_predict", lambda self, n: pytest.fail(f"{n} was known"))
    assert search(resume=True) == (found, record)


def test_a_record_of_another_search_is_refused(in_tmp):
    search()
    with pytest.raises(ValueError, match="another config or budget"):
        search(resume=True, strategy={"name": "none"})
    path = Path("runs/search/longest.json")
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 3', 1))
    with pytest.raises(ValueError, match="schema_version 3"):
        search(resume=True)


def test_the_models_positions_and_search_most_cap_the_length(in_tmp):
    found, _ = search(hardware={"memory_gib": 1.0})
    assert (found["longest_predicted"], found["capped_by"]) == (4096, "positions")
    found, _ = search(hardware={"memory_gib": 1.0}, search={"step": 64, "most": 500, "confirm": "no"}, name="b")
    assert (found["longest_predicted"], found["capped_by"]) == (448, "search.most")


def test_nothing_that_fits_is_a_clear_error(in_tmp):
    with pytest.raises(ValueError, match="not even 64 tokens fit into .* Raise hardware.memory_gib"):
        search(hardware={"memory_gib": 0.0001})


@pytest.mark.slow
def test_host_memory_limits_what_is_offloaded(in_tmp):
    offload = {"strategy": {"name": "offload"}, "hardware": {"memory_gib": 0.01}}
    free, record = search(**offload)
    inputs = record["predicted"]["peaks"][str(free["longest_predicted"])]["host_bytes"]
    half = {"step": 64, "confirm": "no", "host_budget_gib": inputs / 2 / 2**30}
    bound, record = search(**offload, search=half, name="b")
    assert bound["longest_predicted"] < free["longest_predicted"]
    assert 0 < bound["longest_predicted_host_bytes"] <= inputs / 2


@pytest.mark.parametrize("step", [1, 64])
def test_confirming_finds_the_true_limit_wherever_the_prediction_lies(step):
    for most in (step * 9, step * 40):
        for true in range(0, most + 1, step):
            for predicted in range(step, most + 1, step):
                tried = []

                def fits(length, true=true, most=most, tried=tried):
                    tried.append(length)
                    assert 0 < length <= most and length % step == 0
                    return length <= true

                assert longest.confirm(fits, predicted, step, most) == true
                assert len(tried) == len(set(tried)) <= 13


@pytest.mark.parametrize(("summary", "code", "fits"), [
    ({"status": "ok", "peak_bytes": 5}, 0, True), ({"status": "oom"}, 1, False), ({"status": "nan"}, 1, None),
])  # fmt: skip
def test_a_try_that_ends_in_neither_way_stops_the_search(in_tmp, summary, code, fits):
    Path("job.py").write_text(f"""
import json, os, sys
words = dict(word.split("=", 1) for word in sys.argv[1:])
folder = os.path.join(words["runs_dir"].strip("'"), words["name"].strip("'"))
os.makedirs(folder)
json.dump({summary!r}, open(folder + "/summary.json", "w"))
sys.exit({code})
""")
    wanted = {"search": {"step": 64, "most": 64, "confirm": "yes"}, "start": [sys.executable, "job.py"]}
    if fits is None:
        with pytest.raises(RunStopped, match="ended with nan"):
            search(**wanted)
        return
    found, record = search(**wanted)
    assert found["longest_measured"] == (64 if fits else 0)
    assert record["measured"]["tries"]["64"]["status"] == summary["status"]


@pytest.mark.cli
@pytest.mark.timeout(900)
def test_on_a_cpu_the_prediction_is_confirmed_by_real_steps_under_a_limit(in_tmp):
    Path("notes.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    words = ["+strategy=full", "hardware.memory_gib=0.125", "search.step=1024", "batch_size=1", "name=s",
             "tracker=none", "data=text", "data.path=notes.txt", "data.packing=concat"]  # fmt: skip
    done = subprocess.run([sys.executable, str(ROOT / "scripts" / "max_context.py"), *words], capture_output=True,
                          text=True, env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)})  # fmt: skip
    assert done.returncode == 0, done.stderr
    record = json.loads(Path("runs/s/longest.json").read_text())
    predicted, measured = record["predicted"]["longest_predicted"], record["measured"]["longest_measured"]
    tries = record["measured"]["tries"]
    assert abs(measured - predicted) <= 1024 and tries[str(measured)]["status"] == "ok"
    assert tries[str(measured + 1024)]["status"] == "oom"
    ran = tries[str(measured)]
    assert abs(ran["predicted_peak_bytes"] / ran["peak_bytes"] - 1) < 0.01
    assert f"longest measured:  {measured:,} tokens" in done.stdout
    assert yaml.safe_load(Path(f"runs/s/try-{measured}/config.yaml").read_text())["seq_len"] == measured
