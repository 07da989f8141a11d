"""The four sources of documents: the standard library, files, chats in files, data sets of the hub.

Each checks its settings and reads the beginning of its data before it returns, so that a mistake is one ValueError
that names the fix, before anything of a run exists.
"""

from __future__ import annotations

from typing import Any, TypedDict

from recipes.data import files, fingerprint, stdlib
from recipes.data.documents import Check, Column, Documents, Files, Indexed, Streamed, stream_files, stream_rows
from recipes.data.files import Document
from recipes.data.tokens import check_chat
from recipes.hub import offline_without_network

CHECKED_BYTES = 256 * 2**20  # read and checked before training starts; what lies beyond is checked when its turn comes


class Order(TypedDict):
    """How documents are ordered and held out; what `Indexed` and `Streamed` share."""

    seed: int
    shuffle: bool
    eval_fraction: float
    max_documents: int | None


def from_stdlib(order: Order) -> Indexed:
    """Give the source files of the running interpreter's standard library."""
    rows = stdlib.load()
    return Indexed(
        Column(rows, "text"), fingerprint.of_texts("stdlib", zip(rows["path"], rows["text"], strict=True)), **order
    )


def from_files(path: str | list[str], column: str, streaming: bool, order: Order) -> Documents:
    """Give the texts in files: a file a document, or a row of jsonl and parquet."""
    return _of_files("text", files.find(path), path, column, streaming, order, _check_text)


def from_chats(path: str | list[str], column: str, streaming: bool, order: Order) -> Documents:
    """Give the chats in jsonl or parquet files, a list of messages in a row."""
    found = files.find(path)
    wrong = [str(file) for file in found if file.suffix.lower() not in (".jsonl", ".parquet")]
    if wrong:
        raise ValueError(
            f"data=chat reads .jsonl and .parquet, got {wrong[0]}. Write one object with {column!r} on a line."
        )
    return _of_files("chat", found, path, column, streaming, order, check_chat)


def _of_files(
    source: str, found: list[Any], path: Any, column: str, streaming: bool, order: Order, check: Check
) -> Documents:
    readers = [files.reader(file, column) for file in found]
    print_ = fingerprint.of_files(source, found)
    if print_["bytes"] == 0:
        raise ValueError(f"data.path={path} is empty: {len(found)} file(s), 0 bytes. Give files with text.")
    if streaming:
        return Streamed(stream_files(readers, order["seed"], order["shuffle"], check), print_, **order)
    store = Files(readers)
    if len(store) == 0:
        raise ValueError(
            f"data.path={path} holds no documents: {len(found)} file(s) of blank lines. Give files with text."
        )
    seen = 0
    for index in range(len(store)):
        document = store[index]
        check(document, _where(readers, index))
        seen += len(str(document))
        if seen > CHECKED_BYTES:
            break
    return Indexed(store, print_, **order)


def _where(readers: list[files.Reader], index: int) -> str:
    for reader in readers:
        if index < len(reader):
            return f"{reader.path}, document {index + 1}"
        index -= len(reader)
    raise IndexError(index)


def _check_text(document: Document, where: str) -> None:
    if not isinstance(document, str):
        raise ValueError(f"{where}: expected text, got a list. For chats set data=chat.")


def from_hub(name: str, subset: str | None, split: str, column: str, streaming: bool, order: Order) -> Documents:
    """Give a data set of the hub; any failure to reach or find it is one line with what to do."""
    import datasets

    try:
        with offline_without_network():
            rows = datasets.load_dataset(name, subset, split=split, streaming=streaming)
    except (OSError, ValueError, RuntimeError) as error:  # not reachable, not found, no such subset or split
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200].rstrip(".")
        raise ValueError(
            f"data=hub data.name={name} data.split={split} cannot be loaded: {reason}. Check the ID and the network, "
            "load it once where there is one, or train on files: data=text data.path=FILES."
        ) from None
    names = list(rows.column_names or [])
    if names and column not in names:
        raise ValueError(f"data.name={name} has no column {column!r}; it has {', '.join(names)}. Set data.column.")
    info = {"source": "hub", "name": name, "subset": subset, "split": split}
    if streaming:
        return Streamed(
            stream_rows(rows, column), {**info, "hashed": "name", "sha256": fingerprint.of_text(repr(info))}, **order
        )
    digest = fingerprint.of_text(f"{info} {rows._fingerprint}")
    return Indexed(
        Column(rows, column), {**info, "rows": len(rows), "hashed": "name and version", "sha256": digest}, **order
    )
