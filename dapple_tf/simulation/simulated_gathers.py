"""Gathers of parameters in shards in a simulated step: when they may begin, and what they keep."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence

from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.step_tasks import TaskNumbers
from dapple_tf.view.timeline import ALL_REDUCE, Span
from graph_passes.ir.tasks import Phase, Task

_TASKS = frozenset(phase.value for phase in Phase)


class Gathers:
    """The gathers of a step: each waits until all devices of its stage have come to the stage before it, as in a step.

    Attributes:
        firsts: stage -> the first forwards of its replicas, which wait for its gather.
        after: number of a task -> the stages whose gathers wait for it.
        unready: stage -> number of what its gather still waits for.
    """

    def __init__(
        self,
        costs: CostModel,
        orders: Mapping[int, Sequence[Task]],
        following: Collection[Task],
        *,
        next_forward: bool,
    ) -> None:
        """Finds the gathers.

        Args:
            costs: the plan's costs.
            orders: device -> its tasks, in order.
            following: those of them that are the next step's, if it simulates the next step's forwards.
            next_forward: whether it does.
        """
        self.firsts: dict[int, list[Task]] = {}
        self.after: dict[int, list[int]] = {}
        self.unready: dict[int, int] = {}
        if not costs.plan.parameter_shards:
            return
        numbers = TaskNumbers([len(devices) for devices in costs.plan.devices], len(costs.micro_batches))
        for tasks in orders.values():
            own = [task for task in tasks if task in following] if next_forward else tasks
            positions: dict[int, int] = {}
            for position, task in enumerate(own):
                if task.phase is Phase.FORWARD and costs.gathers(task.stage):
                    positions.setdefault(task.stage, position)
            for stage, position in positions.items():
                self.firsts.setdefault(stage, []).append(own[position])
                self.unready.setdefault(stage, 0)
            for before, stage in itertools.pairwise(positions):
                if positions[before]:
                    self.after.setdefault(numbers.of(own[positions[before] - 1]), []).append(stage)
                    self.unready[stage] += 1

    def copied(self) -> Gathers:
        """Returns a copy, with as much to wait for."""
        other = copy.copy(self)
        other.unready = dict(self.unready)
        return other


def gathered(costs: CostModel, spans: Sequence[Span]) -> Iterator[tuple[int, float, float, float]]:
    """Yields (device, start, end, bytes) of whole parameters: from their gather to the stage's last task there."""
    ends: dict[tuple[int | None, int], float] = {}
    for span in spans:
        if span.kind in _TASKS:
            ends[span.device, span.stage] = max(span.end, ends.get((span.device, span.stage), 0.0))
    for span in spans if costs.plan.parameter_shards else ():
        if span.kind == ALL_REDUCE and span.device is not None:
            end = ends.get((span.device, span.stage), span.end)
            yield from ((span.device, *life, span.bytes) for life in _until(span.start, end, spans))


def _until(start: float, end: float, spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Returns the time from a gather to its release; a release before it is that of an earlier step's."""
    if start <= end:
        return [(start, end)]
    return [(0.0, end), (start, max(span.end for span in spans))]
