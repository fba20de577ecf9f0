"""The tasks of a step by numbers, so that a simulation looks things up in lists rather than by tasks."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.least_times import LeastTimes
from graph_passes.ir.tasks import Phase, Schedule, Task


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
