"""A sweep: every job in a process of its own is a row, whatever becomes of it, and the rest run (case 19 of sweeps)."""

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from recipes import cli, sweep_job
from recipes.config import from_dict
from recipes.errors import RunStopped
from recipes.lock import hold, release
from recipes.sweep import _words, job_names, run
from recipes.sweep_job import Ended, judge

# Stands in for train.py: writes what a run writes, then ends as `fate` says.
JOB = """
import json, os, signal, sys
words = dict(word.lstrip("+").split("=", 1) for word in sys.argv[1:])
folder = os.path.join(words["runs_dir"].strip("'"), words["name"].strip("'"))
os.makedirs(folder)
open(os.path.join(folder, "words"), "w").write(" ".join(sys.argv[1:]))
def summary(status, **fields):
    with open(os.path.join(folder, "summary.json"), "w") as file:
        json.dump({"status": status, "peak_bytes": 7, "tokens_per_second": 5.0, "final_loss": 2.0, **fields}, file)
summary("running")
fate = words["fate"]
if fate == "raise":
    summary("failed", error="RuntimeError: boom")
    sys.exit(1)
if fate == "oom":
    summary("oom", error="CUDA out of memory")
    sys.exit(1)
if fate == "exit0":
    sys.exit(0)
if fate == "bad_alloc":
    print("terminate called after throwing an instance of 'std::bad_alloc'", file=sys.stderr, flush=True)
    os.abort()
if fate == "predicted":
    summary("predicted_oom", error="needs 80 GiB, and there are 79")
    sys.exit(1)
if fate == "hang":
    import time
    time.sleep(600)
if fate == "orphan":
    import subprocess
    subprocess.Popen(["sleep", "8"], stderr=sys.stderr)  # outlives this job and holds its stderr open
if fate == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if fate == "mistake":
    os.remove(os.path.join(folder, "summary.json"))
    print("error: seq_len=0 is out of range", file=sys.stderr)
    sys.exit(2)
if fate == "sleep":
    def stop(number, frame):
        summary("interrupted", error="stopped")
        sys.exit(130)
    signal.signal(signal.SIGTERM, stop)
    open("ready", "w").close()
    signal.pause()
summary("ok")
"""


@pytest.fixture
def command(in_tmp):
    Path("job.py").write_text(JOB)
    return [sys.executable, "job.py"]


@pytest.fixture(autouse=True)
def drawn(monkeypatch):
    """Note which sweeps would be drawn: tests/test_report.py draws."""
    folders = []
    monkeypatch.setattr("recipes.sweep._report", lambda folder, cfg: folders.append(str(folder)))
    return folders


def sweep(jobs, command, **keys):
    """Run jobs that all have one config."""
    cfg = from_dict({"model": {"name": "small"}, "tracker": "none", "sweep": {"name": "fates", **keys}})
    return run([cfg] * len(jobs), jobs, command)


def rows():
    return json.loads(Path("runs/fates/sweep.json").read_text())["jobs"]


def jobs(*fates):
    return [["+strategy=none", f"++fate={fate}"] for fate in fates]


def test_every_end_of_a_job_is_a_row_and_the_rest_run(command):
    fates = ("fine", "raise", "oom", "exit0", "kill", "mistake", "fine2")
    with pytest.raises(RunStopped, match="5 of 7 jobs did not end ok") as caught:
        sweep(jobs(*fates), command)
    assert caught.value.status == "failed"
    assert [row["status"] for row in rows()] == ["ok", "failed", "oom", "failed", "killed", "failed", "ok"]
    assert [row["exit_code"] for row in rows()] == [0, 1, 1, 0, -9, 2, 0]
    assert rows()[4]["error"] == "ended by SIGKILL" and "code 0 before" in rows()[3]["error"]
    assert rows()[5]["error"] == "seq_len=0 is out of range"
    # What was left `running` is told how it ended.
    assert json.loads(Path("runs/fates/04-fate=kill/summary.json").read_text())["status"] == "killed"


