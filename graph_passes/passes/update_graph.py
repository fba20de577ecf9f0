"""The nodes that pass 9 adds: AllReduce and Apply of each parameter group."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tensorflow.core.framework import types_pb2

from graph_passes.ir.graph import (
    BYTES_ATTR,
    FLOAT_DTYPES,
    GROUP_ATTR,
    PHASE_ATTR,
    REPLICA_ATTR,
    STAGE_ATTR,
    AttrValue,
    Builder,
    Graph,
    GraphDef,
    PassError,
    Ref,
    copied,
    dtype_attr,
    integers_attr,
    substitute,
)
from graph_passes.ir.group_update import Captured
from graph_passes.ir.outline import FunctionDef, call_node, compiled, outline, placeholder
from graph_passes.ir.program import Program, Step, Value, ValueKind, Variable, VariableKind
from graph_passes.ir.storage import (
    accumulate_function,
    assign,
    buckets,
    bytes_of,
    flatten,
    handle,
    merge_library,
    read,
    unflatten,
    zeros,
)
from graph_passes.ir.tasks import Phase, Task
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.passes.parameter_group import ParameterGroup, contributors, parameter_groups
from graph_passes.passes.row_gradients import RowGradients, index_dtype

if TYPE_CHECKING:
    from graph_passes.passes.update import Update


_Calls: TypeAlias = dict[tuple[tuple[int, ...], str], str]
"""(stages of a group, device) -> the call that updates it there."""
_Inputs: TypeAlias = dict[Ref, Callable[[str], Ref]]
"""Placeholder of a function's graph -> device -> the tensor of the top level that a call there gets."""


class _Computation(NamedTuple):
    """What all devices that run the same stages of a group do with its gradients.

    Attributes:
        function: that does it; None if there is nothing to do.
        inputs: device -> tensor of the top level, for each of its arguments.
    """

    function: FunctionDef | None
    inputs: tuple[Callable[[str], Ref], ...]


