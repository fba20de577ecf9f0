"""Variables on devices: library functions that read, load, save and accumulate them.

A variable is a resource of the device on which its handle is made, under the variable's name. The handles live inside
functions, so that one function serves all replicas of a stage (each call finds the variables of its own device), and
the top level of a step grows with tasks, not with the number of variables.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from tensorflow.core.framework import types_pb2

from graph_passes.ir.graph import Builder, Graph, GraphDef, Ref, dtype_attr, shape_attr
from graph_passes.ir.outline import FunctionDef, outline
from graph_passes.ir.program import Variable
from graph_passes.ir.tensorflow_bridge import FunctionDefLibrary, dtype_size, empty_graph


def handle(builder: Builder, name: str, dtype: int, shape: Sequence[int]) -> Ref:
    """Returns the handle of the variable ``name`` of the device that runs the node."""
    kind = {"dtype": dtype_attr(dtype), "shape": shape_attr(tuple(shape)), "shared_name": name}
    return builder.add(f"handle/{name}", "VarHandleOp", **kind)


def read(builder: Builder, name: str, dtype: int, shape: Sequence[int]) -> Ref:
    """Returns the value of a variable."""
    source = handle(builder, name, dtype, shape)
    return builder.add(f"read/{name}", "ReadVariableOp", [source], dtype=dtype_attr(dtype))


def assign(
    builder: Builder, name: str, value: Ref, dtype: int, shape: Sequence[int], op: str = "AssignVariableOp"
) -> str:
    """Assigns (or, with ``AssignAddVariableOp``, adds to) a variable; returns the node's name."""
    target = handle(builder, name, dtype, shape)
    return builder.add(f"assign/{name}", op, [target, value], dtype=dtype_attr(dtype)).node


def read_variable(builder: Builder, variable: Variable) -> Ref:
    """Returns the value of what a device keeps of a variable."""
    value = read(builder, variable.storage_name, variable.storage_dtype, variable.storage_shape)
    return builder.cast(value, variable.storage_dtype, variable.dtype)


def assign_variable(builder: Builder, variable: Variable, value: Ref) -> str:
    """Assigns what a device keeps of a variable; returns the node's name."""
    stored = builder.cast(value, variable.dtype, variable.storage_dtype)
    return assign(builder, variable.storage_name, stored, variable.storage_dtype, variable.storage_shape)


def flatten(builder: Builder, tensor: Ref, dtype: int, *, device: str = "") -> Ref:
    """Returns all elements as a vector."""
    minus_one = builder.const([-1], types_pb2.DT_INT32, device=device)
    return builder.add("flat", "Reshape", [tensor, minus_one], device=device, T=dtype_attr(dtype))


def unflatten(builder: Builder, vector: Ref, dtype: int, shapes: Sequence[Sequence[int]]) -> list[Ref]:
    """Splits a vector into consecutive parts of the given shapes."""
    parts = builder.split("parts", vector, dtype, [math.prod(shape) for shape in shapes], 0)
    return [
        builder.add("shaped", "Reshape", [part, builder.const(list(shape), types_pb2.DT_INT32)], T=dtype_attr(dtype))
        for part, shape in zip(parts, shapes, strict=True)
    ]


def shards_of(builder: Builder, value: Ref, variable: Variable) -> Ref:
    """Returns the elements of a whole value as its variable's shards, [shards, elements]; zeros fill the last ones."""
    shards, length = variable.shards, math.prod(variable.storage_shape)
    vector = flatten(builder, value, variable.dtype)
    padding = shards * length - math.prod(variable.shape)
    if padding:
        vector = builder.concat("padded", [vector, filled(builder, variable.dtype, [padding])], variable.dtype, 0)
    shape = builder.const([shards, length], types_pb2.DT_INT32)
    return builder.add("shards", "Reshape", [vector, shape], T=dtype_attr(variable.dtype))


