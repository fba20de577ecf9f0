"""Updates in shards: a device's shard of a whole parameter is taken, updated like one, and sent to all devices."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence

from tensorflow.core.framework import types_pb2

from graph_passes.ir.graph import BYTES_ATTR, REDUCTION_ATTR, Builder, Graph, Ref, dtype_attr
from graph_passes.ir.group_update import Captured, shard_storage
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.outline import FunctionDef, call_node, outline
from graph_passes.ir.program import Variable, VariableKind
from graph_passes.ir.storage import assign, assign_variable, buckets, bytes_of, handle, read, shard_of
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.passes.parameter_gathers import joined_buckets, packed_shards, vector_arguments
from graph_passes.passes.parameter_group import ParameterGroup
from graph_passes.passes.update_nodes import UpdateNodes, marks


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
            parts.append(builder.add("updated", "ReadVariableOp", [place], control=effects, dtype=kind))
        vectors.append(packed_shards(builder, parts, bucket[0].dtype))
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
        function = _gather_function(f"{nodes.options.prefix}{group.label}_all_gather{index}", bucket)
        nodes.functions.append(function)
        vectors = [Ref(updates[device].node, index) for device in group.devices]
        attrs = {**marks(NodeKind.ALL_GATHER, group), REDUCTION_ATTR: number(), BYTES_ATTR: bytes_of(bucket)}
        for replica, device in enumerate(group.devices):
            name = nodes.builder.names.fresh(f"{group.label}/replica{replica}/all_gather{index}")
            node = call_node(name, function, vectors, device=device, control=[updates[device].node], attrs=attrs)
            assigned[device].append(nodes.builder.append(node))
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
    dtype, vectors = bucket[0].dtype, vector_arguments(builder, bucket)
    effects = []
    for variable, value in zip(bucket, joined_buckets(builder, vectors, bucket), strict=True):
        effects.append(assign(builder, variable.name, value, dtype, variable.shape))
        own = handle(builder, shard_storage(variable.name), dtype, variable.storage_shape)
        effects.append(builder.add("remove", "DestroyResourceOp", [own], ignore_lookup_error=True).node)
    return outline(name, Graph(builder.graph), vectors, [], effects=effects)
