"""Policy: what the engine asks. Plan: a policy as a table of keys and decisions, in JSON.

A policy answers two questions: what is done with a layer as a whole (`rule`), and, for one op of one layer that is
replayed, whether its outputs are kept, recomputed or offloaded (`decide`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from ckpt.engine.keys import OpKey
from ckpt.engine.record import Op
from ckpt.workload import LOSSES

SCHEMA_VERSION = 1


class Decision(StrEnum):
    """What is done with the outputs of one op call."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True)
class Rule:
    """What is done with one layer.

    replay: False leaves the layer's activations to autograd.
    segment: number of the segment the layer belongs to, None if it holds its own input.
    inner: how a segment is replayed, `keep` or `replay`.
    offload_input: True sends the layer's input off the device between its forward and its backward.
    middle: what is done with the one tensor between the layer's halves (attention, MLP), where there is one: kept or
        offloaded, it lets the halves be replayed apart.
    """

    replay: bool
    segment: int | None = None
    inner: str = "keep"
    offload_input: bool = False
    middle: Decision = Decision.RECOMPUTE


class Policy(Protocol):
    """What the engine asks about layers and ops."""

    name: str

    def rule(self, index: int, num_layers: int) -> Rule: ...

    def decide(self, index: int, op: Op) -> Decision | None:
        """Decide on the outputs of one op of layer `index`; None means: not decided, hence recomputed."""

    def complaint(self, seen: Mapping[int, set[OpKey]], matched: Mapping[int, int], dynamic: set[int]) -> str | None:
        """After all layers ran once: say what is wrong with the policy for this model, None if nothing is.

        seen: by layer, the keys of all its ops. matched: by layer, how many ops were kept or offloaded.
        dynamic: the layers whose ops depend on data."""


@dataclass
class LayerPlan:
    """A plan's row: what is done with one layer and its ops."""

    replay: bool = True
    segment: int | None = None
    inner: str = "keep"
    offload_input: bool = False
    decisions: dict[OpKey, Decision] = field(default_factory=dict)


