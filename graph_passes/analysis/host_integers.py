"""Integers that follow from the batch and from integer state alone: random seeds, row numbers, lengths of sequences.

GPUs have no kernels for most of what reads 32-bit integers, so that each would wait for its queue to give them back.
"""

from __future__ import annotations

import dataclasses

from tensorflow.core.framework import types_pb2

from graph_passes.ir.graph import Graph, Ref
from graph_passes.ir.program import Program, Stage, Value, ValueKind
from graph_passes.ir.tensorflow_bridge import is_stateful, output_dtypes, takes_functions

_INTEGERS = frozenset({types_pb2.DT_BOOL, types_pb2.DT_INT32, types_pb2.DT_INT64})


def with_host_integers(program: Program, stage: Stage) -> Stage:
    """Returns a stage with arguments for these integers in place of what computes them, and results that give them.

        state, slice number -> seed -> random numbers   becomes   state, slice number -> seed,  seed -> random numbers

    Args:
        program: whose batch inputs and integer state these are.
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
