"""The simulation of a step: its devices, links and reductions, event by event."""

from __future__ import annotations

import copy
import heapq
import itertools
import math
import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from dapple_tf.simulation.cost import CostModel, Reduction
from dapple_tf.simulation.legs import Leg
from dapple_tf.simulation.shared_cores import Running, SharedCores
from dapple_tf.simulation.simulated_reductions import Reductions, gradient_ends
from dapple_tf.simulation.simulation import Simulation
from dapple_tf.simulation.step_tasks import (
    Lookups,
    Message,
    Relays,
    StepTasks,
    TaskMessages,
    TooSlowError,
    device_orders,
)
from dapple_tf.view.timeline import SEND, Span
from graph_passes.ir.tasks import Phase, Schedule, Task

_END = operator.attrgetter("end")
ROUNDING = 1e-9
"""Relative difference of times that may come from adding in another order."""
_RETURNING = (Phase.BACKWARD, Phase.INPUT_GRAD)
"""The phases that give gradients of what a stage receives."""


class SimulatedStep:
    """The state of a step that is being simulated; `run` does it.

    Tasks are numbers (`TaskNumbers`), which are positions in lists: most of planning is simulating.
    """

    def __init__(
        self,
        costs: CostModel,
        schedule: Schedule,
        reductions: Reductions,
        next_forward: bool,
        carried: Sequence[int] = (),
        limit: float = math.inf,
    ) -> None:
        self.costs, self.schedule, self.reductions, self.carried = costs, schedule, reductions, carried
        plan, cluster = costs.plan, costs.cluster
        orders, self.next = device_orders(schedule, next_forward)
        tasks = StepTasks(costs, {device: tasks for device, tasks in orders.items() if tasks}, schedule.split)
        self.orders, self.queues, self.numbers = tasks.orders, tasks.queues, tasks.numbers
        self.tasks, self.device_of = tasks.tasks, tasks.device_of
        self.seconds, self.waiting = tasks.seconds, tasks.waiting
        self.position = dict.fromkeys(self.orders, 0)
        self.free = dict.fromkeys(self.orders, True)
        self.last: dict[int, int | None] = dict.fromkeys(self.orders, None)
        self.spans: list[Span] = []
        self.events: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self.sequence = itertools.count()
        self.once = costs.profile.step_seconds
        self.now = self.computed = 0.0
        self.ports: dict[tuple[str, int], int] = {}
        self.port_free: list[float] = []
        self.port_last: list[int | None] = []
        self.routes: dict[tuple[int, int], tuple[int, int, float, float]] = {}
        self.relays = Relays(costs, self.next)
        self.messages = TaskMessages(costs, self.numbers, schedule.split)
        self.arrived: list[int | None] = [None] * self.numbers.count
        self.server = [device.server for device in cluster.devices]
        self.cores = SharedCores(cluster)
        # Updates: for each stage who makes them, whose gradients are complete, and who waits for a device.
        ends = gradient_ends(schedule, wait_free=plan.wait_free)
        self.ends = {self.numbers.of(task): stages for task, stages in ends.items()}
        self.members: dict[int, list[tuple[int, int]]] = {stage: [] for stage in range(plan.num_stages)}
        for (device, stage), task in schedule.last_gradients.items():
            self.members[stage].append((device, task.replica))
        self.complete: dict[tuple[int, int], int | None] = {}
        self.updates: dict[int, deque[tuple[int, int | None]]] = {device: deque() for device in self.orders}
        self.next_of_stage: dict[int, list[int]] = {}
        self.next_numbers = frozenset(map(self.numbers.of, self.next))
        self.lookups = Lookups(costs, self.numbers, self.orders, self.next, next_forward=next_forward)
        if next_forward:
            self._await_updates()
        for order in self.orders.values() if carried else ():
            for task in order:
                if task.stage in carried and task.phase is Phase.FORWARD:
                    self._await_update(task)
        for stage, forwards in self.lookups.of_stage.items():
            for number in forwards:
                self.waiting[number] += 1
                self.lookups.unready[number] += len(self.members[stage]) if next_forward or stage in carried else 0
        self.limit = limit * (1 + ROUNDING) - self.once
        self.rest = tasks.rest(self.limit, carried) if limit < math.inf else {}
        # Tasks that all-reduces or updates hold up may come earlier if backwards are cut: then nothing is certain.
        self.cuttable = plan.wait_free and not plan.backward_cuts and not carried
        # Tasks before those that complete gradients: until one begins, nothing depends on reductions.
        self.watched: frozenset[int] = frozenset()
        self.saved: SimulatedStep | None = None

    def _await_updates(self) -> None:
        """Makes the next step's forwards wait for their stage's update; waits for forwards alone are already met."""
        for task in sorted(self.next):
            if any(replica == task.replica for _, replica in self.members[task.stage]):
                self._await_update(task)
            for message in self.messages.of(task):
                self._already_came(task.micro_batch, message)

    def _already_came(self, micro_batch: int, message: Message) -> None:
        """Notes that an earlier step's message has come, and what relays made of it."""
        first, _, leg = message
        receiver = first + micro_batch * self.numbers.stride
        if receiver not in self.next_numbers:
            self.waiting[receiver] -= 1
        task = self.tasks[receiver]
        if leg is not None and leg.onward and task is not None:
            for onward in self.relays.come(leg, micro_batch, task.replica, backward=False):
                for after in self.messages.over(onward, task):
                    self._already_came(micro_batch, after)

    def _await_update(self, task: Task) -> None:
        number = self.numbers.of(task)
        self.waiting[number] += 1
        self.next_of_stage.setdefault(task.stage, []).append(number)

    # ---- events

    def at(self, time: float, action: Callable[..., None], data: tuple[Any, ...], turn: int = 0) -> None:
        """Schedules an event; among events at one time, the lowest turn comes first."""
        heapq.heappush(self.events, (time, turn, next(self.sequence), action, data))

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
        for number, unready in self.lookups.unready.items():
            if not unready:
                self.look_up(number, None)
        for device in self.orders:
            self.start(device)
        return self.go_on()

    def go_on(self) -> Simulation:
        """Runs all events from the present state on."""
        events, pop = self.events, heapq.heappop
        while events:
            self.now, _, _, action, data = pop(events)
            action(*data)
        stuck = [tasks[self.position[d]] for d, tasks in self.orders.items() if self.position[d] < len(tasks)]
        if stuck:
            raise ValueError(f"the schedule deadlocks: {', '.join(map(str, stuck[:4]))} wait for ever")
        end = max(map(_END, self.spans), default=0.0)
        return Simulation(end + self.costs.profile.step_seconds, tuple(self.spans), self.costs)

    # ---- the state as data

    def keep(self) -> None:
        """Lets `run` keep the state before all tasks that complete gradients (`saved`), unless updates are carried."""
        before = {
            queue[position - 1] if position else None
            for queue in self.queues.values()
            for position, number in enumerate(queue)
            if number in self.ends
        }
        if None not in before and not self.carried:
            self.watched = frozenset(number for number in before if number is not None)

    def save(self) -> None:
        """Keeps a copy of the state."""
        self.saved = self._copied()

    def resumed(self, costs: CostModel) -> SimulatedStep:
        """Returns a copy of a kept state that goes on with costs that differ by ``backward_cuts`` only."""
        other = self._copied()
        other.costs, other.reductions = costs, Reductions(costs, other.schedule)
        other.seconds = other.seconds.copy()
        for number in other.ends:
            task, device = other.tasks[number], other.device_of[number]
            assert task is not None
            other.seconds[number] = costs.seconds(task, device)
        other.rest = {}
        return other

    def _copied(self) -> SimulatedStep:
        """Returns a copy of the state, without the progress of reductions."""
        other = copy.copy(self)
        names = ("position", "free", "last", "spans", "ports", "port_free", "port_last", "routes")
        for name in (*names, "waiting", "arrived", "complete"):
            setattr(other, name, copy.copy(getattr(self, name)))
        other.relays, other.lookups = self.relays.copied(), self.lookups.copied()
        other.updates = {device: deque(waiting) for device, waiting in self.updates.items()}
        other.cores = self.cores.copied()
        number = next(self.sequence)
        self.sequence, other.sequence = itertools.count(number + 1), itertools.count(number + 1)
        # Actions are methods of the step itself.
        other.events = [
            (time, turn, order, getattr(other, action.__name__), data)
            for time, turn, order, action, data in self.events
        ]
        return other

    # ---- tasks

    def start(self, device: int) -> None:
        """Starts the device's next task if the device is free and the inputs are there; else a waiting update."""
        if not self.free[device]:
            return
        queue, position = self.queues[device], self.position[device]
        if position == len(queue) or self.waiting[queue[position]]:
            if self.updates[device]:
                self.at(self.now, self.update, (device,), 1)  # unless a task becomes ready at this very time
            return
        number, now = queue[position], self.now
        if self.rest and now + self.rest[device][position] > self.limit:
            raise TooSlowError
        self.position[device] = position + 1
        self.free[device] = False
        if number in self.watched:
            self.watched = frozenset()
            self.at(now, self.save, (), -1)
        task = self.orders[device][position]
        seconds = self.seconds[number]
        cause, came = self.last[device], self.arrived[number]
        if came is not None and (cause is None or self.spans[came].end > self.spans[cause].end):
            cause = came
        end = now + seconds
        span = Span(
            task.phase._value_, now, end, device, task.stage, task.micro_batch, task.replica, None, 0.0, cause
        )  # fmt: skip
        if self.cores.shared[self.server[device]]:
            self.begin(span, number)
            return
        index = len(self.spans)
        self.spans.append(span)
        # Before its last bucket: messages go first.
        heapq.heappush(self.events, (end, 0, next(self.sequence), self.finished, (device, number, index)))
        if number in self.ends:
            for unit, part in self.early(number):
                self.at(now + part * seconds, self.ready, (unit, index))

    def add(self, span: Span) -> int:
        """Records a span; returns its position."""
        self.spans.append(span)
        return len(self.spans) - 1

    def finished(self, device: int, number: int, index: int) -> None:
        """Ends a task: sends its results, and lets its device continue."""
        self.computed = self.now
        self.last[device] = index
        self.free[device] = True
        self.send(device, number, index)
        for forward in self.lookups.after.get(number, ()) if self.lookups.after else ():
            self.lookable(forward, index)
        for stage in self.ends.get(number, ()):
            if stage in self.carried:
                continue
            self.complete[device, stage] = index
            for unit in self.reductions.of_stage[stage]:
                if self.reductions.units[unit].part == 1.0:
                    self.ready(unit, index)
            self.updatable(device, stage, index)
        self.start(device)

    # ---- shared cores

    def begin(self, span: Span, task: int | None = None) -> None:
        """Starts work that would take the span's time undisturbed."""
        assert span.device is not None
        server, seconds = self.server[span.device], span.end - span.start
        early = [] if task is None else self.early(task)
        marks = deque(
            ((1 - part) * seconds, unit) for unit, part in sorted(early, key=lambda entry: (entry[1], entry[0]))
        )
        index = self.add(span) if marks else None
        self.cores.begin(server, Running(span, task, seconds, marks, index), self.now)
        self.next_of(server)

    def next_of(self, server: int) -> None:
        """Schedules the next end of a piece of a server's work, if nothing else starts or ends before."""
        following = self.cores.next(server, self.now)
        if following is not None:
            time, version = following
            self.at(time, self.shared_event, (server, version))

    def shared_event(self, server: int, version: int) -> None:
        """Ends the predicted tasks or pieces, unless the prediction is outdated."""
        ended = [*self.cores.over(server, version, self.now)]
        for item, unit in ended:
            if unit is not None:
                self.at(self.now, self.ready, (unit, item.index))
                continue
            span = item.span._replace(end=self.now)
            if item.index is None:
                index = self.add(span)
            else:
                index, self.spans[item.index] = item.index, span
            updated = item.task is None
            done, data = (self.is_updated, (item.span.stage,)) if updated else (self.finished, (item.task,))
            self.at(self.now, done, (item.span.device, *data, index))
        if ended:
            self.next_of(server)

    # ---- transfers

    def send(self, device: int, number: int, index: int) -> None:
        """Sends a task's results, and releases what waited for the task itself."""
        task = self.orders[device][self.position[device] - 1]
        begun = number in self.next_numbers
        shift = task.micro_batch * self.numbers.stride
        for first, size, leg in self.messages.of(task):
            receiver = first + shift
            if not begun or receiver in self.next_numbers or self.relays.awaited(leg, task.micro_batch):
                self.transfer(task, device, index, receiver, size, leg, begun)
        for leg in self.costs.incoming[task.stage] if self.costs.plan.relays and task.phase in _RETURNING else ():
            if leg.sums:
                self.hand_on(leg, task, index, begun)

    def landed(self, number: int, leg: Leg, begun: bool, index: int) -> None:
        """Ends the way of a message over a leg to or from a relay."""
        receiver = self.tasks[number]
        assert receiver is not None
        backward = receiver.phase is not Phase.FORWARD
        if backward and leg.source is not None:
            self.hand_on(self.costs.legs[leg.source], receiver, index, begun)
            return
        if not begun or number in self.next_numbers:
            self.arrive(number, index)
        if leg.onward and not backward:
            self.hand_on(leg, receiver, index, begun)

    def hand_on(self, leg: Leg, relay: Task, index: int, begun: bool) -> None:
        """Notes something that a relay's slice waits for; it leaves if that was the last."""
        backward = relay.phase is not Phase.FORWARD
        source = self.costs.plan.devices[relay.stage][relay.replica]
        shift = relay.micro_batch * self.numbers.stride
        for onward in self.relays.come(leg, relay.micro_batch, relay.replica, backward=backward, begun=begun):
            for first, size, _ in self.messages.over(onward, relay):
                receiver = first + shift
                if not begun or receiver in self.next_numbers or self.relays.awaited(onward, relay.micro_batch):
                    self.transfer(relay, source, index, receiver, size, onward, begun)

    def port(self, kind: str, owner: int) -> int:
        """Returns the number of a port of a device, or of a server's network card."""
        if (kind, owner) not in self.ports:
            self.ports[kind, owner] = len(self.ports)
            self.port_free.append(0.0)
            self.port_last.append(None)
        return self.ports[kind, owner]

    def route(self, source: int, target: int) -> tuple[int, int, float, float]:
        """Returns the ports between two devices, the bandwidth and the latency."""
        link = self.costs.cluster.link(source, target)
        a, b = self.server[source], self.server[target]
        if a == b:
            return self.port("out", source), self.port("in", target), link.bandwidth, link.latency
        return self.port("card out", a), self.port("card in", b), link.bandwidth, link.latency

    def transfer(
        self, task: Task, source: int, index: int, receiver: int, size: float, leg: Leg | None, begun: bool
    ) -> None:
        """Sends a message from a task, on a device, to another task."""
        target = self.device_of[receiver]
        if target is None:
            raise ValueError(f"{task} sends a message to a task that no device runs in schedule {self.schedule.name!r}")
        relayed = leg is not None and (bool(leg.onward) or leg.source is not None)
        if source == target:
            if leg is not None and relayed:
                self.landed(receiver, leg, begun, index)
            else:
                self.arrive(receiver, index)
            return
        route = self.routes.get((source, target))
        if route is None:
            route = self.routes[source, target] = self.route(source, target)
        first, second, bandwidth, latency = route
        start, cause = self.reserve((first, second), self.now, index)
        if self.rest and self.cuttable and start > self.now and self._reduces(first, second):
            self.rest = {}
        busy = size / bandwidth
        end = start + busy + latency
        span = len(self.spans)
        own = (source, task.stage, task.micro_batch, task.replica, target, size, cause)
        self.spans.append(Span("send", start, end, *own, leg=None if leg is None else leg.number))
        if busy:
            self.port_free[first] = self.port_free[second] = start + busy
            self.port_last[first] = self.port_last[second] = span
        if relayed:
            self.at(end, self.landed, (receiver, leg, begun, span))
        else:
            heapq.heappush(self.events, (end, 0, next(self.sequence), self.arrive, (receiver, span)))

    def _reduces(self, *ports: int) -> bool:
        """Returns whether ports are reserved for an all-reduce."""
        users = (self.port_last[port] for port in ports if self.port_free[port] > self.now)
        return any(user is not None and self.spans[user].kind == "all_reduce" for user in users)

    def reserve(self, ports: Sequence[int], ready: float, cause: int | None) -> tuple[float, int | None]:
        """Returns when all of these ports are free, from ``ready`` on, and what they waited for."""
        start = ready
        for port in ports:
            if self.port_free[port] > start:
                start, cause = self.port_free[port], self.port_last[port]
        return start, cause

    def arrive(self, number: int, index: int | None) -> None:
        """Notes that something that a task waits for has arrived."""
        self.waiting[number] -= 1
        self.arrived[number] = index  # messages come in order of time
        device = self.device_of[number]
        if not self.waiting[number] and device is not None:
            self.start(device)

    # ---- reductions and updates

    def early(self, task: int) -> list[tuple[int, float]]:
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
        ports = self.ports_of(reduction)
        start, cause = self.reserve(ports, self.now, index)
        end = start + self.costs.reduction_seconds(reduction, size)
        stage = reduction.stages[0]
        span = self.add(Span("all_reduce", start, end, None, stage, bytes=size, cause=cause, reduction=number))
        for port in ports:
            self.port_free[port], self.port_last[port] = end, span
        self.at(end, self.is_reduced, (unit, span))

    def ports_of(self, reduction: Reduction) -> list[int]:
        """Returns the ports that a reduction takes: of all its devices, or of their servers if there are several."""
        servers = {self.server[device] for device in reduction.devices}
        if len(servers) > 1:
            return [self.port(kind, server) for server in sorted(servers) for kind in ("card out", "card in")]
        return [self.port(kind, device) for device in reduction.devices for kind in ("out", "in")]

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
        queue, position = self.queues[device], self.position[device]
        if not self.free[device] or not self.updates[device]:
            return
        if position < len(queue) and not self.waiting[queue[position]]:
            return
        stage, cause = self.updates[device].popleft()
        self.free[device] = False
        previous = self.last[device]
        if previous is not None and (cause is None or self.spans[previous].end > self.spans[cause].end):
            cause = previous
        replica = next(replica for member, replica in self.members[stage] if member == device)
        end = self.now + self.costs.apply_seconds(stage, device)
        span = Span("apply", self.now, end, device, stage, replica=replica, cause=cause)
        if self.cores.shared[self.server[device]]:
            self.begin(span)
        else:
            self.at(end, self.is_updated, (device, stage, self.add(span)))

    def is_updated(self, device: int, stage: int, index: int) -> None:
        """Ends an update."""
        self.last[device] = index
        self.free[device] = True
        queue, position = self.queues[device], self.position[device]
        if self.rest and self.cuttable and position < len(queue) and not self.waiting[queue[position]]:
            self.rest = {}
        self.release(device, stage, index)
        self.start(device)

    def release(self, device: int, stage: int, index: int | None) -> None:
        """Releases the next step's forwards of a stage."""
        waits = self.next_of_stage.get(stage, ())
        for number in self.lookups.of_stage.get(stage, ()) if waits else ():
            self.lookable(number, index)
        for number in waits:
            task = self.tasks[number]
            if task is not None and (device, task.replica) in self.members[stage]:
                self.arrive(number, index)

    # ---- rows in shards

    def lookable(self, number: int, index: int | None) -> None:
        """Notes that something is over for which the lookup for a forward waits."""
        self.lookups.unready[number] -= 1
        if not self.lookups.unready[number]:
            self.look_up(number, index)

    def look_up(self, number: int, index: int | None) -> None:
        """Sends a forward's rows from their keepers, once its device's link is free.

        All replicas look up about as much, so that links are as busy with what devices send.
        """
        task, target = self.tasks[number], self.device_of[number]
        assert task is not None and target is not None
        busy, latency, across, source, size = self.costs.lookup(task)
        port = self.port("card in", self.server[target]) if across else self.port("in", target)
        start, cause = self.reserve([port], self.now, index)
        where = (source, task.stage, task.micro_batch, task.replica, target)
        span = self.add(Span(SEND, start, start + busy + latency, *where, size, cause))
        if busy:
            self.port_free[port], self.port_last[port] = start + busy, span
        self.at(start + busy + latency, self.arrive, (number, span))
