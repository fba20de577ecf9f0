"""Pass 9: gradients are reduced over the replicas, and the user's optimizer is applied on every replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from tensorflow.core.framework import types_pb2

from graph_passes.accumulate import (
    accumulated_gradients,
    accumulated_state,
    gradient_accumulator,
    sliced_gradients,
    state_accumulator,
)
from graph_passes.graph import (
    FLOAT_DTYPES,
    PHASE_ATTR,
    STAGE_ATTR,
    Builder,
    Graph,
    GraphDef,
    PassError,
    Ref,
    dtype_attr,
    substitute,
)
from graph_passes.outline import FunctionDef, call_node, outline, placeholder
from graph_passes.program import Program, Step, Value, ValueKind, Variable, VariableKind
from graph_passes.replicate import top_level
from graph_passes.stage_update import Captured, StageUpdate
from graph_passes.storage import (
    accumulate_function,
    assign,
    buckets,
    flatten,
    handle,
    merge_library,
    read,
    unflatten,
    zeros,
)
from graph_passes.tasks import Phase, Task
from graph_passes.tensorflow_bridge import empty_graph


@dataclasses.dataclass(frozen=True)
class Update:
    """Adds AllReduce and Apply.

        GA, GA.r1   becomes   pack -> all-reduce -> apply,  pack.r1 -> all-reduce.r1 -> apply.r1

    Slices weigh their loss by their samples, so that the sum over replicas is the gradient of the mean over the global
    batch. A parameter of several stages is reduced over all their devices, each of which then makes the same update.
    Devices start their all-reduces in one order, that of the bucket list, so that none waits for another in a circle.

    Attributes:
        updates: for each stage, its part of the optimizer.
        hosts: the stages that keep each variable on their devices.
        host_device: where the step's end is told.
        bucket_bytes: gradients are reduced in vectors of about this size.
        first_key: the first of the collective keys; steps that share workers mustn't share keys.
        prefix: start of the functions' names.
        all_reduce: False where all stages are on one device, as when layers are measured: then each stage applies what
            it has accumulated itself. Stages that share a parameter each make an update of their own, of the same
            cost as that of a step with reduction but without its meaning, so that there are no ``step.gradients``.

    Source: DAPPLE (PPoPP'21), section 5.2.3: "AllReduce operation to synchronize gradients among all replicas [...] A
    normal Apply operation updates weights with averaged gradients eventually."
    """

    name: ClassVar[str] = "update"
    updates: tuple[StageUpdate, ...]
    hosts: Mapping[str, Sequence[int]]
    host_device: str
    bucket_bytes: int
    first_key: int = 1
    prefix: str = ""
    all_reduce: bool = True

    def run(self, program: Program) -> Program:
        """Program with ordered tasks -> complete one: nothing pending, ``step.train`` and ``step.gradients`` set.

        Raises:
            PassError: no reduction is wanted, but there are several devices.
        """
        assert program.step is not None
        places = [device for devices in program.step.layout.devices for device in devices]
        if not self.all_reduce and (len(set(places)) > 1 or len(places) > len(program.stages)):
            raise PassError(
                f"all_reduce=False needs one replica of each stage, all on one device, but {len(program.stages)} "
                f"stages have {len(places)} replicas on {len(set(places))} devices"
            )
        return _UpdateGraph(self, program).result()


class _UpdateGraph:
    """The tail of the step while it is being made."""

    def __init__(self, options: Update, program: Program) -> None:
        assert program.step is not None
        self.options = options
        self.program = program
        self.step: Step = program.step
        self.layout = self.step.layout
        self.graph = top_level(program)
        self.builder = Builder(self.graph)
        self.functions: list[FunctionDef] = []
        self.contributors = self._contributors()
        self.groups = self._groups()
        self.reduced: dict[tuple[tuple[Variable, ...], int, int], Ref] = {}
        self.gathered: dict[tuple[str, int, int], tuple[Ref, Ref]] = {}
        self.joined: dict[tuple[Value, int, int], Ref | None] = {}

    def _contributors(self) -> dict[str, dict[int, Variable]]:
        """Variable -> the stages that contribute to it, with their accumulators."""
        found: dict[str, dict[int, Variable]] = {}
        for stage in self.program.stages:
            for _, variable in accumulated_gradients(self.program, stage):
                found.setdefault(variable.name, {})[stage.index] = gradient_accumulator(variable, stage.index)
            for _, variable in accumulated_state(self.program, stage):
                found.setdefault(variable.name, {})[stage.index] = state_accumulator(variable, stage.index)
        return found

    def _groups(self) -> dict[tuple[int, ...], list[Variable]]:
        """Sets of stages -> the variables that are reduced over their devices; each stage alone without reduction."""
        found: dict[tuple[int, ...], list[Variable]] = {}
        for variable in self.program.roles.variables:
            if variable.name in self.contributors:
                stages = sorted({*self.options.hosts.get(variable.name, ()), *self.contributors[variable.name]})
                for group in [tuple(stages)] if self.options.all_reduce else [(stage,) for stage in stages]:
                    found.setdefault(group, []).append(variable)
        return found

    def result(self) -> Program:
        self._bind_loss_scale()
        self._accumulate_nothing()
        self._all_reduce()
        totals = self._totals()
        applied = [
            self._apply(stage, replica, totals)
            for stage in range(len(self.layout.devices))
            for replica in range(len(self.layout.devices[stage]))
        ]
        train = self.builder.add("train", "NoOp", control=applied, device=self.options.host_device).node
        gradients = self._gradients() if self.options.all_reduce else {}
        merge_library(self.graph, self.functions)
        step = dataclasses.replace(self.step, pending={}, train=train, gradients=gradients)
        return self.program.replace(graph=self.graph, step=step)

    def _bind_loss_scale(self) -> None:
        """The gradient of the loss is the loss scale, which each replica of its stage reads from its optimizer."""
        bound: dict[str, Ref] = {}
        scales: dict[tuple[int, int], Ref] = {}
        for (task, value), name in self.step.pending.items():
            assert value == Value(self.program.roles.loss or value.ref, ValueKind.GRADIENT), f"{value} is not connected"
            device = self.layout.devices[task.stage][task.replica]
            captured = self.options.updates[task.stage].loss_scale
            if captured is None:
                dtype = next(node for node in self.graph.node if node.name == name).attr["dtype"].type
                bound[name] = self.builder.const(1.0, dtype, device=device)
                continue
            if (task.stage, task.replica) not in scales:
                function = self._bound(f"stage{task.stage}_loss_scale", captured, {}, [], captured.outputs)
                scales[task.stage, task.replica] = self._call("loss_scale", function, [], task.stage, task.replica)
            bound[name] = scales[task.stage, task.replica]
        substitute(self.graph, bound)

    def _additions(self, stage: int, replica: int) -> list[str]:
        """Nodes after which a replica's accumulators are complete and its variables are no longer read."""
        return [
            name
            for task, names in self.step.exit.items()
            if task.stage == stage and task.replica == replica
            for name in names
        ] + self.empty.get((stage, replica), [])

    def _accumulate_nothing(self) -> None:
        """A replica that has no samples in this step contributes zeros."""
        self.empty: dict[tuple[int, int], list[str]] = {}
        for stage, devices in enumerate(self.layout.devices):
            for replica in range(len(devices)):
                if any(task.stage == stage and task.replica == replica for task in self.step.entry):
                    continue
                targets = [own[stage] for own in self.contributors.values() if stage in own]
                if targets:
                    name = f"{self.options.prefix}stage{stage}_accumulate_nothing"
                    function = accumulate_function(name, targets, "none")
                    self.functions.append(function)
                    node = self._call("accumulate_nothing", function, [], stage, replica).node
                    self.empty[stage, replica] = [node]

    def _members(self, stages: Sequence[int]) -> list[tuple[int, int]]:
        """(stage, replica) of all devices of the stages."""
        return [(stage, replica) for stage in stages for replica in range(len(self.layout.devices[stage]))]

    def _all_reduce(self) -> None:
        previous: dict[str, str] = {}
        key = self.options.first_key
        # Backward ends with the first stage: the last stages' gradients are there first.
        for stages, variables in sorted(self.groups.items(), key=lambda group: group[0][::-1], reverse=True):
            members = self._members(stages)
            if len(members) == 1:
                continue
            group_key = key
            packed = buckets(variables, self.options.bucket_bytes)
            functions = {stage: self._pack_function(stages, stage, packed) for stage in stages}
            calls = {
                (stage, replica): self._call(
                    "pack", functions[stage], [], stage, replica, control=self._additions(stage, replica)
                )
                for stage, replica in members
            }
            for index, bucket in enumerate(packed):
                for stage, replica in members:
                    device = self.layout.devices[stage][replica]
                    node = self._collective(
                        Ref(calls[stage, replica].node, index),
                        bucket[0].dtype,
                        len(members),
                        group_key,
                        key,
                        (stage, replica),
                        [previous[device]] if device in previous else [],
                    )
                    previous[device] = node.node
                    self.reduced[bucket, stage, replica] = node
                key += 1

    def _pack_function(self, stages: Sequence[int], stage: int, packed: Sequence[Sequence[Variable]]) -> FunctionDef:
        builder = Builder(empty_graph())
        vectors = []
        for bucket in packed:
            parts = []
            for variable in bucket:
                own = self.contributors[variable.name].get(stage)
                if own is None:
                    tensor = zeros(builder, variable.dtype, variable.shape)
                else:
                    tensor = read(builder, own.name, own.dtype, own.shape)
                parts.append(flatten(builder, tensor, variable.dtype))
            vectors.append(builder.concat("bucket", parts, bucket[0].dtype, 0))
        name = f"{self.options.prefix}stage{stage}_pack_for_" + "_".join(map(str, stages))
        function = outline(name, Graph(builder.graph), [], vectors)
        self.functions.append(function)
        return function

    def _collective(
        self, vector: Ref, dtype: int, size: int, group: int, instance: int, place: tuple[int, int], after: list[str]
    ) -> Ref:
        stage, replica = place
        numbers = [self.builder.const(value, types_pb2.DT_INT32) for value in (size, group, instance)]
        return self.builder.add(
            f"stage{stage}/replica{replica}/all_reduce{instance}",
            "CollectiveReduceV2",
            [vector, *numbers],
            control=after,
            device=self.layout.devices[stage][replica],
            T=dtype_attr(dtype),
            merge_op="Add",
            final_op="Id",
            communication_hint="auto",
            # None: TensorFlow starts a thread for each timeout, which sleeps until it is over, whatever has happened.
            timeout_seconds=0.0,
            Nordering_token=0,
            max_subdivs_per_device=-1,
            **{PHASE_ATTR: "all_reduce", STAGE_ATTR: stage},
        )

    def _totals(self) -> Ref | None:
        """The statistics of all stages, added up; each device reads the same sum."""
        parts = []
        for stage, update in enumerate(self.options.updates):
            if update.statistics is not None:
                parts.append(self._on_gradients("statistics", update.statistics, stage, 0, None))
        if not parts:
            return None
        return self.builder.add_n("totals", parts, types_pb2.DT_DOUBLE, device=self.layout.devices[0][0])

    def _apply(self, stage: int, replica: int, totals: Ref | None) -> str:
        return self._on_gradients("apply", self.options.updates[stage].apply, stage, replica, totals).node

    def _gradients(self) -> dict[str, Ref]:
        """Reduced gradients as tensors, each from the first device that has it; computed only when they are fetched."""
        found: dict[str, Ref] = {}
        counted: set[str] = set()
        for stage in self.program.stages:
            dense = [variable for _, variable in accumulated_gradients(self.program, stage)]
            sliced = [variable for variable, _ in sliced_gradients(self.program, stage)]
            here = [variable for variable in (*dense, *sliced) if variable.name not in counted]
            counted.update(variable.name for variable in here)
            if here:
                captured = self._identity(here, [variable.name for variable in sliced])
                node = self._on_gradients("gradients", captured, stage.index, 0, None)
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
            dtype = self._dtype(Value(variable.value or Ref(""), ValueKind.SLICE_INDICES))
            indices = builder.append(placeholder(builder.names.fresh("indices"), dtype))
            slices[variable.name] = (gradient, indices)
            rows = builder.const(variable.shape[0], types_pb2.DT_INT32)
            kinds = {"T": kind, "Tindices": dtype_attr(dtype), "Tnumsegments": dtype_attr(types_pb2.DT_INT32)}
            outputs.append(builder.add("result", "UnsortedSegmentSum", [gradient, indices, rows], **kinds))
        return Captured(builder.graph, gradients, {}, slices, outputs=tuple(outputs))

    def _on_gradients(self, what: str, captured: Captured, stage: int, replica: int, totals: Ref | None) -> Ref:
        """Calls a computation on the reduced gradients of a stage, which it takes from the buckets or accumulators."""
        graph = GraphDef()
        graph.CopyFrom(captured.graph)
        builder = Builder(graph)
        inputs: dict[Ref, Ref] = {}  # placeholder of the function's graph -> tensor of the top level
        wanted = [*captured.gradients, *(self._state_of(stage) if what == "apply" else ())]
        reduced = self._reduced_values(builder, inputs, wanted, stage, replica)
        effects = list(captured.effects)
        if what == "apply":
            effects += self._assign_state(builder, inputs, reduced, stage)
        if captured.totals is not None and totals is not None:
            argument = builder.append(placeholder(builder.names.fresh("totals"), types_pb2.DT_DOUBLE))
            inputs[argument] = totals
            substitute(graph, {captured.totals.node: argument})
        bindings = {placed.node: reduced[name] for name, placed in captured.gradients.items()}
        for name, (values, indices) in captured.slices.items():
            rows = self._gather(name, stage, replica)
            for placed, tensor in zip((values, indices), rows, strict=True):
                inputs[placed] = tensor
        function = self._bound(
            f"stage{stage}_{what}",
            dataclasses.replace(captured, graph=graph),
            bindings,
            list(inputs),
            captured.outputs,
            effects,
        )
        control = self._additions(stage, replica)
        if what == "gradients":
            # Whoever fetches them without training still needs every member of each all-reduce to take part.
            control += [ref.node for ref in self.reduced.values()]
        return self._call(what, function, list(inputs.values()), stage, replica, control=control)

    def _reduced_values(
        self, builder: Builder, inputs: dict[Ref, Ref], wanted: Sequence[str], stage: int, replica: int
    ) -> dict[str, Ref]:
        found: dict[str, Ref] = {}
        for stages, variables in self.groups.items():
            here = [variable for variable in variables if variable.name in wanted]
            if not here or stage not in stages:
                continue
            if len(self._members(stages)) == 1:
                for variable in here:
                    accumulators = self.contributors[variable.name]
                    # A stage that only keeps the variable finds another stage's accumulator on the device.
                    own = accumulators.get(stage) or next(iter(accumulators.values()))
                    found[variable.name] = read(builder, own.name, own.dtype, own.shape)
                continue
            for bucket in buckets(variables, self.options.bucket_bytes):
                if any(variable in here for variable in bucket):
                    argument = builder.append(placeholder(builder.names.fresh("bucket"), bucket[0].dtype))
                    inputs[argument] = self.reduced[bucket, stage, replica]
                    parts = unflatten(builder, argument, bucket[0].dtype, [variable.shape for variable in bucket])
                    found |= {variable.name: part for variable, part in zip(bucket, parts, strict=True)}
        return found

    def _gather(self, name: str, stage: int, replica: int) -> tuple[Ref, Ref]:
        """The rows of a gradient from all slices (by stage, replica, micro-batch), on one device."""
        if (name, stage, replica) not in self.gathered:
            variable = self.program.variables[name]
            device = self.layout.devices[stage][replica]
            found = []
            for kind in (ValueKind.SLICE_VALUES, ValueKind.SLICE_INDICES):
                value = Value(variable.value or Ref(""), kind)
                parts = [self._joined(value, *place) for place in self._members(range(len(self.layout.devices)))]
                present = [part for part in parts if part is not None]
                dtype = self._dtype(value)
                found.append(
                    self.builder.concat(f"stage{stage}/replica{replica}/rows", present, dtype, 0, device=device)
                )
            self.gathered[name, stage, replica] = (found[0], found[1])
        return self.gathered[name, stage, replica]

    def _joined(self, value: Value, stage: int, replica: int) -> Ref | None:
        """The rows from one device, joined there before they are sent."""
        key = (value, stage, replica)
        if key not in self.joined:
            own = sorted(task for task, v in self.step.values if v == value and (task.stage, task.replica) == key[1:])
            parts = [self.step.values[task, value] for task in own]
            device = self.layout.devices[stage][replica]
            name = f"stage{stage}/replica{replica}/own_rows"
            self.joined[key] = self.builder.concat(name, parts, self._dtype(value), 0, device=device) if parts else None
        return self.joined[key]

    def _dtype(self, value: Value) -> int:
        stage = next(stage for stage in self.program.stages if value in stage.results)
        assert stage.backward is not None
        position = stage.backward.outputs.index(value)
        return stage.backward.function.signature.output_arg[position].type

    def _state_of(self, stage: int) -> list[str]:
        """The floating-point state that a stage keeps and some slice updates."""
        return [
            v.name
            for v in self.program.roles.variables
            if v.kind is VariableKind.STATE
            and v.name in self.contributors
            and stage in self.options.hosts.get(v.name, ())
        ]

    def _assign_state(
        self, builder: Builder, inputs: dict[Ref, Ref], reduced: Mapping[str, Ref], stage: int
    ) -> list[str]:
        effects = [
            assign(builder, name, reduced[name], variable.dtype, variable.shape)
            for name, variable in self.program.variables.items()
            if name in self._state_of(stage)
        ]
        for variable in self.program.roles.variables:
            hosted = stage in self.options.hosts.get(variable.name, ())
            if variable.kind is not VariableKind.STATE or variable.update is None or not hosted:
                continue
            if variable.dtype in FLOAT_DTYPES:
                continue
            producer = self.program.node_stage.get(variable.update.node, len(self.layout.devices) - 1)
            first = Task(producer, Phase.FORWARD, 0, 0)
            argument = builder.append(placeholder(builder.names.fresh("state"), variable.dtype))
            inputs[argument] = self.step.values[first, Value(variable.update)]
            effects.append(assign(builder, variable.name, argument, variable.dtype, variable.shape))
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
        graph = GraphDef()
        graph.CopyFrom(captured.graph)
        builder = Builder(graph)
        bound = dict(bindings)
        for resource, variable in captured.variables.items():
            bound[resource.node] = handle(builder, variable.name, variable.dtype, variable.shape)
        substitute(graph, bound)
        function = outline(self.options.prefix + name, _sorted(graph), list(inputs), list(outputs), effects=effects)
        merge_library(self.graph, captured.graph.library.function)
        self.functions.append(function)
        return function

    def _call(
        self,
        what: str,
        function: FunctionDef,
        inputs: Sequence[Ref],
        stage: int,
        replica: int,
        *,
        control: Sequence[str] = (),
    ) -> Ref:
        name = self.builder.names.fresh(f"stage{stage}/replica{replica}/{what}")
        device = self.layout.devices[stage][replica]
        attrs: dict[str, str | int] = {PHASE_ATTR: what, STAGE_ATTR: stage}
        return self.builder.append(call_node(name, function, inputs, device=device, control=control, attrs=attrs))


def _sorted(graph: GraphDef) -> Graph:
    """The graph with producers first: nodes that were added behind their readers move up."""
    view = Graph(graph)
    order = view.topological()
    ordered = GraphDef(node=[view.nodes[name] for name in order], versions=graph.versions, library=graph.library)
    return Graph(ordered)
