"""The checks that `Plan` runs on construction."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dapple_tf.data_files import short
from dapple_tf.describe.plan_values import REDUCTION_ORDERS, PlanError, PlanValueError
from dapple_tf.schedules import schedules
from dapple_tf.schedules.policies import BUILT_IN
from dapple_tf.schedules.schedule_request import ScheduleError
from dapple_tf.units import counted
from graph_passes.ir.batching import Interval

if TYPE_CHECKING:
    from dapple_tf.describe.plan import Plan

_MOST_MICRO_BATCHES = 1_000_000
"""Most micro-batches; more is a mistake, as a step has a node for each."""


def check_stages(plan: Plan) -> None:
    """Checks cuts, devices and the options with an entry for each stage.

    Raises:
        PlanError: one is wrong; the text says what, where, and what to change.
    """
    stages = len(plan.cuts) + 1
    of_stages = counted(stages, "stage")
    if len(plan.devices) != stages:
        raise PlanError(
            f"cuts make {of_stages}, but devices has {counted(len(plan.devices), 'list')}; give one list for each stage"
        )
    for cut, count in Counter(plan.cuts).items():
        if count > 1:
            positions = [stage for stage, name in enumerate(plan.cuts) if name == cut]
            raise PlanError(
                f"stages {positions[0]} and {positions[1]} are both cut after layer {cut!r}; name each layer once"
            )
    for cut, count in Counter(plan.backward_cuts).items():
        if count > 1 or cut in plan.cuts:
            where = "backward_cuts twice" if count > 1 else "both cuts and backward_cuts"
            raise PlanError(f"layer {cut!r} is in {where}; a stage ends where it is cut, so name each layer once")
    for stage, devices in enumerate(plan.devices):
        if not devices:
            raise PlanError(f"stage {stage} has no devices; give it at least one")
        _check_devices(f"stage {stage}", devices)
    if plan.shares is not None and list(map(len, plan.shares)) != list(plan.replicas):
        raise PlanError(
            f"shares has {list(map(len, plan.shares))} numbers for stages of {list(plan.replicas)} replicas; give one "
            f"for each replica"
        )
    if plan.task_seconds is not None and len(plan.task_seconds) != stages:
        raise PlanError(f"task_seconds has {len(plan.task_seconds)} entries for {of_stages}; give one for each")
    for what, names in (("all_reduce", plan.all_reduce), ("recompute", plan.recompute)):
        if not isinstance(names, str) and len(names) != stages:
            raise PlanError(f"{what} has {len(names)} entries for {of_stages}; give one for each, or one for all")
    if not 0 <= plan.reverse_first_k <= stages:
        raise PlanError(f"reverse_first_k is {plan.reverse_first_k}; with {of_stages} it must be 0 to {stages}")
    for relay in plan.relays:
        if not 0 <= relay < stages:
            raise PlanError(f"relays has stage {relay}; with {of_stages} they are numbered 0 to {stages - 1}")
    if plan.carried_updates < 0:
        raise PlanError(f"carried_updates is {plan.carried_updates}; it must be 0 or more")
    if plan.operator_devices is not None:
        _check_operator_devices(plan, plan.operator_devices)


def _check_operator_devices(plan: Plan, operator_devices: Sequence[Sequence[Sequence[int]]]) -> None:
    """Checks the groups of devices on which replicas place operators, and that no option doesn't go with placing."""
    if len(operator_devices) != len(plan.devices):
        raise PlanError(
            f"operator_devices has {counted(len(operator_devices), 'list')} for {counted(len(plan.devices), 'stage')}; "
            f"give one for each"
        )
    users: dict[int, int] = {}
    for stage, (own, groups) in enumerate(zip(plan.devices, operator_devices, strict=True)):
        if len(groups) != len(own):
            raise PlanError(
                f"stage {stage} has {counted(len(own), 'replica')} and operator_devices has "
                f"{counted(len(groups), 'group')} for it; give one group of devices for each replica"
            )
        sizes = [len(group) for group in groups]
        if len(set(sizes)) > 1:
            raise PlanError(
                f"the replicas of stage {stage} place their operators on groups of {sizes} devices; give them groups "
                f"of the same size"
            )
        if not all(group[:1] == (device,) for group, device in zip(groups, own, strict=True)):
            raise PlanError(
                f"stage {stage} has devices {list(own)}, but its operator_devices are {list(map(list, groups))}; each "
                f"replica's device must be the first of its group"
            )
        devices = list(itertools.chain(*groups))
        _check_devices(f"operator_devices of stage {stage}", devices)
        for device in devices:
            if users.setdefault(device, stage) != stage:
                raise PlanError(
                    f"stages {users[device]} and {stage} both place operators on device {device}; give each stage "
                    f"devices of its own"
                )
    without: dict[str, object] = {"backward_cuts": (), "relays": (), "optimizer_shards": False, "row_shards": False}
    if max(plan.replicas) > 1:
        without |= {"all_reduce": "flat"}
    for name, value in without.items():
        if getattr(plan, name) != value:
            raise PlanError(
                f"operators can't be placed one by one with {name}={getattr(plan, name)!r}; set {name}={value!r}, or "
                f"leave operator_devices out"
            )
    if plan.jit_compile and all(len(groups[0]) > 1 for groups in operator_devices):
        raise PlanError(
            "jit_compile=True compiles stages of one device, but every stage places its operators on several; leave "
            "jit_compile out"
        )


