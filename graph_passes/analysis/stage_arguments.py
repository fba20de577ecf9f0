"""Values that stages take as arguments in place of computing them: rows of tables, and integers.

A table is a parameter of which stages only look up rows, by indices that are known before a stage's forward.

Integers follow from the batch and from integer state alone: random seeds, row numbers, lengths of sequences. GPUs have
no kernels for most of what reads 32-bit integers, so that each would wait for its queue to give them back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.analysis.operator_traits import ASKING
from graph_passes.ir.graph import Graph, NodeDef, Ref, copied, dtype_name
from graph_passes.ir.outline import layer_of
from graph_passes.ir.program import (
    ROWS_PER_SHARD,
    Lookup,
    Program,
    Stage,
    Value,
    ValueKind,
    Variable,
    VariableKind,
    in_rows,
)
from graph_passes.ir.tensorflow_bridge import constant_value, is_stateful, make_constant, output_dtypes, takes_functions

_INTEGERS = frozenset({types_pb2.DT_BOOL, types_pb2.DT_INT32, types_pb2.DT_INT64})


class _Reads(NamedTuple):
    """The nodes of a stage that read a parameter.

    Attributes:
        lookups: those that gather rows of it.
        shapes: those that read its shape.
        others: those that read all of it.
    """

    lookups: list[str]
    shapes: list[str]
    others: list[str]


def row_tables(program: Program, keepers: Sequence[Sequence[str]]) -> dict[str, str]:
    """Returns each parameter that is looked up and lies on several devices, and why each of them keeps it whole.

    Args:
        program: stages with graphs, and with gradients if they are trained.
        keepers: for each stage the devices that keep its variables.

    Returns:
        Parameter -> the reason; empty if stages need nothing but rows of it, so that each device can keep a part.
    """
    views = [Graph(stage.own_graph) for stage in program.stages]
    reasons = {}
    for variable in program.roles.variables:
        if variable.kind is not VariableKind.PARAMETER or variable.value is None:
            continue
        value = Value(variable.value)
        stages = [stage for stage in program.stages if value in stage.arguments]
        reads = {stage.index: _reads(views[stage.index], stage, value) for stage in stages}
        devices = {device for stage in stages for device in keepers[stage.index]}
        if len(devices) > 1 and any(own.lookups for own in reads.values()):
            why = (_why_whole(program, stage, views[stage.index], reads[stage.index], variable) for stage in stages)
            reasons[variable.name] = next(filter(None, why), "") or _why_not_in_rows(variable, len(devices))
    return reasons


def with_lookups(stage: Stage, tables: Sequence[Variable]) -> Stage:
    """Returns a stage whose graph takes the rows that it looks up as arguments, and gives their indices as results.

        W, ids -> gather -> y   becomes   rows of W -> y,  ids

    Args:
        stage: a stage with a graph.
        tables: parameters of which it needs nothing but rows.
    """
    graph = copied(stage.own_graph)
    view = Graph(graph)
    lookups = []
    for variable in tables:
        value = Value(variable.value or Ref(""))
        if value not in stage.arguments:
            continue
        reads = _reads(view, stage, value)
        for name in reads.lookups:
            indices = Value(view.inputs(name)[1], ValueKind.INDICES)
            lookups.append(Lookup(variable.name, indices, Value(Ref(name), ValueKind.LOOKED_UP)))
        for name in reads.shapes:
            _fix_shape(view.nodes[name], variable.shape)
    if not lookups:
        return stage
    arguments = {**stage.arguments, **{lookup.rows: lookup.rows.ref for lookup in lookups}}
    results = {**stage.results, **{lookup.indices: lookup.indices.ref for lookup in lookups}}
    return dataclasses.replace(stage, graph=graph, arguments=arguments, results=results, lookups=tuple(lookups))


def _reads(view: Graph, stage: Stage, value: Value) -> _Reads:
    reads = _Reads([], [], [])
    pending = [stage.arguments[value]]
    results = {*stage.results.values(), *stage.metric_results.values()}
    while pending:
        ref = pending.pop()
        if ref in results:
            reads.others.append(ref.node)
        for name in view.consumers(ref.node):
            inputs = view.inputs(name)
            if ref not in inputs:
                continue
            node = view.nodes[name]
            if node.op == "Identity":
                pending.append(Ref(name))
            elif node.op in ASKING:
                reads.shapes.append(name)
            elif _looks_up(view, node) and ref not in inputs[1:]:
                reads.lookups.append(name)
            else:
                reads.others.append(name)
    return reads


def _looks_up(view: Graph, node: NodeDef) -> bool:
    """Whether a node gathers rows of its first input."""
    if node.op != "GatherV2" or node.attr["batch_dims"].i:
        return False
    axis = view.nodes[view.inputs(node.name)[2].node]
    return axis.op == "Const" and int(constant_value(axis)) == 0


def _fix_shape(node: NodeDef, shape: Sequence[int]) -> None:
    """Makes a constant of what a node tells about a parameter's shape."""
    dtype = np.dtype(dtype_name(output_dtypes(node)[0]))
    known = {"Rank": len(shape), "Shape": shape, "Size": math.prod(shape)}
    make_constant(node, np.array(known[node.op], dtype))


