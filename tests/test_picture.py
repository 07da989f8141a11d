"""memory.png shows what the timeline holds: the stack, the phases, the peak and the predicted line."""

from types import SimpleNamespace

import matplotlib.figure
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from ckpt.ledger import measure
from ckpt.timeline import RESIDENTS, Timeline
from recipes.picture import STACK, draw_memory, unit_of

MIB = 2**20


def timeline_of(*rows, phases):
    """Rows of MiB in the order of RESIDENTS."""
    table = np.array(rows, dtype=np.int64) * MIB
    return Timeline(np.arange(len(rows)), np.array(phases, dtype=np.int8), table)


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draw, and give the one figure that was saved."""

    def draw(source, **options):
        figures = []
        save = matplotlib.figure.Figure.savefig
        monkeypatch.setattr(
            matplotlib.figure.Figure, "savefig", lambda self, *a, **k: figures.append(self) or save(self, *a, **k)
        )
        draw_memory(source, tmp_path / "memory.png", **options)
        (figure,) = figures
        figure.path = tmp_path / "memory.png"
        return figure

    return draw


def texts(axes):
    return [text.get_text() for text in axes.texts]


STEP = timeline_of((4, 0, 8, 1, 0), (4, 0, 8, 20, 0), (4, 2, 8, 15, 3), (4, 4, 8, 0, 1), phases=(0, 0, 1, 2))


def test_the_stack_holds_every_resident_at_its_height(drawn):
    axes = drawn(STEP).axes[0]
    assert set(STACK) == set(RESIDENTS)
    assert [p.get_label().split("\n")[0] for p in axes.collections] == [n.replace("_", " ") for n in STACK]
    tops = [max(path.vertices[:, 1].max() for path in area.get_paths()) for area in axes.collections]
    assert tops == [4, 12, 16, 32, 32]  # parameters, + optimizer state, + gradients, + activations, + workspace
    legend = {t.get_text() for t in axes.get_legend().get_texts()}
    assert "activations\n20.0 MiB (62%)" in legend


def test_phases_are_named_and_the_peak_pointed_at(drawn):
    axes = drawn(STEP).axes[0]
    assert {"forward", "backward"} <= set(texts(axes))
    assert "peak 32.0 MiB" in texts(axes)
    (marker,) = [line for line in axes.lines if line.get_marker() == "o"]
    assert (marker.get_xdata()[0], marker.get_ydata()[0]) == (1, 32)


def test_the_predicted_peak_is_a_dashed_line_inside_the_picture(drawn):
    axes = drawn(STEP, predicted_peak_bytes=40 * MIB).axes[0]
    (dashed,) = [line for line in axes.lines if line.get_linestyle() == "--" and len(set(line.get_ydata())) == 1]
    assert dashed.get_ydata()[0] == 40
    assert axes.get_ylim()[1] > 40
    assert "predicted 40.0 MiB (+25.0%)" in texts(axes)
    assert not any("predicted" in text for text in texts(drawn(STEP).axes[0]))


def test_an_allocators_peak_above_the_timeline_is_drawn_apart(drawn):
    class OnCuda:
        timeline, peak_bytes = STEP, 36 * MIB

    shown = texts(drawn(OnCuda(), predicted_peak_bytes=36 * MIB).axes[0])
    assert "allocator's peak 36.0 MiB" in shown and "predicted 36.0 MiB (+0.0%)" in shown


def test_a_ledger_is_drawn_as_it_was_measured(drawn):
    model = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    with measure(model, optimizer) as ledger:
        model(torch.randn(32, 64)).sum().backward()
        optimizer.step()
    figure = drawn(ledger, title="one layer")
    assert figure.axes[0].get_title(loc="left") == "one layer"
    assert f"peak {ledger.peak_bytes / 1024:,.1f} KiB" in texts(figure.axes[0])
    with Image.open(figure.path) as picture:
        assert picture.format == "PNG" and min(picture.size) >= 700
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
    wanted = {tuple(int(code[i : i + 2], 16) for i in (1, 3, 5)) for code in STACK.values()}
    assert wanted - {tuple(int(STACK["workspace"][i : i + 2], 16) for i in (1, 3, 5))} <= colours


def test_what_lies_off_the_device_is_a_line_and_no_part_of_the_stack(drawn):
    source = SimpleNamespace(timeline=STEP, full_host=np.array([0, 40, 40, 0]) * MIB, disk_bytes=40 * MIB)
    axes = drawn(source).axes[0]
    assert "on the disk, at most 40.0 MiB" in texts(axes) and axes.get_ylim()[1] > 40
    assert any(list(line.get_ydata()) == [0, 40, 40, 0] for line in axes.lines)
    assert len(axes.collections) == len(STACK)
    assert not any("disk" in text for text in texts(drawn(STEP).axes[0]))


def test_units_follow_the_size():
    assert unit_of(1)[0] == "KiB" and unit_of(MIB)[0] == "MiB" and unit_of(3 * 2**30) == ("GiB", 2**30)


def test_an_empty_timeline_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no points"):
        draw_memory(Timeline(np.array([]), np.array([]), np.zeros((0, 5))), tmp_path / "memory.png")