def test_a_second_start_runs_only_what_did_not_end_ok(command):
    with pytest.raises(RunStopped):
        sweep(jobs("fine", "kill", "fine2"), command)
    stamps = {name: os.stat(f"runs/fates/{name}").st_mtime_ns for name in ("00-fate=fine", "02-fate=fine2")}
    Path("job.py").write_text(JOB.replace('fate == "kill"', "False"))
    sweep(jobs("fine", "kill", "fine2"), command, resume=True)
    assert [row["status"] for row in rows()] == ["ok", "ok", "ok"]
    assert stamps == {name: os.stat(f"runs/fates/{name}").st_mtime_ns for name in stamps}
    # What the first start left of the job is still there.
    assert json.loads(Path("runs/fates/.01-fate=kill.try0/summary.json").read_text())["status"] == "killed"


def test_an_existing_sweep_is_an_error_without_resume(command):
    sweep(jobs("fine"), command)
    with pytest.raises(ValueError, match=r"sweep\.resume=true"):
        sweep(jobs("fine"), command)


def test_resume_of_no_sweep_is_an_error(command):
    with pytest.raises(ValueError, match="holds no sweep"):
        sweep(jobs("fine"), command, resume=True)
    assert not Path("runs").exists()


def test_job_names_say_what_differs():
    words = [["+strategy=none", "++seq_len=256", "++steps=3"], ["+strategy=full", "++seq_len=256", "++steps=3"],
             ["+strategy=full", "++seq_len=512", "++steps=3"]]  # fmt: skip
    assert job_names(words) == ["00-none-seq_len=256", "01-full-seq_len=256", "02-full-seq_len=512"]
    assert job_names([["++steps=3"]]) == ["00"]


def test_job_names_are_folder_names():
    names = job_names([["++data.path=/a/b c", "++strategy.keep=mlp.*/mm#*"], ["++data.path=/x", "++strategy.keep=mul"]])
    for name in names:
        assert from_dict({"name": name, "model": {"name": "small"}}).name == name
    assert len(set(names)) == 2


def test_secrets_stay_out_of_the_rows(command):
    sweep([["++fate=fine", "++x.api_key=geheim123"]], command)
    assert "geheim123" not in Path("runs/fates/sweep.json").read_text()


def test_a_sigterm_reaches_the_job_is_recorded_and_ends_the_sweep(command):
    def terminate_when_ready():
        while not Path("ready").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, cli.raise_terminated)
    threading.Thread(target=terminate_when_ready, daemon=True).start()
    try:
        with pytest.raises(RunStopped, match=r"interrupted after 1 of 3 jobs.*sweep\.resume=true") as caught:
            sweep(jobs("fine", "sleep", "fine2"), command)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert cli.exit_code(caught.value) == cli.INTERRUPTED
    assert [row["status"] for row in rows()] == ["ok", "interrupted"]
    assert json.loads(Path("runs/fates/01-fate=sleep/summary.json").read_text())["error"] == "stopped"


def test_a_job_past_its_time_is_a_timeout_and_the_rest_run(command):
    with pytest.raises(RunStopped, match=r"2 of 2 jobs did not end ok: 00 \(timeout\), 01 \(timeout\)"):
        sweep(jobs("hang", "hang"), command, job_timeout_minutes=0.01)
    assert [row["exit_code"] for row in rows()] == [-signal.SIGTERM] * 2
    assert "stopped after 0.01 minutes" in rows()[0]["error"]


def test_memory_that_runs_out_in_a_library_is_an_oom(command):
    with pytest.raises(RunStopped):
        sweep(jobs("bad_alloc", "fine"), command)
    assert [row["status"] for row in rows()] == ["oom", "ok"] and "bad_alloc" in rows()[0]["error"]


def test_a_kill_by_the_kernel_for_want_of_memory_is_an_oom():
    by_kernel = Ended(code=-signal.SIGKILL, tail=(), seconds=1.0, oom_kills=1)
    assert judge(by_kernel, {"status": "running"})[0] == "oom"
    assert judge(dataclasses.replace(by_kernel, oom_kills=0), {"status": "running"})[0] == "killed"


def test_a_grandchild_that_stays_does_not_hold_the_sweep_up(command, monkeypatch):
    monkeypatch.setattr(sweep_job, "_DRAIN_SECONDS", 0.2)
    start = time.monotonic()
    sweep(jobs("orphan", "fine"), command)
    assert [row["status"] for row in rows()] == ["ok", "ok"] and time.monotonic() - start < 8


