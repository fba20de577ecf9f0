"""When a device's residuals are in the host's memory: decided by the order of its tasks alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

from graph_passes.ir.tasks import Task

AWAY = 4
"""Least distance of two uses of a residual, in tasks of its device, between which it is sent to the host. During the
task after the first use it is on its way there and during the task before the second on its way back, so that the
device has room for it during one task at least."""
AGAIN = AWAY - 1
"""The same where the host has it already, and the device just frees it."""
MOST_SLICES = 3
"""The most slices whose residuals a device has at one time: of the task that runs, of the one before it and of the one
after it."""


@dataclasses.dataclass(frozen=True)
class Return:
    """A way back from the host.

    Attributes:
        begins: the task after whose end it may begin, if also everything has left that the next task waits for
            (`Trip.before`).
        beside: that next task, which runs meanwhile: the one before the first reader.
        readers: the tasks that read what has come back, in the order of the device; they run with few tasks between.
    """

    begins: Task
    beside: Task
    readers: tuple[Task, ...]


@dataclasses.dataclass(frozen=True)
class Trip:
    """The way of a residual to the host and back.

    Attributes:
        after: the task after whose end it is sent.
        before: the task that waits until it is there: the second one after ``after``.
        returns: its ways back, in order.
    """

    after: Task
    before: Task
    returns: tuple[Return, ...]


def trip(order: Sequence[Task], uses: Sequence[Task]) -> Trip | None:
    """Returns the trip of a residual; None if its uses are too near to each other for one.

        F0 F1 F2 B0 ...         stays: its way there and its way back would take up all the time between
        F0 F1 F2 F3 B0 ...      sent after F0, which F2 waits for; comes back from the end of F2 on, during F3

    Args:
        order: the tasks of its device, in order.
        uses: those of them that make it and read it: the forward first.
    """
    positions = {task: position for position, task in enumerate(order)}
    places = sorted(positions[task] for task in uses)
    first = next((place for place, other in itertools.pairwise(places) if other - place >= AWAY), None)
    if first is None:
        return None
    returns: list[list[int]] = []
    for place in places:
        if place > first:
            if not returns or place - returns[-1][-1] >= AGAIN:
                returns.append([])
            returns[-1].append(place)
    return Trip(
        order[first],
        order[first + 2],
        tuple(Return(order[own[0] - 2], order[own[0] - 1], tuple(order[place] for place in own)) for own in returns),
    )