@dataclass
class Plan:
    """A policy as a table. Layers that the table does not name are replayed whole."""

    layers: list[LayerPlan]
    name: str = "plan"
    source: dict = field(default_factory=dict)  # what made the plan: strategy, model, workload, predicted peak
    offload: dict | None = None  # target and directory of what is offloaded, None if nothing is
    loss: str | None = None  # chosen with the plan; None: as `apply` is told
    tile_mlp: int | None = None

    def rule(self, index: int, num_layers: int) -> Rule:
        if num_layers != len(self.layers):
            raise ValueError(
                f"the plan is for {len(self.layers)} decoder layers, the model has {num_layers}. "
                "Make a plan for this model."
            )
        layer = self.layers[index]
        return Rule(layer.replay, layer.segment, layer.inner, layer.offload_input)

    def decide(self, index: int, op: Op) -> Decision | None:
        return self.layers[index].decisions.get(op.key)

    def unmatched(self, index: int, seen: set[OpKey]) -> list[OpKey]:
        """Return the keys of layer `index` that none of its ops has."""
        return [key for key in self.layers[index].decisions if key not in seen]

    def complaint(self, seen, matched, dynamic) -> str | None:
        for index, keys in seen.items():
            decisions = self.layers[index].decisions
            # An op that is to be recomputed and is not there (a copy that batch size 1 does without) loses nothing.
            missing = [str(k) for k in self.unmatched(index, keys) if decisions[k] is not Decision.RECOMPUTE]
            if missing and index not in dynamic:
                return (
                    f"plan: layer {index} has no op {missing[0]!r}"
                    + (f" (and {len(missing) - 1} more)" if len(missing) > 1 else "")
                    + ". The plan was made for another model, kernel, or (where a layer loops over its tokens) length; "
                    "the layer's ops are e.g. "
                    f"{', '.join(sorted(map(str, keys))[:4])}. Make the plan again."
                )
        return None

    def to_dict(self) -> dict:
        """Group equal layers, so that a 32-layer plan reads as its two or three kinds of layer."""
        groups: list[tuple[dict, list[int]]] = []
        for index, layer in enumerate(self.layers):
            body = {"replay": layer.replay, "decisions": {str(k): str(d) for k, d in sorted_items(layer.decisions)}}
            if layer.offload_input:
                body["offload_input"] = True
            if layer.segment is not None:
                body |= {"segment": layer.segment, "inner": layer.inner}
            for known, indices in groups:
                if known == body:
                    indices.append(index)
                    break
            else:
                groups.append((body, [index]))
        return {
            "schema_version": SCHEMA_VERSION,
            "name": self.name,
            "source": self.source,
            "offload": self.offload,
            "loss": self.loss,
            "tile_mlp": self.tile_mlp,
            "num_layers": len(self.layers),
            "layers": [{"indices": indices, **body} for body, indices in groups],
        }

    @classmethod
    def from_dict(cls, data: object, where: str = "plan") -> Plan:
        """Raises ValueError that names the field that is wrong. Nothing in a plan is executed."""
        if not isinstance(data, dict) or "layers" not in data or "num_layers" not in data:
            raise ValueError(f"{where} is no plan: expected an object with schema_version, num_layers and layers")
        if data.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(
                f"{where} has schema_version {data.get('schema_version')!r}, this version reads {SCHEMA_VERSION}. "
                "Make the plan again."
            )
        count = data["num_layers"]
        if not _is_index(count) or not 0 < count < 100_000:
            raise ValueError(f"{where}: num_layers={count!r} is not a number of layers")
        for key, kind, what in (("layers", list, "a list of groups of layers"), ("source", dict | None, "an object")):
            if not isinstance(data.get(key), kind):
                raise ValueError(f"{where}: {key}={data[key]!r} must be {what}")
        layers: list[LayerPlan | None] = [None] * count
        for group in data["layers"]:
            try:
                inner = group.get("inner", "keep")
                if inner not in ("keep", "replay") or not isinstance(group["replay"], bool):
                    raise ValueError(f"inner={inner!r}, replay={group['replay']!r}")
                segment = group.get("segment")
                if segment is not None and not _is_index(segment):
                    raise ValueError(f"segment={segment!r}")
                decisions = {OpKey.parse(k): Decision(d) for k, d in group["decisions"].items()}
                for index in group["indices"]:
                    if not _is_index(index) or index >= count:
                        raise ValueError(f"index {index!r} is no layer of {count}")
                    if layers[index] is not None:
                        raise ValueError(f"layer {index} stands twice")
                    layers[index] = LayerPlan(
                        group["replay"], segment, inner, bool(group.get("offload_input")), dict(decisions)
                    )
            except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                raise ValueError(f"{where}: a group of layers is malformed ({error})") from None
        if None in layers:
            raise ValueError(f"{where}: layer {layers.index(None)} of {count} is missing")
        return cls(
            layers,
            str(data.get("name", "plan")),
            dict(data.get("source") or {}),
            _offload_of(data, where),
            _one_of(data, "loss", lambda v: v in LOSSES, f"one of {', '.join(LOSSES)}", where),
            _one_of(data, "tile_mlp", lambda v: _is_index(v) and v > 0, "a number of tiles", where),
        )

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan as JSON; an existing file is replaced whole or not at all."""
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(self.to_dict(), indent=1) + "\n", encoding="utf-8")
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    @classmethod
    def load(cls, path: str | os.PathLike) -> Plan:
        """Raises ValueError if the file is missing, no JSON, or no plan."""
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"plan {os.fspath(path)!r} cannot be read: {error.strerror or error}") from None
        except ValueError as error:
            raise ValueError(f"plan {os.fspath(path)!r} is no JSON: {error}") from None
        return cls.from_dict(data, f"plan {os.fspath(path)!r}")


def _is_index(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _one_of(data: dict, key: str, allowed: Callable[[object], bool], what: str, where: str):
    value = data.get(key)
    if value is not None and not allowed(value):
        raise ValueError(f"{where}: {key}={value!r} must be {what}, or null: as the run says")
    return value


def _offload_of(data: dict, where: str) -> dict | None:
    offload = data.get("offload")
    if offload is None:
        return None
    if not isinstance(offload, dict) or offload.get("target") not in ("host", "disk"):
        raise ValueError(f"{where}: offload={offload!r} must name a target, host or disk")
    if not isinstance(offload.get("directory"), str | None):
        raise ValueError(f"{where}: offload directory={offload['directory']!r} must be a folder's path, or null")
    return {"target": offload["target"], "directory": offload.get("directory")}


def sorted_items(decisions: dict[OpKey, Decision]) -> list[tuple[OpKey, Decision]]:
    """Return a layer's decisions in the order of their keys' text."""
    return sorted(decisions.items(), key=lambda item: str(item[0]))
