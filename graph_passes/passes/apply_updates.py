"""Apply: the user's optimizer on reduced gradients, and its statistics and loss scale."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

from tensorflow.core.framework import types_pb2

from graph_passes.ir.graph import FLOAT_DTYPES, Builder, Ref, copied, dtype_attr, in_order, substitute
from graph_passes.ir.group_update import Captured
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.outline import FunctionDef, compiled, outline
from graph_passes.ir.program import Value, ValueKind, Variable, VariableKind
from graph_passes.ir.storage import assign_variable, handle
from graph_passes.ir.tasks import Phase, Task
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.passes.parameter_group import Calls, Computation, Inputs, ParameterGroup, UpdateNodes, whole
from graph_passes.passes.reduce_gradients import Reduction
from graph_passes.passes.row_gradients import row_dtype
from graph_passes.passes.shards import all_gather, gathered_buckets, take_shards, updated_shards


class Application:
    """Adds the nodes that update variables, and reads of the optimizer's values.

    Args:
        nodes: the step's top level.
        reduction: the gradients.
    """

    def __init__(self, nodes: UpdateNodes, reduction: Reduction) -> None:
        self.nodes, self.reduction = nodes, reduction
        self._builder = nodes.builder
        self._options = nodes.options
        self._program = nodes.program
        self._step = nodes.step

    def call_each(self, what: NodeKind, groups: Sequence[ParameterGroup], totals: Ref | None = None) -> Calls:
        """Calls a computation on the gradients of groups, on each of their devices; see `_on_gradients`."""
        calls: Calls = {}
        for group in groups:
            captured = Captured(empty_graph(), {}, {})
            if group.update is not None and what is not NodeKind.COUNTERS:
                captured = group.update.apply
            own: dict[str, Ref] = {}
            for device in group.devices:
                call = self._on_gradients(what, group, device, captured, totals)
                if call is not None:
                    own[device] = call
            packed = [] if what is NodeKind.COUNTERS else self._gathered(group)
            if packed:
                own = all_gather(self.nodes, group, packed, own, self.reduction.number)
            calls |= {(group.stages, device): call.node for device, call in own.items()}
        return calls

    def _gathered(self, group: ParameterGroup) -> list[tuple[Variable, ...]]:
        return gathered_buckets(group, self._options.bucket_bytes)

    def carried(self) -> Calls:
        """Reduces and updates the groups that the previous step has carried over."""
        self.reduction.all_reduce(map(whole, self.nodes.carried), at_head=True)
        return self.call_each(NodeKind.CARRIED_APPLY, self.nodes.carried)

    def bind_loss_scale(self, applied: Calls) -> None:
        """Binds the gradient of the loss to the loss scale, which each replica reads from an optimizer's part.

        It prefers a part on its own device: all have the same value. A carried update changes it first.
        """
        bound: dict[str, Ref] = {}
        scales: dict[str, Ref] = {}
        updates = ((group, group.update) for group in self.nodes.groups if group.update is not None)
        scaled = [(group, update.loss_scale) for group, update in updates if update.loss_scale is not None]
        for (task, value), name in self._step.pending.items():
            assert value == Value(self._program.roles.loss or value.ref, ValueKind.GRADIENT), (
                f"{value} is not connected"
            )
            device = self._step.layout.devices[task.stage][task.replica]
            if not scaled:
                dtype = next(node for node in self.nodes.graph.node if node.name == name).attr["dtype"].type
                bound[name] = self._builder.const(1.0, dtype, device=device)
                continue
            group, captured = next((own for own in scaled if device in own[0].devices), scaled[0])
            place = device if device in group.devices else group.devices[0]
            if place not in scales:
                function = self._bound(f"{group.label}_loss_scale", captured, {}, [], captured.outputs)
                updated = applied.get((group.stages, place))
                control = [] if updated is None else [updated]
                scales[place] = self.nodes.call(NodeKind.LOSS_SCALE, function, [], group, place, control=control)
            bound[name] = scales[place]
        substitute(self.nodes.graph, bound)

    def totals(self) -> Ref | None:
        """Adds up the statistics of all groups; each device reads the same sum."""
        parts = []
        for group in self.nodes.groups:
            if group.update is None:
                continue
            captured, shards = group.update.statistics, group.update.shards
            if captured is not None:
                parts.append(self._on_gradients(NodeKind.STATISTICS, group, group.devices[0], captured))
            if shards is not None and shards.statistics is not None:
                own = shards.statistics
                parts += [
                    self._on_gradients(NodeKind.STATISTICS, group, device, own, part="_of_shards")
                    for device in group.devices
                ]
        present = [part for part in parts if part is not None]
        if not present:
            return None
        with self._builder.marked(NodeKind.TOTALS.marks()):
            return self._builder.add_n("totals", present, types_pb2.DT_DOUBLE, device=self.nodes.devices[0][0])

    def gradients(self, groups: Sequence[ParameterGroup]) -> dict[str, Ref]:
        """Returns reduced gradients, each from the first device that has it; computed only when fetched."""
        gradients: dict[str, Ref] = {}
        for group in groups:
            if group.update is None:
                continue
            sliced = [name for name in group.names if name not in self.nodes.contributors]
            here = [self._program.variables[name] for name in group.names]
            if here:
                identity = self._identity(here, sliced)
                node = self._on_gradients(NodeKind.GRADIENTS, group, group.devices[0], identity)
                gradients |= {
                    variable.name: Ref(node.node, index) for index, variable in enumerate(here) if node is not None
                }
        return gradients

    def _identity(self, variables: Sequence[Variable], sliced: Sequence[str]) -> Captured:
        """Returns the computation that returns gradients, all dense."""
        builder = Builder(empty_graph())
        gradients, slices, outputs = {}, {}, []
        for variable in variables:
            kind = dtype_attr(variable.dtype)
            gradient = builder.argument("gradient", variable.dtype)
            if variable.name not in sliced:
                gradients[variable.name] = gradient
                outputs.append(builder.add("result", "Identity", [gradient], T=kind))
                continue
            dtype = row_dtype(self._program, variable)
            indices = builder.argument("indices", dtype)
            slices[variable.name] = (gradient, indices)
            rows = builder.const(variable.shape[0], types_pb2.DT_INT32)
            kinds = {"T": kind, "Tindices": dtype_attr(dtype), "Tnumsegments": dtype_attr(types_pb2.DT_INT32)}
            outputs.append(builder.add("result", "UnsortedSegmentSum", [gradient, indices, rows], **kinds))
        return Captured(builder.graph, gradients, {}, slices, outputs=tuple(outputs))

    def _on_gradients(
        self,
        what: NodeKind,
        group: ParameterGroup,
        device: str,
        captured: Captured,
        totals: Ref | None = None,
        part: str = "",
    ) -> Ref | None:
        """Calls a computation on a group's reduced gradients, which it takes from buckets, accumulators or tasks.

        Args:
            what: APPLY, which also assigns state; CARRIED_APPLY, which does so at the head of the next step; COUNTERS,
                which assigns only the counters of a carried group; STATISTICS; or GRADIENTS, which returns them.
            group: the group.
            device: the device.
            captured: the computation.
            totals: the sum of all groups' statistics.
            part: tells functions on parts of the group apart.

        Returns:
            The call; None if there is nothing to do.
        """
        control = [] if what is NodeKind.CARRIED_APPLY else self.nodes.complete(group, device)
        if what is NodeKind.GRADIENTS:
            # Fetching them without training still needs every member of each all-reduce to take part.
            control += [ref.node for ref in self.reduction.reduced.values()]
        make = functools.partial(self._computation, what, group, device, captured, totals)
        return self.nodes.compute(what, make, group, device, part=part, control=control)

    def _computation(
        self,
        what: NodeKind,
        group: ParameterGroup,
        device: str,
        captured: Captured,
        totals: Ref | None,
        name: str,
    ) -> Computation:
        """Returns `_on_gradients`'s function for a device and others that run the same stages of the group."""
        graph = copied(captured.graph)
        builder = Builder(graph)
        inputs: Inputs = {}
        state = self._state_of(group, what)
        wanted = [*captured.gradients, *(variable.name for variable in state if variable.dtype in FLOAT_DTYPES)]
        joins = what is NodeKind.GRADIENTS
        reduced = self.reduction.reduced_values(builder, inputs, wanted, group, device, whole=joins)
        effects = [*captured.effects, *self._assign_state(builder, inputs, reduced, state)]
        if not effects and what not in (NodeKind.STATISTICS, NodeKind.GRADIENTS):
            return Computation(None, ())
        if captured.totals is not None and totals is not None:
            argument = builder.argument("totals", types_pb2.DT_DOUBLE)
            inputs[argument] = functools.partial(_everywhere, totals)
            substitute(graph, {captured.totals.node: argument})
        bindings: dict[str, Ref] = {}
        results, in_shards = list(captured.outputs), {} if joins else group.in_shards
        if in_shards.keys() - group.stored:
            number = builder.argument("number", types_pb2.DT_INT32)
            inputs[number] = functools.partial(self._number, group)
            if what in (NodeKind.APPLY, NodeKind.CARRIED_APPLY):
                bindings |= take_shards(builder, captured, number, group.stored)
                results += updated_shards(builder, captured, self._gathered(group), captured.effects)
        bindings |= {placed.node: reduced[name] for name, placed in captured.gradients.items()}
        for variable, places in captured.slices.items():
            for index, placed in enumerate(places):
                inputs[placed] = functools.partial(self._rows, group, in_shards, variable, index)
        captured = dataclasses.replace(captured, graph=graph)
        jit_compile = self._options.jit_compile and bool(effects) and self._options.spread.isdisjoint(group.stages)
        # XLA would compile it anew for each number of rows in a shard.
        jit_compile = jit_compile and in_shards.keys().isdisjoint(captured.slices)
        function = self._bound(name, captured, bindings, list(inputs), results, effects, jit_compile=jit_compile)
        return Computation(function, tuple(inputs.values()))

    def _number(self, group: ParameterGroup, device: str) -> Ref:
        """Returns the number of a device's shards."""
        return self._builder.const(group.devices.index(device), types_pb2.DT_INT32, device=device)

    def _rows(
        self, group: ParameterGroup, in_shards: Mapping[str, Variable], name: str, index: int, device: str
    ) -> Ref:
        """Returns the values (index 0) or indices of a gradient's rows on a device, of its shard if there are any."""
        if name in in_shards:
            return self.reduction.rows.of(in_shards[name], device, group.devices.index(device))[index]
        return self.reduction.rows.of(self._program.variables[name], device)[index]

    def _state_of(self, group: ParameterGroup, what: NodeKind) -> list[Variable]:
        """Returns the state of a group that a call assigns: counters have their new value in the step itself."""
        if what in (NodeKind.STATISTICS, NodeKind.GRADIENTS):
            return []
        state = [
            variable
            for variable in self._program.roles.variables
            if variable.kind is VariableKind.STATE and variable.update is not None and variable in group.kept
        ]
        if what is NodeKind.APPLY:
            return state
        return [variable for variable in state if (variable.dtype in FLOAT_DTYPES) == (what is NodeKind.CARRIED_APPLY)]

    def _assign_state(
        self, builder: Builder, inputs: Inputs, reduced: Mapping[str, Ref], state: Sequence[Variable]
    ) -> list[str]:
        effects = []
        for variable in state:
            if variable.dtype in FLOAT_DTYPES:
                value = reduced[variable.name]
            else:
                assert variable.update is not None
                producer = self._program.node_stage.get(variable.update.node, len(self.nodes.devices) - 1)
                first = Task(producer, Phase.FORWARD, 0, 0)
                value = builder.argument("state", variable.dtype)
                inputs[value] = functools.partial(_everywhere, self._step.values[first, Value(variable.update)])
            effects.append(assign_variable(builder, variable, value))
        return effects

    def _bound(
        self,
        name: str,
        captured: Captured,
        bindings: Mapping[str, Ref],
        inputs: Sequence[Ref],
        outputs: Sequence[Ref],
        effects: Sequence[str] = (),
        *,
        jit_compile: bool = False,
    ) -> FunctionDef:
        """Makes a library function of a captured computation; its resources become variables of the running device."""
        graph = copied(captured.graph)
        builder = Builder(graph)
        bound = dict(bindings)
        for resource, variable in captured.variables.items():
            if resource.node not in bound:
                bound[resource.node] = handle(builder, variable.storage_name, variable.dtype, variable.storage_shape)
        substitute(graph, bound)
        function = outline(self._step.prefix + name, in_order(graph), list(inputs), list(outputs), effects=effects)
        for own in captured.graph.library.function:
            self._builder.define(own)
        if jit_compile:
            function, inner = compiled(function)
            self._builder.define(inner)
        return function


def _everywhere(tensor: Ref, device: str) -> Ref:
    """Returns the same tensor for every device."""
    return tensor
