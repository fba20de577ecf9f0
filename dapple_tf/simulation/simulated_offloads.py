"""Residuals on their way to the host and back in a simulated step: when they leave and return, and what they free."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.step_tasks import TaskNumbers
from dapple_tf.view.timeline import Span
from graph_passes.ir.offloading import trip
from graph_passes.ir.tasks import Phase, Schedule, Task


class Absence(NamedTuple):
    """What a slice leaves in the host's memory, between its forward and a task that reads it.

    Attributes:
        device: its device.
        forward: the task that makes it.
        before: the task that waits until it has left.
        begins: the task after whose end it may return, if all has left that ``beside`` waits for.
        beside: the task that runs meanwhile.
        reader: the first task that reads it.
        bytes: its size.
    """

    device: int
    forward: Task
    before: Task
    begins: Task
    beside: Task
    reader: Task
    bytes: float


class Stay(NamedTuple):
    """The time in which residuals are in the host's memory and not on their device.

    Attributes:
        device: the device.
        start: when they have left it, in seconds.
        end: when they begin to return, in seconds; before ``start`` if they are an earlier step's.
        bytes: their size.
        held: how long the host has them: from the beginning of their way there to the end of their way back.
    """

    device: int
    start: float
    end: float
    bytes: float
    held: tuple[float, float]


def absences(costs: CostModel, schedule: Schedule) -> Iterator[Absence]:
    """Yields what the slices of a plan leave in hosts' memory, device by device in the order of their forwards.

    What both Bx and Bw read counts as read by Bw alone, as profiles don't tell.
    """
    offloading = costs.plan.offloading_stages
    for device, order in schedule.orders.items() if offloading else ():
        present = set(order)
        for forward in order:
            if forward.phase is not Phase.FORWARD or forward.stage not in offloading:
                continue
            samples = costs.slices(forward.stage, forward.micro_batch)[forward.replica].size
            readers = _readers(costs, schedule, forward)
            for reader, size in zip(readers, costs.offloaded_bytes(forward.stage, samples), strict=True):
                way = trip(order, (forward, reader)) if size and reader in present else None
                if way is not None:
                    back = way.returns[0]
                    yield Absence(device, forward, way.before, back.begins, back.beside, reader, size)


def _readers(costs: CostModel, schedule: Schedule, forward: Task) -> tuple[Task, Task]:
    """Returns the tasks that read the two parts of `CostModel.offloaded_bytes`."""
    if forward.stage not in schedule.split:
        phases = Phase.BACKWARD, Phase.BACKWARD
    else:
        last = Phase.WEIGHT_GRAD if costs.computes(forward.stage, Phase.WEIGHT_GRAD) else Phase.INPUT_GRAD
        phases = Phase.INPUT_GRAD, last
    first, second = (dataclasses.replace(forward, phase=phase) for phase in phases)
    return first, second


class Offloads:
    """The ways of a step's residuals, by their positions in ``absences``.

    Attributes:
        absences: see `Absence`.
        leaving: number of a task -> what leaves after it.
        returning: number of a task -> what may return after it.
        allowing: for each, those whose return waits until it has left.
        unready: for each, the number of events that its return still waits for.
        early: what may return as soon as the step begins: that of an earlier step's forwards.
        awaited: for each, the number of the task that waits until it has left; None if that is over.
        readers: for each, the number of the task that reads it first.
        spans: for each, the positions of its two spans; None before they are there.
    """

    def __init__(self, costs: CostModel, schedule: Schedule, numbers: TaskNumbers, following: Collection[Task]) -> None:
        """Finds the ways.

        Args:
            costs: the plan's costs.
            schedule: the order of tasks.
            numbers: the tasks' numbers.
            following: the tasks of the next step, if its first forwards come at the end; the first ones of this step
                are over then.
        """
        self.absences = tuple(absences(costs, schedule))
        self.leaving: dict[int, list[int]] = {}
        self.returning: dict[int, list[int]] = {}
        self.allowing: list[list[int]] = [[] for _ in self.absences]
        self.unready = [0] * len(self.absences)
        self.awaited: list[int | None] = []
        self.readers = [numbers.of(own.reader) for own in self.absences]
        self.spans: list[tuple[int | None, int | None]] = [(None, None)] * len(self.absences)
        for index, own in enumerate(self.absences):
            self.leaving.setdefault(numbers.of(own.forward), []).append(index)
            gone = own.forward in following
            self.awaited.append(None if gone and own.before not in following else numbers.of(own.before))
            if own.begins not in following:
                self.returning.setdefault(numbers.of(own.begins), []).append(index)
                self.unready[index] += 1
        leaving: dict[Task, list[int]] = {}
        for index, own in enumerate(self.absences):
            if self.awaited[index] is not None and own.before not in following:
                leaving.setdefault(own.before, []).append(index)
        for index, own in enumerate(self.absences):
            waits = set(leaving.get(own.beside, ()))
            waits |= set() if own.forward in following else {index}
            for other in waits:
                self.allowing[other].append(index)
            self.unready[index] += len(waits)
        self.early = [index for index, waits in enumerate(self.unready) if not waits]

    @property
    def waits(self) -> Iterator[int]:
        """The numbers of tasks that wait, once for each of their waits."""
        yield from (number for number in self.awaited if number is not None)
        yield from self.readers

    def stays(self, spans: Sequence[Span]) -> Iterator[Stay]:
        """Yields when residuals were in the host's memory, once all have gone and come.

        Args:
            spans: all spans of the step.
        """
        for own, (leaves, returns) in zip(self.absences, self.spans, strict=True):
            assert leaves is not None and returns is not None
            there, back = spans[leaves], spans[returns]
            yield Stay(own.device, there.end, back.start, own.bytes, (there.start, back.end))

    def copied(self) -> Offloads:
        """Returns a copy, with as much to wait for."""
        other = copy.copy(self)
        other.unready, other.spans = self.unready.copy(), self.spans.copy()
        return other
