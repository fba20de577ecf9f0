"""The schedule as the plan means it: tasks take the time that is expected of them, and nothing else takes any."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from dapple_tf.clusters.cluster import Cluster, Device
from dapple_tf.planning.cost import CostModel
from dapple_tf.planning.plan import Plan
from dapple_tf.profiling.profile import Cost, LayerProfile, Profile, Tensor
from dapple_tf.scheduling.schedules import validate
from dapple_tf.simulation.simulation import Span
from dapple_tf.simulation.simulator import run
from dapple_tf.view.timeline import ALL_REDUCE, SEND, Timeline
from graph_passes.tasks import Phase, Schedule, Task


def planned(
    plan: Plan, profile: Profile | None = None, cluster: Cluster | None = None, *, schedule: Schedule | None = None
) -> Timeline:
    """The step as it would be if transfers and reductions were free and devices didn't slow each other down.

    Tasks start as soon as their device's order, their data and what they stand ``after`` in the schedule allow. With a
    profile they take their stage's times, and updates are made; what a step costs besides is left out, so that only
    the schedule's own bubbles are left. Without one, tasks take ``plan.task_seconds``; without these F = Bx = Bw = 1
    and B = 2, in the unit ``F``.

    Args:
        plan: the plan.
        profile: what its layers cost.
        cluster: tells speeds and memory of devices, where there is a profile.
        schedule: this one instead of the plan's; of the plan's micro-batches or fewer, with or without backwards.

    Returns:
        A timeline with the name ``planned``. Without a profile it has no memory.

    Raises:
        PlanError: the plan doesn't fit the profile or the cluster's devices.
        ScheduleError: the schedule isn't one for this plan, or deadlocks.
    """
    costs = _TaskTimes(plan) if profile is None else CostModel(plan, profile, _free(plan, cluster))
    if schedule is None:
        schedule = costs.schedule
    samples = plan.global_batch_size if schedule is costs.schedule else _checked_samples(costs, schedule)
    step = Timeline.simulated(run(costs, schedule), "planned")
    spans = _without_links(step.spans)
    latency = max((span.end for span in spans), default=0.0)
    step = dataclasses.replace(step, latency=latency, spans=spans, samples=samples, reduced_on={})
    if profile is None:
        step = dataclasses.replace(step, memory={}, unit="F" if plan.task_seconds is None else "s")
    return step


def _free(plan: Plan, cluster: Cluster | None) -> Cluster:
    """The devices of a cluster, with links that cost nothing and cores for each; all that the plan names, if None."""
    if cluster is None:
        used = [*plan.working_devices, *(plan.weight_devices or ())]
        count = 1 + max(device for devices in used for device in devices)
        return Cluster(tuple(Device(f"device {index}", 0) for index in range(count)), real=False)
    return Cluster(cluster.devices, real=False)


class _TaskTimes(CostModel):
    """Costs of a plan of which only the tasks' times are known."""

    def __init__(self, plan: Plan) -> None:
        times = plan.task_seconds or [(1.0, 1.0, 1.0)] * plan.num_stages
        names = _layer_names(plan.cuts)
        layers = [
            LayerProfile(name, Cost(forward), Cost(input_grad + weight_grad), Cost(weight_grad))
            for name, (forward, input_grad, weight_grad) in zip(names, times, strict=True)
        ]
        tensors = [Tensor(stage, (stage + 1,), Cost()) for stage in range(plan.num_stages - 1)]
        profile = Profile("tasks", "none", (1,), tuple(layers), tuple(tensors))
        # What a task recomputes is in its time.
        super().__init__(dataclasses.replace(plan, recompute="none"), profile, _free(plan, None))

    def seconds(self, task: Task, device: int | None = None) -> float:
        """The plan's times, the first stage's Bx and the Bw of stages without parameters included."""
        cost = self.stages[task.stage]
        whole, weight = cost.backward.fixed, cost.backward_weight.fixed
        times = {
            Phase.FORWARD: cost.forward.fixed,
            Phase.BACKWARD: whole,
            Phase.INPUT_GRAD: whole - weight,
            Phase.WEIGHT_GRAD: weight,
        }
        return times[task.phase]


def _layer_names(cuts: Sequence[str]) -> list[str]:
    """A name for the only layer of each stage, the last one's unlike the others'."""
    last = "last"
    while last in cuts:
        last += "'"
    return [*cuts, last]


def _checked_samples(costs: CostModel, schedule: Schedule) -> int:
    """The samples of the micro-batches of a schedule, which is checked."""
    plan = costs.plan
    count = max((task.micro_batch + 1 for task in schedule.tasks), default=1)
    validate(
        schedule,
        plan.devices,
        min(count, plan.micro_batches),
        forward_only=all(task.phase is Phase.FORWARD for task in schedule.tasks),
        weight_devices=plan.weight_devices,
    )
    return sum(micro_batch.size for micro_batch in costs.micro_batches[:count])


def _without_links(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans in which devices compute; what waited for a transfer or a reduction waits for what made these wait."""
    kept = [span.kind not in (SEND, ALL_REDUCE) for span in spans]
    places = {old: new for new, old in enumerate(index for index, keep in enumerate(kept) if keep)}

    def cause(index: int | None) -> int | None:
        while index is not None and not kept[index]:
            index = spans[index].cause
        return None if index is None else places[index]

    return tuple(span._replace(cause=cause(span.cause)) for span, keep in zip(spans, kept, strict=True) if keep)
