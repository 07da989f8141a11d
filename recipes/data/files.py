"""Documents out of files: plain text and source code, jsonl, parquet, read when needed.

A reader serves one file. It is a sequence (an index is built on first use) and can be read from a position without an
index, for data that should not be gone through twice. A document of plain text is a file; one above `PIECE_BYTES`
is cut at line ends, so that no file has to fit into memory.
"""

from __future__ import annotations

import codecs
import functools
import glob
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

PIECE_BYTES = 16 * 2**20
# fmt: off
TEXT_SUFFIXES = frozenset((
    ".bat", ".c", ".cc", ".cfg", ".cmake", ".cpp", ".cs", ".css", ".csv", ".cu", ".cuh", ".cxx", ".dart",
    ".diff", ".erl", ".ex", ".f", ".f90", ".go", ".h", ".hpp", ".hs", ".html", ".ini", ".java", ".jl", ".js",
    ".jsx", ".kt", ".lean", ".lua", ".m", ".md", ".mjs", ".ml", ".nim", ".patch", ".php", ".pl", ".proto",
    ".ps1", ".py", ".pyi", ".pyx", ".r", ".rb", ".rs", ".rst", ".scala", ".sh", ".sql", ".srt", ".swift",
    ".tex", ".toml", ".ts", ".tsv", ".tsx", ".txt", ".v", ".vb", ".vim", ".xml", ".yaml", ".yml", ".zig",
))
# fmt: on

Document = str | list[dict[str, Any]]  # text, or the messages of a chat
Position = Any  # JSON-able; what it means is its reader's business


class Reader(Protocol):
    """One file of documents."""

    path: Path
    blocks: list[int] | None  # runs of documents that are read together; None: each is as cheap as any

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Document: ...
    def read_from(self, position: Position | None) -> Iterator[tuple[Document, Position]]:
        """Yield the documents from `position` on (None: all), each with the position of the next."""


def find(path: str | list[str]) -> list[Path]:
    """List, sorted, what `path` names: files, folders (known suffixes beneath), globs; ValueError if nothing."""
    found: set[Path] = set()
    for item in [path] if isinstance(path, (str, os.PathLike)) else path:
        here = Path(item).expanduser()
        if here.is_dir():
            files = [file for file in here.rglob("*") if _known(file) and not _hidden(file.relative_to(here))]
            if not files:
                raise ValueError(
                    f"data.path={item} is a folder without text: looked for .txt, .md, source code, .jsonl and "
                    ".parquet files. Name the files, or a glob."
                )
        else:
            files = [here] if here.is_file() else [Path(x) for x in glob.glob(str(here), recursive=True)]
            files = [file for file in files if file.is_file()]
        if not files:
            raise ValueError(f"data.path={item} matches no file (working directory {Path.cwd()}). Check the path.")
        found.update(files)
    return sorted(found)


def _known(file: Path) -> bool:
    return file.suffix.lower() in TEXT_SUFFIXES | {".jsonl", ".parquet"} and file.is_file()


def _hidden(relative: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in relative.parts)


def reader(path: Path, column: str) -> Reader:
    """Give the reader for a file, by its suffix. `column`: where jsonl and parquet keep the text or the messages."""
    suffix = path.suffix.lower()
    if suffix == ".jsonl":
        return JsonLines(path, column)
    if suffix == ".parquet":
        return Parquet(path, column)
    if suffix in (".json", ".gz", ".zip", ".zst", ".bz2", ".xz", ".arrow", ".pdf", ".docx"):
        raise ValueError(
            f"{path}: {suffix} files are not read. Convert it to .txt, .jsonl (one object a line) or .parquet."
        )
    return PlainText(path)


def decode(raw: bytes, path: Path, offset: int = 0) -> str:
    """Decode UTF-8, without the mark that a file may begin with; ValueError with the offset for anything else."""
    start = len(codecs.BOM_UTF8) if offset == 0 and raw.startswith(codecs.BOM_UTF8) else 0
    try:
        return raw[start:].decode("utf-8")
    except UnicodeDecodeError as error:
        at = start + error.start
        is_utf16 = offset == 0 and raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        raise ValueError(
            f"{path} is not UTF-8: byte 0x{raw[at]:02x} at offset {offset + at}. Convert it, for example with "
            f"iconv -f {'utf-16' if is_utf16 else 'latin1'} -t utf-8, or leave it out of data.path."
        ) from None


