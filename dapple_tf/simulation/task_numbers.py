"""Numbers for the tasks of a step, so that a simulation looks things up in lists rather than by tasks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from graph_passes.ir.tasks import Phase, Task


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
