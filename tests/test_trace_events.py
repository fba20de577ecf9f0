"""Traces against the Trace Event format, and what they say of a step."""

from __future__ import annotations

import itertools
import json
import numbers
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hardware import slow_network

from dapple_tf.simulation.planned import planned
from dapple_tf.simulation.simulator import simulate
from dapple_tf.view.timeline import Span, Timeline
from dapple_tf.view.trace_events import trace_events

# --- the format, as its description has it ---

NUMBER, TEXT, OBJECT = numbers.Real, str, dict
COMMON = {"name": TEXT, "ph": TEXT, "ts": NUMBER, "pid": int, "tid": int}
FIELDS: Mapping[str, tuple[Mapping[str, type], Mapping[str, type]]] = {
    # phase -> fields that it must have, and others that it may have
    "X": ({**COMMON, "dur": NUMBER}, {"cat": TEXT, "args": OBJECT, "cname": TEXT, "tts": NUMBER, "tdur": NUMBER}),
    "M": ({**COMMON, "args": OBJECT}, {"cat": TEXT}),
    "C": ({**COMMON, "args": OBJECT}, {"cat": TEXT, "id": int}),
    "s": ({**COMMON, "cat": TEXT, "id": int}, {"args": OBJECT}),
    "t": ({**COMMON, "cat": TEXT, "id": int}, {"args": OBJECT, "bp": TEXT}),
    "f": ({**COMMON, "cat": TEXT, "id": int}, {"args": OBJECT, "bp": TEXT}),
}
METADATA = {
    "process_name": ("name", TEXT),
    "process_sort_index": ("sort_index", int),
    "thread_name": ("name", TEXT),
    "thread_sort_index": ("sort_index", int),
}
TOP = {"traceEvents", "displayTimeUnit", "otherData", "systemTraceEvents", "stackFrames", "samples", "metadata"}


def check_trace(trace: Mapping[str, Any]) -> None:
    """Checks all that the format asks of the events of the phases above, and that Perfetto asks besides."""
    assert json.loads(json.dumps(trace, allow_nan=False)) == trace
    assert set(trace) <= TOP and trace["displayTimeUnit"] in ("ms", "ns")
    for event in trace["traceEvents"]:
        must, may = FIELDS[event["ph"]]
        assert must.keys() <= event.keys() <= must.keys() | may.keys(), event
        for name, value in event.items():
            kind = {**must, **may}[name]
            assert isinstance(value, kind) and not isinstance(value, bool), (name, event)
        assert event["pid"] > 0 and event["tid"] > 0 and event["ts"] >= 0, event
    phases: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        phases[event["ph"]].append(event)
    check_metadata(phases)
    check_nesting(phases["X"])
    check_flows(phases)
    for event in phases["C"]:
        assert event["args"] and all(isinstance(value, NUMBER) for value in event["args"].values()), event
    for _, group in itertools.groupby(phases["C"], key=lambda event: (event["pid"], event["name"])):
        stamps = [event["ts"] for event in group]
        assert stamps == sorted(stamps)


