"""Stages of a plan, one by one, and as people write them: lists with an entry for each stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dapple_tf.describe.plan_values import (
    ALL_REDUCE,
    RECOMPUTE_MODES,
    PlanError,
    device_groups,
    device_lists,
    integers,
    layer_names,
    names_of_stages,
    share_lists,
    task_times,
)
from dapple_tf.units import counted

_Value = TypeVar("_Value")


@dataclass(frozen=True)
class StagePlan:
    """Layers of a stage, its devices, and how these compute.

    Attributes:
        cut: name of the stage's last layer; None for the model's last.
        devices: device index of each replica.
        shares: share of each replica in every micro-batch, in whole numbers: with ``(2, 1)`` replica 0 gets twice as
            many samples as replica 1, however large the batch is (`graph_passes.ir.batching.split_by_shares`). They are
            reduced to lowest terms; None for equal shares.
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

    def __post_init__(self) -> None:
        if self.shares is not None:
            common = math.gcd(*self.shares)
            equal = len(set(self.shares)) == 1
            object.__setattr__(self, "shares", None if equal else tuple(share // common for share in self.shares))


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
    own_shares = _each("shares", None if shares is None else share_lists(shares), count)
    for stage, (own, numbers) in enumerate(zip(replicas, own_shares, strict=True)):
        if numbers is not None and len(numbers) != len(own):
            raise PlanError(
                f"shares of stage {stage} are {counted(len(numbers), 'number')} for {counted(len(own), 'replica')} on "
                f"its devices; give one for each"
            )
    groups = None if operator_devices is None else device_groups(operator_devices)
    seconds = None if task_seconds is None else task_times(task_seconds)
    return tuple(
        StagePlan(*values)
        for values in zip(
            [*names, None],
            replicas,
            own_shares,
            _each("recompute", names_of_stages("recompute", recompute, RECOMPUTE_MODES), count),
            _each("operator_devices", groups, count),
            _each("all_reduce", names_of_stages("all_reduce", all_reduce, ALL_REDUCE), count),
            [stage in relaying for stage in range(count)],
            _each("task_seconds", seconds, count),
            strict=True,
        )
    )


def _each(what: str, values: str | Sequence[_Value] | None, count: int) -> Sequence[_Value | str | None]:
    """Returns an entry for each stage, from a list with one for each, or from one for all."""
    if values is None or isinstance(values, str):
        return [values] * count
    if len(values) != count:
        raise PlanError(f"{what} has {counted(len(values), 'value')} for {counted(count, 'stage')}; give one for each")
    return values
