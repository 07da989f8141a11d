"""Documents into rows, rows into batches.

`Rows` fills rows of T tokens and says at each row's end where it stands: (epoch, document, offset in it).

| packing | a row | a document longer than what is left of the row |
|---|---|---|
| `isolate`, `concat` | pieces of documents, no padding | is cut and goes on in the next row (`isolate`: as a new one) |
| the same, `whole=True` (chats) | whole documents, padded | goes to the next row; beyond T it is truncated |
| `none` | one document, padded | is truncated |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ckpt.attention import bounds
from recipes.data.augment import Augment, generator
from recipes.data.documents import Documents
from recipes.data.files import Document, Position
from recipes.data.tokens import IGNORE, Tokens

Packing = Literal["isolate", "concat", "none"]
Batch = dict[str, Any]
Row = list[Tokens]

MODEL_KEYS = (
    "input_ids", "labels", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
)  # fmt: skip


_NOTHING = Tokens(np.empty(0, np.int32), np.empty(0, np.int32))


class Rows:
    """Rows of at most `tokens` tokens, epoch after epoch, or once through the held-out documents."""

    def __init__(
        self,
        documents: Documents,
        encode: Callable[[Document], Tokens],
        tokens: int,
        *,
        packing: Packing,
        whole: bool = False,
        held_out: bool = False,
        augment: Augment | None = None,
        seed: int = 0,
    ) -> None:
        self.documents, self.encode, self.tokens, self.packing = documents, encode, tokens, packing
        self.whole, self.held_out, self.augment, self.seed = whole or packing == "none", held_out, augment, seed
        self.seek(0, None, 0)

    def seek(self, epoch: int, position: Position | None, offset: int) -> None:
        """Go to token `offset` of the document at `position` (None: the first one) of an epoch."""
        self.epoch, self.position, self.offset = epoch, position, offset
        self._reader = self.documents.read(epoch, position, self.held_out)
        self._current = _NOTHING
        self._first_offset = offset  # of the first document read from here; later ones start at 0
        self._barren = position is None  # whether this whole epoch has been empty so far

    def tell(self) -> dict[str, Any]:
        """Say where the next row begins."""
        return {"epoch": self.epoch, "position": self.position, "offset": self.offset}

    def __iter__(self) -> Iterator[Row]:
        return self

    def __next__(self) -> Row:
        row: Row = []
        room = self.tokens
        while room and (left := self._left()) is not None:
            take = min(len(left.ids), room)
            if self.whole and take < min(len(left.ids), self.tokens):
                break  # it goes to the next row as a whole
            row.append(Tokens(left.ids[:take], left.labels[:take]))
            self.offset += len(left.ids) if self.whole else take
            room -= take
            if self.packing == "none":
                break
        if not row:
            raise StopIteration
        return row

    def _left(self) -> Tokens | None:
        """Give what is left of the current document, else the next one; None when held-out documents are used up."""
        while self._current is _NOTHING or self.offset >= len(self._current.ids):
            found = next(self._reader, None)
            if found is not None:
                self._open(*found)
            elif self.held_out:
                return None
            elif self._barren:
                raise ValueError("the training documents hold no text.")
            else:
                self.seek(self.epoch + 1, None, 0)
        return Tokens(self._current.ids[self.offset :], self._current.labels[self.offset :])

    def _open(self, document: Document, position: Position) -> None:
        tokens = self.encode(document)
        if self.augment and len(tokens.ids):
            tokens = self.augment(tokens, generator(self.seed, self.epoch, position))
        self._current, self.position, self.offset = tokens, position, self._first_offset
        self._first_offset, self._barren = 0, self._barren and not len(tokens.ids)


def make_batch(rows: list[Row], tokens: int, packing: Packing, pad: int) -> Batch:
    """Make the batch of `rows`; missing tokens are padding, which no label counts and no document sees."""
    ids = np.full((len(rows), tokens), pad, dtype=np.int64)
    labels = np.full((len(rows), tokens), IGNORE, dtype=np.int64)
    positions = np.zeros((len(rows), tokens), dtype=np.int64)
    starts, count = [], 0
    for r, row in enumerate(rows):
        at = 0
        for piece in row:
            end = at + len(piece.ids)
            ids[r, at:end], labels[r, at:end] = piece.ids, piece.labels
            if packing != "concat":
                labels[r, at] = IGNORE  # nothing that the model sees predicts it
            positions[r, at:end] = np.arange(end - at)
            starts.append(r * tokens + at)
            at = end
        count += at
        if at < tokens:
            positions[r, at:] = np.arange(tokens - at)
            starts.append(r * tokens + at)
    batch: Batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
    if packing == "isolate":
        cu = bounds.from_starts(starts, len(rows), tokens)
        batch |= {"position_ids": torch.from_numpy(positions), "cu_seq_lens_q": cu, "cu_seq_lens_k": cu,
                  "max_length_q": tokens, "max_length_k": tokens}  # fmt: skip
    return batch | {"num_tokens": count, "num_labels": int((labels[:, 1:] != IGNORE).sum())}


def model_inputs(batch: Batch, device: str | torch.device | None = None) -> dict[str, Any]:
    """Give what `model.forward` takes of a batch (`MODEL_KEYS`), its tensors on `device`."""
    inputs = {key: batch[key] for key in MODEL_KEYS if key in batch}
    if device is not None:
        inputs = {key: x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for key, x in inputs.items()}
    if "cu_seq_lens_q" in inputs:
        inputs["cu_seq_lens_k"] = inputs["cu_seq_lens_q"]
    return inputs
