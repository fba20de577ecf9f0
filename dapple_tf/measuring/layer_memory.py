"""Memory of layers: their tensors, read from traced steps, and their variables.

The trace of a step lists every tensor with its buffer, and every allocation. Steps of two sizes separate the part
that grows with the samples. All of this is for a step with a stage for each layer (`layer_cuts.py`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

from dapple_tf.describe.layer_profile import ZERO, Cost, LayerBuffers, LayerProfile
from dapple_tf.describe.profile import SharedParameters, Tensor
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.cost_fit import cost_through
from dapple_tf.measuring.traced_memory import StepTrace
from graph_passes.analysis.stage_arguments import row_tables, with_lookups
from graph_passes.ir.graph import Graph, Ref
from graph_passes.ir.group_update import GroupUpdate
from graph_passes.ir.outline import dtype_of
from graph_passes.ir.program import Boundary, Program, Stage, StageFunction, Value, ValueKind, VariableKind
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.storage import bytes_of
from graph_passes.ir.tensorflow_bridge import Shape, dtype_size

# ---- tensors


def with_memory(
    layers: Sequence[LayerProfile],
    program: Program,
    min_cut: Program,
    split: Program,
    sample_shapes: Sequence[Sequence[int]],
    traces: Sequence[StepTrace],
) -> tuple[list[LayerProfile], tuple[Tensor, ...]]:
    """Returns layers with the bytes of their tensors, and the tensors between them, from traces at two sizes.

    Args:
        layers: the layers.
        program: the stages of the traced step.
        min_cut: the same stages with ``recompute="min_cut"``.
        split: the same stages with Bx and Bw in place of B.
        sample_shapes: the shape of one sample of each batch input.
        traces: traces of two sizes, the smaller first.
    """
    samples = [trace.samples for trace in traces]
    stages = range(len(program.stages))

    def costs(sizes: Sequence[Sequence[float]]) -> tuple[Cost, ...]:
        """Returns each layer's cost from its bytes at each size."""
        return tuple(cost_through(samples, [of_size[stage] for of_size in sizes]) for stage in stages)

    tensors, output = [], [ZERO] * len(stages)
    for boundary in program.boundaries:
        size = cost_through(samples, [trace.size(boundary.producer, boundary.ref) for trace in traces])
        differentiable = has_gradient(program, boundary)
        tensors.append(Tensor(boundary.producer, boundary.consumers, size, differentiable))
        output[boundary.producer] = output[boundary.producer] + size
    kept = [kept_tensors(program, stage) for stage in stages]
    residual = [trace.kept_bytes(kept) for trace in traces]
    fewest = [
        _min_cut_bytes(min_cut, trace, static_sizes(min_cut, sample_shapes, trace.samples), otherwise)
        for trace, otherwise in zip(traces, residual, strict=True)
    ]
    static = [static_sizes(split, sample_shapes, trace.samples) for trace in traces]
    delays = [_delayed_bytes(split, trace, sizes) for trace, sizes in zip(traces, static, strict=True)]
    delayed = []
    for sizes in zip(*delays, strict=True):
        known = [size for size in sizes if size is not None]
        delayed.append(cost_through(samples, known) if len(known) == len(sizes) else None)
    temporary = [[trace.temporary_bytes(stage) for stage in stages] for trace in traces]
    measured = [buffers_of(program, split, trace, sizes) for trace, sizes in zip(traces, static, strict=True)]
    buffers, read = fitted(samples, measured, tensors)
    residual_costs, min_cut_costs, temporary_costs = map(costs, (residual, fewest, temporary))
    return [
        dataclasses.replace(
            layer,
            residual_bytes=residual_costs[stage],
            min_cut_residual_bytes=min_cut_costs[stage],
            delayed_bytes=delayed[stage],
            temporary_bytes=temporary_costs[stage],
            output_bytes=output[stage],
            buffers=buffers[stage],
        )
        for stage, layer in enumerate(layers)
    ], read


def kept_tensors(program: Program, stage: int) -> list[Ref]:
    """Returns a stage's tensors that backward functions of this or later stages read."""
    made = {boundary.ref for boundary in program.boundaries if boundary.producer == stage}
    kept: dict[Ref, None] = {}
    for reader in program.stages[stage:]:
        for value in reader.own_backward.inputs:
            own = reader.index == stage and value.kind is ValueKind.RESIDUAL
            if own or (value.kind is ValueKind.FORWARD and value.ref in made):
                kept[value.ref] = None
    return list(kept)


