"""Measured steps: TensorFlow's step stats -> a Timeline, and the parts of each device's time.

TensorFlow's executor reports when each node began and ended and what it allocated, with each worker's own clock. The
step's graph says what the nodes do (`step_nodes.py`); `clocks.py` aligns the workers' times.

On GPUs a node's times are those of its kernels (`kernel_times.py`). Where these aren't known, they are those of
launching them, which say nothing of when they ran: the timeline is called "launches".
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dapple_tf.clusters.clocks import WorkerClock, refine
from dapple_tf.describe.cluster import Cluster
from dapple_tf.tracing.kernel_times import is_executors, kernel_times
from dapple_tf.tracing.step_nodes import (
    ACCUMULATE,
    ALL_REDUCE,
    APPLY,
    HOST,
    METRICS,
    PACK,
    RELAY,
    TASKS,
    StepNode,
    sources,
)
from dapple_tf.tracing.step_parts import Interval, StepParts, part_of, step_parts
from dapple_tf.view.timeline import LAUNCHES, MEASURED, SEND, MemoryCurve, Span, Timeline
from graph_passes.analysis.device_kernels import on_gpu
from graph_passes.ir.tasks import Task
from graph_passes.ir.tensorflow_bridge import dtype_size

logger = logging.getLogger(__name__)

_RECEIVED = re.compile(r"\[(\d+)B\] .*?(?:edge_\d+_)?(\S+) from (\S+) to (\S+)$")
"""TensorFlow's description of a tensor from another worker: bytes, node, sender and receiver."""


@dataclass(frozen=True)
class TracedStep:
    """The record of a traced step.

    Attributes:
        stats: TensorFlow's step stats.
        nodes: the nodes of the step's graph.
        prefix: prefix of their names in the session's graph.
        called: when the step was started and when its results arrived, in nanoseconds of this process's clock.
        clocks: number of a worker -> its clock; empty if there are no workers.
        stored: device -> bytes of its variables and accumulators, which stay between steps.
        replaced: node -> bytes from the step before that it frees, see `step_nodes.replaced_bytes`.
        samples: samples of its batch.
        first: whether it is the first traced step of its kind. TensorFlow prepares separate executors and functions
            for traced steps, so that its times mean little.
    """

    stats: Any = field(repr=False)
    nodes: Mapping[str, StepNode] = field(repr=False)
    prefix: str
    called: tuple[int, int]
    clocks: Mapping[int, WorkerClock] = field(default_factory=dict)
    stored: Mapping[int, int] = field(default_factory=dict)
    replaced: Mapping[str, int] = field(default_factory=dict)
    samples: int | None = None
    first: bool = False


class TracedDevice(NamedTuple):
    """A device of the cluster.

    Attributes:
        number: its index.
        worker: number of the worker whose clock it has.
    """

    number: int
    worker: int


def traced_devices(cluster: Cluster) -> dict[str, TracedDevice]:
    """Returns the devices of a cluster by name."""
    return {name: TracedDevice(device, cluster.worker_of(device)) for device, name in enumerate(cluster.device_names)}


@dataclass(frozen=True)
class MeasuredStep:
    """A measured step.

    Attributes:
        timeline: its timeline, from the start of the call to the end of the last node. The time after that is mostly
            spent on collecting the trace. Called `LAUNCHES` if GPUs don't report their kernels; otherwise `MEASURED`.
        parts: device -> parts of its time.
        tasks: task -> seconds from its beginning to the end of all that belongs to it, accumulation included, as in
            the simulator.
        shifts: worker -> seconds by which causality moved its times, in addition to its clock's offset.
        remarks: doubts about the times; empty if there are none.
    """

    timeline: Timeline
    parts: Mapping[int, StepParts] = field(repr=False)
    tasks: Mapping[Task, float] = field(repr=False)
    shifts: Mapping[int, float] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()

    @property
    def launches(self) -> bool:
        """Whether spans on GPUs are launches of kernels, not their runs; memory and the whole step's time are right."""
        return self.timeline.name == LAUNCHES


def measured(
    traced: TracedStep, devices: Mapping[str, TracedDevice], labels: Mapping[int, str], limits: Mapping[int, float]
) -> MeasuredStep:
    """Reads a traced step.

    Args:
        traced: the step.
        devices: name of a device -> the device.
        labels: index of a device with lanes -> its label.
        limits: index of a device -> its memory in bytes, if known.
    """
    return _Reading(traced, devices).result(labels, limits)


