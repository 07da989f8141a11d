"""The config of a run that goes on: the run's own config.yaml, changed where the command line says so.

Owns how `resume=` names a run, and what of a new command line counts: the keys that are written there, and for the
choice of a group (`+strategy=full`) all keys of that group.

    words = ["resume=runs/NAME", "steps=200"]
    from_dict(continued(composed(words), words))                # that run, to 200 steps
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

HIDDEN = "***"  # what recipes/manifest.py writes for a secret
OF_A_START = ("name", "runs_dir", "resume", "sweep")  # keys that say which run, and nothing about it


def named(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return `values` with resume=FOLDER written as resume=true, runs_dir and name.

    Raises ValueError when another name is given beside the folder.
    """
    folder = values.get("resume")
    if not isinstance(folder, str):
        return dict(values)
    path = Path(folder)
    if values.get("name") not in (None, path.name):
        raise ValueError(f"resume={folder} and name={values['name']} name two runs. Leave name out.")
    if not path.name:
        raise ValueError(f"resume={folder!r} names no run: give its folder, such as resume=runs/NAME.")
    return {**values, "resume": True, "runs_dir": str(path.parent), "name": path.name}


def continued(asked: Mapping[str, Any], words: Sequence[str]) -> dict[str, Any]:
    """Return the config of the run that `asked` resumes, with what `words` ask for changed.

    Raises ValueError for a run that is not there, one whose config cannot be read, and one that hides a secret which
    has to be given again.
    """
    asked = named(asked)
    if not asked.get("name"):
        return asked  # the check of the config says what is missing
    values = read_config(Path(asked["runs_dir"]) / asked["name"])
    for path in (*_written(words), *((key,) for key in OF_A_START)):
        _put(values, path, _get(asked, path))
    for path, value in _leaves(values):
        if isinstance(value, str) and HIDDEN in value:
            raise ValueError(
                f"{'.'.join(path)} holds a secret, hidden in the run's config.yaml. Give it again on the command line."
            )
    return values


def read_config(run: Path) -> dict[str, Any]:
    """Read a run's config.yaml. Raises ValueError when there is none or it is no mapping."""
    try:
        values = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    except OSError:
        raise ValueError(
            f"resume: {run} holds no run. Give its folder (resume=runs/NAME), or leave resume out."
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError):
        values = None
    if not isinstance(values, dict):
        raise ValueError(f"{run / 'config.yaml'} cannot be read: it is no YAML mapping. Start a new run.")
    return values


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """List what a resumed run does otherwise than before, as `seq_len was 64, is 128`."""
    before = {path: value for path, value in _leaves(saved) if path[0] not in OF_A_START}
    after = {path: value for path, value in _leaves(now) if path[0] not in OF_A_START}
    return [
        f"{'.'.join(path)} was {before.get(path)}, is {after.get(path)}"
        for path in dict.fromkeys((*before, *after))
        if before.get(path) != after.get(path)
    ]


def _written(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key, or group, that the overrides name."""
    for word in words:
        found = re.match(r"\+{0,2}([A-Za-z_][\w.]*)=", word)
        if found and not found[1].startswith("hydra."):
            yield tuple(found[1].split("."))


def _leaves(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, (*above, str(key)))
        else:
            yield (*above, str(key)), value


def _get(values: Any, path: Sequence[str]) -> Any:
    for key in path:
        values = values[key]
    return copy.deepcopy(values)


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    for key in path[:-1]:
        inner = values.get(key)
        values[key] = inner if isinstance(inner, dict) else {}
        values = values[key]
    values[path[-1]] = value
