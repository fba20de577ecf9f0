"""Graphs as sessions get them: what keeps TensorFlow's own preparation short, and changes no result."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.core.protobuf import config_pb2

import dapple_tf as dapple
from dapple_tf.clusters.session import SessionGraph, session_config
from graph_passes.ir.graph import (
    LAYER_ATTR,
    OWN_ATTRS,
    POSITION_ATTR,
    Builder,
    Graph,
    GraphDef,
    Ref,
    dtype_attr,
    make_node,
    shape_attr,
)
from graph_passes.ir.outline import FunctionDef, call_node, outline
from graph_passes.ir.program import Variable, VariableKind
from graph_passes.ir.storage import accumulate_function, load_function, read_function, save_function

CPU = "/job:localhost/replica:0/task:0/device:CPU:0"


def calls(count: int, *, jit_compile: bool = False, between: bool = True) -> GraphDef:
    """A batch of ``count`` numbers, cut into slices, each doubled by a call of one function, and all of them joined.

    Without ``between`` calls read the fed batch itself.
    """
    body = GraphDef()
    inside = Builder(body)
    x = inside.append(make_node("x", "Placeholder", attrs={"dtype": dtype_attr(types_pb2.DT_FLOAT)}))
    y = inside.add("y", "AddV2", [x, x], T=dtype_attr(types_pb2.DT_FLOAT))
    double = outline("double", Graph(body), [x], [y], jit_compile=jit_compile)

    graph = GraphDef()
    builder = Builder(graph)
    attrs = {"dtype": dtype_attr(types_pb2.DT_FLOAT), "shape": shape_attr([count])}
    batch = builder.append(make_node("batch", "Placeholder", device=CPU, attrs=attrs))
    slices = [batch] * count
    if between:
        slices = builder.split("slices", batch, types_pb2.DT_FLOAT, [1] * count, 0, device=CPU)
    doubled = [
        builder.append(call_node(f"call{number}", double, [part], device=CPU)) for number, part in enumerate(slices)
    ]
    builder.concat("all", doubled, types_pb2.DT_FLOAT, 0, device=CPU)
    graph.library.function.append(double)
    return graph


def added(graph: GraphDef) -> tf.Graph:
    content = SessionGraph()
    content.add(graph, "step")
    return content.graph


def ancestors(graph: tf.Graph, name: str) -> set[str]:
    return Graph(graph.as_graph_def()).ancestors([Ref(name)])


def test_many_calls_come_after_a_reference_variable() -> None:
    """Calls of 32 stages for 32 micro-batches took TensorFlow 8 s: it instantiated the function of each, twice."""
    graph = added(calls(60))
    (reference,) = (node.name for node in graph.as_graph_def().node if node.op == "VariableV2")
    assert all(reference in ancestors(graph, f"step/call{number}") for number in range(60))
    with tf.compat.v1.Session(graph=graph, config=session_config(dapple.Cluster.local(1, kind="cpu"))) as session:
        batch = np.arange(60, dtype="float32")
        np.testing.assert_array_equal(session.run("step/all:0", {"step/batch:0": batch}), 2 * batch)


@pytest.mark.parametrize(
    "graph",
    [calls(4), calls(60, jit_compile=True), calls(60, between=False)],
    ids=["few calls", "calls for XLA, which asks for reference variables", "nothing between the batch and the calls"],
)
def test_other_graphs_have_none(graph: GraphDef) -> None:
    assert "VariableV2" not in {node.op for node in added(graph).as_graph_def().node}


def test_functions_are_optimized_once() -> None:
    """Grappler searched each function three times, and for tensors to swap out, which is the plan's to say."""
    graph = added(calls(4)).as_graph_def()
    serialized = {node.attr["config_proto"].s for node in graph.node if "f" in node.attr}
    (config,) = map(config_pb2.ConfigProto.FromString, serialized)
    options = config.graph_options.rewrite_options
    assert options.meta_optimizer_iterations == options.ONE and options.disable_tfg_optimizer
    assert options.memory_optimization == options.NO_MEM_OPT and not options.disable_meta_optimizer


def stored(*, shards: int = 1) -> list[Variable]:
    """Variables of two dtypes, one of whose shards end with padding."""
    described = [("a", types_pb2.DT_FLOAT, (2, 3)), ("b", types_pb2.DT_INT32, (5,))]
    return [Variable(*told, VariableKind.PARAMETER, shards=shards) for told in described]


@pytest.mark.parametrize(
    "function",
    [
        read_function("read_shards", stored(shards=2)),
        load_function("load_shards", stored(shards=2)),
        save_function("save", stored()),
        *(accumulate_function(mode, stored(), mode) for mode in ("first", "next", "none")),
    ],
    ids=lambda function: function.signature.name,
)
def test_functions_that_only_move_values_are_not_optimized(function: FunctionDef) -> None:
    """They are most of a step's functions: Grappler searched each on each device, and there is nothing to find."""
    graph = GraphDef()
    builder = Builder(graph)
    arguments = [
        builder.append(make_node(arg.name, "Placeholder", attrs={"dtype": dtype_attr(arg.type)}))
        for arg in function.signature.input_arg
    ]
    builder.append(call_node("call", function, arguments, device=CPU))
    graph.library.function.append(function)
    (call,) = (node for node in added(graph).as_graph_def().node if "f" in node.attr)
    config = config_pb2.ConfigProto.FromString(call.attr["config_proto"].s)
    assert config.graph_options.rewrite_options.disable_meta_optimizer, {node.op for node in function.node_def}


def test_passes_notes_stay_behind() -> None:
    """TensorFlow copied the layer and the position of each node a dozen times, a tenth of a graph's bytes."""
    graph = calls(4)
    for nodes in (graph.node, graph.library.function[0].node_def):
        for number, node in enumerate(nodes):
            node.attr[LAYER_ATTR].s, node.attr[POSITION_ATTR].i = b"layer", number
    before = graph.SerializeToString(deterministic=True)
    session_graph = added(graph).as_graph_def()
    assert graph.SerializeToString(deterministic=True) == before
    every = [session_graph.node, *(function.node_def for function in session_graph.library.function)]
    assert not [attr for nodes in every for node in nodes for attr in node.attr if attr.startswith(OWN_ATTRS)]


def test_graphs_with_equal_functions_share_them() -> None:
    content = SessionGraph()
    content.add(calls(4), "first")
    other = calls(3)
    other.library.function[0].signature.name = "same"
    for node in other.node:
        if "f" in node.attr:
            node.attr["f"].func.name = "same"
    content.add(other, "second")
    assert [f.signature.name for f in content.graph.as_graph_def().library.function] == ["double"]
    with tf.compat.v1.Session(graph=content.graph) as session:
        batch = np.arange(3, dtype="float32")
        np.testing.assert_array_equal(session.run("second/all:0", {"second/batch:0": batch}), 2 * batch)