def check_metadata(phases: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    said = Counter()
    for event in phases["M"]:
        field, kind = METADATA[event["name"]]
        assert isinstance(event["args"][field], kind), event
        said[event["name"], event["pid"], event["tid"] if event["name"].startswith("thread") else None] += 1
    assert set(said.values()) <= {1}, "something is named twice"
    threads = {(event["pid"], event["tid"]) for event in phases["X"]}
    for pid, tid in threads:
        assert said["thread_name", pid, tid] == said["thread_sort_index", pid, tid] == 1
        assert said["process_name", pid, None] == said["process_sort_index", pid, None] == 1
    owners = defaultdict(set)
    for pid, tid in threads:
        owners[tid].add(pid)
    assert all(len(pids) == 1 for pids in owners.values()), "threads of two processes have one number"
    assert not owners.keys() & {pid for pid, _ in threads}, "a thread has the number of a process"


def check_nesting(events: Sequence[Mapping[str, Any]]) -> None:
    threads = defaultdict(list)
    for event in events:
        assert event["dur"] >= 0
        # Readers count in whole nanoseconds.
        start, length = (round(1000 * event[field], 3) for field in ("ts", "dur"))
        assert start == round(start) and length == round(length), event
        threads[event["tid"]].append((start, start + length))
    for boxes in threads.values():
        around: list[float] = []
        for start, end in sorted(boxes, key=lambda box: (box[0], -box[1])):
            around = [other for other in around if other > start]
            assert all(end <= other for other in around), "boxes of a thread overlap"
            around.append(end)


def check_flows(phases: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    boxes = defaultdict(list)
    for event in phases["X"]:
        boxes[event["tid"]].append((round(1000 * event["ts"]), round(1000 * (event["ts"] + event["dur"]))))
    arrows = defaultdict(list)
    for event in [*phases["s"], *phases["t"], *phases["f"]]:
        arrows[event["cat"], event["name"], event["id"]].append(event)
        stamp = round(1000 * event["ts"])
        assert any(start <= stamp <= end for start, end in boxes[event["tid"]]), "an arrow's end is in no box"
        assert event["ph"] == "s" or event["bp"] == "e"
    for ends in arrows.values():
        order = "".join(event["ph"] for event in ends)
        assert order in ("sf", "stf"), order
        assert [event["ts"] for event in ends] == sorted(event["ts"] for event in ends)


# --- timelines to draw ---


def steps(schedule: str = "dapple_a", replicas: Sequence[Sequence[int]] = ((0, 1, 2), (3,))) -> list[Timeline]:
    """A plan on a cluster with slow links, planned and simulated, and the plan without times."""
    case = slow_network(replicas, schedule, memory=2**31)
    return [planned(case[0]), planned(*case), simulate(*case).drawn()]


def boxes(trace: Mapping[str, Any], pid: int, kind: str) -> list[Mapping[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == pid and e["cat"] == kind]


@pytest.mark.parametrize(
    ("schedule", "devices"),
    [
        ("dapple_a", ((0, 1, 2), (3,))),
        ("zb_h1", ((0,), (1,), (2,), (3,))),
        ("modulo", ((0,), (1,), (0,), (1,))),
        ("dapple_a", ((0, 1), (0, 1), (2,))),
        ("dapple_a", ((0,),)),
    ],
)
def test_traces_keep_to_the_format(schedule: str, devices: Sequence[Sequence[int]]) -> None:
    timelines = steps(schedule, devices)
    trace = trace_events(timelines)
    check_trace(trace)
    for pid, timeline in enumerate(timelines, start=1):
        [step] = boxes(trace, pid, "step")
        scale = 1e6 if timeline.unit == "s" else 1e3
        assert step["dur"] == pytest.approx(scale * timeline.latency)
        for kind in {span.kind for span in timeline.spans}:
            drawn = [span for span in timeline.spans if span.kind == kind for _ in timeline.devices_of(span)]
            events = boxes(trace, pid, kind)
            assert len(events) == len(drawn)
            assert sorted(event["ts"] for event in events) == pytest.approx(sorted(scale * s.start for s in drawn))


def test_boxes_tell_what_they_are() -> None:
    timelines = steps()
    trace = trace_events(timelines)
    [task] = [e for e in boxes(trace, 3, "B") if e["name"] == "0B2" and e["args"]["replica"] == 1]
    assert task["args"] == {"stage": 0, "micro_batch": 2, "replica": 1}
    send = boxes(trace, 3, "send")[0]
    assert send["name"] == "to device 3"
    assert send["args"] == {"stage": 0, "micro_batch": 0, "replica": 0, "to_device": 3, "bytes": 2 * 2**20}
    reduce = boxes(trace, 3, "all_reduce")
    assert len(reduce) == 3 and {e["args"]["bytes"] for e in reduce} == {2**22}
    levels = [e for e in trace["traceEvents"] if e["ph"] == "C" and e["pid"] == 3]
    assert {e["name"] for e in levels} == {f"memory of device {device}" for device in range(4)}
    peaks = {f"memory of device {device}": peak for device, peak in timelines[2].peak_bytes.items()}
    assert {name: max(e["args"]["bytes"] for e in levels if e["name"] == name) for name in peaks} == peaks


def test_arrows_go_from_a_task_through_a_transfer_to_the_task_that_waits_for_it() -> None:
    trace = trace_events(steps())
    places = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            places[event["tid"]].append(event)
    ends = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] in "stf":
            [box] = [b for b in places[event["tid"]] if b["ts"] <= event["ts"] < b["ts"] + b["dur"] + 1e-3][-1:]
            ends[event["id"]].append((box["name"], box["args"]["replica"]))
    expected = Counter()
    for number in range(4):
        for replica in range(3):
            expected[(f"0F{number}", replica), ("to device 3", replica), (f"1F{number}", 0)] += 1
            expected[(f"1B{number}", 0), (f"to device {replica}", 0), (f"0B{number}", replica)] += 1
    assert Counter(map(tuple, ends.values())) == expected


def test_a_transfer_to_nowhere_has_half_an_arrow_and_one_from_nowhere_none() -> None:
    send = Span("send", 1.0, 2.0, 0, 0, 0, target=1)
    task = Span("F", 0.0, 1.0, 0, 0, 0)
    devices = {0: "a", 1: "b"}
    for spans, phases in (((task, send), ["s", "f"]), ((send,), [])):
        trace = trace_events([Timeline("step", 2.0, spans, devices)])
        check_trace(trace)
        assert [e["ph"] for e in trace["traceEvents"] if e["ph"] in "stf"] == phases


def test_ends_that_meet_do_not_overlap_by_rounding() -> None:
    edges = [0.1 * index + 1 / 3 for index in range(50)]
    spans = tuple(Span("F", a, b, 0, 0, n) for n, (a, b) in enumerate(itertools.pairwise(edges)))
    trace = trace_events([Timeline("step", 6.0, spans, {0: "device 0"})])
    check_trace(trace)
    assert len({e["tid"] for e in trace["traceEvents"] if e["ph"] == "X"}) == 2  # the step's and the lane's


# --- Perfetto's own reader ---
