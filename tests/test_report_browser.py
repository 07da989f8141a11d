"""The report in headless Chromium: no complaint, no request, and the numbers of summary.json in the document."""

import json

import numpy
import pytest
from browser import CHROMIUM, Browser
from test_report import make_sweep

from recipes.report import write_report

pytestmark = [
    pytest.mark.cli,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium"),
]
MARKS = """[...document.querySelectorAll('#chart-%s [data-point]')].map(mark => {
  const box = mark.getBoundingClientRect();
  return [Number(mark.dataset.point), box.x + box.width / 2, box.y + box.height / 2];
})"""
TABLE = """[...document.querySelectorAll('tbody tr')].map(row => [...row.cells].map(cell => cell.dataset.value))"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = make_sweep(tmp_path_factory.mktemp("runs") / "lengths")
    write_report(path)
    return path


@pytest.fixture(scope="module")
def browser():
    with Browser() as browser:
        yield browser


@pytest.fixture
def page(browser, folder):
    browser.open(folder / "report.html")
    yield browser
    assert browser.console == []
    assert browser.requests == [(folder / "report.html").resolve().as_uri()]


def summaries(folder):
    return [json.loads((path / "summary.json").read_text()) for path in sorted(folder.glob("0*"))]


def test_table_holds_the_numbers_of_summary_json(page, folder):
    rows = page.run(TABLE)
    assert len(rows) == 9
    for row, summary in zip(rows, summaries(folder), strict=True):
        shown = [None if value == "" else float(value) for value in (row[1], row[3], row[4], row[6])]
        names = ("seq_len", "peak_bytes", "predicted_peak_bytes", "tokens_per_second")
        assert shown == [summary.get(name) for name in names] and row[2] == summary["status"]


@pytest.mark.parametrize(("chart", "x", "y"), [
    ("peak", lambda s: numpy.log(s["seq_len"]), lambda s: numpy.log(s["peak_bytes"])),
    ("speed", lambda s: numpy.log(s["seq_len"]), lambda s: s["tokens_per_second"]),
    ("front", lambda s: numpy.log(s["peak_bytes"]), lambda s: -numpy.log(s["tokens_per_second"])),
    ("prediction", lambda s: numpy.log(s["peak_bytes"]), lambda s: s["predicted_peak_bytes"] / s["peak_bytes"]),
])  # fmt: skip
def test_marks_stand_where_the_numbers_put_them(page, folder, chart, x, y):
    numbers = summaries(folder)
    marks = [mark for mark in page.run(MARKS % chart) if numbers[mark[0]]["status"] == "ok"]
    assert len(marks) == 7
    for at, number, rising in ((1, x, 1), (2, y, -1)):
        values = numpy.array([number(numbers[mark[0]]) for mark in marks], dtype=float)
        pixels = numpy.array([mark[at] for mark in marks])
        if numpy.ptp(values) < 1e-6:  # all alike: then they are level
            assert numpy.ptp(pixels) < 1
            continue
        slope, offset = numpy.polyfit(values, pixels, 1)
        assert slope * rising > 0 and numpy.abs(slope * values + offset - pixels).max() < 1.0


def test_cells_of_the_grid_show_peaks_and_what_ran_out_of_memory(page, folder):
    texts = page.run("[...document.querySelectorAll(\"[id^='grid-text--']\")].map(cell => cell.textContent.trim())")
    numbers = summaries(folder)
    assert texts[0] == f"{numbers[0]['peak_bytes'] / 2**20:,.0f}" and texts[2].split() == ["OOM", "foreseen"]
    assert texts[8] == "OOM"


def test_bars_are_as_wide_as_the_residents(page, folder):
    widths = page.run("""Object.fromEntries([...document.querySelectorAll("[id^='residents--']")].map(
        bar => [bar.id, bar.getBoundingClientRect().width]))""")
    per_byte = [
        widths[f"residents--{index}--{name}"] / size
        for index, summary in enumerate(summaries(folder)) for name, size in (summary.get("residents") or {}).items()
    ]  # fmt: skip
    assert len(per_byte) == 21 and max(per_byte) / min(per_byte) < 1.05


def test_one_click_on_a_point_shows_its_config(page):
    mark = "document.querySelector('#chart-peak [data-point=\"4\"]')"
    page.run(f"{mark}.dispatchEvent(new MouseEvent('click', {{bubbles: true}}))")
    assert page.run("document.querySelector('dialog').open") is True
    assert page.run("document.querySelector('dialog h2').textContent") == "04-full-seq_len=4096"
    assert "seq_len: 4096" in page.run("document.querySelector('dialog pre.config').textContent")
    page.run("document.querySelector('dialog button').click()")
    assert page.run("document.querySelector('dialog').open") is False


def test_the_table_sorts_by_any_column_with_missing_numbers_last(page):
    peaks = "[...document.querySelectorAll('tbody tr')].map(row => row.cells[3].dataset.value).join()"
    for rising in (True, False):
        page.run("document.querySelectorAll('th button')[3].click()")
        values = [float(value) for value in page.run(peaks).split(",") if value]
        assert values == sorted(values, reverse=not rising) and page.run(peaks).endswith(",,")


def test_a_strategy_can_be_shown_alone(page):
    page.run("document.querySelectorAll('.legend button')[1].click()")
    shown = page.run("""[...document.querySelectorAll('tbody tr')].filter(row => !row.hidden)
        .map(row => row.cells[0].dataset.value)""")
    assert shown == ["full"] * 3
    assert page.run("document.querySelectorAll('#chart-peak [data-point]:not(.dimmed)').length") == 3


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [320, 390, 768, 1280])
def test_nothing_is_wider_than_the_screen_and_text_can_be_read(browser, folder, width, dark):
    browser.open(folder / "report.html", width=width, dark=dark)
    assert browser.run("document.documentElement.scrollWidth") <= width
    smallest = browser.run("""Math.min(...[...document.querySelectorAll('svg text')].map(
        text => text.getBoundingClientRect().height))""")
    assert smallest >= 7, "text of a drawing is too small to be read"
    paper = browser.run("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(21, 27, 35)" if dark else "rgb(254, 254, 254)")
    assert browser.console == []


def test_the_button_turns_light_into_dark_and_back(page):
    paper = "getComputedStyle(document.body).backgroundColor"
    before = page.run(paper)
    page.run("document.getElementById('mode').click()")
    assert page.run(paper) != before
    page.run("document.getElementById('mode').click()")
    assert page.run(paper) == before
