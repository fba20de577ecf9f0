"""The tasks of a simulated step: their numbers, their messages, and relays and look-ups between them."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.least_times import LeastTimes
from dapple_tf.simulation.legs import Leg
from graph_passes.ir.tasks import Phase, Schedule, Task

Message = tuple[int, float, Leg | None]
"""The number of the receiving task for micro-batch 0, bytes, and the leg; None from Bx to Bw."""


class TooSlowError(Exception):
    """A step certainly takes longer than the limit of its simulation."""


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


class TaskNumbers:
    """Gives each task that a step may have a number, from 0 on.

    Attributes:
        stride: the difference between the numbers of the same task of two consecutive micro-batches.
        count: number of numbers.
    """

    def __init__(self, replicas: Sequence[int], micro_batches: int) -> None:
        """Makes the numbers of all phases.

        Args:
            replicas: number of replicas of each stage.
            micro_batches: M.
        """
        before = [0, *itertools.accumulate(replicas)]
        # Texts are looked up faster than members of an enum.
        self._first = {
            phase.value: [position * before[-1] + start for start in before[:-1]]
            for position, phase in enumerate(Phase)
        }
        self.stride = len(Phase) * before[-1]
        self.count = self.stride * micro_batches

    def first(self, stage: int, phase: Phase, replica: int) -> int:
        """Returns the number of micro-batch 0's task."""
        return self._first[phase._value_][stage] + replica

    def of(self, task: Task) -> int:
        """Returns a task's number."""
        first = self._first[task.phase._value_][task.stage]
        return first + task.replica + task.micro_batch * self.stride


class StepTasks:
    """The tasks of a step in tables.

    Attributes:
        costs: the plan's costs.
        orders: device -> its tasks in order.
        numbers: the number of each task.
        queues: as ``orders``, with numbers.
        tasks: the task of each number; None where no device runs one.
        device_of: the device of each.
        seconds: the undisturbed seconds of each.
        waiting: number of messages that each waits for; Bw's Bx counts as one.
    """

    def __init__(self, costs: CostModel, orders: Mapping[int, tuple[Task, ...]], split: Collection[int]) -> None:
        self.costs, self.orders, self.split = costs, orders, split
        self.numbers = TaskNumbers([len(devices) for devices in costs.plan.devices], len(costs.micro_batches))
        of = self.numbers.of
        self.queues = {device: [of(task) for task in tasks] for device, tasks in orders.items()}
        self.tasks: list[Task | None] = [None] * self.numbers.count
        self.device_of: list[int | None] = [None] * self.numbers.count
        self.seconds = [0.0] * self.numbers.count
        self.waiting = [0] * self.numbers.count
        last = len(costs.micro_batches) - 1
        known: dict[tuple[int, str, int, int, int, bool], tuple[float, int]] = {}
        received: dict[tuple[int, str, int], Counter[int]] = {}
        for device, queue in self.queues.items():
            for number, task in zip(queue, orders[device], strict=True):
                self.tasks[number], self.device_of[number] = task, device
                size = costs.micro_batches[task.micro_batch].size
                key = (task.stage, task.phase._value_, task.replica, device, size, task.micro_batch == last)
                if key not in known:
                    kind = (task.stage, task.phase._value_, size)
                    if kind not in received:
                        received[kind] = self._received(task)
                    known[key] = costs.seconds(task, device), received[kind][task.replica]
                self.seconds[number], self.waiting[number] = known[key]

    def _received(self, task: Task) -> Counter[int]:
        """Counts the messages to each replica for a task's micro-batch."""
        own = self.costs.plan.devices[task.stage] if task.phase is Phase.WEIGHT_GRAD else ()
        counts = Counter(range(len(own)))
        for leg in self.costs.inputs(task.stage, task.phase, task.stage in self.split):
            messages = self.costs.leg_messages(leg, task.micro_batch, backward=task.phase is not Phase.FORWARD)
            counts.update(message.receiver for message in messages)
        return counts

    def rest(self, limit: float, carried: Collection[int]) -> dict[int, list[float]]:
        """Returns for each device's tasks the least seconds from their start to the end of the step, however it is cut.

        Args:
            limit: the most seconds of the step's tasks.
            carried: the stages whose updates are made in the next step.

        Raises:
            TooSlowError: the step takes longer than the limit.
        """
        backward = any(task.phase is not Phase.FORWARD for tasks in self.orders.values() for task in tasks)
        least = LeastTimes(self.costs, self.split, carried=carried, forward_only=not backward)
        rest = {
            device: least.rest(tasks, [self.seconds[number] for number in self.queues[device]])
            for device, tasks in self.orders.items()
        }
        for device, tasks in self.orders.items():
            if least.before[tasks[0].stage] + rest[device][0] > limit:
                raise TooSlowError
        return rest


