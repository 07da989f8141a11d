"""Bad input, run by run: one line that says what is wrong and what to change, exit code 2, and nothing left behind.

Mistakes in keys alone stand in tests/test_config.py, and a few seen from outside in tests/test_cli.py. Here the whole
program runs, in process, up to where it refuses.
"""

import contextlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import train
from recipes.cli import RUN_FAILED, USAGE_ERROR, compose, describe, exit_code

RUN = {"steps": 2, "seq_len": 64, "batch_size": 1, "eval.batches": 0, "data": "text", "data.path": "notes.txt",
       "tracker": "none", "model.config.num_hidden_layers": 2, "model.config.hidden_size": 32,
       "model.config.intermediate_size": 64, "model.config.head_dim": 8}  # fmt: skip


@pytest.fixture
def folder(in_tmp, monkeypatch):
    """Files of every wrong kind, and one right one: notes.txt."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    Path("notes.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    Path("empty.txt").touch()
    Path("short.txt").write_text("hi")
    Path("latin1.txt").write_bytes("the caf\xe9\n".encode("latin-1") * 200)
    Path("nothing").mkdir()
    Path("scan.pdf").write_bytes(b"%PDF-1.7")
    Path("fake.parquet").write_text("no parquet")
    Path("runs/taken").mkdir(parents=True)
    rows = {
        "broken": '{"text": "fine"}\n{"text": \n',
        "list": '["a"]\n',
        "number": '{"text": 3}\n',
        "other": '{"body": "x"}\n',
        "silent": '{"messages": [{"role": "user", "content": "hello"}]}\n',
        "no_list": '{"messages": "hello"}\n',
    }
    for name, text in rows.items():
        Path(f"{name}.jsonl").write_text(text)
    plan = {"schema_version": 1, "num_layers": 9, "layers": []}
    plan["layers"] = [{"indices": list(range(9)), "replay": True, "decisions": {}}]
    Path("nine_layers.json").write_text(json.dumps(plan))
    return in_tmp


def attempt(words):
    """Run `train.py RUN WORDS`; return the exception that it ends with."""
    given = {word.lstrip("+").split("=")[0] for word in words}
    defaults = [f"{key}={value}" for key, value in RUN.items() if key not in given]
    with pytest.raises(Exception) as caught, contextlib.redirect_stdout(None):
        train.train(compose([*defaults, *words]))
    return caught.value


def everything(folder):
    return sorted((str(path), path.stat().st_size) for path in folder.rglob("*") if path.is_file() or path.is_dir())


TEXT = [
    ("data.path=missing.txt", "matches no file", "Check the path"),
    ("data.path=empty.txt", "is empty: 1 file(s), 0 bytes", "Give files with text"),
    ("data.path=short.txt", "tokens, fewer than one row of seq_len=64", "Lower seq_len"),
    ("data.path=nothing", "is a folder without text", "Name the files"),
    ("data.path=latin1.txt", "latin1.txt is not UTF-8: byte 0xe9 at offset 7", "iconv"),
    ("data.path=broken.jsonl", "broken.jsonl, line 2: not JSON", "Mend or remove the line"),
    ("data.path=list.jsonl", "line 1: expected an object with 'text', got list", 'Write {"text": ...}'),
    ("data.path=number.jsonl", "'text' is int, expected text", "Mend or remove it"),
    ("data.path=other.jsonl", "no 'text'; the object has body", "Set data.column"),
    ("data.path=scan.pdf", ".pdf files are not read", "Convert it"),
    ("data.path=fake.parquet", "is not a parquet file", "Write it again"),
    ("data=chat data.path=silent.jsonl", "no assistant turn", "Remove the chat"),
    ("data=chat data.path=no_list.jsonl", "expected a list of messages", "such as"),
    ("data=chat data.path=broken.jsonl", "no 'messages'; the object has text", "Set data.column"),
    ("data=chat data.path=notes.txt", "reads .jsonl and .parquet", "Write one object"),
]
STREAMED = [(f"{words} data.streaming=true", what, fix) for words, what, fix in TEXT]
OTHERS = [
    ("seq_len=0", "seq_len=0 is out of range", "at least 2"),
    ("seq_len=200000", "beyond the 131072 positions", "rope_scaling.type=yarn model.rope_scaling.factor=2"),
    ("steps=" + "9" * 400, "is out of range", "finite"),
    ("seqlen=64", "seqlen is no key", "Did you mean seq_len?"),
    ("+strategy=fuller", "strategy=fuller is unknown", "Did you mean full?"),
    ("+strategy=full strategy.n=3", "strategy.n is no field of strategy full", "belongs to every_n"),
    ("+strategy=every_n strategy.n=0", "n=0", "whole number"),
    ("+strategy=every_n strategy.n=-1", "n=-1", "whole number"),
    ("+strategy=every_n strategy.n=2.5", "n=2.5", "whole number"),
    ("+strategy=every_n strategy.n=true", "n=True", "whole number"),
    ("+strategy=selective strategy.keep=nosuch", "matched no op of this model", "Groups: attention, matmul"),
    ("+strategy=plan strategy.path=missing.json", "cannot be read", "No such file"),
    ("+strategy=plan strategy.path=notes.txt", "is no JSON", "plan 'notes.txt'"),
    ("+strategy=plan strategy.path=nine_layers.json", "9 decoder layers, the model has 2", "Make a plan for this"),
    ("+strategy=offload strategy.target=disk strategy.directory=nowhere", "cannot write in 'nowhere'", "Set strategy"),
    ("seed=99999999999999999999", "seed=99999999999999999999 is out of range", "at most"),
    ("name=taken", "runs/taken exists already", "resume=runs/taken, or give another name"),
    ("resume=true name=taken", "runs/taken holds no run", "leave resume out"),
    ("resume=runs/nobody", "runs/nobody holds no run", "leave resume out"),
    ("resume=true", "needs the run to continue", "resume=runs/NAME"),
    ("runs_dir=notes.txt", "is no folder", "Give another runs_dir"),
    ("runs_dir=/proc/runs", "cannot make /proc/runs", "Give a folder that you may write to"),
    ("model=hub model.name=some/model", "cannot be loaded", "hf download"),
    ("model=hub model.name=./nothing", "cannot be loaded", "must hold what save_pretrained writes"),
    ("model=hub model.name=/no/such", "is no folder", "Give one that save_pretrained wrote"),
    ("data=hub data.name=some/data", "cannot be loaded", "Check the ID and the network"),
    ("model.config.nonsense=1", "model.config.nonsense is no field of a llama config", "Leave it out"),
    ("model.config.num_hiden_layers=1", "is no field of a llama config", "Did you mean num_hidden_layers?"),
    ("attn=flash_attention_2", "FlashAttention-2 needs a CUDA device", "Set attn=auto"),
    ("device=cuda", "sees no GPU", "Use device=cpu"),
    ("peft=lora", "trains adapters on a model that is trained already", "use recipe=finetune"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "what", "fix"), TEXT + STREAMED + OTHERS, ids=lambda value: value)
def test_bad_input_is_one_line_that_names_the_fix_and_leaves_nothing(folder, words, what, fix):
    before = everything(folder)
    error = attempt(words.split())
    text = describe(error)
    assert what in text and fix in text and "\n" not in text and len(text) < 500
    assert exit_code(error) == USAGE_ERROR
    assert everything(folder) == before


def test_without_a_network_the_hub_is_given_up_at_once(folder, monkeypatch, capfd):
    """Its clients would try again for 40 seconds, a line on stderr each time."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)

    def no_name(*args, **kwargs):
        raise OSError("Name or service not known")

    monkeypatch.setattr("socket.getaddrinfo", no_name)
    for words in ("model=llama3_8b", "data=hub data.name=some/data"):
        assert "cannot be loaded" in describe(attempt(words.split()))
    assert "Retry" not in capfd.readouterr().err


