"""The allocator keeps freed memory, and leaves a user's own settings alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from recipes.allocator import keep_freed_memory

# The head of a language model: 128 MiB of logits and as much of their gradient.
FAULTS = """
import resource, sys
from recipes.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
import torch
torch.set_num_threads(1)
head = torch.nn.Linear(64, 32768)
hidden, labels = torch.randn(1024, 64), torch.randint(0, 32768, (1024,))
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.nn.functional.cross_entropy(head(hidden), labels).backward()
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.cli
@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_a_step_touches_no_new_pages(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    root = Path(__file__).resolve().parent.parent
    faults = {}
    for mode in ("default", "kept"):
        found = subprocess.run(
            [sys.executable, "-c", FAULTS, mode], cwd=root, capture_output=True, text=True, check=True
        )
        faults[mode] = int(found.stdout)
    assert faults["default"] > 10_000 and faults["kept"] < faults["default"] / 20, faults


@pytest.mark.parametrize("variable", ["MALLOC_ARENA_MAX", "LD_PRELOAD"])
def test_a_users_own_allocator_settings_are_left_alone(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    assert keep_freed_memory() is False
