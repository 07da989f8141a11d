"""The report of a sweep: the numbers of summary.json, drawn and listed, in one page that asks for nothing."""

import json
import re
import shutil

import pytest
import yaml
from PIL import Image

from recipes.report import palette, write_report
from recipes.report.figures import undominated
from recipes.report.points import read_points

STRATEGIES = {"none": (1.0, 1000.0), "full": (0.25, 750.0), "every_n": (0.6, 740.0)}
LENGTHS = (1024, 4096, 16384)
HOSTILE = "</script><img src=http://example.org/x onerror=alert(1)>"


def make_sweep(folder):
    """Write a sweep of nine jobs by hand: seven ok, one out of memory, one foreseen to be."""
    jobs = []
    for strategy, (memory, speed) in STRATEGIES.items():
        for length in LENGTHS:
            name = f"{len(jobs):02d}-{strategy}-seq_len={length}"
            status = {("none", 16384): "predicted_oom", ("every_n", 16384): "oom"}.get((strategy, length), "ok")
            job = {"name": name, "overrides": [f"+strategy={strategy}", f"++seq_len={length}"], "status": status,
                   "error": None if status == "ok" else HOSTILE, "strategy": strategy, "seq_len": length}  # fmt: skip
            jobs.append(job)
            activations, workspace = int(length * 70_000 * memory), length * 20_000
            peak = 40_000_000 + activations + workspace
            summary = {"schema_version": 1, "status": status, "error": job["error"], "seq_len": length,
                       "predicted_peak_bytes": int(peak * 1.004), "first_loss": 6.0}  # fmt: skip
            if status == "ok":
                summary |= {
                    "peak_bytes": peak, "tokens_per_second": speed - length / 100, "final_loss": 2.5 + length / 1e5,
                    "residents": {"parameters": 40_000_000, "activations": activations, "workspace": workspace},
                    "recompute_flops": 0 if strategy == "none" else 10**9, "step_flops": 10**10,
                }  # fmt: skip
            write_job(folder / name, summary, {"strategy": {"name": strategy}, "seq_len": length})
    (folder / "sweep.json").write_text(json.dumps({"schema_version": 1, "jobs": jobs}))
    return folder


def write_job(path, summary, config, **manifest):
    path.mkdir(parents=True)
    config = {"name": path.name, "model": {"name": "small"}, "dtype": "fp32", "batch_size": 1, **config}
    manifest = {"schema_version": 1, "device": "cpu", "cpu": {"model": "C", "threads": 1}, "git": {"commit": "a" * 40},
                "packages": {"torch": "2.13.0"}, **manifest}  # fmt: skip
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_sweep(tmp_path_factory.mktemp("runs") / "lengths")


@pytest.fixture(scope="module")
def html(folder):
    return write_report(folder).read_text()


def jobs_of(html):
    return json.loads(re.search(r'id="jobs">(.*?)</script>', html)[1])


def test_points_are_the_numbers_of_summary_json(folder):
    for point in read_points(folder).points:
        summary = json.loads((folder / point.name / "summary.json").read_text())
        for name in ("peak_bytes", "predicted_peak_bytes", "tokens_per_second", "status", "seq_len"):
            assert getattr(point, name) == summary.get(name), name


def test_page_asks_for_nothing(html):
    assert not re.search(r'(?:src|href)="(?!data:|#)', html.split("<script")[0])
    assert "@import" not in html and not re.search(r"url\((?!#)", html)
    assert "default-src 'none'" in html


def test_text_of_jobs_cannot_become_markup(html):
    assert HOSTILE not in html and "<img" not in html
    assert dict(jobs_of(html)[2]["rows"])["error"] == HOSTILE


def test_every_job_has_its_mark_in_every_chart_that_it_has_numbers_for(html):
    ids = re.findall(r'id="([a-z]+)--(\d+)"', html)
    marks = {chart: sorted(int(index) for name, index in ids if name == chart) for chart in dict(ids)}
    ran = [0, 1, 3, 4, 5, 6, 7]
    assert marks == {
        "grid": list(range(9)), "peak": list(range(9)), "speed": ran, "front": ran, "prediction": ran,
    }  # fmt: skip
    assert {int(index) for index in re.findall(r'id="residents--(\d+)--activations"', html)} == set(ran)


def test_each_jobs_config_and_command_are_in_the_page(html, folder):
    for job in jobs_of(html):
        assert yaml.safe_load(job["config"])["name"] == job["name"]
        assert job["command"].startswith("python train.py +strategy=")


def test_colours_of_the_drawings_are_variables_with_two_forms(html):
    drawings = "".join(re.findall(r"<svg.*?</svg>", html, re.DOTALL))
    assert not re.findall(r"#[0-9a-f]{6}\b", drawings)
    for colour in palette.ALL:
        assert html.count(f"--{colour.name}: {colour.dark};") == 2


