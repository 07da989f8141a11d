"""What differs between two plans, layer by layer and op by op.

changes = diff(Plan.load("a.json"), Plan.load("b.json"))
print(changes[0].layers, changes[0].what, changes[0].a, changes[0].b)
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt.plan import LayerPlan, Plan

WHOLE = "layer"
SETTINGS = ("offload", "loss", "tile_mlp")


@dataclass(frozen=True)
class Change:
    """layers: in which it is the same. what: an op's key, "layer", or what holds for all layers: "offload", "loss",
    "tile_mlp". a, b: in the first and second plan."""

    layers: tuple[int, ...]
    what: str
    a: str
    b: str


def diff(a: Plan, b: Plan) -> list[Change]:
    """List the changes from one plan to another, those of whole layers first; none: the plans do the same.

    Recompute and no decision are one thing. Raises ValueError for plans of models with another number of layers.
    """
    if len(a.layers) != len(b.layers):
        raise ValueError(
            f"the plans are for {len(a.layers)} and {len(b.layers)} decoder layers: only plans of one model compare"
        )
    found: dict[tuple[str, str, str], list[int]] = {}
    for what, one, other in zip(SETTINGS, _settings(a), _settings(b), strict=True):
        if one != other:
            found[what, one, other] = []
    for index, (one, other) in enumerate(zip(a.layers, b.layers, strict=True)):
        before, after = _whole(one), _whole(other)
        if before != after:
            found.setdefault((WHOLE, before, after), []).append(index)
        if not (one.replay and other.replay):
            continue  # the line on the layer says it all
        keys = dict.fromkeys([*one.decisions, *other.decisions])
        for key in keys:
            pair = tuple(str(layer.decisions.get(key, "recompute")) for layer in (one, other))
            if pair[0] != pair[1]:
                found.setdefault((str(key), *pair), []).append(index)
    changes = [Change(tuple(layers), *key) for key, layers in found.items()]
    return sorted(changes, key=lambda change: change.what not in (WHOLE, *SETTINGS))


def _whole(layer: LayerPlan) -> str:
    if not layer.replay:
        return "kept whole"
    said = "replayed" if layer.segment is None else f"replayed in segment {layer.segment}, inner {layer.inner}"
    return said + (", input offloaded" if layer.offload_input else "")


def _settings(plan: Plan) -> tuple[str, ...]:
    """What holds for all layers, in the order of SETTINGS."""
    place = "nowhere" if plan.offload is None else str(plan.offload["target"])
    if plan.offload is not None and plan.offload.get("directory") is not None:
        place += f", {plan.offload['directory']}"
    return place, *("as the run says" if value is None else str(value) for value in (plan.loss, plan.tile_mlp))
