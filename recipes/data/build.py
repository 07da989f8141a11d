"""From settings to data: the source, its tokens, the endless training stream and the held-out batches."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from recipes.data.augment import Augment, crop, mask
from recipes.data.documents import Documents
from recipes.data.packing import Batch, Packing, Rows, make_batch
from recipes.data.sources import Order, from_chats, from_files, from_hub, from_stdlib
from recipes.data.tokens import IGNORE, Tokens, chat_encoder, padding, text_encoder

Source = Literal["stdlib", "text", "hub", "chat"]
ENTROPY_TOKENS = 2**24  # tokens that the unigram entropy is taken over, at most
CHECKED_CHATS = 1000  # at most, until one is found with something to learn
MASKED = 0.15  # share of the input tokens that augment=mask hides


class BatchStream:
    """The batches of one rank: endless, and resumable on any number of ranks.

    All ranks pack the same rows and each takes its own, so that the position after a step is one for all of them.
    """

    def __init__(
        self, rows: Rows, batch_size: int, pad: int, identity: dict[str, Any], rank: int, world_size: int
    ) -> None:
        self._rows, self._batch_size, self._pad, self._identity = rows, batch_size, pad, identity
        self._rank, self._world_size = rank, world_size

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rows = [next(self._rows) for _ in range(self._batch_size * self._world_size)]
        return _batch(self._rows, rows[self._rank * self._batch_size :][: self._batch_size], self._pad)

    @property
    def epoch(self) -> int:
        """Passes through the training documents, finished ones."""
        return self._rows.epoch

    def state_dict(self) -> dict[str, Any]:
        """Say where the next batch begins: JSON-able, the same on every rank."""
        return {**self._rows.tell(), **self._identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where `state` says; ValueError when it belongs to other data or another order."""
        other = {key: (state.get(key), mine) for key, mine in self._identity.items() if state.get(key) != mine}
        if other:
            what = ", ".join(f"{key} was {was!r}, is {now!r}" for key, (was, now) in other.items())
            raise ValueError(
                f"the data is not what the train state was saved with: {what}. Restore it, or start a new run."
            )
        self._rows.seek(state["epoch"], state["position"], state["offset"])


def _batch(rows: Rows, chosen: list[list[Tokens]], pad: int) -> Batch:
    return make_batch(chosen, rows.tokens, rows.packing, pad)


@dataclass(frozen=True)
class Data:
    """Training batches, held-out batches, and what the manifest says of them."""

    train: BatchStream
    documents: Documents
    tokenizer: Any
    _make_rows: Callable[..., Rows]
    _batch_size: int
    _rank: int
    _world_size: int

    @property
    def fingerprint(self) -> dict[str, Any]:
        """What the manifest says of the data: source, files, bytes, sha256 and what was hashed."""
        return self.documents.fingerprint

    def eval(self, num_batches: int) -> Iterator[Batch]:
        """Yield this rank's held-out batches, at most `num_batches`, the same at every call; padded at the end."""
        rows, share = self._make_rows(held_out=True), self._batch_size * self._world_size
        for _ in range(num_batches):
            found = [row for _, row in zip(range(share), rows, strict=False)]
            if not found:
                return
            found += [[]] * (share - len(found))
            yield _batch(rows, found[self._rank * self._batch_size :][: self._batch_size], padding(self.tokenizer))

    @functools.cached_property
    def unigram_entropy(self) -> float:
        """Entropy of single tokens in the training documents, in nats: the loss of a model that knows no context."""
        rows = self._make_rows(packing="concat", augmented=False)
        counts, seen = np.zeros(len(self.tokenizer), dtype=np.int64), 0
        for row in rows:
            if rows.epoch or seen >= ENTROPY_TOKENS:
                break
            for piece in row:
                counts += np.bincount(piece.ids, minlength=len(counts))
                seen += len(piece.ids)
        return entropy(counts)


def entropy(counts: np.ndarray) -> float:
    """Shannon entropy of a distribution given by counts, in nats."""
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum())


