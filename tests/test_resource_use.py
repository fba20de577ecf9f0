"""Which nodes touch which variables, whether they may change them, and what order of calls has to stay for that."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from programs import FLOAT, node

from graph_passes.ir.graph import Builder, Graph, GraphDef, Ref, function_attr, make_node
from graph_passes.ir.outline import FunctionDef, call_node, outline
from graph_passes.ir.resource_use import ResourceUse, Use, called_functions
from graph_passes.ir.storage import assign, read
from graph_passes.ir.tensorflow_bridge import empty_graph


def traced(make: Callable[[Any], Any]) -> GraphDef:
    """The graph of what is made of the handle of the float scalar ``v``."""
    with tf.Graph().as_default() as graph:
        make(tf.raw_ops.VarHandleOp(dtype=tf.float32, shape=(), shared_name="v"))
        return graph.as_graph_def()


def uses(graph: GraphDef) -> list[Use]:
    """All uses."""
    return ResourceUse({function.signature.name: function for function in graph.library.function}).of_nodes(graph.node)


def value(of: Any) -> Any:
    """The variable's value."""
    return tf.raw_ops.ReadVariableOp(resource=of, dtype=tf.float32)


def changed(of: Any) -> Any:
    """Adds 1 to the variable; the sum."""
    with tf.control_dependencies([tf.raw_ops.AssignAddVariableOp(resource=of, value=tf.constant(1.0))]):
        return value(of)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (value, [("ReadVariableOp", False)]),
        (lambda of: tf.raw_ops.VariableShape(input=of), [("VariableShape", False)]),
        (lambda of: tf.raw_ops.AssignVariableOp(resource=of, value=tf.constant(1.0)), [("AssignVariableOp", True)]),
        (changed, [("AssignAddVariableOp", True), ("ReadVariableOp", False)]),
        (lambda of: value(tf.identity(of)), [("ReadVariableOp", False)]),
        (lambda of: tf.raw_ops.DestroyResourceOp(resource=of), [("DestroyResourceOp", True)]),
    ],
)
def test_reading_is_told_from_writing(make: Callable[[Any], Any], expected: list[tuple[str, bool]]) -> None:
    graph = traced(make)
    assert [(node(graph, use.node).op, use.written) for use in uses(graph)] == expected
    assert {use.resource for use in uses(graph)} == {"v"}


@pytest.mark.parametrize(("inner", "written"), [(value, False), (changed, True)])
def test_loops_branches_and_calls_write_what_they_may_write(inner: Callable[[Any], Any], written: bool) -> None:
    def loop(of: Any) -> None:
        tf.while_loop(lambda total: total < 3.0, lambda total: total + inner(of), [tf.constant(0.0)])

    def branch(of: Any) -> None:
        tf.cond(tf.compat.v1.placeholder(tf.bool), lambda: value(of), lambda: inner(of))

    def call(of: Any) -> None:
        tf.function(lambda: tf.cond(tf.compat.v1.placeholder(tf.bool), lambda: value(of), lambda: inner(of)))()

    for make in (loop, branch, call):
        graph = traced(make)
        assert [(use.resource, use.written) for use in uses(graph)] == [("v", written)]


def test_handles_inside_functions_count_for_the_nodes_that_run_them() -> None:
    graph, function = called(lambda builder: [read(builder, "v", FLOAT, ())], ["w"])
    assert uses(graph) == [Use("call", "v", False), Use("call", "w", True)]
    assert ResourceUse({"f": function}).of_function("f") == (
        Use("read/v", "v", False),
        Use("assign/w", "w", True),
    )


def called(make: Callable[[Builder], list[Ref]], written: list[str]) -> tuple[GraphDef, FunctionDef]:
    """A graph with a call of a function, and the function."""
    body = Builder(empty_graph())
    results = make(body)
    effects = [assign(body, name, results[0], FLOAT, ()) for name in written]
    function = outline("f", Graph(body.graph), [], results, effects=effects)
    graph = empty_graph()
    graph.node.append(call_node("call", function, [], device=""))
    graph.library.function.append(function)
    return graph, function


def test_the_order_of_functions_does_not_depend_on_how_protobuf_keeps_attributes() -> None:
    # Protobuf gives a map's keys in an order that differs from node to node: body and condition of the same loop came
    # in one order here and in the other there, and what had been measured for it was not found again.
    attrs = {"body": "f", "cond": "g", "else_branch": "h", "then_branch": "i"}
    functions = {name: FunctionDef() for name in attrs.values()}
    shuffle = random.Random(0)
    for _ in range(100):
        keys = shuffle.sample(sorted(attrs), len(attrs)) + ["parallel_iterations"] * shuffle.randrange(2)
        made = make_node("n", "While", attrs={key: function_attr(attrs[key]) if key in attrs else 1 for key in keys})
        assert called_functions(made, functions) == ["f", "g", "h", "i"]


# ---- the order of calls, and what has to stay of it for the variables that they touch
