"""Which of the ready jobs a device takes first: the keys of list scheduling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from dapple_tf.schedules.schedule_request import Job, ScheduleRequest
from graph_passes.ir.tasks import Phase, inputs

F, BX, BW = Phase.FORWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD

Key = Callable[[Job, float], tuple[float, ...]]
"""(job, when it became ready) -> its key; a device takes the job with the least."""


def fill_gaps(job: Job, ready: float) -> tuple[float, ...]:
    """Ranks weight gradients last; among them the one that became ready first."""
    return (1.0, ready) if job.phase is BW else (0.0, 0.0)


def critical_path_first(request: ScheduleRequest) -> Key:
    """Ranks by the longest remaining work; ties go to the earlier micro-batch, then to the earlier stage."""
    remaining = critical_path(request)
    return lambda job, ready: (-remaining(job), job.micro_batch, job.stage)


def oldest_first(request: ScheduleRequest) -> Key:
    """Ranks weight gradients last and the oldest micro-batch first; within it, the longest remaining work."""
    remaining = critical_path(request)
    return lambda job, ready: (float(job.phase is BW), job.micro_batch, -remaining(job))


def deepest_first(request: ScheduleRequest) -> Key:
    """Ranks weight gradients last, forwards before them; within a phase, the job nearest to the step's end."""
    remaining = critical_path(request)
    order = (BX, F, BW)
    return lambda job, ready: (order.index(job.phase), remaining(job), job.micro_batch)


def critical_path(request: ScheduleRequest) -> Callable[[Job], float]:
    """Returns the longest time from a job's start to the step's end, by `ScheduleRequest.duration`.

    The classic priority of list scheduling; all backwards are Bx and Bw.
    """
    lengths: dict[tuple[int, Phase], float] = defaultdict(float)
    last_first = [(stage, phase) for stage in range(request.stages) for phase in (BW, BX)]
    last_first += [(stage, F) for stage in reversed(range(request.stages))]
    for stage, phase in last_first:
        lengths[stage, phase] += request.duration(Job(stage, phase, 0))
        for before in inputs(stage, phase):
            lengths[before] = max(lengths[before], lengths[stage, phase])
    return lambda job: lengths[job.stage, job.phase]
