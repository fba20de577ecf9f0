"""Out-of-order plans that follow from a plan of DAPPLE's: candidates for the planner, which simulates them.

    what stays                  what changes                                            policies
    the stages                  the order of tasks                                      of Placement.STRAIGHT
    the devices of the stages   v stages on each, repeating: 0 1 2 0 1 2                of Placement.PERIODIC
    the devices of the stages   two stages on each, there and back: 0 1 2 2 1 0         of Placement.VEE
    the stages and their order  replicated stages in chunks, reduced one by one         those of the first row

The last may be combined with the first: Out-Of-Order BackProp (EuroSys'22), section 6. Each policy says itself with
which placements it is tried, and where (`Policy.planning`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.chunks import chunked
from dapple_tf.planning.plan_request import FOUND_AGAIN, PlanRequest
from dapple_tf.planning.recompute_modes import modes_on
from dapple_tf.planning.stage_cuts import by_device, by_time
from dapple_tf.schedules.policy import Policy
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import run
from graph_passes.ir.tasks import Phase, Task

_MOST_PER_DEVICE = 12
"""The most stages on a device that are tried."""
_DIGITS = 3
"""Digits of `StagePlan.task_seconds`: enough to order tasks, few enough to read."""


def with_task_seconds(plan: Plan, request: PlanRequest) -> Plan:
    """Returns the plan, with its stages' times relative to the longest if its policy orders tasks by them."""
    plan = plan.with_options(task_seconds=None)
    if not plan.policy.planning.by_seconds:
        return plan
    seconds = CostModel(plan, request.profile, request.cluster).task_seconds
    longest = max(itertools.chain(*seconds)) or 1.0

    def rounded(number: float) -> float:
        return float(f"{number / longest:.{_DIGITS}g}")

    return plan.with_options(task_seconds=tuple((rounded(f), rounded(x), rounded(w)) for f, x, w in seconds))


def largest_reverse_first_k(plan: Plan, profile: Profile, cluster: Cluster) -> int:
    """Returns the largest k of reverse first-k that memory allows, 0 also where not even that fits.

    Algorithm 2 of Out-Of-Order BackProp (EuroSys'22), lines 1 and 2, bounds k by f(j) < MXM, where f(j) is the memory
    when only the weight gradients of layers 1 to j are left to compute: M_fwd - sum over i > j of M(dO_i) + sum over
    i <= j of M(dW_i). Here f is the simulated step's most memory, which has these terms, residuals that wait for Bw
    (`CostModel.delayed_bytes`) and gradients, along with all others on each device.

    Args:
        plan: the plan, whose own k doesn't matter.
        profile: its layers' costs.
        cluster: the devices, whose known memory is the limit.

    Raises:
        PlanError: the plan doesn't fit the profile or the cluster.
    """
    if all(device.memory_bytes is None for device in cluster.devices):
        return plan.num_stages

    def fits(k: int) -> bool:
        try:
            return run(CostModel(dataclasses.replace(plan, reverse_first_k=k, report=None), profile, cluster)).fits
        except PlanError:
            return False  # not even one micro-batch

    # More delayed weight gradients keep more: the largest k that fits, by bisection, all stages first.
    low, high = 0, plan.num_stages
    middle = high
    while low < high:
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
        middle = (low + high + 1) // 2
    return low


def even_plans(request: PlanRequest, recompute: str) -> Iterator[Plan]:
    """Pipelines of stages of the same time and number of devices, on all devices, that fit in memory.

    Under DAPPLE's policies unequal stages may be better, but not when weight gradients fill the bubbles.
    """
    devices = request.cluster.num_devices
    for stages in range(1, min(devices, len(request.profile.layers)) + 1):
        replicas, rest = divmod(devices, stages)
        if rest:
            continue
        members = [range(i * replicas, (i + 1) * replicas) for i in range(stages)]
        speeds = [sum(request.cluster.devices[device].speed for device in group) for group in members]
        cuts = by_time(request.profile, stages, speeds)
        for count in request.counts:
            if replicas <= request.batch // count and (count > 1 or stages == 1):
                plan = request.plan(cuts, members, count, recompute)
                if min(request.costs(plan).holds or (1,)) > 0:
                    yield plan


def same_stages(base: Plan, request: PlanRequest, policies: Sequence[Policy]) -> Iterator[Plan]:
    """Yields the same stages under these policies."""
    for policy in policies:
        yield from _legal(base, request, schedule=policy)


