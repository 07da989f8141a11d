"""A hash of the training text for the manifest: equal on two machines exactly when they train on the same documents."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

WHOLE_BYTES = 256 * 2**20  # more than that in all: only sizes, first and last MiB of each file are hashed


def of_texts(source: str, texts: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Fingerprint (path, text) pairs in memory."""
    parts = [(path, text.encode("utf-8", "surrogatepass")) for path, text in texts]
    lines = [_line(path, len(raw), hashlib.sha256(raw)) for path, raw in parts]
    return _entry(source, len(parts), sum(len(raw) for _, raw in parts), "paths and contents", lines)


def of_files(source: str, files: Sequence[Path]) -> dict[str, Any]:
    """Fingerprint files by path relative to their common folder, size and contents."""
    sizes = [file.stat().st_size for file in files]
    whole = sum(sizes) <= WHOLE_BYTES
    root = os.path.commonpath([file.resolve().parent for file in files])
    lines = []
    for file, size in zip(files, sizes, strict=True):
        digest = hashlib.sha256()
        with open(file, "rb") as handle:
            digest.update(handle.read() if whole else handle.read(2**20))
            if not whole:
                handle.seek(max(0, size - 2**20))
                digest.update(handle.read())
        lines.append(_line(file.resolve().relative_to(root).as_posix(), size, digest))
    how = "paths and contents" if whole else "paths, sizes, first and last MiB"
    return _entry(source, len(files), sum(sizes), how, lines)


def of_text(text: str) -> str:
    """Hash a description, where the contents are out of reach."""
    return hashlib.sha256(text.encode()).hexdigest()


def _line(path: str, size: int, digest: Any) -> str:
    return f"{path}\0{size}\0{digest.hexdigest()}\n"


def _entry(source: str, count: int, size: int, how: str, lines: list[str]) -> dict[str, Any]:
    return {"source": source, "files": count, "bytes": size, "hashed": how, "sha256": of_text("".join(lines))}
