"""Simulates one training step: the Schedule itself, task by task, on the devices and links of a cluster."""

from __future__ import annotations

import copy
import heapq
import itertools
import math
import operator
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.simulation.activities import JOIN, ActivityGraph
from dapple_tf.simulation.cost import CostModel, Leg, Message
from dapple_tf.simulation.shared_cores import Running, SharedCores
from dapple_tf.simulation.simulation import Simulation
from dapple_tf.view.timeline import ALL_REDUCE, SEND, Span
from graph_passes.ir.tasks import Phase, Schedule, Task, inputs

__all__ = ["Simulation", "run", "run_activities", "simulate", "tried"]

_END = operator.attrgetter("end")
_ROUNDING = 1e-9
"""Relative difference of times that may come from adding in another order."""
_NOTHING = 1e-9
"""Bytes of the smallest piece of gradients: how a backward is cut doesn't matter for a bound."""

F, B, BX, BW = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD


class TooSlowError(Exception):
    """A step certainly takes longer than the limit of its simulation."""


def simulate(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: Schedule | None = None,
    reduction_order: Sequence[int] | None = None,
    next_forward: bool = False,
) -> Simulation:
    """Simulates one training step of a plan.

    Each device runs its tasks in the Schedule's order, each as soon as its inputs have arrived. Transfers go from
    replica to replica; between two devices of a server over their own ports, between servers over the servers' network
    cards, each of which sends one message at a time and receives one, first come, first served. Data that stays on a
    device arrives at once.

    A parameter group's gradients are reduced when all replicas of its stages have computed them, whatever tasks remain,
    those of each piece of its last backward (``plan.backward_cuts``) by themselves;
    with ``plan.wait_free=False`` when all tasks of these devices are over. A device takes part in one reduction
    at a time, in the order of a real step (:func:`graph_passes.ir.tasks.reduction_order`). A stage's parameters are
    updated when its gradients are reduced and its device has no ready task. A schedule without backwards
    reduces and updates nothing. With ``plan.carried_updates`` a step first reduces and updates what the previous step
    has left, and the forwards of these stages wait for it.

    On a server whose capacity is below its number of devices, tasks that run at the same time slow each other down.

    Args:
        plan: the plan.
        profile: its layers' costs.
        cluster: the devices and links; unknown links are free.
        schedule: run this schedule instead of the plan's.
        reduction_order: the order of reductions, as positions in :attr:`CostModel.reductions`.
        next_forward: simulate from the first backwards to the end of the next step's first forwards, each of which
            waits for its stage's update (Out-Of-Order BackProp, EuroSys'22, section 2): the forwards that come before
            a device's first backward are those of the next step. The time between two steps' ends, where steps follow
            each other.

    Raises:
        PlanError: the plan doesn't fit the profile, the cluster, or a device's memory.
        ValueError: the schedule deadlocks, or ``reduction_order`` isn't one of all reductions.
    """
    costs = CostModel(plan, profile, cluster)
    return run(costs, schedule, reduction_order=reduction_order, next_forward=next_forward)


def run(
    costs: CostModel,
    schedule: Schedule | None = None,
    *,
    reduction_order: Sequence[int] | None = None,
    next_forward: bool = False,
) -> Simulation:
    """Simulates the step that ``costs`` describes; see :func:`simulate`."""
    schedule = costs.schedule if schedule is None else schedule
    return run_activities(ActivityGraph(costs, schedule, reduction_order, next_forward))


def run_activities(graph: ActivityGraph) -> Simulation:
    """Simulates the activities of a step."""
    return _Step(graph).run()


_COSTS, _STAGE_COSTS, _ORDER = 60.0, 8.0, 0.6
"""Work of a plan's costs, of each of its stages and of ordering a task, relative to simulating a task."""


@dataclass
class Trial:
    """A step that was simulated as far as it may be fast enough.

    Attributes:
        simulation: the step; None if it takes too long.
        work: what that took, in tasks, transfers and others simulated.
        tail: seconds of the step after its last task: the most that earlier all-reduces can gain.
    """

    simulation: Simulation | None
    work: float
    tail: float
    _step: _Step | None

    def with_cuts(self, costs: CostModel) -> Trial:
        """Simulates the step with its last backwards cut: only what these may change.

        Args:
            costs: those of the same plan with other ``backward_cuts``.

        Raises:
            PlanError: reductions during backwards need more memory than there is.
        """
        if self._step is None or self._step.saved is None or costs.holds != self._step.costs.holds:
            return tried(costs)
        step = self._step.saved.resumed(costs)
        before = len(step.spans)
        simulation = step.go_on()
        tail = simulation.latency - step.computed
        work = _COSTS + _STAGE_COSTS * costs.plan.num_stages + len(step.spans) - before
        return Trial(simulation, work, tail, None)


