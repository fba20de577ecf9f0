"""Stages of a plan, one by one, and as people write them: lists with an entry for each stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dapple_tf.common.data_files import short
from dapple_tf.common.units import counted
from dapple_tf.describe.plan_report import LARGEST
from dapple_tf.describe.plan_values import (
    ALL_REDUCE,
    RECOMPUTE_MODES,
    PlanError,
    PlanValueError,
    device_lists,
    integers,
    layer_names,
    listed,
)


@dataclass(frozen=True)
class StagePlan:
    """Layers of a stage, its devices, and how these compute; checked by the plan that has it.

    Attributes:
        cut: name of the stage's last layer; None for the model's last.
        devices: device index of each replica.
        shares: share of each replica in every micro-batch, in whole numbers: with ``(2, 1)`` replica 0 gets twice as
            many samples as replica 1, however large the batch is (`graph_passes.ir.batching.split_by_shares`). Plans
            reduce them to lowest terms; None for equal shares.
        recompute: what backwards recompute, one of `RECOMPUTE_MODES`.
        operator_devices: for each replica the group of devices on which its single operators are placed by FD-DPS
            (Mathematics 2022, 10, 4788), the replica's own device first. The groups are equally large: device i of each
            has the same operators and variables. None runs each replica as a whole on its device.
        all_reduce: how gradients are all-reduced over several servers, one of `ALL_REDUCE`; parameters that several
            stages read go by the first of these. ``flat`` is one over all devices; ``hierarchical`` adds up inside each
            server first.
        relays: whether the stage hands on what it reads: a later stage gets a tensor from the nearest stage that has
            it, its maker or a relay that reads it as well, rather than always from its maker. Gradients return the same
            way, added up by relays.
        task_seconds: times of F, Bx and Bw, in any unit, by which policies that fill gaps order tasks; None takes all
            as equal.
    """

    cut: str | None
    devices: tuple[int, ...]
    shares: tuple[int, ...] | None = None
    recompute: str = "none"
    operator_devices: tuple[tuple[int, ...], ...] | None = None
    all_reduce: str = "flat"
    relays: bool = False
    task_seconds: tuple[float, float, float] | None = None

    def of_replicas(self, groups: Mapping[int, tuple[int, ...]]) -> StagePlan:
        """Returns the stage with some of its replicas alone, on other devices, without relaying and task times.

        Args:
            groups: replica -> its group of devices.
        """
        return replace(
            self,
            devices=tuple(group[0] for group in groups.values()),
            shares=None if self.shares is None else tuple(self.shares[replica] for replica in groups),
            operator_devices=None if self.operator_devices is None else tuple(groups.values()),
            relays=False,
            task_seconds=None,
        )


def stages_of(
    cuts: Iterable[str],
    devices: Iterable[Iterable[int]],
    *,
    shares: Iterable[Iterable[int]] | None = None,
    recompute: str | Iterable[str] = "none",
    operator_devices: object = None,
    all_reduce: str | Iterable[str] = "flat",
    relays: Iterable[int] = (),
    task_seconds: Iterable[Iterable[float]] | None = None,
) -> tuple[StagePlan, ...]:
    """Returns the stages of lists with an entry for each, see `StagePlan`.

    Args:
        cuts: S - 1 layer names; stage i ends after the layer ``cuts[i]``, the last stage after the last layer.
        devices: for each of the S stages, the device index of each of its replicas.
        shares: for each stage its replicas' shares; None for equal ones.
        recompute: one mode for all stages, or one for each.
        operator_devices: for each stage and replica its group of devices. A list of devices stands for the group of an
            only replica.
        all_reduce: one algorithm for all stages, or one for each.
        relays: numbers of the stages that hand on what they read.
        task_seconds: for each stage its tasks' times.

    Raises:
        PlanError: a list has another type, or doesn't have an entry for each stage.
    """
    names, replicas = layer_names(cuts), device_lists(devices)
    count = len(names) + 1
    if len(replicas) != count:
        raise PlanError(
            f"cuts make {counted(count, 'stage')}, but devices has {counted(len(replicas), 'list')}; give one list for "
            f"each stage"
        )
    relaying = integers("relays", relays)
    for relay in relaying:
        if not 0 <= relay < count:
            raise PlanError(
                f"relays has stage {relay}; with {counted(count, 'stage')} they are numbered 0 to {count - 1}"
            )

    def each(what: str, values: object, example: str) -> Sequence[Any]:
        """Returns an entry for each stage, from a list with one for each, or from a name for all."""
        if values is None or (isinstance(values, str) and what in ("recompute", "all_reduce")):
            return [values] * count
        entries = listed(what, values, example)
        if len(entries) != count:
            raise PlanError(
                f"{what} has {counted(len(entries), 'value')} for {counted(count, 'stage')}; give one for each"
            )
        return entries

    return checked(
        map(
            StagePlan,
            [*names, None],
            replicas,
            each("shares", shares, "[[2, 1], [1]] with a list for each stage"),
            each("recompute", recompute, "['none', 'boundary'] with one for each stage"),
            each("operator_devices", operator_devices, "[[[0, 1], [2, 3]], [[4, 5]]] with a list for each stage"),
            each("all_reduce", all_reduce, "['flat', 'hierarchical'] with one for each stage"),
            [stage in relaying for stage in range(count)],
            each("task_seconds", task_seconds, "[[1, 1, 1]] with F, Bx and Bw of each stage"),
        )
    )


def checked(stages: object) -> tuple[StagePlan, ...]:
    """Returns a plan's stages with tuples in place of lists, see `stages_of`.

    Raises:
        PlanError: a stage isn't a `StagePlan`, has a wrong value, or lacks what others have.
    """
    given = listed("stages", stages, "[StagePlan('block_3', (0,)), StagePlan(None, (1,))]")
    for number, stage in enumerate(given):
        if not isinstance(stage, StagePlan):
            raise PlanValueError(f"stage {number} is {short(stage)}; give a StagePlan, or use Plan.manual")
        if (stage.cut is None) != (number == len(given) - 1):
            raise PlanError(
                f"stage {number} of {counted(len(given), 'stage')} has cut {stage.cut!r}; name one for each, None for "
                f"the last"
            )
        for name in ("operator_devices", "task_seconds"):
            if (getattr(stage, name) is None) != (getattr(given[0], name) is None):
                raise PlanError(f"only one of stages 0 and {number} has {name}; give them for each stage, or for none")
    layer_names([stage.cut for stage in given[:-1]])
    return tuple(_checked(stage, f"of stage {number}") for number, stage in enumerate(given))


def _checked(stage: StagePlan, where: str) -> StagePlan:
    devices = integers(f"devices {where}", stage.devices)
    for what, name, known in (
        ("recompute", stage.recompute, RECOMPUTE_MODES),
        ("all_reduce", stage.all_reduce, ALL_REDUCE),
    ):
        if name not in known:
            raise PlanValueError(f"unknown {what} {short(name)}; use one of {', '.join(known)}")
    return StagePlan(
        stage.cut,
        devices,
        None if stage.shares is None else _lowest_terms(stage.shares, len(devices), where),
        stage.recompute,
        None if stage.operator_devices is None else _groups(stage.operator_devices, where),
        stage.all_reduce,
        bool(stage.relays),
        None if stage.task_seconds is None else _task_times(stage.task_seconds, where),
    )


def _lowest_terms(shares: object, replicas: int, where: str) -> tuple[int, ...] | None:
    """Returns the shares of a stage's replicas in lowest terms; None for equal ones."""
    numbers = integers(f"shares {where}", shares)
    if not numbers or min(numbers) < 1:
        raise PlanValueError(
            f"shares {where} are {short(list(numbers))}; give each replica a whole number of at least 1"
        )
    if len(numbers) != replicas:
        raise PlanError(
            f"shares {where} are {counted(len(numbers), 'number')} for {counted(replicas, 'replica')} on its devices; "
            f"give one for each"
        )
    common = math.gcd(*numbers)
    return None if len(set(numbers)) == 1 else tuple(number // common for number in numbers)


def _groups(groups: object, where: str) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of a stage's replicas; a list of numbers is the group of its only replica."""
    what = f"operator_devices {where}"
    entries = listed(what, groups, "[[0, 1], [2, 3]] with a group for each replica")
    if not any(isinstance(entry, Iterable) and not isinstance(entry, str | Mapping) for entry in entries):
        entries = (entries,)
    return tuple(integers(f"{what}, group {number}", own) for number, own in enumerate(entries))


def _task_times(seconds: object, where: str) -> tuple[float, float, float]:
    entries = listed(f"task_seconds {where}", seconds, "[1, 1, 1]")
    numbers = [x for x in entries if isinstance(x, int | float | np.number) and not isinstance(x, bool)]
    if len(entries) != 3 or len(numbers) != 3 or not all(0 <= x < LARGEST for x in numbers):
        raise PlanValueError(
            f"task_seconds {where} is {short(seconds)}; give the times of F, Bx and Bw, such as [1, 1, 1]"
        )
    return float(numbers[0]), float(numbers[1]), float(numbers[2])
