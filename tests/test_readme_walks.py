"""The README's walks, typed as they stand there into a shell, one after the other, beside notes of one's own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from readme import blocks, commands

ROOT = Path(__file__).resolve().parent.parent

pytestmark = [pytest.mark.cli, pytest.mark.slow, pytest.mark.timeout(3600)]


def shell(text):
    """Run shell lines with `python train.py` standing for this Python and this checkout's train.py."""
    text = text.replace("python train.py", f"'{sys.executable}' '{ROOT / 'train.py'}'")
    done = subprocess.run(["bash", "-e", "-c", text], capture_output=True, text=True, timeout=1400, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def summary(name):
    return json.loads(Path(f"runs/{name}/summary.json").read_text())


def test_the_walks_of_the_readme_work_as_written(in_tmp):
    Path("notes").mkdir()
    for number in range(6):
        Path(f"notes/{number}.md").write_text(
            f"# Note {number}\n" + "the quick brown fox jumps over the lazy dog\n" * 40
        )
    for text in commands("Your own model"):
        shell(text)
    assert summary("first")["status"] == summary("second")["status"] == "ok"
    space = {}
    for code in blocks("Your own model"):
        exec(compile(code, "README.md", "exec"), space)
    assert space["model"].peft_config and space["tokenizer"]("a").input_ids == [100, 1]
    chat, resume = commands("Your own data")
    shell(chat)
    assert len(Path("chats.jsonl").read_text().splitlines()) == 5 and summary("third")["final_loss"] > 0
    assert "resumed with a change: steps was 10, is 15" in shell(resume)
    lines = [json.loads(line)["step"] for line in Path("runs/third/metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(1, 16))
