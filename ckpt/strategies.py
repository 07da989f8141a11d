"""Strategies: what users choose. One dataclass each, owning its settings; `policy()` makes what the engine obeys.

>>> make("every_n", n=2)
EveryN(n=2)
"""

from __future__ import annotations

import fnmatch
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar

from ckpt.auto import Auto
from ckpt.engine.keys import ATTENTION, OpKey
from ckpt.engine.record import Op
from ckpt.plan import Decision, Plan, Policy, Rule

_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "addmv", "mv", "_scaled_mm"})
_ATTENTION_PATH = re.compile(r"attn|attention", re.IGNORECASE)
_GROUPS = ("attention", "matmul", "moe", "by_price")
_EXPERT_MATMULS = frozenset({"_grouped_mm", "grouped_mm", "_scaled_grouped_mm", "transformers.grouped_mm_fallback"})


@dataclass(frozen=True)
class KeepAll:
    """Keep everything: the model as it is."""

    name: ClassVar[str] = "none"

    def policy(self) -> Policy:
        return LayerPolicy(self)

    def layer_rule(self, index: int, num_layers: int) -> Rule:
        return Rule(replay=False)


@dataclass(frozen=True)
class Full:
    """Keep each decoder layer's input, replay the layer in backward."""

    name: ClassVar[str] = "full"

    def policy(self) -> Policy:
        return LayerPolicy(self)

    def layer_rule(self, index: int, num_layers: int) -> Rule:
        return Rule(replay=True)


@dataclass(frozen=True)
class EveryN:
    """Replay layers 0, n, 2n, ...; the rest keep their activations, so a larger n keeps more."""

    n: int = 2
    name: ClassVar[str] = "every_n"

    def __post_init__(self):
        _check_count("every_n", "n", self.n)

    def policy(self) -> Policy:
        return LayerPolicy(self)

    def layer_rule(self, index: int, num_layers: int) -> Rule:
        return Rule(replay=index % self.n == 0)


