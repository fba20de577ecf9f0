"""Lookups of rows in shards in a simulated step: when each may begin."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence

from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.step_tasks import TaskNumbers
from graph_passes.ir.tasks import Phase, Task


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
        orders: Mapping[int, Sequence[Task]],
        following: Collection[Task],
        *,
        next_forward: bool,
    ) -> None:
        """Finds the lookups; for the arguments, see `Gathers`."""
        self.of_stage: dict[int, list[int]] = {}
        self.after: dict[int, list[int]] = {}
        self.unready: dict[int, int] = {}
        if "rows" not in costs.plan.shards:
            return
        numbers = TaskNumbers([len(devices) for devices in costs.plan.devices], len(costs.micro_batches))
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
