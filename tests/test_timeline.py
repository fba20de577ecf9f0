"""Timelines: lanes, bubbles, memory and labels; as text, by golden staircases; as images."""

from __future__ import annotations

import collections
import itertools
import math
import pathlib
import random
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import matplotlib
import pytest
from hardware import plan_of, slow_network

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.layer_profile import Cost, LayerProfile
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.joint import JOINT
from dapple_tf.simulation.planned import planned
from dapple_tf.simulation.simulator import simulate
from dapple_tf.units import bytes_text
from dapple_tf.view.colours import COLOURS
from dapple_tf.view.image import _coarse, draw_timelines
from dapple_tf.view.text import timeline_text
from dapple_tf.view.time_axis import common_unit, shown_unit, ticks, time_text
from dapple_tf.view.timeline import Lane, Span, Timeline

DEVICES = {4: "device 4: stage 0", 2: "device 2: stage 1"}


def test_lanes_are_by_device_with_computing_first_and_spans_by_time() -> None:
    late, early = Span("B", 2.0, 4.0, 2, 1, 0), Span("F", 0.0, 2.0, 2, 1, 0)
    send = Span("send", 4.0, 5.0, 2, 1, 0, target=4, bytes=8.0)
    reduce = Span("all_reduce", 5.0, 6.0, None, 0, reduction=0)
    unknown = Span("all_reduce", 5.0, 6.0, None, 0)
    spans = (late, send, early, reduce, unknown)
    timeline = Timeline("step", 6.0, spans, DEVICES, reduced_on={0: (2, 4)})
    assert list(timeline.lanes.items()) == [
        (Lane(4, "compute"), ()),
        (Lane(4, "all_reduce"), (reduce,)),
        (Lane(2, "compute"), (early, late)),
        (Lane(2, "send"), (send,)),
        (Lane(2, "all_reduce"), (reduce,)),
    ]
    assert timeline.devices_of(reduce) == (2, 4) and timeline.devices_of(send) == (2,)
    assert timeline.devices_of(unknown) == ()


def test_bubbles_count_what_overlaps_once() -> None:
    spans = tuple(Span(kind, start, end, 2, 1) for kind, start, end in [("B", 1.0, 4.0), ("accumulate", 3.0, 5.0)])
    timeline = Timeline("step", 8.0, (*spans, Span("send", 0.0, 8.0, 2, 1)), DEVICES)
    assert timeline.busy == {4: 0.0, 2: 4.0} and timeline.bubbles == {4: 1.0, 2: 0.5}
    assert Timeline("none", 0.0, (), DEVICES).bubbles == {4: 0.0, 2: 0.0}
    shorter = Timeline("short", 2.0, spans, DEVICES)  # a step that ends before its spans do has no negative bubbles
    assert shorter.bubbles[2] == 0.0


def test_peaks_and_throughput() -> None:
    memory = {2: ((0.0, 1.0), (1.0, 9.0), (2.0, 3.0)), 4: ()}
    timeline = Timeline("step", 0.5, (), DEVICES, memory, samples=8)
    assert timeline.peak_bytes == {2: 9.0} and timeline.throughput == 16.0
    assert Timeline("step", 0.5, (), DEVICES).throughput is None
    assert Timeline("step", 0.5, (), DEVICES, samples=8, unit="F").throughput is None
    assert Timeline("step", 0.0, (), DEVICES, samples=8).throughput == math.inf


