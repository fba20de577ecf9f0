"""Turning a traced graph into a self-contained GraphDef without unused nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Sequence

import keras
import tensorflow as tf

from dapple_tf.common.keras_private import tensorflow_variable
from dapple_tf.errors import CaptureError
from graph_passes.ir.graph import LAYER_ATTR, POSITION_ATTR, Graph, GraphDef
from graph_passes.ir.program import LayerCall, Program, Roles
from graph_passes.ir.tensorflow_bridge import make_constant


def without_captures(graph: tf.Graph, tables: Container[str], unknown: Sequence[keras.Variable]) -> GraphDef:
    """Returns the traced graph with constants for the tensors that the model holds as Python attributes.

    Args:
        graph: the traced graph.
        tables: placeholders of lookup tables, which stay.
        unknown: variables that the trace has read without knowing them.

    Raises:
        CaptureError: the model reads a variable that it doesn't track.
    """
    graph_def: GraphDef = graph.as_graph_def()
    nodes = {node.name: node for node in graph_def.node}
    for external, internal in graph.captures:
        if internal.op.name in tables:
            continue
        if external.dtype in (tf.resource, tf.variant):
            readers = [operation.name for operation in internal.consumers()]
            paths = [own.path for own in unknown if getattr(tensorflow_variable(own), "handle", None) is external]
            raise CaptureError(
                f"the model, its loss or a metric reads the variable {(paths or [internal.op.name])[0]!r} that the "
                f"model doesn't track, in {', '.join(readers[:3])}: make it an attribute of a layer or of a metric "
                f"(for random draws, a keras.random.SeedGenerator of a layer, a metric or a loss)"
            )
        make_constant(nodes[internal.op.name], external.numpy())
    return graph_def


def paths_of_nodes(calls: Iterable[LayerCall]) -> dict[int, str]:
    """Returns position of a node -> path of the innermost layer call that made it."""
    paths: dict[int, str] = {}
    for call in sorted(calls, key=lambda call: call.start - call.stop):
        paths |= dict.fromkeys(range(call.start, call.stop), call.path)
    return paths


def pruned(graph_def: GraphDef, roles: Roles, paths: dict[int, str]) -> Program:
    """Returns a program without unused nodes; each node has its position in the order of creation and its layer."""
    graph = Graph(graph_def)
    wanted = [*roles.outputs, *(normalizer.of_whole_batch for normalizer in roles.normalizers)]
    wanted += [variable.update for variable in roles.variables if variable.update is not None]
    wanted += [roles.loss] if roles.loss is not None else []
    kept = graph.ancestors(wanted, control=False) | {ref.node for ref in (*roles.inputs, *roles.scalars)}
    needed = GraphDef(versions=graph_def.versions, library=graph_def.library)
    for node in graph_def.node:
        if node.name not in kept:
            continue
        copy = needed.node.add()
        copy.CopyFrom(node)
        copy.device = ""
        inputs = [text for text in node.input if not text.startswith("^") or text[1:] in kept]
        del copy.input[:]
        copy.input.extend(inputs)
        position = graph.position[node.name]
        copy.attr[POSITION_ATTR].i = position
        if position in paths:
            copy.attr[LAYER_ATTR].s = paths[position].encode()
    variables = [
        dataclasses.replace(variable, value=variable.value if variable.value and variable.value.node in kept else None)
        for variable in roles.variables
    ]
    used = [variable for variable in variables if variable.value is not None or variable.update is not None]
    return Program(needed, dataclasses.replace(roles, variables=tuple(used)))
