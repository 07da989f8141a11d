"""A measurement of isolation on a model as it stands: for one's own model, or after an upgrade of the libraries.

    prepare(model)
    assert isolation_error(model) < 1e-5

Knows nothing of how documents are kept apart.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from ckpt.attention import bounds
from ckpt.attention.families import text_config, unwrap


@torch.no_grad()
def isolation_error(model: nn.Module, lengths: Sequence[int] = (7, 20, 1, 16), seed: int = 0) -> float:
    """Give the largest difference in logits between documents packed in one row and each alone, over the largest logit.

    Runs in evaluation mode on random tokens and leaves the mode as it was. In fp32 isolated documents give about 1e-6.
    """
    device, modes = next(model.parameters()).device, {m: m.training for m in model.modules()}
    generator = torch.Generator().manual_seed(seed)
    vocabulary = text_config(unwrap(model).config).vocab_size
    parts = [torch.randint(vocabulary, (1, n), generator=generator).to(device) for n in lengths]
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    model.eval()
    try:
        alone = torch.cat([model(input_ids=part, use_cache=False).logits for part in parts], 1)
        packed = model(
            input_ids=torch.cat(parts, 1),
            position_ids=torch.cat([torch.arange(n, device=device) for n in lengths])[None],
            cu_seq_lens_q=bounds.from_starts(starts, 1, sum(lengths)).to(device),
            use_cache=False,
        ).logits
    finally:
        for module, training in modes.items():
            module.training = training
    return float((packed - alone).abs().max() / alone.abs().max())
