"""The embedded data set: the source files of the running interpreter's standard library.

Long, real documents that every machine has. Tests, installed packages and generated files are left out, so that two
machines with one Python version train on the same text.
"""

from __future__ import annotations

import io
import sysconfig
import tokenize
from pathlib import Path

from datasets import Dataset

_LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "lib-dynload", "ensurepip"}
    # Tables made by gencodec.py: one of them is most of the loss of a small held-out share (3.8 for 2.5 elsewhere).
    | {"encodings"}
)
_GENERATED = ("_sysconfigdata", "config-")


def load() -> Dataset:
    """Give the standard library as a data set with columns `path` and `text`, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(file for file in root.rglob("*.py") if _wanted(file.relative_to(root)))
    paths, texts = [], []
    for file in files:
        text = _read(file)
        if text and text.strip():
            paths.append(file.relative_to(root).as_posix())
            texts.append(text)
    if not texts:
        raise ValueError(
            f"the standard library in {root} has no source files (zipped or stripped?). Set data=text data.path=FILES."
        )
    return Dataset.from_dict({"path": paths, "text": texts})


def _wanted(relative: Path) -> bool:
    return not any(part in _LEFT_OUT or part.startswith(_GENERATED) for part in relative.parts)


def _read(file: Path) -> str | None:
    """Read a source file in the encoding that it declares; None where it declares a wrong one."""
    raw = file.read_bytes()
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        return None
