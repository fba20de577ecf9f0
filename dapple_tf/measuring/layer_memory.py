"""Memory of layers that shapes tell: their variables, the rows that they look up, and what backwards read.

All of this is for a step with a stage for each layer (`layer_cuts.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from dapple_tf.describe.layer_profile import ZERO, Cost, LayerProfile
from dapple_tf.describe.profile import SharedParameters
from dapple_tf.frontend.variables import VariableTable
from graph_passes.analysis.stage_arguments import row_tables, with_lookups
from graph_passes.ir.graph import Graph, Ref
from graph_passes.ir.group_update import GroupUpdate
from graph_passes.ir.outline import dtype_of
from graph_passes.ir.program import Boundary, Program, Value, ValueKind, VariableKind
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.storage import bytes_of
from graph_passes.ir.tensorflow_bridge import Shape, dtype_size

# ---- tensors


def forward_tensors(program: Program, stage: int, values: Iterable[Value]) -> list[tuple[int, Ref]]:
    """Returns (producing stage, tensor) for the results of F among the values that a stage's backward reads."""
    makers = {boundary.ref: boundary.producer for boundary in program.boundaries}
    tensors: dict[tuple[int, Ref], None] = {}
    for value in values:
        if value.kind is ValueKind.RESIDUAL:
            tensors[stage, value.ref] = None
        elif value.kind is ValueKind.FORWARD and value.ref in makers:
            tensors[makers[value.ref], value.ref] = None
    return list(tensors)


def kept_tensors(program: Program) -> list[list[Ref]]:
    """Returns each stage's tensors that its own backward or a later stage's reads."""
    kept: list[dict[Ref, None]] = [{} for _ in program.stages]
    for stage in program.stages:
        for maker, ref in forward_tensors(program, stage.index, stage.own_backward.inputs):
            kept[maker][ref] = None
    return list(map(list, kept))


def stage_shapes(
    program: Program, sample_shapes: Sequence[Sequence[int]], samples: int
) -> list[dict[Ref, Shape | None]]:
    """Returns, for each stage, the shapes of its tensors for slices of ``samples`` samples.

    Args:
        program: stages with functions.
        sample_shapes: the shape of one sample of each batch input.
        samples: number of samples in a slice.
    """
    shapes = []
    boundaries = {boundary.ref: boundary for boundary in program.boundaries}
    inputs = dict(zip(program.roles.inputs, sample_shapes, strict=True))
    for stage in program.stages:
        assumed: dict[str, list[int | None]] = {}
        for value, ref in stage.arguments.items():
            boundary = boundaries.get(value.ref)
            if value.ref in inputs:
                assumed[ref.node] = [samples, *inputs[value.ref]]
            elif boundary is not None:
                assumed[ref.node] = list(boundary.example_slice_shape(samples))
        shapes.append(infer_shapes(stage.own_graph, assumed, {program.roles.slice.samples: samples}))
    return shapes


def tensor_bytes(graph: Graph, ref: Ref, shapes: Mapping[Ref, Shape | None]) -> int | None:
    """Returns the bytes of a tensor; None if its shape isn't known."""
    dims = shapes.get(ref)
    known = [dim for dim in dims or () if dim is not None]
    return None if dims is None or len(known) < len(dims) else math.prod(known) * dtype_size(dtype_of(graph, ref))


def has_gradient(program: Program, boundary: Boundary) -> bool:
    """Returns whether any stage that reads a tensor returns its gradient."""
    value = Value(boundary.ref, ValueKind.GRADIENT)
    return any(value in program.stages[stage].results for stage in boundary.consumers)


# ---- variables


