"""Schedules by policies: checks a request, makes its order, and turns that into the tasks of replicas.

A `Policy` (`policy.py`) is one value; the built-in ones are in one tuple (`policies.py`), each with its summary.
Weight gradients run in micro-batch order under every policy, so that they are added up in one order and results don't
depend on the policy, to the last bit. The GPipe paper draws the backwards of a step last micro-batch first; the peak
memory (M micro-batches) and, for micro-batches of equal cost, the makespan are the same either way.

Every replica of a stage runs its slice of each micro-batch (the split approach, section 5.2.2 and Fig. 8a), hence all
replicas of a stage have one order. All functions are pure. `schedule_check.validate` checks the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Unpack, cast

from dapple_tf.common.data_files import short
from dapple_tf.schedules.out_of_order import reverse_first_k
from dapple_tf.schedules.policies import BUILT_IN, policy_of
from dapple_tf.schedules.policy import Policy
from dapple_tf.schedules.schedule_check import in_flight, validate
from dapple_tf.schedules.schedule_request import (
    Active,
    Job,
    Orders,
    RequestOptions,
    ScheduleError,
    ScheduleRequest,
    check_count,
)
from graph_passes.ir.tasks import Phase, Schedule, Task

__all__ = [
    "POLICIES",
    "Active",
    "ScheduleError",
    "check",
    "in_flight",
    "in_flight_limits",
    "make_schedule",
    "order_tasks",
    "policy_of",
    "resolve_warm_up",
    "validate",
]

POLICIES = tuple(policy.name for policy in BUILT_IN)
"""The names of the built-in policies."""


def check(policy: Policy, request: ScheduleRequest) -> None:
    """Checks that a policy accepts a request, without ordering any tasks.

    Raises:
        ScheduleError: names what it can't do, and what would do.
    """
    answer = cast(Callable[[ScheduleRequest], object], policy.check)(request)
    if answer is not None:
        raise ScheduleError(
            f"check of policy {policy} returned {short(answer)}; let it raise a ScheduleError that says what can't "
            f"be done, and return nothing"
        )
    if request.reverse_first_k and not policy.reverses:
        raise ScheduleError(
            f"reverse_first_k is {request.reverse_first_k}, but {policy} doesn't split backwards; set it to 0, or "
            f"use modulo"
        )


def order_tasks(
    policy: Policy, request: ScheduleRequest, *, active: Active | None = None, forward_only: bool = False
) -> Schedule:
    """Makes the order of each device's tasks in one step.

    Args:
        policy: the policy.
        request: what is asked of it.
        active: leaves out the tasks of slices for which it returns False; None keeps all.
        forward_only: only the forwards, in order, for evaluation: nothing is held, so that limits don't matter, and the
            schedule's name is "forward".

    Raises:
        ScheduleError: as `check`; or the policy can't keep to the limits; or it isn't a built-in one, and its order
            isn't legal.
    """
    if forward_only:
        return _expand("forward", request, _forwards(request), active)
    check(policy, request)
    return _schedule(policy, request, active)


def in_flight_limits(policy: Policy, request: ScheduleRequest) -> tuple[int, ...]:
    """Returns K of each stage, the most micro-batches it has in flight, from F to B or Bw.

    Under gpipe and dapple_* it is also the number of forwards before the first backward: the request's ``warm_up``,
    else the policy's. Under fast_forward*, zb_h1 and zb_h2 it is the limit within which Bw are delayed; under the
    others the number that results from the schedule.

    Raises:
        ScheduleError: as `order_tasks`.
    """
    check(policy, request)
    if policy.in_flight is not None:
        return tuple(policy.in_flight(request))
    return in_flight(_schedule(policy, request, None))


def resolve_warm_up(
    policy: str | Policy,
    stages: int,
    micro_batches: int,
    *,
    devices: Sequence[Sequence[int]] | None = None,
    **options: Unpack[RequestOptions],
) -> tuple[int, ...]:
    """Returns K of each stage: `in_flight_limits` for arguments that aren't a request yet.

    Args:
        policy: a built-in one's name, or a policy.
        stages: S.
        micro_batches: M. A given K above M counts as M.
        devices: of each stage; a device for each by default.
        **options: see `RequestOptions`.

    Raises:
        ScheduleError: as `make_schedule`.
    """
    chosen = policy_of(policy)
    check_count("stages", stages)
    devices = [[stage] for stage in range(stages)] if devices is None else devices
    return in_flight_limits(chosen, ScheduleRequest.of(chosen.name, devices, micro_batches, **options))


def make_schedule(
    policy: str | Policy,
    devices: Sequence[Sequence[int]],
    micro_batches: int,
    *,
    active: Active | None = None,
    forward_only: bool = False,
    **options: Unpack[RequestOptions],
) -> Schedule:
    """Makes the order of each device's tasks in one step: `order_tasks` for arguments that aren't a request yet.

        >>> print(make_schedule("dapple_a", [[0], [1]], 3))
        0: 0F0 0F1 0B0 0F2 0B1 0B2
        1: 1F0 1B0 1F1 1B1 1F2 1B2
        >>> print(make_schedule("fast_forward", [[0], [1]], 2))
        0: 0F0 0F1 0Bx0 0Bx1 0Bw0 0Bw1
        1: 1F0 1F1 1Bx0 1Bx1 1Bw0 1Bw1

    Args:
        policy: a built-in one's name, or a policy.
        devices: for each stage, the device index of each of its replicas. A device may stand in several stages; which
            lists a policy takes, `Policy.check` knows.
        micro_batches: M.
        active: as in `order_tasks`.
        forward_only: as in `order_tasks`.
        **options: see `RequestOptions`. Where Bw are tasks of their own, and under interleaved, K is a limit on what is
            in flight (from F to B or Bw), not the number of forwards before the first backward.

    Raises:
        ScheduleError: the policy is unknown or can't run on these devices; or a number or list is invalid, or more than
            the policy can satisfy; the text says which and what would do.
    """
    chosen = policy_of(policy)
    if forward_only:
        options = {}
    request = ScheduleRequest.of(chosen.name, devices, micro_batches, **options)
    return order_tasks(chosen, request, active=active, forward_only=forward_only)


def _schedule(policy: Policy, request: ScheduleRequest, active: Active | None) -> Schedule:
    if active is None:
        return _whole_schedule(policy, request)
    return _expand(policy.name, request, _orders(policy, request), active)


@functools.lru_cache(maxsize=8)
def _whole_schedule(policy: Policy, request: ScheduleRequest) -> Schedule:
    """Returns the schedule with all slices; the planner asks for that of a plan several times in a row."""
    return _expand(policy.name, request, _orders(policy, request), None)


@functools.lru_cache(maxsize=64)
def _orders(policy: Policy, request: ScheduleRequest) -> Orders:
    """Runs the policy. Callers must not change the result: a plan asks for it more than once."""
    try:
        orders = policy.order(request)
    except ScheduleError:
        raise
    except Exception as error:
        error.add_note(f"in the schedule {policy}, of {request.micro_batches} micro-batches on {request.devices}")
        raise
    if policy not in BUILT_IN:
        _check_jobs(policy, orders)
    if request.reverse_first_k:
        orders = reverse_first_k(orders, request.reverse_first_k, request.micro_batches)
    if policy not in BUILT_IN:
        _check_own(policy, request, orders)
    return orders


def _check_jobs(policy: Policy, orders: object) -> None:
    """Checks that what a policy returned is jobs of devices, right or wrong."""
    if not isinstance(orders, Mapping):
        raise ScheduleError(f"policy {policy} returned {short(orders)}; let it return a dict: device -> its jobs")
    for device, jobs in orders.items():
        if not isinstance(jobs, list | tuple):
            raise ScheduleError(f"policy {policy} gives device {short(device)} {short(jobs)}; give a list of its jobs")
        for job in jobs:
            if not isinstance(job, Job) or not isinstance(job.phase, Phase):
                raise ScheduleError(
                    f"policy {policy} has {short(job)} among the jobs of device {short(device)}; give each as "
                    f"Job(stage, Phase.FORWARD, micro_batch)"
                )


def _check_own(policy: Policy, request: ScheduleRequest, orders: Orders) -> None:
    """Checks an order of a policy that isn't built in, which this package's tests don't cover."""
    split = {job.stage for jobs in orders.values() for job in jobs if job.phase is Phase.WEIGHT_GRAD}
    for stage in range(request.reverse_first_k):
        if stage not in split:
            raise ScheduleError(
                f"reverse_first_k is {request.reverse_first_k}, but {policy} doesn't split the backward of stage "
                f"{stage}; set it to at most {stage}"
            )
    for device, jobs in orders.items():
        for job in jobs:
            what = f"{policy} has device {device} run {job.stage}{job.phase.value}{job.micro_batch}"
            if not 0 <= job.stage < request.stages:
                raise ScheduleError(f"{what}, but stages are 0 to {request.stages - 1}")
            if device not in request.devices[job.stage]:
                raise ScheduleError(
                    f"{what}, but stage {job.stage} is on {list(request.devices[job.stage])}; give each stage's "
                    f"devices (ScheduleRequest.devices) its jobs"
                )
    schedule = _expand(policy.name, request, orders, None)
    limits = [request.limit(stage, request.micro_batches) for stage in range(request.stages)]
    try:
        validate(schedule, request.devices, request.micro_batches, holds=limits)
    except ScheduleError as error:
        text = str(error)
        raise ScheduleError(text if repr(policy.name) in text else f"schedule {policy.name!r}: {text}") from error


@functools.lru_cache(maxsize=2**17)
def _task(stage: int, phase: str, micro_batch: int, replica: int) -> Task:
    """Returns a task; equal ones are one object, since plans that are compared have the same tasks."""
    return Task(stage, Phase(phase), micro_batch, replica)


def _forwards(request: ScheduleRequest) -> Orders:
    """Orders forwards alone: group after group, in rounds with one micro-batch for each group.

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
    """Turns devices' jobs into tasks of their replicas, without empty slices."""
    replicas = [{device: replica for replica, device in enumerate(devices)} for devices in request.devices]

    def task(device: int, job: Job) -> Task:
        return _task(job.stage, job.phase._value_, job.micro_batch, replicas[job.stage][device])

    tasks = {
        device: tuple(
            made
            for made in (task(device, job) for job in jobs)
            if active is None or active(made.stage, made.micro_batch, made.replica)
        )
        for device, jobs in orders.items()
    }
    return Schedule(name, tasks)
