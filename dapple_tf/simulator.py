"""Simulates one training step: the Schedule itself, task by task, on the devices and links of a cluster."""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from dapple_tf.cluster import Cluster
from dapple_tf.cost import CostModel, gib
from dapple_tf.plan import Plan
from dapple_tf.profile import Profile
from graph_passes.tasks import Phase, Schedule, Task


class Span(NamedTuple):
    """Something that took time.

    Attributes:
        kind: ``F``, ``B``, ``Bx``, ``Bw``, ``send``, ``all_reduce`` or ``apply``.
        start: seconds from the start of the step.
        end: likewise.
        device: index of the device; of a ``send``, the sender; None for an all-reduce, which has many.
        stage: the stage whose work it is.
        micro_batch: its micro-batch; None for what comes once in a step.
        replica: its replica.
        target: receiving device of a ``send``.
        bytes: of a ``send`` or an ``all_reduce``.
        cause: position of the span whose end this one waited for last; None for the first.
    """

    kind: str
    start: float
    end: float
    device: int | None
    stage: int
    micro_batch: int | None = None
    replica: int = 0
    target: int | None = None
    bytes: float = 0.0
    cause: int | None = None

    def __str__(self) -> str:
        number = "" if self.micro_batch is None else str(self.micro_batch)
        replica = f".r{self.replica}" if self.replica else ""
        where = f" {self.device}->{self.target}" if self.target is not None else ""
        return f"{self.stage}{self.kind}{number}{replica}{where} {self.start:.6f}..{self.end:.6f}"


_COMPUTE = frozenset(phase.value for phase in Phase)