class PlainText:
    """A text file: one document, or pieces of about `PIECE_BYTES` that end with a line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.blocks = None

    @functools.cached_property
    def _ends(self) -> list[int]:
        size, ends = self.path.stat().st_size, []
        if size > PIECE_BYTES:
            with open(self.path, "rb") as file:
                for about in range(PIECE_BYTES, size, PIECE_BYTES):
                    file.seek(about)
                    if file.readline(PIECE_BYTES).endswith(b"\n") and file.tell() > (ends[-1] if ends else 0):
                        ends.append(file.tell())
        return ends if ends and ends[-1] == size else [*ends, size] if size else []

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> str:
        start = self._ends[index - 1] if index else 0
        with open(self.path, "rb") as file:
            file.seek(start)
            return decode(file.read(self._ends[index] - start), self.path, start)

    def read_from(self, position: Position | None) -> Iterator[tuple[str, Position]]:
        """Yield the pieces from piece `position` on."""
        for index in range(position or 0, len(self)):
            yield self[index], index + 1


class JsonLines:
    """A jsonl file: one object a line. A position is [byte offset, line number]."""

    def __init__(self, path: Path, column: str) -> None:
        self.path, self.column = path, column
        self.blocks = None

    @functools.cached_property
    def _starts(self) -> np.ndarray:
        """Byte offset and line number of each line that is not blank: (documents, 2)."""
        with open(self.path, "rb") as file:
            offset, starts = 0, []
            for number, line in enumerate(file, 1):
                if line.strip():
                    starts.append((offset, number))
                offset += len(line)
        return np.array(starts, dtype=np.int64).reshape(-1, 2)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Document:
        offset, number = (int(x) for x in self._starts[index])
        with open(self.path, "rb") as file:
            file.seek(offset)
            return self._parse(file.readline(), offset, number)

    def read_from(self, position: Position | None) -> Iterator[tuple[Document, Position]]:
        """Yield the lines from `position` on."""
        offset, number = position or (0, 1)
        with open(self.path, "rb") as file:
            file.seek(offset)
            for line in file:
                at, offset, number = offset, offset + len(line), number + 1
                if line.strip():
                    yield self._parse(line, at, number - 1), [offset, number]

    def _parse(self, line: bytes, offset: int, number: int) -> Document:
        text = decode(line, self.path, offset)
        try:
            found = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(
                f"{self.path}, line {number}: not JSON ({error.msg}, column {error.colno}). Mend or remove the "
                "line: one object a line."
            ) from None
        except RecursionError:
            raise ValueError(f"{self.path}, line {number}: nested too deeply. Mend or remove the line.") from None
        return _pick(found, self.column, f"{self.path}, line {number}")


class Parquet:
    """A parquet file, decoded one row group at a time. A position is a row number."""

    def __init__(self, path: Path, column: str) -> None:
        self.path, self.column = path, column
        self._decoded: tuple[int, list[Any]] = (-1, [])

    @functools.cached_property
    def _file(self) -> Any:
        import pyarrow
        import pyarrow.parquet

        try:
            file = pyarrow.parquet.ParquetFile(self.path)
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise ValueError(
                f"{self.path} is not a parquet file: {str(error).splitlines()[0].rstrip('.')}. Write it again, or "
                "leave it out of data.path."
            ) from None
        names = file.schema_arrow.names
        if self.column not in names:
            raise ValueError(f"{self.path} has no column {self.column!r}; it has {', '.join(names)}. Set data.column.")
        return file

    @functools.cached_property
    def blocks(self) -> list[int]:
        """Rows of each row group."""
        meta = self._file.metadata
        return [meta.row_group(i).num_rows for i in range(meta.num_row_groups)]

    def __len__(self) -> int:
        return sum(self.blocks)

    def __getitem__(self, index: int) -> Document:
        ends = np.cumsum(self.blocks)
        group = int(np.searchsorted(ends, index, side="right"))
        if self._decoded[0] != group:
            self._decoded = group, self._file.read_row_group(group, columns=[self.column])[self.column].to_pylist()
        row = index - int(ends[group] - self.blocks[group])
        return _pick({self.column: self._decoded[1][row]}, self.column, f"{self.path}, row {index}")

    def read_from(self, position: Position | None) -> Iterator[tuple[Document, Position]]:
        """Yield the rows from row `position` on."""
        for index in range(position or 0, len(self)):
            yield self[index], index + 1


def _pick(found: Any, column: str, where: str) -> Document:
    """Take the text (or the list of messages) out of one row."""
    if not isinstance(found, dict):
        raise ValueError(
            f"{where}: expected an object with {column!r}, got {type(found).__name__}. Write "
            f"{{{json.dumps(column)}: ...}}."
        )
    if column not in found:
        raise ValueError(
            f"{where}: no {column!r}; the object has {', '.join(map(str, found)) or 'nothing'}. Set data.column."
        )
    value = found[column]
    if not isinstance(value, (str, list)):
        raise ValueError(
            f"{where}: {column!r} is {type(value).__name__}, expected text. Mend or remove it, or set data.column."
        )
    return value
