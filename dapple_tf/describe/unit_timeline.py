"""A schedule over time that depends on the tasks' lengths only: no links, no reductions, no memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dapple_tf.schedules.schedule_request import ScheduleError
from dapple_tf.view.timeline import Span, Timeline
from graph_passes.ir.batching import Interval, intervals, split_evenly
from graph_passes.ir.tasks import Phase, Schedule, Task

if TYPE_CHECKING:
    from dapple_tf.describe.plan import Plan


def unit_timeline(plan: Plan, schedule: Schedule | None = None) -> Timeline:
    """Returns a plan's step if tasks take ``plan.task_seconds``, by default F = Bx = Bw = 1 and B = 2, and all else 0.

    Args:
        plan: the plan.
        schedule: a legal schedule to use instead of the plan's, with at most the plan's micro-batches.

    Returns:
        A timeline with the name ``planned``, without memory; its unit is ``F`` if the plan has no times.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    schedule = plan.order_tasks() if schedule is None else schedule
    spans = _Order(plan, schedule).spans()
    count = max((task.micro_batch + 1 for task in schedule.tasks), default=1)
    return Timeline(
        "planned",
        max((span.end for span in spans), default=0.0),
        spans,
        plan.device_labels(),
        samples=sum(split_evenly(plan.global_batch_size, plan.micro_batches)[:count]),
        unit="F" if plan.task_seconds is None else "s",
    )


class _Order:
    """The start of each task of a schedule, as early as possible."""

    def __init__(self, plan: Plan, schedule: Schedule) -> None:
        self._schedule = schedule
        self._seconds: Sequence[Sequence[float]] = plan.task_seconds or [(1.0, 1.0, 1.0)] * plan.num_stages
        micro_batches = intervals(split_evenly(plan.global_batch_size, plan.micro_batches))
        self._slices = [[plan.slices(stage, part) for part in micro_batches] for stage in range(plan.num_stages)]
        self._spans: dict[Task, Span] = {}

    def spans(self) -> tuple[Span, ...]:
        """Returns all tasks' spans by start, each with the position of the task that it waited for last."""
        queues = {device: list(reversed(tasks)) for device, tasks in self._schedule.orders.items()}
        last: dict[int, Task] = {}
        causes: dict[Task, Task] = {}
        moved = True
        while moved:
            moved = False
            for device, tasks in queues.items():
                while tasks and (before := self._ready(tasks[-1])) is not None:
                    task = tasks.pop()
                    if device in last:
                        before.append(last[device])
                    start = max((self._spans[other].end for other in before), default=0.0)
                    if before:
                        causes[task] = max(before, key=lambda other: self._spans[other].end)
                    end = start + self._length(task)
                    self._spans[task] = Span(
                        task.phase.value, start, end, device, task.stage, task.micro_batch, task.replica
                    )
                    last[device] = task
                    moved = True
        if any(queues.values()):
            stuck = next(tasks[-1] for tasks in queues.values() if tasks)
            raise ScheduleError(f"the schedule deadlocks: {stuck} never has what it waits for")
        ordered = sorted(self._spans, key=lambda task: (self._spans[task].start, self._spans[task].device or 0))
        places = {task: position for position, task in enumerate(ordered)}
        return tuple(
            self._spans[task]._replace(cause=places[causes[task]] if task in causes else None) for task in ordered
        )

    def _ready(self, task: Task) -> list[Task] | None:
        """Returns the tasks that a task waits for besides its device; None if one isn't over."""
        own = self._slice(task)
        before = [
            other
            for other in self._schedule.inputs(task)
            if other.stage == task.stage or own.overlap(self._slice(other)).size
        ]
        return before if all(other in self._spans for other in before) else None

    def _slice(self, task: Task) -> Interval:
        return self._slices[task.stage][task.micro_batch][task.replica]

    def _length(self, task: Task) -> float:
        forward, input_grad, weight_grad = self._seconds[task.stage]
        return {
            Phase.FORWARD: forward,
            Phase.BACKWARD: input_grad + weight_grad,
            Phase.INPUT_GRAD: input_grad,
            Phase.WEIGHT_GRAD: weight_grad,
        }[task.phase]
