"""scripts/bench.py: rows do what they say, cells are measured once, and the table says what was found."""

import json

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy

from ckpt.flops import FlopCounter
from scripts import bench, bench_compile, bench_rows, bench_table
from scripts.bench_cases import ALL, BEST, CASES, QUICK
from scripts.bench_measure import Reference, measured
from scripts.bench_rows import rows
from scripts.bench_store import Store, only_run


def run(folder, *arguments):
    bench.main(["--quick", "--out", str(folder), "--markdown", str(folder / "page" / "bench.md"), *arguments])
    return json.loads((folder / "quick.json").read_text()), (folder / "page" / "bench.md").read_text()


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    return folder, *run(folder)


def test_every_row_of_a_run_is_exact_and_stands_in_the_table(quick):
    folder, found, page = quick
    assert set(found["cells"]) == {
        *(f"same: {name}" for name in QUICK.same), *(f"best: {name}" for name in QUICK.best)
    }  # fmt: skip
    for key, cell in found["cells"].items():
        assert cell["peak_bytes"] > 0 and cell["what"] in page
        assert cell["gradients"] == "equal" or (key.startswith("best") and cell["gradient_error"] <= 2e-6)
    flops = {key: cell["flops"] for key, cell in found["cells"].items()}
    assert flops["same: none"] < flops["same: torchtitan + attention"] < flops["same: library 1"]
    assert flops["same: full"] == flops["same: library 1"]
    assert (folder / "page" / "bench.png").read_bytes()[:4] == b"\x89PNG"


