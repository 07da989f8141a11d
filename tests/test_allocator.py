"""The allocator keeps freed memory, so that later steps touch no new page; a user's own settings stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipes import allocator
from recipes.allocator import describe, keep_freed_memory

FAULTS = """
import resource, sys
from recipes.allocator import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
import torch
torch.set_num_threads(1)
faults = []
for _ in range(8):  # steps that hold four blocks above 32 MiB, which glibc maps by default
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(10 * 2**20) for _ in range(4)]
    del blocks
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(faults[2:]))
"""


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in [*os.environ]:
        if name.startswith("MALLOC_") or name in ("LD_PRELOAD", "GLIBC_TUNABLES"):
            monkeypatch.delenv(name)


@pytest.fixture
def glibc(monkeypatch):
    """A stand-in for the C library, so that the tests leave this process's malloc alone."""

    class Library:
        largest_threshold = 2**31

        def __init__(self):
            self.options = {}

        def mallopt(self, number, value):
            if number == -3 and value > self.largest_threshold:
                return 0
            self.options[number] = value
            return 1

    library = Library()
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("glibc", "2.36"))
    return library


@pytest.mark.cli
@pytest.mark.skipif(sys.platform != "linux", reason="glibc")
def test_large_tensors_cost_page_faults_once_and_not_at_every_step():
    root = Path(__file__).resolve().parent.parent
    faults = {}
    for mode in ("default", "kept"):
        found = subprocess.run(
            [sys.executable, "-c", FAULTS, mode], cwd=root, capture_output=True, text=True, check=True
        )
        faults[mode] = int(found.stdout)
    # 160 MiB in pages of 4 KiB (or 2 MiB, where huge pages are on) against next to nothing. The least of six steps: now
    # and then glibc places aligned blocks anew.
    assert faults["default"] >= 80 and faults["kept"] <= 8


def test_blocks_below_a_gib_stay_and_the_heap_is_never_trimmed(glibc):
    assert keep_freed_memory() is True
    assert glibc.options == {-3: 2**30, -1: -1, -2: 256 * 2**20}
    assert describe() == "glibc, freed blocks below 1 GiB kept for the next step"


def test_a_glibc_that_refuses_the_threshold_maps_no_block_at_all(glibc):
    glibc.largest_threshold = 32 * 2**20
    assert keep_freed_memory() is True
    assert glibc.options == {-4: 0, -1: -1, -2: 256 * 2**20}


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_ARENA_MAX", "1"), ("LD_PRELOAD", "libjemalloc.so"), ("GLIBC_TUNABLES", "glibc.malloc.tcache_count=0")],
)
def test_a_users_own_allocator_settings_are_left_alone(glibc, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    assert keep_freed_memory() is False
    assert glibc.options == {}
    assert describe() == f"left alone: the environment sets {name}={value}"


def test_another_c_library_is_left_alone_and_said_so(glibc, monkeypatch):
    monkeypatch.setattr(allocator.platform, "libc_ver", lambda: ("", ""))
    assert keep_freed_memory() is False
    assert glibc.options == {}
    assert "not glibc" in describe()
