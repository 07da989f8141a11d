"""Where files of models come from: the hub, a folder, an installed package; and one line for each way to fail.

Nothing is fetched from a hub unless a name in the config says so, and no code of a hub runs without
`model.trust_remote_code`.

    config = reach(cfg.model, lambda name: AutoConfig.from_pretrained(name, **from_where(cfg.model)))
    with offline_without_network(): load_dataset(...)
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import datasets
import huggingface_hub
from safetensors import SafetensorError
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from recipes.config import Model

PACKAGE = "package:"
"""Prefix of a `model.name` that is a folder inside an installed Python package."""


class Unreachable(ValueError):
    """Files of a model could not be had. is_folder: they were looked for in a folder, not on a hub."""

    def __init__(self, message: str, is_folder: bool):
        super().__init__(message)
        self.is_folder = is_folder


def from_where(chosen: Model) -> dict[str, Any]:
    """Return what selects files of a model, as all `from_pretrained` take it."""
    # trust_remote_code is given even when false: left out, Transformers asks at the terminal.
    where = {"revision": chosen.revision, "gguf_file": chosen.gguf_file, "trust_remote_code": chosen.trust_remote_code}
    return {name: value for name, value in where.items() if value is not None}


def reach(chosen: Model, load: Callable[[str], Any], what: str = "model ") -> Any:
    """Call `load(name)`; turn every way in which a model can be out of reach into one line that says what to do."""
    name = chosen.name
    if name.startswith(PACKAGE):
        name = _package_folder(name)
    elif name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:  # an ID of the hub is OWNER/NAME
        name = str(Path(name).expanduser())
        if not Path(name).is_dir():
            raise ValueError(
                f"model.name={chosen.name} is no folder. Give one that save_pretrained wrote, or a hub ID."
            )
    is_folder = Path(name).is_dir()
    try:
        with no_bars_off_terminals(), contextlib.nullcontext() if is_folder else offline_without_network():
            return load(name)
    except ImportError as error:
        raise ValueError(f"{what}{chosen.name} needs a package that is not installed: {first_line(error)}") from error
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and "mismatched" not in str(error):
            raise
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{what}{chosen.name} brings Python code of its own, which is not run unasked. Read it; then "
                "allow it with model.trust_remote_code=true."
            ) from error
        if is_folder:
            fix = _inside(Path(name)) or (
                "The folder must hold what save_pretrained writes (config.json, model.safetensors, tokenizer files)."
            )
        else:
            fix = (
                "Fetch it where there is a network (hf download, after hf auth login if it is gated), give a folder as "
                "model.name, or train its shape alone: model.init=random with model.config and model.tokenizer=byte."
            )
        raise Unreachable(f"{what}{chosen.name} cannot be loaded: {first_line(error)} {fix}", is_folder) from error


@contextlib.contextmanager
def offline_without_network() -> Iterator[None]:
    """Spare the hub's clients their retries (40 s, a line each) where its name does not resolve; caches still serve."""
    if _finds_the_hub():
        yield
        return
    before = [(module, module.HF_HUB_OFFLINE) for module in (huggingface_hub.constants, datasets.config)]
    for module, _ in before:
        module.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for module, value in before:
            module.HF_HUB_OFFLINE = value


@contextlib.contextmanager
def no_bars_off_terminals() -> Iterator[None]:
    """Keep Transformers' progress bars out of log files, where each update would be a line."""
    silenced = not sys.stderr.isatty() and is_progress_bar_enabled()
    if silenced:
        disable_progress_bar()
    try:
        yield
    finally:
        if silenced:
            enable_progress_bar()


def first_line(error: BaseException) -> str:
    """Keep an upstream message to its first line, or two where the first only announces the next; some run on with
    hundreds of names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    text = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    return text if len(text) <= 200 else text[:197] + "..."


def _finds_the_hub() -> bool:
    """Tell whether the hub's name resolves here. True behind a proxy, which resolves names itself."""
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return True
    try:
        socket.getaddrinfo(urlsplit(huggingface_hub.constants.ENDPOINT).hostname, 443)
    except OSError:
        return False
    return True


def _inside(folder: Path) -> str:
    """Say what a folder holds that is no model, but shows what was meant."""
    if (folder / "adapter_config.json").exists() and not (folder / "config.json").exists():
        return "It holds an adapter alone: give the model that it was trained on, or the two merged (merge_and_unload)."
    if (folder / "export" / "config.json").exists():
        return f"It is a run, whose model is in {folder / 'export'}."
    return ""


def _package_folder(name: str) -> str:
    package, _, inside = name.removeprefix(PACKAGE).partition("/")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"model.name={name} needs the Python package {package}, which is not installed. See the header of "
            "the model's file under conf/model/ (smollm2_135m: make smollm2)."
        )
    return str(Path(spec.submodule_search_locations[0]) / inside)
