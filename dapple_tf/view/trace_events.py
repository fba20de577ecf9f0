"""Timelines in Chrome's Trace Event format, which Perfetto's UI and ``chrome://tracing`` open.

A timeline is a process, a lane a thread; memory is a counter. Spans that overlap without nesting
have separate threads, since a thread's events must nest: Perfetto drops those that don't. The format is described in
*Trace Event Format*, Google, 2016.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dapple_tf.view.timeline import ALL_REDUCE, SEND, TASKS, Lane, Span, Timeline

_UNIT_SECONDS = 1e-3
"""Seconds that one unit stands for in a timeline without times."""
_LEAST_THREAD = 101
"""First number of threads, none of which equals a process's or another thread's: some readers mix up equal numbers."""

Event = dict[str, Any]


def trace_events(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Returns the timelines as a JSON object of the Trace Event format.

    Each timeline is a process with the time of the whole step, the lanes of its devices, and a counter of bytes for
    each device whose memory is known. Arrows (flow events) lead from a task through its device's sends to the
    tasks that wait for them. Times are whole nanoseconds, written in microseconds as in the format; the unit ``F`` is
    drawn as 1 ms.

    Args:
        timelines: for example planned, simulated and measured; all begin at 0.

    Returns:
        An object for `json.dumps`: ``{"traceEvents": [...], "displayTimeUnit": "ms", "otherData": {...}}``.
    """
    threads = itertools.count(max(_LEAST_THREAD, len(timelines) + 1))
    flows = itertools.count(1)
    processes = [_Process(timeline, pid, threads, flows) for pid, timeline in enumerate(timelines, start=1)]
    events = [event for process in processes for event in process.events()]
    names = [timeline.name for timeline in timelines]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"producer": "dapple_tf", "timelines": names}}


