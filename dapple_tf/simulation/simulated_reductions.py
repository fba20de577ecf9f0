"""The order in which gradients are all-reduced, and which reductions may start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dapple_tf.simulation.cost import CostModel
from graph_passes.ir.tasks import Schedule, Task, piece_order


def gradient_ends(schedule: Schedule, *, wait_free: bool = True) -> Mapping[Task, tuple[int, ...]]:
    """Maps each task to the stages whose gradients it completes on its device, and hands on at its end.

    Unless ``wait_free``, all of a device's stages wait for the last of its tasks (conventional backpropagation).
    """
    completed: dict[Task, tuple[int, ...]] = {}
    for (device, stage), task in schedule.last_gradients.items():
        end = task if wait_free else schedule.orders[device][-1]
        completed[end] = (*completed.get(end, ()), stage)
    return completed


def carried_stages(costs: CostModel, schedule: Schedule) -> tuple[int, ...]:
    """Returns the stages whose parameters are updated during the next step's forward, in the order of their reduction.

    A stage that shares some of its parameters with another isn't among them: its update is simulated as one.
    """
    shared = {reduction.stages for reduction in costs.reductions if len(reduction.stages) > 1}
    own = {(stage,) for stage, cost in enumerate(costs.stages) if cost.parameter_bytes}
    groups = sorted(own | shared)
    sharing = {stage for stages in shared for stage in stages}
    carried = [groups[index] for index in costs.plan.carried(groups, schedule)]
    return tuple(stages[0] for stages in carried if len(stages) == 1 and stages[0] not in sharing)


@dataclass
class Unit:
    """A reduction, or one piece of it.

    Attributes:
        number: of the reduction, in :attr:`CostModel.reductions`.
        bytes: its size.
        part: the fraction of the last backward's time after which its gradients are complete.
        unready: number of (stage, device) pairs that still compute them.
        before: number of units still to be reduced before it.
        after: positions of the units that wait for it.
    """

    number: int
    bytes: float
    part: float
    unready: int
    before: int = 0
    after: list[int] = field(default_factory=list)


class Reductions:
    """All reductions of a step, in order: each waits for its gradients and for the previous one on each of its devices.

    Attributes:
        units: in the order in which they are reduced.
        of_stage: stage -> positions of its units.
        unreduced: stage -> number of its units that aren't over.
    """

    def __init__(
        self, costs: CostModel, schedule: Schedule, order: Sequence[int] | None = None, carried: Sequence[int] = ()
    ) -> None:
        """Orders the reductions.

        Args:
            costs: the plan's costs, with its reductions.
            schedule: the tasks that complete the gradients.
            order: positions in :attr:`CostModel.reductions`; None for that of a real step, `reduction_order`.
            carried: stages whose gradients are those of the previous step: they are reduced first, at once.

        Raises:
            ValueError: ``order`` isn't one of all reductions.
        """
        groups = [reduction.stages for reduction in costs.reductions]
        left_over: dict[tuple[int, ...], int] = {(stage,): place for place, stage in enumerate(carried)}
        pieces = [
            ((1.0, reduction.bytes),) if reduction.stages in left_over else reduction_pieces(costs, number)
            for number, reduction in enumerate(costs.reductions)
        ]
        counts = [len(own) for own in pieces]
        if order is None:
            sequence = piece_order(groups, schedule, costs.plan.devices, counts)
        elif sorted(order) != list(range(len(groups))):
            raise ValueError(
                f"reduction_order is {list(order)}; there are {len(groups)} reductions, give the order of 0 to "
                f"{len(groups) - 1}, positions in CostModel.reductions"
            )
        else:
            sequence = [(number, piece) for number in order for piece in range(counts[number])]
        sequence = sorted(sequence, key=lambda entry: left_over.get(groups[entry[0]], len(left_over)))
        members: dict[int, int] = {}
        for _, stage in schedule.last_gradients:
            members[stage] = members.get(stage, 0) + 1
        self.units: list[Unit] = []
        self.of_stage: dict[int, list[int]] = {stage: [] for stage in range(costs.plan.num_stages)}
        previous: dict[int, int] = {}
        for number, piece in sequence if members else ():
            reduction = costs.reductions[number]
            unready = 0
            if reduction.stages not in left_over:
                unready = sum(members.get(stage, 0) for stage in reduction.stages)
            part, size = pieces[number][piece]
            position = len(self.units)
            self.units.append(Unit(number, size, part, unready))
            for stage in reduction.stages:
                self.of_stage[stage].append(position)
            for before in {previous[device] for device in reduction.devices if device in previous}:
                self.units[before].after.append(position)
                self.units[position].before += 1
            previous.update(dict.fromkeys(reduction.devices, position))
        self.unreduced = {stage: len(units) for stage, units in self.of_stage.items()}

    def ready(self, position: int) -> bool:
        """Notes that one member has the gradients of a unit; returns whether it can be reduced now."""
        unit = self.units[position]
        unit.unready -= 1
        return not unit.unready and not unit.before

    def over(self, position: int, stages: Sequence[int]) -> Iterator[int]:
        """Notes a reduced unit of these stages; yields units that can be reduced now."""
        for stage in stages:
            self.unreduced[stage] -= 1
        for after in self.units[position].after:
            unit = self.units[after]
            unit.before -= 1
            if not unit.before and not unit.unready:
                yield after


def reduction_pieces(costs: CostModel, number: int) -> tuple[tuple[float, float], ...]:
    """Returns each piece of a reduction: (fraction of the last backward's time until it is ready, bytes)."""
    reduction = costs.reductions[number]
    if len(reduction.stages) == 1:
        return costs.backward_pieces(reduction.stages[0])
    return ((1.0, reduction.bytes),)
