"""Updates in shards: a device's shard of a parameter is taken, updated like a whole one, and sent to all devices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tensorflow.core.framework import types_pb2

from graph_passes.ir.graph import BYTES_ATTR, Builder, Graph, Ref, dtype_attr
from graph_passes.ir.group_update import Captured, shard_storage
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.outline import FunctionDef, call_node, outline, placeholder
from graph_passes.ir.program import Variable, VariableKind
from graph_passes.ir.storage import assign, buckets, bytes_of, handle, joined_shards, read, shard_of, unflatten
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.passes.parameter_group import ParameterGroup
from graph_passes.passes.update_nodes import UpdateNodes, marks

_INT64 = types_pb2.DT_INT64


def shard_of_rows(builder: Builder, values: Ref, indices: Ref, dtype: int, variable: Variable, number: Ref) -> Ref:
    """Returns a shard of a gradient that is given as rows.

    Only the rows around the shard are added up, as it may begin and end within one.

    Args:
        builder: of a function's graph.
        values: the rows, [rows, *shape[1:]].
        indices: the rows of the parameter that they belong to, [rows].
        dtype: dtype of ``indices``.
        variable: the parameter.
        number: number of the shard, a scalar int32.
    """
    width, (length,) = math.prod(variable.shape[1:]), variable.storage_shape
    rows = (length + 2 * width - 2) // width

    def wide(value: int) -> Ref:
        return builder.const(value, _INT64)

    def computed(op: str, *inputs: Ref) -> Ref:
        return builder.add(op.lower(), op, inputs, T=dtype_attr(_INT64))

    def cast(tensor: Ref, source: int) -> Ref:
        kinds = {"SrcT": dtype_attr(source), "DstT": dtype_attr(_INT64)}
        return tensor if source == _INT64 else builder.add("wide", "Cast", [tensor], **kinds)

    start = computed("Mul", cast(number, types_pb2.DT_INT32), wide(length))
    first = computed("FloorDiv", start, wide(width))
    near = computed("Sub", cast(indices, dtype), first)
    inside = builder.add(
        "inside",
        "LogicalAnd",
        [computed("GreaterEqual", near, wide(0)), computed("Less", near, wide(rows))],
    )
    # Rows of negative numbers aren't added to anything.
    segments = computed("SelectV2", inside, near, wide(-1))
    kinds = {"T": dtype_attr(variable.dtype), "Tindices": dtype_attr(_INT64), "Tnumsegments": dtype_attr(_INT64)}
    dense = builder.add("dense", "UnsortedSegmentSum", [values, segments, wide(rows)], **kinds)
    flat = builder.add(
        "flat", "Reshape", [dense, builder.const([rows * width], _INT64)],
        T=dtype_attr(variable.dtype), Tshape=dtype_attr(_INT64),
    )
    begin = builder.add(
        "begin", "Reshape", [computed("FloorMod", start, wide(width)), builder.const([1], _INT64)],
        T=dtype_attr(_INT64), Tshape=dtype_attr(_INT64),
    )
    size = builder.const([length], _INT64)
    return builder.add(
        "shard", "Slice", [flat, begin, size], T=dtype_attr(variable.dtype), Index=dtype_attr(_INT64)
    )


def take_shards(builder: Builder, captured: Captured, number: Ref) -> dict[str, Ref]:
    """Adds the nodes that give an update a device's shards of the parameters.

    Args:
        builder: of the graph of the update's function.
        captured: the update, of shards.
        number: number of the device's shards, a scalar int32.

    Returns:
        Placeholder of a parameter's handle -> the handle of its shard, which exists when that can be read.
    """
    handles: dict[str, Ref] = {}
    for ref, variable in captured.variables.items():
        if variable.kind is VariableKind.PARAMETER and variable.shards > 1:
            whole = read(builder, variable.name, variable.dtype, variable.shape)
            value = shard_of(builder, whole, variable, number)
            begun = assign(builder, variable.storage_name, value, variable.dtype, variable.storage_shape)
            own = handle(builder, variable.storage_name, variable.dtype, variable.storage_shape)
            kind = dtype_attr(types_pb2.DT_RESOURCE)
            handles[ref.node] = builder.add("begun", "Identity", [own], control=[begun], T=kind)
    return handles


def gathered_buckets(group: ParameterGroup, limit: int) -> list[tuple[Variable, ...]]:
    """Returns the parameters of a group whose shards are sent together, in vectors of about ``limit`` bytes in all."""
    return buckets(sorted(group.in_shards.values(), key=lambda variable: variable.dtype), limit)


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
        vectors.append(builder.concat("bucket", parts, bucket[0].dtype, 0))
    return vectors


def all_gather(
    nodes: UpdateNodes, group: ParameterGroup, packed: Sequence[tuple[Variable, ...]], updates: Mapping[str, Ref]
) -> dict[str, Ref]:
    """Lets each device of a group assign all shards of its parameters, bucket by bucket.

    Args:
        nodes: the step's top level.
        group: the group.
        packed: the buckets.
        updates: device -> the call that updates its shards, whose results are their vectors.

    Returns:
        Device -> the node that has run when its parameters have been assigned.
    """
    assigned: dict[str, list[Ref]] = {device: [] for device in group.devices}
    for index, bucket in enumerate(packed):
        function = _gather_function(f"{nodes.options.prefix}{group.label}_all_gather{index}", bucket)
        nodes.functions.append(function)
        vectors = [Ref(updates[device].node, index) for device in group.devices]
        attrs = {**marks(NodeKind.ALL_GATHER, group), BYTES_ATTR: bytes_of(bucket)}
        for number, device in enumerate(group.devices):
            name = nodes.builder.names.fresh(f"{group.label}/replica{number}/all_gather{index}")
            node = call_node(name, function, vectors, device=device, control=[updates[device].node], attrs=attrs)
            assigned[device].append(nodes.builder.append(node))
    ends: dict[str, Ref] = {}
    for number, (device, calls) in enumerate(assigned.items()):
        ends[device] = calls[0]
        if len(calls) > 1:
            name, control = f"{group.label}/replica{number}/all_gathered", [call.node for call in calls]
            ends[device] = nodes.builder.add(
                name, "NoOp", control=control, device=device, **marks(NodeKind.ALL_GATHER, group)
            )
    return ends


def _gather_function(name: str, bucket: Sequence[Variable]) -> FunctionDef:
    """Returns the function from the vectors of all devices' shards to (), which assigns the whole parameters.

    It removes the device's own shards, which only the update needed.
    """
    builder = Builder(empty_graph())
    dtype = bucket[0].dtype
    vectors = [builder.append(placeholder(builder.names.fresh("vector"), dtype)) for _ in range(bucket[0].shards)]
    columns = [unflatten(builder, vector, dtype, [v.storage_shape for v in bucket]) for vector in vectors]
    effects = []
    for variable, shards in zip(bucket, zip(*columns, strict=True), strict=True):
        value = joined_shards(builder, shards, variable)
        effects.append(assign(builder, variable.name, value, dtype, variable.shape))
        own = handle(builder, shard_storage(variable.name), dtype, variable.storage_shape)
        effects.append(builder.add("remove", "DestroyResourceOp", [own], ignore_lookup_error=True).node)
    return outline(name, Graph(builder.graph), vectors, [], effects=effects)
