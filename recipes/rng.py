"""The state of every random generator that a step may draw from, as plain JSON values: python, numpy, torch, cuda.

state = rng_state(); ...; set_rng_state(state)       # what follows draws the same numbers again
"""

from __future__ import annotations

import base64
import random
from typing import Any

import numpy
import torch


def seed_everything(seed: int) -> None:
    """Seed all generators of this process."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)  # every device's generator too


def rng_state() -> dict[str, Any]:
    """Return the state of the generators, JSON-able. CUDA: that of the current device, where it is in use."""
    version, words, gauss = random.getstate()
    key = numpy.random.get_state(legacy=False)
    state = {
        "python": [version, list(words), gauss],
        "numpy": {
            "key": key["state"]["key"].tolist(),
            "pos": key["state"]["pos"],
            "has_gauss": key["has_gauss"],
            "gauss": key["gauss"],
        },
        "torch": _encode(torch.get_rng_state()),
    }
    if torch.cuda.is_initialized():
        state["cuda"] = _encode(torch.cuda.get_rng_state())
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Put the generators where `rng_state` found them."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    legacy = state["numpy"]
    numpy.random.set_state(
        ("MT19937", numpy.array(legacy["key"], dtype=numpy.uint32), legacy["pos"], legacy["has_gauss"], legacy["gauss"])
    )
    torch.set_rng_state(_decode(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_decode(state["cuda"]))


def _encode(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode("ascii")


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
