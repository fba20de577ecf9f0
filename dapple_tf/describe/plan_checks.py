"""The checks that `Plan` runs on construction."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dapple_tf.common.data_files import short
from dapple_tf.common.text import counted
from dapple_tf.describe.plan_values import REDUCTION_ORDERS, PlanError, PlanValueError
from dapple_tf.schedules import schedules
from dapple_tf.schedules.policies import BUILT_IN
from dapple_tf.schedules.schedule_request import ScheduleError
from graph_passes.ir.batching import Interval

if TYPE_CHECKING:
    from dapple_tf.describe.plan import Plan

_MOST_MICRO_BATCHES = 1_000_000
"""Most micro-batches; more is a mistake, as a step has a node for each."""


class Refused(NamedTuple):
    """Two options that no plan has together, as people write them, and why."""

    option: str
    other: str
    reason: str


_PLACED, _PLACED_REPLICAS = "operator_devices", "operator_devices of several replicas"
_PLACED_EVERYWHERE = "operator_devices, several for each replica"
REFUSED = (
    Refused(_PLACED, "backward_cuts", "single operators have no backward task that could be cut"),
    Refused(_PLACED, "relays", "single operators send their results to the devices that read them"),
    Refused(_PLACED, "optimizer_shards", "the placement says which devices keep a variable and update it"),
    Refused(_PLACED, "row_shards", "the placement says which devices keep a variable and update it"),
    Refused(
        _PLACED_REPLICAS,
        "all_reduce='hierarchical'",
        "each variable's gradients are reduced between devices of one place",
    ),
    Refused(_PLACED_EVERYWHERE, "jit_compile=True", "XLA compiles stages of one device"),
    Refused("backward_cuts", "wait_free=False", "pieces are there for gradients to be reduced early"),
)
"""All refused pairs of options; a schedule refuses further ones (`schedules.check`)."""
_HAS: Mapping[str, Callable[[Plan], object]] = {
    _PLACED: lambda plan: plan.operator_devices,
    _PLACED_REPLICAS: lambda plan: plan.operator_devices and max(plan.replicas) > 1,
    _PLACED_EVERYWHERE: lambda plan: len(plan.spread_stages) == plan.num_stages,
    "backward_cuts": lambda plan: plan.backward_cuts,
    "relays": lambda plan: plan.relays,
    "optimizer_shards": lambda plan: "optimizer" in plan.shards,
    "row_shards": lambda plan: "rows" in plan.shards,
    "all_reduce='hierarchical'": lambda plan: any(stage.all_reduce == "hierarchical" for stage in plan.stages),
    "jit_compile=True": lambda plan: plan.jit_compile,
    "wait_free=False": lambda plan: not plan.wait_free,
}
"""Options of `REFUSED`, and whether a plan has them."""


def refused(plan: Plan, option: str) -> str:
    """Returns why a plan can't have one of the options of `REFUSED`; an empty text if it can."""
    for pair in REFUSED:
        if option in pair[:2] and _HAS[pair.other if pair.option == option else pair.option](plan):
            return pair.reason
    return ""


def check_stages(plan: Plan) -> None:
    """Checks cuts, devices and the options of stages.

    Raises:
        PlanError: one is wrong; the text says what, where, and what to change.
    """
    of_stages = counted(plan.num_stages, "stage")
    for number, stage in enumerate(plan.stages):
        if not stage.devices:
            raise PlanError(f"stage {number} has no devices; give it at least one")
        _check_devices(f"stage {number}", stage.devices)
    for cut, count in Counter(plan.cuts).items():
        if count > 1:
            positions = [place for place, name in enumerate(plan.cuts) if name == cut]
            raise PlanError(
                f"stages {positions[0]} and {positions[1]} are both cut after layer {cut!r}; name each layer once"
            )
    for cut, count in Counter(plan.backward_cuts).items():
        if count > 1 or cut in plan.cuts:
            where = "backward_cuts twice" if count > 1 else "both cuts and backward_cuts"
            raise PlanError(f"layer {cut!r} is in {where}; a stage ends where it is cut, so name each layer once")
    if not 0 <= plan.reverse_first_k <= plan.num_stages:
        raise PlanError(
            f"reverse_first_k is {plan.reverse_first_k}; with {of_stages} it must be 0 to {plan.num_stages}"
        )
    if plan.carried_updates < 0:
        raise PlanError(f"carried_updates is {plan.carried_updates}; it must be 0 or more")
    if plan.operator_devices is not None:
        _check_operator_devices(plan, plan.operator_devices)


def _check_operator_devices(plan: Plan, operator_devices: Sequence[Sequence[Sequence[int]]]) -> None:
    """Checks the groups of devices on which replicas place operators."""
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
        for replica, part in enumerate(plan.slices(stage, Interval(0, smallest)) if plan.stages[stage].shares else ()):
            if not part.size:
                own = plan.stages[stage].shares or ()
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
    for option, other, reason in REFUSED:
        if _HAS[option](plan) and _HAS[other](plan):
            raise PlanError(f"no plan has {option} and {other}: {reason}. Leave one of them out")
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
