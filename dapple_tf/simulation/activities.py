"""The activities of a step: computations, transfers, reductions and updates, and who waits for whom.

The simulator runs them event by event, the emulator as timed waits of a TensorFlow graph. Each kind has a function here
that adds it.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dapple_tf.simulation.cost import CostModel, Leg, Message
from dapple_tf.view.timeline import ALL_REDUCE, SEND
from graph_passes.ir.tasks import Phase, Schedule, Task, piece_order

APPLY = "apply"
JOIN = ""
"""Kind of activities without time: messages within a device, complete slices of relays, updates without costs."""

F, B, BX, BW = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD


class Activity(NamedTuple):
    """Work of a device or a link, or a join of other activities.

    Attributes:
        kind: as of its `Span`, or `JOIN`.
        stage: its stage; for an all-reduce, the first one.
        replica: its replica; for a message, the sender's.
        device: where it computes, or from where it is sent; None for an all-reduce.
        seconds: undisturbed, during which its device or its ports are busy.
        latency: more seconds until it is over.
        ports: the ports that a link's work has to itself, of devices or of servers' network cards.
        target: receiving device of a message.
        bytes: bytes of a message or an all-reduce.
        leg: number of the leg over which a message goes, or for which a relay waits.
        reduction: for an all-reduce, its position in `CostModel.reductions`.
    """

    kind: str
    stage: int
    replica: int
    device: int | None
    seconds: float = 0.0
    latency: float = 0.0
    ports: tuple[int, ...] = ()
    target: int | None = None
    bytes: float = 0.0
    leg: int | None = None
    reduction: int | None = None


class ActivityGraph:
    """The activities of a step, as numbers: positions in lists, since most of planning is simulating.

    Attributes:
        activities: of each number.
        after: for each the differences to the numbers of those that wait for it, in the order of their turns.
        waiting: for each the number of others that it waits for.
        micro_batch: of each; None if it comes once in a step.
        queues: device -> its tasks in the schedule's order.
        early: task -> the reductions whose gradients are complete before its end, and after which fraction of its time.
        ends: the tasks that complete gradients on their devices.
        first: what waits for nothing but isn't a task, in the order of its start.
        updates: (device, stage) -> its update.
        reduced: (reduction, device) -> the updates that wait for it.
        base: the number of the first reduction; those before don't depend on how backwards are cut.
        num_ports: number of ports.
    """

    def __init__(
        self,
        costs: CostModel,
        schedule: Schedule,
        reduction_order: Sequence[int] | None = None,
        next_forward: bool = False,
    ) -> None:
        """Adds all activities.

        Args:
            costs: the plan's costs.
            schedule: the order of tasks.
            reduction_order: positions in :attr:`CostModel.reductions`; None for the order of a real step.
            next_forward: whether the forwards before a device's first backward are those of the next step.

        Raises:
            ValueError: the schedule lacks a task or has it on another device, or ``reduction_order`` isn't one of all
                reductions.
        """
        self.costs, self.schedule = costs, schedule
        self.carried = () if next_forward else carried_stages(costs, schedule)
        self.activities: list[Activity] = []
        self.after: list[tuple[int, ...]] = []
        self.waiting: list[int] = []
        self.micro_batch: list[int | None] = []
        self.num_ports = 2 * (costs.cluster.num_devices + costs.cluster.num_servers)
        self._kinds: dict[int, _MicroBatch] = {}
        self._starts = [self._add_micro_batch(number) for number in range(len(costs.micro_batches))]
        self._next: dict[Task, int] = {}
        orders = schedule.orders
        if next_forward:
            orders = self._add_next_forwards()
        self.orders: Mapping[int, tuple[Task, ...]] = {device: tasks for device, tasks in orders.items() if tasks}
        self.queues = {device: [*map(self.number, tasks)] for device, tasks in self.orders.items()}
        self._check_tasks()
        self.first: list[int] = []
        self._lookups = self._add_lookups(next_forward=next_forward)
        self.base = len(self.activities)
        self._members: dict[int, list[tuple[int, int]]] = {stage: [] for stage in range(costs.plan.num_stages)}
        for (device, stage), task in schedule.last_gradients.items():
            self._members[stage].append((device, task.replica))
        self._before: dict[int, tuple[int, ...]] = {}  # what waits for tasks, without reductions and updates
        self.add_ends(reduction_order)

    def with_cuts(self, costs: CostModel) -> ActivityGraph:
        """Returns the activities of the same plan with other ``backward_cuts``."""
        other = copy.copy(self)
        other.costs = costs
        other.activities, other.after = self.activities[: self.base], self.after[: self.base]
        other.waiting, other.micro_batch = self.waiting[: self.base], self.micro_batch[: self.base]
        for number, after in self._before.items():
            other.after[number] = after
        start, own = self._starts[-1]
        other.activities[start : start + own.num_tasks] = own.activities[: own.num_tasks]
        other.add_ends(None)
        return other

    def number(self, task: Task) -> int:
        """Returns a task's number."""
        if self._next and task in self._next:
            return self._next[task]
        start, own = self._starts[task.micro_batch]
        return start + own.first[task.stage][task.phase._value_] + task.replica

    def inputs(self) -> list[list[int]]:
        """Returns each activity's predecessors, besides the previous ones on its device."""
        inputs: list[list[int]] = [[] for _ in self.activities]
        for number, after in enumerate(self.after):
            for step in after:
                inputs[number + step].append(number)
        return inputs

    def _add(self, activity: Activity, micro_batch: int | None = None) -> int:
        self.activities.append(activity)
        self.after.append(())
        self.waiting.append(0)
        self.micro_batch.append(micro_batch)
        return len(self.activities) - 1

    def _wait(self, number: int, before: int) -> None:
        self.after[before] = (*self.after[before], number - before)
        self.waiting[number] += 1

    # ---- tasks and messages

    def _add_micro_batch(self, number: int) -> tuple[int, _MicroBatch]:
        """Adds a micro-batch's tasks and messages, alike for all of a size."""
        start, size = len(self.activities), self.costs.micro_batches[number].size
        own = self._kinds.get(size)
        if own is None:
            own = self._kinds[size] = _MicroBatch(self.costs, self.schedule, number)
        self.activities += own.activities
        self.after += own.steps
        self.waiting += own.waiting
        self.micro_batch += [number] * len(own.activities)
        return start, own

    def _check_tasks(self) -> None:
        """Checks that tasks are on the plan's devices, and receivers of messages among them."""
        for device, queue in self.queues.items():
            for number, task in zip(queue, self.orders[device], strict=True):
                if self.activities[number].device != device:
                    raise ValueError(
                        f"device {device} runs {task} in schedule {self.schedule.name!r}, which the plan has on device "
                        f"{self.activities[number].device}; simulate the plan with a schedule of its own"
                    )
        if sum(map(len, self.queues.values())) == sum(own.num_tasks for _, own in self._starts):
            return
        runs = {number for queue in self.queues.values() for number in queue}
        for task in itertools.chain(*self.orders.values()):
            for number in self._receivers(self.number(task)):
                if number not in runs:
                    raise ValueError(
                        f"{task} sends a message to a task that no device runs in schedule {self.schedule.name!r}"
                    )

    def _receivers(self, number: int) -> Iterator[int]:
        """Yields the tasks that get an activity's results, also over relays."""
        for step in self.after[number]:
            if self.activities[number + step].kind in (SEND, JOIN):
                yield from self._receivers(number + step)
            else:
                yield number + step

    def _add_next_forwards(self) -> dict[int, tuple[Task, ...]]:
        """Moves forwards before each device's first backward to the next step; returns all orders.

        This step's are over from the start, with what they send. The next step's get copies: what they send goes only
        to others of them.
        """
        orders, following = {}, set()
        for device, tasks in self.schedule.orders.items():
            moved = [*itertools.takewhile(lambda task: task.phase is F, tasks)]
            following.update(moved)
            orders[device] = (*tasks[len(moved) :], *moved)
        now = {task: self.number(task) for task in sorted(following)}
        over = set(now.values())
        for number in now.values():
            self._end_before(number, over)
        stop, copies = len(self.activities), {}
        for micro_batch in {task.micro_batch: None for task in now}:
            copies[micro_batch] = len(self.activities) - self._starts[micro_batch][0]
            self._add_micro_batch(micro_batch)
        self._next = {task: number + copies[task.micro_batch] for task, number in now.items()}
        places = {number: self._next[task] - number for task, number in now.items()}
        for number in range(stop):
            if number not in over:
                self.after[number] = tuple(step + places.get(number + step, 0) for step in self.after[number])
        wanted = frozenset(self._next.values())
        for number in range(stop, len(self.activities)):
            used = [step for step in self.after[number] if not wanted.isdisjoint(self._reached(number + step))]
            self.after[number] = tuple(used)
        return orders

    def _end_before(self, number: int, over: set[int]) -> None:
        """Ends the messages and relays of an activity of an earlier step."""
        for step in self.after[number]:
            other = number + step
            self.waiting[other] -= 1
            if not self.waiting[other] and self.activities[other].kind in (SEND, JOIN):
                over.add(other)
                self._end_before(other, over)

    def _reached(self, number: int) -> Iterator[int]:
        if self.activities[number].kind in (SEND, JOIN):
            return self._receivers(number)
        return iter([number])

    # ---- rows in shards

    def _add_lookups(self, *, next_forward: bool) -> dict[int, int]:
        """Adds forwards' look-ups of rows, one task ahead; returns their stages.

        All replicas look up about as much, so that links are as busy with what devices send.
        """
        lookups: dict[int, int] = {}
        cluster = self.costs.cluster
        for device, tasks in self.orders.items() if "rows" in self.costs.plan.shards else ():
            own = [task for task in tasks if task in self._next] if next_forward else tasks
            for position, task in enumerate(own):
                if task.phase is not F or not self.costs.table_bytes(task.stage):
                    continue
                busy, latency, across, source, size = self.costs.lookup(task)
                port = cluster.num_devices + cluster.devices[device].server if across else device
                activity = Activity(
                    SEND, task.stage, task.replica, source, busy, latency, (2 * port + 1,), device, size
                )
                number = self._add(activity, task.micro_batch)
                lookups[number] = task.stage
                self._wait(self.number(task), number)
                if position > 1:
                    self._wait(number, self.number(own[position - 2]))
        return lookups

    # ---- reductions and updates

    def add_ends(self, reduction_order: Sequence[int] | None) -> None:
        """Adds reductions and updates, and makes them wait for the tasks that complete their gradients."""
        plan, schedule = self.costs.plan, self.schedule
        for stage, devices in enumerate(plan.devices) if plan.backward_cuts else ():
            phase = BW if stage in schedule.split else B
            for replica in range(len(devices)):
                task = Task(stage, phase, len(self._starts) - 1, replica)
                number = self.number(task)
                self.activities[number] = self.activities[number]._replace(seconds=self.costs.seconds(task))
        ends = gradient_ends(schedule, wait_free=plan.wait_free)
        self.ends = {self.number(task) for task in ends}
        self._before = {number: self.after[number] for number in self.ends}
        self.early: dict[int, list[tuple[int, float]]] = {}
        parts = self._add_reductions(reduction_order)
        updates = self.updates = self._add_updates(parts)
        for task, stages in ends.items():
            number = self.number(task)
            for stage in stages:
                if stage in self.carried:
                    continue
                for unit, part in parts[stage].items():
                    if part < 1.0:
                        self.early.setdefault(number, []).append((unit, part))
                        self.waiting[unit] += 1
                    else:
                        self._wait(unit, number)
                self._wait(updates[schedule.device_of(task), stage], number)
        begun: list[int] = []
        for stage in self.carried:
            begun += [*parts[stage], *(updates[device, stage] for device, _ in self._members[stage])]
        begun += self._lookups
        self.first = [number for number in begun if not self.waiting[number]]

    def _add_reductions(self, order: Sequence[int] | None) -> dict[int, dict[int, float]]:
        """Adds all-reduces, each after the previous one on its devices.

        Returns:
            stage -> its reductions, each with the fraction of the last backward's time after which it can start.
        """
        costs = self.costs
        # Carried gradients are those of the previous step: they are reduced first.
        carried: dict[tuple[int, ...], int] = {(stage,): place for place, stage in enumerate(self.carried)}
        groups = [reduction.stages for reduction in costs.reductions]
        pieces = [
            ((1.0, reduction.bytes),) if reduction.stages in carried else reduction_pieces(costs, number)
            for number, reduction in enumerate(costs.reductions)
        ]
        if order is None:
            sequence = piece_order(groups, self.schedule, costs.plan.devices, [len(own) for own in pieces])
        elif sorted(order) != list(range(len(groups))):
            raise ValueError(
                f"reduction_order is {list(order)}; there are {len(groups)} reductions, give the order of 0 to "
                f"{len(groups) - 1}, positions in CostModel.reductions"
            )
        else:
            sequence = [(number, piece) for number in order for piece in range(len(pieces[number]))]
        sequence = sorted(sequence, key=lambda entry: carried.get(groups[entry[0]], len(carried)))
        parts: dict[int, dict[int, float]] = {stage: {} for stage in range(costs.plan.num_stages)}
        previous: dict[int, int] = {}
        for number, piece in sequence if self.ends else ():
            reduction, (part, size) = costs.reductions[number], pieces[number][piece]
            seconds = costs.reduction_seconds(reduction, size)
            ports = _reduction_ports(costs, reduction.devices)
            stage = reduction.stages[0]
            activity = Activity(ALL_REDUCE, stage, 0, None, seconds, 0.0, ports, None, size, None, number)
            unit = self._add(activity)
            for reduced in reduction.stages:
                parts[reduced][unit] = part
            for before in {previous[device] for device in reduction.devices if device in previous}:
                self._wait(unit, before)
            previous.update(dict.fromkeys(reduction.devices, unit))
        return parts

    def _add_updates(self, parts: Mapping[int, Mapping[int, float]]) -> dict[tuple[int, int], int]:
        """Adds each stage's update on each of its devices, after its reductions; returns their numbers.

        The next step's forwards and look-ups of the stage wait for it.
        """
        updates: dict[tuple[int, int], int] = {}
        waits: dict[int, list[Task]] = {}
        carried = (task for order in self.orders.values() for task in order if task.stage in self.carried)
        for task in (*self._next, *(task for task in carried if task.phase is F)):
            waits.setdefault(task.stage, []).append(task)
        for stage, members in self._members.items():
            for device, replica in members:
                seconds = self.costs.apply_seconds(stage, device)
                number = self._add(Activity(APPLY if seconds else JOIN, stage, replica, device, seconds))
                updates[device, stage] = number
                for lookup, reader in self._lookups.items() if stage in waits else ():
                    if reader == stage:
                        self._wait(lookup, number)
                for task in waits.get(stage, ()):
                    if task.replica == replica:
                        self._wait(self.number(task), number)
        self.reduced: dict[tuple[int, int], set[int]] = {}
        for unit in sorted({unit for units in parts.values() for unit in units}):
            reduction = self.activities[unit].reduction or 0
            for stage in self.costs.reductions[reduction].stages:
                for device, _ in self._members[stage]:
                    self._wait(updates[device, stage], unit)
                    self.reduced.setdefault((reduction, device), set()).add(updates[device, stage])
        return updates


