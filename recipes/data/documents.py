"""Where documents come from: a reader that yields one epoch from any position, with a fingerprint for the manifest.

`Indexed` knows its documents by number: a new order each epoch, held-out documents chosen by number. `Streamed` goes
through data once an epoch without an index: shuffled within blocks of `BLOCK` documents or `BLOCK_CHARACTERS`, of which
one is in memory, held-out documents chosen by what they say. Both answer `read(epoch, position, held_out)` with
documents and JSON-able positions.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from recipes.data.files import Document, Position, Reader

BLOCK = 512  # documents that a stream holds to shuffle them,
BLOCK_CHARACTERS = 64 * 2**20  # or fewer, where they are long: a block ends with the document that reaches this


class Documents(Protocol):
    """Documents in an order that depends on the epoch alone."""

    fingerprint: dict[str, Any]

    def read(self, epoch: int, position: Position | None, held_out: bool) -> Iterator[tuple[Document, Position]]:
        """Yield the documents of an epoch from `position` on (None: all of them), each with its own position."""


class Store(Protocol):
    """Documents by number. `blocks`: lengths of runs that are read together, None where each is as cheap as any."""

    blocks: list[int] | None

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Document: ...


@dataclass
class Column:
    """One column of a data set as a store."""

    rows: Any
    name: str
    blocks: list[int] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Document:
        return self.rows[int(index)][self.name]


@dataclass
class Files:
    """The documents of several files as a store."""

    readers: list[Reader]
    _ends: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._ends = np.cumsum([len(reader) for reader in self.readers])

    @property
    def blocks(self) -> list[int] | None:
        """Row groups stay together; files without any are runs of one document."""
        if all(reader.blocks is None for reader in self.readers):
            return None
        return [n for reader in self.readers for n in (reader.blocks or [1] * len(reader))]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Document:
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self.readers[which][int(index - (self._ends[which - 1] if which else 0))]


@dataclass
class Split:
    """A single document as two: what comes before a line end near `share` of it, and the rest."""

    text: str
    share: float
    blocks: list[int] | None = None

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> str:
        about = int(len(self.text) * (1 - self.share))
        cut = self.text.rfind("\n", 0, about) + 1 or about
        return self.text[cut:] if index else self.text[:cut]


@dataclass
class Indexed:
    """Documents by number: the last of a fixed random order are held out, the others come in a new order each epoch."""

    store: Store
    fingerprint: dict[str, Any]
    seed: int = 0
    shuffle: bool = True
    eval_fraction: float = 0.02
    max_documents: int | None = None

    def __post_init__(self) -> None:
        count = min(len(self.store), self.max_documents or len(self.store))
        if count == 1 and self.eval_fraction:
            text = self.store[0]
            if isinstance(text, str):
                self.store, count = Split(text, self.eval_fraction), 2
        order = (
            np.random.default_rng([self.seed, 0xE7A1]).permutation(count)
            if not isinstance(self.store, Split)
            else np.arange(2)
        )
        held = max(1, round(count * self.eval_fraction)) if self.eval_fraction and count > 1 else 0
        self._train, self._held = np.sort(order[: count - held]), np.sort(order[count - held :])

    def __len__(self) -> int:
        return len(self._train)

    def read(self, epoch: int, position: Position | None, held_out: bool) -> Iterator[tuple[Document, Position]]:
        """Yield documents; a position is a place in the epoch's order. Held-out documents keep one order."""
        order = self._held if held_out else self._order(epoch)
        for place in range(position or 0, len(order)):
            yield self.store[int(order[place])], place

    def _order(self, epoch: int) -> np.ndarray:
        if not self.shuffle:
            return self._train
        rng = np.random.default_rng([self.seed, epoch])
        if self.store.blocks is None:
            return rng.permutation(self._train)
        parts = np.split(self._train, np.searchsorted(self._train, np.cumsum(self.store.blocks)[:-1]))
        return np.concatenate([rng.permutation(parts[i]) for i in rng.permutation(len(parts))])


Check = Callable[[Document, str], None]  # raises ValueError for a document that cannot be learned; and where it stands

# Opens a source for one pass: (epoch, source position) -> documents, each with the source position of the next.
Opener = Callable[[int, Position | None], Iterator[tuple[Document, Position]]]


@dataclass
class Streamed:
    """Documents as they come, without an index.

    A position is [source position of the block, place in the block, number of the block, documents before it].
    """

    open: Opener
    fingerprint: dict[str, Any]
    seed: int = 0
    shuffle: bool = True
    eval_fraction: float = 0.02
    max_documents: int | None = None

    def read(self, epoch: int, position: Position | None, held_out: bool) -> Iterator[tuple[Document, Position]]:
        """Yield documents; resuming reads the block again and goes to its place in it."""
        start, place, number, done = position or (None, 0, 0, 0)
        source = self.open(0 if held_out else epoch, start)
        while True:
            block, last = self._block(source, done, start)
            if not block:
                return
            order = np.arange(len(block))
            if self.shuffle and not held_out:
                order = np.random.default_rng([self.seed, epoch, number]).permutation(len(block))
            for at in range(place, len(block)):
                if self._held(block[order[at]]) == held_out:
                    yield block[order[at]], [start, at, number, done]
            start, place, number, done = last, 0, number + 1, done + len(block)

    def _block(
        self, source: Iterator[tuple[Document, Position]], done: int, start: Position | None
    ) -> tuple[list[Document], Position | None]:
        """Read the block that begins at `start`, with `done` documents before it, and the position after it."""
        block, last, size = [], start, 0
        limit = BLOCK if self.max_documents is None else min(BLOCK, self.max_documents - done)
        while len(block) < limit and size < BLOCK_CHARACTERS:
            found = next(source, None)
            if found is None:
                break
            document, last = found
            block.append(document)
            size += len(document) if isinstance(document, str) else len(str(document))
        return block, last

    def _held(self, document: Document) -> bool:
        return zlib.crc32(str(document)[:4096].encode("utf-8", "surrogatepass")) < self.eval_fraction * 2**32


def stream_files(readers: list[Reader], seed: int, shuffle: bool, check: Check) -> Opener:
    """Make the opener of files, in a new order each epoch. A position is [place in the order, position in the file]."""

    def open_files(epoch: int, position: Position | None) -> Iterator[tuple[Document, Position]]:
        order = (
            np.random.default_rng([seed, epoch, 1]).permutation(len(readers)) if shuffle else np.arange(len(readers))
        )
        first, within = position or (0, None)
        for place in range(first, len(readers)):
            reader = readers[order[place]]
            for document, following in reader.read_from(within):
                what = f"line {following[1] - 1}" if isinstance(following, list) else f"document {following}"
                check(document, f"{reader.path}, {what}")
                yield document, [place, following]
            within = None

    return open_files


def stream_rows(rows: Any, column: str) -> Opener:
    """Make the opener of a streamed data set. A position is a number of rows, gone through again on resume."""

    def open_rows(_epoch: int, position: Position | None) -> Iterator[tuple[Document, Position]]:
        done = position or 0
        for number, row in enumerate(rows.skip(done) if done else rows, done + 1):
            yield row[column], number

    return open_rows