def stages_per_device(base: Plan, request: PlanRequest) -> Iterator[tuple[Policy, int]]:
    """Yields the (policy, stages on each device) that a plan's devices allow, the most likely to gain first."""
    most = min(_MOST_PER_DEVICE, len(request.profile.layers) // base.num_stages)
    if base.num_stages > 1 and request.allows("several_stages"):
        for count in range(2, most + 1):
            for policy in request.ranked:
                if _stages_on(base.devices, policy, count) is None:
                    continue
                if not policy.planning.where_short or _is_short(base, request):
                    yield policy, count


def _is_short(base: Plan, request: PlanRequest) -> bool:
    """Returns whether memory limits the micro-batches in flight of a plan."""
    holds = request.costs(base).holds
    return holds is not None and min(holds) < base.micro_batches


def _stages_on(places: Sequence[tuple[int, ...]], policy: Policy, count: int) -> list[tuple[int, ...]] | None:
    """Returns each stage's devices, ``count`` on each place, as a policy needs them; None if it can't have them."""
    candidates = (placement.stages(places, count) for placement in policy.planning.placements)
    return next((devices for devices in candidates if devices is not None), None)


def more_stages(base: Plan, request: PlanRequest, policy: Policy, count: int) -> Iterator[Plan]:
    """Yields plans with ``count`` stages on each device under a policy, with times in proportion to the devices."""
    devices = _stages_on(base.devices, policy, count)
    if devices is None:
        return
    speeds = [sum(request.cluster.devices[device].speed for device in group) for group in devices]
    cuts = tuple(by_device(request.profile, devices, speeds))
    yield from _legal(base, request, cuts=cuts, devices=tuple(devices), schedule=policy)


def with_chunks(base: Plan, request: PlanRequest, chunks: int) -> Iterator[Plan]:
    """Yields the plan with its replicated stages cut into chunks, if that is possible and changes anything."""
    if max(base.replicas) > 1 and _one_group_per_device(base):
        cut = chunked(base, request.profile, chunks)
        if cut != base:
            yield from _legal(cut, request)


def groups(plan: Plan) -> list[tuple[range, tuple[int, ...]]]:
    """Returns the runs of consecutive stages with equal devices, and these devices."""
    runs: list[tuple[range, tuple[int, ...]]] = []
    for devices, stages in itertools.groupby(range(plan.num_stages), key=lambda stage: plan.devices[stage]):
        members = list(stages)
        runs.append((range(members[0], members[-1] + 1), devices))
    return runs


def least_seconds(costs: CostModel) -> float:
    """Returns a lower bound of a plan's step, whatever the order of its tasks.

    It is the time of the busiest device, or of the busiest port of a device or network card.
    """
    busy: dict[object, float] = {}
    plan, cluster = costs.plan, costs.cluster
    count = len(costs.micro_batches)
    for stage, devices in enumerate(plan.devices):
        for replica, device in enumerate(devices):
            tasks = (Task(stage, phase, count - 1, replica) for phase in (Phase.FORWARD, Phase.BACKWARD))
            seconds = count * sum(map(costs.whole_seconds, tasks)) + costs.apply_seconds(stage, device)
            busy[device] = busy.get(device, 0.0) + seconds
    for (producer, consumer), backward in itertools.product(costs.routes, (False, True)):
        ends = (consumer, producer) if backward else (producer, consumer)
        for message in costs.messages(producer, consumer, count - 1, backward=backward):
            source, target = plan.devices[ends[0]][message.sender], plan.devices[ends[1]][message.receiver]
            if source != target:
                link = cluster.link(source, target)
                a, b = cluster.devices[source].server, cluster.devices[target].server
                for port in (("out", source), ("in", target)) if a == b else (("card out", a), ("card in", b)):
                    busy[port] = busy.get(port, 0.0) + count * message.bytes / link.bandwidth
    return max(busy.values())


def name(plan: Plan) -> str:
    """Returns a plan's out-of-order options: ``zb_h2, stages 0-3 and 4-7 in chunks, k = 2``; else empty."""
    parts = [str(plan.policy)] if not plan.policy.planning.formula else []
    runs = groups(plan)
    used = [device for _, devices in runs for device in devices]
    most = max(used.count(device) for device in set(used))
    if most > 1:
        parts.append(f"{most} stages on each device")
    cut = [f"{stages[0]}-{stages[-1]}" for stages, _ in runs if len(stages) > 1]
    if cut and most == 1:
        parts.append(f"wait-free reduction of chunks (stages {', '.join(cut)})")
    if plan.reverse_first_k:
        parts.append(f"reverse first-k with k = {plan.reverse_first_k}")
    if plan.carried_updates:
        parts.append(f"{plan.carried_updates} updates during the next step's forward")
    return ", ".join(parts)


def _one_group_per_device(plan: Plan) -> bool:
    used = [device for _, devices in groups(plan) for device in devices]
    return len(used) == len(set(used))


def _legal(base: Plan, request: PlanRequest, **changes: Any) -> Iterator[Plan]:
    """Yields the plan with changes and its stages' times, if that is a legal plan."""
    try:
        dropped = {**FOUND_AGAIN, "task_seconds": None}
        dropped |= {"recompute": modes_on(base, changes.get("devices", base.devices))}
        plan = request.shared(base.with_options(**(dropped | changes)))
        if isinstance(request.first_k, int):
            k = min(request.first_k, plan.num_stages)
            plan = dataclasses.replace(plan, reverse_first_k=k)
        yield with_task_seconds(plan, request)
    except PlanError:
        return