def static_sizes(program: Program, sample_shapes: Sequence[Sequence[int]], samples: int) -> dict[tuple[int, Ref], int]:
    """Returns (stage, residual or partial result of Bx) -> bytes, if the shape is known without running anything.

    Args:
        program: stages with functions.
        sample_shapes: the shape of one sample of each batch input.
        samples: number of samples in a slice.
    """
    sizes: dict[tuple[int, Ref], int] = {}
    known_shapes = stage_shapes(program, sample_shapes, samples)
    for stage in program.stages:
        shapes = known_shapes[stage.index]
        graph = Graph(stage.own_graph)
        read = {value for _, function in stage.phases if function is not None for value in function.inputs}
        for value in read:
            dims = shapes.get(value.ref) if value.kind in (ValueKind.RESIDUAL, ValueKind.PARTIAL) else None
            known = [dim for dim in dims or () if dim is not None]
            if dims is not None and len(known) == len(dims):
                sizes[stage.index, value.ref] = math.prod(known) * dtype_size(dtype_of(graph, value.ref))
    return sizes


def stage_shapes(
    program: Program, sample_shapes: Sequence[Sequence[int]], samples: int
) -> list[dict[Ref, Shape | None]]:
    """Returns, for each stage, the shapes of its tensors for slices of ``samples`` samples; see `static_sizes`."""
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


def has_gradient(program: Program, boundary: Boundary) -> bool:
    """Returns whether any stage that reads a tensor returns its gradient."""
    value = Value(boundary.ref, ValueKind.GRADIENT)
    return any(value in program.stages[stage].results for stage in boundary.consumers)


def _min_cut_bytes(
    program: Program, trace: StepTrace, static: Mapping[tuple[int, Ref], int], otherwise: Sequence[int]
) -> list[int]:
    """Returns the bytes that each stage keeps with recomputation; those without, if they aren't known.

    Most of it is also kept without recomputation, and was measured; shapes give the rest.
    """
    kept = [kept_tensors(program, stage) for stage in range(len(program.stages))]
    measured = trace.kept_bytes([[ref for ref in refs if trace.knows(stage, ref)] for stage, refs in enumerate(kept)])
    sizes = []
    for stage, refs in enumerate(kept):
        fresh = [static.get((stage, ref)) for ref in refs if not trace.knows(stage, ref)]
        known = [size for size in fresh if size is not None]
        sizes.append(measured[stage] + sum(known) if len(known) == len(fresh) else otherwise[stage])
    return sizes


def _delayed_bytes(program: Program, trace: StepTrace, static: Mapping[tuple[int, Ref], int]) -> list[int | None]:
    """Returns the bytes that each stage keeps from Bx to Bw: all that Bw reads except variables; None if unknown.

    Results of F were measured, and each buffer counts once; a gradient is as large as its tensor; shapes give
    partial results.
    """
    makers = {boundary.ref: boundary.producer for boundary in program.boundaries}
    delayed: list[int | None] = []
    for stage in program.stages:
        kept: list[tuple[int, Ref]] = []
        sizes: list[int | None] = []
        for value in stage.weight_grad.inputs if stage.weight_grad is not None else ():
            made = (makers.get(value.ref, stage.index), value.ref)
            if value.kind is ValueKind.PARTIAL:
                sizes.append(static.get((stage.index, value.ref)))
            elif value.kind is ValueKind.RESIDUAL or (value.kind is ValueKind.FORWARD and value.ref in makers):
                kept.append(made)
            elif value.kind is ValueKind.GRADIENT:
                sizes.append(trace.size(*made) if trace.knows(*made) else None)
        sizes += [static.get((stage.index, ref)) for maker, ref in kept if not trace.knows(maker, ref)]
        sizes.append(trace.buffer_bytes([made for made in kept if trace.knows(*made)]))
        known = [size for size in sizes if size is not None]
        delayed.append(sum(known) if len(known) == len(sizes) else None)
    return delayed


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

    def size(name: str) -> int:
        variable = table.describe(name)
        return math.prod(variable.shape) * dtype_size(variable.dtype)

    count = len(program.stages)
    parameters, slots, state = [0] * count, [0] * count, [0] * count
    shared: dict[tuple[int, ...], tuple[int, int]] = {}  # stages -> bytes of parameters, of their slots
    for name, stages in readers.items():
        if table.describe(name).kind is not VariableKind.PARAMETER:
            state[stages[0]] += size(name)
        elif len(stages) == 1:
            parameters[stages[0]] += size(name)
        else:
            of_parameters, of_slots = shared.get(tuple(stages), (0, 0))
            shared[tuple(stages)] = (of_parameters + size(name), of_slots)
    for name, group in updaters.items():
        if len(group) == 1:
            slots[group[0]] += size(name)
        elif group in shared:
            of_parameters, of_slots = shared[group]
            shared[group] = (of_parameters, of_slots + size(name))
    groups = tuple(SharedParameters(stages, *sizes) for stages, sizes in sorted(shared.items()))
    layers = []
    for index, (table_bytes, rows) in enumerate(layer_tables(program, sample_shapes)):
        layers.append(
            LayerProfile(
                names[index],
                ZERO,
                ZERO,
                parameter_bytes=parameters[index],
                slot_bytes=slots[index],
                state_bytes=state[index],
                table_bytes=table_bytes,
                row_bytes=rows,
            )
        )
    return layers, groups


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


