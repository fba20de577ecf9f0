"""Separates rows of a gather's gradient by what they belong to: the samples of a slice, or all slices alike.

ids of the batch       rows of each slice's own, as many as its samples have: those of a batch are all of them
arange, constants      the same rows in every slice, whose values add up
unique(ids)            no two rows of a batch are the same: each is the sum of what the slices have
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.analysis.element_origins import ElementOrigins, Origin, Part, Parts
from graph_passes.errors import PassError
from graph_passes.ir.graph import Builder, Graph, GraphDef, Ref, dtype_attr
from graph_passes.ir.outline import dtype_of, layer_of
from graph_passes.ir.program import Program, Stage, Variable

_ADDED_UP = frozenset({Origin.CONSTANT, Origin.DISTINCT})


class Rows(NamedTuple):
    """Rows of the gradient of a parameter.

    Attributes:
        values: the rows.
        indices: the rows of the parameter that they belong to.
    """

    values: Ref
    indices: Ref


class RowSets(NamedTuple):
    """The rows of a parameter's gradient in one stage.

    Attributes:
        own: rows of each slice alone; None if there are none.
        shared: rows that all slices have in common, each with its share of their values; None if there are none.
        undecided: why they can't be separated, so that all are in ``own``; empty if they can.
    """

    own: Rows | None
    shared: Rows | None
    undecided: str = ""


def row_sets(
    program: Program, stage: Stage, graph: GraphDef, gradients: Mapping[Variable, Rows]
) -> dict[Variable, RowSets]:
    """Separates the rows of gradients.

    Args:
        program: the flat program.
        stage: the stage, with its arguments.
        graph: its graph with gradients, which gets more nodes.
        gradients: parameter -> the rows of its gradient.
    """
    if not gradients:
        return {}
    origins = ElementOrigins(program, stage, graph, [rows.indices for rows in gradients.values()])
    builder, flat = Builder(graph), Graph(program.graph)
    before = Graph(graph)
    sets = {}
    for variable, rows in gradients.items():
        parts = tuple(_wrapped(origins, part, variable.shape[0]) for part in origins.of(rows.indices))
        undecided = next((part for part in parts if part.origin not in (*_ADDED_UP, Origin.SAMPLES)), None)
        if undecided is not None:
            where = _layer(flat, before, undecided.tensor)
            why = f"of its rows that {where} looks up, the indices are {undecided.origin.value}"
            sets[variable] = RowSets(rows, None, why)
        else:
            sets[variable] = _apart(builder, before, variable, rows, parts)
    return sets


def _wrapped(origins: ElementOrigins, part: Part, rows: int) -> Part:
    """Returns a part of indices; COUPLED instead of DISTINCT if they aren't the row numbers that they come from.

    keras.ops.take makes ``i + rows`` of an ``i`` that counts from the end.
    """
    if part.origin is not Origin.DISTINCT or part.tensor == part.root:
        return part
    numbers = np.arange(-rows, rows)
    image = origins.image(part, numbers)
    known = image is not None and np.array_equal(image, numbers % rows)
    return part if known else part._replace(origin=Origin.COUPLED)


def refusal(variable: str, why: str, stage: int, slices: int) -> PassError:
    """Returns the error for several slices of a batch where the rows of a gradient can't be separated."""
    return PassError(
        f"the rows of the gradient of {variable!r} in stage {stage} can't be told apart by sample: {why}. With "
        f"{slices} slices of a batch (micro-batches times replicas of the stage) the optimizer would get other rows "
        f"than in plain Keras. Compute the indices of each sample from that sample, or from constants; or look them up "
        f"in a table whose gradient is added up, keras.ops.take(1 * table, indices, axis=0); or give the stage one "
        f"replica, and the plan one micro-batch"
    )


def _layer(flat: Graph, graph: Graph, ref: Ref) -> str:
    """Returns the layer that made a tensor, or its first ancestor in the flat graph."""
    pending, seen = [ref.node], set()
    while pending:
        name = pending.pop(0)
        if name in flat.nodes and (layer := layer_of(flat, Ref(name))) and not layer.startswith("("):
            return f"layer {layer!r}"
        if name not in seen and name in graph.nodes:
            seen.add(name)
            pending += [each.node for each in graph.inputs(name)]
    return "the model"


