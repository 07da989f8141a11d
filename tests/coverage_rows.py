"""One line of docs/coverage.csv: what was found of one architecture under one strategy."""

from __future__ import annotations

import csv
import dataclasses
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path

GOOD = ("exact", "close", "refused")


@dataclasses.dataclass
class Row:
    """A cell that is None or '' is empty: not measured."""

    architecture: str
    strategy: str
    dropout: float
    status: str = ""
    """exact (bitwise), close (within 1e-6 where sums are reordered), refused (by a ValueError of ours), differs,
    leftover (exact, but the undo or the random state is not), unproved (exact, but nothing was replayed), error,
    timeout, crashed."""
    cause: str = ""
    note: str = ""
    """Whether the loss ran in chunks, or why not; how many layers were tiled, and why others were not; gradients beyond
    1e-6 that one unit in the last place of the weights changes as much."""
    random: bool | None = None
    """True if the model draws random numbers in training: dropout or routing noise is really on."""
    worst_error: float | None = None
    worst_parameter: str = ""
    gradients: int | None = None
    layers: int | None = None
    replays: int | None = None
    ops_kept: int | None = None
    ops_run_again: int | None = None
    peak_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    seconds: float | None = None
    cpu_seconds: float | None = None
    torch: str = ""
    transformers: str = ""
    date: str = ""

    @property
    def key(self) -> tuple[str, str, float]:
        return self.architecture, self.strategy, self.dropout

    @property
    def good(self) -> bool:
        """Exact or refused. What the stock checkpointing does is shown for comparison and is no fault of ours."""
        return self.status in GOOD or self.strategy == "stock"

    @property
    def peak_error(self) -> float | None:
        """Predicted over measured peak, minus one."""
        known = self.peak_bytes and self.predicted_peak_bytes
        return self.predicted_peak_bytes / self.peak_bytes - 1 if known else None

    @classmethod
    def from_cells(cls, cells: dict[str, str]) -> Row:
        kinds = typing.get_type_hints(cls)
        return cls(**{name: _parse(cells.get(name) or "", kinds[name]) for name in COLUMNS})


COLUMNS = [field.name for field in dataclasses.fields(Row)]


def _parse(text: str, kind: type) -> typing.Any:
    if kind is str:
        return text
    if not text:
        return None
    options = typing.get_args(kind) or (kind,)
    return text == "True" if bool in options else int(text) if int in options else float(text)


def read(path: Path) -> dict[tuple, Row]:
    """Read the rows by key; of two rows of one key the later one counts."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {row.key: row for row in map(Row.from_cells, csv.DictReader(file))}


def append(path: Path, row: Row) -> None:
    """Add one row, and the header to a new file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if new:
            writer.writeheader()
        writer.writerow(dataclasses.asdict(row))


def write(path: Path, rows: Iterable[Row], order: Sequence[str]) -> None:
    """Rewrite the file sorted, by a rename: an interruption leaves the old one. `order` is that of the strategies."""
    partial = path.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    for row in sorted(rows, key=lambda r: (r.architecture, order.index(r.strategy), -r.dropout)):
        append(partial, row)
    partial.replace(path)