def _why_whole(program: Program, stage: Stage, view: Graph, reads: _Reads, variable: Variable) -> str:
    """Returns why a stage needs a whole parameter; empty if it doesn't."""
    flat = Graph(program.flat_graph)

    def where(name: str) -> str:
        layer = layer_of(flat, Ref(name)) if name in flat else ""
        return f"layer {layer!r}" if layer and not layer.startswith("(") else f"stage {stage.index}"

    if reads.others:
        name = reads.others[0]
        return f"{where(name)} reads all of it ({view.nodes[name].op})"
    if Value(variable.value or Ref(""), ValueKind.GRADIENT) in stage.results:
        return f"its gradient in stage {stage.index} is dense"
    variables = {v.value for v in program.roles.variables}
    peers = () if program.roles.peers is None else program.roles.peers.refs
    arguments = {ref: value for value, ref in stage.arguments.items()}
    for name in reads.lookups:
        indices = view.inputs(name)[1]
        body = view.ancestors([indices], arguments, control=False)
        read = {ref for each in body if view.nodes[each].op not in ASKING for ref in view.inputs(each)} | {indices}
        stateful = next((each for each in view.ordered(body) if is_stateful(view.nodes[each].op)), None)
        if stateful is not None:
            return f"{where(name)} looks up rows by the result of {view.nodes[stateful].op} {stateful!r}"
        for value in (arguments[ref] for ref in read if ref in arguments):
            if value.kind is not ValueKind.FORWARD or value.ref in variables or value.ref in peers:
                return f"{where(name)} looks up rows that depend on {value}, which isn't of the batch"
    return ""


def _why_not_in_rows(variable: Variable, count: int) -> str:
    if in_rows(variable.shape, count):
        return ""
    if len(variable.shape) < 2:
        return "its rows are single numbers"
    rows = variable.shape[0]
    return f"it has {rows} rows, fewer than {ROWS_PER_SHARD} for each of {count} devices"


def with_host_integers(program: Program, stage: Stage) -> Stage:
    """Returns a stage with arguments for integers in place of what computes them, and results that give them.

        state, slice number -> seed -> random numbers   becomes   state, slice number -> seed,  seed -> random numbers

    Args:
        program: whose batch inputs and integer state they follow from.
        stage: a stage with a graph.
    """
    graph, roles = Graph(stage.own_graph), program.roles
    sources = {*roles.inputs, roles.slice.number, *(v.value for v in roles.variables if v.is_counter)}
    given = {ref for value, ref in stage.arguments.items() if value.kind is ValueKind.FORWARD and value.ref in sources}
    results = [*stage.results.values(), *stage.metric_results.values()]
    follows: dict[str, bool] = {}  # node of integers -> whether it computes them from such arguments
    read: list[Ref] = []  # by other nodes
    for name in graph.ordered(graph.ancestors(results, control=False)):
        node, own = graph.nodes[name], graph.inputs(name)
        computes = set(output_dtypes(node)) <= _INTEGERS and not is_stateful(node.op) and not takes_functions(node.op)
        if computes and (node.op == "Const" or Ref(name) in given):
            follows[name] = False
        elif computes and node.op != "Placeholder" and all(ref.node in follows for ref in own):
            follows[name] = any(ref in given or follows[ref.node] for ref in own)
        if not follows.get(name):
            read += own
    integers = {
        Value(ref, ValueKind.INTEGERS): ref
        for ref in dict.fromkeys([*read, *results])
        if follows.get(ref.node) and output_dtypes(graph.nodes[ref.node])[ref.output] == types_pb2.DT_INT32
    }
    return dataclasses.replace(stage, arguments={**stage.arguments, **integers}, results={**stage.results, **integers})
