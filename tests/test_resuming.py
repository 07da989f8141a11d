"""A run that goes on has its own config: what it was started with, and what the command line says now."""

import contextlib
import json
from pathlib import Path

import pytest
import yaml

import train
from recipes.cli import compose
from recipes.config import from_dict, to_dict
from recipes.resuming import differences, named

START = ["steps=4", "seq_len=32", "batch_size=1", "eval.batches=0", "data=text", "data.path=notes.txt", "tracker=none",
         "model.config.num_hidden_layers=2", "model.config.hidden_size=32", "model.config.intermediate_size=64",
         "model.config.head_dim=8", "optim.lr=0.01", "optim.schedule=constant", "grad_accum=2", "dtype=bf16",
         "+strategy=every_n", "strategy.n=2"]  # fmt: skip


@pytest.fixture
def folder(in_tmp):
    Path("notes.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return in_tmp


def run(*words):
    with contextlib.redirect_stdout(None):
        train.train(compose(words))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run that ended, as `runs/done` of the working directory; read-only."""
    with contextlib.chdir(tmp_path_factory.mktemp("finished")):
        Path("notes.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
        run(*START, "name=done")
        yield


def saved(name):
    """Write the config of a run that was started with START, and return it."""
    cfg = compose([*START, f"name={name}"])
    Path("runs", name).mkdir(parents=True)
    Path("runs", name, "config.yaml").write_text(yaml.safe_dump(to_dict(cfg)))
    return cfg


def logged(name):
    lines = [json.loads(line) for line in Path(f"runs/{name}/metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def test_the_folder_alone_resumes_with_the_runs_own_config(folder):
    cfg = saved("a")
    again = compose(["resume=runs/a"])
    assert again.resume is True and (again.runs_dir, again.name) == ("runs", "a")
    assert to_dict(again) | {"resume": False} == to_dict(cfg)
    assert compose(["resume=true", "name=a"]) == again


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["steps=9"], {"steps": 9}),
        (["steps=100"], {"steps": 100}),  # the default, but said
        (["optim.lr=0.5"], {"optim.lr": 0.5}),
        (["+strategy=none"], {"strategy": {"name": "none"}}),
        (["strategy.n=3"], {"strategy": {"name": "every_n", "n": 3}}),
        (["+strategy=every_n", "strategy.n=3"], {"strategy": {"name": "every_n", "n": 3}}),
        (["peft=lora"], {"peft.name": "lora"}),
        (["model=llama3_1b"], {"model": to_dict(compose(["model=llama3_1b"]))["model"]}),
        (["data.packing=concat", "tracker=wandb"], {"data.packing": "concat", "tracker": "wandb"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_said_now_counts_and_nothing_else_changes(folder, words, changed):
    cfg = saved("a")
    expected, again = to_dict(cfg), to_dict(compose(["resume=runs/a", *words]))
    for path, value in changed.items():
        *above, key = path.split(".")
        one, other = expected, again
        for name in above:
            one, other = one[name], other[name]
        assert other[key] == value
        one[key] = other[key] = None
    assert again | {"resume": False} == expected


def test_a_resumed_run_is_the_one_left_alone_and_says_what_it_does_otherwise(folder, capsys):
    run(*START, "name=whole", "steps=6")
    run(*START, "name=halves")
    capsys.readouterr()
    train.train(compose(["resume=runs/halves", "steps=6", "save_every=5"]))
    assert logged("halves") == logged("whole") and len(logged("whole")) == 6
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed")]
    assert said == [
        "resumed with a change: steps was 4, is 6",
        "resumed with a change: save_every was 0, is 5",
        "resumed halves after step 4",
    ]
    assert yaml.safe_load(Path("runs/halves/config.yaml").read_text())["steps"] == 6


@pytest.mark.parametrize(
    ("words", "match"),
    [
        ([], "has done 4 steps"),
        (["steps=5", "model.config.num_hidden_layers=1"], "saved from another model"),
        (["steps=5", "data.shuffle=false"], "the data is not what"),
        (["steps=5", "parallel.shard=2"], "needs 2 ranks"),
        (["steps=5", "model.config.vocab_size=9"], "tokenizer has"),
    ],
)
def test_a_resume_that_is_refused_leaves_the_run_as_it_was(finished, words, match):
    path = Path("runs/done")
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}
    with pytest.raises(ValueError, match=match):
        run("resume=runs/done", *words)
    assert {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()} == before
    assert json.loads(before["summary.json"])["status"] == "ok"


def test_a_hidden_secret_has_to_be_given_again(folder):
    saved("a")
    path = Path("runs/a/config.yaml")
    path.write_text(path.read_text().replace("project: activation-checkpointing", "project: 'https://***@host/x'"))
    with pytest.raises(ValueError, match=r"wandb.project holds a secret, .*Give it again"):
        compose(["resume=runs/a"])
    assert compose(["resume=runs/a", "wandb.project=mine"]).wandb.project == "mine"


@pytest.mark.parametrize("text", ["- a list", "a: [", "!!python/object/apply:os.system ['touch executed']"])
def test_a_config_that_is_none_is_refused_and_nothing_in_it_runs(folder, text):
    Path("runs/a").mkdir(parents=True)
    Path("runs/a/config.yaml").write_text(text)
    with pytest.raises(ValueError, match="no YAML mapping"):
        compose(["resume=runs/a"])
    assert not Path("executed").exists()


def test_a_target_in_a_saved_config_is_an_unknown_key(folder):
    saved("a")
    path = Path("runs/a/config.yaml")
    path.write_text(path.read_text() + "_target_: os.system\n")
    with pytest.raises(ValueError, match="_target_ is no key of this program"):
        compose(["resume=runs/a"])


def test_two_names_for_one_run_are_refused():
    with pytest.raises(ValueError, match="name two runs"):
        named({"resume": "runs/a", "name": "b"})
    assert from_dict({"resume": "some/where/a", "model": {"name": "m"}}).runs_dir == "some/where"


def test_differences_leave_out_what_says_which_run():
    saved = {"name": "a", "resume": False, "optim": {"lr": 1}, "strategy": {"name": "full"}}
    now = {"name": "b", "resume": True, "optim": {"lr": 2}, "strategy": {"name": "every_n", "n": 2}}
    assert differences(saved, now) == [
        "optim.lr was 1, is 2",
        "strategy.name was full, is every_n",
        "strategy.n was None, is 2",
    ]
