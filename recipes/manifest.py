"""What a run was made with: command, commit, package versions, machine. And what keeps secrets out of its files.

manifest = collect(sys.argv)
scrub({"command": "train.py wandb.key=0123...", "token": "abc"})     # {"command": "train.py ...***", "token": "***"}
"""

from __future__ import annotations

import math
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
PACKAGES = (
    "torch",
    "transformers",
    "datasets",
    "accelerate",
    "peft",
    "trl",
    "hydra-core",
    "omegaconf",
    "wandb",
    "numpy",
    "scipy",
    "safetensors",
    "tokenizers",
    "flash-attn",
    "flash-attn-3",
    "liger-kernel",
    "kernels",
    "triton",
)

_HIDDEN = "***"
_SECRET_NAME = re.compile(
    r"(?i)(^|[_.-])(api_?key|secret(_?key)?|access_?key|private_?key|password|passwd|credentials?|token)$"
)
# A tokenizer's special tokens are no secrets.
_SPECIAL_TOKEN = re.compile(
    r"(?i)(bos|eos|pad|unk|sep|cls|mask|start|end|stop|image|video|audio|bo[iav]|eo[iav])_token$"
)
# Hugging Face, W&B (old 40 hex digits, new wandb_v1_), OpenAI-like, GitHub; and a password inside a URL. A commit
# has 40 hex digits too: they are no secret where they are called a revision, nor as a folder of the hub's cache.
_SECRET_TEXT = re.compile(
    r"hf_[A-Za-z0-9]{16,}|wandb_v\d_[A-Za-z0-9_]{16,}"
    r"|(?<!snapshots/)(?<!revision=)(?<!revision=['\"])(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])"
    r"|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|(?<=://)[^/\s:@]+:[^/\s@]+(?=@)"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_ASSIGNED = re.compile(r"([\w.-]+)=([^\s,&]+)")


def collect(argv: Sequence[str]) -> dict[str, Any]:
    """Describe this process, without secrets. Imports torch for the CPU capability and the thread count."""
    import torch

    cuda = torch.cuda.is_available()
    return {
        "schema_version": SCHEMA_VERSION,
        "command": scrub(shlex.join(["python", *argv])),
        "git": _git(Path(__file__).resolve().parent),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": _versions(),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "num_devices": torch.cuda.device_count() if cuda else 0,
        "cpu": {
            "model": _cpu_model(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
        },
        "allocator": {
            name: value
            for name, value in os.environ.items()
            if name.startswith("MALLOC_") or name in ("LD_PRELOAD", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        },
        "world_size": int(os.environ.get("WORLD_SIZE", 1)),
    }


def scrub(value: Any) -> Any:
    """Return a copy of nested data fit for a file: secrets replaced by ***, tuples as lists, NaN and infinity as None.

    A secret is a value under a telling key (token, api_key, password, ...), one that looks like a known kind of key, or
    the value of an environment variable whose name tells.
    """
    return _scrub(value, _secrets_of_environment())


def _scrub(value: Any, known: Sequence[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            str(name): _HIDDEN if isinstance(inner, str) and inner and _is_secret(str(name))
            else inner if name == "revision" and isinstance(inner, str) and _COMMIT.fullmatch(inner)
            and inner not in known else _scrub(inner, known)
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_scrub(inner, known) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, (str, Path)):
        text = str(value)
        for secret in known:
            text = text.replace(secret, _HIDDEN)
        return _ASSIGNED.sub(_hide_assigned, _SECRET_TEXT.sub(_HIDDEN, text))
    return value


def _is_secret(name: str) -> bool:
    return bool(_SECRET_NAME.search(name)) and not _SPECIAL_TOKEN.search(name)


def _hide_assigned(found: re.Match) -> str:
    return f"{found[1]}={_HIDDEN}" if _is_secret(found[1]) else found[0]


def _secrets_of_environment() -> list[str]:
    found = (value for name, value in os.environ.items() if _is_secret(name) and len(value) >= 8)
    return sorted(found, key=len, reverse=True)


def _git(folder: Path) -> dict[str, Any] | None:
    """Commit and dirty flag of the checkout that `folder` lies in; None outside one."""

    def git(*args: str) -> str:
        return subprocess.run(
            ["git", "-C", str(folder), *args], capture_output=True, text=True, check=True, timeout=10
        ).stdout

    try:
        # The commit is split from the scrubbing rule for 40 hex digits by its place: it never passes through scrub().
        return {"commit": git("rev-parse", "HEAD").strip(), "dirty": bool(git("status", "--porcelain", "-uno").strip())}
    except (OSError, subprocess.SubprocessError):
        return None


def _versions() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.machine()
