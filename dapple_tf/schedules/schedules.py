"""Scheduling policies: the order in which each device runs its forwards and backwards in one step.

    policy                      what it is                                               module
    gpipe, dapple_a, dapple_b   K forwards, then one backward and one forward in turn    one_forward_one_backward
    fast_forward[_a, _b]        these with weight gradients (Bw) in the gaps             out_of_order
    modulo                      list scheduling of any placement                         out_of_order
    interleaved                 Megatron's 1F1B with several stages per device           interleaving
    zb_h1, zb_h2, zb_v          zero bubble: Bw are put off as far as memory allows      zero_bubble
    zero_bubble                 the best of these for given times and limits             zero_bubble
    joint                       a main stream and a sub-stream (Bw) on one device        stream_schedule

Weight gradients run in micro-batch order under every policy, so that they are added up in one order and results don't
depend on the policy, to the last bit. The GPipe paper draws the backwards of a step last micro-batch first; the peak
memory (M micro-batches) and, for micro-batches of equal cost, the makespan are the same either way.

Every replica of a stage runs its slice of each micro-batch (the split approach, section 5.2.2 and Fig. 8a), hence all
replicas of a stage have one order. All functions are pure. `schedule_check.validate` checks what comes out.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from dapple_tf.schedules import interleaving, out_of_order, stream_schedule, zero_bubble
from dapple_tf.schedules.one_forward_one_backward import RULE
from dapple_tf.schedules.schedule_check import in_flight, validate
from dapple_tf.schedules.schedule_request import (
    Active,
    Job,
    Orders,
    ScheduleError,
    ScheduleRequest,
    TaskSeconds,
    check_count,
    check_devices,
)
from graph_passes.ir.tasks import Phase, Schedule, Task

__all__ = [
    "POLICIES",
    "STREAM_POLICIES",
    "WHOLE_BACKWARD",
    "Active",
    "ScheduleError",
    "check_schedule",
    "in_flight",
    "make_schedule",
    "resolve_warm_up",
    "validate",
    "warm_up_counts",
]

POLICIES = (*RULE, *out_of_order.FAST_FORWARD, "modulo", "interleaved", "zb_h1", "zb_h2", "zb_v", "zero_bubble")
"""The names of the policies that `make_schedule` knows, for devices of any number."""

STREAM_POLICIES = (stream_schedule.JOINT,)
"""Those for two streams of one device, which want `weight_devices` besides."""

WHOLE_BACKWARD = (*RULE, "interleaved")
"""The policies that run a stage's backward as one task B, unless an option splits it."""

_STRAIGHT = (*RULE, *out_of_order.FAST_FORWARD, "zb_h1", "zb_h2", "zero_bubble")
"""The policies that want all stages of a device next to each other."""


def warm_up_counts(policy: str, stages: int, micro_batches: int, holds: Sequence[int] | None = None) -> tuple[int, ...]:
    """Return the warm-up K of each stage, each on a device of its own: see `resolve_warm_up`.

    Args:
        policy: one of `POLICIES`.
        stages: S, the number of stages.
        micro_batches: M; no K exceeds it.
        holds: D_i, the number of micro-batches whose activations fit on a device of stage i; None is no limit.

    The paper has one D. With one per stage a K never exceeds that of the stage before: the first backward of stage i
    waits for K_(i+1) forwards of stage i, which would never come.

    Raises:
        ScheduleError: an unknown policy, a number below 1, `holds` of another length than S, or fewer than M under
            `gpipe`, which has to hold all.
    """
    return resolve_warm_up(policy, stages, micro_batches, holds=holds)