def layers_with_variables(
    program: Program,
    names: Sequence[str],
    updates: Sequence[GroupUpdate] | None,
    table: VariableTable,
    sample_shapes: Sequence[Sequence[int]],
) -> tuple[list[LayerProfile], tuple[SharedParameters, ...]]:
    """Returns layers with the bytes of their variables and of rows of tables, and the parameters that several use.

    Each variable counts once: shared parameters apart, their state for the first layer. The optimizer's scalars (step
    counter, learning rate) aren't counted: they belong to no layer.

    Args:
        program: a stage for each layer, with gradients.
        names: names of the layers.
        updates: the optimizer's part for each parameter group, which gives the owners of slots; None derives
            them from shapes.
        table: the variables of the model and the optimizer.
        sample_shapes: the shape of one sample of each batch input.
    """
    readers: dict[str, list[int]] = {}
    for stage in program.stages:
        for name in stage.reads:
            readers.setdefault(name, []).append(stage.index)
    if updates is None:
        updaters = _owners_by_shape(readers, table)
    else:
        updaters = {
            variable.name: update.stages
            for update in updates
            for variable in update.apply.variables.values()
            if variable.kind is VariableKind.OPTIMIZER and variable.shape
        }

    parameters, slots = Counter[tuple[int, ...]](), Counter[tuple[int, ...]]()  # stages -> bytes
    state = Counter[int]()
    for name, stages in readers.items():
        variable = table.describe(name)
        if variable.kind is VariableKind.PARAMETER:
            parameters[tuple(stages)] += bytes_of([variable])
        else:
            state[stages[0]] += bytes_of([variable])
    for name, owners in updaters.items():
        slots[owners] += bytes_of([table.describe(name)])
    layers = [
        LayerProfile(
            names[index],
            ZERO,
            ZERO,
            parameter_bytes=parameters[index,],
            slot_bytes=slots[index,],
            state_bytes=state[index],
            table_bytes=table_bytes,
            row_bytes=rows,
        )
        for index, (table_bytes, rows) in enumerate(layer_tables(program, sample_shapes))
    ]
    shared = [SharedParameters(own, size, slots[own]) for own, size in sorted(parameters.items()) if len(own) > 1]
    return layers, tuple(shared)


def _owners_by_shape(readers: Mapping[str, Sequence[int]], table: VariableTable) -> dict[str, tuple[int, ...]]:
    """Returns variable of the optimizer -> the stages whose parameters it belongs to.

    A parameter's slots have its shape: parameters of one shape have equally many. Slots of other shapes (rows
    and columns of Adafactor) are assigned in the order in which Keras makes variables: that of the parameters.
    """
    parameters = [name for name in readers if table.describe(name).kind is VariableKind.PARAMETER]
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name in parameters:
        by_shape.setdefault(table.describe(name).shape, []).append(name)
    turns: Counter[tuple[int, ...]] = Counter()
    owners = {}
    for name in table.keras_variables:
        variable = table.describe(name)
        if variable.kind is VariableKind.OPTIMIZER and variable.shape and parameters:
            like = variable.shape if variable.shape in by_shape else ()
            candidates = by_shape.get(like, parameters)
            owners[name] = tuple(readers[candidates[turns[like] % len(candidates)]])
            turns[like] += 1
    return owners


# ---- tables: parameters of which a layer only looks up rows, and the bytes of these rows


_SAMPLES = (2, 6)
_KEEPERS = ("first", "second")
"""Two devices: what can be kept in shards by them."""


def layer_tables(program: Program, sample_shapes: Sequence[Sequence[int]]) -> list[tuple[int, Cost]]:
    """Returns the bytes of each layer's tables, and of the rows that it looks up, with their indices.

    Tables that several layers read don't count.

    Args:
        program: a stage for each layer, with gradients.
        sample_shapes: the shape of one sample of each batch input.
    """
    reasons = row_tables(program, [_KEEPERS] * len(program.stages))
    readers = [name for stage in program.stages for name in stage.reads]
    own = [v for v in program.roles.variables if reasons.get(v.name) == "" and readers.count(v.name) == 1]
    if not own:
        return [(0, ZERO)] * len(program.stages)
    shapes = [stage_shapes(program, sample_shapes, samples) for samples in _SAMPLES]
    tables = []
    for stage in program.stages:
        lookups = with_lookups(stage, own).lookups
        refs = [ref for lookup in lookups for ref in (lookup.indices.ref, lookup.rows.ref)]
        graph = Graph(stage.own_graph)
        sizes = [sum(tensor_bytes(graph, ref, known[stage.index]) or 0 for ref in refs) for known in shapes]
        names = {lookup.table for lookup in lookups}
        tables.append((bytes_of(v for v in own if v.name in names), Cost.through(_SAMPLES, sizes)))
    return tables