def test_a_job_predicted_not_to_fit_is_an_answer_and_is_asked_again_only_when_forced(command):
    sweep(jobs("predicted", "fine"), command)
    assert [row["status"] for row in rows()] == ["predicted_oom", "ok"]
    Path("job.py").write_text(JOB.replace('fate == "predicted"', "False"))
    sweep(jobs("predicted", "fine"), command, resume=True)
    assert rows()[0]["status"] == "predicted_oom"
    sweep([[*words, "++on_predicted_oom=warn"] for words in jobs("predicted", "fine")], command, resume=True)
    assert [row["status"] for row in rows()] == ["ok", "ok"]


def test_a_resumed_sweep_may_grow_and_knows_its_jobs_by_what_they_compute(command):
    sweep(jobs("fine", "fine3"), command)
    stamp = os.stat("runs/fates/01-fate=fine3").st_mtime_ns
    asked = sweep(jobs("fine", "fine2", "fine3"), command, resume=True)
    assert [row["name"] for row in asked] == ["00-fate=fine", "01-fate=fine2", "01-fate=fine3"]
    assert os.stat("runs/fates/01-fate=fine3").st_mtime_ns == stamp and len(rows()) == 3


def test_a_resumed_sweep_refuses_other_jobs_under_the_same_names(command):
    sweep(jobs("fine", "fine2"), command)
    with pytest.raises(ValueError, match=r"steps=5.*another sweep\.name"):
        sweep([[*words, "++steps=5"] for words in jobs("fine", "fine2")], command, resume=True)
    assert [row["status"] for row in rows()] == ["ok", "ok"]


def test_a_sweep_killed_in_its_first_job_can_be_resumed(command):
    Path("runs/fates").mkdir(parents=True)
    Path("runs/fates/sweep.json").write_text('{"schema_version": 1, "jobs": []}')
    Path("runs/fates/00-fate=fine").mkdir()
    sweep(jobs("fine", "fine2"), command, resume=True)
    assert [row["status"] for row in rows()] == ["ok", "ok"]


def test_a_job_of_a_killed_sweep_that_is_still_at_work_is_not_run_beside_itself(command):
    Path("runs/fates/01-fate=fine2").mkdir(parents=True)
    Path("runs/fates/sweep.json").write_text('{"schema_version": 1, "jobs": []}')
    for busy, what in (("runs/fates/01-fate=fine2", "the run of another process"), ("runs/fates", "the sweep of")):
        held = hold(Path(busy))
        with pytest.raises(ValueError, match=what):
            sweep(jobs("fine", "fine2"), command, resume=True)
        release(held)
    assert [row["status"] for row in rows()] == ["ok"]
    sweep(jobs("fine", "fine2"), command, resume=True)
    assert [row["status"] for row in rows()] == ["ok", "ok"]


@pytest.mark.parametrize("text", ['{"schema_version": 1, "jo', "[]", '{"schema_version": 99, "jobs": []}', "{}"])
def test_a_record_that_cannot_be_read_is_not_taken_for_an_empty_one(command, text):
    Path("runs/fates/00-fate=fine").mkdir(parents=True)
    Path("runs/fates/sweep.json").write_text(text)
    with pytest.raises(ValueError, match=r"sweep\.json"):
        sweep(jobs("fine"), command, resume=True)
    assert os.listdir("runs/fates/00-fate=fine") == [] and Path("runs/fates/sweep.json").read_text() == text


@pytest.mark.parametrize("runs_dir", ["it's here", 'a "b" c', "größer=1,2", "back\\slash"])
def test_any_folder_name_reaches_the_job(in_tmp, runs_dir):
    words = _words(["x"], ["+strategy=none"], "a,b=1", Path(runs_dir) / "s")
    cfg = cli.compose([*words[1:], "model=small"])
    assert (cfg.name, cfg.runs_dir) == ("a,b=1", str(Path(runs_dir) / "s"))


def test_jobs_stop_where_they_are_predicted_not_to_fit_unless_forced(command):
    sweep([["++fate=fine", "++sweep.job_memory_gib=2"], ["++fate=fine2", "++on_predicted_oom=warn"]], command)
    limited, forced = (path.read_text().split() for path in sorted(Path("runs/fates").glob("0*/words")))
    assert {"on_predicted_oom=error", "hardware.memory_gib=2"} <= set(limited)
    assert "++on_predicted_oom=warn" in forced and "on_predicted_oom=error" not in forced


def test_a_sweep_is_drawn_when_it_has_ended_whatever_became_of_its_jobs(command, drawn):
    with pytest.raises(RunStopped):
        sweep(jobs("fine", "kill"), command)
    assert drawn == ["runs/fates"]
