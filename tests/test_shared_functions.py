"""Functions and graphs that differ in names only: each is there once, and done once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.framework import types_pb2

from graph_passes.ir.graph import (
    COLOCATION,
    LAYER_ATTR,
    Builder,
    Graph,
    GraphDef,
    NodeDef,
    Ref,
    attr,
    dtype_attr,
    make_const,
    make_node,
)
from graph_passes.ir.outline import FunctionDef, call_node, outline
from graph_passes.ir.shared_functions import SharedFunctions
from graph_passes.ir.twin import Twin

FLOAT = dtype_attr(types_pb2.DT_FLOAT)


def affine(name: str, prefix: str, factor: float = 2.0, op: str = "AddV2", *, backwards: bool = False) -> FunctionDef:
    """``factor * x`` and another operator on x and that product, with nodes ``prefix/...``."""
    body = GraphDef()
    builder = Builder(body)
    x = builder.append(make_node(f"{prefix}/x", "Placeholder", attrs={"dtype": FLOAT}))
    scale = builder.append(make_const(f"{prefix}/factor", factor, types_pb2.DT_FLOAT))
    product = builder.add(f"{prefix}/product", "Mul", [x, scale], T=FLOAT)
    result = builder.add(f"{prefix}/result", op, [product, x] if backwards else [x, product], T=FLOAT)
    return outline(name, Graph(body), [x], [result])


def of_functions(functions: Sequence[FunctionDef], calls: Sequence[int] = ()) -> GraphDef:
    """A graph with a call of each function (by number in ``calls``) on one placeholder."""
    graph = GraphDef()
    builder = Builder(graph)
    x = builder.append(make_node("x", "Placeholder", attrs={"dtype": FLOAT}))
    for number in calls or range(len(functions)):
        builder.append(call_node(f"call{number}", functions[number], [x], device=""))
    graph.library.function.extend(functions)
    return graph


def shared(graph: GraphDef, functions: SharedFunctions | None = None) -> GraphDef:
    copy = GraphDef()
    copy.CopyFrom(graph)
    (functions or SharedFunctions()).share(copy)
    return copy


def names(graph: GraphDef) -> list[str]:
    return [function.signature.name for function in graph.library.function]


def called(graph: GraphDef) -> list[str]:
    return [node.attr["f"].func.name for node in graph.node if "f" in node.attr]


def results(graph: GraphDef) -> list[float]:
    with tf.Graph().as_default() as scope, tf.compat.v1.Session(graph=scope) as session:
        tf.graph_util.import_graph_def(graph, name="")
        calls = [f"{node.name}:0" for node in graph.node if "f" in node.attr]
        return [float(value) for value in session.run(calls, {"x:0": np.float32(3.0)})]


def test_equal_functions_are_there_once() -> None:
    """Stages of equal layers had functions of their own, which TensorFlow copied and searched 32 times."""
    graph = of_functions([affine("stage0", "layer_0"), affine("stage1", "layer_1"), affine("stage2", "layer_7/sub")])
    result = shared(graph)
    assert names(result) == ["stage0"]
    assert called(result) == ["stage0"] * 3
    assert results(result) == results(graph) == [9.0] * 3


@pytest.mark.parametrize(
    "other",
    [
        affine("other", "b", factor=3.0),
        affine("other", "b", op="Sub", backwards=True),
    ],
    ids=["another constant", "inputs the other way round"],
)
def test_functions_that_differ_in_more_than_names_stay(other: FunctionDef) -> None:
    graph = of_functions([affine("one", "a", op=other.node_def[-1].op), other])
    result = shared(graph)
    assert names(result) == ["one", "other"]
    assert results(result) == results(graph)


def test_what_waits_is_part_of_a_function() -> None:
    def ordered(name: str, prefix: str, *, waits: bool) -> FunctionDef:
        function = affine(name, prefix)
        if waits:
            function.node_def[-1].input.append(f"^{function.node_def[0].name}")
        return function

    functions = [
        ordered("one", "a", waits=True),
        ordered("same", "b", waits=True),
        ordered("other", "c", waits=False),
    ]
    result = shared(of_functions(functions))
    assert names(result) == ["one", "other"]
    assert called(result) == ["one", "one", "other"]


@pytest.mark.parametrize("op", ["RandomUniform", "EagerPyFunc"])
def test_functions_with_state_stay(op: str) -> None:
    """Two layers draw numbers of their own, even where both have the same seed."""

    def drawn(name: str) -> FunctionDef:
        function = affine(name, name)
        node = function.node_def.add(name=f"{name}/more", op=op)
        node.input.append(f"^{name}/product")
        return function

    assert names(shared(of_functions([drawn("one"), drawn("other")]))) == ["one", "other"]


def nested(name: str, inner: FunctionDef) -> FunctionDef:
    """A function that calls another."""
    body = GraphDef()
    builder = Builder(body)
    x = builder.append(make_node(f"{name}/x", "Placeholder", attrs={"dtype": FLOAT}))
    result = builder.append(call_node(f"{name}/call", inner, [x], device=""))
    return outline(name, Graph(body), [x], [result])


@pytest.mark.parametrize("reverse", [False, True], ids=["callees first", "callers first"])
def test_functions_that_call_equal_ones_are_equal(reverse: bool) -> None:
    inner = [affine("inner0", "a"), affine("inner1", "b"), affine("inner2", "c", factor=5.0)]
    outer = [nested(f"outer{number}", function) for number, function in enumerate(inner)]
    graph = of_functions([*outer, *inner] if reverse else [*inner, *outer], range(3) if reverse else range(3, 6))
    result = shared(graph)
    assert sorted(names(result)) == ["inner0", "inner2", "outer0", "outer2"]
    assert called(result) == ["outer0", "outer0", "outer2"]
    assert results(result) == results(graph) == [9.0, 9.0, 18.0]


def test_later_graphs_call_earlier_ones_functions() -> None:
    functions = SharedFunctions()
    first = shared(of_functions([affine("one", "a")]), functions)
    later = shared(of_functions([affine("other", "b"), affine("new", "c", factor=4.0), affine("one", "a")]), functions)
    assert names(first) == ["one"]
    assert names(later) == ["new"]
    assert called(later) == ["one", "new", "one"]


def test_functions_that_nodes_know_by_name_stay() -> None:
    """Of an operator of a function's name others read ``node:result``, by the function's own word for its result."""
    plain, gradient = affine("plain", "p"), affine("own_gradient", "c")
    first, operator, user = affine("first", "a"), affine("operator", "b"), affine("user", "d")
    user.node_def.add(name="d/direct", op="operator").input.append("d/product:z:0")
    graph = of_functions([plain, first, operator, gradient, user], [0, 1])
    graph.library.gradient.add(function_name="first", gradient_func="own_gradient")
    result = shared(graph)
    assert names(result) == ["plain", "first", "operator", "own_gradient", "user"]
    assert called(result) == ["plain", "first"]
    assert [(pair.function_name, pair.gradient_func) for pair in result.library.gradient] == [("first", "own_gradient")]


def test_a_function_that_was_left_out_comes_back_where_it_is_known_by_name() -> None:
    """As an operator of a later graph, it was missing."""
    functions = SharedFunctions()
    first = shared(of_functions([affine("one", "a"), affine("other", "b")]), functions)
    user = affine("user", "d")
    user.node_def.add(name="d/direct", op="other").input.append("d/product:z:0")
    later = shared(of_functions([affine("other", "b"), user], [1]), functions)
    assert (names(first), names(later)) == (["one"], ["other", "user"])
    last = shared(of_functions([affine("other", "b"), affine("third", "c")]), functions)
    assert (names(last), called(last)) == ([], ["other", "one"])


def test_functions_that_called_ones_are_given_are_renamed_too() -> None:
    graph = of_functions([affine("one", "a"), affine("other", "b"), affine("third", "c", factor=7.0)])
    graph.node[-1].attr["f"].func.attr["given"].func.name = "other"
    result = shared(graph)
    assert names(result) == ["one", "third"]
    assert result.node[-1].attr["f"].func.attr["given"].func.name == "one"


def test_branches_are_renamed_too() -> None:
    """They are a list of functions."""
    graph = of_functions([affine("one", "a"), affine("other", "b")], [0])
    node = graph.node.add(name="case", op="StatelessCase")
    node.attr["branches"].list.func.add(name="one")
    node.attr["branches"].list.func.add(name="other")
    assert [f.name for f in shared(graph).node[-1].attr["branches"].list.func] == ["one", "one"]


def test_functions_that_call_one_with_state_stay() -> None:
    """Though by an operator without: TensorFlow says that of branches, whatever is in them."""
    drawn = affine("drawn", "a")
    drawn.node_def.add(name="a/more", op="RandomUniform")

    def branching(name: str) -> FunctionDef:
        function = affine(name, name)
        node = function.node_def.add(name=f"{name}/case", op="StatelessCase")
        node.attr["branches"].list.func.add(name="drawn")
        return function

    assert names(shared(of_functions([drawn, branching("one"), branching("other")]))) == ["drawn", "one", "other"]


# ---- twins: what is done to one of graphs that differ in names only is taken over for all


def _graph(scope: str, layer: str) -> GraphDef:
    graph = GraphDef()
    graph.node.append(make_node(f"{scope}/x", "Placeholder", attrs={"dtype": attr(1)}))
    graph.node.append(make_node(f"{scope}/y", "Split", [f"{scope}/x"], attrs={LAYER_ATTR: attr(layer.encode())}))
    graph.node.append(make_node(f"{scope}/z", "Add", [f"{scope}/y", f"{scope}/y:1", f"^{scope}/x"]))
    graph.node[2].attr[COLOCATION].list.s.append(f"loc:@{scope}/x".encode())
    return graph


def test_new_nodes_are_called_after_those_they_come_from() -> None:
    graph = _graph("a", "first")
    graph.node.append(make_node("gradients/a/z_grad", "NoOp"))
    changed = GraphDef.FromString(Twin(graph).serialized)
    changed.node.append(make_node("gradients/n2_grad", "Neg", ["n2"]))
    changed.node.append(make_node("n1/output1", "Neg", ["gradients/n2_grad"]))
    changed.node.append(make_node("n1x", "Neg", ["n1/output1", "^n0"]))
    changed.node[5].attr[COLOCATION].list.s.append(b"loc:@n0")
    named_graph, named = Twin(graph).named(changed)
    new = list(named_graph.node)[4:]
    assert [node.name for node in new] == ["gradients/a/z_grad_1", "a/y/output1", "n1x"]
    assert [list(node.input) for node in new] == [["a/z"], ["gradients/a/z_grad_1"], ["a/y/output1", "^a/x"]]
    assert not any(COLOCATION in node.attr for node in new)
    assert named(Ref("n1/output1", 2)) == Ref("a/y/output1", 2)


def test_a_node_that_became_a_constant_keeps_what_is_noted_but_no_place() -> None:
    graph = _graph("a", "first")
    graph.node[1].attr[COLOCATION].list.s.append(b"loc:@a/x")
    changed = GraphDef.FromString(Twin(graph).serialized)
    constant: NodeDef = make_const("n1", 3, 3)
    changed.node[1].CopyFrom(constant)
    node = Twin(graph).named(changed)[0].node[1]
    assert (node.name, node.op, node.attr[LAYER_ATTR].s) == ("a/y", "Const", b"first")
    assert COLOCATION not in node.attr


def test_a_constant_for_a_further_output_has_what_is_noted_at_its_node() -> None:
    """Messages said "(no layer)"."""
    graph = _graph("a", "first")
    changed = GraphDef.FromString(Twin(graph).serialized)
    changed.node.append(make_const("n1/output1", 3, 3))
    changed.node.append(make_node("n1/other", "Neg", ["n1/output1"]))
    constant, other = list(Twin(graph).named(changed)[0].node)[3:]
    assert (constant.name, constant.attr[LAYER_ATTR].s) == ("a/y/output1", b"first")
    assert LAYER_ATTR not in other.attr
