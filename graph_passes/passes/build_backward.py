"""The backward graph of each stage, last stage to first.

Rows of a gather's gradient are separated by what they belong to: the samples of a slice, or all slices alike.

ids of the batch       rows of each slice's own, as many as its samples have: those of a batch are all of them
arange, constants      the same rows in every slice, whose values add up
unique(ids)            no two rows of a batch are the same: each is the sum of what the slices have
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.analysis.element_origins import ElementOrigins, Origin, Part, Parts
from graph_passes.analysis.gradient_pieces import gradients_by_pieces
from graph_passes.errors import PassError
from graph_passes.ir.graph import Builder, Graph, GraphDef, Names, Ref, copied, dtype_attr, make_node, shape_attr
from graph_passes.ir.outline import dtype_of, layer_of
from graph_passes.ir.program import (
    OWN_ROWS,
    ROWS,
    SHARED_ROWS,
    Contribution,
    Fact,
    Program,
    Stage,
    Value,
    ValueKind,
    Variable,
    VariableKind,
)
from graph_passes.ir.tensorflow_bridge import Differentiate, add_gradients
from graph_passes.ir.twin import KINDS_OF_STAGES
from graph_passes.passes.call_gradients import differentiable_calls

_ADDED_UP = frozenset({Origin.CONSTANT, Origin.DISTINCT})


@dataclasses.dataclass(frozen=True)
class BuildBackward:
    """Extends each stage's graph by its gradients.

        x, w -> y   becomes   x, w, dy -> y, dx, dw

    The gradients of the loss and of every tensor that the stage sends are arguments; the gradients of its received
    tensors and of its parameters are results. A parameter that is used several times in the stage gets the sum.

    A parameter from which all stages only gather rows (an embedding) keeps its gradient as rows and their indices.
    Keras' optimizers square the rows of such a gradient one by one, where the sum of rows would give another update.
    Rows that belong to samples stay apart from those of other slices; rows that all slices have in common (looked up by
    constants, say) are results of their own, to be added up.

    Attributes:
        slices: slices into which each stage's replicas and micro-batches cut a full batch; empty for one.

    Source: DAPPLE (PPoPP'21), section 5.2.1: "backward graphs will be built in reverse order for each stage."
    """

    name: ClassVar[str] = "build_backward"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.GRAPHS,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.GRAPHS,)
    slices: Sequence[int] = ()

    def run(self, program: Program) -> Program:
        """Program with forward graphs -> program whose stages have gradients among ``arguments`` and ``results``.

        Raises:
            PassError: it is unknown which rows of a gradient belong to samples, and a stage has several slices.
        """
        arriving: set[Ref] = set()  # boundary tensors for which some later stage computes a gradient
        differentiate = functools.lru_cache(maxsize=KINDS_OF_STAGES)(gradients_by_pieces)
        stages: list[Stage] = []
        for stage in reversed(program.stages):
            stages.append(self._stage(program, stage, arriving, differentiate))
            arriving |= {value.ref for value in stages[-1].results if value.kind is ValueKind.GRADIENT}
        sliced = {value.ref for stage in stages for value in stage.results if value.kind is ValueKind.SLICE_VALUES}
        dense = {
            value.ref
            for stage in stages
            for value in stage.results
            if value.kind is ValueKind.GRADIENT and Value(value.ref, ValueKind.SLICE_VALUES) not in stage.results
        }
        in_one_form = [_without(stage, sliced - dense, dense) for stage in reversed(stages)]
        return program.replace(
            stages=tuple(_with_gradients(program, self._with_row_sets(program, stage)) for stage in in_one_form)
        )

    def _with_row_sets(self, program: Program, stage: Stage) -> Stage:
        """Returns the stage with each slice's own rows separate from the rows that all slices have in common."""
        by_value = {variable.value: variable for variable in program.roles.variables if variable.value is not None}
        gradients = {
            by_value[value.ref]: Rows(values, stage.results[Value(value.ref, ValueKind.SLICE_INDICES)])
            for value, values in stage.results.items()
            if value.kind is ValueKind.SLICE_VALUES
        }
        if not gradients:
            return stage
        graph = copied(stage.own_graph)
        sets = row_sets(program, stage, graph, gradients)
        results: dict[Value, Ref] = {}
        for value, ref in stage.results.items():
            if value.kind not in ROWS:
                results[value] = ref
            elif value.kind is ValueKind.SLICE_VALUES:
                own, shared, _ = sets[by_value[value.ref]]
                for kinds, rows in ((OWN_ROWS, own), (SHARED_ROWS, shared)):
                    if rows is not None:
                        results |= {Value(value.ref, kind): part for kind, part in zip(kinds, rows, strict=True)}
        undecided = {variable.name: separated.undecided for variable, separated in sets.items() if separated.undecided}
        slices = self.slices[stage.index] if self.slices else 1
        for name, why in undecided.items():
            if slices > 1:
                raise refusal(name, why, stage.index, slices)
        return dataclasses.replace(stage, graph=graph, results=results, undecided_rows=undecided)

    def _stage(self, program: Program, stage: Stage, arriving: set[Ref], differentiate: Differentiate) -> Stage:
        graph = copied(stage.own_graph)
        view = Graph(stage.own_graph)
        names = Names(view.nodes)
        shapes = {boundary.ref: boundary.shape for boundary in program.boundaries}
        arguments = dict(stage.arguments)
        outputs = []
        for value, ref in stage.results.items():
            if value.ref != program.roles.loss and value.ref not in arriving:
                continue
            name = names.fresh(f"gradient_of/{value.ref.node}_{value.ref.output}")
            attrs = {"dtype": dtype_attr(dtype_of(view, ref)), "shape": shape_attr(shapes.get(value.ref, ()))}
            graph.node.append(make_node(name, "Placeholder", attrs=attrs))
            arguments[Value(value.ref, ValueKind.GRADIENT)] = Ref(name)
            outputs.append((ref, Ref(name)))

        parameters = [v.value for v in program.roles.variables if v.kind is VariableKind.PARAMETER]
        received = [b.ref for b in program.boundaries if b.differentiable and stage.index in b.consumers]
        sources = [ref for ref in (*received, *parameters) if ref is not None and Value(ref) in stage.arguments]
        results = dict(stage.results)
        if outputs and sources:
            graph = differentiable_calls(graph)
            arguments_of_sources = [stage.arguments[Value(ref)] for ref in sources]
            graph, gradients = add_gradients(graph, outputs, arguments_of_sources, differentiate)
            for ref, gradient in zip(sources, gradients, strict=True):
                if gradient is None:
                    continue
                results[Value(ref, ValueKind.GRADIENT)] = gradient.dense
                if gradient.slices is not None and ref in parameters:
                    results[Value(ref, ValueKind.SLICE_VALUES)] = gradient.slices[0]
                    results[Value(ref, ValueKind.SLICE_INDICES)] = gradient.slices[1]
        return dataclasses.replace(stage, graph=graph, arguments=arguments, results=results)


def _with_gradients(program: Program, stage: Stage) -> Stage:
    """Returns the stage with the list of its dense gradients."""
    values = ((Value(v.value, ValueKind.GRADIENT), v) for v in program.roles.variables if v.value is not None)
    gradients = tuple(
        Contribution(value, v, dataclasses.replace(v, name=f"{v.name}/gradient/stage{stage.index}"))
        for value, v in values
        if value in stage.results
    )
    return dataclasses.replace(stage, gradients=gradients)


def _without(stage: Stage, sliced: set[Ref], dense: set[Ref]) -> Stage:
    """Returns the stage with one form of each gradient: rows for ``sliced`` parameters, the whole for ``dense``."""
    results = {
        value: ref
        for value, ref in stage.results.items()
        if not (value.kind is ValueKind.GRADIENT and value.ref in sliced)
        and not (value.kind in OWN_ROWS and value.ref in dense)
    }
    return dataclasses.replace(stage, results=results)


# ---- rows


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
        values = builder.parts("rows/parts", rows.values, variable.dtype, sizes, len(parts))
        indices = builder.parts("rows/parts", rows.indices, index_dtype, sizes, len(parts))
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