@dataclass(frozen=True)
class Segments:
    """Keep one input per segment of `size` consecutive layers and replay the segment from it.

    size: layers a segment, or "auto" for about sqrt(L).
    inner: "keep": one extra forward, the whole segment's activations alive at once (Chen et al. 2016);
        "replay": the segment's inputs are made again first, then each layer is replayed: two extra forwards.
    """

    size: int | str = "auto"
    inner: str = "keep"
    name: ClassVar[str] = "segments"

    def __post_init__(self):
        if self.size != "auto":
            _check_count("segments", "size", self.size, 'or "auto"')
        if self.inner not in ("keep", "replay"):
            raise ValueError(f"segments: inner={self.inner!r} is unknown; it is keep or replay")

    def policy(self) -> Policy:
        return LayerPolicy(self)

    def layer_rule(self, index: int, num_layers: int) -> Rule:
        size = max(1, round(math.sqrt(num_layers))) if self.size == "auto" else self.size
        return Rule(replay=True, segment=index // size, inner=self.inner)


@dataclass(frozen=True)
class Selective:
    """Replay each layer but keep chosen outputs.

    keep: names joined by "+": `attention`, `matmul`, `moe` (expert matmuls), `by_price`, or patterns of op names and
        keys with wildcards, such as `mul`, `mlp.*/mm#*`.
    min_flops_per_byte: for `by_price`: keep what costs at least so many FLOPs per byte to make again. A linear layer
        costs its input width per bf16 byte, causal attention the sequence length.
    """

    keep: str = "attention"
    min_flops_per_byte: float | None = None
    name: ClassVar[str] = "selective"

    def __post_init__(self):
        if not isinstance(self.keep, str):
            raise ValueError(f'selective: keep={self.keep!r} must be text, names joined by "+": attention+matmul')
        parts = self.parts
        if not parts or any(not part for part in parts):
            raise ValueError(f"selective: keep={self.keep!r} is empty; give e.g. attention, attention+matmul, by_price")
        price = self.min_flops_per_byte
        if ("by_price" in parts) != (price is not None):
            raise ValueError(
                "selective: by_price and min_flops_per_byte go together: keep=by_price min_flops_per_byte=1000"
            )
        if price is not None and not (isinstance(price, (int, float)) and 0 <= price <= sys.float_info.max):
            raise ValueError(f"selective: min_flops_per_byte={price!r} must be a finite number, 0 or more")

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(part.strip() for part in str(self.keep).split("+"))

    def policy(self) -> Policy:
        return KeepPolicy(self)


@dataclass(frozen=True)
class Offload:
    """Move what is kept off the device, and bring it back before backward needs it. The last layer's stays.

    target: "host" (pinned memory beside a GPU) or "disk" (an unnamed file in `directory`, by default the system's
        temporary folder).
    what: "inputs": each layer's input, as `full`, and where the layer falls into two halves the input of the second
        too, so that the two are replayed apart; "kept": the outputs that `selective` would keep.
    keep: for `kept`, the keep-list of `selective`.
    """

    target: str = "host"
    what: str = "inputs"
    keep: str = "attention"
    directory: str | None = None
    name: ClassVar[str] = "offload"

    def __post_init__(self):
        if self.target not in ("host", "disk"):
            raise ValueError(f"offload: target={self.target!r} is unknown; it is host or disk")
        if self.what not in ("inputs", "kept"):
            raise ValueError(f"offload: what={self.what!r} is unknown; it is inputs or kept")
        if self.directory is not None and self.target != "disk":
            raise ValueError("offload: directory goes with target=disk")
        Selective(self.keep)

    def policy(self) -> Policy:
        return OffloadPolicy(self)


@dataclass(frozen=True)
class FromPlan:
    """A saved plan."""

    path: str = ""
    name: ClassVar[str] = "plan"

    def __post_init__(self):
        if not self.path:
            raise ValueError("plan: give strategy.path, a plan.json written by an earlier run or by Plan.save")

    def policy(self) -> Policy:
        return Plan.load(self.path)


class LayerPolicy:
    """Decides by layer only, as the strategy's `layer_rule` says."""

    def __init__(self, strategy):
        self.name = strategy.name
        self._strategy = strategy

    def rule(self, index: int, num_layers: int) -> Rule:
        return self._strategy.layer_rule(index, num_layers)

    def decide(self, index: int, op: Op) -> Decision | None:
        return Decision.RECOMPUTE

    def complaint(self, seen, matched, dynamic) -> str | None:
        return None


class KeepPolicy:
    """Replay all layers, keep the outputs of ops that match a keep-list."""

    def __init__(self, strategy: Selective):
        self.name = strategy.name
        self.strategy = strategy
        self._parts = strategy.parts

    def rule(self, index: int, num_layers: int) -> Rule:
        return Rule(replay=True)

    def decide(self, index: int, op: Op) -> Decision | None:
        keep = op.num_bytes > 0 and any(self._matches(part, op) for part in self._parts)
        return Decision.KEEP if keep else Decision.RECOMPUTE

    def _matches(self, part: str, op: Op) -> bool:
        name = op.key.op
        if part == "attention":
            # Without a fused kernel, probabilities @ values stands for attention: the scores are T x T and not worth
            # keeping.
            return name == ATTENTION or (
                name in ("bmm", "baddbmm") and bool(_ATTENTION_PATH.search(op.key.path)) and not is_quadratic(op)
            )
        if part == "matmul":
            return name in _MATMULS and not is_quadratic(op)
        if part == "moe":
            return name in _EXPERT_MATMULS or (name in _MATMULS and "expert" in op.key.path)
        if part == "by_price":
            return op.flops > 0 and op.flops >= self.strategy.min_flops_per_byte * op.num_bytes
        return _fits(part, op.key)

    def complaint(self, seen: Mapping[int, set[OpKey]], matched: Mapping[int, int], dynamic: set[int]) -> str | None:
        keys = {key for keys in seen.values() for key in keys}
        names = sorted({key.op for key in keys})
        for part in self._parts:
            if part not in _GROUPS and not any(_fits(part, key) for key in keys):
                return (
                    f"selective: {part!r} in keep={self.strategy.keep!r} matched no op of this model. "
                    f"Groups: {', '.join(_GROUPS)}; ops: {', '.join(names)}."
                )
        if any(matched.values()):
            return None
        return (
            f"selective: keep={self.strategy.keep!r} matched no op of this model, so everything would be recomputed. "
            f"Its layers run: {', '.join(names)}. Give other names in strategy.keep, or use strategy full."
        )


class OffloadPolicy:
    """Replay all layers; what they hold in between lives off the device, the last layer's excepted."""

    def __init__(self, strategy: Offload):
        self.name = strategy.name
        self.strategy = strategy
        self.offload = {"target": strategy.target, "directory": strategy.directory}
        self._keep = KeepPolicy(Selective(strategy.keep))
        self._num_layers = 0

    def rule(self, index: int, num_layers: int) -> Rule:
        self._num_layers = num_layers
        if self.strategy.what != "inputs":
            return Rule(replay=True)
        is_last = index == num_layers - 1
        return Rule(replay=True, offload_input=not is_last, middle=Decision.KEEP if is_last else Decision.OFFLOAD)

    def decide(self, index: int, op: Op) -> Decision | None:
        if self.strategy.what == "inputs":
            return Decision.RECOMPUTE
        decision = self._keep.decide(index, op)
        return Decision.OFFLOAD if decision is Decision.KEEP and index < self._num_layers - 1 else decision

    def complaint(self, seen, matched, dynamic) -> str | None:
        return self._keep.complaint(seen, matched, dynamic) if self.strategy.what == "kept" else None


def is_quadratic(op: Op) -> bool:
    """True for a batched matmul whose output is wider than the dimension it sums over, such as attention scores (T x T
    from head_dim): dear to keep, cheap to make again."""
    out = op.outputs[0]
    return op.contraction > 0 and out is not None and out.shape[-1] > op.contraction


def _fits(pattern: str, key: OpKey) -> bool:
    return fnmatch.fnmatchcase(key.op, pattern) or fnmatch.fnmatchcase(str(key), pattern)


STRATEGIES = {cls.name: cls for cls in (KeepAll, Full, EveryN, Segments, Selective, Offload, Auto, FromPlan)}


def makes_plan(strategy: object) -> bool:
    """Tell whether a strategy needs a model and a workload to decide, as `Auto` does; others have a policy at once."""
    return hasattr(strategy, "plan") and not hasattr(strategy, "policy")


def make(name: str, **settings):
    """Make a strategy by its name.

    Raises:
        ValueError: for an unknown name or a setting that the strategy does not have, naming what there is.
    """
    if name not in STRATEGIES:
        raise ValueError(f"strategy {name!r} is unknown; there are {', '.join(STRATEGIES)}")
    cls = STRATEGIES[name]
    allowed = [f.name for f in fields(cls)]
    foreign = [key for key in settings if key not in allowed]
    if foreign:
        raise ValueError(
            f"strategy {name} has no setting {foreign[0]!r}; it has {', '.join(allowed) if allowed else 'none'}"
        )
    return cls(**settings)


def _check_count(strategy: str, key: str, value, alternative: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        hint = f" {alternative}" if alternative else ""
        raise ValueError(f"{strategy}: {key}={value!r} must be a whole number, 1 or more{hint}")