def resolve_warm_up(
    policy: str,
    stages: int,
    micro_batches: int,
    *,
    holds: Sequence[int] | None = None,
    warm_up: Sequence[int] | None = None,
    devices: Sequence[Sequence[int]] | None = None,
    reverse_first_k: int = 0,
    task_seconds: TaskSeconds | None = None,
    weight_devices: Sequence[Sequence[int]] | None = None,
    weight_regions: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return K of each stage, the most micro-batches it has in flight, from F to B or Bw.

    Under gpipe and dapple_* it is also the number of forwards before the first backward: ``warm_up`` where given, else
    the policy's. Under fast_forward*, zb_h1 and zb_h2 it is the limit within which Bw are delayed; under the others
    what the schedule comes to. A given K above M counts as M, so that a plan's warm-up also serves an epoch's short
    last batch.

    Args:
        policy: one of `POLICIES`.
        stages: S.
        micro_batches: M.
        holds: D of each stage, as in `warm_up_counts`.
        warm_up: K of each stage in place of the policy's.
        devices: of each stage; a device for each by default.
        reverse_first_k: as in `make_schedule`, as the other options.
        task_seconds: for policies that fill gaps.
        weight_devices: where Bw runs.
        weight_regions: as in `make_schedule`.

    Raises:
        ScheduleError: as `make_schedule`.
    """
    _check_policy(policy)
    check_count("stages", stages)
    if devices is None:
        devices = [[stage] for stage in range(stages)]
    request = ScheduleRequest.of(
        policy,
        devices,
        micro_batches,
        holds,
        warm_up,
        task_seconds,
        weight_devices,
        reverse_first_k,
        weight_regions,
    )
    _check_request(request)
    if policy in RULE or policy in out_of_order.FAST_FORWARD:
        return tuple(out_of_order.in_flight_limits(request))
    if policy in ("zb_h1", "zb_h2"):
        return tuple(zero_bubble.in_flight_limits(request))
    return in_flight(_schedule(request, None))


def check_schedule(
    policy: str,
    devices: Sequence[Sequence[int]],
    micro_batches: int,
    *,
    holds: Sequence[int] | None = None,
    warm_up: Sequence[int] | None = None,
    reverse_first_k: int = 0,
    task_seconds: TaskSeconds | None = None,
    weight_devices: Sequence[Sequence[int]] | None = None,
    weight_regions: Sequence[int] | None = None,
) -> None:
    """Check that `make_schedule` takes these arguments, without making the schedule.

    Raises:
        ScheduleError: as `make_schedule`.
    """
    _check_policy(policy)
    request = ScheduleRequest.of(
        policy,
        devices,
        micro_batches,
        holds,
        warm_up,
        task_seconds,
        weight_devices,
        reverse_first_k,
        weight_regions,
    )
    _check_request(request)


def make_schedule(
    policy: str,
    devices: Sequence[Sequence[int]],
    micro_batches: int,
    *,
    holds: Sequence[int] | None = None,
    warm_up: Sequence[int] | None = None,
    active: Active | None = None,
    forward_only: bool = False,
    reverse_first_k: int = 0,
    task_seconds: TaskSeconds | None = None,
    weight_devices: Sequence[Sequence[int]] | None = None,
    weight_regions: Sequence[int] | None = None,
) -> Schedule:
    """Make the order of each device's tasks in one step.

        >>> print(make_schedule("dapple_a", [[0], [1]], 3))
        0: 0F0 0F1 0B0 0F2 0B1 0B2
        1: 1F0 1B0 1F1 1B1 1F2 1B2
        >>> print(make_schedule("fast_forward", [[0], [1]], 2))
        0: 0F0 0F1 0Bx0 0Bx1 0Bw0 0Bw1
        1: 1F0 1F1 1Bx0 1Bx1 1Bw0 1Bw1

    Args:
        policy: one of `POLICIES` or `STREAM_POLICIES`.
        devices: for each stage, the device index of each of its replicas. A device may stand in several stages; all but
            modulo, interleaved, zb_v and zero_bubble want these next to each other and with equal devices (a group).
        micro_batches: M.
        holds: D_i for each stage, as in `warm_up_counts`.
        warm_up: K for each stage, in place of the policy's. Where Bw are tasks of their own, and under interleaved, it
            is a limit on what is in flight (from F to B or Bw), not the number of forwards before the first backward.
        active: leaves out the tasks of slices for which it returns False; None keeps all.
        forward_only: just the forwards, in order, for evaluation: nothing is held, so K and `holds` don't matter, and
            the schedule's name is "forward".
        reverse_first_k: splits the backwards of the first k stages and puts their last micro-batch's Bw at the end of
            their devices' orders, stage 0's first (EuroSys'22, algorithm 2).
        task_seconds: for each stage the times of F, Bx and Bw, by which gaps are found; all equal by default.
        weight_devices: for each stage the device of each replica that runs Bw, in the order in which they become ready;
            the stage's own by default. For gpipe, dapple_*, fast_forward* and joint only.
        weight_regions: for joint, for each stage the stage with whose Bx its Bw may start; as soon as it is ready by
            default (`joint_scheduling`).

    Raises:
        ScheduleError: a policy that isn't known or that can't run on these devices; a number or list that is no use, or
            that the policy can't keep to; the text says which and what would do.
    """
    _check_policy(policy)
    if forward_only:
        check_count("micro_batches", micro_batches)
        check_devices(devices)
        request = ScheduleRequest.of(policy, devices, micro_batches)
        return _expand("forward", request, _forwards(request), active)
    request = ScheduleRequest.of(
        policy,
        devices,
        micro_batches,
        holds,
        warm_up,
        task_seconds,
        weight_devices,
        reverse_first_k,
        weight_regions,
    )
    _check_request(request)
    return _schedule(request, active)


def _schedule(request: ScheduleRequest, active: Active | None) -> Schedule:
    return _expand(request.policy, request, _orders(request), active)


@functools.lru_cache(maxsize=64)
def _orders(request: ScheduleRequest) -> Orders:
    """Run the policy. Callers don't change what comes back: a plan asks for it more than once."""
    makers = {
        "modulo": out_of_order.modulo,
        "interleaved": interleaving.interleaved,
        "zb_h1": zero_bubble.zb_h1,
        "zb_h2": zero_bubble.zb_h2,
        "zb_v": zero_bubble.zb_v,
        "zero_bubble": zero_bubble.zero_bubble,
        stream_schedule.JOINT: stream_schedule.joint,
    }
    orders = makers.get(request.policy, out_of_order.fast_forward)(request)
    if request.reverse_first_k:
        orders = out_of_order.reverse_first_k(orders, request.reverse_first_k, request.micro_batches)
    return orders


def _forwards(request: ScheduleRequest) -> Orders:
    """Forwards alone: group after group, in rounds of as many micro-batches as there are groups.

    This order can't deadlock on any devices: all of them keep to one order of (round, group, micro-batch, stage), in
    which every forward comes after those that it reads from. With several groups on a device a round keeps all busy.
    """
    orders: Orders = {device: [] for stage in request.devices for device in stage}
    size = len(request.groups)
    for first in range(0, request.micro_batches, size):
        for group in request.groups:
            for micro_batch in range(first, min(first + size, request.micro_batches)):
                for stage in group:
                    for device in request.devices[stage]:
                        orders[device].append(Job(stage, Phase.FORWARD, micro_batch))
    return orders


def _expand(name: str, request: ScheduleRequest, orders: Orders, active: Active | None) -> Schedule:
    """Turn jobs into the tasks of the replicas that the devices are, leaving out those of empty slices."""
    replicas = [{device: replica for replica, device in enumerate(devices)} for devices in request.devices]
    weights = [{device: replica for replica, device in enumerate(devices)} for devices in request.weight_devices]

    def task(device: int, job: Job) -> Task:
        places = weights if job.phase is Phase.WEIGHT_GRAD else replicas
        return Task(job.stage, job.phase, job.micro_batch, places[job.stage][device])

    tasks = {
        device: tuple(
            made
            for made in (task(device, job) for job in jobs)
            if active is None or active(made.stage, made.micro_batch, made.replica)
        )
        for device, jobs in orders.items()
    }
    return Schedule(name, tasks, {} if name == "forward" else _waits(request, active))


def _waits(request: ScheduleRequest, active: Active | None) -> dict[Task, Task]:
    """Forwards that wait until there is room again, where it is Bw on another device that makes room."""
    if request.policy in STREAM_POLICIES:
        return stream_schedule.joint_waits(request, active)
    if not request.offloaded:
        return {}
    limits = out_of_order.in_flight_limits(request)
    waits = {}
    for stage in request.offloaded:
        for replica, device in enumerate(request.devices[stage]):
            if device != request.weight_devices[stage][replica]:
                all_numbers = range(request.micro_batches)
                numbers = [number for number in all_numbers if active is None or active(stage, number, replica)]
                for number, earlier in zip(numbers[limits[stage] :], numbers, strict=False):
                    waiting = Task(stage, Phase.FORWARD, number, replica)
                    waits[waiting] = Task(stage, Phase.WEIGHT_GRAD, earlier, replica)
    return waits


def _check_policy(policy: str) -> None:
    if policy not in (*POLICIES, *STREAM_POLICIES):
        raise ScheduleError(f"unknown schedule {policy!r}; use one of {', '.join(POLICIES)}")


def _check_request(request: ScheduleRequest) -> None:
    """Check that the policy can do what is asked."""
    policy = request.policy
    stream_schedule.check_weight_regions(policy, request.weight_regions, request.stages)
    if policy in STREAM_POLICIES:
        stream_schedule.check_joint(request)
    elif policy == "interleaved":
        interleaving.check_periodic(request)
    elif policy == "zb_v":
        zero_bubble.check_v(request)
    elif policy in _STRAIGHT and not (policy == "zero_bubble" and zero_bubble.is_v(request)):
        request.check_straight()
    if policy in RULE or policy in out_of_order.FAST_FORWARD:
        out_of_order.in_flight_limits(request)
    elif request.offloaded and policy not in STREAM_POLICIES:
        stage = min(request.offloaded)
        raise ScheduleError(
            f"weight_devices of stage {stage} are {list(request.weight_devices[stage])}, its devices "
            f"{list(request.devices[stage])}, but {policy} runs Bw on a stage's own devices; leave them out, or use "
            f"fast_forward, fast_forward_a or fast_forward_b"
        )
    if policy == "interleaved" and request.reverse_first_k:
        raise ScheduleError(
            f"reverse_first_k is {request.reverse_first_k}, but interleaved doesn't split backwards; set it to 0, or "
            f"use modulo"
        )