def _apart(builder: Builder, graph: Graph, variable: Variable, rows: Rows, parts: Parts) -> RowSets:
    origins = {part.origin for part in parts}
    if origins == {Origin.SAMPLES}:
        return RowSets(rows, None)
    if origins == {Origin.CONSTANT}:
        return RowSets(None, rows)
    index_dtype = dtype_of(graph, rows.indices)
    pieces = [rows]
    if len(parts) > 1:
        sizes = _sizes(builder, graph, parts)
        values = _split(builder, rows.values, sizes, variable.dtype, len(parts))
        indices = _split(builder, rows.indices, sizes, index_dtype, len(parts))
        pieces = [Rows(*both) for both in zip(values, indices, strict=True)]
    own, shared = [], []
    for part, piece in zip(parts, pieces, strict=True):
        if part.origin is Origin.SAMPLES:
            own.append(piece)
        elif part.origin is Origin.CONSTANT:
            shared.append(piece)
        else:
            shared.append(_whole(builder, graph, variable, piece.values, index_dtype, part))
    dtypes = variable.dtype, index_dtype
    return RowSets(_concat(builder, own, *dtypes), _concat(builder, shared, *dtypes))


def _sizes(builder: Builder, graph: Graph, parts: Parts) -> Ref:
    """Returns the number of rows of each part."""
    int32 = dtype_attr(types_pb2.DT_INT32)
    sizes = [
        builder.add("rows/size", "Size", [part.tensor], T=dtype_attr(dtype_of(graph, part.tensor)), out_type=int32)
        for part in parts
    ]
    return builder.add("rows/sizes", "Pack", sizes, T=int32, N=len(sizes), axis=0)


def _split(builder: Builder, tensor: Ref, sizes: Ref, dtype: int, count: int) -> list[Ref]:
    kind = {"T": dtype_attr(dtype), "Tlen": dtype_attr(types_pb2.DT_INT32), "num_split": count}
    zero = builder.const(0, types_pb2.DT_INT32)
    node = builder.add("rows/parts", "SplitV", [tensor, sizes, zero], **kind).node
    return [Ref(node, index) for index in range(count)]


def _whole(builder: Builder, graph: Graph, variable: Variable, values: Ref, index_dtype: int, part: Part) -> Rows:
    """Returns all rows of a parameter, zeros for missing ones: no two of a batch are the same, so they add up.

    They are there twice: an index may count from the end, so a batch may look up a row by both of its numbers.
    """
    assert part.root is not None
    int32, dtype = types_pb2.DT_INT32, dtype_of(graph, part.root)
    rows, twice = variable.shape[0], part.tensor != part.root
    kind = {"T": dtype_attr(dtype)}
    numbers = builder.add("rows/numbers", "Reshape", [part.root, builder.const([-1], int32)], **kind)
    if twice:
        numbers = builder.add("rows/numbers", "AddV2", [numbers, builder.const(rows, dtype)], **kind)
    kinds = {"T": dtype_attr(variable.dtype), "Tindices": dtype_attr(dtype), "Tnumsegments": dtype_attr(int32)}
    count = builder.const(rows * (1 + twice), int32)
    whole = builder.add("rows/whole", "UnsortedSegmentSum", [values, numbers, count], **kinds)
    bounds = [builder.const(bound, index_dtype) for bound in (0, rows, 1)]
    every = builder.add("rows/all", "Range", bounds, Tidx=dtype_attr(index_dtype))
    return Rows(whole, builder.concat("rows/all", [every] * (1 + twice), index_dtype, 0))


def _concat(builder: Builder, rows: list[Rows], dtype: int, index_dtype: int) -> Rows | None:
    if not rows:
        return None
    return Rows(
        builder.concat("rows/values", [each.values for each in rows], dtype, 0),
        builder.concat("rows/indices", [each.indices for each in rows], index_dtype, 0),
    )
