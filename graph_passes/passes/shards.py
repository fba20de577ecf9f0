"""Parameters in shards: gathered for tasks; taken, updated and sent to all devices for updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from tensorflow.core.framework import types_pb2

from graph_passes.ir.graph import BYTES_ATTR, REDUCTION_ATTR, Builder, Graph, Ref, dtype_attr
from graph_passes.ir.group_update import Captured, shard_storage
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.outline import FunctionDef, add_call, outline
from graph_passes.ir.program import Stage, Variable, VariableKind
from graph_passes.ir.storage import (
    assign,
    assign_variable,
    buckets,
    bytes_of,
    flatten,
    handle,
    join_function,
    joined_shards,
    read,
    read_function,
    shard_of,
    unflatten,
)
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.passes.parameter_group import ParameterGroup

if TYPE_CHECKING:
    from graph_passes.passes.parameter_group import UpdateNodes
    from graph_passes.passes.replicate import Replication


class ParameterGathers:
    """Adds the nodes that gather a stage's parameters, to a step's top level.

        W/0 on 0, W/1 on 1   becomes   0: read W/0 -> gather W on 0, gather W on 1;  1: read W/1 -> the same

    Gathers wait for their turn (`OrderTasks`), and so do the reads of each replica, which are what is sent for them.

    Args:
        step: the step's top level.

    Attributes:
        tensors: (parameter, stage, replica) -> its whole value on the replica's device.
        begins: (stage, replica) -> the nodes that wait for its turn.
    """

    def __init__(self, step: Replication) -> None:
        self.tensors: dict[tuple[str, int, int], Ref] = {}
        self.begins: dict[tuple[int, int], list[str]] = {}
        self._step, self._options, self._layout, self._builder = step, step.options, step.layout, step.builder

    def add(self, stage: Stage, replicas: Iterable[int]) -> None:
        """Gathers the sharded parameters that a stage reads, except tables looked up before F.

        Args:
            stage: the stage.
            replicas: its replicas with samples.
        """
        variables = self._step.program.variables
        groups: dict[tuple[int, ...], list[Variable]] = {}
        for name in stage.reads:
            if name in self._options.in_shards and name not in stage.looked_up:
                groups.setdefault(tuple(self._options.owners[name]), []).append(variables[name])
        for stages, whole in groups.items():
            devices = tuple(dict.fromkeys(device for own in stages for device in self._layout.devices[own]))
            in_shards = [dataclasses.replace(variable, shards=len(devices)) for variable in whole]
            label = f"stage{stage.index}_of{'_'.join(map(str, stages))}"
            name = f"{self._options.prefix}{label}_gather"
            reading, joining = read_function(f"{name}_read", in_shards), join_function(name, in_shards)
            for replica in replicas:
                reads = self._read(reading, stages, devices, f"{label}/replica{replica}")
                self.begins.setdefault((stage.index, replica), []).extend(reads)
                self._join(stage.index, replica, in_shards, joining, reads)

    def _read(self, function: FunctionDef, stages: tuple[int, ...], devices: Sequence[str], label: str) -> list[str]:
        """Reads all shards, on each device its own; returns the nodes."""
        attrs = NodeKind.READ.marks(group=stages)
        nodes = []
        for number, device in enumerate(devices):
            name = f"{label}/read_shard{number}"
            nodes.append(add_call(self._builder, name, function, [], device=device, attrs=attrs).node)
            self._step.shard_reads[stages, device].append(nodes[-1])
        return nodes

    def _join(
        self, stage: int, replica: int, variables: Sequence[Variable], function: FunctionDef, reads: Sequence[str]
    ) -> None:
        """Joins all shards on the device of a replica."""
        attrs = {
            **NodeKind.ALL_GATHER.marks(stage, replica),
            REDUCTION_ATTR: -1 - len(self.tensors),  # Numbers of reductions are above 0.
            BYTES_ATTR: bytes_of(variables),
        }
        name, device = f"stage{stage}/replica{replica}/gather", self._layout.devices[stage][replica]
        shards = [Ref(node, index) for index in range(len(variables)) for node in reads]
        node = add_call(self._builder, name, function, shards, device=device, attrs=attrs).node
        for index, variable in enumerate(variables):
            self.tensors[variable.name, stage, replica] = Ref(node, index)


def take_shards(builder: Builder, captured: Captured, number: Ref, stored: Container[str]) -> dict[str, Ref]:
    """Adds the nodes that give an update a device's shards of the parameters.

    Args:
        builder: of the graph of the update's function.
        captured: the update, of shards of parameters.
        number: number of the device's shards, a scalar int32.
        stored: the parameters of which the device keeps only its shard; others are whole on each device.

    Returns:
        Placeholder of a parameter's handle -> the handle of its shard, which exists when that can be read.
    """
    handles: dict[str, Ref] = {}
    for ref, variable in captured.variables.items():
        if variable.kind is VariableKind.PARAMETER and variable.shards > 1 and variable.name not in stored:
            whole = read(builder, variable.name, variable.dtype, variable.shape)
            value = shard_of(builder, whole, variable, number)
            begun = assign_variable(builder, variable, value)
            own = handle(builder, variable.storage_name, variable.dtype, variable.storage_shape)
            kind = dtype_attr(types_pb2.DT_RESOURCE)
            handles[ref.node] = builder.add("begun", "Identity", [own], control=[begun], T=kind)
    return handles


def gathered_buckets(group: ParameterGroup, limit: int) -> list[tuple[Variable, ...]]:
    """Returns the parameters of a group whose shards are sent together, in vectors of about ``limit`` bytes in all.

    A user's own optimizer may leave some of them as they are; of others devices keep only their shards.
    """
    changed = set() if group.update is None else {variable.name for variable in group.update.apply.variables.values()}
    shards = [variable for name, variable in group.in_shards.items() if name in changed - group.stored]
    return buckets(sorted(shards, key=lambda variable: variable.dtype), limit)


def updated_shards(
    builder: Builder, captured: Captured, packed: Sequence[Sequence[Variable]], effects: Sequence[str]
) -> list[Ref]:
    """Returns a device's shards after an update, a vector for each bucket.

    Args:
        builder: of the graph of the update's function.
        captured: the update, of shards.
        packed: the buckets.
        effects: the nodes that make the update.
    """
    shards = {v.name: v for v in captured.variables.values() if v.kind is VariableKind.PARAMETER}
    vectors = []
    for bucket in packed:
        parts = []
        for variable in bucket:
            own = shards[variable.name]
            place = handle(builder, own.storage_name, own.dtype, own.storage_shape)
            kind = dtype_attr(own.dtype)
            part = builder.add("updated", "ReadVariableOp", [place], control=effects, dtype=kind)
            parts.append(flatten(builder, part, own.dtype))
        vectors.append(builder.concat("bucket", parts, bucket[0].dtype, 0))
    return vectors


def all_gather(
    nodes: UpdateNodes,
    group: ParameterGroup,
    packed: Sequence[tuple[Variable, ...]],
    updates: Mapping[str, Ref],
    number: Callable[[], int],
) -> dict[str, Ref]:
    """Lets each device of a group assign all shards of its parameters, bucket by bucket.

    Args:
        nodes: the step's top level.
        group: the group.
        packed: the buckets.
        updates: device -> the call that updates its shards, whose results are their vectors.
        number: returns a number that no other reduction has.

    Returns:
        Device -> the node that has run when its parameters have been assigned.
    """
    assigned: dict[str, list[Ref]] = {device: [] for device in group.devices}
    for index, bucket in enumerate(packed):
        function = _gather_function(f"{nodes.step.prefix}{group.label}_all_gather{index}", bucket)
        vectors = [Ref(updates[device].node, index) for device in group.devices]
        attrs = {
            **NodeKind.ALL_GATHER.marks(group=group.stages),
            REDUCTION_ATTR: number(),
            BYTES_ATTR: bytes_of(bucket),
        }
        for replica, device in enumerate(group.devices):
            name, control = f"{group.label}/replica{replica}/all_gather{index}", [updates[device].node]
            assigned[device].append(
                add_call(nodes.builder, name, function, vectors, device=device, control=control, attrs=attrs)
            )
    ends: dict[str, Ref] = {}
    for replica, (device, calls) in enumerate(assigned.items()):
        ends[device] = calls[0]
        if len(calls) > 1:
            name, control = f"{group.label}/replica{replica}/all_gathered", [call.node for call in calls]
            ends[device] = nodes.builder.add(name, "NoOp", control=control, device=device)
    return ends


def _gather_function(name: str, bucket: Sequence[Variable]) -> FunctionDef:
    """Returns the function from the vectors of all devices' shards to (), which assigns the whole parameters.

    It removes the device's own shards, which only the update needed.
    """
    builder = Builder(empty_graph())
    dtype, shapes = bucket[0].dtype, [variable.storage_shape for variable in bucket]
    vectors = [builder.argument("vector", dtype) for _ in range(bucket[0].shards)]
    columns = [unflatten(builder, vector, dtype, shapes) for vector in vectors]
    effects = []
    for variable, shards in zip(bucket, zip(*columns, strict=True), strict=True):
        value = joined_shards(builder, shards, variable)
        effects.append(assign(builder, variable.name, value, dtype, variable.shape))
        own = handle(builder, shard_storage(variable.name), dtype, variable.storage_shape)
        effects.append(builder.add("remove", "DestroyResourceOp", [own], ignore_lookup_error=True).node)
    return outline(name, Graph(builder.graph), vectors, [], effects=effects)