def tried(costs: CostModel, limit: float = math.inf) -> Trial:
    """Simulates a plan's step.

    Args:
        costs: the plan's costs.
        limit: seconds; a step that takes longer even with its last backwards cut isn't simulated to the end.
    """
    stages = range(costs.plan.num_stages)
    work = _COSTS + _STAGE_COSTS * len(stages)
    if limit < math.inf:
        costs.check_memory()
        least = LeastTimes(
            costs,
            {stage for stage in stages if costs.delays(stage)},
            carried=stages if costs.plan.carried_updates else (),
        )
        if least.busiest() + costs.profile.step_seconds > limit * (1 + _ROUNDING):
            return Trial(None, work, 0.0, None)
    schedule = costs.schedule
    work += _ORDER * sum(map(len, schedule.orders.values()))
    try:
        step = _Step(ActivityGraph(costs, schedule), limit)
    except TooSlowError:
        return Trial(None, work, 0.0, None)
    step.keep()
    try:
        simulation = step.run()
    except TooSlowError:
        return Trial(None, work + len(step.spans), 0.0, None)
    return Trial(simulation, work + len(step.spans), simulation.latency - step.computed, step)


class _Step:
    """State of a simulated step; `run` runs its activities, event by event."""

    def __init__(self, graph: ActivityGraph, limit: float = math.inf) -> None:
        self.graph = graph
        costs = self.costs = graph.costs
        self.activities, self.after, self.micro_batch = graph.activities, graph.after, graph.micro_batch
        self.waiting = graph.waiting.copy()
        self.arrived: list[int | None] = [None] * len(self.activities)  # the span for which each waited last
        self.position = dict.fromkeys(graph.queues, 0)
        self.free = dict.fromkeys(graph.queues, True)
        self.last: dict[int, int | None] = dict.fromkeys(graph.queues, None)
        self.updates: dict[int, deque[tuple[int, int | None]]] = {device: deque() for device in graph.queues}
        self.spans: list[Span] = []
        self.events: list[tuple[float, int, int, Any, tuple[Any, ...]]] = []
        self.sequence = itertools.count()
        self.now = self.computed = 0.0
        self.port_free = [0.0] * graph.num_ports
        self.port_last: list[int | None] = [None] * graph.num_ports
        self.server = [device.server for device in costs.cluster.devices]
        self.cores = SharedCores(costs.cluster)
        self.limit = limit * (1 + _ROUNDING) - costs.profile.step_seconds
        self.rest = self._rest() if limit < math.inf else {}
        # Tasks that all-reduces or updates hold up may come earlier if backwards are cut: then nothing is certain.
        self.cuttable = costs.plan.wait_free and not costs.plan.backward_cuts and not graph.carried
        # Tasks before those that complete gradients: until one begins, nothing depends on reductions.
        self.watched: frozenset[int] = frozenset()
        self.saved: _Step | None = None

    def _rest(self) -> dict[int, list[float]]:
        """Returns the least seconds from each task's start to the end of the step.

        Raises:
            TooSlowError: the step takes longer than the limit.
        """
        graph, orders = self.graph, self.graph.orders
        backward = any(task.phase is not F for tasks in orders.values() for task in tasks)
        least = LeastTimes(self.costs, graph.schedule.split, carried=graph.carried, forward_only=not backward)
        rest = {
            device: least.rest(tasks, [self.activities[number].seconds for number in graph.queues[device]])
            for device, tasks in orders.items()
        }
        for device, tasks in orders.items():
            if least.before[tasks[0].stage] + rest[device][0] > self.limit:
                raise TooSlowError
        return rest

    # ---- events

    def at(self, time: float, action: Any, *data: Any, turn: int = 0) -> None:
        """Schedules a method; among events at one time, the lowest turn comes first."""
        heapq.heappush(self.events, (time, turn, next(self.sequence), action, data))

    def run(self) -> Simulation:
        """Runs all events, in order of time."""
        for number in self.graph.first:
            self.begin(number, None)
        for device in self.graph.queues:
            self.start(device)
        return self.go_on()

    def go_on(self) -> Simulation:
        """Runs all events from the present state on."""
        events, pop = self.events, heapq.heappop
        while events:
            self.now, _, _, action, data = pop(events)
            action(self, *data)
        orders = self.graph.orders
        stuck = [tasks[self.position[d]] for d, tasks in orders.items() if self.position[d] < len(tasks)]
        if stuck:
            raise ValueError(f"the schedule deadlocks: {', '.join(map(str, stuck[:4]))} wait for ever")
        end = max(map(_END, self.spans), default=0.0)
        return Simulation(end + self.costs.profile.step_seconds, tuple(self.spans), self.graph)

    # ---- the state as data

    def keep(self) -> None:
        """Lets `run` keep the state before all tasks that complete gradients (`saved`), unless updates are carried."""
        before = {
            queue[position - 1] if position else None
            for queue in self.graph.queues.values()
            for position, number in enumerate(queue)
            if number in self.graph.ends
        }
        if None not in before and not self.graph.carried:
            self.watched = frozenset(number for number in before if number is not None)

    def save(self) -> None:
        """Keeps a copy of the state."""
        self.saved = self._copied()

    def resumed(self, costs: CostModel) -> _Step:
        """Returns a copy of a kept state that goes on with costs that differ by ``backward_cuts`` only."""
        other = self._copied()
        graph = other.graph = self.graph.with_cuts(costs)
        other.costs = costs
        other.activities, other.after, other.micro_batch = graph.activities, graph.after, graph.micro_batch
        other.waiting[graph.base :] = graph.waiting[graph.base :]
        other.arrived[graph.base :] = [None] * (len(graph.activities) - graph.base)
        other.rest = {}
        return other

    def _copied(self) -> _Step:
        other = copy.copy(self)
        for name in ("position", "free", "last", "spans", "port_free", "port_last", "waiting", "arrived", "events"):
            setattr(other, name, copy.copy(getattr(self, name)))
        other.updates = {device: deque(waiting) for device, waiting in self.updates.items()}
        other.cores = self.cores.copied()
        number = next(self.sequence)
        self.sequence, other.sequence = itertools.count(number + 1), itertools.count(number + 1)
        return other

    # ---- activities

    def over(self, number: int, index: int | None) -> None:
        """Ends an activity for all that wait for it; ``index`` is its span, or the last one before it."""
        waiting, arrived = self.waiting, self.arrived
        for step in self.after[number]:
            other = number + step
            waiting[other] -= 1
            arrived[other] = index  # in order of time
            if not waiting[other]:
                self.begin(other, index)

    def part_over(self, number: int, index: int) -> None:
        """Ends a piece of a task for a reduction."""
        self.waiting[number] -= 1
        if not self.waiting[number]:
            self.begin(number, index)

    def begin(self, number: int, index: int | None) -> None:
        """Begins a ready activity, or puts it in the queue of its device."""
        kind, stage, replica, device, busy, latency, ports, target, size, _, reduction = self.activities[number]
        if kind == JOIN:
            self.over(number, index)
        elif ports:
            start, cause = self.now, index
            for port in ports:
                if self.port_free[port] > start:
                    start, cause = self.port_free[port], self.port_last[port]
            if kind == SEND and self.rest and self.cuttable and start > self.now and self._reduces(ports):
                self.rest = {}
            end, span = start + busy + latency, len(self.spans)
            micro_batch = self.micro_batch[number]
            self.spans.append(
                Span(kind, start, end, device, stage, micro_batch, replica, target, size, cause, reduction, number)
            )
            if busy or kind != SEND:
                for port in ports:
                    self.port_free[port] = start + busy
                    self.port_last[port] = span
            heapq.heappush(self.events, (end, 0, next(self.sequence), _Step.over, (number, span)))
        elif device is not None and self.micro_batch[number] is None:
            self.updates[device].append((number, index))
            if self.free[device]:
                self.at(self.now, _Step.update, device, turn=1)
        elif device is not None:
            self.start(device)

    def start(self, device: int) -> None:
        """Starts the device's next task if the device is free and the inputs are there; else a waiting update."""
        if not self.free[device]:
            return
        queue, position = self.graph.queues[device], self.position[device]
        if position == len(queue) or self.waiting[queue[position]]:
            if self.updates[device]:
                # Unless a task becomes ready at this very time.
                self.at(self.now, _Step.update, device, turn=1)
            return
        number, now = queue[position], self.now
        if self.rest and now + self.rest[device][position] > self.limit:
            raise TooSlowError
        self.position[device] = position + 1
        if number in self.watched:
            self.watched = frozenset()
            self.free[device] = False
            self.at(now, _Step.save, turn=-1)
        self.compute(device, number, self.arrived[number])

    def compute(self, device: int, number: int, came: int | None) -> None:
        """Starts a task or an update on its device."""
        self.free[device] = False
        kind, stage, replica, _, seconds = self.activities[number][:5]
        now, cause = self.now, self.last[device]
        if came is not None and (cause is None or self.spans[came].end > self.spans[cause].end):
            cause = came
        end, micro_batch = now + seconds, self.micro_batch[number]
        span = Span(kind, now, end, device, stage, micro_batch, replica, None, 0.0, cause, None, number)
        early = self.graph.early.get(number, ())
        if self.cores.shared[self.server[device]]:
            self.begin_shared(span, number, early)
            return
        index = len(self.spans)
        self.spans.append(span)
        # Before its last bucket: messages go first.
        heapq.heappush(self.events, (end, 0, next(self.sequence), _Step.finished, (device, number, index)))
        for unit, part in early:
            self.at(now + part * seconds, _Step.part_over, unit, index)

    def finished(self, device: int, number: int, index: int) -> None:
        """Ends a task or an update: what waits for it can go on, and so can its device."""
        self.last[device] = index
        self.free[device] = True
        if self.micro_batch[number] is not None:
            self.computed = self.now
        else:
            queue, position = self.graph.queues[device], self.position[device]
            if self.rest and self.cuttable and position < len(queue) and not self.waiting[queue[position]]:
                self.rest = {}
        self.over(number, index)
        self.start(device)

    def update(self, device: int) -> None:
        """Runs the longest-waiting update if the device is still idle."""
        queue, position = self.graph.queues[device], self.position[device]
        if not self.free[device] or not self.updates[device]:
            return
        if position < len(queue) and not self.waiting[queue[position]]:
            return
        number, cause = self.updates[device].popleft()
        self.compute(device, number, cause)

    def _reduces(self, ports: Collection[int]) -> bool:
        """Returns whether ports are reserved for an all-reduce."""
        users = (self.port_last[port] for port in ports if self.port_free[port] > self.now)
        return any(user is not None and self.spans[user].kind == ALL_REDUCE for user in users)

    # ---- shared cores

    def begin_shared(self, span: Span, number: int, early: Sequence[tuple[int, float]]) -> None:
        """Starts work that would take the span's time undisturbed."""
        assert span.device is not None
        server, seconds = self.server[span.device], span.end - span.start
        marks = deque(
            ((1 - part) * seconds, unit) for unit, part in sorted(early, key=lambda entry: (entry[1], entry[0]))
        )
        index = None
        if marks:
            index = len(self.spans)
            self.spans.append(span)
        self.cores.begin(server, Running(span, number, seconds, marks, index), self.now)
        self.next_of(server)

    def next_of(self, server: int) -> None:
        """Schedules the next end of a piece of a server's work, if nothing else starts or ends before."""
        following = self.cores.next(server, self.now)
        if following is not None:
            time, version = following
            self.at(time, _Step.shared_event, server, version)

    def shared_event(self, server: int, version: int) -> None:
        """Ends the predicted tasks or pieces, unless the prediction is outdated."""
        ended = [*self.cores.over(server, version, self.now)]
        for item, unit in ended:
            if unit is not None:
                self.at(self.now, _Step.part_over, unit, item.index)
                continue
            index, span = item.index, item.span._replace(end=self.now)
            if index is None:
                index = len(self.spans)
                self.spans.append(span)
            else:
                self.spans[index] = span
            self.at(self.now, _Step.finished, item.span.device, item.number, index)
        if ended:
            self.next_of(server)