def test_ids_are_unique_and_references_lead_somewhere(html):
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:xlink:href="|url\()#([^")]+)', html)) <= set(ids)


def test_pictures_are_written_beside_the_page(html, folder):
    names = {path.name for path in (folder / "report").iterdir()}
    assert names == {f"{name}.png" for name in ("grid", "peak", "speed", "front", "prediction", "residents")}
    for name in names:
        with Image.open(folder / "report" / name) as picture:
            assert min(picture.size) > 300


def test_the_same_sweep_makes_the_same_page(html, folder):
    assert write_report(folder).read_text() == html


def test_dominated_points_are_those_that_another_of_their_length_beats(folder):
    ran = [point for point in read_points(folder).points if point.peak_bytes]
    best = {(point.series, point.seq_len) for point in undominated(ran)}
    # every_n is slower than full here, and larger.
    assert best == {("none", 1024), ("none", 4096), ("full", 1024), ("full", 4096), ("full", 16384)}


def test_series_are_named_by_what_differs(tmp_path):
    for number, (tiles, length) in enumerate([(1, 64), (4, 64), (1, 128), (4, 128)]):
        config = {"strategy": {"name": "full"}, "seq_len": length, "tile_mlp": tiles}
        write_job(tmp_path / "s" / f"{number}", {"status": "ok"}, config)
    sweep = read_points(tmp_path / "s")  # a folder of runs, no sweep
    assert sweep.series == ["full tile_mlp=1", "full tile_mlp=4"] and sweep.lengths == [64, 128]


def test_mixed_sweeps_are_drawn_with_a_warning(tmp_path):
    for number in (1, 2):
        write_job(tmp_path / "s" / str(number), {"status": "ok", "peak_bytes": 10 * number},
                  {"strategy": {"name": "full"}, "seq_len": 64 * number}, git={"commit": str(number) * 40})  # fmt: skip
    html = write_report(tmp_path / "s").read_text()
    assert "Mixed: these jobs ran with different commits (1111111111, 2222222222)" in html


def test_half_written_jobs_are_shown_as_what_they_are(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    names = sorted(path.name for path in copy.glob("0*"))
    shutil.rmtree(copy / names[0])  # killed before it wrote anything
    (copy / names[1] / "summary.json").unlink()
    (copy / names[1] / "manifest.json").unlink()
    (copy / names[3] / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    html = write_report(copy).read_text()
    assert "(the job wrote no config)" in jobs_of(html)[0]["config"]
    assert len(jobs_of(html)) == 9


def spoil(folder, what):
    match what:
        case "missing":
            return folder / "nothing"
        case "empty":
            (folder / "empty").mkdir()
            return folder / "empty"
        case "run":
            return folder / "00-none-seq_len=1024"
        case "no jobs":
            (folder / "sweep.json").write_text('{"schema_version": 1, "jobs": []}')
        case "torn":
            (folder / "sweep.json").write_text('{"schema_version": 1, "jobs": [')
        case "list":
            (folder / "sweep.json").write_text("[]")
        case "sweep schema":
            (folder / "sweep.json").write_text('{"schema_version": 2, "jobs": []}')
        case "run schema":
            path = folder / "00-none-seq_len=1024" / "summary.json"
            path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 7'))
        case "file in the way":
            shutil.rmtree(folder / "report", ignore_errors=True)
            (folder / "report").touch()
        case "torn run":
            (folder / "00-none-seq_len=1024" / "summary.json").write_text('{"sta')
    return folder


@pytest.mark.parametrize(("what", "says"), [
    ("missing", "is no folder"), ("empty", "neither a sweep nor runs"), ("run", "holds one run"),
    ("no jobs", "without a finished job"), ("torn", "is no JSON"), ("list", "is no JSON object"),
    ("sweep schema", "schema_version 2, and this program reads 1"), ("run schema", "schema_version 7"),
    ("torn run", "is no JSON"), ("file in the way", "report is a file"),
])  # fmt: skip
def test_a_folder_that_cannot_be_drawn_is_one_clear_line(folder, tmp_path, what, says):
    path = spoil(shutil.copytree(folder, tmp_path / "copy"), what)
    with pytest.raises(ValueError, match=says) as caught:
        write_report(path)
    assert "\n" not in str(caught.value)


def test_a_sweep_in_which_nothing_ran_still_has_a_page(folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    for path in copy.glob("0*"):
        shutil.rmtree(path)
    html = write_report(copy).read_text()
    assert "7 of 9" in html and len(jobs_of(html)) == 9  # sweep.json knows how they ended
