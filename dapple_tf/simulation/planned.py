"""The schedule as planned: tasks take their expected times, and nothing else takes any."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dapple_tf.describe.cluster import Cluster, Device
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.describe.unit_timeline import unit_timeline
from dapple_tf.schedules.schedules import validate
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import run
from dapple_tf.view.timeline import LINK_KINDS, Span, Timeline
from graph_passes.ir.tasks import Phase, Schedule


def planned(
    plan: Plan, profile: Profile | None = None, cluster: Cluster | None = None, *, schedule: Schedule | None = None
) -> Timeline:
    """Returns the step as it would be if transfers and reductions were free and devices didn't slow each other down.

    Tasks start as soon as their device's order and their data allow.
    With a profile they take their stage's times, and updates are made; other costs are left out, so that only the
    schedule's own bubbles remain. Without one, tasks take `StagePlan.task_seconds`; without these F = Bx = Bw = 1 and
    B = 2, in the unit ``F``.

    Args:
        plan: the plan.
        profile: its layers' costs.
        cluster: gives speeds and memory of devices if there is a profile.
        schedule: used instead of the plan's; with at most the plan's micro-batches, with or without backwards.

    Returns:
        A timeline with the name ``planned``. Without a profile it has no memory.

    Raises:
        PlanError: the plan doesn't fit the profile or the cluster's devices.
        ScheduleError: the schedule isn't one for this plan, or deadlocks.
    """
    if profile is None:
        if schedule is not None:
            _check(plan, schedule)
        return unit_timeline(plan, schedule)
    costs = CostModel(plan, profile, _free(plan, cluster))
    samples = plan.global_batch_size
    if schedule is None:
        schedule = costs.schedule
    else:
        samples = sum(micro_batch.size for micro_batch in costs.micro_batches[: _check(plan, schedule)])
    step = run(costs, schedule).drawn("planned")
    spans = _without_links(step.spans)
    latency = max((span.end for span in spans), default=0.0)
    return dataclasses.replace(step, latency=latency, spans=spans, samples=samples, reduced_on={})


def _free(plan: Plan, cluster: Cluster | None) -> Cluster:
    """Returns the cluster's or plan's devices with free links and cores for each."""
    if cluster is None:
        count = 1 + max(device for devices in plan.working_devices for device in devices)
        return Cluster(tuple(Device(f"device {index}", 0) for index in range(count)), real=False)
    return Cluster(cluster.devices, real=False)


def _check(plan: Plan, schedule: Schedule) -> int:
    """Checks a schedule of a plan's stages; returns its number of micro-batches."""
    count = max((task.micro_batch + 1 for task in schedule.tasks), default=1)
    validate(
        schedule,
        plan.devices,
        min(count, plan.micro_batches),
        forward_only=all(task.phase is Phase.FORWARD for task in schedule.tasks),
    )
    return count


def _without_links(spans: Sequence[Span]) -> tuple[Span, ...]:
    """Returns the spans of computation; waits for a transfer or a reduction become waits for its own cause."""
    computes = [span.kind not in LINK_KINDS for span in spans]
    places = {old: new for new, old in enumerate(index for index, computing in enumerate(computes) if computing)}

    def cause(index: int | None) -> int | None:
        while index is not None and not computes[index]:
            index = spans[index].cause
        return None if index is None else places[index]

    return tuple(
        span._replace(cause=cause(span.cause)) for span, computing in zip(spans, computes, strict=True) if computing
    )
