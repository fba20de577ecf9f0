"""Timelines: lanes, bubbles and labels; planned ones; as text, by golden staircases; as images."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
import pathlib
import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import matplotlib
import pytest
from hardware import chain, cluster_of, plan_of, slow_network
from schedule_runs import execute, there_and_back, vee

from dapple_tf.common.text import bytes_text
from dapple_tf.describe.cluster import Server
from dapple_tf.describe.layer_profile import Cost
from dapple_tf.describe.plan import Plan
from dapple_tf.schedules.schedules import POLICIES, make_schedule
from dapple_tf.simulation.planned import planned
from dapple_tf.simulation.simulator import simulate
from dapple_tf.view.image import draw_timelines
from dapple_tf.view.text import timeline_text
from dapple_tf.view.time_axis import shown_unit, time_text
from dapple_tf.view.timeline import COLOURS, Lane, Span, Timeline

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
    ],
)
def test_devices_are_called_by_what_they_do(plan: Plan, labels: list[str]) -> None:
    assert list(plan.device_labels().values()) == labels


Golden = Callable[[str, str], None]
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


PLANS = {
    "gpipe": plan_of([[0], [1], [2], [3]], 4, "gpipe"),
    "dapple_a": plan_of([[0], [1], [2], [3]], 8, "dapple_a"),
    "dapple_a_12": plan_of([[0], [1]], 12, "dapple_a"),
    "interleaved": plan_of([[0], [1], [0], [1]], 4, "interleaved"),
    "zb_h1": plan_of([[0], [1], [2], [3]], 8, "zb_h1"),
    "chunks": plan_of([[0, 1], [0, 1], [2]], 4, "dapple_a"),
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


# --- axes ---


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
    draw_timelines([planned(PLANS["interleaved"])], tmp_path / "later.svg")
    fills, texts = drawn(tmp_path / "later.svg")
    assert fills[COLOURS["F"]] == fills["#a4c2e4"] == 8 + 1 and "paler: a device's later stages" in texts


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


STRAIGHT = [policy for policy in POLICIES if not there_and_back(policy)]


def straight(stages: int, micro_batches: int, schedule: str = "dapple_a", **options: Any) -> Plan:
    return plan_of([[stage] for stage in range(stages)], micro_batches, schedule, **options)


def tasks(timeline: Timeline) -> dict[str, tuple[float, float]]:
    """Each task's start and end."""
    return {
        f"{span.stage}{span.kind}{span.micro_batch}.{span.replica}": (span.start, span.end) for span in timeline.spans
    }


def policies() -> list[Any]:
    cases: list[Any] = []
    for policy in STRAIGHT:
        cases += [(policy, [[0], [1], [2], [3]], 6), (policy, [[0, 1, 2], [3]], 4)]
    for policy in ("modulo", "interleaved", "zero_bubble"):
        cases.append((policy, [[0], [1], [0], [1]], 4) if policy != "zero_bubble" else (policy, vee(2), 4))
    cases += [("zb_v", vee(3), 6), ("modulo", [[0, 1], [2], [0, 1]], 4), ("dapple_a", [[0, 1], [0, 1], [2]], 4)]
    return cases


@pytest.mark.parametrize("times", [None, 3])
@pytest.mark.parametrize(("policy", "devices", "micro_batches"), policies(), ids=str)
def test_every_policy_runs_as_in_an_independent_run(
    policy: str, devices: list[list[int]], micro_batches: int, times: int | None
) -> None:
    given = None if times is None else [(1.0 + stage, times + 1.0, 2.0 * stage) for stage in range(len(devices))]
    plan = plan_of(devices, micro_batches, policy, task_seconds=None if given is None else tuple(given))
    timeline = planned(plan)
    expected = execute(plan.order_tasks(), given or [(1.0, 1.0, 1.0)] * len(devices))
    ends = {
        f"{task.stage}{task.phase.value}{task.micro_batch}.{task.replica}": end for task, end in expected.ends.items()
    }
    assert {name: end for name, (_, end) in tasks(timeline).items()} == pytest.approx(ends)
    assert timeline.latency == pytest.approx(expected.makespan)
    assert timeline.busy == pytest.approx(expected.busy)
    assert timeline.unit == ("F" if times is None else "s")
    for span in timeline.spans:
        if span.cause is None:
            assert span.start == 0
        else:
            assert timeline.spans[span.cause].end == span.start


def test_a_profile_gives_times_updates_and_memory_and_links_cost_nothing() -> None:
    model = chain([(1.0, 2.0), (2.0, 3.0)], 9.0, parameter_bytes=1000, apply_seconds=0.5, residual_bytes=Cost(64.0))
    model = dataclasses.replace(model, step_seconds=7.0)
    plan = plan_of([[0, 1], [2]], 3)
    links = {"inter_bandwidth": 1.0, "intra_bandwidth": 1.0, "inter_latency": 3.0}
    cluster = cluster_of(2, 1, memory=2**20, servers=(Server(capacity=1.0), Server()), **links)
    timeline = planned(plan, model, cluster)
    assert timeline.unit == "s" and timeline.samples == 6 and timeline.throughput is not None
    assert {span.kind for span in timeline.spans} == {"F", "B", "apply"}
    assert timeline.latency == 1 + 3 * 5 + 2 + 0.5
    assert timeline.limits == {0: 2**20, 1: 2**20, 2: 2**20}
    assert timeline.peak_bytes == simulate(plan, model, cluster).peak_bytes
    assert planned(plan, model).latency == timeline.latency and not planned(plan, model).limits


def test_a_schedule_of_ones_own_and_one_without_backwards() -> None:
    plan = straight(2, 4)
    mine = make_schedule("gpipe", plan.devices, 2)
    timeline = planned(plan, schedule=mine)
    assert timeline.latency == 9.0 and timeline.samples == 2
    forward = planned(plan, schedule=plan.order_tasks(forward_only=True))
    assert forward.latency == 5.0 and {span.kind for span in forward.spans} == {"F"}


def test_memory_limits_the_schedule_as_it_does_in_a_real_step() -> None:
    cluster = cluster_of(2, memory=250)
    model = chain([(1.0, 2.0)] * 2, residual_bytes=Cost(100.0))
    orders = {limit: planned(straight(2, 4, "dapple_b"), model, limit) for limit in (None, cluster)}
    held = {limit: peak(timeline) for limit, timeline in orders.items()}
    assert held[None] == 3 and held[cluster] == 2


def peak(timeline: Timeline) -> int:
    """The most micro-batches in flight on the first device."""
    order = sorted((span for span in timeline.spans if span.device == 0), key=lambda span: span.start)
    return max(itertools.accumulate(1 if span.kind == "F" else -1 for span in order))
