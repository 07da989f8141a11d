"""`tile_mlp="auto"`: the fewest tiles of the MLP that no longer set the peak.

choose_tiles(simulator, "full")      # 8
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt.patching import resolve

if TYPE_CHECKING:
    from ckpt.simulate import Simulator

MOST_TILES = 64
# More tiles are worth their launches only if they lower the peak by this share.
WORTH = 0.02


def choose_tiles(simulator: Simulator, strategy: Any, loss: str | None = None) -> int:
    """Return the number of tiles, a power of 2, beyond which the predicted peak falls no more; 1 if no MLP can be
    tiled. A plan that brings its own number keeps it."""
    strategy = resolve(strategy, simulator.model, simulator.work)
    own = getattr(strategy, "tile_mlp", None)
    if own is not None:
        return own
    best, peak = 1, simulator.run(strategy, loss=loss, tile_mlp=1).peak_bytes
    tiles = 2
    while tiles <= min(MOST_TILES, simulator.work.seq_len):
        try:
            lower = simulator.run(strategy, loss=loss, tile_mlp=tiles).peak_bytes
        except ValueError:
            return 1  # mixtures of experts, or linear layers of the layer itself
        if lower > peak * (1 - WORTH):
            break
        best, peak = tiles, lower
        tiles *= 2
    return best
