"""Tiny configs: the sizes of `sizes.py`, nested configs included, then what `overrides.py` says of one class.

Field values come from the dataclass fields of the installed transformers, so that a new architecture is usually built
without a line here. Nothing in this file knows a single architecture.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig
from transformers.configuration_utils import PreTrainedConfig

from . import sizes


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a caller may vary: the number of layers, the dropout probability, the layer-drop probability."""

    layers: int = 4
    dropout: float = 0.0
    layer_drop: float = 0.0

    def cycle(self, *kinds: str) -> list[str]:
        """Repeat `kinds` over the layers."""
        return [kinds[i % len(kinds)] for i in range(self.layers)]


Override = Mapping[str, Any]
"""Field -> value, or a function of the Shape; `DEFAULT` leaves the class's own default."""
DEFAULT = object()


def make_config(cls: type[PreTrainedConfig], shape: Shape, overrides: Mapping[str, Override]) -> PreTrainedConfig:
    """Build a tiny config of `cls`. `overrides` is keyed by model_type, or by class name where a class has none."""
    values = {**_by_rule(cls, shape), **_nested(cls, shape, overrides)}
    own = {key: value(shape) if callable(value) else value for key, value in overrides.get(_key(cls), {}).items()}
    values = {key: value for key, value in {**values, **own}.items() if value is not DEFAULT}
    return cls(**values, **_layer_kinds(cls, shape, values))


def _key(cls: type[PreTrainedConfig]) -> str:
    return cls.model_type or cls.__name__


def _by_rule(cls: type[PreTrainedConfig], shape: Shape) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        value = _value(field.name, _default(field), shape)
        if value is not None:
            values[field.name] = value
    return values


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _value(name: str, default: Any, shape: Shape) -> Any:
    """Return the tiny value of one field, None to leave its default."""
    if name.endswith(("_token_id", "_token_index")):
        # spread over the special range by name, so that two tokens of one config seldom coincide
        large = isinstance(default, int) and default >= sizes.FIRST_SPECIAL
        span = sizes.VOCAB - sizes.FIRST_SPECIAL
        return sizes.FIRST_SPECIAL + sum(map(ord, name)) % span if large else 2 if isinstance(default, list) else None
    if isinstance(default, bool) or not isinstance(default, int | float):
        return None
    if "layerdrop" in name:
        return shape.layer_drop
    if name in sizes.JITTER:
        return 0.01 if shape.dropout else 0.0
    if sizes.DROPOUT.search(name) and not sizes.NO_DROPOUT.search(name):
        return float(shape.dropout)
    return shape.layers if name in sizes.DEPTHS else sizes.SIZES.get(name)


def _nested(
    cls: type[PreTrainedConfig], shape: Shape, overrides: Mapping[str, Override]
) -> dict[str, PreTrainedConfig]:
    nested = {}
    for name, spec in cls.sub_configs_defaults.items():
        sub = CONFIG_MAPPING[spec.model_type] if spec.config_class is AutoConfig else spec.config_class
        nested[name] = make_config(sub, shape, overrides)
    return nested


def _layer_kinds(cls: type[PreTrainedConfig], shape: Shape, values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Give every kind of layer that the class's default config has, in order of first appearance."""
    kinds: dict[str, list[str]] = {}
    names = {field.name for field in dataclasses.fields(cls)}
    shape = dataclasses.replace(shape, layers=values.get("num_hidden_layers", shape.layers))
    for name in ("layer_types", "layers_block_type"):
        if name in names and name not in values and len(found := _default_kinds(cls, name)) > 1:
            kinds[name] = shape.cycle(*found)
    name = "mlp_layer_types"  # the first layers are dense, the rest are mixtures of experts
    if name in names and name not in values and len(found := _default_kinds(cls, name)) > 1:
        kinds[name] = [found[0]] + [found[-1]] * (shape.layers - 1)
    return kinds


@functools.cache
def _default_kinds(cls: type[PreTrainedConfig], name: str) -> tuple[str, ...]:
    found = getattr(cls(), name, None)
    return tuple(dict.fromkeys(found)) if isinstance(found, list | tuple) else ()