class _MicroBatch:
    """The activities of one micro-batch: tasks, what they send, and what relays hand on.

    Attributes:
        activities: tasks first.
        steps: for each the differences to the numbers of those that wait for it.
        waiting: for each the number of others that it waits for.
        first: stage -> phase -> number of the first replica's task.
        num_tasks: number of tasks.
    """

    def __init__(self, costs: CostModel, schedule: Schedule, number: int) -> None:
        self.costs, self.micro_batch, self.split = costs, number, schedule.split
        self.activities: list[Activity] = []
        self._after: list[list[int]] = []
        self._links: dict[tuple[int, int], tuple[tuple[int, ...], float, float]] = {}
        self.first = [self._add_tasks(stage) for stage in range(costs.plan.num_stages)]
        self.num_tasks = len(self.activities)
        # (leg, whether gradients) -> number of the first replica's join
        self._relays: dict[tuple[int, bool], int] = {}
        for leg in costs.legs if costs.plan.relays else ():
            for backward in (False, True) if leg.sums else (False,) if leg.onward else ():
                self._relays[leg.number, backward] = self._add_relay(leg)
        for stage in range(costs.plan.num_stages):
            self._add_messages(stage)
        for leg in costs.legs if costs.plan.relays else ():
            for onward in leg.onward:
                self._send(costs.legs[onward], self._relays[leg.number, False], backward=False)
            if leg.sums:
                self._send(leg, self._relays[leg.number, True], backward=True)
        self.waiting = [0] * len(self.activities)
        for after in self._after:
            for other in after:
                self.waiting[other] += 1
        self.steps = [tuple([other - own for other in after]) for own, after in enumerate(self._after)]

    def _add(self, activity: Activity) -> int:
        self.activities.append(activity)
        self._after.append([])
        return len(self.activities) - 1

    def _add_tasks(self, stage: int) -> dict[str, int]:
        first = {}
        for phase in (F, BX, BW) if stage in self.split else (F, B):
            first[phase._value_] = len(self.activities)
            for replica, device in enumerate(self.costs.plan.devices[stage]):
                seconds = self.costs.whole_seconds(Task(stage, phase, self.micro_batch, replica), device)
                self._add(Activity(phase._value_, stage, replica, device, seconds))
        return first

    def _add_relay(self, leg: Leg) -> int:
        """Adds joins of a relay's slices: complete with all parts, a gradient with its own."""
        devices = self.costs.plan.devices[leg.receiver]
        numbers = [
            self._add(Activity(JOIN, leg.receiver, replica, device, leg=leg.number))
            for replica, device in enumerate(devices)
        ]
        return numbers[0]

    def _add_messages(self, stage: int) -> None:
        """Adds a stage's messages: gradients to the nearest stage first, relayed ones last."""
        first, costs = self.first[stage], self.costs
        for leg in costs.outgoing[stage]:
            self._send(leg, first[F._value_], backward=False)
        sending = first[BX._value_ if stage in self.split else B._value_]
        for leg in sorted(costs.incoming[stage], key=lambda leg: -leg.sender):
            if not leg.sums:
                self._send(leg, sending, backward=True)
        for replica in range(len(costs.plan.devices[stage])):
            if stage in self.split:
                self._after[sending + replica].append(first[BW._value_] + replica)
            for leg in costs.incoming[stage] if costs.plan.relays else ():
                if leg.sums:
                    self._after[sending + replica].append(self._relays[leg.number, True] + replica)

    def _send(self, leg: Leg, first: int, *, backward: bool) -> None:
        """Adds the messages over a leg.

        Args:
            leg: the leg.
            first: number of the first sending replica's task or join.
            backward: whether gradients are sent.
        """
        messages = self.costs.leg_messages(leg, self.micro_batch, backward=backward)
        if not messages:
            return
        stage, to = (leg.receiver, leg.sender) if backward else (leg.sender, leg.receiver)
        if backward and leg.source is not None:
            receivers = [self._relays[leg.source, True]]
        else:
            phase = self.costs.gradient_phase(to, to in self.split) if backward else F
            receivers = [self.first[to][phase._value_]]
        if leg.onward and not backward:
            receivers.append(self._relays[leg.number, False])
        devices, targets = self.costs.plan.devices[stage], self.costs.plan.devices[to]
        for message in messages:
            activity = self._message(stage, leg.number, devices[message.sender], targets[message.receiver], message)
            self._after[first + message.sender].append(len(self.activities))
            self.activities.append(activity)
            self._after.append([receiver + message.receiver for receiver in receivers])

    def _message(self, stage: int, leg: int, source: int, target: int, message: Message) -> Activity:
        if source == target:
            return Activity(JOIN, stage, message.sender, source, target=target, leg=leg)
        ends = (source, target)
        if ends not in self._links:
            self._links[ends] = _link(self.costs, source, target)
        ports, bandwidth, latency = self._links[ends]
        busy = message.bytes / bandwidth
        return Activity(SEND, stage, message.sender, source, busy, latency, ports, target, message.bytes, leg)


