"""The step's top level for reduction and update: its groups, and when gradients are complete."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from graph_passes.errors import PassError
from graph_passes.ir.graph import PHASE_ATTR, Builder, Graph, GraphDef, Ref
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.outline import FunctionDef, add_call
from graph_passes.ir.program import Program
from graph_passes.passes.parameter_group import ParameterGroup, contributors, parameter_groups

if TYPE_CHECKING:
    from graph_passes.passes.update import Update

Calls: TypeAlias = dict[tuple[tuple[int, ...], str], str]
"""(stages of a group, device) -> the call that updates it there."""
Inputs: TypeAlias = dict[Ref, Callable[[str], Ref]]
"""Placeholder of a function's graph -> device -> the tensor of the top level that a call there gets."""


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
        computations: name of a function -> what computes it, so that devices share it.
        empty: (stage, replica) without samples -> the nodes that set its accumulators to zero.
    """

    def __init__(self, options: Update, program: Program, graph: GraphDef) -> None:
        self.options, self.program, self.step, self.graph = options, program, program.own_step, graph
        if not self.step.accumulated and (options.carried or options.head):
            raise PassError("updates are carried over, but gradients have no accumulators to wait in; accumulate them")
        self.devices = self.step.layout.devices
        self.builder = Builder(graph)
        self.contributors = contributors(program)
        self.groups = parameter_groups(program, options.updates, options.owners)
        self.computations: dict[str, Computation] = {}
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

    def function_name(self, what: NodeKind, group: ParameterGroup, device: str, part: str = "") -> str:
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
        return add_call(self.builder, name, function, inputs, device=device, control=control, attrs=group.marks(what))

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
        attrs: dict[str, Any] = {PHASE_ATTR: NodeKind.TRAIN.text}
        return self.builder.add("train", "NoOp", control=after, device=self.options.host_device, **attrs).node