def check_batches(plan: Plan) -> None:
    """Checks that each replica gets samples of each micro-batch.

    Raises:
        PlanError: one doesn't.
    """
    batch, count = plan.global_batch_size, plan.micro_batches
    if count < 1:
        raise PlanError(f"micro_batches is {count}; it must be at least 1")
    if batch < count:
        raise PlanError(
            f"a global batch of {counted(batch, 'sample')} can't be cut into {counted(count, 'micro-batch')}; use a "
            f"global batch of at least {count}" + (f" or at most {counted(batch, 'micro-batch')}" if batch > 0 else "")
        )
    if count > _MOST_MICRO_BATCHES:
        raise PlanError(f"micro_batches is {count}; it must be at most {_MOST_MICRO_BATCHES:,}")
    smallest = batch // count
    for stage, replicas in enumerate(plan.replicas):
        if replicas > smallest:
            of_batches = f"smallest of the {count} micro-batches" if count > 1 else "only micro-batch"
            fewer = f"at most {counted(batch // replicas, 'micro-batch')}, " if replicas <= batch else ""
            raise PlanError(
                f"stage {stage} has {counted(replicas, 'replica')} but the {of_batches} has "
                f"{counted(smallest, 'sample')} (global batch {batch}): use {fewer}at most "
                f"{counted(smallest, 'replica')}, or a global batch of at least {replicas * count}"
            )
        for replica, part in enumerate(plan.slices(stage, Interval(0, smallest)) if plan.shares is not None else ()):
            if not part.size:
                assert plan.shares is not None
                own = plan.shares[stage]
                raise PlanError(
                    f"replica {replica} of stage {stage} gets no sample of a micro-batch of {smallest}: its share is "
                    f"{own[replica]} of {sum(own)}. Raise its share, leave its device {plan.devices[stage][replica]} "
                    f"out of the stage, or use fewer micro-batches"
                )


def check_options(plan: Plan) -> None:
    """Checks the schedule and the other options.

    Raises:
        PlanError: one doesn't exist, or doesn't suit the stages.
    """
    try:
        policy = plan.policy
    except ScheduleError as error:
        raise PlanValueError(str(error)) from error
    if plan.reduction_order not in REDUCTION_ORDERS:
        raise PlanValueError(
            f"unknown reduction_order {short(plan.reduction_order)}; use one of {', '.join(REDUCTION_ORDERS)}"
        )
    if plan.bucket_bytes < 1:
        raise PlanError(f"bucket_bytes is {plan.bucket_bytes}; it must be at least 1")
    if plan.backward_cuts and not plan.wait_free:
        raise PlanError(
            f"backward_cuts are {list(plan.backward_cuts)}, for gradients to be reduced early, but wait_free is False; "
            f"set it to True, or leave backward_cuts out"
        )
    for stage, count in enumerate(plan.warm_up or ()):
        if count > plan.micro_batches:
            raise PlanError(
                f"warm_up of stage {stage} is {count}, but the plan has {counted(plan.micro_batches, 'micro-batch')}; "
                f"lower it to at most {plan.micro_batches}"
            )
    try:
        schedules.check(policy, plan.request)
        if policy not in BUILT_IN:
            plan.order_tasks()
    except ScheduleError as error:
        raise PlanError(str(error)) from error


def _check_devices(where: str, devices: Sequence[int]) -> None:
    for device, count in Counter(devices).items():
        if device < 0:
            raise PlanError(f"{where} has device {device}; device numbers start at 0")
        if count > 1:
            raise PlanError(f"device {device} stands twice, in {where}; a device runs one replica of a stage")
