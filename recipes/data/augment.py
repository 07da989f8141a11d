"""Random changes to documents, new each epoch and the same after a resume.

The generator is made from seed, epoch and the document's position, never carried along: there is no state to lose.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable

import numpy as np

from recipes.data.files import Position
from recipes.data.tokens import Tokens

Augment = Callable[[Tokens, np.random.Generator], Tokens]


def generator(seed: int, epoch: int, position: Position) -> np.random.Generator:
    """Make the generator of one document in one epoch."""
    return np.random.default_rng([seed, epoch, zlib.crc32(json.dumps(position).encode())])


def crop(tokens: Tokens, rng: np.random.Generator) -> Tokens:
    """Start the document at a random place in its first half."""
    start = int(rng.integers(0, len(tokens.ids) // 2 + 1))
    return Tokens(tokens.ids[start:], tokens.labels[start:])


def mask(share: float, token: int) -> Augment:
    """Make the augmentation that hides a share of the input tokens behind `token`; labels stay, the last token too."""

    def hide(tokens: Tokens, rng: np.random.Generator) -> Tokens:
        hidden = rng.random(len(tokens.ids)) < share
        hidden[-1:] = False
        return Tokens(np.where(hidden, np.int32(token), tokens.ids), tokens.labels)

    return hide