def shard_of(builder: Builder, value: Ref, variable: Variable, number: Ref | None = None) -> Ref:
    """Returns what a device keeps of a whole value: all of it, or the shard of this number (a scalar int32)."""
    if variable.shards == 1:
        return value
    assert number is not None, f"{variable.name} is in shards"
    kinds = {"Tparams": dtype_attr(variable.dtype), "Tindices": dtype_attr(types_pb2.DT_INT32)}
    inputs = [shards_of(builder, value, variable), number, builder.const(0, types_pb2.DT_INT32)]
    own = builder.add("shard", "GatherV2", inputs, **kinds, Taxis=dtype_attr(types_pb2.DT_INT32), batch_dims=0)
    shape = builder.const(list(variable.storage_shape), types_pb2.DT_INT32)
    return builder.add("shaped", "Reshape", [own, shape], T=dtype_attr(variable.dtype))


def joined_shards(builder: Builder, shards: Sequence[Ref], variable: Variable) -> Ref:
    """Returns the whole value of a variable from all its shards, in order."""
    vector = flatten(builder, builder.concat("joined", shards, variable.dtype, 0), variable.dtype)
    size = math.prod(variable.shape)
    padding = variable.shards * math.prod(variable.storage_shape) - size
    if padding:
        vector = builder.split("unpadded", vector, variable.dtype, [size, padding], 0)[0]
    shape = builder.const(list(variable.shape), types_pb2.DT_INT32)
    return builder.add("shaped", "Reshape", [vector, shape], T=dtype_attr(variable.dtype))


def shard_number(builder: Builder, variables: Iterable[Variable]) -> list[Ref]:
    """Returns the last argument of a function that assigns variables: the number of the device's shards (int32).

    There is none if all variables are whole.
    """
    in_shards = any(variable.shards > 1 for variable in variables)
    return [builder.argument("number", types_pb2.DT_INT32)] if in_shards else []


def filled(builder: Builder, dtype: int, shape: Sequence[int], device: str = "", value: float = 0) -> Ref:
    """Returns a tensor of equal elements, zeros by default."""
    dims = builder.const(list(shape), types_pb2.DT_INT32, device=device)
    kind = {"T": dtype_attr(dtype), "index_type": dtype_attr(types_pb2.DT_INT32)}
    return builder.add("zeros", "Fill", [dims, builder.const(value, dtype, device=device)], device=device, **kind)


def merged(builder: Builder, name: str, parts: Sequence[Ref], variable: Variable) -> Ref:
    """Returns the value that contributions to a variable make: their sum, or the largest or smallest."""
    if not parts:
        return neutral(builder, variable)
    if variable.merge == "Add":
        return builder.add_n(name, parts, variable.dtype)
    total = parts[0]
    for part in parts[1:]:
        total = builder.add(name, f"{variable.merge}imum", [total, part], T=dtype_attr(variable.dtype))
    return total


def neutral(builder: Builder, variable: Variable, device: str = "") -> Ref:
    """Returns a contribution that changes nothing: zeros, or an infinity."""
    value = {"Add": 0, "Max": -math.inf, "Min": math.inf}[variable.merge]
    return filled(builder, variable.dtype, variable.shape, device, value)


def by_dtype(variables: Iterable[Variable]) -> dict[int, tuple[Variable, ...]]:
    """Variables grouped by dtype, in order: each group travels as one vector when variables are loaded and saved."""
    ordered = sorted(variables, key=lambda variable: variable.dtype)
    return {dtype: tuple(group) for dtype, group in itertools.groupby(ordered, key=lambda variable: variable.dtype)}


def read_function(name: str, variables: Sequence[Variable]) -> FunctionDef:
    """Returns a function () -> the variables' values; of those in shards, the device's own."""
    builder = Builder(empty_graph())
    values = [read_variable(builder, variable) for variable in variables]
    return outline(name, Graph(builder.graph), [], values)


def load_function(name: str, variables: Sequence[Variable]) -> FunctionDef:
    """Returns a function that assigns all variables: one vector per dtype (in the order of :func:`by_dtype`) -> ().

    The vectors have whole values. If variables are in shards the last argument is `shard_number`.
    """
    builder = Builder(empty_graph())
    vectors, effects = [], []
    number = shard_number(builder, variables)
    for dtype, group in by_dtype(variables).items():
        vector = builder.argument("values", dtype)
        vectors.append(vector)
        parts = unflatten(builder, vector, dtype, [variable.shape for variable in group])
        for variable, part in zip(group, parts, strict=True):
            effects.append(assign_variable(builder, variable, shard_of(builder, part, variable, *number)))
    return outline(name, Graph(builder.graph), [*vectors, *number], [], effects=effects)


