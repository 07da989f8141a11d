"""Results made from the memo are those that torch makes."""

import numpy as np
import pytest
import torch

from ckpt.fake import FakeMode
from ckpt.fake_memo import Memo
from ckpt.simulate import Simulator
from ckpt.workload import Workload
from scripts.predict_table import config_of


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("llama", "selective"),
        pytest.param("qwen3_next", "selective", marks=pytest.mark.slow),
        pytest.param("gpt2", "segments", marks=pytest.mark.slow),
        ("mixtral", "offload"),
    ],
)
def test_a_step_is_the_same_without_the_memo(name, strategy, monkeypatch):
    work = Workload(batch_size=2, seq_len=40, dtype="bf16", loss="chunked")
    used = []
    make = Memo.make
    monkeypatch.setattr(Memo, "make", lambda *args: used.append(1) or make(*args))
    with_memo = Simulator(config_of(name), work).run(strategy)
    assert len(used) > 1000
    monkeypatch.setattr(Memo, "knows", lambda *args: False)
    without = Simulator(config_of(name), work).run(strategy)
    for a, b in ((with_memo.first, without.first), (with_memo.steady, without.steady)):
        assert np.array_equal(a.bytes, b.bytes) and list(a.rows) == list(b.rows)


def thrice(run):
    """The third result: made from the memo where that is possible."""
    return [run() for _ in range(3)][-1]


def test_views_share_the_storage_and_writes_return_the_tensor():
    with FakeMode():
        x = torch.empty(4, 6)
        view = thrice(lambda: x[1:, 2:].t())
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert (view.shape, view.stride(), view.storage_offset()) == ((4, 3), (1, 6), 8)
        assert thrice(lambda: x.mul_(2)) is x
        largest, where = thrice(lambda: x.max(1))
        assert (largest.shape, where.dtype) == ((4,), torch.int64)
        assert thrice(lambda: x + 1).dtype == torch.float32 and thrice(lambda: x > True).dtype == torch.bool


def test_a_view_of_a_tensor_without_storage_stays_without():
    with FakeMode():
        x, whole = torch.empty(8, 4), torch.empty(8, 4)
        thrice(lambda: whole.view(32))
        x.untyped_storage().resize_(0)
        assert thrice(lambda: x.view(32)).untyped_storage().nbytes() == 0
