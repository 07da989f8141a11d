"""The ledger against the operating system: resident set of a process whose malloc gives freed blocks back at once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CLEAR_REFS = Path("/proc/self/clear_refs")
# glibc then maps every block of 64 KiB and more by itself and unmaps it when it is freed.
SMALL_BLOCKS = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
STEP = """
import json, sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from ckpt.ledger import measure

torch.set_num_threads(1)
config = LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=640, num_hidden_layers=4, num_attention_heads=4,
                     num_key_value_heads=2, max_position_embeddings=1024)
model = LlamaForCausalLM(config).train()
if sys.argv[1] == "replay":
    model.gradient_checkpointing_enable()
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(0, 512, (1, 1024))

def status(key):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(key))

def step():
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

step(); step()
open("/proc/self/clear_refs", "w").write("5")  # the peak resident set starts anew
before = status("VmRSS")
step()
resident = status("VmHWM") - before
with measure(model, optimizer, inputs=tokens) as ledger:
    step()
print(json.dumps({"resident": resident, "ledger": ledger.peak_bytes - ledger.start_bytes}))
"""


@pytest.mark.cli
@pytest.mark.skipif(not CLEAR_REFS.exists(), reason="needs Linux's /proc/self/clear_refs")
@pytest.mark.parametrize("how", ["keep", "replay"])
def test_the_resident_set_grows_by_what_the_ledger_says_within_2_percent(how):
    done = subprocess.run(
        [sys.executable, "-c", STEP, how],
        env=os.environ | SMALL_BLOCKS,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    grown = json.loads(done.stdout.splitlines()[-1])
    assert grown["ledger"] > 30 * 2**20
    assert grown["resident"] == pytest.approx(grown["ledger"], rel=0.02)
