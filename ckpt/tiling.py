"""Put tiles into a model: which modules run their tokens in parts, and into how many.

What is token-wise is found by `ckpt/engine/chains.py`, how a tile is run stands in `ckpt/engine/tiles.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import nn

from ckpt.engine.chains import find_chains
from ckpt.engine.tiles import Chain, HandThrough, RunTiled
from ckpt.layers import Layer
from ckpt.plan import Policy

NARROW_NORM = 1024
"""Numbers a token below which a norm that stands alone is left whole. Tiled, it runs a third time; beside its layer's
matmuls that costs as the inverse of the width: 7% of a step at 256, too little to measure at 4,096."""

if TYPE_CHECKING:
    from ckpt.patching import Applied
    from ckpt.workload import Workload


def tile(applied: Applied, model: nn.Module, layers: list[Layer], num_tiles: int) -> None:
    """Run the token-wise part of each layer, and the wide norms that stand alone, in `num_tiles` tiles.

    Raises ValueError for a number that is none, and if no layer has a part with an MLP.
    """
    if isinstance(num_tiles, bool) or not isinstance(num_tiles, int) or num_tiles < 1:
        raise ValueError(f"tile_mlp={num_tiles!r} must be a whole number of tiles, 1 or more")
    found = find_chains(model, [layer.module for layer in layers])
    for layer, chain, reason in zip(layers, found.chains, found.reasons, strict=True):
        if chain is None:
            applied.not_tiled[layer.index] = reason
        else:
            applied.chains[layer.index] = chain
            chain.owner = layer.module
    if not applied.chains:
        why = found.reasons[0]
        raise ValueError(f"tile_mlp={num_tiles}: no layer's MLP can be tiled, since {why}. Set tile_mlp=1.")
    applied.norms = [norm for norm in found.norms if _width(norm) >= NARROW_NORM]
    for chain in (*applied.chains.values(), *applied.norms):
        chain.num_tiles = num_tiles
        for position, module in enumerate(chain.modules):
            is_last = position == len(chain.modules) - 1
            applied._set(module, "forward", RunTiled(chain) if is_last else HandThrough(chain, position))


def _width(norm: Chain) -> float:
    """Return the numbers a token of a norm; infinite where it has no weight to tell."""
    return max((p.shape[-1] for p in norm.modules[0].parameters()), default=math.inf)


def auto_tiles(model: nn.Module, policy: Policy, workload: Workload | None, loss: str) -> int:
    """Choose the number of tiles by prediction. Raises ValueError without a workload to predict."""
    if workload is None:
        raise ValueError('tile_mlp="auto" plans for a workload: ckpt.apply(model, strategy, ckpt.Workload(...))')
    from ckpt.choose_tiles import choose_tiles
    from ckpt.simulate import Simulator

    return choose_tiles(Simulator(model, workload.replace(tile_mlp=1)), policy, loss)
