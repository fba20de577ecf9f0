"""What the update pass is given: the user's optimizer as graphs, one part for each parameter group."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from graph_passes.graph import GraphDef, Ref
from graph_passes.program import Variable
from graph_passes.tasks import Schedule


@dataclasses.dataclass(frozen=True)
class Captured:
    """A traced computation on variables: a part of the user's optimizer.

    Attributes:
        graph: its nodes.
        gradients: parameter -> placeholder of its gradient.
        slices: parameter -> placeholders of the rows of its gradient and of their indices.
        variables: resource placeholder -> the variable that it stands for.
        totals: placeholder of the statistics' sum over all groups (float64); None when the computation needs none.
        outputs: results.
        effects: nodes that change variables.
    """

    graph: GraphDef
    gradients: Mapping[str, Ref]
    variables: Mapping[Ref, Variable]
    slices: Mapping[str, tuple[Ref, Ref]] = dataclasses.field(default_factory=dict)
    totals: Ref | None = None
    outputs: tuple[Ref, ...] = ()
    effects: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class GroupUpdate:
    """How one parameter group is updated: the parameters that the same stages read.

    Attributes:
        stages: those stages, ascending.
        apply: the optimizer on the group's parameters.
        statistics: what the optimizer needs to know of all gradients (a vector that adds up over groups: the squared
            norm, the number of non-finite values); None when nothing is.
        loss_scale: the factor of the loss, by this group's part of the optimizer; None for 1.
    """

    stages: tuple[int, ...]
    apply: Captured
    statistics: Captured | None = None
    loss_scale: Captured | None = None


def reduction_order(
    groups: Sequence[tuple[int, ...]], schedule: Schedule | None, devices: Sequence[Sequence[int]]
) -> list[int]:
    """The order in which groups are all-reduced, on every device: that in which the schedule completes gradients.

    A group counts from where its last gradient stands in the order of a device; devices that run several of its stages
    decide for each of them. Of groups that are complete at the same place, the one whose first stage is later goes
    first: backward ends with the first stage.

    Args:
        groups: the stages of each group.
        schedule: the order of tasks; None takes them all as complete at the same place.
        devices: for each stage the numbers of the devices, in the schedule, that compute its parameters' gradients.

    Returns:
        Positions in ``groups``.
    """
    last: dict[tuple[int, int], int] = {}
    for device, tasks in ({} if schedule is None else schedule.orders).items():
        for position, task in enumerate(tasks):
            last[device, task.stage] = position

    def complete(stages: tuple[int, ...]) -> int:
        return max((last.get((device, stage), 0) for stage in stages for device in devices[stage]), default=0)

    def rank(index: int) -> tuple[int, ...]:
        return complete(groups[index]), -groups[index][0], -groups[index][-1]

    return sorted(range(len(groups)), key=rank)