@pytest.mark.parametrize(
    ("span", "message"),
    [
        (Span("F", 2.0, 1.0, 2, 1, 0), "1F0 2.000000..1.000000 of the step timeline ends before it starts"),
        (
            Span("F", 0.0, 1.0, 7, 1, 0),
            "1F0 0.000000..1.000000 of the step timeline is on device 7, which isn't among its 2 devices",
        ),
        (Span("all_reduce", 0.0, 1.0, None, 0, reduction=0), "is on device 9, which isn't among its 2 devices"),
    ],
)
def test_spans_that_cannot_be_are_refused(span: Span, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        Timeline("step", 4.0, (span,), DEVICES, reduced_on={0: (2, 9)})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latency": math.nan}, "1 times or sizes that aren't finite, such as nan"),
        ({"memory": {0: ((0.0, math.inf), (math.nan, 1.0))}}, "2 times or sizes that aren't finite, such as inf"),
        ({"latency": -1.0}, "the step timeline takes -1.0; give 0 or more"),
    ],
)
def test_numbers_that_nobody_can_draw_are_refused(changes: dict[str, Any], message: str) -> None:
    """Pages refused them; texts, images and traces failed on them each in its way, or drew nonsense."""
    given: dict[str, Any] = {"name": "step", "latency": 4.0, "spans": (), "devices": DEVICES}
    with pytest.raises(ValueError) as caught:
        Timeline(**given | changes)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("plan", "labels"),
    [
        (
            Plan.manual(["a"], [[3, 1], [2]], 2, 4),
            ["device 3: stage 0.r0", "device 1: stage 0.r1", "device 2: stage 1"],
        ),
        (Plan.manual(["a", "b"], [[0], [1], [0]], 2, 2, "modulo"), ["device 0: stages 0, 2", "device 1: stage 1"]),
        (
            Plan.manual([], [[0, 1]], 2, 4, JOINT, weight_devices=((2, 3),)),
            ["device 0: stage 0.r0", "device 1: stage 0.r1", "device 2: stage 0.r0 (Bw)", "device 3: stage 0.r1 (Bw)"],
        ),
    ],
)
def test_devices_are_called_by_what_they_do(plan: Plan, labels: list[str]) -> None:
    assert list(plan.device_labels().values()) == labels


def test_a_simulated_step_becomes_a_timeline_of_the_same_numbers() -> None:
    layers = [LayerProfile(f"layer{i}", Cost(1.0), Cost(2.0), parameter_bytes=2**20) for i in range(2)]
    model = Profile("model", "none", (1,), tuple(layers), (Tensor(0, (1,), Cost(0.0, 8.0)),))
    cluster = Cluster(
        (*(Device(f"d{i}", 0, 2**30) for i in range(2)), Device("d2", 1)), real=False, inter_bandwidth=2**20
    )
    step = simulate(Plan.manual(["layer0"], [[0, 1], [2]], 4, 8), model, cluster)
    timeline = step.drawn()
    assert (timeline.name, timeline.latency, timeline.spans) == ("simulated", step.latency, step.spans)
    assert timeline.throughput == step.throughput and timeline.peak_bytes == step.peak_bytes
    assert timeline.bubbles == pytest.approx(step.idle) and timeline.limits == {0: 2.0**30, 1: 2.0**30}
    assert timeline.reduced_on == {0: (0, 1)}
    assert len(timeline.lanes[Lane(0, "all_reduce")]) == 1
    assert step.drawn("emulated").name == "emulated"


Golden = Callable[[str, str], None]
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


PLANS = {
    "gpipe": plan_of([[0], [1], [2], [3]], 4, "gpipe"),
    "dapple_a": plan_of([[0], [1], [2], [3]], 8, "dapple_a"),
    "dapple_a_12": plan_of([[0], [1]], 12, "dapple_a"),
    "interleaved": plan_of([[0], [1], [0], [1]], 4, "interleaved"),
    "zb_h1": plan_of([[0], [1], [2], [3]], 8, "zb_h1"),
    "chunks": plan_of([[0, 1], [0, 1], [2]], 4, "dapple_a"),
    "joint": plan_of([[0], [0], [0]], 2, JOINT, weight_devices=((1,), (1,), (1,)), weight_regions=(0, 1, 0)),
}


def two_timelines() -> list[Timeline]:
    """Planned and simulated."""
    case = slow_network(inter_latency=1e-4)
    return [planned(*case), simulate(*case).drawn()]


@pytest.mark.parametrize("name", PLANS)
def test_staircases_of_the_policies(name: str, golden: Golden) -> None:
    golden(f"timeline_{name}.txt", timeline_text([planned(PLANS[name])]) + "\n")


def test_planned_and_simulated_on_one_axis_with_transfers_reductions_and_memory(golden: Golden) -> None:
    golden("timeline_simulated.txt", timeline_text(two_timelines(), width=110) + "\n")


