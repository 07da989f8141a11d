"""Strict, typed configuration from dataclasses: every key declared once, with type, default, bounds and doc.

Owns the step from a plain nested dict (what Hydra or a saved YAML file gives) to dataclass instances, and the wording
of every complaint on the way. Knows no key of this project.

    @dataclass(frozen=True)
    class Optim:
        lr: float = key(3e-4, "peak learning rate", above=0)

    build(Optim, {"lr": 1e-3}, "optim")       # Optim(lr=0.001)
    build(Optim, {"rl": 1e-3}, "optim")       # ValueError: optim.rl is no key of this program. Did you mean optim.lr?
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import sys
import types
import typing
from typing import Any, Literal, TypeVar

T = TypeVar("T")

_UNITS = {"k": 1024, "m": 1024**2, "g": 1024**3}


def key(
    default: Any,
    doc: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    below: float | None = None,
) -> Any:
    """Declare one configuration key: its default, its one-line doc, and the bounds that its numbers must keep."""
    bounds = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    metadata = {"doc": doc, "bounds": {name: limit for name, limit in bounds.items() if limit is not None}}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: type(default)(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def section(cls: type, doc: str) -> Any:
    """Declare a nested group of keys."""
    return dataclasses.field(default_factory=cls, metadata={"doc": doc, "bounds": {}})


def build(cls: type[T], values: Any, where: str = "") -> T:
    """Make a `cls` from a nested dict; keys that are absent take their default.

    Raises ValueError, in one line, for an unknown key (with the nearest allowed one) and for a value of a wrong type or
    out of bounds. `where` is the dotted path of the section, for messages.
    """
    if not isinstance(values, dict):
        raise ValueError(f"{where}={values!r} is a single value, but {where} is a group of keys: {_names(cls)}.")
    declared = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for name in values:
        if name not in declared:
            raise ValueError(unknown(_join(where, name), [_join(where, other) for other in declared]))
    hints = typing.get_type_hints(cls)
    made = {}
    for name, value in values.items():
        path = _join(where, name)
        made[name] = convert(value, hints[name], path)
        _check_bounds(made[name], declared[name].metadata.get("bounds", {}), path)
    return cls(**made)


def convert(value: Any, hint: Any, path: str) -> Any:
    """Return `value` as the type `hint` asks for. Raises ValueError: what is allowed, what to write instead."""
    if dataclasses.is_dataclass(hint):
        return build(hint, value, path)
    ok, made = _match(value, hint)
    if ok:
        return made
    raise ValueError(f"{path}={_show(value)} is not allowed: give {_describe(hint)}.{_hint(value, hint, path)}")


def unknown(path: str, allowed: list[str]) -> str:
    """Word the complaint about a key that does not exist."""
    near = difflib.get_close_matches(path, allowed, n=1, cutoff=0.6)
    did_you_mean = f" Did you mean {near[0]}?" if near else ""
    return f"{path} is no key of this program.{did_you_mean} Allowed here: {', '.join(allowed) or 'nothing'}."


def docs(cls: type, where: str = "") -> list[tuple[str, str, Any, str]]:
    """List every key below `cls` as (dotted name, type in words, default, doc)."""
    rows = []
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        path = _join(where, field.name)
        if dataclasses.is_dataclass(hints[field.name]):
            rows += docs(hints[field.name], path)
        else:
            has_factory = field.default is dataclasses.MISSING
            default = field.default_factory() if has_factory else field.default
            rows.append((path, _describe(hints[field.name]), default, field.metadata["doc"]))
    return rows


def _match(value: Any, hint: Any) -> tuple[bool, Any]:
    """Try `value` against one type; unions take the first member that fits. A bool is never a number."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True, value
    if origin in (typing.Union, types.UnionType):
        tried = (_match(value, member) for member in args)
        return next((result for result in tried if result[0]), (False, None))
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in args), value
    if origin in (list, tuple):
        if not isinstance(value, (list, tuple)):
            return False, None
        if origin is tuple and args[-1] is not Ellipsis and len(value) != len(args):
            return False, None
        members = args if origin is tuple and args[-1] is not Ellipsis else [args[0]] * len(value)
        tried = [_match(item, member) for item, member in zip(value, members, strict=True)]
        return all(ok for ok, _ in tried), origin(made for _, made in tried)
    if origin is dict:
        return isinstance(value, dict), value
    if hint is type(None):
        return value is None, None
    if hint is float:
        ok = isinstance(value, (int, float)) and not isinstance(value, bool)
        return ok, float(value) if ok else None
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool), value
    return isinstance(value, hint), value


def _check_bounds(value: Any, bounds: dict[str, float], path: str) -> None:
    for number in value if isinstance(value, (list, tuple)) else [value]:
        if not isinstance(number, (int, float)) or isinstance(number, bool):
            continue
        failed = (
            ("at_least" in bounds and not number >= bounds["at_least"])
            or ("above" in bounds and not number > bounds["above"])
            or ("at_most" in bounds and not number <= bounds["at_most"])
            or ("below" in bounds and not number < bounds["below"])
            or not abs(number) <= sys.float_info.max
        )
        if failed:
            words = " and ".join(f"{name.replace('_', ' ')} {limit:g}" for name, limit in bounds.items())
            finite = "" if abs(number) <= sys.float_info.max else " and finite" if words else "finite"
            raise ValueError(f"{path}={value!r} is out of range: it must be {words}{finite}.")


def _describe(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_describe(member) for member in args)
    if origin is Literal:
        return " or ".join(str(choice) for choice in args)
    if origin is tuple and args[-1] is not Ellipsis:
        return f"[{', '.join(_describe(member) for member in args)}]"
    if origin in (list, tuple):
        return f"a list of {_describe(args[0])}"
    if origin is dict:
        return "a mapping"
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))


def _hint(value: Any, hint: Any, path: str) -> str:
    """Add what probably went wrong: units, YAML's booleans, floats for integers, numbers for strings."""
    members = set(typing.get_args(hint)) | {hint}
    if isinstance(value, str):
        unit = re.fullmatch(r"(\d+)\s*([kKmMgG])i?[bB]?", value.strip())
        if unit and members & {int, float}:
            return f" Write {path}={int(unit[1]) * _UNITS[unit[2].lower()]}."
        choices = [
            choice for member in members for choice in typing.get_args(member) or [member] if isinstance(choice, str)
        ]
        near = difflib.get_close_matches(value, choices, n=1)
        return f" Did you mean {path}={near[0]}?" if near else ""
    if isinstance(value, bool):
        return " (YAML reads on, off, yes and no as true and false.)"
    if isinstance(value, float) and value.is_integer() and int in members:
        return f" Write {path}={int(value)}."
    if isinstance(value, (int, float)) and str in members:
        return f" Quote it: {path}='\"{value}\"'."
    return ""


def _show(value: Any) -> str:
    return "null" if value is None else repr(value)


def _join(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)


def _names(cls: type) -> str:
    return ", ".join(f.name for f in dataclasses.fields(cls) if f.init)
