"""Rows and batches: what is packed where, which labels count, and a position that resumes exactly."""

import itertools
import json

import numpy as np
import pytest
import torch
from transformers import ByT5Tokenizer

from recipes.data import IGNORE, MODEL_KEYS, build_data, model_inputs
from recipes.data.augment import generator, mask
from recipes.data.build import entropy
from recipes.data.tokens import Tokens, encode

TOKENIZER = ByT5Tokenizer()
END = TOKENIZER.eos_token_id


@pytest.fixture
def folder(tmp_path):
    """Forty documents of 1 to 118 letters, each of its own letter in its own case."""
    for i in range(40):
        (tmp_path / f"{i:02d}.txt").write_text(chr(ord("A") + i % 26) * (1 + 3 * i))
    return tmp_path


def data(folder, **kw):
    settings = {"tokenizer": TOKENIZER, "seq_len": 64, "batch_size": 2, "path": str(folder), "eval_fraction": 0.1}
    return build_data("text", **{**settings, **kw})


def take(stream, n):
    return [next(stream) for _ in range(n)]


def equal(a, b):
    return (
        all(torch.equal(a[k], b[k]) if isinstance(a[k], torch.Tensor) else a[k] == b[k] for k in a)
        and a.keys() == b.keys()
    )


def documents_of(batch):
    """The documents of a packed batch, as (first flat token, ids, labels, positions)."""
    flat = [batch[key].flatten() for key in ("input_ids", "labels", "position_ids")]
    edges = batch["cu_seq_lens_q"].tolist()
    return [(a, *(x[a:b] for x in flat)) for a, b in itertools.pairwise(edges) if a < b]


def test_isolated_documents_restart_positions_and_ignore_their_first_label(folder):
    for batch in take(data(folder).train, 8):
        for _, ids, labels, positions in documents_of(batch):
            assert positions.tolist() == list(range(len(ids)))
            assert labels[0] == IGNORE and torch.equal(labels[1:], ids[1:])
            assert len(set(ids[ids != END].tolist())) <= 1  # of one letter: one document alone
        assert batch["num_tokens"] == batch["input_ids"].numel()
        assert batch["num_labels"] == int((batch["labels"][:, 1:] != IGNORE).sum())


def test_a_cut_document_goes_on_in_the_next_row(folder):
    """Pieces put together again are the documents, each read once an epoch."""
    made = data(folder, seq_len=50, batch_size=1, eval_fraction=0.0)
    tokens = []
    while made.train.epoch == 0:
        tokens += next(made.train)["input_ids"].flatten().tolist()
    text = bytes(t - 3 if t != END else 0 for t in tokens).split(b"\0")
    found = [len(t) for t in text[:40]]
    assert sorted(found) == [1 + 3 * i for i in range(40)]


def test_concatenated_documents_predict_the_next_ones_start(folder):
    batch = next(data(folder, packing="concat").train)
    assert torch.equal(batch["labels"], batch["input_ids"])
    assert batch["num_labels"] == 2 * 63
    assert set(model_inputs(batch)) == {"input_ids", "labels"}


def test_unpacked_rows_hold_one_document_and_pad_on_the_right_without_a_mask(folder):
    made = data(folder, packing="none")
    for batch in take(made.train, 10):
        assert set(model_inputs(batch)) == {
            "input_ids",
            "labels",
        }  # no mask: right padding is unseen by causal attention
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            n = int((ids != TOKENIZER.pad_token_id).sum())
            assert (ids[n:] == TOKENIZER.pad_token_id).all() and (labels[n:] == IGNORE).all()
            assert (ids[: n - 1] == ids[0]).all() and (n == 64 or ids[n - 1] == END)
        assert batch["num_tokens"] == int((batch["input_ids"] != TOKENIZER.pad_token_id).sum())


def test_the_model_gets_exactly_the_named_keys_and_one_boundary_tensor(folder):
    inputs = model_inputs(next(data(folder).train), "cpu")
    assert tuple(inputs) == MODEL_KEYS
    assert inputs["cu_seq_lens_q"] is inputs["cu_seq_lens_k"] and inputs["cu_seq_lens_q"].dtype == torch.int32


def test_boundaries_have_one_length_whatever_the_documents(folder):
    lengths = {len(batch["cu_seq_lens_q"]) for batch in take(data(folder).train, 30)}
    assert len(lengths) == 1


def test_many_short_documents_double_the_boundaries(tmp_path):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "ab"}) + "\n" for _ in range(200)))
    batch = next(data(tmp_path, seq_len=120, batch_size=1).train)
    assert len(batch["cu_seq_lens_q"]) == 65  # 40 documents of 3 tokens in 64 slots
    assert len(documents_of(batch)) == 40


@pytest.mark.parametrize("packing", ["isolate", "concat", "none"])
def test_the_order_depends_on_the_seed_alone(folder, packing):
    first, again, other = (data(folder, packing=packing, seed=s).train for s in (3, 3, 4))
    assert all(equal(a, b) for a, b in zip(take(first, 12), take(again, 12), strict=True))
    assert not all(equal(a, b) for a, b in zip(take(first, 3), take(other, 3), strict=True))


def test_epochs_come_in_different_orders_and_unshuffled_ones_in_one(folder):
    def epochs(shuffle):
        stream, found = data(folder, packing="none", batch_size=1, shuffle=shuffle, eval_fraction=0.0).train, ([], [])
        for _ in range(80):
            epoch_row = next(stream)
            found[0 if len(found[0]) < 40 else 1].append(epoch_row["num_tokens"])
        return found

    first, second = epochs(True)
    assert sorted(first) == sorted(second) and first != second
    first, second = epochs(False)
    assert first == second


