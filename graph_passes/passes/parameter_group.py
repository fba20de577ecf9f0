"""Parameter groups: the variables that the same stages read, which are reduced and updated together in a step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from graph_passes.errors import PassError
from graph_passes.ir.graph import Builder, Graph, GraphDef, Ref
from graph_passes.ir.group_update import GroupUpdate
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.outline import FunctionDef, add_call
from graph_passes.ir.program import Program, Step, ValueKind, Variable, VariableKind
from graph_passes.ir.tasks import piece_order, reduction_order

if TYPE_CHECKING:
    from graph_passes.passes.update import Update

Calls: TypeAlias = dict[tuple[tuple[int, ...], str], str]
"""(stages of a group, device) -> the call that updates it there."""
Inputs: TypeAlias = dict[Ref, Callable[[str], Ref]]
"""Placeholder of a function's graph -> device -> the tensor of the top level that a call there gets."""


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


def parameter_groups(program: Program, updates: Sequence[GroupUpdate]) -> list[ParameterGroup]:
    """Returns all groups of a program with ordered tasks, in the order in which they are reduced.

    Args:
        program: the program.
        updates: the optimizer's part for each group that has parameters.
    """
    contributing = contributors(program)
    kept: dict[tuple[int, ...], list[Variable]] = {update.stages: [] for update in updates}
    for variable in program.roles.variables:
        stages = {*program.own_step.owners.get(variable.name, ()), *contributing.get(variable.name, ())}
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


class Computation(NamedTuple):
    """A function on a group's gradients, shared by all devices that run the same stages of the group.

    Attributes:
        function: the function; None if there is nothing to do.
        inputs: device -> tensor of the top level, for each of its arguments.
    """

    function: FunctionDef | None
    inputs: tuple[Callable[[str], Ref], ...]


class UpdateNodes:
    """A step's top level while reduction and updates are added to it.

    Attributes:
        options: the pass.
        program: a program with ordered tasks.
        step: its step.
        devices: names of the devices that keep the variables of each stage's replicas.
        graph: the graph that nodes are added to.
        builder: adds them.
        contributors: variable -> the stages that contribute to it, with their accumulators.
        groups: the parameter groups, in the order of their reduction.
        empty: (stage, replica) without samples -> the nodes that set its accumulators to zero.
    """

    def __init__(self, options: Update, program: Program, graph: GraphDef) -> None:
        self.options, self.program, self.step, self.graph = options, program, program.own_step, graph
        if not self.step.accumulated and (options.carried or options.head):
            raise PassError("updates are carried over, but gradients have no accumulators to wait in; accumulate them")
        self.devices = self.step.layout.devices
        self.builder = Builder(graph)
        self.contributors = contributors(program)
        self.groups = parameter_groups(program, options.updates)
        self._computations: dict[str, Computation] = {}
        self.empty: dict[tuple[int, int], list[str]] = {}

    @property
    def carried(self) -> list[ParameterGroup]:
        """The groups that are reduced and updated during the next step's forward."""
        by_stages = {group.stages: group for group in self.groups}
        return [by_stages[stages] for stages in self.options.carried]

    def replicas_on(self, stages: Iterable[int], device: str) -> list[tuple[int, int]]:
        """Returns the (stage, replica) pairs of these stages whose variables are on a device."""
        return [
            (stage, replica) for stage in stages for replica, name in enumerate(self.devices[stage]) if name == device
        ]

    def stages_on(self, group: ParameterGroup, device: str) -> list[int]:
        """Returns the stages of a group whose variables are on a device."""
        return [stage for stage, _ in self.replicas_on(group.stages, device)]

    def complete(self, group: ParameterGroup, device: str, piece: int | None = None) -> list[str]:
        """Returns nodes after which a device's accumulators are complete and its variables are no longer read.

        Args:
            group: the group.
            device: the device.
            piece: the piece of the last backward that completes the accumulators in question, while others may still be
                written and variables read; None for all of them.
        """
        places = set(self.replicas_on(group.stages, device))
        names: list[str] = []
        for task, exits in self.step.exit.items():
            if not self.options.wait_free and self.step.layout.device_of(task) == device:
                names += exits
            elif (task.stage, task.replica) in places:
                call = None if piece is None or task not in self.step.pieces else self.step.pieces[task][piece]
                names += exits if call is None else (self._added.get(call, call),)
        if piece is None:
            names += self.step.shard_reads.get((group.stages, device), ())
        return names + [name for place in places for name in self.empty.get(place, ())]

    @functools.cached_property
    def _added(self) -> dict[str, str]:
        """Call -> the node that adds up its results."""
        view = Graph(self.program.graph)
        adding = (node.name for node in view if NodeKind.of(node) is NodeKind.ACCUMULATE)
        return {ref.node: name for name in adding for ref in view.inputs(name)}

    def _function_name(self, what: NodeKind, group: ParameterGroup, device: str, part: str) -> str:
        """Returns the name, without the prefix, of a device's function on a group's gradients.

        Devices that run different stages of a group have functions of their own.

        Other steps, whose batches have more micro-batches, find gradients in accumulators. ``part`` tells functions on
        parts of the group apart.
        """
        stages = tuple(self.stages_on(group, device))
        own = "" if stages == group.stages else "_on" + "_".join(map(str, stages))
        return f"{group.label}_{what.text}{part}{own}" + ("" if self.step.accumulated else "_at_once")

    def call(
        self,
        what: NodeKind,
        function: FunctionDef,
        inputs: Sequence[Ref],
        group: ParameterGroup,
        device: str,
        *,
        control: Sequence[str] = (),
    ) -> Ref:
        """Adds a call for a group on a device; returns its first result."""
        name = f"{group.label}/replica{group.devices.index(device)}/{what.text}"
        attrs = what.marks(group=group.stages)
        return add_call(self.builder, name, function, inputs, device=device, control=control, attrs=attrs)

    def compute(
        self,
        what: NodeKind,
        make: Callable[[str], Computation],
        group: ParameterGroup,
        device: str,
        *,
        part: str = "",
        control: Sequence[str] = (),
    ) -> Ref | None:
        """Adds a call of a computation on a group's gradients, which devices that run the same stages of it share.

        Args:
            what: its kind.
            make: makes the computation, given the name of its function without the prefix.
            group: the group.
            device: the device.
            part: tells computations on parts of the group apart.
            control: nodes that it waits for.

        Returns:
            The call; None if there is nothing to do.
        """
        name = self._function_name(what, group, device, part)
        if name not in self._computations:  # Making one takes long.
            self._computations[name] = make(name)
        function, inputs = self._computations[name]
        if function is None:
            return None
        return self.call(what, function, [tensor(device) for tensor in inputs], group, device, control=control)

    def hold_back_reads(self, applied: Calls) -> None:
        """Makes reads of a stage's variables, or of a device's shards of them, wait for its carried updates."""
        nodes = {node.name: node for node in self.graph.node}
        for (stages, device), call in applied.items():
            replicas = self.replicas_on(stages, device)
            reads = [name for replica in replicas for name in self.step.reads.get(replica, ())]
            for name in (*reads, *self.step.shard_reads.get((stages, device), ())):
                nodes[name].input.append(f"^{call}")

    def end(self, after: Iterable[str]) -> str:
        """Returns the node that has run when all of ``after`` have."""
        attrs = NodeKind.TRAIN.marks()
        return self.builder.add("train", "NoOp", control=after, device=self.step.host_device, **attrs).node
