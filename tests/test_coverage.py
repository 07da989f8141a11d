"""The coverage run's bookkeeping: what counts as exact, what is run again, what the page says."""

from __future__ import annotations

import coverage_rows
import pytest
from coverage_checks import CHECKS
from coverage_rows import Row

from scripts import coverage
from scripts.coverage_table import markdown

VERSIONS = dict(zip(("torch", "transformers"), coverage.versions(), strict=True))


def rows_of(architecture, strategy="full", statuses=("exact", "exact"), **values):
    found = [Row(architecture, strategy, p, s, **VERSIONS) for p, s in zip((0.1, 0.0), statuses, strict=True)]
    for name, value in values.items():
        setattr(found[-1], name, value)
    return found


def test_rows_survive_the_file(tmp_path):
    path = tmp_path / "coverage.csv"
    rows = rows_of("llama", note="a, b", peak_bytes=10, predicted_peak_bytes=11, seconds=0.5, random=False)
    coverage_rows.write(path, rows, list(CHECKS))
    assert list(coverage_rows.read(path).values()) == rows


def test_resume_runs_what_is_missing_or_wrong_and_nothing_else():
    rows = rows_of("llama") + rows_of("gpt2", statuses=("exact", "timeout")) + rows_of("opt")[:1]
    options = coverage.parse(["--resume", "--only", "llama,gpt2,opt,bloom", "--strategies", "full"])
    assert list(coverage.plan(options, {row.key: row for row in rows})) == ["gpt2", "opt", "bloom"]


def test_rows_of_other_versions_are_run_again():
    rows = rows_of("llama")
    rows[0].torch = "1.0"
    options = coverage.parse(["--resume", "--only", "llama", "--strategies", "full"])
    assert list(coverage.plan(options, {row.key: row for row in rows})) == ["llama"]


def test_the_page_counts_the_worse_of_an_architectures_rows():
    page = markdown(rows_of("llama") + rows_of("gpt2", statuses=("exact", "differs")), 2)
    assert "| strategy | exact | differs |" in page
    assert "| `full` | 1 | 1 |" in page
    assert "| gpt2 | no | **differs** |" in page


def test_the_page_lists_peaks_beyond_one_percent_and_missing_ones():
    rows = rows_of("llama", peak_bytes=1000, predicted_peak_bytes=1000)
    rows += rows_of("dbrx", peak_bytes=1000, predicted_peak_bytes=980)
    rows += rows_of("blt", note="no predicted peak: it asks for values")
    page = markdown(rows, 3)
    assert "1 of 3 architectures are predicted within 1%" in page
    assert "| dbrx | full -2.00% |" in page
    assert "| blt | none: it asks for values |" in page


def test_a_page_of_some_architectures_says_so():
    assert "**1 of 2 architectures have been run so far**" in markdown(rows_of("llama"), 2)
    assert "Each of the 1 architectures" in markdown(rows_of("llama"), 1)


def test_unknown_names_are_refused(capsys):
    with pytest.raises(SystemExit):
        coverage.parse(["--only", "lama"])
    assert "lama: not among" in capsys.readouterr().err