def save_trace(timelines: Sequence[Timeline], path: str | os.PathLike[str]) -> None:
    """Writes `trace_events` to a JSON file.

    Raises:
        OSError: the file can't be written.
    """
    text = json.dumps(trace_events(timelines), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    Path(path).write_text(text, encoding="utf-8")


class _Process:
    """The events of one timeline."""

    def __init__(self, timeline: Timeline, pid: int, threads: Iterator[int], flow_numbers: Iterator[int]) -> None:
        self.timeline, self.pid, self.threads, self.flow_numbers = timeline, pid, threads, flow_numbers
        self.main = next(threads)
        self.nanoseconds = 1e9 if timeline.unit == "s" else _UNIT_SECONDS * 1e9
        self.thread_of: dict[tuple[Lane, Span], int] = {}

    def events(self) -> Iterator[Event]:
        """Yields all events, names of threads first."""
        timeline = self.timeline
        name = timeline.name
        if timeline.unit != "s":
            name += f" (1 {timeline.unit} is drawn as {_UNIT_SECONDS * 1e3:g} ms)"
        yield self.metadata("process_name", self.main, name=name)
        yield self.metadata("process_sort_index", self.main, sort_index=self.pid)
        yield from self.named(self.main, "step")
        known = {"latency": timeline.latency, "samples": timeline.samples}
        about = {key: value for key, value in known.items() if value is not None}
        yield self.complete(self.main, f"{timeline.name} step", "step", 0.0, timeline.latency, about)
        for lane, spans in timeline.lanes.items():
            yield from self.lane(lane, spans)
        yield from self.flows()
        for device, curve in timeline.memory.items():
            yield from self.counter(device, curve)

    def time(self, value: float) -> int:
        """Converts a time to nanoseconds."""
        return round(value * self.nanoseconds)

    def metadata(self, kind: str, tid: int, **args: Any) -> Event:
        """Returns the event of a process's or thread's name, or of its order among others."""
        return {"ph": "M", "name": kind, "pid": self.pid, "tid": tid, "ts": 0, "args": args}

    def named(self, tid: int, name: str) -> Iterator[Event]:
        """Yields the events of a thread's name and order."""
        yield self.metadata("thread_name", tid, name=name)
        yield self.metadata("thread_sort_index", tid, sort_index=tid)

    def complete(self, tid: int, name: str, kind: str, start: float, end: float, args: dict[str, Any]) -> Event:
        """Returns the event of a box."""
        first = self.time(start)
        times = {"ts": first / 1e3, "dur": (self.time(end) - first) / 1e3}
        return {"ph": "X", "name": name, "cat": kind, "pid": self.pid, "tid": tid, **times, "args": args}

    def lane(self, lane: Lane, spans: Sequence[Span]) -> Iterator[Event]:
        """Yields a lane's boxes, on as many threads as needed."""
        label = self.timeline.devices[lane.device]
        if lane.row != "compute":
            label = f"{label.split(':')[0]} {'sends' if lane.row == SEND else 'all-reduce'}"
        open_ends: list[list[int]] = [[]]
        tids = [next(self.threads)]
        placed = []
        for span in sorted(spans, key=lambda span: (self.time(span.start), -self.time(span.end))):
            start, end = self.time(span.start), self.time(span.end)
            number = next((n for n, ends in enumerate(open_ends) if self.fits(lane, ends, start, end)), len(tids))
            if number == len(tids):
                tids.append(next(self.threads))
                open_ends.append([])
            ends = open_ends[number]
            ends[:] = [*(other for other in ends if other > start), end]
            self.thread_of[lane, span] = tids[number]
            placed.append((tids[number], span))
        for number, tid in enumerate(tids):
            yield from self.named(tid, label if not number else f"{label} ({number + 1})")
        for tid, span in placed:
            name, args = _described(span)
            yield self.complete(tid, name, span.kind, span.start, span.end, args)

    def fits(self, lane: Lane, ends: Sequence[int], start: int, end: int) -> bool:
        """Returns whether a span fits a thread with these ends: after them or, if the device computes, inside them.

        Simultaneous sends aren't nested.
        """
        running = [other for other in ends if other > start]
        return not running or (lane.row == "compute" and end <= min(running))

    def flows(self) -> Iterator[Event]:
        """Yields arrows from tasks to their sends, and on to the tasks that receive them."""
        timeline = self.timeline
        made: dict[tuple[int | None, int, int | None, int], list[Span]] = {}
        wanted: dict[tuple[int | None, int | None], list[Span]] = {}
        for span in timeline.spans:
            if span.kind in TASKS and span.micro_batch is not None:
                made.setdefault((span.device, span.stage, span.micro_batch, span.replica), []).append(span)
                wanted.setdefault((span.device, span.micro_batch), []).append(span)
        for send in (span for span in timeline.spans if span.kind == SEND):
            begun = self.time(send.start)
            makers = made.get((send.device, send.stage, send.micro_batch, send.replica), ())
            earlier = [span for span in makers if self.time(span.start) <= begun]
            maker = max(earlier, key=lambda span: span.start, default=None)
            if maker is None:
                continue
            # A measured task may begin before a transfer that it doesn't wait for has ended, or clocks differ a little.
            takers = [
                span
                for span in wanted.get((send.target, send.micro_batch), ())
                if self.time(span.end) > begun and _takes(maker, span)
            ]
            taker = min(takers, key=lambda span: (span.start < send.end, span.start), default=None)
            number = next(self.flow_numbers)
            first = min(begun, max(self.time(maker.start), self.time(maker.end) - 1))
            yield self.flow("s", number, maker, first)
            yield self.flow("t" if taker else "f", number, send, begun)
            if taker is not None:
                yield self.flow("f", number, taker, max(begun, self.time(taker.start)))

    def flow(self, phase: str, number: int, span: Span, time: int) -> Event:
        """Returns one end of an arrow, or a point in between, at the box around that time."""
        assert span.device is not None
        row = SEND if span.kind == SEND else "compute"
        tid = self.thread_of[Lane(span.device, row), span]
        about = {"ph": phase, "id": number, "name": "transfer", "cat": "transfer"}
        return {**about, "pid": self.pid, "tid": tid, "ts": time / 1e3} | ({} if phase == "s" else {"bp": "e"})

    def counter(self, device: int, curve: Sequence[tuple[float, float]]) -> Iterator[Event]:
        """Yields a device's memory over time, to the end of the step."""
        name = f"memory of device {device}"
        last = [(self.timeline.latency, level) for _, level in curve[-1:]]
        for time, level in [*curve, *last]:
            stamp = self.time(time) / 1e3
            yield {"ph": "C", "name": name, "pid": self.pid, "tid": self.main, "ts": stamp, "args": {"bytes": level}}


def _described(span: Span) -> tuple[str, dict[str, Any]]:
    """Returns the name and arguments of a box."""
    args: dict[str, Any] = {"stage": span.stage, "micro_batch": span.micro_batch, "replica": span.replica}
    if span.kind == SEND:
        args |= {"to_device": span.target, "bytes": span.bytes}
        return f"to device {span.target}", args
    if span.kind == ALL_REDUCE:
        return f"all-reduce of stage {span.stage}", {"stage": span.stage, "bytes": span.bytes}
    if span.micro_batch is None:
        del args["micro_batch"]
        return f"{span.kind} of stage {span.stage}", args
    return f"{span.stage}{span.kind}{span.micro_batch}", args  # without the replica, so that viewers colour all alike


def _takes(maker: Span, taker: Span) -> bool:
    """Returns whether a task may read another's results for its micro-batch."""
    if maker.kind == "F":
        return taker.kind == "F" and taker.stage > maker.stage
    if taker.stage == maker.stage:
        return maker.kind == "Bx" and taker.kind == "Bw"
    return taker.kind != "F" and taker.stage < maker.stage  # Bw where Bx has nothing to do