def test_the_docstrings_example_is_what_is_drawn() -> None:
    text = timeline_text([planned(plan_of([[0], [1]], 3, "dapple_a"))])
    drawn = [line.rstrip() for line in text.splitlines()]
    documented = [line[8:].rstrip() for line in str(timeline_text.__doc__).splitlines()]
    start = documented.index(drawn[0])
    assert documented[start : start + len(drawn)] == drawn


def test_a_step_of_one_task_no_task_no_time_and_no_timeline() -> None:
    one = Timeline("one", 0.25, (Span("F", 0.0, 0.25, 0, 0, 0),), {0: "device 0: stage 0"})
    assert "one: 250 ms" in timeline_text([one]) and "0.0%" in timeline_text([one])
    empty = Timeline("empty", 2.0, (), {0: "device 0: stage 0"})
    assert "·" * 20 in timeline_text([empty]) and "100.0%" in timeline_text([empty])
    still = Timeline("still", 0.0, (Span("F", 0.0, 0.0, 0, 0, 0),), {0: "device 0: stage 0"})
    assert "still: 0 s" in timeline_text([still])
    nobody = Timeline("nobody", 0.0, (), {})
    assert "nobody: 0 s" in timeline_text([nobody])
    assert timeline_text([]) == ""


def test_unknown_kinds_are_drawn_and_named() -> None:
    text = timeline_text([Timeline("step", 1.0, (Span("metrics", 0.0, 1.0, 0, 0),), {0: "d"})])
    assert "%%%%" in text and "% metrics" in text


def test_colour_adds_nothing_but_escape_sequences() -> None:
    for timelines in ([planned(PLANS["zb_h1"])], two_timelines()):
        coloured = timeline_text(timelines, colour=True)
        assert "\x1b[" in coloured
        assert _ESCAPES.sub("", coloured) == timeline_text(timelines)


def test_memory_that_is_needed_for_a_moment_is_seen() -> None:
    curve = ((0.0, 1.0), (4.0, 8.0), (4.0, 1.0), (10.0, 8.0), (10.0, 1.0))
    spans = (Span("F", 0.0, 10.0, 0, 0, 0),)
    timelines = [Timeline("step", 10.0, spans, {0: "d"}, {0: curve}), Timeline("long", 20.0, spans, {0: "d"})]
    rows = [line.split("│")[1] for line in timeline_text(timelines).splitlines() if "▂" in line]
    assert [level for level, _ in itertools.groupby(rows[0])] == ["▂", "█", "▂", "█"] and rows[0].count("█") == 2


def test_too_narrow_a_width_is_refused() -> None:
    with pytest.raises(ValueError, match="width is 59 characters; timelines need at least 60"):
        timeline_text([], width=59)


# --- axes ---


@pytest.mark.parametrize(
    ("end", "most", "expected"),
    [
        (33.0, 8, [0, 5, 10, 15, 20, 25, 30]),
        (0.3, 4, [0, 0.1, 0.2, 0.3]),
        (0.0, 5, [0]),
    ],
)
def test_ticks_are_round_numbers(end: float, most: int, expected: list[float]) -> None:
    assert ticks(end, most) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("times", "unit"),
    [
        ([1.0, 2.0, 3.0], 1.0),
        ([0.3, 0.2, 0.1 + 0.2], 0.1),
        ([1.0, 2**0.5], None),
        ([0.0], None),
        ([0.1 * index for index in range(100)], 0.1),
    ],
)
def test_the_common_unit_of_times(times: list[float], unit: float | None) -> None:
    common = common_unit(times, 100)
    assert common == (None if unit is None else pytest.approx(unit))


def test_amounts_for_people() -> None:
    assert [time_text(value, "s") for value in (2.5, 0.0123, 45e-6, 7e-9, 0.0)] == [
        "2.5 s",
        "12.3 ms",
        "45 µs",
        "7 ns",
        "0 s",
    ]
    assert time_text(33.0, "F") == "33 F" and shown_unit("F", 0.5) == ("F", 1.0)
    assert [bytes_text(size) for size in (0, 999, 1024, 1023.9 * 1024, 20 * 2**30, 300 * 2**20)] == [
        "0 B",
        "999 B",
        "1.00 KiB",
        "1.00 MiB",
        "20.0 GiB",
        "300 MiB",
    ]


SVG = "{http://www.w3.org/2000/svg}"


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
    timelines = two_timelines()
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
    timelines = two_timelines()
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
