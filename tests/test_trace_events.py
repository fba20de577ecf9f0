"""Traces in the Trace Event format: their events are golden, and threads' boxes nest, as readers ask."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hardware import slow_network

from dapple_tf.simulation.planned import planned
from dapple_tf.simulation.simulator import simulate
from dapple_tf.view.timeline import Span, Timeline
from dapple_tf.view.trace_events import trace_events

TASK, SEND = Span("F", 0.0, 1.0, 0, 0, 0), Span("send", 1.0, 2.0, 0, 0, 0, target=1)


def step(*spans: Span) -> Timeline:
    return Timeline("step", max(span.end for span in spans), spans, {0: "a", 1: "b"})


def test_events_of_a_step(golden: Callable[[str, str], None]) -> None:
    """A plan without times and its simulation; a transfer to nowhere has half an arrow, one from nowhere none."""
    case = slow_network(memory=2**31)
    trace = trace_events([planned(case[0]), simulate(*case).drawn(), step(TASK, SEND), step(SEND)])
    golden("trace_events.txt", "".join(f"{json.dumps(each)}\n" for each in [*trace.pop("traceEvents"), trace]))


def check_nesting(events: Sequence[dict[str, Any]]) -> int:
    """The boxes of a thread, whose number nothing else has, lie in one another or apart; returns how many threads."""
    threads = defaultdict(list)
    for event in events:
        # Readers count in whole nanoseconds.
        start, length = (round(1000 * event[field], 3) for field in ("ts", "dur"))
        assert length >= 0 and start == round(start) and length == round(length), event
        threads[event["tid"], event["pid"]].append((start, start + length))
    assert len({number for pair in threads for number in pair}) == len(threads) + len({pid for _, pid in threads})
    for boxes in threads.values():
        around: list[float] = []
        for start, end in sorted(boxes, key=lambda box: (box[0], -box[1])):
            around = [other for other in around if other > start]
            assert all(end <= other for other in around), "boxes of a thread overlap"
            around.append(end)
    return len(threads)


@pytest.mark.parametrize(
    ("schedule", "devices"),
    [
        ("dapple_a", ((0, 1, 2), (3,))),
        ("zb_h1", ((0,), (1,), (2,), (3,))),
        ("modulo", ((0,), (1,), (0,), (1,))),
        ("dapple_a", ((0, 1), (0, 1), (2,))),
    ],
)
def test_boxes_nest_and_arrows_join_what_waits(schedule: str, devices: Sequence[Sequence[int]]) -> None:
    case = slow_network(devices, schedule, memory=2**31)
    events = trace_events([planned(*case), simulate(*case).drawn()])["traceEvents"]
    boxes = [event for event in events if event["ph"] == "X"]
    check_nesting(boxes)
    arrows = defaultdict(list)
    for event in events:
        if event["ph"] in "stf":
            around = [box for box in boxes if box["tid"] == event["tid"] and box["ts"] <= event["ts"]]
            (box,) = (box for box in around if event["ts"] < box["ts"] + box["dur"] + 1e-3 and box is around[-1])
            arrows[event["id"]].append((event["ph"], event["ts"], box["args"]["micro_batch"], box["cat"]))
    for (first, sent, *one), (middle, _, *between), (last, taken, *other) in arrows.values():
        assert (first, middle, last, between[1]) == ("s", "t", "f", "send") and sent <= taken
        assert one[0] == between[0] == other[0] and one[1][0] == other[1][0]


def test_ends_that_meet_do_not_overlap_by_rounding() -> None:
    edges = [0.1 * index + 1 / 3 for index in range(50)]
    trace = trace_events([step(*(Span("F", a, b, 0, 0, n) for n, (a, b) in enumerate(itertools.pairwise(edges))))])
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert check_nesting(events) == 2  # the step's and the lane's
