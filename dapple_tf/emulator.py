"""Emulates one training step: the Schedule on TensorFlow's own executor, with timed waits in place of the work.

The graph has what a real step has: a node for each task, control edges that fix each device's order, split and concat
between replicas, collectives between the members of a reduction. Only the tensors are small, one number per sample,
and tasks and transfers are waits as long as the cost model says. Nothing tells a wait when to begin but the executor,
so that a wrong edge, a missing one or a deadlock shows; the time that a step takes is the wall clock's.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from dapple_tf.cluster import Cluster
from dapple_tf.cost import CostModel, Reduction
from dapple_tf.plan import Plan
from dapple_tf.profile import Profile
from dapple_tf.simulator import Simulation, Span, last_gradients
from dapple_tf.simulator import run as simulate_costs
from graph_passes.batching import Interval, slice_intervals
from graph_passes.tasks import Phase, Schedule, Task

MAX_DEVICES = 32
"""More devices than this are not emulated: the executor's own work for each would show in the result."""

_LOG = logging.getLogger(__name__)

_SHORTEST_SECONDS = 5e-3
"""How long the automatic scale makes the shortest task of note."""

_SECONDS_PER_NODE = 6e-4
"""And how long a step, per node of the graph: the executor needs about a sixth of it."""

_LONGEST_STEP = 3.0
"""But no step longer than this, in seconds."""

_GRACE = 1e-3
"""The executor may start a wait so many seconds late without that what follows is put off."""

_Array = npt.NDArray[np.float64]
_Port = tuple[str, int]


class EmulationError(RuntimeError):
    """A step can't be emulated, or the executor didn't run what the schedule says."""


