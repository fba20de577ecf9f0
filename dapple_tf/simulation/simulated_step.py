"""The simulation of a step: its devices, links and reductions, event by event."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.legs import Leg
from dapple_tf.simulation.simulated_reductions import Reductions, gradient_ends, last_gradients
from dapple_tf.simulation.simulated_relays import Parcel, Relays
from dapple_tf.simulation.simulation import Simulation
from dapple_tf.view.timeline import Span
from graph_passes.ir.tasks import Phase, Schedule, Task


def device_orders(
    schedule: Schedule, next_forward: bool = False
) -> tuple[Mapping[int, tuple[Task, ...]], frozenset[Task]]:
    """Maps each device to its simulated tasks; returns also which of these are the next step's.

    With ``next_forward`` these are the forwards before a device's first backward, moved to the end.
    """
    orders: dict[int, tuple[Task, ...]] = {}
    following: set[Task] = set()
    for device, tasks in schedule.orders.items():
        moved = [*itertools.takewhile(lambda task: task.phase is Phase.FORWARD, tasks)] if next_forward else []
        following.update(moved)
        orders[device] = (*tasks[len(moved) :], *moved)
    return orders, frozenset(following)


_Ports = tuple[tuple[str, int], tuple[str, int]]
_RETURNING = (Phase.BACKWARD, Phase.INPUT_GRAD)
"""The phases that give gradients of what a stage receives."""


class SimulatedStep:
    """The state of a step that is being simulated; `run` does it."""

    def __init__(
        self,
        costs: CostModel,
        schedule: Schedule,
        reductions: Reductions,
        next_forward: bool,
        carried: Sequence[int] = (),
    ) -> None:
        self.costs, self.schedule, self.reductions, self.carried = costs, schedule, reductions, carried
        plan, cluster = costs.plan, costs.cluster
        orders, self.next = device_orders(schedule, next_forward)
        self.orders = {device: tasks for device, tasks in orders.items() if tasks}
        self.position = dict.fromkeys(self.orders, 0)
        self.free = dict.fromkeys(self.orders, True)
        self.last: dict[int, int | None] = dict.fromkeys(self.orders, None)
        self.spans: list[Span] = []
        self.events: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.numbers = itertools.count()
        self.now = 0.0
        self.ports: dict[tuple[str, int], tuple[float, int | None]] = {}
        self.routes: dict[tuple[int, int], tuple[_Ports, float, float]] = {}
        self.messages: dict[tuple[int, int, int, str], list[Parcel]] = {}
        self.relays = Relays(costs, schedule.split, self.next)
        self.incoming: dict[int, list[Leg]] = {stage: [] for stage in range(plan.num_stages)}
        self.outgoing: dict[int, list[Leg]] = {stage: [] for stage in range(plan.num_stages)}  # of what they make
        for leg in costs.legs:
            self.incoming[leg.receiver].append(leg)
            if leg.source is None:
                self.outgoing[leg.sender].append(leg)
        self.split = schedule.split
        self.device_of = {task: device for device, tasks in self.orders.items() for task in tasks}
        self.followers: dict[Task, list[Task]] = {}
        for task, other in schedule.after.items():
            self.followers.setdefault(other, []).append(task)
        self.waiting: dict[Task, int] = dict(self._waits())
        self.arrived: dict[Task, int | None] = {}
        # Servers whose devices share their cores: running tasks by device.
        self.server = [device.server for device in cluster.devices]
        self.capacity = [cluster.capacity(server) for server in range(cluster.num_servers)]
        self.shared = [self.capacity[s] < len(cluster.devices_of(s)) for s in range(cluster.num_servers)]
        self.running: list[list[_Running]] = [[] for _ in range(cluster.num_servers)]
        self.updated = [0.0] * cluster.num_servers
        self.version = [0] * cluster.num_servers
        # Updates: for each stage who makes them, whose gradients are complete, and who waits for a device.
        self.ends = gradient_ends(schedule, wait_free=plan.wait_free)
        self.members: dict[int, list[tuple[int, int]]] = {stage: [] for stage in range(plan.num_stages)}
        for (device, stage), task in last_gradients(schedule).items():
            self.members[stage].append((device, task.replica))
        self.complete: dict[tuple[int, int], int | None] = {}
        self.updates: dict[int, deque[tuple[int, int | None]]] = {device: deque() for device in self.orders}
        self.next_of_stage: dict[int, list[Task]] = {}
        if next_forward:
            self._await_updates()
        for task in self.device_of if carried else ():
            if task.stage in carried and task.phase is Phase.FORWARD:
                self.waiting[task] += 1
                self.next_of_stage.setdefault(task.stage, []).append(task)

    def _waits(self) -> Iterator[tuple[Task, int]]:
        """Yields how many messages and other tasks each task waits for."""
        costs = self.costs
        counts: dict[tuple[int, int, bool], list[int]] = {}
        for task in self.device_of:
            number = int(task in self.schedule.after)
            if task.phase is Phase.WEIGHT_GRAD:
                yield task, number + 1
                continue
            backward = task.phase is not Phase.FORWARD
            key = (task.stage, costs.micro_batches[task.micro_batch].size, backward)
            if key not in counts:
                numbers = [0] * len(costs.plan.devices[task.stage])
                for leg in self.outgoing[task.stage] if backward else self.incoming[task.stage]:
                    for message in costs.leg_messages(leg, task.micro_batch, backward=backward):
                        numbers[message.receiver] += 1
                counts[key] = numbers
            yield task, number + counts[key][task.replica]

    def _await_updates(self) -> None:
        """Makes the next step's forwards wait for their stage's update; waits for forwards alone are already met."""
        known = Relays(self.costs, self.split, self.next)
        for task in sorted(self.next):
            if any(replica == task.replica for _, replica in self.members[task.stage]):
                self.waiting[task] += 1
                self.next_of_stage.setdefault(task.stage, []).append(task)
            for parcel in self.sent(task):
                self._already_came(known, task, parcel)
            for follower in self.followers.get(task, ()):
                if follower not in self.next:
                    self.waiting[follower] -= 1

    def _already_came(self, known: Relays, sender: Task, parcel: Parcel) -> None:
        """Notes that an earlier step's message has come, and what relays made of it."""
        receiver = Task(parcel.stage, parcel.phase, sender.micro_batch, parcel.replica)
        if receiver not in self.next:
            self.waiting[receiver] -= 1
        if parcel.leg is not None and parcel.leg.onward:
            for leg in known.come(parcel.leg, receiver.micro_batch, receiver.replica, backward=False):
                for after in known.parcels(leg, receiver):
                    self._already_came(known, receiver, after)

    # ---- events

    def at(self, time: float, action: Callable[..., None], data: tuple[Any, ...], turn: int = 0) -> None:
        """Schedules an event; among events at one time, the lowest turn comes first."""
        heapq.heappush(self.events, (time, turn, next(self.numbers), action, data))

    def run(self) -> Simulation:
        """Runs all events, in order of time."""
        for stage in self.carried:
            for device, _ in self.members[stage]:
                self.complete[device, stage] = None
            for unit in self.reductions.of_stage[stage]:
                if not self.reductions.units[unit].before:
                    self.reduce(unit, None)
            for device, _ in self.members[stage]:
                self.updatable(device, stage, None)
        for device in self.orders:
            self.start(device)
        while self.events:
            self.now, _, _, action, data = heapq.heappop(self.events)
            action(*data)
        stuck = [tasks[self.position[d]] for d, tasks in self.orders.items() if self.position[d] < len(tasks)]
        if stuck:
            raise ValueError(f"the schedule deadlocks: {', '.join(map(str, stuck[:4]))} wait for ever")
        end = max((span.end for span in self.spans), default=0.0)
        return Simulation(end + self.costs.profile.step_seconds, tuple(self.spans), self.costs)

    def start(self, device: int) -> None:
        """Starts the device's next task if the device is free and the inputs are there; else a waiting update."""
        if not self.free[device]:
            return
        tasks, position = self.orders[device], self.position[device]
        if position == len(tasks) or self.waiting[tasks[position]]:
            if self.updates[device]:
                self.at(self.now, self.update, (device,), 1)  # unless a task becomes ready at this very time
            return
        task = tasks[position]
        self.position[device] += 1
        self.free[device] = False
        seconds = self.costs.seconds(task, device)
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
            for unit, part in self.early(task):
                self.at(self.now + part * seconds, self.ready, (unit, index))

    def add(self, span: Span) -> int:
        """Records a span; returns its position."""
        self.spans.append(span)
        return len(self.spans) - 1

    def finished(self, device: int, task: Task, index: int) -> None:
        """Ends a task: sends its results, and lets its device continue."""
        self.last[device] = index
        self.free[device] = True
        self.send(task, index)
        for stage in self.ends.get(task, ()):
            if stage in self.carried:
                continue
            self.complete[device, stage] = index
            for unit in self.reductions.of_stage[stage]:
                if self.reductions.units[unit].part == 1.0:
                    self.ready(unit, index)
            self.updatable(device, stage, index)
        self.start(device)

    # ---- shared cores

    def begin(self, span: Span, task: Task | None = None) -> None:
        """Starts work that would take the span's time undisturbed."""
        assert span.device is not None
        server, seconds = self.server[span.device], span.end - span.start
        self.advance(server)
        early = [] if task is None else self.early(task)
        marks = deque(
            ((1 - part) * seconds, unit) for unit, part in sorted(early, key=lambda entry: (entry[1], entry[0]))
        )
        index = self.add(span) if marks else None
        self.running[server].append(_Running(span, task, seconds, marks, index))
        self.next_of(server)

    def advance(self, server: int) -> None:
        """Updates the remaining work of a server's tasks."""
        running = self.running[server]
        if running:
            rate = min(1.0, self.capacity[server] / len(running))
            for item in running:
                item.left -= (self.now - self.updated[server]) * rate
        self.updated[server] = self.now

    def next_of(self, server: int) -> None:
        """Predicts which task of a server ends next, if nothing else starts or ends before."""
        self.version[server] += 1
        running = self.running[server]
        if running:
            rate = min(1.0, self.capacity[server] / len(running))
            left = min(item.next for item in running)
            self.at(self.now + max(0.0, left) / rate, self.shared_event, (server, self.version[server]))

    def shared_event(self, server: int, version: int) -> None:
        """Ends the predicted tasks or pieces, unless the prediction is outdated."""
        if version != self.version[server]:
            return
        self.advance(server)
        running = self.running[server]
        least = min(item.next for item in running)
        for item in [item for item in running if item.next <= least + 1e-9 * (item.span.end - item.span.start)]:
            if item.marks:
                _, unit = item.marks.popleft()
                self.at(self.now, self.ready, (unit, item.index))
                continue
            running.remove(item)
            span = item.span._replace(end=self.now)
            if item.index is None:
                index = self.add(span)
            else:
                index, self.spans[item.index] = item.index, span
            done, data = (self.finished, (item.task,)) if item.task else (self.is_updated, (item.span.stage,))
            self.at(self.now, done, (item.span.device, *data, index))
        self.next_of(server)

    # ---- transfers

    def send(self, task: Task, index: int) -> None:
        """Sends a task's results, and releases what waited for the task itself."""
        begun = task in self.next
        for parcel in self.sent(task):
            self.dispatch(task, index, parcel, begun)
        for leg in self.incoming[task.stage] if task.phase in _RETURNING else ():
            if self.relays.sums(leg):
                self.hand_on(leg, task, index, begun)
        for follower in self.followers.get(task, ()):
            if not begun or follower in self.next:
                self.arrive(follower, index)

    def sent(self, task: Task) -> list[Parcel]:
        """Returns what a task sends by itself."""
        key = (task.stage, task.replica, self.costs.micro_batches[task.micro_batch].size, task.phase._value_)
        if key not in self.messages:
            self.messages[key] = list(self._sent(task))
        return self.messages[key]

    def _sent(self, task: Task) -> Iterator[Parcel]:
        if task.phase is Phase.FORWARD:
            for leg in self.outgoing[task.stage]:
                yield from self.relays.parcels(leg, task)
        elif task.phase is not Phase.WEIGHT_GRAD:
            # The nearest stage first, and what its backward waits for before what it hands on.
            for leg in sorted(self.incoming[task.stage], key=lambda leg: -leg.sender):
                if not self.relays.sums(leg):
                    yield from self.relays.parcels(leg, task)
        if task.phase is Phase.INPUT_GRAD:
            samples = self.costs.slices(task.stage, task.micro_batch)[task.replica].size
            size = self.costs.delayed_bytes(task.stage, samples)
            yield Parcel(None, task.stage, Phase.WEIGHT_GRAD, task.replica, size)

    def dispatch(self, task: Task, index: int, parcel: Parcel, begun: bool) -> None:
        """Sends a parcel; what the next step's forwards make goes only to others of them."""
        receiver = Task(parcel.stage, parcel.phase, task.micro_batch, parcel.replica)
        if not begun or receiver in self.next or self.relays.awaited(parcel.leg, task.micro_batch):
            self.transfer(task, index, receiver, parcel, begun)

    def landed(self, receiver: Task, leg: Leg, begun: bool, index: int) -> None:
        """Ends the way of a message over a leg to or from a relay."""
        backward = receiver.phase is not Phase.FORWARD
        if backward and leg.source is not None:
            self.hand_on(self.costs.legs[leg.source], receiver, index, begun)
            return
        if not begun or receiver in self.next:
            self.arrive(receiver, index)
        if leg.onward and not backward:
            self.hand_on(leg, receiver, index, begun)

    def hand_on(self, leg: Leg, relay: Task, index: int, begun: bool) -> None:
        """Notes something that a relay's slice waits for; it leaves if that was the last."""
        backward = relay.phase is not Phase.FORWARD
        for onward in self.relays.come(leg, relay.micro_batch, relay.replica, backward=backward):
            for parcel in self.relays.parcels(onward, relay):
                self.dispatch(relay, index, parcel, begun)

    def route(self, source: int, target: int) -> tuple[_Ports, float, float]:
        """Returns the ports between two devices, with their bandwidth and latency."""
        if (source, target) not in self.routes:
            link = self.costs.cluster.link(source, target)
            a, b = self.server[source], self.server[target]
            ports = (("out", source), ("in", target)) if a == b else (("card out", a), ("card in", b))
            self.routes[source, target] = (ports, link.bandwidth, link.latency)
        return self.routes[source, target]

    def transfer(self, task: Task, index: int, receiver: Task, parcel: Parcel, begun: bool) -> None:
        """Sends a message from the device of a task to that of another."""
        source, target = self.device_of[task], self.device_of[receiver]
        leg, size = parcel.leg, parcel.bytes
        relayed = leg is not None and (leg.onward or leg.source is not None)
        if source == target:
            if leg is not None and relayed:
                self.landed(receiver, leg, begun, index)
            else:
                self.arrive(receiver, index)
            return
        ports, bandwidth, latency = self.route(source, target)
        start, cause = self.reserve(ports, self.now, index)
        busy = size / bandwidth
        end = start + busy + latency
        own = (source, task.stage, task.micro_batch, task.replica, target, size, cause)
        span = self.add(Span("send", start, end, *own, leg=None if leg is None else leg.number))
        if busy:
            for port in ports:
                self.ports[port] = (start + busy, span)
        if relayed:
            self.at(end, self.landed, (receiver, leg, begun, span))
        else:
            self.at(end, self.arrive, (receiver, span))

    def reserve(self, ports: Sequence[tuple[str, int]], ready: float, cause: int | None) -> tuple[float, int | None]:
        """Returns when all of these ports are free, from ``ready`` on, and what they waited for."""
        start = ready
        for port in ports:
            free, last = self.ports.get(port, (0.0, None))
            if free > start:
                start, cause = free, last
        return start, cause

    def arrive(self, task: Task, index: int | None) -> None:
        """Notes that something that a task waits for has arrived."""
        self.waiting[task] -= 1
        self.arrived[task] = index  # messages come in order of time
        if not self.waiting[task]:
            self.start(self.device_of[task])

    # ---- reductions and updates

    def early(self, task: Task) -> list[tuple[int, float]]:
        """Returns the units whose gradients are complete before a task's end, and after which fraction of its time."""
        return [
            (unit, part)
            for stage in self.ends.get(task, ())
            if stage not in self.carried
            for unit in self.reductions.of_stage[stage]
            if (part := self.reductions.units[unit].part) < 1.0
        ]

    def ready(self, unit: int, index: int) -> None:
        """Notes that one member has the gradients of a unit."""
        if self.reductions.ready(unit):
            self.reduce(unit, index)

    def reduce(self, unit: int, index: int | None) -> None:
        """Reduces a unit whose turn it is, once the links of its devices are free."""
        number, size = self.reductions.units[unit].number, self.reductions.units[unit].bytes
        reduction = self.costs.reductions[number]
        servers = {self.server[device] for device in reduction.devices}
        if len(servers) > 1:
            ports = [(kind, server) for server in sorted(servers) for kind in ("card out", "card in")]
        else:
            ports = [(kind, device) for device in reduction.devices for kind in ("out", "in")]
        start, cause = self.reserve(ports, self.now, index)
        end = start + self.costs.reduction_seconds(reduction, size)
        stage = reduction.stages[0]
        span = self.add(Span("all_reduce", start, end, None, stage, bytes=size, cause=cause, reduction=number))
        for port in ports:
            self.ports[port] = (end, span)
        self.at(end, self.is_reduced, (unit, span))

    def is_reduced(self, unit: int, index: int) -> None:
        """Ends a reduction: others have their turn, and parameters can be updated."""
        stages = self.costs.reductions[self.reductions.units[unit].number].stages
        for following in self.reductions.over(unit, stages):
            self.reduce(following, index)
        for stage in stages:
            for device, _ in self.members[stage]:
                self.updatable(device, stage, index)

    def updatable(self, device: int, stage: int, index: int | None) -> None:
        """Puts a stage's update in the queue of its device once its gradients are complete and reduced."""
        if (device, stage) not in self.complete or self.reductions.unreduced[stage]:
            return
        seconds = self.costs.apply_seconds(stage, device)
        if not seconds:
            self.release(device, stage, index)
            return
        self.updates[device].append((stage, index))
        if self.free[device]:
            self.at(self.now, self.update, (device,), 1)

    def update(self, device: int) -> None:
        """Runs the longest-waiting update if the device is still idle."""
        tasks, position = self.orders[device], self.position[device]
        if not self.free[device] or not self.updates[device]:
            return
        if position < len(tasks) and not self.waiting[tasks[position]]:
            return
        stage, cause = self.updates[device].popleft()
        self.free[device] = False
        previous = self.last[device]
        if previous is not None and (cause is None or self.spans[previous].end > self.spans[cause].end):
            cause = previous
        replica = next(replica for member, replica in self.members[stage] if member == device)
        end = self.now + self.costs.apply_seconds(stage, device)
        span = Span("apply", self.now, end, device, stage, replica=replica, cause=cause)
        if self.shared[self.server[device]]:
            self.begin(span)
        else:
            self.at(end, self.is_updated, (device, stage, self.add(span)))

    def is_updated(self, device: int, stage: int, index: int) -> None:
        """Ends an update."""
        self.last[device] = index
        self.free[device] = True
        self.release(device, stage, index)
        self.start(device)

    def release(self, device: int, stage: int, index: int | None) -> None:
        """Releases the next step's forwards of a stage."""
        for task in self.next_of_stage.get(stage, ()):
            if (device, task.replica) in self.members[stage]:
                self.arrive(task, index)


@dataclass(eq=False)
class _Running:
    """A running task on a server whose devices share their cores.

    Attributes:
        span: as if it were undisturbed.
        task: the task; None for an update.
        left: the remaining undisturbed seconds.
        marks: what is left when each of its pieces but the last ends, and the unit that this completes, in order.
        index: position of its span; None if that isn't recorded before its end.
    """

    span: Span
    task: Task | None
    left: float
    marks: deque[tuple[float, int]]
    index: int | None

    @property
    def next(self) -> float:
        """The undisturbed seconds until its next piece ends, or itself."""
        return self.left - self.marks[0][0] if self.marks else self.left
