"""Figures of the Llama-3-8B shape at 131,072 tokens that were worked out by other means than this library."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import ckpt

GIB = 2**30
SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "use_cache": False,
}


def model_of(library_checkpointing: bool):
    """The model on meta, in training mode."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, attn_implementation="sdpa"))
    model.train()
    if library_checkpointing:
        model.gradient_checkpointing_enable()
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "library", "held", "gib"),
    [
        (None, True, False, 239),
        (None, True, True, 254),
        (None, False, False, 991),
        ("selective", False, False, 271),
    ],
    ids=["library_full", "library_full_gradients_held", "library_none", "selective"],
)
def test_known_peaks_of_eight_billion_parameters(strategy, library, held, gib):
    work = ckpt.Workload(
        batch_size=1, seq_len=131072, dtype="bf16_pure", optimizer=None, loss="full", hold_gradients=held
    )
    found = ckpt.predict(model_of(library), strategy, work)
    assert found.peak_bytes / GIB == pytest.approx(gib, rel=0.01)