# ---- buffers that a layer's tasks leave in memory, and their readers: from a traced step, and from shapes


_ALIASES = frozenset({"ExpandDims", "Identity", "PreventGradient", "Reshape", "Squeeze", "StopGradient"})
"""Operators whose result is the buffer of their first argument."""

Sizes = Mapping[tuple[int, Ref], int]
"""(stage, tensor) -> bytes that follow from shapes alone."""


@dataclasses.dataclass(frozen=True)
class Buffers:
    """The buffers that a step of layers leaves in memory at one size.

    Attributes:
        layers: bytes of each layer, as in `LayerBuffers`.
        readers: for each boundary, the layers whose backward reads it, those whose Bw does, and whether Bw of its
            producer reads its gradient.
    """

    layers: tuple[tuple[int, ...], ...]
    readers: tuple[tuple[frozenset[int], frozenset[int], bool], ...]


def buffers_of(program: Program, split: Program, trace: StepTrace, static: Sizes) -> Buffers:
    """Returns the buffers of a traced step.

    Args:
        program: the stages of the traced step, one for each layer.
        split: the same stages with Bx and Bw in place of B.
        trace: trace of a step.
        static: sizes for the same number of samples; unknown ones count as 0.
    """
    whole = [_read(program, stage, [stage.backward]) for stage in program.stages]
    delayed = [_read(split, stage, [stage.weight_grad]) for stage in split.stages]
    kept_by, delayed_by = (_readers(program, trace, reads) for reads in (whole, delayed))
    gradients = [{value.ref for value in _roots(stage) if value.kind is ValueKind.GRADIENT} for stage in split.stages]
    readers = []
    for kept, late, boundary in zip(kept_by, delayed_by, program.boundaries, strict=True):
        readers.append((kept, late, boundary.ref in gradients[boundary.producer]))
    layers = []
    for stage, of_weights in zip(program.stages, split.stages, strict=True):
        outside = _outside(program, trace, stage.index)
        sizes = [_own_bytes(trace, static, stage.index, reads[stage.index], outside) for reads in (whole, delayed)]
        sizes.append(_partial_bytes(of_weights, static))
        sizes += [trace.gradients[stage.index], trace.rows[stage.index], trace.apply_bytes(stage.index)]
        layers.append(tuple(sizes))
    return Buffers(tuple(layers), tuple(readers))


def fitted(
    samples: Sequence[int], measured: Sequence[Buffers], tensors: Sequence[Tensor]
) -> tuple[tuple[LayerBuffers, ...], tuple[Tensor, ...]]:
    """Fits buffers at several sizes: their costs per sample, and the tensors with their readers."""
    layers = []
    for sizes in zip(*(buffers.layers for buffers in measured), strict=True):
        residual, delayed, partial, gradients, rows, apply = zip(*sizes, strict=True)
        layers.append(
            LayerBuffers(
                residual=cost_through(samples, residual),
                delayed=cost_through(samples, delayed),
                partial=cost_through(samples, partial),
                gradients=max(gradients),
                rows=cost_through(samples, rows),
                apply=min(apply),
            )
        )
    known = [
        dataclasses.replace(tensor, kept=tuple(sorted(kept)), delayed=tuple(sorted(late)), gradient_delayed=gradient)
        for tensor, (kept, late, gradient) in zip(tensors, measured[-1].readers, strict=True)
    ]
    return tuple(layers), tuple(known)


def _read(program: Program, stage: Stage, functions: Iterable[StageFunction | None]) -> list[tuple[int, Ref]]:
    """Returns (producing stage, tensor) for forward tensors that backward functions read, also through aliases."""
    makers = {boundary.ref: boundary.producer for boundary in program.boundaries}
    tensors: dict[tuple[int, Ref], None] = {}
    partial = False
    for function in functions:
        for value in function.inputs if function is not None else ():
            partial |= value.kind is ValueKind.PARTIAL
            if value.kind is ValueKind.RESIDUAL:
                tensors[stage.index, value.ref] = None
            elif value.kind is ValueKind.FORWARD and value.ref in makers:
                tensors[makers[value.ref], value.ref] = None
    for value in _roots(stage) if partial else ():
        if value.kind is ValueKind.RESIDUAL:
            tensors[stage.index, value.ref] = None
        elif value.kind is ValueKind.FORWARD and value.ref in makers:
            tensors[makers[value.ref], value.ref] = None
    return list(tensors)


