"""W&B: one run of its own for each run of ours, offline without a key, never in the way of training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import wandb
from PIL import Image

from recipes import tracking
from recipes.config import from_dict
from recipes.rundir import open_run

KEY_HOMES = ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC")


def config(**values):
    return from_dict({"name": "run", "model": {"name": "small"}, **values})


@pytest.fixture
def no_key(monkeypatch, tmp_path):
    for name in (*KEY_HOMES, "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    return home


class StandIn:
    """Takes the place of a W&B run and remembers what it was asked."""

    def __init__(self, mode, path):
        self.settings = type("Settings", (), {"mode": mode})
        self.id, self.url, self.dir = "abc123", "https://wandb.example/run", str(Path(path) / "wandb" / "run" / "files")
        self.summary, self.logged, self.exit_code = {}, [], None

    def define_metric(self, *names, **settings):
        pass

    def log(self, values):
        self.logged.append(values)

    def finish(self, exit_code):
        self.exit_code = exit_code


@pytest.fixture
def stand_in(monkeypatch, no_key):
    """Replace wandb.init; the list holds the arguments and the stand-in of each call."""
    calls = []

    def init(**kwargs):
        calls.append((kwargs, StandIn(kwargs["mode"], kwargs["dir"])))
        return calls[-1][1]

    monkeypatch.setattr(wandb, "init", init)
    return calls


def test_without_a_key_it_is_offline_and_says_how_to_sync(in_tmp, stand_in, capsys):
    with open_run(config()) as run:
        pass
    assert stand_in[0][0]["mode"] == "offline"
    assert capsys.readouterr().out.splitlines() == ["W&B: offline. Upload with: wandb sync runs/run/wandb/run"]
    assert run.manifest["tracker"]["mode"] == "offline"


@pytest.mark.parametrize("home", ["environment", "netrc", "other host"])
def test_a_key_is_found_where_wandb_looks(in_tmp, stand_in, no_key, monkeypatch, home):
    if home == "environment":
        monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    else:
        host = "api.wandb.ai" if home == "netrc" else "elsewhere.example"
        (no_key / ".netrc").write_text(f"machine {host}\n  login user\n  password {'0' * 40}\n")
        (no_key / ".netrc").chmod(0o600)
    with open_run(config()):
        pass
    assert stand_in[0][0]["mode"] == ("offline" if home == "other host" else "online")


@pytest.mark.parametrize(
    ("environment", "asked", "mode"),
    [("offline", "auto", "offline"), ("online", "auto", "online"), ("offline", "online", "online")],
)
def test_the_config_wins_over_wandb_mode_and_that_over_the_key(in_tmp, stand_in, monkeypatch, environment, asked, mode):
    monkeypatch.setenv("WANDB_MODE", environment)
    with open_run(config(wandb={"mode": asked})):
        pass
    assert stand_in[0][0]["mode"] == mode


def test_wandb_disabled_in_the_environment_is_obeyed(in_tmp, stand_in, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    with open_run(config()):
        pass
    assert stand_in == []


def test_tracker_none_starts_nothing(in_tmp, stand_in):
    with open_run(config(tracker="none")):
        pass
    assert stand_in == []


def test_other_ranks_start_nothing(in_tmp, stand_in, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with open_run(config()) as run:
        run.log({"step": 1})
    assert stand_in == []


def test_each_run_is_a_wandb_run_of_its_own_grouped_by_its_sweep(in_tmp, stand_in):
    for name in ("a", "b"):
        with open_run(config(name=name, sweep={"name": "lengths"}, seq_len=64)) as run:
            run.log({"step": 1, "loss": 2.0})
    assert [call["name"] for call, _ in stand_in] == ["a", "b"]
    assert {call["group"] for call, _ in stand_in} == {"lengths"}
    assert all(call["reinit"] == "create_new" and call["config"]["seq_len"] == 64 for call, _ in stand_in)
    assert [fake.logged for _, fake in stand_in] == [[{"step": 1, "loss": 2.0}]] * 2


@pytest.mark.parametrize(("error", "code"), [(None, 0), (RuntimeError("boom"), 1), (KeyboardInterrupt(), 1)])
def test_a_failed_run_is_marked_failed(in_tmp, stand_in, error, code):
    try:
        with open_run(config()) as run:
            run.log({"step": 1})
            if error:
                raise error
    except (RuntimeError, KeyboardInterrupt):
        pass
    fake = stand_in[0][1]
    assert fake.exit_code == code
    assert fake.summary["status"] == run.status and ("error" in fake.summary) == bool(error)


def test_a_server_that_refuses_the_key_costs_no_run(in_tmp, no_key, monkeypatch, capsys):
    def init(**kwargs):
        if kwargs["mode"] == "online":
            raise wandb.errors.CommError("permission denied")
        return StandIn("offline", kwargs["dir"])

    monkeypatch.setattr(wandb, "init", init)
    with open_run(config(wandb={"mode": "online"})) as run:
        run.log({"step": 1})
    assert run.status == "ok"
    assert capsys.readouterr().out.startswith("W&B could not go online (permission denied). W&B: offline.")


def test_wandb_that_cannot_start_at_all_costs_no_run(in_tmp, no_key, monkeypatch, capsys):
    def init(**kwargs):
        raise wandb.errors.UsageError("no service")

    monkeypatch.setattr(wandb, "init", init)
    with open_run(config()) as run:
        run.log({"step": 1})
    assert run.status == "ok" and "metrics.jsonl alone" in capsys.readouterr().out


def test_a_resumed_run_goes_on_in_the_same_wandb_run(in_tmp, stand_in):
    for resume in (False, True):
        with open_run(config(resume=resume, wandb={"mode": "online"})) as run:
            run.log({"step": 1})
    assert [call["id"] for call, _ in stand_in] == [None, "abc123"]
    assert [call["resume"] for call, _ in stand_in] == [None, "allow"]


def test_the_real_wandb_starts_two_runs_offline_in_one_process(in_tmp, no_key):
    for name in ("a", "b"):
        with open_run(config(name=name)) as run:
            run.log({"step": 1, "loss": 2.0})
    ids = [json.loads(Path(f"runs/{name}/manifest.json").read_text())["tracker"]["id"] for name in ("a", "b")]
    assert len(set(ids)) == 2
    for name, id in zip(("a", "b"), ids, strict=True):
        assert len(list(Path(f"runs/{name}/wandb").glob(f"offline-run-*-{id}/run-{id}.wandb"))) == 1


@pytest.mark.cli
def test_the_wandb_file_read_by_wandbs_own_command_line_holds_the_values(in_tmp, no_key):
    picture = in_tmp / "memory.png"
    Image.new("RGB", (2, 2)).save(picture)
    with pytest.raises(RuntimeError), open_run(config(seq_len=321)) as run:
        for step in range(1, 4):
            run.log({"step": step, "loss": 10.0 / step})
        run.tracker.table("plan", ["op", "decision"], [["mm", "keep"]])
        run.tracker.picture("memory", picture)
        run.update(peak_bytes=987654321)
        raise RuntimeError("boom on purpose")
    log = next(run.path.glob("wandb/offline-run-*/*.wandb"))
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", str(log)]
    text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    for expected in ("3.3333333333333335", "987654321", "321", "boom on purpose", "plan", "memory"):
        assert expected in text
    assert '"exit_code":1' in text.replace(" ", "") or '"exitCode":1' in text.replace(" ", "")
    assert tracking.has_api_key() is False