def assign_function(name: str, variables: Sequence[Variable]) -> FunctionDef:
    """Returns a function that assigns all variables: their whole values, `shard_number` -> ()."""
    builder = Builder(empty_graph())
    number = shard_number(builder, variables)
    values = [builder.argument("value", v.dtype) for v in variables]
    effects = [
        assign_variable(builder, v, shard_of(builder, value, v, *number))
        for v, value in zip(variables, values, strict=True)
    ]
    return outline(name, Graph(builder.graph), [*values, *number], [], effects=effects)


def join_function(name: str, variables: Sequence[Variable]) -> FunctionDef:
    """Returns a function from all shards of each variable, in order, to their whole values."""
    builder = Builder(empty_graph())
    shards, values = [], []
    for variable in variables:
        own = [builder.argument("shard", variable.dtype) for _ in range(variable.shards)]
        shards += own
        values.append(joined_shards(builder, own, variable))
    return outline(name, Graph(builder.graph), shards, values)


def save_function(name: str, variables: Sequence[Variable]) -> FunctionDef:
    """Returns a function () -> one vector per dtype, in the order of :func:`by_dtype`, of variables without shards."""
    builder = Builder(empty_graph())
    vectors = []
    for dtype, group in by_dtype(variables).items():
        parts = [flatten(builder, read_variable(builder, v), dtype) for v in group]
        vectors.append(builder.concat("values", parts, dtype, 0))
    return outline(name, Graph(builder.graph), [], vectors)


def accumulate_function(name: str, targets: Sequence[Variable], mode: str) -> FunctionDef:
    """Returns a function that adds values to their accumulators in place: values -> ().

    Args:
        name: the function's name.
        targets: the accumulators, in the order of the arguments.
        mode: ``first`` overwrites (the first micro-batch of a step), ``next`` adds, ``none`` takes no arguments and
            sets zeros (a replica that has no samples in this step).
    """
    builder = Builder(empty_graph())
    arguments, effects = [], []
    for target in targets:
        if mode == "none":
            value = neutral(builder, target)
        else:
            value = builder.argument("value", target.dtype)
            arguments.append(value)
        if mode == "next" and target.merge != "Add":
            value = merged(builder, "merged", [read(builder, target.name, target.dtype, target.shape), value], target)
        op = "AssignAddVariableOp" if mode == "next" and target.merge == "Add" else "AssignVariableOp"
        effects.append(assign(builder, target.name, value, target.dtype, target.shape, op))
    return outline(name, Graph(builder.graph), arguments, [], effects=effects)


def buckets(variables: Iterable[Variable], limit: int) -> list[tuple[Variable, ...]]:
    """Groups consecutive variables of one dtype and merge, up to ``limit`` bytes together, larger ones alone."""
    groups: list[list[Variable]] = []
    size = 0
    for variable in variables:
        added = math.prod(variable.shape) * dtype_size(variable.dtype)
        last = groups[-1][-1] if groups else variable
        alike = (last.dtype, last.merge) == (variable.dtype, variable.merge)
        if not groups or not alike or size + added > limit:
            groups.append([])
            size = 0
        groups[-1].append(variable)
        size += added
    return [tuple(bucket) for bucket in groups]


def bytes_of(variables: Iterable[Variable]) -> int:
    """Returns the bytes that a device keeps of variables."""
    return sum(math.prod(variable.storage_shape) * dtype_size(variable.storage_dtype) for variable in variables)


def merge_library(graph: GraphDef, functions: Iterable[FunctionDef]) -> None:
    """Adds functions to a graph's library, each name once."""
    present = {function.signature.name for function in graph.library.function}
    for function in functions:
        if function.signature.name not in present:
            present.add(function.signature.name)
            graph.library.function.add().CopyFrom(function)


def merge_gradients(graph: GraphDef, library: FunctionDefLibrary) -> None:
    """Adds a library's registrations of functions' gradients to a graph's."""
    present = {gradient.function_name for gradient in graph.library.gradient}
    graph.library.gradient.extend(own for own in library.gradient if own.function_name not in present)