@dataclass(frozen=True)
class Emulation(Simulation):
    """What an emulated step took; all that a `Simulation` tells, measured.

    Times are in the profile's seconds, not the wall clock's. ``spans`` are those of the step of median latency: from
    when the executor started a wait until the wait was over.

    Attributes:
        latencies: of each step; ``latency`` is their median.
        simulated: the same step, simulated.
        scale: wall-clock seconds per second of the profile.
        lateness: wall-clock seconds from when the inputs of a wait were there until the executor started it, on
            average.
    """

    latencies: tuple[float, ...]
    simulated: Simulation = field(repr=False)
    scale: float
    lateness: float

    @property
    def error(self) -> float:
        """How much longer the step took than simulated, relative to that; negative if it took less."""
        simulated = self.simulated.latency
        return self.latency / simulated - 1 if simulated else 0.0

    @property
    def order(self) -> Schedule:
        """The order in which each device ran its tasks."""
        return _measured_order(self.spans)

    def __str__(self) -> str:
        plan = self.costs.plan
        rows: list[tuple[str, ...]] = [
            ("stage", "devices", "busy ms simulated", "emulated", "bubble simulated", "emulated")
        ]
        for stage, devices in enumerate(plan.devices):
            busy = [
                sum(step.busy[device] for device in devices) / len(devices) * 1e3 for step in (self.simulated, self)
            ]
            bubbles = [step.bubbles[stage] for step in (self.simulated, self)]
            shown = " ".join(map(str, devices[:8])) + (" ..." if len(devices) > 8 else "")
            rows.append((str(stage), shown, *(f"{x:.4g}" for x in busy), *(f"{x:.1%}" for x in bubbles)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        head = (
            f"step emulated {self.latency * 1e3:.4g} ms, simulated {self.simulated.latency * 1e3:.4g} ms, "
            f"error {self.error:+.2%}"
        )
        tail = (
            f"{len(self.latencies)} steps of {min(self.latencies) * 1e3:.4g} to {max(self.latencies) * 1e3:.4g} ms, at "
            f"{self.scale:.4g} times their length; waits started {self.lateness * 1e3:.2g} ms late on average"
        )
        return "\n".join([head, *lines, tail])


def emulate(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    overlap: bool = False,
    all_reduce: str = "hierarchical",
    schedule: Schedule | None = None,
    scale: float | None = None,
    steps: int = 3,
) -> Emulation:
    """Runs a plan's step on logical CPU devices of this machine, waiting where it would compute or send.

    Args:
        plan: the plan; it may use at most `MAX_DEVICES` devices.
        profile: what its layers cost.
        cluster: the devices and links; links that are unknown are free.
        overlap: as in :func:`dapple_tf.simulator.simulate`.
        all_reduce: likewise.
        schedule: likewise.
        scale: wall-clock seconds for each second of the profile; None chooses one for which the waits are long enough
            to be exact.
        steps: how many steps to measure, after one that isn't.

    Raises:
        EmulationError: too many devices; or the executor ran a task out of order, or before its inputs.
        PlanError: the plan doesn't fit the profile, the cluster, or a device's memory.
    """
    if steps < 1:
        raise ValueError(f"{steps} steps were asked for; ask for at least 1")
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale is {scale}; it must be above 0 and finite, or None to choose one")
    devices = sorted({device for group in plan.devices for device in group})
    if len(devices) > MAX_DEVICES:
        raise EmulationError(
            f"the plan uses {len(devices)} devices, of which at most {MAX_DEVICES} can be emulated; simulate it "
            f"instead, or emulate a plan with fewer stages or replicas"
        )
    costs = CostModel(plan, profile, cluster, overlap=overlap, all_reduce=all_reduce)
    schedule = costs.schedule if schedule is None else schedule
    simulated = simulate_costs(costs, schedule)
    if scale is None:
        scale = _choose_scale(simulated)
    clock = _Clock(costs, scale)
    step = _StepGraph(costs, schedule, clock)
    config = tf.compat.v1.ConfigProto(allow_soft_placement=False, device_count={"CPU": len(devices), "GPU": 0})
    config.inter_op_parallelism_threads = len(devices) + _most_pending(simulated) + 16
    config.intra_op_parallelism_threads = 1
    config.use_per_session_threads = True  # else the number of threads is that of the process' first session
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    measured = []
    with tf.compat.v1.Session(graph=step.graph, config=config) as session:
        run = session.make_callable(step.end)
        for number in range(steps + 1):
            clock.reset(still=not number)  # the first one prepares the graph
            run()
            clock.check()
            if number:
                measured.append(clock.result(step.spans))
                _check_order(measured[-1].spans, schedule)
    latencies = tuple(one.latency for one in measured)
    median = statistics.median_low(latencies)
    shown = measured[latencies.index(median)]
    overdue = max(one.overdue for one in measured)
    if overdue > _GRACE:
        _LOG.warning(
            "the executor started a wait %.3g ms after it should have been over: the step is too fast for this "
            "machine; raise scale (%.3g), or leave other work for later",
            overdue * 1e3,
            scale,
        )
    lateness = statistics.fmean(one.lateness for one in measured)
    return Emulation(statistics.median(latencies), tuple(shown.spans), costs, latencies, simulated, scale, lateness)


def _choose_scale(simulated: Simulation) -> float:
    """Makes waits long enough to be exact, and the step as short as that allows."""
    tasks = [s.end - s.start for s in simulated.spans if s.device is not None and s.kind != "send"]
    longest = max(tasks, default=0.0)
    if not longest or not simulated.latency:
        return 1.0
    shortest = min(seconds for seconds in tasks if seconds >= longest / 10)
    wanted = max(_SHORTEST_SECONDS / shortest, _SECONDS_PER_NODE * len(simulated.spans) / simulated.latency)
    return min(wanted, _LONGEST_STEP / simulated.latency)


def _most_pending(simulated: Simulation) -> int:
    """The most transfers and reductions that wait or go on at one time: each has a thread of its own."""
    changes = []
    made: dict[tuple[int | None, int, int | None], float] = {}  # when what is sent was made
    for span in simulated.spans:
        work = (span.device, span.stage, span.micro_batch)
        if span.kind == "send":
            changes += [(made[work], 1), (span.end, -1)]
        elif span.kind == "all_reduce":
            count = sum(simulated.costs.plan.replicas)
            changes += [(span.start, count), (span.end, -count)]
        else:
            made[work] = span.end
    level = most = 0
    for _, change in sorted(changes):
        level += change
        most = max(most, level)
    return most


# ---- time


@dataclass(eq=False)
class _Wait:
    """A node that waits.

    Attributes:
        name: the node's.
        span: index of the span that it is a part of; the members of a reduction have one together.
        busy: seconds for which it occupies its device or ports.
        latency: seconds after that until it is over.
        after: the waits that it follows.
        ports: what a transfer or a reduction has to itself.
        turn: which goes first of two that are ready at the same time.
        server: the server that it shares the cores of; None for cores of its own.
        expected: what each of the tensors that it gets must be.
    """

    name: str
    span: int
    busy: float
    latency: float = 0.0
    after: tuple[_Wait, ...] = ()
    ports: tuple[_Port, ...] = ()
    turn: tuple[int, ...] = ()
    server: int | None = None
    expected: tuple[_Array, ...] = ()

    def __str__(self) -> str:
        return self.name


@dataclass
class _Measured:
    """One step: latency and spans in the profile's seconds, the rest in the wall clock's."""

    latency: float
    spans: list[Span]
    lateness: float
    overdue: float


class _Clock:
    """Waits, and keeps the books of one step: what is over, and which ports are taken until when.

    A wait ends its own length after its inputs were there, however late the executor starts it, so that the executor's
    overhead doesn't add up along a chain of tasks; unless it is late by more than `_GRACE`. Times are wall-clock
    seconds from the start of the step.
    """

    def __init__(self, costs: CostModel, scale: float) -> None:
        self.scale = scale
        cluster = costs.cluster
        self.cores = {
            server: _Cores(cluster.capacity(server), self.now)
            for server in range(cluster.num_servers)
            if cluster.capacity(server) < len(cluster.devices_of(server))
        }
        self.lock = threading.Lock()
        self.reset(still=True)

    def reset(self, *, still: bool = False) -> None:
        """Before a step. In a ``still`` one nothing takes time."""
        self.still = still
        self.started = time.perf_counter()
        self.latency = 0.0
        self.ended: dict[_Wait, float] = {}
        self.ports: dict[_Port, tuple[float, _Wait]] = {}
        self.asked: dict[int, tuple[_Wait, float, _Wait | None]] = {}
        self.reserved: dict[int, tuple[float, _Wait | None]] = {}
        self.records: list[tuple[_Wait, float, float, _Wait | None]] = []
        self.late: list[float] = []
        self.overdue = 0.0
        self.failure: Exception | None = None
        for cores in self.cores.values():
            cores.reset()

    def now(self) -> float:
        return time.perf_counter() - self.started

    # ---- what nodes call

    def begin(self) -> _Array:
        self.started = time.perf_counter()
        return np.zeros(1)

    def wait(self, wait: _Wait, *tensors: _Array) -> _Array:
        """Waits as long as the work takes, and hands on the first tensor."""
        entered = self.now()
        # An error that is raised here would leave the other members of a collective waiting: `check` raises it.
        if self.failure is None:
            try:
                self._check_tensors(wait, tensors)
                self._wait(wait, entered)
            except Exception as error:
                self.failure = error
        return tensors[0]

    def finish(self, wait: _Wait) -> _Array:
        """Waits for what a step takes beyond its tasks; the step is over then."""
        if self.failure is None and not self.still:
            _sleep(max((self.ended[one] for one in wait.after), default=0.0) + wait.busy - self.now())
        self.latency = self.now()
        return np.zeros(1)

    def _wait(self, wait: _Wait, entered: float) -> None:
        ready, cause = self._ready(wait)
        if self.still:
            self.ended[wait] = 0.0
            return
        self.late.append(entered - ready)
        start = ready
        if wait.server is not None:
            end = self.cores[wait.server].run(wait, max(ready, entered - _GRACE), wait.busy)
        else:
            if wait.ports:
                start, cause = self._reserve(wait, ready, cause)
            end = start + wait.busy + wait.latency
            self.overdue = max(self.overdue, entered - end if end > ready else 0.0)
            _sleep(end - self.now())
        self.ended[wait] = max(end, entered - _GRACE)
        self.records.append((wait, max(start, entered), self.now(), cause))

    def _ready(self, wait: _Wait) -> tuple[float, _Wait | None]:
        """When all that it follows was over, and what of it last."""
        ready, cause = 0.0, None
        for before in wait.after:
            if before not in self.ended:
                raise EmulationError(f"{wait} was started before {before} was over: an edge is missing")
            if cause is None or self.ended[before] > ready:
                ready, cause = self.ended[before], before
        return ready, cause

    def _reserve(self, wait: _Wait, ready: float, cause: _Wait | None) -> tuple[float, _Wait | None]:
        """When the ports are free for it, and what they were taken by until then: first come, first served.

        Who came first is a matter of when the inputs were ready, not of which thread the machine woke first: so a
        little later, when all who may have come before have said so, they are served in that order.
        """
        with self.lock:
            if not wait.busy:
                return self._take(wait, ready, cause)
            if wait.span not in self.reserved:
                self.asked.setdefault(wait.span, (wait, ready, cause))
        _sleep(ready + _GRACE - self.now())
        with self.lock:
            if wait.span not in self.reserved:
                order = sorted((round(came, 5), one.turn, span) for span, (one, came, _) in self.asked.items())
                for _, _, span in order[: order.index((round(ready, 5), wait.turn, wait.span)) + 1]:
                    self.reserved[span] = self._take(*self.asked.pop(span))
            return self.reserved[wait.span]

    def _take(self, wait: _Wait, ready: float, cause: _Wait | None) -> tuple[float, _Wait | None]:
        start = ready
        for port in wait.ports:
            if port in self.ports and self.ports[port][0] > start:
                start, cause = self.ports[port]
        if wait.busy:
            self.ports |= dict.fromkeys(wait.ports, (start + wait.busy, wait))
        return start, cause

    def _check_tensors(self, wait: _Wait, tensors: Sequence[_Array]) -> None:
        for expected, tensor in zip(wait.expected, tensors, strict=True):
            if not np.array_equal(expected, tensor):
                raise EmulationError(f"{wait} should get {expected}, but it got {tensor}: an edge is wrong")

    # ---- after a step

    def check(self) -> None:
        """Raises what went wrong in the step."""
        if self.failure is not None:
            raise self.failure

    def result(self, templates: Sequence[Span]) -> _Measured:
        """The step, as it was measured."""
        found: dict[int, tuple[float, float, _Wait | None]] = {}
        for wait, start, end, cause in self.records:
            if wait.span in found:
                first, last, of_first = found[wait.span]
                found[wait.span] = (min(first, start), max(last, end), cause if start < first else of_first)
            else:
                found[wait.span] = (start, end, cause)
        order = sorted(found, key=lambda span: found[span][0])
        position = {span: index for index, span in enumerate(order)}
        spans = []
        for number in order:
            start, end, cause = found[number]
            spans.append(
                templates[number]._replace(
                    start=start / self.scale,
                    end=end / self.scale,
                    cause=None if cause is None else position[cause.span],
                )
            )
        lateness = statistics.fmean(self.late) if self.late else 0.0
        return _Measured(self.latency / self.scale, spans, lateness, self.overdue)


class _Cores:
    """Cores that the devices of a server share: tasks that run at the same time slow each other down."""

    def __init__(self, capacity: float, now: Callable[[], float]) -> None:
        self.capacity = capacity
        self.now = now
        self.changed = threading.Condition()
        self.reset()

    def reset(self) -> None:
        self.left: dict[_Wait, float] = {}
        self.ended: dict[_Wait, float] = {}
        self.updated = 0.0

    def run(self, wait: _Wait, start: float, seconds: float) -> float:
        """Waits until the work that began at ``start`` is done, and returns when that was."""
        with self.changed:
            self._advance(start)
            self.left[wait] = seconds
            self.changed.notify_all()
            while wait in self.left:
                end = self._next_end()
                if (timeout := end - self.now()) > 0:
                    self.changed.wait(timeout)
                else:
                    self._advance(end)
                    self.changed.notify_all()
            return self.ended[wait]

    def _rate(self) -> float:
        return min(1.0, self.capacity / len(self.left))

    def _next_end(self) -> float:
        return self.updated + min(self.left.values()) / self._rate()

    def _advance(self, now: float) -> None:
        """Brings what is left to do up to date; a time that is past already changes nothing."""
        while self.left and (end := self._next_end()) <= now:
            least = min(self.left.values())
            for wait in list(self.left):
                self.left[wait] -= least
                if self.left[wait] <= 1e-9:
                    del self.left[wait]
                    self.ended[wait] = end
            self.updated = end
        if now > self.updated:
            for wait in self.left:
                self.left[wait] -= (now - self.updated) * self._rate()
            self.updated = now


def _sleep(seconds: float) -> None:
    if seconds > 0:
        time.sleep(seconds)


# ---- the graph


@dataclass(frozen=True)
class _Made:
    """A node of the graph, and the wait that it is."""

    tensor: tf.Tensor
    wait: _Wait


class _StepGraph:
    """The graph of one step.

    Attributes:
        graph: the graph.
        end: the operation that is over when the step is.
        spans: what each span is; its times aren't known yet.
    """

    def __init__(self, costs: CostModel, schedule: Schedule, clock: _Clock) -> None:
        self.costs, self.schedule, self.clock = costs, schedule, clock
        self.spans: list[Span] = []
        plan, cluster = costs.plan, costs.cluster
        used = sorted({device for group in plan.devices for device in group})
        self.number = {device: number for number, device in enumerate(used)}
        self.server = [device.server for device in cluster.devices]
        self.last_gradients = last_gradients(schedule)
        self.split = {task.stage for task in schedule.tasks if task.phase is Phase.INPUT_GRAD}
        self.made: dict[Task, _Made] = {}
        self.previous: dict[int, _Made] = {}
        self.segments: dict[Task, dict[float, _Made]] = {}
        self.reduced: dict[tuple[int, int], list[_Made]] = {}
        self.ends: list[_Made] = []
        self.collectives = 0
        self.graph = tf.Graph()
        with self.graph.as_default():
            with self._on(used[0]):
                self.begin = tf.numpy_function(clock.begin, [], tf.float64, name="begin").op
            for task in self._in_order():
                self._add_task(task)
            for number, reduction in enumerate(costs.reductions if self.last_gradients else ()):
                self._add_reduction(number, reduction)
            if self.last_gradients:
                self._add_updates()
            self.end = self._add_end(used[0])

    # ---- tasks

    def _slice(self, task: Task) -> Interval:
        """The samples of the global batch that are the task's."""
        costs = self.costs
        return slice_intervals(costs.micro_batches[task.micro_batch], len(costs.plan.devices[task.stage]))[task.replica]

    def _in_order(self) -> Iterable[Task]:
        """Every task after those that it needs; the simulator has shown that there is such an order."""
        arrows = {task: self._missing(task) for task in self.schedule.tasks}
        positions = dict.fromkeys(self.schedule.orders, 0)
        moved = True
        while moved:
            moved = False
            for device, tasks in self.schedule.orders.items():
                while positions[device] < len(tasks) and arrows[tasks[positions[device]]] <= self.made.keys():
                    yield tasks[positions[device]]
                    positions[device] += 1
                    moved = True

    def _sources(self, task: Task) -> Iterable[tuple[int, list[tuple[Task, Interval, float]]]]:
        """What a task gets from each other stage: (sender, samples, bytes) in the order of samples."""
        if task.phase is Phase.WEIGHT_GRAD:
            return
        costs, backward = self.costs, task.phase is not Phase.FORWARD
        wanted = self._slice(task)
        for producer, consumer in costs.routes:
            if task.stage != (producer if backward else consumer):
                continue
            other = consumer if backward else producer
            phase = Phase.FORWARD
            if backward:
                phase = Phase.INPUT_GRAD if other in self.split else Phase.BACKWARD
            found = []
            for piece in costs.pieces(producer, consumer, task.micro_batch, backward=backward):
                if piece.receiver == task.replica:
                    sender = Task(other, phase, task.micro_batch, piece.sender)
                    found.append((sender, self._slice(sender).overlap(wanted), piece.bytes))
            if found:
                yield other, found

    def _missing(self, task: Task) -> set[Task]:
        return {sender for _, pieces in self._sources(task) for sender, _, _ in pieces}

    def _add_task(self, task: Task) -> None:
        device = self.schedule.device_of(task)
        own = self._slice(task)
        with self._on(device):
            tensors: list[tf.Tensor] = []
            after: list[_Wait] = []
            if task.phase is Phase.FORWARD:
                tensors.append(tf.constant(_samples(own), tf.float64))
            else:
                needed = Phase.INPUT_GRAD if task.phase is Phase.WEIGHT_GRAD else Phase.FORWARD
                kept = self.made[Task(task.stage, needed, task.micro_batch, task.replica)]
                tensors.append(kept.tensor)
                after.append(kept.wait)
            for _, pieces in self._sources(task):
                arrived = [self._transfer(sender, task, interval, size) for sender, interval, size in pieces]
                tensors.append(_joined([made.tensor for made in arrived]))
                after += [made.wait for made in arrived]
            server = self.server[device]
            span = self._span(task.phase.value, device, task.stage, task.micro_batch, task.replica)
            parts = [1.0]
            if self.costs.overlap and task in self.last_gradients and server not in self.clock.cores:
                parts = sorted({part for buckets in self._buckets(task.stage).values() for part, _ in buckets} | {1.0})
            seconds, before = self.costs.seconds(task), 0.0
            made = None
            for part in parts:  # the last backward is cut where a bucket is ready
                if made is not None:
                    tensors, after = [made.tensor], [made.wait]
                wait = _Wait(
                    f"{task}" if part == 1 else f"{task}/{part:.3f}",
                    span,
                    (part - before) * seconds * self.clock.scale,
                    after=tuple(after),
                    server=server if server in self.clock.cores else None,
                    expected=(_samples(own),) * len(tensors),
                )
                made = self._add(wait, tensors, device)
                self.segments.setdefault(task, {})[part] = made
                before = part
            assert made is not None
            self.made[task] = made

    def _transfer(self, sender: Task, receiver: Task, interval: Interval, size: float) -> _Made:
        """One piece of what a task made, on the device of another task."""
        source, target = self.schedule.device_of(sender), self.schedule.device_of(receiver)
        made = self.made[sender]
        own = self._slice(sender)
        with tf.device(None), self._on(source):
            tensor = made.tensor
            if interval != own:
                sizes = [interval.start - own.start, interval.size, own.stop - interval.stop]
                tensor = tf.split(tensor, sizes, name=f"split/{sender}")[1]
            if source == target:
                return _Made(tensor, made.wait)
            link = self.costs.cluster.link(source, target)
            a, b = self.server[source], self.server[target]
            wait = _Wait(
                f"send/{sender}/{receiver}",
                self._span("send", source, sender.stage, sender.micro_batch, sender.replica, target, size),
                size / link.bandwidth * self.clock.scale,
                link.latency * self.clock.scale,
                (made.wait,),
                (("out", source), ("in", target)) if a == b else (("card out", a), ("card in", b)),
                (0, sender.replica, abs(receiver.stage - sender.stage), receiver.replica),
                expected=(_samples(interval),),
            )
            return self._node(wait, [tensor], ())

    # ---- the end of the step

    def _buckets(self, stage: int) -> Mapping[int, tuple[tuple[float, float], ...]]:
        """Reduction -> (part of the last backward after which it is ready, bytes) of each of its buckets."""
        found = {}
        for number, reduction in enumerate(self.costs.reductions):
            if stage in reduction.stages:
                buckets: tuple[tuple[float, float], ...] = ((1.0, reduction.bytes),)
                if self.costs.overlap and len(reduction.stages) == 1:
                    buckets = self.costs.buckets(stage) or buckets
                found[number] = buckets
        return found

    def _add_reduction(self, number: int, reduction: Reduction) -> None:
        costs = self.costs
        members = [
            (stage, replica, device)
            for stage in reduction.stages
            for replica, device in enumerate(costs.plan.devices[stage])
        ]
        servers = {self.server[device] for device in reduction.devices}
        ports: list[_Port]
        if len(servers) > 1:
            ports = [(kind, server) for server in sorted(servers) for kind in ("card out", "card in")]
        else:
            ports = [(kind, device) for device in reduction.devices for kind in ("out", "in")]
        total = np.array([len(reduction.stages) * sum(range(costs.plan.global_batch_size))], np.float64)
        previous: dict[int, tf.Operation] = {}
        for bucket, (part, size) in enumerate(self._buckets(reduction.stages[0])[number]):
            ready = [self._gradient(stage, device, part) for stage, _, device in members]
            span = self._span("all_reduce", None, reduction.stages[0], None, size=size)
            seconds = costs.reduction_seconds(reduction, size) * self.clock.scale
            self.collectives += 1
            for (stage, _, device), (vector, _) in zip(members, ready, strict=True):
                with self._on(device), tf.control_dependencies([previous[device]] if device in previous else []):
                    reduced = _all_reduce(vector, len(members), number + 1, self.collectives)
                previous[device] = reduced.op
                wait = _Wait(
                    f"all_reduce{number}/{bucket}/{device}",
                    span,
                    seconds,
                    after=tuple(wait for _, wait in ready),
                    ports=tuple(ports),
                    turn=(1, number, bucket),
                    expected=(total,),
                )
                with self._on(device):
                    made = self._node(wait, [reduced], ())
                self.reduced.setdefault((stage, device), []).append(made)
                self.ends.append(made)

    def _gradient(self, stage: int, device: int, part: float) -> tuple[tf.Tensor, _Wait]:
        """The sum over all samples of a device, once this part of its last backward is over."""
        gradients = [
            task
            for task in self.schedule.orders[device]
            if task.stage == stage and task.phase in (Phase.BACKWARD, Phase.WEIGHT_GRAD)
        ]
        segments = self.segments[gradients[-1]]
        last = segments.get(part, segments[1.0])  # on shared cores a backward isn't cut
        with self._on(device):
            tensors = [*(self.made[task].tensor for task in gradients[:-1]), last.tensor]
            return tf.reshape(tf.reduce_sum(_joined(tensors)), [1]), last.wait

    def _add_updates(self) -> None:
        for stage, devices in enumerate(self.costs.plan.devices):
            for replica, device in enumerate(devices):
                seconds = self.costs.apply_seconds(stage, device)
                if not seconds or device not in self.previous:
                    continue
                reduced = self.reduced.get((stage, device), ())
                server = self.server[device]
                wait = _Wait(
                    f"apply/{stage}/{replica}",
                    self._span("apply", device, stage, None, replica),
                    seconds * self.clock.scale,
                    after=tuple(made.wait for made in reduced),
                    server=server if server in self.clock.cores else None,
                    expected=tuple(made.wait.expected[0] for made in reduced) or (np.zeros(1),),
                )
                with self._on(device):
                    tensors = [made.tensor for made in reduced] or [tf.zeros(1, tf.float64)]
                    self._add(wait, tensors, device)

    def _add_end(self, device: int) -> tf.Operation:
        ends = [*self.previous.values(), *self.ends]
        wait = _Wait(
            "end", -1, self.costs.profile.step_seconds * self.clock.scale, after=tuple(made.wait for made in ends)
        )
        with self._on(device), tf.control_dependencies([made.tensor.op for made in ends]):
            finish = functools.partial(self.clock.finish, wait)
            return tf.numpy_function(finish, [], tf.float64, name="end").op

    # ---- nodes

    def _on(self, device: int) -> Any:
        return tf.device(f"/job:localhost/replica:0/task:0/device:CPU:{self.number[device]}")

    def _span(
        self,
        kind: str,
        device: int | None,
        stage: int,
        micro_batch: int | None,
        replica: int = 0,
        target: int | None = None,
        size: float = 0.0,
    ) -> int:
        self.spans.append(Span(kind, 0.0, 0.0, device, stage, micro_batch, replica, target, size))
        return len(self.spans) - 1

    def _add(self, wait: _Wait, tensors: Sequence[tf.Tensor], device: int) -> _Made:
        """Adds what a device computes, after what it computed before."""
        control = [self.previous[device].tensor.op] if device in self.previous else []
        if device in self.previous:
            wait = dataclasses.replace(wait, after=(*wait.after, self.previous[device].wait))
        self.previous[device] = self._node(wait, tensors, control)
        return self.previous[device]

    def _node(self, wait: _Wait, tensors: Sequence[tf.Tensor], control: Sequence[tf.Operation]) -> _Made:
        with tf.control_dependencies([*control] if wait.after else [self.begin]):
            tensor = tf.numpy_function(functools.partial(self.clock.wait, wait), tensors, tf.float64, name=wait.name)
        tensor.set_shape([None])
        return _Made(tensor, wait)


def _samples(interval: Interval) -> _Array:
    return np.arange(interval.start, interval.stop, dtype=np.float64)


def _joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, 0)


def _all_reduce(vector: tf.Tensor, members: int, group: int, instance: int) -> tf.Tensor:
    return tf.raw_ops.CollectiveReduceV2(
        input=vector,
        group_size=members,
        group_key=group,
        instance_key=instance,
        ordering_token=[],
        merge_op="Add",
        final_op="Id",
    )


# ---- checks


def _measured_order(spans: Iterable[Span]) -> Schedule:
    orders: dict[int, list[tuple[float, Task]]] = {}
    phases = {phase.value: phase for phase in Phase}
    for span in spans:
        if span.kind in phases and span.device is not None and span.micro_batch is not None:
            task = Task(span.stage, phases[span.kind], span.micro_batch, span.replica)
            orders.setdefault(span.device, []).append((span.start, task))
    return Schedule("emulated", {device: tuple(task for _, task in sorted(found)) for device, found in orders.items()})


def _check_order(spans: Iterable[Span], schedule: Schedule) -> None:
    """Each device ran its tasks in the schedule's order."""
    measured = _measured_order(spans)
    for device, tasks in schedule.orders.items():
        ran = measured.orders.get(device, ())
        if ran != tasks:
            position = next((i for i, (a, b) in enumerate(zip(ran, tasks, strict=False)) if a != b), len(ran))
            raise EmulationError(
                f"device {device} ran {' '.join(map(str, ran[position : position + 4])) or 'nothing'} as task "
                f"{position} where the schedule has {' '.join(map(str, tasks[position : position + 4]))}: a control "
                f"edge is missing"
            )
