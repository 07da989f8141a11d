"""W&B: one run of its own for each run of ours, offline without a key, never in the way of training."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import wandb

from recipes import tracking
from recipes.config import from_dict
from recipes.distributed import Ranks
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


def test_other_ranks_start_nothing(in_tmp, stand_in):
    with open_run(config(), Ranks(rank=3, num_ranks=4)) as run:
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


def inspect(folder, *options):
    """Read a run's .wandb file back with W&B's own command line."""
    command = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json", *options, str(folder)]
    text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    return json.loads(text) if "--summary" in options else [json.loads(line) for line in text.splitlines()]


TINY_MODEL = {
    "name": "tiny",
    "init": "random",
    "tokenizer": "byte",
    "config": {"model_type": "llama", "vocab_size": 384, "hidden_size": 32, "intermediate_size": 64,
               "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
}  # fmt: skip


@pytest.mark.cli
def test_the_wandb_file_of_a_whole_run_holds_its_values_plan_and_picture(in_tmp, no_key):
    from recipes import pretrain

    (in_tmp / "notes.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    cfg = config(model=TINY_MODEL, data={"source": "text", "path": "notes.txt"}, steps=4, seq_len=64,
                 strategy={"name": "selective"}, optim={"lr": 0.5}, eval={"batches": 1})  # fmt: skip
    with open_run(cfg) as run:
        pretrain.main(cfg, run)
    logged = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    rows = [record["history"]["item"] for record in inspect(run.path / "wandb") if record["type"] == "history"]
    steps = [row for row in rows if "loss" in row]
    assert len(logged) == 4
    assert [{name: row[name] for name in line} for row, line in zip(steps, logged, strict=True)] == logged
    found = inspect(run.path / "wandb", "--summary")
    assert (found["state"], found["exit_code"], found["name"]) == ("finished", 0, "run")
    assert found["config"]["optim"]["lr"] == 0.5 and found["config"]["strategy"]["name"] == "selective"
    summary = json.loads((run.path / "summary.json").read_text())
    for name in ("status", "peak_bytes", "final_loss", "first_loss", "tokens_per_second", "residents"):
        assert found["summary"][name] == summary[name]
    files = next(run.path.glob("wandb/offline-run-*/files"))
    table = json.loads((files / found["summary"]["plan"]["path"]).read_text())
    assert ["0,1", "self_attn/attention#0", "keep"] in table["data"]
    beside = json.loads((files / found["summary"]["planned_and_measured"]["path"]).read_text())
    assert beside["columns"] == ["what", "planned", "measured"]
    (peak, planned_peak, measured_peak), (step, planned_seconds, measured_seconds) = beside["data"]
    assert (peak, planned_peak, measured_peak) == ("peak_bytes", summary["predicted_peak_bytes"], summary["peak_bytes"])
    plan = json.loads((run.path / "plan.json").read_text())["source"]
    assert (step, planned_seconds) == ("step_seconds", summary["predicted_step_seconds"])
    assert measured_seconds == plan["measured_step_seconds"] > 0
    assert found["summary"]["step_seconds"] == summary["step_seconds"] > 0
    assert found["summary"]["predicted_step_seconds"] == planned_seconds > 0
    picture = files / found["summary"]["memory"]["path"]
    assert picture.read_bytes() == (run.path / "memory.png").read_bytes()


@pytest.mark.cli
def test_each_job_of_a_sweep_is_a_wandb_run_and_a_failed_one_is_marked_failed(in_tmp, no_key):
    (in_tmp / "notes.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    train = Path(__file__).resolve().parent.parent / "train.py"
    words = ["-m", "optim.lr=0.001,1e30", "sweep.name=rates", "data=text", "data.path=notes.txt", "steps=4",
             "seq_len=64", "batch_size=1", "eval.batches=0"]  # fmt: skip
    done = subprocess.run([sys.executable, train, *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stderr
    jobs = json.loads(Path("runs/rates/sweep.json").read_text())["jobs"]
    assert [job["status"] for job in jobs] == ["ok", "nan"]
    found = [inspect(f"runs/rates/{job['name']}/wandb", "--summary") for job in jobs]
    assert len({run["run_id"] for run in found}) == 2
    assert [run["name"] for run in found] == [job["name"] for job in jobs]
    assert [(run["exit_code"], run["summary"]["status"]) for run in found] == [(0, "ok"), (1, "nan")]
    assert found[1]["state"] == "failed" and "optim.lr" in found[1]["summary"]["error"]
    records = inspect(f"runs/rates/{jobs[0]['name']}/wandb")
    assert next(record["run"] for record in records if record["type"] == "run")["run_group"] == "rates"


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN"])
def test_no_secret_reaches_what_wandb_writes(in_tmp, no_key, monkeypatch, name):
    """W&B writes the command line, the config and logs of its own."""
    secret = "0123456789abcdef0123456789abcdef01234567"
    monkeypatch.setenv(name, secret)
    monkeypatch.setattr(
        sys, "argv", ["train.py", f"+hub_token={secret[:20]}", f"model.name=https://me:{secret}@host/m"]
    )
    with pytest.raises(RuntimeError), open_run(config(wandb={"mode": "offline"}, name="a")) as run:
        run.log({"step": 1, "loss": 2.0})
        raise RuntimeError(f"401 for {secret}")
    assert sys.argv[1].endswith(secret[:20])
    files = [path for path in run.path.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert not [path for path in files if secret[:20].encode() in path.read_bytes()]


def test_the_key_is_asked_for_where_wandb_asks(in_tmp, no_key):
    assert tracking.has_api_key() is False
