"""The rows of the prediction's error table: the CSV that they are kept in, and the tables that sum them up.

rows = load(Path("docs/prediction.csv")); rows[cell] = Row(354.39, 354.39); save(path, rows); markdown(rows)
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
import transformers

from recipes.rundir import write_atomically

BEGIN, END = "<!-- predict_table.py: begin -->", "<!-- predict_table.py: end -->"
VERSIONS = (torch.__version__, transformers.__version__)


class Cell(NamedTuple):
    """One row of the table: a model's step."""

    model: str
    strategy: str
    seq_len: int
    loss: str
    packing: str

    def __str__(self) -> str:
        return f"{self.model:>10} T={self.seq_len:<5} {self.strategy:<18} loss={self.loss:<8} packing={self.packing:<8}"


class Row(NamedTuple):
    """Peaks in MiB."""

    measured_mib: float
    predicted_mib: float

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted_mib / self.measured_mib - 1

    def __str__(self) -> str:
        return f"measured {self.measured_mib:9.2f} MiB  predicted {self.predicted_mib:9.2f} MiB  {self.error:+.3%}"


_COLUMNS = (*Cell._fields, *Row._fields, "torch", "transformers")


def load(path: Path) -> dict[Cell, Row]:
    """Read the cells that were measured with the versions at hand; {} without a file."""
    if not path.exists():
        return {}
    found = {}
    for line in csv.DictReader(io.StringIO(path.read_text("utf-8"))):
        if (line["torch"], line["transformers"]) == VERSIONS:
            cell = Cell(line["model"], line["strategy"], int(line["seq_len"]), line["loss"], line["packing"])
            found[cell] = Row(float(line["measured_mib"]), float(line["predicted_mib"]))
    return found


def save(path: Path, rows: Mapping[Cell, Row]) -> None:
    """Write all cells, or nothing."""
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow(_COLUMNS)
    for cell, row in rows.items():
        out.writerow((*cell, *(round(mib, 4) for mib in row), *VERSIONS))
    write_atomically(path, text.getvalue())


def markdown(rows: Mapping[Cell, Row]) -> str:
    """Return the page: errors by model and length, then by strategy."""
    lines = [
        "# Predicted against measured peaks",
        "",
        "Live bytes on the CPU, fp32, one row, AdamW's step included, the higher of two steps. Made by",
        "`PYTHONPATH=. python scripts/predict_table.py`; every cell stands in [prediction.csv](prediction.csv).",
        "Loss full and chunked; plain rows, and rows of five documents where the family can keep these apart.",
        "`auto` is planned for half way between what `full` and `none` need.",
        "",
        *_summed(rows, ("model", "seq_len"), ("model", "tokens")),
        "",
        *_summed(rows, ("strategy",), ("strategy",)),
    ]
    return "\n".join(lines) + "\n"


def put_into_readme(text: str, rows: Mapping[Cell, Row]) -> str:
    """Replace what stands between the two markers. Raises ValueError where they are missing."""
    if BEGIN not in text or END not in text:
        raise ValueError(f"the README has no lines {BEGIN} and {END} to put the table between")
    before, _, rest = text.partition(BEGIN)
    lengths = sorted({cell.seq_len for cell in rows})
    lines = ["| model |" + "".join(f" {length:,} tokens |" for length in lengths), "|---" * (len(lengths) + 1) + "|"]
    for model in dict.fromkeys(cell.model for cell in rows):
        errors = [_errors(rows, model=model, seq_len=length) for length in lengths]
        told = (f"{len(found)} cells, {max(found):.3%}" if found else "-" for found in errors)
        lines.append(f"| {model} | {' | '.join(told)} |")
    return before + "\n".join([BEGIN, *lines, END]) + rest.partition(END)[2]


def _summed(rows: Mapping[Cell, Row], fields: tuple[str, ...], heads: tuple[str, ...]) -> list[str]:
    """One line for each combination of fields: cells and the largest error."""
    lines = [f"| {' | '.join(heads)} | cells | largest error |", "|---" * (len(heads) + 2) + "|"]
    for values in dict.fromkeys(tuple(getattr(cell, name) for name in fields) for cell in rows):
        errors = _errors(rows, **dict(zip(fields, values, strict=True)))
        lines.append(f"| {' | '.join(map(str, values))} | {len(errors)} | {max(errors):.3%} |")
    return lines


def _errors(rows: Mapping[Cell, Row], **fields: object) -> list[float]:
    return [
        abs(row.error)
        for cell, row in rows.items()
        if all(getattr(cell, name) == value for name, value in fields.items())
    ]