class _Run(NamedTuple):
    """The run of a node; nanoseconds, at first by its device's clock, finally by this process's."""

    device: str
    start: float
    end: float
    ready: float
    outputs: Mapping[int, int]


class _Work(NamedTuple):
    """The work that single operators belong to."""

    kind: str
    device: int
    stage: int
    micro_batch: int | None
    replica: int


_ONLY_LAUNCHES = (
    "times on GPUs are those of launching kernels, which run later: bubbles and tasks' times aren't known. The trace "
    "has no kernels that surely belong to each device: processes must be allowed to use CUPTI, and GPUs of different "
    "workers must differ in their numbers"
)
_OPERATOR_GAP = 20e-6
"""Maximum seconds between two operators that are shown as one box."""


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns intervals in order, joining those with hardly a gap between them."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1] + _OPERATOR_GAP:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


class _Reading:
    """A trace being read."""

    def __init__(self, traced: TracedStep, devices: Mapping[str, TracedDevice]) -> None:
        self.traced, self.devices, self.nodes = traced, devices, traced.nodes
        self.runs: dict[str, _Run] = {}
        self.received: dict[tuple[str, str], list[tuple[float, int]]] = {}  # (node, receiver) -> (when, bytes)
        self.changes: dict[str, list[tuple[float, int]]] = {}  # device -> (microseconds, bytes)
        self._read()
        self.launches = not self._read_kernels()
        self.remarks = [_ONLY_LAUNCHES] if self.launches else []
        self.remarks += [
            f"the clock of worker {worker} jumped by {clock.jump * 1e3:+.3g} ms during the step; its times are "
            f"uncertain by as much"
            for worker, clock in traced.clocks.items()
            if clock.jump
        ]
        self.shifts = self._align()
        self.sources = sources(self.nodes)

    # ---- what TensorFlow tells

    def _read(self) -> None:
        start = len(self.traced.prefix) + 1
        known = {f"{self.traced.prefix}/{name}": name for name in self.nodes}
        for own in self.traced.stats.dev_stats:
            device = own.device
            if not is_executors(device):
                continue
            changes = self.changes.setdefault(device, [])
            for node in own.node_stats:
                for memory in node.memory:
                    if "host" not in memory.allocator_name:
                        changes += [(r.alloc_micros, r.alloc_bytes) for r in memory.allocation_records]
                name = known.get(node.node_name)
                if name is not None:
                    run = _run(device, node)
                    self.runs[name] = run
                    if freed := self.traced.replaced.get(name):
                        changes.append((int(run.end // 1000), -freed))
                elif node.node_name == "RecvTensor":
                    match = _RECEIVED.match(node.timeline_label)
                    if match is not None and match[1] != "0":  # a tensor, not a control edge
                        # Its start is by the sender's clock, cut to fit the receiver's: only its end means something.
                        end = 1000 * (node.all_start_micros + node.all_end_rel_micros)
                        self.received.setdefault((match[2][start:], match[4]), []).append((end, int(match[1])))

    def _read_kernels(self) -> bool:
        """Gives nodes on GPUs the times of their kernels; returns False where these aren't known.

        A node without kernels begins no earlier than all that it waits for on its device has ended.
        """
        kernels = kernel_times(self.traced.stats, {name: run[:3] for name, run in self.runs.items()})
        if kernels is None:
            return False
        for name, run in sorted(self.runs.items(), key=lambda item: item[1].start) if kernels else ():
            if name in kernels:
                start, end = kernels[name]
                self.runs[name] = run._replace(start=start, end=end, ready=start)
            elif on_gpu(run.device):
                before = (self.runs[other] for other in self.nodes[name].waits_for if other in self.runs)
                late = max([0.0, *(own.end - run.start for own in before if own.device == run.device)])
                self.runs[name] = run._replace(start=run.start + late, end=run.end + late, ready=run.ready + late)
        return True

    # ---- one clock

    def _worker(self, device: str) -> int | None:
        """Returns the worker whose clock a device has; None for this process."""
        traced = self.devices.get(device)
        return traced.worker if traced is not None and traced.worker in self.traced.clocks else None

    def _align(self) -> dict[int, float]:
        """Converts all times to this process's clock."""
        clocks = self.traced.clocks
        if not clocks:
            return {}

        def aligned(device: str, time: float) -> float:
            worker = self._worker(device)
            return time if worker is None else clocks[worker].aligned(int(time))

        self._map(aligned)
        errors: dict[int | None, float] = {worker: clock.error for worker, clock in clocks.items()}
        refined = refine(self._slacks(), errors)
        shifts = refined.shifts
        self._map(lambda device, time: time + 1e9 * shifts.get(self._worker(device), 0.0))
        for cause, effect, seconds in refined.contradictions:
            ends = [("this process" if own is None else f"worker {own}") for own in (cause, effect)]
            text = (
                f"on {ends[1]} something begins {seconds * 1e3:.3g} ms before what it waits for has ended on {ends[0]}"
                f", beyond the error of the clocks' comparison"
            )
            logger.warning("measured step: %s; are clocks being set?", text)
            self.remarks.append(text)
        return {worker: shift for worker, shift in shifts.items() if worker is not None}

    def _map(self, change: Callable[[str, float], float]) -> None:
        """Changes all times, given a device and a time."""
        for name, run in self.runs.items():
            start, end, ready = (change(run.device, time) for time in (run.start, run.end, run.ready))
            self.runs[name] = run._replace(start=start, end=end, ready=ready)
        for (_, receiver), arrivals in self.received.items():
            arrivals[:] = [(change(receiver, end), size) for end, size in arrivals]
        for device, changes in self.changes.items():
            changes[:] = [(change(device, 1000 * time) / 1000, size) for time, size in changes]

    def _slacks(self) -> dict[tuple[int | None, int | None], float]:
        """Returns (clock of a cause, clock of its effect) -> the least seconds between them, see `refine`."""
        slacks: dict[tuple[int | None, int | None], float] = {}

        def add(cause: int | None, effect: int | None, nanoseconds: float) -> None:
            if cause != effect:
                pair = cause, effect
                slacks[pair] = min(slacks.get(pair, math.inf), nanoseconds / 1e9)

        for name, run in self.runs.items():
            node, own = self.nodes[name], self._worker(run.device)
            for before in node.waits_for:
                cause = self.runs.get(before)
                # A control edge from a GPU waits for launches.
                if cause is not None and not (before in node.after and on_gpu(cause.device)):
                    add(self._worker(cause.device), own, run.start - cause.end)
            add(None, own, run.start - self.traced.called[0])
            add(own, None, self.traced.called[1] - run.end)
        for names in self._members.values():  # No member ends before all have begun.
            begun: dict[int | None, float] = {}
            ended: dict[int | None, float] = {}
            for run in map(self.runs.__getitem__, names):
                own = self._worker(run.device)
                begun[own] = max(run.start, begun.get(own, -math.inf))
                ended[own] = min(run.end, ended.get(own, math.inf))
            for one, other in itertools.permutations(begun, 2):
                add(one, other, ended[other] - begun[one])
        return slacks

    # ---- spans

    def _time(self, nanoseconds: float) -> float:
        """Converts nanoseconds to seconds from the start of the call."""
        return max(0.0, (nanoseconds - self.traced.called[0]) / 1e9)

    def _index(self, name: str) -> int | None:
        """Returns the device of a node that ran."""
        run = self.runs.get(name)
        device = None if run is None else self.devices.get(run.device)
        return None if device is None else device.number

    def result(self, labels: Mapping[int, str], limits: Mapping[int, float]) -> MeasuredStep:
        spans = sorted(self._spans(labels), key=lambda span: (span.start, span.end))
        ends = [self._time(run.end) for run in self.runs.values()]
        latency = max([0.0, *ends, *(span.end for span in spans)])
        work = [span for span in spans if span.kind != SEND]
        working = (min((span.start for span in work), default=0.0), max((span.end for span in work), default=0.0))
        waits = self._waits()
        parts = {}
        for device in labels:
            own: list[tuple[str, Interval]] = [
                (part_of(span.kind), (span.start, span.end)) for span in work if span.device == device
            ]
            own += [("transfers", wait) for wait in waits.get(device, ())]
            parts[device] = step_parts(own, working, latency)
        timeline = Timeline(
            LAUNCHES if self.launches else MEASURED,
            latency,
            tuple(spans),
            labels,
            {device: curve for device in labels if (curve := self._memory(device))},
            {device: limit for device, limit in limits.items() if device in labels},
            samples=self.traced.samples,
        )
        return MeasuredStep(timeline, parts, self._tasks(), self.shifts, tuple(self.remarks))

    def _spans(self, devices: Iterable[int]) -> Iterator[Span]:
        known = set(devices)
        calls: dict[Task, list[str]] = {}
        operators: dict[_Work, list[Interval]] = {}
        reductions: dict[int, dict[int, list[str]]] = {}
        for name in self.runs:
            node = self.nodes[name]
            device = self._index(name)
            if device not in known or not node.kind:
                continue
            if node.operator:
                assert device is not None
                self._add_operator(operators, name, device)
                continue
            start, end = self._time(self.runs[name].start), self._time(self.runs[name].end)
            if node.task is not None and (node.kind in TASKS or node.kind == METRICS):
                calls.setdefault(node.task, []).append(name)
            elif node.kind == ALL_REDUCE:
                assert node.reduction is not None and device is not None
                reductions.setdefault(node.reduction, {}).setdefault(device, []).append(name)
            elif node.kind in (ACCUMULATE, PACK, APPLY):
                kind = ACCUMULATE if node.kind == PACK else node.kind
                micro_batch = None if node.task is None else node.task.micro_batch
                yield Span(kind, start, end, device, node.stage or 0, micro_batch, node.replica)
        for task, names in calls.items():
            runs = [self.runs[name] for name in names]
            start, end = self._time(min(run.start for run in runs)), self._time(max(run.end for run in runs))
            device = self._index(names[0])
            yield Span(task.phase.value, start, end, device, task.stage, task.micro_batch, task.replica)
        for work, intervals in operators.items():
            for start, end in _joined(intervals):
                yield Span(work.kind, start, end, work.device, work.stage, work.micro_batch, work.replica)
        for by_device in reductions.values():
            yield from self._all_reduce(by_device)
        yield from self._sends(known)

    def _all_reduce(self, by_device: Mapping[int, Sequence[str]]) -> Iterator[Span]:
        """Yields an all-reduce on each device, from the moment when all take part."""
        runs = {device: [self.runs[name] for name in names] for device, names in by_device.items()}
        last = max(min(self._time(run.start) for run in own) for own in runs.values())
        for device, own in runs.items():
            node = self.nodes[by_device[device][0]]
            final = max(own, key=lambda run: run.end)
            end = self._time(final.end)
            size = sum(final.outputs.values())
            start = min(end, last)
            yield Span(ALL_REDUCE, start, end, device, node.stage or 0, None, node.replica, bytes=size)

    def _add_operator(self, operators: dict[_Work, list[Interval]], name: str, device: int) -> None:
        """Records when a single operator ran, together with others of the same work."""
        node, run = self.nodes[name], self.runs[name]
        kind = {METRICS: "F", PACK: ACCUMULATE}.get(node.kind, node.kind)
        if kind == HOST:
            return
        micro_batch = None if node.task is None else node.task.micro_batch
        work = _Work(kind, device, node.stage or 0, micro_batch, node.replica)
        operators.setdefault(work, []).append((self._time(run.start), self._time(run.end)))

    @functools.cached_property
    def _members(self) -> Mapping[int, Sequence[str]]:
        """Number of a collective operation -> its nodes on all devices."""
        members: dict[int, list[str]] = {}
        for name in self.runs:
            number = self.nodes[name].meeting
            if number is not None:
                members.setdefault(number, []).append(name)
        return members

    def _sends(self, known: set[int]) -> Iterator[Span]:
        """Yields transfers between devices: each task's results for another device are one span.

        Between workers TensorFlow reports when a tensor arrived. On one machine it doesn't: there a transfer ends when
        its reader becomes ready, if the reader waits for nothing else, and takes no time otherwise.
        """
        seen: set[tuple[str, int, int]] = set()
        together: dict[tuple[tuple[str, ...], int, int], tuple[float, float, float]] = {}
        for name, run in self.runs.items():
            target = self._index(name)
            if target not in known:
                continue
            for ref in self.nodes[name].inputs:
                source = self._index(ref.node)
                if source is None or source == target or source not in known or (*ref, target) in seen:
                    continue
                seen.add((*ref, target))
                origin = self.sources[ref.node] or (ref.node,)
                if self.nodes[origin[-1]].kind == HOST:
                    continue
                sender = self.runs[ref.node]
                arrived, size = self._arrival(ref.node, sender, name, run)
                size = sender.outputs.get(ref.output, 0) if size is None else size
                key = origin, source, target
                start, end, total = together.get(key, (math.inf, -math.inf, 0.0))
                together[key] = min(start, sender.end), max(end, arrived, sender.end), total + size
        for (origin, source, target), (begin, end, total) in together.items():
            node = self.nodes[origin[-1]]
            micro_batch = node.relays if node.task is None else node.task.micro_batch
            micro_batch = micro_batch if len(origin) == 1 else None
            times = self._time(begin), self._time(end)
            yield Span(SEND, *times, source, node.stage or 0, micro_batch, node.replica, target, total)

    def _arrival(self, name: str, sender: _Run, reader: str, read: _Run) -> tuple[float, int | None]:
        """Returns when a tensor reached its reader's device, and its bytes if TensorFlow reports them."""
        told = self.received.get((name, read.device))
        if told:
            return told.pop(0) if len(told) > 1 else told[0]
        others = [self.runs[other].end for other in self.nodes[reader].waits_for if other in self.runs]
        alone = sender.end >= max(others, default=-math.inf)
        return (read.ready if alone else sender.end), None

    def _waits(self) -> dict[int, list[Interval]]:
        """Returns device -> intervals in which it waits for a tensor on its way, until the reader is ready."""
        waits: dict[int, list[Interval]] = {}
        for name, run in self.runs.items():
            if self.nodes[name].kind not in ("", HOST, ALL_REDUCE, RELAY):
                device = self._index(name)
                if device is not None and (made := self._came(name, run.device)) > -math.inf:
                    wait = self._time(min(made, run.ready)), self._time(run.ready)
                    waits.setdefault(device, []).append(wait)
        return waits

    def _came(self, name: str, device: str) -> float:
        """Returns the last end of what a node waits for on other devices, through connecting nodes."""
        latest, seen, stack = -math.inf, {name}, [name]
        while stack:
            for before in self.nodes[stack.pop()].waits_for:
                run = self.runs.get(before)
                if run is None or before in seen:
                    continue
                seen.add(before)
                if run.device != device:
                    latest = max(latest, run.end)
                elif self.nodes[before].kind in ("", RELAY):
                    stack.append(before)
        return latest

    def _tasks(self) -> dict[Task, float]:
        """Returns task -> seconds from its start to the end of all its nodes."""
        times: dict[Task, tuple[float, float]] = {}
        for name, run in self.runs.items():
            task = self.nodes[name].task
            if task is not None:
                start, end = times.get(task, (math.inf, -math.inf))
                times[task] = min(start, run.start), max(end, run.end)
        return {task: (end - start) / 1e9 for task, (start, end) in times.items()}

    # ---- memory

    def _memory(self, device: int) -> MemoryCurve:
        """Returns the bytes in use on a device over the step, including what stays between steps, as far as known."""
        names = [name for name, own in self.devices.items() if own.number == device]
        changes = sorted(change for name in names for change in self.changes.get(name, ()))
        if not changes:
            return ()
        level = float(self.traced.stored.get(device, 0))
        curve = [(0.0, level)]
        for moment, group in itertools.groupby(changes, key=lambda change: change[0]):
            level += sum(size for _, size in group)
            curve.append((max(0.0, self._time(1000 * moment)), level))
        return tuple(curve)


def _run(device: str, node: Any) -> _Run:
    start = node.all_start_nanos or 1000 * node.all_start_micros
    end = start + (node.all_end_rel_nanos or 1000 * node.all_end_rel_micros)
    ready = node.scheduled_nanos or 1000 * node.scheduled_micros
    outputs = {}
    for output in node.output:
        tensor = output.tensor_description
        outputs[output.slot] = math.prod(dim.size for dim in tensor.shape.dim) * dtype_size(tensor.dtype)
    return _Run(device, start, end, ready, outputs)
