"""Converting what people write into plans to tuples and numbers: lists of names and of devices."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from typing import Any

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


def device_lists(devices: object) -> tuple[tuple[int, ...], ...]:
    """Returns a list of lists of device numbers as tuples.

    Raises:
        PlanValueError: ``devices`` isn't such a list.
    """
    stages = listed("devices", devices, "[[0, 1], [2]] with a list for each stage")
    return tuple(integers(f"devices of stage {stage}", values) for stage, values in enumerate(stages))


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
