"""A whole plan as the frontier knows it: what it costs, what its peak is estimated to be, and what a run of it said."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ckpt.plan import Plan
from ckpt.simulate import Simulated
from ckpt.solver.inner import Option
from ckpt.solver.space import Space


@dataclass(eq=False)
class Candidate:
    """A whole plan. cost: beyond a step that keeps everything, in the unit of the price. estimate: of its peak, in
    bytes. peak_bytes: of its run on fake tensors, once it was run."""

    space: Space
    cost: float
    flops: int
    estimate: int
    plan: Plan
    label: str
    options: tuple[Option, ...] = ()  # by layer
    away_bytes: int = 0
    stall: float = 0.0
    segment_size: int = 0
    peak_bytes: int | None = None
    simulated: Simulated | None = None

    @property
    def said(self) -> str:
        """What holds for all layers or for many, in words; "" where each layer is treated by itself."""
        tiles = self.space.setting.tile_mlp or 1
        words = [f"loss {self.space.setting.loss}"] if self.space.setting.loss else []
        words += [f"MLP in {tiles} tiles"] if tiles > 1 else []
        return ", ".join([*words, *([self.label] if self.segment_size else [])])

    @property
    def num_changes(self) -> int:
        """Places where a layer is treated otherwise than the one before it."""
        return sum(a is not b for a, b in itertools.pairwise(self.options))