def _link(costs: CostModel, source: int, target: int) -> tuple[tuple[int, ...], float, float]:
    """Returns the ports between two devices, the bandwidth and the latency; even ports send, odd ones receive."""
    cluster = costs.cluster
    link = cluster.link(source, target)
    first, second = cluster.devices[source].server, cluster.devices[target].server
    if first != second:
        source, target = cluster.num_devices + first, cluster.num_devices + second
    return (2 * source, 2 * target + 1), link.bandwidth, link.latency


def _reduction_ports(costs: CostModel, devices: Sequence[int]) -> tuple[int, ...]:
    """Returns the ports that a reduction takes: of all its devices, or of their servers if there are several."""
    cluster = costs.cluster
    servers = {cluster.devices[device].server for device in devices}
    owners = [cluster.num_devices + server for server in sorted(servers)] if len(servers) > 1 else devices
    return tuple(2 * owner + way for owner in owners for way in (0, 1))


def gradient_ends(schedule: Schedule, *, wait_free: bool = True) -> Mapping[Task, tuple[int, ...]]:
    """Maps each task to the stages whose gradients it completes on its device, and hands on at its end.

    Unless ``wait_free``, all of a device's stages wait for the last of its tasks (conventional backpropagation).
    """
    completed: dict[Task, tuple[int, ...]] = {}
    for (device, stage), task in schedule.last_gradients.items():
        end = task if wait_free else schedule.orders[device][-1]
        completed[end] = (*completed.get(end, ()), stage)
    return completed


def carried_stages(costs: CostModel, schedule: Schedule) -> tuple[int, ...]:
    """Returns the stages whose parameters are updated during the next step's forward, in the order of their reduction.

    A stage that shares some of its parameters with another isn't among them: its update is simulated as one.
    """
    shared = {reduction.stages for reduction in costs.reductions if len(reduction.stages) > 1}
    own = {(stage,) for stage, cost in enumerate(costs.stages) if cost.parameter_bytes}
    groups = sorted(own | shared)
    sharing = {stage for stages in shared for stage in stages}
    carried = [groups[index] for index in costs.plan.carried(groups, schedule)]
    return tuple(stages[0] for stages in carried if len(stages) == 1 and stages[0] not in sharing)


def reduction_pieces(costs: CostModel, number: int) -> tuple[tuple[float, float], ...]:
    """Returns each piece of a reduction: (fraction of the last backward's time until it is ready, bytes)."""
    reduction = costs.reductions[number]
    if len(reduction.stages) == 1:
        return costs.backward_pieces(reduction.stages[0])
    return ((1.0, reduction.bytes),)
