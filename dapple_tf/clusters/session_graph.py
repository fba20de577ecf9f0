"""A session's graph, to which others are added so that TensorFlow prepares them soon; no result depends on how."""

from __future__ import annotations

import functools

import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2

from graph_passes.ir.call_order import CALLS
from graph_passes.ir.graph import (
    COMPILED_ATTR,
    OWN_ATTRS,
    GraphDef,
    Names,
    copied,
    data_inputs,
    dtype_attr,
    make_node,
    shape_attr,
)
from graph_passes.ir.outline import FunctionDef
from graph_passes.ir.shared_functions import SharedFunctions

_MANY_CALLS = 50
"""Number of calls of functions in a graph from which on searching through each of them takes noticeable time."""
_MOVING = frozenset(
    {
        "AssignAddVariableOp", "AssignVariableOp", "ConcatV2", "Const", "Fill", "GatherV2", "Identity",
        "ReadVariableOp", "Reshape", "SplitV", "VarHandleOp",
    }
)  # fmt: skip
"""Operators that move values and add to variables: functions of these alone have nothing to fuse."""


class SessionGraph:
    """What a session can run: graphs, each under a name, and their functions, equal ones once.

    Attributes:
        graph: TensorFlow's graph.
    """

    def __init__(self) -> None:
        self.graph = tf.Graph()
        self._functions = SharedFunctions()

    def add(self, graph: GraphDef, name: str) -> None:
        """Adds nodes under ``name/``, and the functions that are missing; the graph given stays as it is."""
        fresh = copied(graph)
        moving = {function.signature.name for function in fresh.library.function if _only_moves(function)}
        for nodes in (fresh.node, *(function.node_def for function in fresh.library.function)):
            for node in nodes:
                for attr in [attr for attr in node.attr if attr.startswith(OWN_ATTRS)]:
                    del node.attr[attr]
        for node in fresh.node:
            if "f" in node.attr:
                # Nobody needs the shapes of calls' results, and TensorFlow would infer them for each call.
                node.attr["_disable_call_shape_inference"].b = True
                if node.op in CALLS and not node.attr["config_proto"].s:
                    node.attr["config_proto"].s = calls_config(node.attr["f"].func.name not in moving)
        self._functions.share(fresh)
        _spare_searching_calls(fresh)
        with self.graph.as_default():
            tf.graph_util.import_graph_def(fresh, name=name)


def _only_moves(function: FunctionDef) -> bool:
    return all(node.op in _MOVING for node in function.node_def)


@functools.cache
def calls_config(optimized: bool) -> bytes:
    """Returns the configuration by which a function is optimized at its first call, serialized.

    Grappler looks at each function twice by default, and once more in another form (TFG). Functions of steps are small
    and have no shapes left to compute: the first look finds everything, operators to fuse above all. What is in memory
    when is the plan's to say: tensors to swap out aren't searched for.

    Args:
        optimized: whether it is looked at at all.
    """
    config = config_pb2.ConfigProto()
    options = config.graph_options.rewrite_options
    options.disable_meta_optimizer = not optimized
    options.meta_optimizer_iterations = rewriter_config_pb2.RewriterConfig.ONE
    options.disable_tfg_optimizer = True
    options.memory_optimization = rewriter_config_pb2.RewriterConfig.NO_MEM_OPT
    return config.SerializeToString(deterministic=True)


def _spare_searching_calls(graph: GraphDef) -> None:
    """Adds a reference variable that the nodes which cut the batch come after, and so nearly all calls of functions.

    One of TensorFlow's passes (`EncapsulateSubgraphsPass`) finds the nodes that depend on reference variables. It
    instantiates the function of each call for that, of a thousand calls a thousand times, unless the call depends on
    such a variable anyway. What it finds is for nodes that XLA compiles one by one, and for calls that XLA compiles:
    graphs with these are left as they are.
    """
    calls = [node for node in graph.node if "f" in node.attr]
    fed = {node.name for node in graph.node if node.op == "Placeholder"}
    cuts = [node for node in graph.node if "f" not in node.attr and any(ref.node in fed for ref in data_inputs(node))]
    if len(calls) < _MANY_CALLS or not cuts or any(COMPILED_ATTR in node.attr for node in calls):
        return
    name = Names(node.name for node in graph.node).fresh("reference")
    attrs = {"dtype": dtype_attr(types_pb2.DT_FLOAT), "shape": shape_attr([])}
    graph.node.append(make_node(name, "VariableV2", [], device=cuts[0].device, attrs=attrs))
    for node in cuts:
        if node.device == cuts[0].device:
            node.input.append(f"^{name}")