def test_a_second_run_measures_and_times_nothing_again(quick, monkeypatch):
    folder, found, _ = quick
    monkeypatch.setattr(bench, "measured", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr(bench, "rounds", lambda *_: pytest.fail("timed again"))
    again, _ = run(folder)
    assert again == found and len(found["rounds"]) == QUICK.rounds


def test_a_row_measured_again_loses_its_old_times(quick, tmp_path):
    folder, found, _ = quick
    (tmp_path / "quick.json").write_text(json.dumps(found))
    again, _ = run(tmp_path, "--redo", "full", "--no-times")
    assert all("same: full" not in seconds and "same: none" in seconds for seconds in again["rounds"])


def test_figures_of_another_set_up_are_refused(quick, tmp_path):
    _, found, _ = quick
    (tmp_path / "quick.json").write_text(json.dumps(found | {"circumstances": {"torch": "1.0"}}))
    with pytest.raises(ValueError, match="another circumstances. Give --fresh"):
        Store(tmp_path, QUICK)
    assert Store(tmp_path, QUICK, fresh=True).cells == {}


def test_every_case_names_rows_that_there_are():
    for losses in ("same", "best"):
        known = set(rows(losses))
        assert {*ALL, *BEST} <= known
        for case in CASES.values():
            mine = getattr(case, losses)
            assert set(mine) <= known
            budgets = [rows(losses)[name].budget_of for name in mine]
            pairs = [pair for pair in zip(budgets, mine, strict=True) if pair[0]]
            assert all(mine.index(budget) < mine.index(name) for budget, name in pairs)


@pytest.mark.parametrize("name", ["trl", "torchtitan", "nemo"])
def test_a_peer_that_is_not_installed_runs_our_statement_and_says_so(name, monkeypatch):
    monkeypatch.setattr(bench_rows, "_version", lambda package: "")
    made = rows("same")
    assert made[name].source == "our statement"
    cell = measured(QUICK, made[name], made["none"], Reference(QUICK))
    assert cell["gradients"] == "equal"


def test_our_statement_of_trls_policy_executes_what_trls_does():
    pytest.importorskip("trl")
    executed = []
    for put in (bench_rows._trl(), lambda model: bench_rows._wrap(model, bench_rows._attention_kept)):
        model = QUICK.model()
        put(model)
        with FlopCounter() as counter:
            model(input_ids=QUICK.batch()[0], labels=QUICK.batch()[1], use_cache=False).loss.backward()
        executed.append(counter.by_op)
    assert executed[0] == executed[1]


def test_every_second_matmul_is_kept():
    class Context:
        is_recompute = False

    policy = bench_rows._every_second()()
    mm = torch.ops.aten.mm.default
    assert [policy(Context, mm) for _ in range(4)] == 2 * [
        CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE
    ]  # fmt: skip
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert policy(Context, attention) is CheckpointPolicy.MUST_SAVE
    without = bench_rows._every_second(with_attention=False)()
    assert without(Context, attention) is CheckpointPolicy.PREFER_RECOMPUTE


def test_a_peer_whose_policy_breaks_is_recorded_and_the_others_run(tmp_path, monkeypatch):
    def broken(model):
        raise RuntimeError("Tensor cached during selective activation checkpoint has been mutated\nmore")

    monkeypatch.setattr(bench_rows, "_every_second", lambda *_: None)
    monkeypatch.setattr(bench_rows, "_wrap", lambda model, policy: broken(model))
    found, page = run(tmp_path, "--only", "none,torchtitan*,full", "--no-times")
    refused = found["cells"]["same: torchtitan + attention"]["refused"]
    assert refused == "RuntimeError: Tensor cached during selective activation checkpoint has been mutated"
    assert "has been mutated" in page and "peak_bytes" in found["cells"]["same: full"]


def test_interval_holds_the_mean_and_narrows_with_agreement():
    low, middle, high = bench_table.interval([0.9, 1.0, 1.1, 1.0, 1.0])
    assert low < middle < high and middle == pytest.approx(0.998, abs=1e-3)
    assert bench_table.interval([1.0, 1.0, 1.0]) == (1.0, 1.0, 1.0)
    # Four degrees of freedom: 2.776 standard errors.
    import math
    import statistics

    logs = [math.log(x) for x in (0.9, 1.0, 1.1, 1.0, 1.0)]
    assert math.log(high / middle) == pytest.approx(2.776 * statistics.stdev(logs) / math.sqrt(5))
    assert bench_table.interval([1.0]) is None


def test_ratios_are_taken_within_a_round():
    rounds = [{"a": 2.0, "b": 1.0}, {"a": 30.0, "b": 10.0}, {"b": 1.0}]
    assert bench_table.paired(rounds, "a", "b") == [2.0, 3.0]


@pytest.mark.slow
def test_auto_is_planned_at_a_peers_peak_and_runs_no_more_flops(tmp_path, monkeypatch):
    import dataclasses

    case = dataclasses.replace(QUICK, seq_len=512, same=("none", "library 2", "auto @ library 2"), best=())
    monkeypatch.setattr(bench, "QUICK", case)
    found, page = run(tmp_path)
    (pair,) = bench_table.auto_pairs(found["cells"], found["rounds"]).values()
    assert pair["peak"] <= 1 and pair["flops"] <= 1
    assert found["cells"]["same: auto @ library 2"]["budget_bytes"] == found["cells"]["same: library 2"]["peak_bytes"]
    assert "auto's FLOPs / its" in page


@pytest.mark.slow
def test_compiled_points_replay_when_the_budget_is_small(tmp_path):
    import dataclasses

    from scripts.bench_compile import compile_points

    case = dataclasses.replace(QUICK, seq_len=512)
    store = Store(tmp_path, case)
    compile_points(case, store, num_rounds=2)
    cells = store.compiled["cells"]
    assert cells["budget 0.2"]["peak_bytes"] < cells["none"]["peak_bytes"] < cells["eager none"]["peak_bytes"]
    assert all(cell["gradient_error"] < 1e-4 for cell in cells.values() if "refused" not in cell)
    assert len(store.compiled["rounds"]) == 2


def test_readme_gets_the_table_between_its_markers(quick):
    _, found, _ = quick
    cells = found["cells"]
    cells = cells | {"same: auto @ library 1": cells["same: none"] | {"budget_bytes": 1}}
    text = f"before\n{bench_table.BEGIN}\nold\n{bench_table.END}\nafter\n"
    made = bench_table.put_into_readme(text, {"quick": found | {"cells": cells}})
    assert made.startswith("before\n") and made.endswith("after\n") and "old" not in made
    assert "activation_checkpointing_enable(every_n_layers=1)" in made and "1.243 | 1.000" in made
    assert bench_table.put_into_readme(made, {"quick": found | {"cells": cells}}) == made
    with pytest.raises(ValueError, match="no lines"):
        bench_table.put_into_readme("nothing", {"quick": found})


def test_asking_for_auto_alone_measures_the_row_that_its_budget_is_taken_from():
    options = bench.parse(["--cases", "llama", "--only", "auto @ trl", "--table"])
    assert list(bench.wanted(CASES["llama"], options)) == [
        f"{losses}: {name}" for losses in ("same", "best") for name in ("trl", "auto @ trl")
    ]


def test_auto_refused_for_want_of_a_peak_is_planned_once_there_is_one(quick, tmp_path, monkeypatch):
    import dataclasses

    _, found, _ = quick
    refused = {"refused": "ValueError: library 1 has no peak to plan for", "side": "ours", "what": "", "source": "",
               "loss": "chunked"}  # fmt: skip
    cells = {"same: library 1": found["cells"]["same: library 1"], "same: auto @ library 1": refused}
    (tmp_path / "quick.json").write_text(json.dumps(found | {"cells": cells, "rounds": []}))
    case = dataclasses.replace(QUICK, same=("library 1", "auto @ library 1"), best=())
    budgets = []

    def plan(self, row, budget):
        budgets.append(budget)
        raise ValueError("nothing fits")

    monkeypatch.setattr(bench, "QUICK", case)
    monkeypatch.setattr(bench.Planner, "plan", plan)
    again, _ = run(tmp_path, "--no-times")
    assert budgets == [cells["same: library 1"]["peak_bytes"]]
    assert again["cells"]["same: auto @ library 1"]["refused"] == "ValueError: nothing fits"


def test_a_peer_that_fails_without_a_message_is_recorded(tmp_path, monkeypatch):
    def broken(model, policy):
        raise AttributeError

    monkeypatch.setattr(bench_rows, "_wrap", broken)
    found, _ = run(tmp_path, "--only", "none,torchtitan + attention", "--no-times")
    assert found["cells"]["same: torchtitan + attention"]["refused"] == "AttributeError"


@pytest.mark.parametrize("arguments, said", [
    (["--only", "trll"], "--only trll fits no row"), (["--redo", "ful"], "--redo ful fits no row"),
    (["--cases", "lama"], "lama is unknown"), (["--out", "/dev/null/x"], "cannot be written"),
    (["--readme", "no_such_file.md"], "there is no such file"),
])  # fmt: skip
def test_a_mistake_on_the_command_line_is_told_before_anything_is_measured(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        bench.main(arguments)
    assert ended.value.code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("content, said", [
    ('{"case": ', "is damaged"), ("[]", "lacks case"), ('{"cells": {}}', "lacks case"), (None, "holds no figures"),
])  # fmt: skip
def test_damaged_or_missing_figures_leave_page_and_readme_as_they_are(tmp_path, content, said):
    page, readme = tmp_path / "bench.md", tmp_path / "README.md"
    page.write_text("old page")
    readme.write_text(f"{bench_table.BEGIN}\nold\n{bench_table.END}\n")
    if content is not None:
        (tmp_path / "llama.json").write_text(content)
    with pytest.raises(SystemExit) as ended:
        bench.main(["--table", "--out", str(tmp_path), "--markdown", str(page), "--readme", str(readme)])
    assert said in str(ended.value.code) and "\n" not in str(ended.value.code)
    assert page.read_text() == "old page" and "old" in readme.read_text()


def test_a_readme_without_a_base_row_is_refused_before_anything_is_written(quick, tmp_path):
    _, found, _ = quick
    cells = {"same: library 1": found["cells"]["same: library 1"]}
    (tmp_path / "quick.json").write_text(json.dumps(found | {"cells": cells}))
    (tmp_path / "README.md").write_text(f"{bench_table.BEGIN}\n{bench_table.END}\n")
    with pytest.raises(SystemExit, match="lacks its row none"):
        run(tmp_path, "--table", "--readme", str(tmp_path / "README.md"))
    assert not list((tmp_path / "page").iterdir())


def test_a_second_run_into_one_folder_is_refused(tmp_path):
    with only_run(tmp_path):
        with pytest.raises(SystemExit, match="another run is measuring"):
            run(tmp_path)
    with only_run(tmp_path):
        pass


def test_compile_without_a_compiler_is_told_before_anything_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(bench_compile, "get_cpp_compiler", lambda: (_ for _ in ()).throw(RuntimeError("no g++ here")))
    with pytest.raises(SystemExit):
        bench.main(["--quick", "--compile"])
    assert "--compile needs a C++ compiler: RuntimeError: no g++ here" in capsys.readouterr().err