def build_data(
    source: Source = "stdlib",
    *,
    tokenizer: Any,
    seq_len: int,
    batch_size: int,
    packing: Packing = "isolate",
    path: str | list[str] | None = None,
    name: str | None = None,
    subset: str | None = None,
    split: str = "train",
    column: str = "text",
    max_documents: int | None = None,
    eval_fraction: float = 0.02,
    shuffle: bool = True,
    streaming: bool = False,
    augment: Literal["none", "crop", "mask"] | Augment = "none",
    seed: int = 0,
    rank: int = 0,
    world_size: int = 1,
) -> Data:
    """Build training and held-out batches of `batch_size` rows of `seq_len` tokens for one rank.

    Every setting is checked and the beginning of the data read before this returns: ValueError says what to change.
    """
    order = Order(seed=seed, shuffle=shuffle, eval_fraction=eval_fraction, max_documents=max_documents)
    documents = _documents(source, path, name, subset, split, column, streaming, order)
    encode = chat_encoder(tokenizer) if source == "chat" else text_encoder(tokenizer)
    change = (
        augment
        if callable(augment)
        else {"none": None, "crop": crop, "mask": mask(MASKED, padding(tokenizer))}[augment]
    )

    def make_rows(*, held_out: bool = False, packing: Packing = packing, augmented: bool = True) -> Rows:
        used = change if augmented and not held_out else None
        return Rows(
            documents,
            encode,
            seq_len,
            packing=packing,
            whole=source == "chat",
            held_out=held_out,
            augment=used,
            seed=seed,
        )

    whole = packing == "none" or source == "chat"
    _check_length(documents, encode, 1 if whole else seq_len)
    if source == "chat":
        _check_answers(documents, encode, seq_len)
    identity = {
        **order,
        "sha256": documents.fingerprint["sha256"],
        "streaming": streaming,
        "vocab_size": len(tokenizer),
    }
    train = BatchStream(make_rows(), batch_size, padding(tokenizer), identity, rank, world_size)
    return Data(train, documents, tokenizer, make_rows, batch_size, rank, world_size)


def _documents(
    source: str, path: Any, name: Any, subset: Any, split: str, column: str, streaming: bool, order: Order
) -> Documents:
    if source == "stdlib":
        return from_stdlib(order)
    if source == "hub":
        if not name:
            raise ValueError("data=hub needs data.name=ID of a data set.")
        return from_hub(name, subset, split, column, streaming, order)
    if source not in ("text", "chat"):
        raise ValueError(f"data={source!r} is unknown. Use stdlib, text, hub or chat.")
    if not path:
        raise ValueError(f"data={source} needs data.path=FILES (files, folders or globs).")
    if source == "chat":
        return from_chats(path, "messages" if column == "text" else column, streaming, order)
    return from_files(path, column, streaming, order)


def _check_answers(documents: Documents, encode: Callable[[Any], Tokens], seq_len: int) -> None:
    """Raise ValueError where rows would end before the first answers: a loss of nothing looks like a good one."""
    chats = itertools.islice(documents.read(0, None, held_out=False), CHECKED_CHATS)
    lengths = []
    for chat, _ in chats:
        learned = np.flatnonzero(encode(chat).labels[:seq_len] != IGNORE)
        if learned.size and learned[-1] > 0:  # the first label of a row is not predicted
            return
        lengths.append(len(encode(chat).ids))
    raise ValueError(
        f"none of the first {len(lengths)} chats has a token of the assistant within seq_len={seq_len}, where "
        f"chats are cut; the shortest has {min(lengths)} tokens. Raise seq_len."
    )


def _check_length(documents: Documents, encode: Callable[[Any], Tokens], needed: int) -> None:
    """Raise ValueError when the training documents hold fewer tokens than one row."""
    total = 0
    for document, _ in documents.read(0, None, held_out=False):
        total += len(encode(document).ids)
        if total >= needed:
            return
    if not total:
        raise ValueError("the training documents hold no text. Check data.path, or lower data.eval_fraction.")
    raise ValueError(
        f"the training documents hold {total} tokens, fewer than one row of seq_len={needed}. Lower seq_len, add text, "
        "or set data.packing=none."
    )
