"""Where offloaded tensors lie: buffers serve sizes that change, and a failed copy is told once."""

from __future__ import annotations

import errno
import os
import random

import exactness
import pytest
import torch
import zoo

import ckpt
from ckpt.engine import media
from ckpt.engine.media import NoRoom
from ckpt.engine.store import Store

TARGETS = ["host", "disk"]


def some_bytes(count: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("target", TARGETS)
def test_buffers_never_pile_up_whatever_sizes_come_and_in_what_order(target):
    """Steps of a few tensors, sizes from 0 to 3,400 bytes, given back in any order: all read back, none beyond twice
    the most that was out at once."""
    choose, store = random.Random(0), Store(target)
    for step in range(200):
        group, scale, out = store.open_group(), choose.choice([1, 3, 10, 40]), []
        for n in range(choose.randint(1, 6)):
            tensor = some_bytes(choose.randint(0, 5) * scale * 17, seed=6 * step + n)
            out.append((tensor.clone(), store.put(tensor, group)))
        store.end_of_forward()
        choose.shuffle(out)
        while out:
            tensor, ticket = out.pop()
            if choose.random() < 0.8:
                assert torch.equal(ticket.view(torch.uint8, tensor.shape, (1,), 0), tensor)
            del ticket
        assert store.bytes_now == 0 and store._slot_bytes <= 2 * store.peak_bytes
    if target == "disk":
        assert os.fstat(store._medium._file).st_size <= 3 * store.peak_bytes
    store.close()


@pytest.mark.parametrize("target", TARGETS)
def test_batches_of_ever_other_lengths_take_the_room_of_the_longest(target):
    model = zoo.build("llama", layers=3)
    handle = ckpt.apply(model, ckpt.Offload(target))
    for seq_len in [*range(8, 24), *range(23, 7, -1)]:
        model(**zoo.batch(model, seq_len)).loss.backward()
    assert handle.store._slot_bytes <= 1.5 * handle.store.peak_bytes
    assert handle.store.peak_bytes == 2 * 2 * 23 * model.config.hidden_size * 4  # two layers offload two rows


@pytest.mark.parametrize("call", ["pwritev", "preadv"])
def test_a_copy_that_fails_fails_its_step_alone(monkeypatch, call):
    model = zoo.build("llama", layers=3)
    inputs = zoo.batch(model, 16)
    expected = exactness.run_step(model, inputs)
    handle = ckpt.apply(model, ckpt.Offload("disk"))
    exactness.run_step(model, inputs)

    def fail(*args):
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="Input/output error"):
        patch.setattr(media.os, call, fail)
        exactness.run_step(model, inputs)
    again = exactness.run_step(model, inputs)
    assert torch.equal(again.loss, expected.loss)
    assert all(torch.equal(again.gradients[n], g) for n, g in expected.gradients.items() if g is not None)
    handle.undo()


def test_a_file_that_may_not_grow_is_told_in_one_line(monkeypatch):
    """A quota or a limit on file sizes, which the free space of the disk does not show."""

    def refuse(*args):
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(media.os, "posix_fallocate", refuse)
    store = Store("disk")
    with pytest.raises(NoRoom, match=r"^offload: the file in .* cannot grow .*: File too large\. "):
        store.put(some_bytes(10, 0), store.open_group())
    assert store.bytes_now == 0
