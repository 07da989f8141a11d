"""Offload seen from outside: by the operating system's count of resident memory, and after a kill.

    python tests/test_offload_os.py disk      # bytes resident between forward and backward of a small Llama's step
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cli

LAYERS, TOKENS, HIDDEN = 9, 2048, 512


def process(*arguments: str, **environment: str) -> subprocess.Popen:
    root = Path(__file__).parents[1]
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(root),
        # Freed blocks go back to the system, so that resident memory follows what is alive.
        "MALLOC_MMAP_THRESHOLD_": "65536",
        "MALLOC_TRIM_THRESHOLD_": "65536",
    }
    return subprocess.Popen(
        [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, text=True, env=env | environment, cwd=root
    )


def resident_bytes(strategy: str) -> int:
    with process(strategy) as running:
        out, _ = running.communicate(timeout=240)
    assert running.returncode == 0
    return json.loads(out.splitlines()[-1])


def test_resident_memory_falls_by_what_is_on_disk():
    """Full holds the inputs of all layers, offload to disk that of the last one and what lies between its halves."""
    held, away = resident_bytes("full"), resident_bytes("disk")
    inputs = (LAYERS - 2) * TOKENS * HIDDEN * 4
    assert held - away > 0.9 * inputs, f"{(held - away) / 2**20:.1f} MiB less, {inputs / 2**20:.1f} MiB of inputs"


def test_a_killed_process_leaves_no_file_behind(tmp_path):
    with process("wait", TMPDIR=str(tmp_path)) as running:
        assert running.stdout.readline().strip() == "out"
        mapped = [os.readlink(f"/proc/{running.pid}/fd/{n}") for n in os.listdir(f"/proc/{running.pid}/fd")]
        assert any(str(tmp_path) in path and "(deleted)" in path for path in mapped)  # its file has no name any more
        running.send_signal(signal.SIGKILL)
        running.wait(timeout=30)
    assert not any(tmp_path.rglob("*offload*"))


def main(what: str) -> None:
    """Run two steps; stop in the second, between forward and backward."""
    import torch
    from transformers import LlamaConfig, LlamaModel

    import ckpt

    torch.set_num_threads(1)
    model = LlamaModel(LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=HIDDEN, num_hidden_layers=LAYERS, num_attention_heads=8, vocab_size=64,
        num_key_value_heads=8, max_position_embeddings=TOKENS, attn_implementation="sdpa",
    )).train()  # fmt: skip
    ckpt.apply(model, "full" if what == "full" else ckpt.Offload("disk"), tile_mlp=4)
    tokens = torch.zeros(1, TOKENS if what != "wait" else 64, dtype=torch.long)
    for last in (False, True):
        output = model(input_ids=tokens, use_cache=False).last_hidden_state
        if not last:
            output.sum().backward()
            model.zero_grad()
            del output
    if what == "wait":
        print("out", flush=True)
        sys.stdin.read()
        signal.pause()
    print(int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))


if __name__ == "__main__":
    main(sys.argv[1])
