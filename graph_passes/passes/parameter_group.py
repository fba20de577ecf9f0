"""Parameter groups: the variables that the same stages read, which are reduced and updated together."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from graph_passes.ir.graph import GROUP_ATTR, PHASE_ATTR, STAGE_ATTR, AttrValue, integers_attr
from graph_passes.ir.group_update import GroupUpdate
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.program import Program, Step, ValueKind, Variable, VariableKind
from graph_passes.ir.tasks import piece_order, reduction_order


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

    @property
    def names(self) -> tuple[str, ...]:
        """Its parameters, those first whose gradients the update takes whole."""
        return () if self.update is None else (*self.update.apply.gradients, *self.update.apply.slices)

    @functools.cached_property
    def in_shards(self) -> dict[str, Variable]:
        """Name -> each parameter that its devices update together, device i shard i of it."""
        if self.update is None or self.update.shards is None:
            return {}
        names = self.update.shards.parameters
        return {v.name: dataclasses.replace(v, shards=len(self.devices)) for v in self.kept if v.name in names}

    @property
    def stored(self) -> frozenset[str]:
        """Parameters of which its devices keep only their shards."""
        return frozenset() if self.update is None or self.update.shards is None else self.update.shards.stored

    def marks(self, kind: NodeKind) -> dict[str, str | int | AttrValue]:
        """Returns the attributes that identify a node of its reduction or update."""
        return {PHASE_ATTR: kind.text, STAGE_ATTR: self.stages[0], GROUP_ATTR: integers_attr(self.stages)}


@dataclasses.dataclass(frozen=True)
class ReductionUnit:
    """A unit of reduction: gradients and state of a group that are complete together.

    Attributes:
        group: the group.
        variables: those of its variables.
        piece: the piece of the stage's last backward that completes them; None if they wait for all of it.
    """

    group: ParameterGroup
    variables: tuple[Variable, ...]
    piece: int | None = None

    @property
    def label(self) -> str:
        """Name of its nodes and functions besides their group."""
        return "" if self.piece is None else f"_piece{self.piece}"


def whole(group: ParameterGroup) -> ReductionUnit:
    """Returns all of a group as one unit."""
    return ReductionUnit(group, group.variables)


def reduction_units(program: Program, groups: Sequence[ParameterGroup]) -> list[ReductionUnit]:
    """Returns the units of reduction, in order.

    Args:
        program: a program with ordered tasks.
        groups: the groups that are reduced in this step.
    """
    units = [_units(program, group) for group in groups]
    stages, counts = [group.stages for group in groups], [len(own) for own in units]
    step = program.own_step
    order = piece_order(stages, step.schedule, _devices_of_stages(step), counts)
    return [units[index][piece] for index, piece in order]


def _units(program: Program, group: ParameterGroup) -> list[ReductionUnit]:
    """Returns the units of a group, in order: one for each piece of its stage's backward."""
    pieces = program.stages[group.stages[0]].pieces if len(group.stages) == 1 else ()
    if not pieces or not any(task.stage == group.stages[0] for task in program.own_step.pieces):
        return [whole(group)]
    piece_of = {
        value.ref: number
        for number, piece in enumerate(pieces)
        for value in piece.outputs
        if value.kind is ValueKind.GRADIENT
    }
    parts: dict[int, list[Variable]] = {}
    for variable in group.variables:
        # State is complete since the last forward.
        parts.setdefault(0 if variable.value is None else piece_of.get(variable.value, 0), []).append(variable)
    return [ReductionUnit(group, tuple(variables), number) for number, variables in sorted(parts.items())]


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
    keys, names = list(kept), program.own_step.layout.devices
    devices = _devices_of_stages(program.own_step)
    return [
        ParameterGroup(
            stages,
            tuple(dict.fromkeys(device for stage in stages for device in names[stage])),
            tuple(kept[stages]),
            tuple(variable for variable in kept[stages] if variable.name in contributing),
            by_stages.get(stages),
        )
        for stages in (keys[index] for index in reduction_order(keys, program.own_step.schedule, devices))
    ]


def _devices_of_stages(step: Step) -> list[list[int]]:
    """Returns for each stage the numbers, in the schedule, of the devices that keep its variables and run tasks."""
    orders = {} if step.schedule is None else step.schedule.orders
    numbers = {step.layout.device_of(task): device for device, tasks in orders.items() for task in tasks}
    return [[numbers[device] for device in names if device in numbers] for names in step.layout.devices]
