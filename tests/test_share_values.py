"""Small values are computed once; what must stay apart does."""

from __future__ import annotations

from typing import Any

import pytest
from tensorflow.core.framework import types_pb2

from graph_passes.ir.graph import CALL_ATTR, Builder, Graph, GraphDef, Ref, dtype_attr, shape_attr
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.passes.share_values import ShareValues

FLOAT = {"T": dtype_attr(types_pb2.DT_FLOAT)}


def variable(builder: Builder, call: str, name: str, *, control: list[str] | None = None) -> Ref:
    """Reads a scalar variable, with a handle of its own."""
    kind = {"dtype": dtype_attr(types_pb2.DT_FLOAT)}
    handle = builder.add(f"{call}/handle", "VarHandleOp", **kind, shape=shape_attr(()), shared_name=name)
    return builder.add(f"{call}/read", "ReadVariableOp", [handle], control=control or [], **kind)


def names(graph: GraphDef, op: str) -> list[str]:
    return [node.name for node in graph.node if node.op == op]


def shapes_of(graph: GraphDef, shape: tuple[int | None, ...] | None = ()) -> dict[Ref, Any]:
    return {Ref(node.name): shape for node in graph.node}


def two_updates() -> GraphDef:
    builder = Builder(empty_graph())
    for call in ("a", "b"):
        rate = variable(builder, call, "rate")
        builder.add(f"{call}/scaled", "Neg", [rate], **FLOAT)
    return builder.graph


def test_a_variable_that_two_updates_read_is_read_once() -> None:
    graph = two_updates()
    shared = ShareValues(shapes_of(graph)).shared(graph)
    assert [node.op for node in shared.node] == ["VarHandleOp", "ReadVariableOp", "Neg"]
    Graph(shared).topological()
    assert len(graph.node) == 6, "the graph that was given stays as it is"


def test_nodes_that_a_step_names_stay() -> None:
    graph = two_updates()
    shared = ShareValues(shapes_of(graph)).shared(graph, {"a/scaled", "b/scaled"})
    assert names(shared, "Neg") == ["a/scaled", "b/scaled"]
    (read,) = names(shared, "ReadVariableOp")
    assert Graph(shared).inputs("a/scaled") == Graph(shared).inputs("b/scaled") == [Ref(read)]


def test_a_read_that_waits_may_see_another_value() -> None:
    builder = Builder(empty_graph())
    first = variable(builder, "a", "rate")
    assigned = builder.add("assign", "AssignVariableOp", [Ref("a/handle"), first], dtype=FLOAT["T"])
    variable(builder, "b", "rate", control=[assigned.node])
    shared = ShareValues(shapes_of(builder.graph)).shared(builder.graph)
    assert names(shared, "ReadVariableOp") == ["a/read", "b/read"]


@pytest.mark.parametrize("shape", [(1025,), (None,), None])
def test_large_and_unknown_values_are_computed_again(shape: tuple[int | None, ...] | None) -> None:
    graph = two_updates()
    shared = ShareValues(shapes_of(graph, shape)).shared(graph)
    assert len(names(shared, "ReadVariableOp")) == len(names(shared, "Neg")) == 2


def test_random_numbers_are_drawn_for_each() -> None:
    builder = Builder(empty_graph())
    dims = builder.const([2], types_pb2.DT_INT32)
    kind = {"T": dtype_attr(types_pb2.DT_INT32), "dtype": dtype_attr(types_pb2.DT_FLOAT)}
    for name in ("a", "b"):
        builder.add(name, "RandomUniform", [dims], **kind)
    shared = ShareValues(shapes_of(builder.graph)).shared(builder.graph)
    assert names(shared, "RandomUniform") == ["a", "b"]


def test_tasks_that_are_ordered_share_nothing() -> None:
    graph = two_updates()
    for node in graph.node:
        node.attr[CALL_ATTR].s = node.name.partition("/")[0].encode()
    assert len(ShareValues(shapes_of(graph), within_calls=True).shared(graph).node) == 6
    assert len(ShareValues(shapes_of(graph)).shared(graph).node) == 3