class TaskMessages:
    """Messages that each task originates, without forwarded ones."""

    def __init__(self, costs: CostModel, numbers: TaskNumbers, split: Collection[int]) -> None:
        self._costs, self._numbers, self._split = costs, numbers, split
        self._sent: dict[tuple[int, int, int, str], list[Message]] = {}

    def of(self, task: Task) -> list[Message]:
        """Returns what a task sends."""
        key = (task.stage, task.replica, self._costs.micro_batches[task.micro_batch].size, task.phase._value_)
        if key not in self._sent:
            self._sent[key] = list(self._messages(task))
        return self._sent[key]

    def over(self, leg: Leg, sender: Task) -> Iterator[Message]:
        """Yields what a task's slice sends over a leg: forward, or gradients back."""
        stage, phase, backward = leg.receiver, Phase.FORWARD, sender.phase is not Phase.FORWARD
        if backward:
            stage, phase = leg.sender, self._costs.gradient_phase(leg.sender, leg.sender in self._split)
        for message in self._costs.leg_messages(leg, sender.micro_batch, backward=backward):
            if message.sender == sender.replica:
                yield self._numbers.first(stage, phase, message.receiver), message.bytes, leg

    def _messages(self, task: Task) -> Iterator[Message]:
        if task.phase is Phase.FORWARD:
            for leg in self._costs.outgoing[task.stage]:
                yield from self.over(leg, task)
        elif task.phase is not Phase.WEIGHT_GRAD:
            # The nearest stage first, and what its backward waits for before what it hands on.
            for leg in sorted(self._costs.incoming[task.stage], key=lambda leg: -leg.sender):
                if not leg.sums:
                    yield from self.over(leg, task)
        if task.phase is Phase.INPUT_GRAD:
            samples = self._costs.slices(task.stage, task.micro_batch)[task.replica].size
            size = self._costs.delayed_bytes(task.stage, samples)
            yield self._numbers.first(task.stage, Phase.WEIGHT_GRAD, task.replica), size, None


class Relays:
    """The slices that relays hand on.

    A tensor leaves when all of the relay's slice has come; a gradient when those of all readers to which it was handed
    on have come, and the relay's own backward is over.

    Attributes:
        legs: the plan's.
        due: (leg to the relay, micro-batch, replica, whether gradients, whether of the next step) -> number of messages
            still to come.
    """

    def __init__(self, costs: CostModel, begun: Collection[Task]) -> None:
        """Starts a step.

        Args:
            costs: the costs of the plan.
            begun: forwards of the next step that end in this one; what they make goes only to others of them.
        """
        self.legs, self._costs = costs.legs, costs
        self._begun = {(task.stage, task.micro_batch) for task in begun}
        self.due: dict[tuple[int, int, int, bool, bool], int] = {}
        self._numbers: dict[tuple[int, int, bool], Counter[int]] = {}

    def copied(self) -> Relays:
        """Returns a copy of the state."""
        other = copy.copy(self)
        other.due = dict(self.due)
        return other

    def come(self, leg: Leg, micro_batch: int, replica: int, *, backward: bool, begun: bool = False) -> Iterator[Leg]:
        """Notes that a message has come to a relay's slice, or that its own backward is over.

        Args:
            leg: the leg over which the relay gets the tensors.
            micro_batch: the micro-batch.
            replica: the relay's replica.
            backward: whether it is a gradient.
            begun: whether it is of the next step.

        Yields:
            The legs over which the slice leaves now.
        """
        key = (leg.number, micro_batch, replica, backward, begun)
        if key not in self.due:
            self.due[key] = self._number(leg, micro_batch, replica, backward)
        self.due[key] -= 1
        if not self.due[key]:
            yield from [leg] if backward else self.onward(leg)

    def onward(self, leg: Leg) -> list[Leg]:
        """Returns the legs over which a leg's receiver hands its tensors on."""
        return [self.legs[number] for number in leg.onward]

    def awaited(self, leg: Leg | None, micro_batch: int) -> bool:
        """Returns whether one of the next step's forwards gets what a leg's receiver hands on."""
        return leg is not None and any(
            (after.receiver, micro_batch) in self._begun or self.awaited(after, micro_batch)
            for after in self.onward(leg)
        )

    def _number(self, leg: Leg, micro_batch: int, replica: int, backward: bool) -> int:
        key = (leg.number, self._costs.micro_batches[micro_batch].size, backward)
        if key not in self._numbers:
            counts: Counter[int] = Counter()
            for other in self.onward(leg) if backward else [leg]:
                for message in self._costs.leg_messages(other, micro_batch, backward=backward):
                    counts[message.receiver] += 1
            self._numbers[key] = counts
        return self._numbers[key][replica] + int(backward)


class Lookups:
    """The lookups of a step: each is for one forward, and begins one task ahead of it, as in a step.

    Attributes:
        of_stage: stage -> numbers of the forwards for which rows are looked up.
        after: number of a task -> the forwards whose lookups wait for it.
        unready: number of a forward -> number of what its lookup still waits for.
    """

    def __init__(
        self,
        costs: CostModel,
        numbers: TaskNumbers,
        orders: Mapping[int, Sequence[Task]],
        following: Collection[Task],
        *,
        next_forward: bool,
    ) -> None:
        """Finds the lookups.

        Args:
            costs: the costs of the plan.
            numbers: the number of each task.
            orders: device -> its tasks in order.
            following: the next step's forwards.
            next_forward: whether only these look up rows.
        """
        self.of_stage: dict[int, list[int]] = {}
        self.after: dict[int, list[int]] = {}
        self.unready: dict[int, int] = {}
        if "rows" not in costs.plan.shards:
            return
        for tasks in orders.values():
            own = [task for task in tasks if task in following] if next_forward else tasks
            for position, task in enumerate(own):
                if task.phase is Phase.FORWARD and costs.table_bytes(task.stage):
                    number = numbers.of(task)
                    self.of_stage.setdefault(task.stage, []).append(number)
                    self.unready[number] = int(position > 1)
                    if position > 1:
                        self.after.setdefault(numbers.of(own[position - 2]), []).append(number)

    def copied(self) -> Lookups:
        """Returns a copy, with as much to wait for."""
        other = copy.copy(self)
        other.unready = dict(self.unready)
        return other
