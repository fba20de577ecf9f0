"""Parameter groups: the variables that the same stages read, which are reduced and updated together."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from graph_passes.ir.group_update import GroupUpdate
from graph_passes.ir.program import Program, Step, Variable, VariableKind
from graph_passes.ir.tasks import reduction_order


@dataclasses.dataclass(frozen=True)
class ParameterGroup:
    """Variables that the same stages read.

    Attributes:
        stages: the stages, ascending.
        devices: their devices, each once, in the order of stages and replicas.
        kept: the variables.
        variables: those of them with gradients or floating-point state that are added up over slices.
        update: the optimizer's part; None where there are no parameters.
    """

    stages: tuple[int, ...]
    devices: tuple[str, ...]
    kept: tuple[Variable, ...]
    variables: tuple[Variable, ...]
    update: GroupUpdate | None

    @property
    def label(self) -> str:
        """Name in nodes and functions."""
        return "stage" + "_".join(map(str, self.stages))


def contributors(program: Program) -> dict[str, dict[int, Variable]]:
    """Maps each variable to the stages that contribute to it, with their accumulators."""
    accumulators: dict[str, dict[int, Variable]] = {}
    for stage in program.stages:
        for _, variable, accumulator in (*stage.gradients, *stage.state):
            accumulators.setdefault(variable.name, {})[stage.index] = accumulator
    return accumulators


def parameter_groups(
    program: Program, updates: Sequence[GroupUpdate], owners: Mapping[str, Sequence[int]]
) -> list[ParameterGroup]:
    """Returns all groups of a program with ordered tasks, in the order in which they are reduced.

    Args:
        program: the program.
        updates: the optimizer's part for each group that has parameters.
        owners: the stages that keep each variable.
    """
    contributing = contributors(program)
    kept: dict[tuple[int, ...], list[Variable]] = {update.stages: [] for update in updates}
    for variable in program.roles.variables:
        stages = {*owners.get(variable.name, ()), *contributing.get(variable.name, ())}
        if stages and variable.kind is not VariableKind.METRIC:
            kept.setdefault(tuple(sorted(stages)), []).append(variable)
    by_stages = {update.stages: update for update in updates}
    keys, owner_devices = list(kept), program.own_step.layout.owner_devices
    numbers = _device_numbers(program.own_step)
    devices = [[numbers[device] for device in names if device in numbers] for names in owner_devices]
    return [
        ParameterGroup(
            stages,
            tuple(dict.fromkeys(device for stage in stages for device in owner_devices[stage])),
            tuple(kept[stages]),
            tuple(variable for variable in kept[stages] if variable.name in contributing),
            by_stages.get(stages),
        )
        for stages in (keys[index] for index in reduction_order(keys, program.own_step.schedule, devices))
    ]


def _device_numbers(step: Step) -> dict[str, int]:
    """Maps the names of devices that run tasks to their numbers in the schedule."""
    orders = {} if step.schedule is None else step.schedule.orders
    return {step.layout.device_of(task): device for device, tasks in orders.items() for task in tasks}