def _roots(stage: Stage) -> list[Value]:
    """Returns what Bw reads besides variables and scalars; partial results that only reshape count as their source."""
    if stage.weight_grad is None or stage.graph is None:
        return []
    graph = Graph(stage.own_graph)
    arguments = {ref: value for value, ref in stage.arguments.items()}
    given = {value.ref: value for value in stage.input_grad.inputs} if stage.input_grad is not None else {}
    roots: dict[Value, None] = {}
    for value in stage.weight_grad.inputs:
        ref = value.ref
        if value.kind is ValueKind.PARTIAL:
            while ref not in arguments and ref not in given and graph.nodes[ref.node].op in _ALIASES:
                ref = graph.inputs(ref.node)[0]
            known = arguments.get(ref) or given.get(ref)
            value = known if known is not None else Value(ref, ValueKind.PARTIAL)
        roots[value] = None
    return list(roots)


def _partial_bytes(stage: Stage, static: Sizes) -> int:
    """Returns the bytes that Bx makes for Bw; reshapes of one buffer count once."""
    given = {value.ref for value in stage.weight_grad.inputs} if stage.weight_grad is not None else set()
    total = 0
    for value in _roots(stage):
        if value.kind is ValueKind.PARTIAL:
            size = static.get((stage.index, value.ref))
            if size is None and value.ref not in given:  # The alias that Bw reads has a known shape.
                size = max(
                    (static.get((stage.index, ref), 0) for ref in given if _leads(stage, ref, value.ref)), default=0
                )
            total += size or 0
    return total


def _leads(stage: Stage, alias: Ref, root: Ref) -> bool:
    graph = Graph(stage.own_graph)
    while alias != root:
        if alias.node not in graph.nodes or graph.nodes[alias.node].op not in _ALIASES:
            return False
        alias = graph.inputs(alias.node)[0]
    return True


def _readers(program: Program, trace: StepTrace, reads: Sequence[Sequence[tuple[int, Ref]]]) -> list[frozenset[int]]:
    """Returns, for each boundary, the stages that read its buffer, also through a receiving stage's alias of it."""
    own = [
        {address for maker, ref in tensors if maker == stage and (address := trace.address(maker, ref)) is not None}
        for stage, tensors in enumerate(reads)
    ]
    readers: dict[Ref, frozenset[int]] = {}
    addresses = {boundary.ref: trace.address(boundary.producer, boundary.ref) for boundary in program.boundaries}
    for boundary in sorted(program.boundaries, key=lambda boundary: -boundary.producer):
        address = addresses[boundary.ref]
        stages = {stage for stage, tensors in enumerate(reads) if (boundary.producer, boundary.ref) in tensors}
        # The buffer is alive while these run, so that a result of theirs at its address is the buffer.
        stages |= {stage for stage in (boundary.producer, *boundary.consumers) if address in own[stage]}
        for other in program.boundaries:
            if other.producer in boundary.consumers and addresses[other.ref] == address and other.ref in readers:
                stages |= readers[other.ref]
        readers[boundary.ref] = frozenset(stages)
    return [readers[boundary.ref] for boundary in program.boundaries]


def _outside(program: Program, trace: StepTrace, stage: int) -> set[Hashable]:
    """Returns the buffers that a stage receives or passes on: they count as tensors between layers."""

    def passes(boundary: Boundary) -> bool:
        return boundary.producer == stage or stage in boundary.consumers

    return {trace.address(b.producer, b.ref) for b in program.boundaries if passes(b)}


def _own_bytes(
    trace: StepTrace, static: Sizes, stage: int, reads: Sequence[tuple[int, Ref]], outside: set[Hashable]
) -> int:
    """Bytes of the buffers that a stage makes for itself."""
    own = [(maker, ref) for maker, ref in reads if maker == stage]
    known = [made for made in own if trace.knows(*made)]
    inside = [made for made in known if trace.address(*made) not in outside]
    unknown = sum(static.get(made, 0) for made in own if not trace.knows(*made))
    return trace.buffer_bytes(inside) + unknown + trace.list_bytes(stage, [ref for _, ref in known])


# ---- tables of layers: the parameters of which they only look up rows, and the bytes of these rows


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
        sizes = [sum(_bytes(graph, ref, known[stage.index].get(ref)) for ref in refs) for known in shapes]
        names = {lookup.table for lookup in lookups}
        tables.append((bytes_of(v for v in own if v.name in names), cost_through(_SAMPLES, sizes)))
    return tables


def _bytes(graph: Graph, ref: Ref, shape: Shape | None) -> float:
    """Returns the bytes of a tensor; 0 if its shape is unknown."""
    if shape is None or any(size is None for size in shape):
        return 0.0
    return float(math.prod(size or 0 for size in shape) * dtype_size(dtype_of(graph, ref)))
