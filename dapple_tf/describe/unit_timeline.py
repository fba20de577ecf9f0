"""A schedule over time that depends on the tasks' lengths only: no links, no reductions, no memory."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from dapple_tf.schedules.schedule_check import lockstep
from dapple_tf.view.timeline import Span, Timeline
from graph_passes.ir.batching import intervals, split_evenly
from graph_passes.ir.tasks import Phase, Schedule, Task

if TYPE_CHECKING:
    from dapple_tf.describe.plan import Plan

F, B, BX, BW = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD


def unit_timeline(plan: Plan, schedule: Schedule | None = None) -> Timeline:
    """Returns a plan's step if tasks take `StagePlan.task_seconds`, by default F = Bx = Bw = 1 and B = 2.

    All else takes no time.

    Args:
        plan: the plan.
        schedule: a legal schedule to use instead of the plan's, with at most the plan's micro-batches.

    Returns:
        A timeline with the name ``planned``, without memory; its unit is ``F`` if the plan has no times.

    Raises:
        ScheduleError: the schedule deadlocks.
    """
    schedule = plan.order_tasks() if schedule is None else schedule
    spans = _spans(plan, schedule)
    count = max((task.micro_batch + 1 for task in schedule.tasks), default=1)
    return Timeline(
        "planned",
        max((span.end for span in spans), default=0.0),
        spans,
        plan.device_labels(),
        samples=sum(split_evenly(plan.global_batch_size, plan.micro_batches)[:count]),
        unit="F" if plan.stages[0].task_seconds is None else "s",
    )


def _spans(plan: Plan, schedule: Schedule) -> tuple[Span, ...]:
    """Returns all tasks as early as possible, by start, each with the position of the task that it waited for last."""
    micro_batches = intervals(split_evenly(plan.global_batch_size, plan.micro_batches))
    slices = [[plan.slices(stage, part) for part in micro_batches] for stage in range(plan.num_stages)]
    spans: dict[Task, Span] = {}
    causes: dict[Task, Task] = {}
    last: dict[int, Task] = {}
    for device, task in itertools.chain.from_iterable(step.items() for step in lockstep(schedule)):
        own = slices[task.stage][task.micro_batch][task.replica]
        before = [
            other
            for other in schedule.inputs(task)
            if other.stage == task.stage or own.overlap(slices[other.stage][other.micro_batch][other.replica]).size
        ]
        before += [last[device]] if device in last else []
        if before:
            causes[task] = max(before, key=lambda other: spans[other].end)
        start = spans[causes[task]].end if before else 0.0
        forward, *backward = plan.stages[task.stage].task_seconds or (1.0, 1.0, 1.0)
        seconds = {F: forward, B: sum(backward), BX: backward[0], BW: backward[1]}[task.phase]
        place = (device, task.stage, task.micro_batch, task.replica)
        spans[task] = Span(task.phase.value, start, start + seconds, *place)
        last[device] = task
    ordered = sorted(spans, key=lambda task: (spans[task].start, spans[task].device or 0))
    places = {task: position for position, task in enumerate(ordered)}
    return tuple(spans[task]._replace(cause=places[causes[task]] if task in causes else None) for task in ordered)