class UpdateGraph:
    """The nodes of AllReduce and Apply while they are being added to a step's top level.

    Args:
        options: the pass.
        program: a program with ordered tasks.
        graph: what nodes are added to.
    """

    def __init__(self, options: Update, program: Program, graph: GraphDef) -> None:
        if not options.accumulated and (options.carried or options.head):
            raise PassError("updates are carried over, but gradients have no accumulators to wait in; accumulate them")
        self.options = options
        self.program = program
        self.step: Step = program.own_step
        self.homes = self.step.layout.homes
        self.graph = graph
        self.builder = Builder(self.graph)
        self.functions: list[FunctionDef] = []
        self.contributors = contributors(program)
        self.groups = parameter_groups(program, options.updates, options.hosts)
        self.reduced: dict[tuple[tuple[Variable, ...], str], Ref] = {}
        self.computations: dict[str, _Computation] = {}
        self.zeros: dict[tuple[str, str], Ref] = {}
        self.rows = RowGradients(program, self.builder)
        self.next_key = options.first_key
        self.previous: dict[str, str] = {}  # device -> the last of its all-reduces so far

    def result(self) -> Program:
        """The step's program, complete."""
        carried = self._carried()
        applied = self._reduce_and_apply(carried, at_head=True) if self.options.head else {}
        self._bind_loss_scale(applied)
        self._accumulate_nothing(applied)
        self._hold_back_reads(applied)
        now = [group for group in self.groups if group not in carried]
        applied |= self._reduce_and_apply(now)
        ends = [*applied.values(), *self._call_each("counters", carried, None).values()]
        # What is carried over must have been accumulated, though nothing in this step reads it.
        ends += [name for group in carried for device in group.devices for name in self._complete(group, device)]
        train = self._end(dict.fromkeys(ends))
        gradients = self._gradients(now) if self.options.want_gradients else {}
        merge_library(self.graph, self.functions)
        step = dataclasses.replace(self.step, pending={}, train=train, gradients=gradients)
        return self.program.replace(graph=self.graph, step=step)

    def flushed(self) -> tuple[GraphDef, str]:
        """A graph of carried updates alone, and the node that has run at its end."""
        applied = self._reduce_and_apply(self._carried(), at_head=True)
        train = self._end(applied.values())
        merge_library(self.graph, self.functions)
        return self.graph, train

    def _end(self, after: Iterable[str]) -> str:
        """The node that has run when others have."""
        attrs: dict[str, Any] = {PHASE_ATTR: "train"}
        return self.builder.add("train", "NoOp", control=after, device=self.options.host_device, **attrs).node

    def _carried(self) -> list[ParameterGroup]:
        by_stages = {group.stages: group for group in self.groups}
        return [by_stages[stages] for stages in self.options.carried]

    def _reduce_and_apply(self, groups: Sequence[ParameterGroup], *, at_head: bool = False) -> _Calls:
        """AllReduce and Apply of groups; ``at_head`` of gradients of the step before: there is nothing to wait for."""
        self._all_reduce(groups, at_head=at_head)
        if at_head:
            return self._call_each("carried_apply", groups, None)
        return self._call_each("apply", groups, self._totals())

    def _call_each(self, what: str, groups: Sequence[ParameterGroup], totals: Ref | None) -> _Calls:
        found: _Calls = {}
        for group in groups:
            for device in group.devices:
                call = self._on_gradients(what, group, device, totals)
                if call is not None:
                    found[group.stages, device] = call.node
        return found

    def _hold_back_reads(self, applied: _Calls) -> None:
        """The variables of a stage are read when its carried updates have been made."""
        nodes = {node.name: node for node in self.graph.node}
        for (stages, device), call in applied.items():
            for place in self._places(stages, device):
                for name in self.step.reads.get(place, ()):
                    nodes[name].input.append(f"^{call}")

    def _bind_loss_scale(self, applied: _Calls) -> None:
        """The gradient of the loss is the loss scale, which each replica of its stage reads from an optimizer's part.

        From one on its own device if there is one: all have the same value. A carried update changes it first.
        """
        bound: dict[str, Ref] = {}
        scales: dict[str, Ref] = {}
        scaled = [group for group in self.groups if group.update is not None and group.update.loss_scale is not None]
        for (task, value), name in self.step.pending.items():
            assert value == Value(self.program.roles.loss or value.ref, ValueKind.GRADIENT), f"{value} is not connected"
            device = self.step.layout.devices[task.stage][task.replica]
            if not scaled:
                dtype = next(node for node in self.graph.node if node.name == name).attr["dtype"].type
                bound[name] = self.builder.const(1.0, dtype, device=device)
                continue
            group = next((group for group in scaled if device in group.devices), scaled[0])
            place = device if device in group.devices else group.devices[0]
            if place not in scales:
                assert group.update is not None and group.update.loss_scale is not None
                captured = group.update.loss_scale
                function = self._bound(f"{group.label}_loss_scale", captured, {}, [], captured.outputs)
                updated = applied.get((group.stages, place))
                control = [] if updated is None else [updated]
                scales[place] = self._call("loss_scale", function, [], group, place, control=control)
            bound[name] = scales[place]
        substitute(self.graph, bound)

    def _places(self, stages: Iterable[int], device: str) -> list[tuple[int, int]]:
        """The (stage, replica) of these stages whose variables are on a device."""
        return [
            (stage, replica) for stage in stages for replica, home in enumerate(self.homes[stage]) if home == device
        ]

    def _complete(self, group: ParameterGroup, device: str) -> list[str]:
        """Nodes after which a device's accumulators are complete and its variables are no longer read."""
        places = set(self._places(group.stages, device))
        names = [
            name
            for task, exits in self.step.exit.items()
            if (task.stage, task.replica) in places
            or (not self.options.wait_free and self.step.layout.device_of(task) == device)
            for name in exits
        ]
        return names + [name for place in places for name in self.empty.get(place, ())]

    def _accumulate_nothing(self, applied: _Calls) -> None:
        """A replica that has no samples in this step contributes zeros, once what was carried over has been used."""
        self.empty: dict[tuple[int, int], list[str]] = {}
        if not self.options.accumulated:
            return  # `_contribution` gives them.
        for stage, devices in enumerate(self.homes):
            for replica, device in enumerate(devices):
                if any(task.stage == stage and task.replica == replica for task in self.step.entry):
                    continue
                targets = [own[stage] for own in self.contributors.values() if stage in own]
                if targets:
                    name = f"{self.options.prefix}stage{stage}_accumulate_nothing"
                    function = accumulate_function(name, targets, "none")
                    self.functions.append(function)
                    node = self.builder.names.fresh(f"stage{stage}/replica{replica}/accumulate_nothing")
                    attrs: dict[str, str | int] = {
                        PHASE_ATTR: "accumulate_nothing",
                        STAGE_ATTR: stage,
                        REPLICA_ATTR: replica,
                    }
                    after = [call for (stages, on), call in applied.items() if on == device and stage in stages]
                    self.builder.append(call_node(node, function, [], device=device, control=after, attrs=attrs))
                    self.empty[stage, replica] = [node]

    def _all_reduce(self, groups: Sequence[ParameterGroup], *, at_head: bool = False) -> None:
        for group in groups:
            if len(group.devices) == 1 or not group.variables:
                continue
            group_key = self.next_key
            packed = buckets(group.variables, self.options.bucket_bytes)
            calls = {}
            for device in group.devices:
                function, inputs = self._pack(group, device, packed)
                assert function is not None
                control = [] if at_head else self._complete(group, device)
                given = [tensor(device) for tensor in inputs]
                calls[device] = self._call("pack", function, given, group, device, control=control)
            for index, bucket in enumerate(packed):
                for device in group.devices:
                    node = self._collective(
                        Ref(calls[device].node, index),
                        bucket,
                        group,
                        group_key,
                        self.next_key,
                        device,
                        [self.previous[device]] if device in self.previous else [],
                    )
                    self.previous[device] = node.node
                    self.reduced[bucket, device] = node
                self.next_key += 1

    def _own_sum(self, builder: Builder, inputs: _Inputs, variable: Variable, stages: Iterable[int]) -> Ref:
        """What stages of one device contribute to a variable, added up; zeros if they contribute nothing."""
        accumulators = self.contributors[variable.name]
        parts = []
        for stage in stages:
            if stage in accumulators and self.options.accumulated:
                own = accumulators[stage]
                parts.append(read(builder, own.name, own.dtype, own.shape))
            elif stage in accumulators:
                parts.append(builder.append(placeholder(builder.names.fresh("contribution"), variable.dtype)))
                inputs[parts[-1]] = functools.partial(self._contribution, variable, stage)
        if not parts:
            return zeros(builder, variable.dtype, variable.shape)
        return builder.add_n("sum", parts, variable.dtype)

    def _contribution(self, variable: Variable, stage: int, device: str) -> Ref:
        """What a stage's only task on a device contributes to a variable; zeros if it has no samples."""
        if variable.kind is VariableKind.STATE:
            value, phase = Value(variable.update or Ref("")), Phase.FORWARD
        else:
            value = Value(variable.value or Ref(""), ValueKind.GRADIENT)
            phase, _ = self.program.stages[stage].parameter_gradients
        task = Task(stage, phase, 0, self.homes[stage].index(device))
        if (task, value) in self.step.values:
            return self.step.values[task, value]
        if (variable.name, device) not in self.zeros:
            with self.builder.marked({PHASE_ATTR: "zeros", STAGE_ATTR: stage}):
                self.zeros[variable.name, device] = zeros(self.builder, variable.dtype, variable.shape, device=device)
        return self.zeros[variable.name, device]

    def _function_name(self, what: str, group: ParameterGroup, device: str) -> str:
        """Devices that run different stages of a group have functions of their own.

        Other steps, whose batches have more micro-batches, find gradients in accumulators.
        """
        stages = tuple(self._stages_on(group, device))
        own = "" if stages == group.stages else "_on" + "_".join(map(str, stages))
        return f"{group.label}_{what}{own}" + ("" if self.options.accumulated else "_at_once")

    def _stages_on(self, group: ParameterGroup, device: str) -> list[int]:
        return [stage for stage, _ in self._places(group.stages, device)]

    def _pack(self, group: ParameterGroup, device: str, packed: Sequence[Sequence[Variable]]) -> _Computation:
        """What makes vectors of a device's gradients; devices that run the same stages of a group share it."""
        name = self._function_name("pack", group, device)
        if name not in self.computations:
            stages = self._stages_on(group, device)
            builder = Builder(empty_graph())
            inputs: _Inputs = {}
            vectors = []
            for bucket in packed:
                parts = [flatten(builder, self._own_sum(builder, inputs, v, stages), v.dtype) for v in bucket]
                vectors.append(builder.concat("bucket", parts, bucket[0].dtype, 0))
            function = outline(self.options.prefix + name, Graph(builder.graph), list(inputs), vectors)
            self.functions.append(function)
            self.computations[name] = _Computation(function, tuple(inputs.values()))
        return self.computations[name]

    def _collective(
        self,
        vector: Ref,
        bucket: Sequence[Variable],
        group: ParameterGroup,
        group_key: int,
        instance: int,
        device: str,
        after: list[str],
    ) -> Ref:
        sizes = (len(group.devices), group_key, instance)
        numbers = [self.builder.const(value, types_pb2.DT_INT32) for value in sizes]
        return self.builder.add(
            f"{group.label}/replica{group.devices.index(device)}/all_reduce{instance}",
            "CollectiveReduceV2",
            [vector, *numbers],
            control=after,
            device=device,
            T=dtype_attr(bucket[0].dtype),
            merge_op="Add",
            final_op="Id",
            communication_hint="auto",
            # None: TensorFlow starts a thread for each timeout, which sleeps until it is over, whatever has happened.
            timeout_seconds=0.0,
            Nordering_token=0,
            max_subdivs_per_device=-1,
            **_roles("all_reduce", group),
            **{BYTES_ATTR: bytes_of(bucket)},
        )

    def _totals(self) -> Ref | None:
        """The statistics of all groups, added up; each device reads the same sum."""
        parts = []
        for group in self.groups:
            if group.update is not None and group.update.statistics is not None:
                parts.append(self._on_gradients("statistics", group, group.devices[0], None))
        present = [part for part in parts if part is not None]
        if not present:
            return None
        with self.builder.marked({PHASE_ATTR: "totals"}):
            return self.builder.add_n("totals", present, types_pb2.DT_DOUBLE, device=self.homes[0][0])

    def _gradients(self, groups: Sequence[ParameterGroup]) -> dict[str, Ref]:
        """Reduced gradients as tensors, each from the first device that has it; computed only when they are fetched."""
        found: dict[str, Ref] = {}
        for group in groups:
            if group.update is None:
                continue
            sliced = list(group.update.apply.slices)
            here = [self.program.variables[name] for name in (*group.update.apply.gradients, *sliced)]
            if here:
                group = dataclasses.replace(
                    group, update=dataclasses.replace(group.update, apply=self._identity(here, sliced))
                )
                node = self._on_gradients("gradients", group, group.devices[0], None)
                assert node is not None
                found |= {variable.name: Ref(node.node, index) for index, variable in enumerate(here)}
        return found

    def _identity(self, variables: Sequence[Variable], sliced: Sequence[str]) -> Captured:
        """The computation that returns gradients, dense ones all."""
        builder = Builder(empty_graph())
        gradients, slices, outputs = {}, {}, []
        for variable in variables:
            kind = dtype_attr(variable.dtype)
            gradient = builder.append(placeholder(builder.names.fresh("gradient"), variable.dtype))
            if variable.name not in sliced:
                gradients[variable.name] = gradient
                outputs.append(builder.add("result", "Identity", [gradient], T=kind))
                continue
            dtype = index_dtype(self.program, variable)
            assert dtype is not None
            indices = builder.append(placeholder(builder.names.fresh("indices"), dtype))
            slices[variable.name] = (gradient, indices)
            rows = builder.const(variable.shape[0], types_pb2.DT_INT32)
            kinds = {"T": kind, "Tindices": dtype_attr(dtype), "Tnumsegments": dtype_attr(types_pb2.DT_INT32)}
            outputs.append(builder.add("result", "UnsortedSegmentSum", [gradient, indices, rows], **kinds))
        return Captured(builder.graph, gradients, {}, slices, outputs=tuple(outputs))

    def _on_gradients(self, what: str, group: ParameterGroup, device: str, totals: Ref | None) -> Ref | None:
        """Calls a computation on a group's reduced gradients, which it takes from buckets, accumulators or tasks.

        Args:
            what: ``apply``, which also assigns state; ``carried_apply``, which does so at the head of the next step;
                ``counters``, which is what a step assigns of a group that it carries over; ``statistics``; or
                ``gradients``, which returns them.
            group: the group.
            device: where.
            totals: the sum of all groups' statistics.

        Returns:
            The call; None if there is nothing to do.
        """
        name = self._function_name(what, group, device)
        if name not in self.computations:  # Building one takes long, and replicas have it in common.
            self.computations[name] = self._computation(what, name, group, device, totals)
        function, inputs = self.computations[name]
        if function is None:
            return None
        control = [] if what == "carried_apply" else self._complete(group, device)
        if what == "gradients":
            # Whoever fetches them without training still needs every member of each all-reduce to take part.
            control += [ref.node for ref in self.reduced.values()]
        return self._call(what, function, [tensor(device) for tensor in inputs], group, device, control=control)

    def _computation(
        self, what: str, name: str, group: ParameterGroup, device: str, totals: Ref | None
    ) -> _Computation:
        """The function that `_on_gradients` calls on a device, and on others that run the same stages of the group."""
        captured = Captured(empty_graph(), {}, {})
        if group.update is not None and what != "counters":
            captured = group.update.apply
            if what == "statistics" and group.update.statistics is not None:
                captured = group.update.statistics
        graph = copied(captured.graph)
        builder = Builder(graph)
        inputs: _Inputs = {}
        state = self._state_of(group, what)
        wanted = [*captured.gradients, *(variable.name for variable in state if variable.dtype in FLOAT_DTYPES)]
        reduced = self._reduced_values(builder, inputs, wanted, group, device)
        effects = [*captured.effects, *self._assign_state(builder, inputs, reduced, state)]
        if not effects and what not in ("statistics", "gradients"):
            return _Computation(None, ())
        if captured.totals is not None and totals is not None:
            argument = builder.append(placeholder(builder.names.fresh("totals"), types_pb2.DT_DOUBLE))
            inputs[argument] = functools.partial(_everywhere, totals)
            substitute(graph, {captured.totals.node: argument})
        bindings = {placed.node: reduced[name] for name, placed in captured.gradients.items()}
        for variable, places in captured.slices.items():
            for index, placed in enumerate(places):
                inputs[placed] = functools.partial(self._rows, variable, index)
        captured = dataclasses.replace(captured, graph=graph)
        function = self._bound(name, captured, bindings, list(inputs), captured.outputs, effects)
        return _Computation(function, tuple(inputs.values()))

    def _reduced_values(
        self, builder: Builder, inputs: _Inputs, wanted: Sequence[str], group: ParameterGroup, device: str
    ) -> dict[str, Ref]:
        here = [variable for variable in group.variables if variable.name in wanted]
        if len(group.devices) == 1:
            stages = self._stages_on(group, device)
            return {variable.name: self._own_sum(builder, inputs, variable, stages) for variable in here}
        found: dict[str, Ref] = {}
        for bucket in buckets(group.variables, self.options.bucket_bytes):
            if any(variable in here for variable in bucket):
                argument = builder.append(placeholder(builder.names.fresh("bucket"), bucket[0].dtype))
                inputs[argument] = functools.partial(self._bucket, bucket)
                parts = unflatten(builder, argument, bucket[0].dtype, [variable.shape for variable in bucket])
                found |= {variable.name: part for variable, part in zip(bucket, parts, strict=True)}
        return found

    def _bucket(self, bucket: tuple[Variable, ...], device: str) -> Ref:
        """A bucket of reduced gradients on a device."""
        return self.reduced[bucket, device]

    def _rows(self, name: str, index: int, device: str) -> Ref:
        """The values (index 0) or indices of a gradient's rows on a device."""
        return self.rows.gather(name, device)[index]

    def _state_of(self, group: ParameterGroup, what: str) -> list[Variable]:
        """The state of a group that a call assigns: counters have their new value in the step itself."""
        if what in ("statistics", "gradients"):
            return []
        found = [
            variable
            for variable in self.program.roles.variables
            if variable.kind is VariableKind.STATE and variable.update is not None and variable in group.kept
        ]
        if what == "apply":
            return found
        return [variable for variable in found if (variable.dtype in FLOAT_DTYPES) == (what == "carried_apply")]

    def _assign_state(
        self, builder: Builder, inputs: _Inputs, reduced: Mapping[str, Ref], state: Sequence[Variable]
    ) -> list[str]:
        effects = []
        for variable in state:
            if variable.dtype in FLOAT_DTYPES:
                value = reduced[variable.name]
            else:
                assert variable.update is not None
                producer = self.program.node_stage.get(variable.update.node, len(self.homes) - 1)
                first = Task(producer, Phase.FORWARD, 0, 0)
                value = builder.append(placeholder(builder.names.fresh("state"), variable.dtype))
                inputs[value] = functools.partial(_everywhere, self.step.values[first, Value(variable.update)])
            effects.append(assign(builder, variable.place, value, variable.dtype, variable.shape))
        return effects

    def _bound(
        self,
        name: str,
        captured: Captured,
        bindings: Mapping[str, Ref],
        inputs: Sequence[Ref],
        outputs: Sequence[Ref],
        effects: Sequence[str] = (),
    ) -> FunctionDef:
        """A library function of a captured computation; its resources become variables of whichever device runs it."""
        graph = copied(captured.graph)
        builder = Builder(graph)
        bound = dict(bindings)
        for resource, variable in captured.variables.items():
            bound[resource.node] = handle(builder, variable.place, variable.dtype, variable.shape)
        substitute(graph, bound)
        function = outline(self.options.prefix + name, _sorted(graph), list(inputs), list(outputs), effects=effects)
        merge_library(self.graph, captured.graph.library.function)
        if self.options.jit_compile and effects:
            function, inner = compiled(function)
            self.functions.append(inner)
        self.functions.append(function)
        return function

    def _call(
        self,
        what: str,
        function: FunctionDef,
        inputs: Sequence[Ref],
        group: ParameterGroup,
        device: str,
        *,
        control: Sequence[str] = (),
    ) -> Ref:
        name = self.builder.names.fresh(f"{group.label}/replica{group.devices.index(device)}/{what}")
        attrs = _roles(what, group)
        return self.builder.append(call_node(name, function, inputs, device=device, control=control, attrs=attrs))


def _everywhere(tensor: Ref, device: str) -> Ref:
    """The same tensor for every device."""
    return tensor


def _roles(what: str, group: ParameterGroup) -> dict[str, str | int | AttrValue]:
    """The attributes that tell what a node of a group's update is."""
    return {PHASE_ATTR: what, STAGE_ATTR: group.stages[0], GROUP_ATTR: integers_attr(group.stages)}


def _sorted(graph: GraphDef) -> Graph:
    """The graph with producers first: nodes that were added behind their readers move up."""
    view = Graph(graph)
    order = view.topological()
    ordered = GraphDef(node=[view.nodes[name] for name in order], versions=graph.versions, library=graph.library)
    return Graph(ordered)
