"""Timelines as images: what is in the SVG, the same bytes every time, and errors."""

from __future__ import annotations

import collections
import pathlib
import random
import re
import sys
import xml.etree.ElementTree as ET

import matplotlib
import pytest
from hardware import plan_of, slow_network

from dapple_tf.simulation.planned import planned
from dapple_tf.simulation.simulator import simulate
from dapple_tf.view.colours import COLOURS
from dapple_tf.view.image import _coarse, draw_timelines
from dapple_tf.view.timeline import Span, Timeline

SVG = "{http://www.w3.org/2000/svg}"


def replicated(memory: int = 2**28) -> list[Timeline]:
    """A plan of 3:1 on a cluster with slow links, planned and simulated."""
    case = slow_network(memory=memory)
    return [planned(*case), simulate(*case).drawn()]


def drawn(path: pathlib.Path) -> tuple[collections.Counter[str], list[str]]:
    """(fill colour -> number of shapes, all texts) of an SVG file."""
    root = ET.parse(path).getroot()
    assert root.tag == f"{SVG}svg"
    fills: collections.Counter[str] = collections.Counter()
    for element in root.iter():
        if element.tag in (f"{SVG}use", f"{SVG}path"):
            fills.update(re.findall(r"fill: (#[0-9a-f]{6})", element.get("style", "")))
    return fills, [element.text or "" for element in root.iter(f"{SVG}text")]


def test_each_span_is_a_box_and_wide_ones_have_their_numbers(tmp_path: pathlib.Path) -> None:
    timeline = planned(plan_of([[0], [1], [2], [3]], 8, "zb_h1"))
    draw_timelines([timeline], tmp_path / "step.svg", title="4 stages & <8> micro-batches for $5")
    fills, texts = drawn(tmp_path / "step.svg")
    for kind in ("F", "Bx", "Bw"):
        assert fills[COLOURS[kind]] == 32 + 1  # and one in the legend
    numbers = collections.Counter(text for text in texts if text in "01234567")
    assert all(numbers[str(number)] >= 4 * 3 for number in range(1, 8))
    assert {"4 stages & <8> micro-batches for $5", "planned: 27 F, bubbles 11.1%", "11.1%", "F", "Bx", "Bw"} <= {*texts}
    assert [text for text in texts if text.startswith("device")] == list(timeline.devices.values())


def test_transfers_reductions_and_memory(tmp_path: pathlib.Path) -> None:
    timelines = replicated()
    draw_timelines(timelines, tmp_path / "step.svg")
    fills, texts = drawn(tmp_path / "step.svg")
    sends = [span for span in timelines[1].spans if span.kind == "send" and span.end > span.start]
    assert len(sends) < sum(span.kind == "send" for span in timelines[1].spans)  # free ones inside a server
    assert fills[COLOURS["send"]] >= len(sends) + 1
    assert fills[COLOURS["all_reduce"]] == 3 + 1
    assert texts.count("transfers") == 3 and texts.count("all-reduces") == 3
    assert texts.count("72.0 of 256 MiB") == 2 * 3 and texts.count("bubble") == 2 + 1
    assert not fills["#d1453b"]


def test_later_stages_of_a_device_are_paler(tmp_path: pathlib.Path) -> None:
    draw_timelines([planned(plan_of([[0], [1], [0], [1]], 4, "interleaved"))], tmp_path / "step.svg")
    fills, texts = drawn(tmp_path / "step.svg")
    assert fills[COLOURS["F"]] == 8 + 1 and fills["#a4c2e4"] == 8 + 1
    assert "paler: a device's later stages" in texts


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_the_same_timelines_give_the_same_file_and_leave_matplotlib_as_it_was(
    tmp_path: pathlib.Path, suffix: str
) -> None:
    timelines = replicated()
    paths = [tmp_path / f"{number}{suffix}" for number in range(2)]
    draw_timelines(timelines, paths[0], title="step")
    with matplotlib.rc_context({"font.size": 30.0, "axes.facecolor": "black", "svg.hashsalt": None}):
        before = dict(matplotlib.rcParams)
        draw_timelines(timelines, paths[1], title="step")
        assert dict(matplotlib.rcParams) == before
    first, second = (path.read_bytes() for path in paths)
    assert first == second
    assert first.startswith(b"\x89PNG" if suffix == ".png" else b"<?xml")
    assert b"<dc:date>" not in first


def test_steps_without_tasks_time_or_devices(tmp_path: pathlib.Path) -> None:
    tiny = Timeline("tiny", 1e-9, (Span("loss", 0.0, 1e-9, 0, 0),), {0: "d" * 60}, {0: ((0.0, 5.0),)})
    nothing = [Timeline("empty", 2.0, (), {0: "device 0"}), Timeline("none", 0.0, (), {}), tiny]
    draw_timelines(nothing, tmp_path / "step.svg")
    _, texts = drawn(tmp_path / "step.svg")
    assert "100.0%" in texts and "other" in texts and "d" * 17 + "…" + "d" * 16 in texts
    draw_timelines([nothing[1]], tmp_path / "none.png")


def test_what_cannot_be_drawn_is_refused(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = planned(plan_of([[0]], 1))
    with pytest.raises(ValueError, match=r"drawn as .svg or .png, but the path is 'step.pdf'; change its suffix"):
        draw_timelines([timeline], "step.pdf")
    with pytest.raises(ValueError, match="no timelines to draw; give at least one"):
        draw_timelines([], tmp_path / "step.svg")
    with pytest.raises(FileNotFoundError):
        draw_timelines([timeline], tmp_path / "nowhere" / "step.svg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs matplotlib, which isn't installed; pip install dapple_tf\["):
        draw_timelines([timeline], tmp_path / "step.svg")


def test_long_memory_curves_keep_their_shape_in_few_points() -> None:
    draw = random.Random(0)
    for count in (10, 5000):
        times = sorted(draw.random() for _ in range(count))
        curve = tuple((time, float(draw.randrange(1000))) for time in [0.0, *times])
        coarse = _coarse(curve, 1.0)
        assert len(coarse) <= min(len(curve), 2 * 1000 + 2)
        assert max(level for _, level in coarse) == max(level for _, level in curve)
        assert [time for time, _ in coarse] == sorted(time for time, _ in coarse) and coarse[-1][0] <= 1.0
        for at in (draw.random() for _ in range(200)):
            exact = [level for time, level in curve if time <= at][-1]
            assert [level for time, level in coarse if time <= at][-1] >= exact  # no peak is lost