@dataclass(frozen=True)
class Simulation:
    """What a simulated step took.

    Attributes:
        latency: seconds of the step.
        spans: everything that took time, in the order in which it began to be known.
        costs: the costs it was computed from.
    """

    latency: float
    spans: tuple[Span, ...] = field(repr=False)
    costs: CostModel = field(repr=False)

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.costs.plan.global_batch_size / self.latency if self.latency else math.inf

    @functools.cached_property
    def busy(self) -> Mapping[int, float]:
        """Device -> seconds in which it computes."""
        found = {device: 0.0 for devices in self.costs.plan.devices for device in devices}
        for span in self.spans:
            if span.device is not None and span.kind != "send":
                found[span.device] += span.end - span.start
        return found

    @functools.cached_property
    def bubbles(self) -> tuple[float, ...]:
        """For each stage the part of the step in which its devices have nothing to do, 0 to 1."""
        if not self.latency:
            return tuple(0.0 for _ in self.costs.plan.devices)
        return tuple(
            1 - sum(self.busy[device] for device in devices) / len(devices) / self.latency
            for devices in self.costs.plan.devices
        )

    @functools.cached_property
    def memory(self) -> Mapping[int, tuple[tuple[float, float], ...]]:
        """Device -> (seconds, bytes in use from then on), its curve over the step."""
        plan, costs = self.costs.plan, self.costs
        # What rises and falls at one time is a peak all the same.
        moments: dict[int, defaultdict[float, float]] = {
            device: defaultdict(float) for group in plan.devices for device in group
        }
        changes: dict[int, list[tuple[float, float]]] = {device: [] for group in plan.devices for device in group}
        for span in self.spans:
            if span.kind in _COMPUTE and span.device is not None and span.micro_batch is not None:
                samples = costs.slices(span.stage, span.micro_batch)[span.replica].size
                kept = costs.residual_bytes(span.stage, samples)
                working = costs.working_bytes(span.stage, samples) if span.kind != "F" else 0.0
                rise = (kept if span.kind == "F" else 0.0) + working
                last = span.kind in ("B", "Bw")
                changes[span.device] += [(span.start, rise), (span.end, -(kept if last else 0.0) - working)]
                if span.end == span.start:
                    peak = working + (kept if last else 0.0)
                    moments[span.device][span.start] = max(moments[span.device][span.start], peak)
        for reduction in costs.reductions:
            spans = [span for span in self.spans if span.kind == "all_reduce" and span.stage == reduction.stages[0]]
            if spans:
                start, end = min(span.start for span in spans), max(span.end for span in spans)
                for device in reduction.devices:
                    changes[device] += [(start, reduction.bytes), (end, -reduction.bytes)]
                    if start == end:
                        moments[device][start] = max(moments[device][start], reduction.bytes)
        curves = {}
        stored = {device: 0.0 for device in changes}
        for stage, devices in enumerate(plan.devices):
            for device in devices:
                stored[device] += costs.stages[stage].stored_bytes
        for device, events in changes.items():
            events.sort(key=lambda event: (event[0], event[1]))
            level = stored[device]
            points = [(0.0, level)]
            for time, group in itertools.groupby(events, key=lambda event: event[0]):
                level += sum(change for _, change in group)
                if time in moments[device]:
                    points.append((time, level + moments[device][time]))
                points.append((time, level))
            curves[device] = tuple(points)
        return curves

    @functools.cached_property
    def peak_bytes(self) -> Mapping[int, float]:
        """Device -> the most memory that it uses."""
        return {device: max(level for _, level in curve) for device, curve in self.memory.items()}

    @property
    def critical_path(self) -> tuple[Span, ...]:
        """Spans that each waited for the one before, up to the last to end: to be faster, shorten these."""
        if not self.spans:
            return ()
        index: int | None = max(range(len(self.spans)), key=lambda i: self.spans[i].end)
        path = []
        while index is not None:
            path.append(self.spans[index])
            index = self.spans[index].cause
        return tuple(reversed(path))

    @property
    def timeline(self) -> Mapping[int, tuple[Span, ...]]:
        """Device -> what it computes, in order of time."""
        found: dict[int, list[Span]] = {device: [] for group in self.costs.plan.devices for device in group}
        for span in self.spans:
            if span.device is not None and span.kind != "send":
                found[span.device].append(span)
        return {device: tuple(sorted(spans, key=lambda span: span.start)) for device, spans in found.items()}

    def __str__(self) -> str:
        lines = [f"step {self.latency * 1e3:.4g} ms, {self.throughput:.4g} samples/s"]
        rows = [("stage", "devices", "bubble", "busy ms", "peak memory")]
        for stage, devices in enumerate(self.costs.plan.devices):
            busy = sum(self.busy[device] for device in devices) / len(devices)
            peak = max(self.peak_bytes[device] for device in devices)
            shown = " ".join(map(str, devices[:8])) + (" ..." if len(devices) > 8 else "")
            rows.append((str(stage), shown, f"{self.bubbles[stage]:.1%}", f"{busy * 1e3:.4g}", gib(peak)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        shares: dict[str, float] = {}
        path = self.critical_path
        for span, after in itertools.zip_longest(path, path[1:]):
            end = span.end if after is None else min(span.end, after.start)  # overlapped reductions start before
            shares[span.kind] = shares.get(span.kind, 0.0) + end - span.start
        parts = ", ".join(f"{kind} {seconds * 1e3:.4g} ms" for kind, seconds in shares.items())
        lines.append(f"critical path: {parts}")
        return "\n".join(lines)


def simulate(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    overlap: bool = False,
    all_reduce: str = "hierarchical",
    schedule: Schedule | None = None,
) -> Simulation:
    """Simulates one training step of a plan.

    Each device runs its tasks in the Schedule's order, a task as soon as its inputs have come. Transfers go from
    replica to replica; between two devices of a server over their own ports, between servers over the servers' network
    cards, each of which sends one message at a time and receives one, first come, first served. Gradients are reduced
    when all replicas of the stage are done and applied then. On a server whose capacity is below its number of devices,
    tasks that run at the same time slow each other down. A schedule without backwards reduces and applies nothing.

    Args:
        plan: the plan.
        profile: what its layers cost.
        cluster: the devices and links; links that are unknown are free.
        overlap: all-reduce each bucket as soon as it is ready in the stage's last backward.
        all_reduce: ``hierarchical`` or ``flat``, see :func:`dapple_tf.cost.all_reduce_seconds`.
        schedule: run this one instead of the plan's.

    Raises:
        PlanError: the plan doesn't fit the profile, the cluster, or a device's memory.
    """
    return run(CostModel(plan, profile, cluster, overlap=overlap, all_reduce=all_reduce), schedule)


def last_gradients(schedule: Schedule) -> frozenset[Task]:
    """For each stage on each device, the task after which its gradients are complete; none in a forward schedule."""
    found: dict[tuple[int, int], Task] = {}
    for device, tasks in schedule.orders.items():
        for task in tasks:
            if task.phase in (Phase.BACKWARD, Phase.WEIGHT_GRAD):
                found[device, task.stage] = task
    return frozenset(found.values())


def run(costs: CostModel, schedule: Schedule | None = None) -> Simulation:
    """Simulates the step that ``costs`` describes; see :func:`simulate`."""
    return _Step(costs, costs.schedule if schedule is None else schedule).run()


_Ports = tuple[tuple[str, int], tuple[str, int]]


class _Step:
    """The state of a step that is being simulated."""

    def __init__(self, costs: CostModel, schedule: Schedule) -> None:
        self.costs = costs
        plan, cluster = costs.plan, costs.cluster
        self.orders = {device: tasks for device, tasks in schedule.orders.items() if tasks}
        self.position = dict.fromkeys(self.orders, 0)
        self.free = dict.fromkeys(self.orders, True)
        self.last: dict[int, int | None] = dict.fromkeys(self.orders, None)
        self.spans: list[Span] = []
        self.events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbers = itertools.count()
        self.now = 0.0
        self.ports: dict[tuple[str, int], tuple[float, int | None]] = {}
        self.routes: dict[tuple[int, int], tuple[_Ports, float, float]] = {}
        self.messages: dict[tuple[int, int, int, bool], list[tuple[int, Phase, int, float]]] = {}
        self.incoming: dict[int, list[int]] = {stage: [] for stage in range(plan.num_stages)}
        self.outgoing: dict[int, list[int]] = {stage: [] for stage in range(plan.num_stages)}
        for producer, consumer in costs.routes:
            self.outgoing[producer].append(consumer)
            self.incoming[consumer].append(producer)
        tasks = set(schedule.tasks)
        self.split = {task.stage for task in tasks if task.phase is Phase.INPUT_GRAD}
        self.waiting: dict[Task, int] = dict(self._waits(tasks))
        self.arrived: dict[Task, int | None] = {}
        # Servers whose devices share their cores: the tasks that run, by device.
        self.server = [device.server for device in cluster.devices]
        self.capacity = [cluster.capacity(server) for server in range(cluster.num_servers)]
        self.shared = [self.capacity[s] < len(cluster.devices_of(s)) for s in range(cluster.num_servers)]
        self.running: list[list[_Running]] = [[] for _ in range(cluster.num_servers)]
        self.updated = [0.0] * cluster.num_servers
        self.version = [0] * cluster.num_servers
        # Reductions: how many members each bucket still waits for.
        self.left = {device: len(tasks) for device, tasks in self.orders.items()}
        self.last_gradients = last_gradients(schedule)
        self._plan_reductions()

    def _waits(self, tasks: set[Task]) -> Iterator[tuple[Task, int]]:
        """How many messages each task waits for."""
        costs = self.costs
        counts: dict[tuple[int, int, bool], list[int]] = {}
        for task in tasks:
            if task.phase is Phase.WEIGHT_GRAD:
                yield task, 0
                continue
            backward = task.phase is not Phase.FORWARD
            key = (task.stage, costs.micro_batches[task.micro_batch].size, backward)
            if key not in counts:
                numbers = [0] * len(costs.plan.devices[task.stage])
                others = self.outgoing[task.stage] if backward else self.incoming[task.stage]
                for other in others:
                    ends = (task.stage, other) if backward else (other, task.stage)
                    for piece in costs.pieces(*ends, task.micro_batch, backward=backward):
                        numbers[piece.receiver] += 1
                counts[key] = numbers
            yield task, counts[key][task.replica]

    # ---- events

    def at(self, time: float, action: Callable[..., None], data: tuple[Any, ...]) -> None:
        heapq.heappush(self.events, (time, next(self.numbers), action, data))

    def run(self) -> Simulation:
        for device in self.orders:
            self.start(device)
        end = 0.0
        while self.events:
            self.now, _, action, data = heapq.heappop(self.events)
            action(*data)
        stuck = [tasks[self.position[d]] for d, tasks in self.orders.items() if self.position[d] < len(tasks)]
        if stuck:
            raise ValueError(f"the schedule deadlocks: {', '.join(map(str, stuck[:4]))} wait for ever")
        end = max((span.end for span in self.spans), default=0.0)
        return Simulation(end + self.costs.profile.step_seconds, tuple(self.spans), self.costs)

    def start(self, device: int) -> None:
        """Starts the device's next task if it is free and the task's inputs are there."""
        tasks, position = self.orders[device], self.position[device]
        if not self.free[device] or position == len(tasks):
            return
        task = tasks[position]
        if self.waiting[task]:
            return
        self.position[device] += 1
        self.free[device] = False
        seconds = self.costs.seconds(task)
        own, came = self.last[device], self.arrived.get(task)
        cause = own
        if came is not None and (own is None or self.spans[came].end > self.spans[own].end):
            cause = came
        server = self.server[device]
        end = self.now + seconds
        span = Span(task.phase.value, self.now, end, device, task.stage, task.micro_batch, task.replica, cause=cause)
        if self.shared[server]:
            self.begin(span, task)
        else:
            index = self.add(span)
            self.at(end, self.finished, (device, task, index))  # before its last bucket: messages go first
            if self.costs.overlap and task in self.last_gradients:
                self.announce(task, self.now, seconds, index)

    def add(self, span: Span) -> int:
        self.spans.append(span)
        return len(self.spans) - 1

    def finished(self, device: int, task: Task, index: int) -> None:
        self.last[device] = index
        self.free[device] = True
        self.send(task, index)
        self.left[device] -= 1
        if task in self.last_gradients and not (self.costs.overlap and not self.shared[self.server[device]]):
            for reduction, buckets in self.members[task.stage]:
                for bucket in range(buckets):
                    self.ready(reduction, bucket, index)
        if not self.left[device]:
            self.end_of_tasks(device, index)
        self.start(device)

    # ---- shared cores

    def begin(self, span: Span, task: Task | None = None) -> None:
        """Starts what would take the span's time undisturbed."""
        assert span.device is not None
        server = self.server[span.device]
        self.advance(server)
        self.running[server].append(_Running(span, task, span.end - span.start))
        self.next_of(server)

    def advance(self, server: int) -> None:
        """Brings the remaining work of a server's tasks up to date."""
        running = self.running[server]
        if running:
            rate = min(1.0, self.capacity[server] / len(running))
            for item in running:
                item.left -= (self.now - self.updated[server]) * rate
        self.updated[server] = self.now

    def next_of(self, server: int) -> None:
        self.version[server] += 1
        running = self.running[server]
        if running:
            rate = min(1.0, self.capacity[server] / len(running))
            left = min(item.left for item in running)
            self.at(self.now + max(0.0, left) / rate, self.shared_event, (server, self.version[server]))

    def shared_event(self, server: int, version: int) -> None:
        if version != self.version[server]:
            return
        self.advance(server)
        running = self.running[server]
        least = min(item.left for item in running)
        for item in [item for item in running if item.left <= least + 1e-9 * (item.span.end - item.span.start)]:
            running.remove(item)
            index = self.add(item.span._replace(end=self.now))
            if item.task is not None:
                self.at(self.now, self.finished, (item.span.device, item.task, index))
        self.next_of(server)

    # ---- transfers

    def send(self, task: Task, index: int) -> None:
        if task.phase is Phase.WEIGHT_GRAD:
            return
        backward = task.phase is not Phase.FORWARD
        key = (task.stage, task.replica, self.costs.micro_batches[task.micro_batch].size, backward)
        if key not in self.messages:
            self.messages[key] = list(self._messages(task, backward))
        for stage, phase, replica, size in self.messages[key]:
            self.transfer(task, index, Task(stage, phase, task.micro_batch, replica), size)

    def _messages(self, task: Task, backward: bool) -> Iterator[tuple[int, Phase, int, float]]:
        """What a task's replica sends: (stage, phase, replica, bytes)."""
        # The nearest stage first: it is the first to wait.
        for other in reversed(self.incoming[task.stage]) if backward else self.outgoing[task.stage]:
            ends = (other, task.stage) if backward else (task.stage, other)
            phase = Phase.FORWARD
            if backward:
                phase = Phase.INPUT_GRAD if other in self.split else Phase.BACKWARD
            for piece in self.costs.pieces(*ends, task.micro_batch, backward=backward):
                if piece.sender == task.replica:
                    yield other, phase, piece.receiver, piece.bytes

    def home(self, task: Task) -> int:
        """The device that runs a task."""
        return self.costs.plan.devices[task.stage][task.replica]

    def route(self, source: int, target: int) -> tuple[_Ports, float, float]:
        """The ports between two devices, with their bandwidth and latency."""
        if (source, target) not in self.routes:
            link = self.costs.cluster.link(source, target)
            a, b = self.server[source], self.server[target]
            ports = (("out", source), ("in", target)) if a == b else (("card out", a), ("card in", b))
            self.routes[source, target] = (ports, link.bandwidth, link.latency)
        return self.routes[source, target]

    def transfer(self, task: Task, index: int, receiver: Task, size: float) -> None:
        source, target = self.home(task), self.home(receiver)
        if source == target:
            self.arrive(receiver, index)
            return
        ports, bandwidth, latency = self.route(source, target)
        start, cause = self.reserve(ports, self.now, index)
        busy = size / bandwidth
        end = start + busy + latency
        span = self.add(
            Span("send", start, end, source, task.stage, task.micro_batch, task.replica, target, size, cause)
        )
        if busy:
            for port in ports:
                self.ports[port] = (start + busy, span)
        self.at(end, self.arrive, (receiver, span))

    def reserve(self, ports: Sequence[tuple[str, int]], ready: float, cause: int | None) -> tuple[float, int | None]:
        """When all of these ports are free, from ``ready`` on, and what was waited for."""
        start = ready
        for port in ports:
            free, owner = self.ports.get(port, (0.0, None))
            if free > start:
                start, cause = free, owner
        return start, cause

    def arrive(self, task: Task, index: int) -> None:
        self.waiting[task] -= 1
        self.arrived[task] = index  # messages come in order of time
        if not self.waiting[task]:
            self.start(self.home(task))

    # ---- reductions and updates

    def _plan_reductions(self) -> None:
        costs = self.costs
        self.members: dict[int, list[tuple[int, int]]] = {stage: [] for stage in range(costs.plan.num_stages)}
        self.parts: list[list[float]] = []
        self.fractions: list[list[float]] = []
        self.pending: list[list[int]] = []
        self.done: list[int] = []
        self.reduced_until: list[tuple[float, int | None]] = []
        for number, reduction in enumerate(costs.reductions):
            buckets: Sequence[tuple[float, float]] = ((1.0, reduction.bytes),)
            if costs.overlap and len(reduction.stages) == 1:
                buckets = costs.buckets(reduction.stages[0]) or buckets
            self.fractions.append([fraction for fraction, _ in buckets])
            self.parts.append([size for _, size in buckets])
            self.pending.append([len(reduction.devices)] * len(buckets))
            self.done.append(0)
            self.reduced_until.append((0.0, None))
            for stage in reduction.stages:
                self.members[stage].append((number, len(buckets)))
        self.unreduced = {stage: sum(buckets for _, buckets in groups) for stage, groups in self.members.items()}
        self.stages_of: dict[int, list[int]] = {}
        for stage, devices in enumerate(costs.plan.devices):
            for device in devices:
                self.stages_of.setdefault(device, []).append(stage)
        self.finished_devices: dict[int, int] = {}
        self.applied: set[tuple[int, int]] = set()
        self.reduction_end: dict[int, tuple[float, int]] = {}

    def announce(self, task: Task, start: float, seconds: float, index: int) -> None:
        """The last backward tells when each bucket will be ready."""
        for reduction, buckets in self.members[task.stage]:
            for bucket in range(buckets):
                self.at(start + self.fractions[reduction][bucket] * seconds, self.ready, (reduction, bucket, index))

    def ready(self, reduction: int, bucket: int, index: int) -> None:
        """One member has the gradients of a bucket; with the last member it is reduced, in the order of buckets."""
        pending = self.pending[reduction]
        pending[bucket] -= 1
        while self.done[reduction] < len(pending) and not pending[self.done[reduction]]:
            self.reduce(reduction, self.done[reduction], index)
            self.done[reduction] += 1

    def reduce(self, number: int, bucket: int, index: int) -> None:
        costs = self.costs
        reduction = costs.reductions[number]
        size = self.parts[number][bucket]
        servers = {self.server[device] for device in reduction.devices}
        if len(servers) > 1:
            ports = [(kind, server) for server in sorted(servers) for kind in ("card out", "card in")]
        else:
            ports = [(kind, device) for device in reduction.devices for kind in ("out", "in")]
        start, cause = self.reserve(ports, self.now, index)
        before, owner = self.reduced_until[number]
        if before > start:
            start, cause = before, owner
        end = start + costs.reduction_seconds(reduction, size)
        span = self.add(Span("all_reduce", start, end, None, reduction.stages[0], bytes=size, cause=cause))
        self.reduced_until[number] = (end, span)
        for port in ports:
            self.ports[port] = (end, span)
        for stage in reduction.stages:
            self.unreduced[stage] -= 1
            if end >= self.reduction_end.get(stage, (0.0, 0))[0]:
                self.reduction_end[stage] = (end, span)
            for device in costs.plan.devices[stage]:
                self.apply(device, stage)

    def end_of_tasks(self, device: int, index: int) -> None:
        self.finished_devices[device] = index
        for stage in self.stages_of[device]:
            self.apply(device, stage)

    def apply(self, device: int, stage: int) -> None:
        """Updates a stage's parameters on a device, once its tasks are over and its gradients reduced."""
        if device not in self.finished_devices or self.unreduced[stage] or (device, stage) in self.applied:
            return
        if not self.last_gradients:
            return
        self.applied.add((device, stage))
        seconds = self.costs.apply_seconds(stage, device)
        if not seconds:
            return
        cause = self.finished_devices[device]
        start = self.spans[cause].end
        if stage in self.reduction_end and self.reduction_end[stage][0] > start:
            start, cause = self.reduction_end[stage]
        previous = self.last[device]
        if previous is not None and self.spans[previous].end > start:
            start, cause = self.spans[previous].end, previous
        replica = self.costs.plan.devices[stage].index(device)
        span = Span("apply", start, start + seconds, device, stage, replica=replica, cause=cause)
        if self.shared[self.server[device]]:
            self.at(start, self.begin, (span,))
        else:
            self.last[device] = self.add(span)


@dataclass(eq=False)
class _Running:
    """What runs on a server whose devices share their cores: its span if undisturbed, and the seconds that are left."""

    span: Span
    task: Task | None
    left: float