@pytest.mark.parametrize("packing", ["isolate", "concat", "none"])
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("steps", [0, 1, 7, 31])
def test_resume_gives_the_batches_of_a_run_left_alone(folder, packing, streaming, steps):
    alone, first, resumed = (data(folder, packing=packing, streaming=streaming).train for _ in range(3))
    take(alone, steps)
    take(first, steps)
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert resumed.epoch == alone.epoch
    assert all(equal(a, b) for a, b in zip(take(alone, 25), take(resumed, 25), strict=True))


@pytest.mark.parametrize("augment", ["crop", "mask"])
def test_random_augmentation_goes_on_exactly_after_a_resume(folder, augment):
    alone, first, resumed = (data(folder, augment=augment).train for _ in range(3))
    plain = take(data(folder).train, 40)
    batches = take(alone, 40)
    assert not all(equal(a, b) for a, b in zip(batches, plain, strict=True))
    take(first, 13)
    np.random.rand(5)  # noqa: NPY002 -- no global generator has a part in it
    resumed.load_state_dict(first.state_dict())
    assert all(equal(a, b) for a, b in zip(batches[13:], take(resumed, 27), strict=True))


def test_augmentation_differs_between_epochs_and_documents():
    tokens = Tokens(np.arange(64, dtype=np.int32), np.arange(64, dtype=np.int32))
    hide = mask(0.5, 999)
    seen = {tuple(hide(tokens, generator(0, epoch, place)).ids) for epoch in range(3) for place in range(3)}
    assert len(seen) == 9
    hidden = hide(tokens, generator(0, 0, 0))
    assert (hidden.labels == tokens.labels).all() and hidden.ids[-1] == 63


def test_ranks_share_the_batches_of_one_process(folder):
    """Two ranks at batch 2 see what one process sees at batch 4, and hold the same position."""
    one = data(folder, batch_size=4).train
    two = [data(folder, batch_size=2, rank=r, world_size=2).train for r in (0, 1)]
    for batch, *parts in zip(take(one, 6), *(take(t, 6) for t in two), strict=True):
        assert torch.equal(batch["input_ids"], torch.cat([p["input_ids"] for p in parts]))
        assert batch["num_labels"] == sum(p["num_labels"] for p in parts)
    assert two[0].state_dict() == two[1].state_dict() == one.state_dict()


def test_a_position_resumes_on_another_number_of_ranks(folder):
    two = data(folder, batch_size=2, rank=1, world_size=2).train
    take(two, 5)
    one, alone = data(folder, batch_size=4).train, data(folder, batch_size=4).train
    one.load_state_dict(two.state_dict())
    take(alone, 5)
    assert all(equal(a, b) for a, b in zip(take(one, 5), take(alone, 5), strict=True))


@pytest.mark.parametrize("change", [{"seed": 9}, {"shuffle": False}, {"eval_fraction": 0.2}])
def test_a_position_of_another_order_is_refused(folder, change):
    state = data(folder).train.state_dict()
    with pytest.raises(ValueError, match=f"{next(iter(change))} was .* is now".replace("is now", "is")):
        data(folder, **change).train.load_state_dict(state)


def test_a_position_in_changed_text_is_refused(folder):
    state = data(folder).train.state_dict()
    (folder / "00.txt").write_text("other")
    with pytest.raises(ValueError, match="sha256 was"):
        data(folder).train.load_state_dict(state)


@pytest.mark.parametrize("streaming", [False, True])
def test_held_out_documents_are_never_trained_on(folder, streaming):
    made = data(folder, packing="none", streaming=streaming, batch_size=1)
    held = {tuple(b["input_ids"].flatten().tolist()) for b in made.eval(100)}
    trained = set()
    while made.train.epoch < 2:
        trained.add(tuple(next(made.train)["input_ids"].flatten().tolist()))
    assert held and not held & trained
    # rows are truncated at 64 letters, where some of the 40 documents look alike
    assert len(held) + len(trained) <= 40


def test_evaluation_gives_the_same_batches_at_every_call_and_pads_its_last(folder):
    made = data(folder)
    first = list(made.eval(100))
    take(made.train, 3)
    assert all(equal(a, b) for a, b in zip(first, made.eval(100), strict=True))
    assert len(list(made.eval(1))) == 1
    assert first[-1]["num_tokens"] < first[-1]["input_ids"].numel()
    whole = sum(b["num_tokens"] for b in first)
    assert whole == sum(len(encode(TOKENIZER, made.documents.store[i])) + 1 for i in made.documents._held)


def test_every_rank_gets_as_many_evaluation_batches(folder):
    ranks = [list(data(folder, rank=r, world_size=3, batch_size=1).eval(100)) for r in range(3)]
    assert len({len(r) for r in ranks}) == 1
    assert sum(b["num_tokens"] for r in ranks for b in r) == sum(b["num_tokens"] for b in data(folder).eval(100))


def test_one_long_document_is_split_between_training_and_evaluation(tmp_path):
    text = "".join(f"line {i}\n" for i in range(1000))
    (tmp_path / "book.txt").write_text(text)
    made = data(tmp_path / "book.txt")
    train, held = made.documents.store[0], made.documents.store[1]
    assert train + held == text and train.endswith("\n") and 0.05 < len(held) / len(text) < 0.15
    assert list(made.eval(4))


def test_the_unigram_entropy_is_that_of_the_bytes(tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 499 + "a")  # 500 a, 499 b, one end
    made = data(tmp_path, seq_len=100, batch_size=1, eval_fraction=0.0)
    assert made.unigram_entropy == pytest.approx(entropy(np.array([500, 499, 1])), abs=1e-12)
    assert entropy(np.array([1, 1, 0, 2])) == pytest.approx(1.5 * np.log(2))