# ---- lower bounds


class LeastTimes:
    """The least seconds before and after each stage's tasks: the way of one micro-batch through stages without queues.

    Attributes:
        before: for each stage the least seconds until it can start a forward.
        after: (stage, phase) -> the least seconds from the end of such a task to the end of the step.
    """

    def __init__(
        self, costs: CostModel, split: Collection[int], *, carried: Collection[int] = (), forward_only: bool = False
    ) -> None:
        """Follows the messages of the last micro-batch, which is one of the smallest.

        Args:
            costs: the plan's costs.
            split: the stages whose backward is Bx and Bw.
            carried: the stages whose updates are made in the next step.
            forward_only: whether the step has no backwards.
        """
        self.costs = costs
        stages = range(costs.plan.num_stages)
        self.before = [0.0] * len(stages)
        self.after: dict[tuple[int, Phase], float] = defaultdict(float)
        for stage in stages:
            for (sender, phase), sent in self._inputs(stage, F, split):
                start = self.before[sender] + self._seconds(sender, phase) + sent
                self.before[stage] = max(self.before[stage], start)
        backwards = [(stage, phase) for stage in stages for phase in ((BW, BX) if stage in split else (B,))]
        for stage, phase in (*(() if forward_only else backwards), *((stage, F) for stage in reversed(stages))):
            if phase is B or phase is BW:
                updated = 0.0 if stage in carried else self._updated(stage)
                self.after[stage, phase] = max(updated, self.after[stage, phase])
            for sending, sent in self._inputs(stage, phase, split):
                least = sent + self._seconds(stage, phase) + self.after[stage, phase]
                self.after[sending] = max(self.after[sending], least)

    def _inputs(self, stage: int, phase: Phase, split: Collection[int]) -> Iterator[tuple[tuple[int, Phase], float]]:
        """Yields the stage and phase of each task that one waits for, and the seconds of the quickest message.

        What relays hand on doesn't wait for their own tasks: it bounds nothing here.
        """
        for before in inputs(stage, phase):
            if before[0] == stage:
                yield before, 0.0
        backward = phase is not F
        legs = self.costs.outgoing[stage] if backward else self.costs.incoming[stage]
        if backward and phase is not self.costs.gradient_phase(stage, stage in split):
            return
        for leg in legs:
            sent = self._sent(leg, backward=backward) if leg.source is None else None
            if sent is not None and backward:
                yield (leg.receiver, BX if leg.receiver in split else B), sent
            elif sent is not None:
                yield (leg.sender, F), sent

    def rest(self, tasks: Sequence[Task], seconds: Sequence[float]) -> list[float]:
        """Returns for each of a device's tasks the least seconds from its start to the end of the step.

        Args:
            tasks: the device's tasks in order.
            seconds: their times.
        """
        rest = [0.0] * len(tasks)
        least = 0.0
        for position in range(len(tasks) - 1, -1, -1):
            task = tasks[position]
            after = self.after[task.stage, task.phase]
            least = rest[position] = seconds[position] + (after if after > least else least)
        return rest

    def busiest(self) -> float:
        """Returns a lower bound of the step: a device's work, what must come before it and what must follow."""
        costs, count = self.costs, len(self.costs.micro_batches)
        work: dict[int, float] = {}
        before: dict[int, float] = {}
        after: dict[int, float] = {}
        for stage, devices in enumerate(costs.plan.devices):
            ends = min(value for (other, phase), value in self.after.items() if other == stage and phase is not F)
            times: dict[tuple[int, float], float] = {}
            for replica, interval in enumerate(costs.slices(stage, count - 1)):
                device = devices[replica]
                kind = interval.size, costs.cluster.devices[device].speed
                if kind not in times:
                    tasks = (Task(stage, phase, count - 1, replica) for phase in (F, B))
                    times[kind] = count * sum(map(costs.whole_seconds, tasks))
                work[device] = work.get(device, 0.0) + times[kind]
                before[device] = min(before.get(device, math.inf), self.before[stage])
                after[device] = min(after.get(device, math.inf), ends)
        return max(work[device] + before[device] + after[device] for device in work)

    def _seconds(self, stage: int, phase: Phase) -> float:
        """Returns the seconds of a phase of the last micro-batch, on the quickest replica."""
        costs, last = self.costs, len(self.costs.micro_batches) - 1
        kinds: dict[tuple[int, float], Task] = {}
        for replica, interval in enumerate(costs.slices(stage, last)):
            speed = costs.cluster.devices[costs.plan.devices[stage][replica]].speed
            kinds.setdefault((interval.size, speed), Task(stage, phase, last, replica))
        return min(map(costs.whole_seconds, kinds.values()))

    def _sent(self, leg: Leg, *, backward: bool) -> float | None:
        """Returns the seconds of the quickest message over a leg; None if there is none."""
        costs = self.costs
        messages = costs.leg_messages(leg, len(costs.micro_batches) - 1, backward=backward)
        senders, receivers = costs.plan.devices[leg.sender], costs.plan.devices[leg.receiver]
        if backward:
            senders, receivers = receivers, senders
        if not messages:
            return None
        return min(self._message(message, senders, receivers) for message in messages)

    def _message(self, message: Message, senders: Sequence[int], receivers: Sequence[int]) -> float:
        source, target = senders[message.sender], receivers[message.receiver]
        return 0.0 if source == target else self.costs.cluster.link(source, target).seconds(message.bytes)

    def _updated(self, stage: int) -> float:
        """Returns the seconds of a stage's update, and of the last of many all-reduces if it has some of its own.

        If the stage's first layer has no gradients, the last all-reduce may be over before the backward that is cut.
        """
        costs = self.costs
        seconds = min(costs.apply_seconds(stage, device) for device in costs.plan.devices[stage])
        if not costs.layer_gradients(stage)[0]:
            return seconds
        own = [costs.reduction_seconds(item, _NOTHING) for item in costs.reductions if item.stages == (stage,)]
        return seconds + max(own, default=0.0)  # The devices of groups reduce their variables at the same time.
