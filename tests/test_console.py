"""What is printed: a table of what was measured, plain where no terminal is, JSON when asked."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from recipes.console import Console, end_rows, mib, sweep_table

SUMMARY = {
    "status": "ok", "error": None, "peak_bytes": 300 * 2**20, "predicted_peak_bytes": 303 * 2**20,
    "residents": {"parameters": 12 * 2**20, "gradients": 12 * 2**20, "optimizer_state": 24 * 2**20,
                  "activations": 200 * 2**20, "workspace": 52 * 2**20},
    "tokens_per_second": 2345.6, "first_loss": 5.9, "final_loss": 2.5, "recompute_flops": 25, "step_flops": 100,
    "ops": {"kept": 8, "replayed": 1200, "offloaded": 0},
}  # fmt: skip


def test_the_table_shows_what_was_measured():
    rows = dict(end_rows(SUMMARY, Path("runs/x")))
    assert rows["peak memory"] == "300.0 MiB" and rows["predicted peak"] == "303.0 MiB (+1.00%)"
    assert rows["  activations"] == "200.0 MiB" and rows["loss"] == "5.900 -> 2.500"
    assert rows["ops"] == "8 kept, 1,200 replayed, 0 offloaded" and rows["recompute"] == "25.0% of the step's FLOPs"
    assert rows["speed"] == "2,346 tokens/s" and rows["files"] == "runs/x"


def test_what_was_not_measured_has_no_row():
    rows = dict(end_rows({"status": "failed", "error": "boom"}, Path("runs/x")))
    assert rows == {"status": "failed: boom", "files": "runs/x"}


def test_off_a_terminal_progress_is_about_ten_plain_lines(capsys):
    with Console("table", quiet=False).progress(100) as tick:
        for step in range(1, 101):
            tick(step, loss=1.0 / step, tokens_per_second=2000.0)
    lines = capsys.readouterr().out.splitlines()
    assert 10 <= len(lines) <= 12 and lines[-1] == "step 100/100  loss 0.01  2,000 tokens/s"
    assert "\x1b" not in "".join(lines)


def test_progress_of_a_resumed_run_starts_where_it_left(capsys):
    with Console("table", quiet=False).progress(10, start=7) as tick:
        for step in range(8, 11):
            tick(step, loss=1.0)
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["8/10", "9/10", "10/10"]


def test_on_a_terminal_there_is_a_bar():
    console = Console("table", quiet=False)
    console.rich = RichConsole(file=io.StringIO(), force_terminal=True, width=100)
    with console.progress(4) as tick:
        tick(2, loss=1.5, tokens_per_second=2000.0)
        console.say("a line above it")
    written = console.rich.file.getvalue()
    assert "2/4" in written and "loss 1.5" in written and "a line above it" in written


def test_json_output_is_one_object_on_stdout_and_the_rest_on_stderr(capsys):
    console = Console("json", quiet=False)
    console.say("a line")
    console.end(SUMMARY, Path("runs/x"))
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {**SUMMARY, "path": "runs/x"} and captured.err == "a line\n"


def test_brackets_in_messages_are_no_markup(capsys):
    Console("table", quiet=False).say("betas=[0.9, 0.95] [red]")
    assert capsys.readouterr().out == "betas=[0.9, 0.95] [red]\n"


def test_a_failed_job_of_a_sweep_has_its_row(capsys):
    sweep_table([
        {"name": "00-none", "status": "ok", "peak_bytes": 2**20, "tokens_per_second": 9.0, "final_loss": 2.0,
         "seconds": 3},
        {"name": "01-full", "status": "killed", "peak_bytes": None, "tokens_per_second": None, "final_loss": None,
         "seconds": 1},
    ])  # fmt: skip
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["00-none", "ok", "1.0", "MiB", "9", "2.000", "3"] and lines[2].split() == [
        "01-full", "killed", "1"]  # fmt: skip


@pytest.mark.parametrize(("size", "text"), [(0, "0.0 MiB"), (2**20, "1.0 MiB"), (10 * 2**30, "10.00 GiB")])
def test_bytes_read_well(size, text):
    assert mib(size) == text
