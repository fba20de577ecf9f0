"""Converting what people write into plans to tuples and numbers: lists of names, of devices and of times."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dapple_tf.common.data_files import short
from dapple_tf.describe.plan_report import LARGEST

ALL_REDUCE = ("flat", "hierarchical")
"""All-reduces over several servers: one ring through all devices, or inside each server first."""
RECOMPUTE_MODES = ("none", "boundary", "min_cut")
"""What backward tasks recompute: nothing; their stage's forward (as GPipe); or what a min-cut finds cheapest."""
REDUCTION_ORDERS = ("completion", "first_layers")
"""Orders of the all-reduces of carried updates: that of their gradients, or that of the layers."""

SHARDS = ("optimizer", "rows")
"""What replicas can keep in shards: the optimizer's slots, and rows of embeddings."""


class PlanError(ValueError):
    """A plan contradicts itself or its cluster."""


class PlanValueError(PlanError):
    """A field of a plan has a value that no plan has: of another type, or a name that doesn't exist."""


def listed(what: str, values: object, example: str) -> tuple[Any, ...]:
    """Returns a list-like value as a tuple; a string or a mapping isn't list-like.

    Raises:
        PlanValueError: the value isn't list-like; the text has the example.
    """
    if isinstance(values, str | Mapping) or not isinstance(values, Iterable):
        raise PlanValueError(f"{what} is {short(values)}; give a list, such as {example}")
    return tuple(values)


def layer_names(cuts: object, what: str = "cuts") -> tuple[str, ...]:
    """Returns cuts as a tuple of names; ``what`` names them in errors.

    Raises:
        PlanValueError: they aren't a list of names.
    """
    names = listed(what, cuts, "['block_3']")
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name:
            ends = f"last layer of stage {number}" if what == "cuts" else "layer before a cut"
            raise PlanValueError(f"{what}: entry {number} is {short(name)}; it must be the name of the {ends}")
    return names


def device_lists(devices: object, what: str = "devices") -> tuple[tuple[int, ...], ...]:
    """Returns a list of lists of device numbers as tuples; ``what`` names them in errors.

    Raises:
        PlanValueError: ``devices`` isn't such a list.
    """
    stages = listed(what, devices, "[[0, 1], [2]] with a list for each stage")
    return tuple(integers(f"{what} of stage {stage}", values) for stage, values in enumerate(stages))


def device_groups(groups: object, what: str = "operator_devices") -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns for each stage its replicas' groups of device numbers as tuples; ``what`` names them in errors.

    A stage may be a list of numbers, too: the group of its only replica.

    Raises:
        PlanValueError: ``groups`` isn't such a list.
    """
    stages = []
    for stage, values in enumerate(listed(what, groups, "[[[0, 1], [2, 3]], [[4, 5]]] with a list for each stage")):
        where = f"{what} of stage {stage}"
        entries = listed(where, values, "[[0, 1], [2, 3]] with a group for each replica")
        if not any(isinstance(entry, Iterable) and not isinstance(entry, str | Mapping) for entry in entries):
            entries = (entries,)
        stages.append(tuple(integers(f"{where}, group {number}", own) for number, own in enumerate(entries)))
    return tuple(stages)


def names_of_stages(what: str, value: object, known: tuple[str, ...]) -> str | tuple[str, ...]:
    """Returns a name for all stages, or a list with one for each as a tuple; ``what`` names the option in errors.

    Raises:
        PlanValueError: a name isn't known.
    """
    single = isinstance(value, str)
    names = (value,) if single else listed(what, value, f"['{known[0]}', '{known[1]}'] with one for each stage")
    for name in names:
        if name not in known:
            raise PlanValueError(f"unknown {what} {short(name)}; use one of {', '.join(known)}")
    return names[0] if single else names


def share_lists(shares: object) -> tuple[tuple[int, ...], ...]:
    """Returns the shares of each stage's replicas as tuples, in lowest terms.

    Raises:
        PlanValueError: a stage's shares aren't whole numbers of at least 1.
    """
    stages = []
    for stage, values in enumerate(listed("shares", shares, "[[2, 1], [1]] with a list for each stage")):
        numbers = integers(f"shares of stage {stage}", values)
        if not numbers or min(numbers) < 1:
            raise PlanValueError(
                f"shares of stage {stage} are {short(list(numbers))}; give each replica a whole number of at least 1"
            )
        common = math.gcd(*numbers)
        stages.append(tuple(number // common for number in numbers))
    return tuple(stages)


def task_times(seconds: object) -> tuple[tuple[float, float, float], ...]:
    """Returns the times of F, Bx and Bw of each stage as tuples.

    Raises:
        PlanValueError: a stage hasn't three numbers of at least 0.
    """
    triples = []
    for stage, times in enumerate(listed("task_seconds", seconds, "[[1, 1, 1]] with F, Bx and Bw of each stage")):
        entries = listed(f"task_seconds of stage {stage}", times, "[1, 1, 1]")
        numbers = [x for x in entries if isinstance(x, int | float | np.number) and not isinstance(x, bool)]
        if len(entries) != 3 or len(numbers) != 3 or not all(0 <= x < LARGEST for x in numbers):
            raise PlanValueError(
                f"task_seconds of stage {stage} is {short(times)}; give the times of F, Bx and Bw, such as [1, 1, 1]"
            )
        triples.append((float(numbers[0]), float(numbers[1]), float(numbers[2])))
    return tuple(triples)


def integers(what: str, values: object) -> tuple[int, ...]:
    """Returns a list of whole numbers as a tuple; ``what`` names them in errors.

    Raises:
        PlanValueError: ``values`` isn't such a list.
    """
    return tuple(integer(what, value) for value in listed(what, values, "[0, 1]"))


def integer(what: str, value: Any) -> int:
    """Returns a whole number of Python's or NumPy's as an int; ``what`` names it in errors.

    Raises:
        PlanValueError: the value isn't a whole number, or is beyond 64 bits.
    """
    try:
        if not isinstance(value, bool) and abs(number := operator.index(value)) < LARGEST:
            return number
    except TypeError:
        pass
    raise PlanValueError(f"{what}: {short(value)} isn't a whole number")