@pytest.mark.parametrize("strategy", ["none", "selective"])
def test_a_loss_that_is_no_number_stops_the_run_with_its_status(folder, strategy):
    error = attempt([f"+strategy={strategy}", "optim.lr=1e30", "name=wild"])
    assert exit_code(error) == RUN_FAILED and "Lower optim.lr" in describe(error)
    summary = json.loads(Path("runs/wild/summary.json").read_text())
    assert summary["status"] == "nan" and "at step 2" in summary["error"]
    assert len(Path("runs/wild/metrics.jsonl").read_text().splitlines()) == 1
    assert not Path("runs/wild/train_state").exists()


@pytest.fixture
def small_disk(folder):
    """A file system of 256 KiB."""
    Path("disk").mkdir()
    mounted = shutil.which("mount") and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", "disk"], capture_output=True
    )
    if not mounted or mounted.returncode:
        pytest.skip("no right to mount a small file system; tests/test_rundir.py fakes a full one")
    try:
        yield folder / "disk"
    finally:
        subprocess.run(["umount", "disk"], check=True)


def test_a_full_disk_from_the_start_leaves_nothing(small_disk):
    (small_disk / "fill").write_bytes(bytes(os.statvfs(small_disk).f_bavail * 4096))
    text = describe(attempt(["runs_dir=disk"]))
    assert "no space left on the disk" in text and "runs_dir=" in text
    assert os.listdir(small_disk) == ["fill"]


def test_a_disk_that_fills_up_keeps_what_was_logged_and_says_so(small_disk):
    error = attempt(["runs_dir=disk", "name=big", "model.config.intermediate_size=4096", "measure_every=0"])
    text = describe(error)
    assert exit_code(error) == RUN_FAILED and "\n" not in text
    assert "train state of step 2" in text and "no space left on the disk" in text and "choose another runs_dir" in text
    summary = json.loads((small_disk / "big/summary.json").read_text())
    assert summary["status"] == "failed" and summary["error"] == text
    assert len((small_disk / "big/metrics.jsonl").read_text().splitlines()) == 2
    assert not list((small_disk / "big/train_state").iterdir())


def test_a_disk_full_of_train_states_resumes_from_the_last_whole_one(folder, monkeypatch):
    """Room for one state and not for two: the second is refused, the first stands, and the run goes on from it."""
    words = [f"{key}={value}" for key, value in (RUN | {"steps": 4, "save_every": 2, "name": "run"}).items()]
    real = torch.distributed.checkpoint.FileSystemWriter.write_data

    def full(self, *args, **kwargs):
        if "step_00000004" in str(self.path):
            raise OSError(28, "No space left on device")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(torch.distributed.checkpoint.FileSystemWriter, "write_data", full)
    assert "train state of step 4" in describe(attempt(words))
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    with contextlib.redirect_stdout(None):
        train.train(compose([*words, "resume=true"]))
    steps = [json.loads(line)["step"] for line in Path("runs/run/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    assert json.loads(Path("runs/run/summary.json").read_text())["status"] == "ok"
