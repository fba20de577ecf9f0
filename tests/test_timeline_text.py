"""Timelines as text: golden staircases, proportional drawings, and what holds for any timeline."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
from hardware import plan_of, slow_network

from dapple_tf.simulation.planned import planned
from dapple_tf.simulation.simulator import simulate
from dapple_tf.units import bytes_text
from dapple_tf.view.text import timeline_text
from dapple_tf.view.time_axis import common_unit, shown_unit, ticks, time_text
from dapple_tf.view.timeline import Span, Timeline

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
