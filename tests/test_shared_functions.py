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


def affine(name: str, factor: float = 2.0, op: str = "AddV2", *, backwards: bool = False) -> FunctionDef:
    """``factor * x`` and another operator on x and that product, with nodes called after the function."""
    body = GraphDef()
    builder = Builder(body)
    x = builder.append(make_node(f"{name}/x", "Placeholder", attrs={"dtype": FLOAT}))
    scale = builder.append(make_const(f"{name}/factor", factor, types_pb2.DT_FLOAT))
    product = builder.add(f"{name}/product", "Mul", [x, scale], T=FLOAT)
    result = builder.add(f"{name}/result", op, [product, x] if backwards else [x, product], T=FLOAT)
    return outline(name, Graph(body), [x], [result])


def nested(name: str, inner: FunctionDef) -> FunctionDef:
    """A function that calls another."""
    body = GraphDef()
    builder = Builder(body)
    x = builder.append(make_node(f"{name}/x", "Placeholder", attrs={"dtype": FLOAT}))
    result = builder.append(call_node(f"{name}/call", inner, [x], device=""))
    return outline(name, Graph(body), [x], [result])


def waiting(function: FunctionDef) -> FunctionDef:
    """The function, whose last node waits for its first."""
    function.node_def[-1].input.append(f"^{function.node_def[0].name}")
    return function


def also(function: FunctionDef, op: str, *inputs: str, calls: Sequence[str] = ()) -> FunctionDef:
    """The function with one more node, which may have other functions as branches."""
    node = function.node_def.add(name=f"{function.signature.name}/more", op=op, input=inputs)
    for name in calls:
        node.attr["branches"].list.func.add(name=name)
    return function


def of_functions(*functions: FunctionDef, calls: Sequence[int] = ()) -> GraphDef:
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


def told(graph: GraphDef) -> tuple[str, str]:
    """The names of a graph's functions, and of those that it calls."""
    names = [function.signature.name for function in graph.library.function]
    return " ".join(names), " ".join(node.attr["f"].func.name for node in graph.node if "f" in node.attr)


def results(graph: GraphDef) -> list[float]:
    with tf.Graph().as_default() as scope, tf.compat.v1.Session(graph=scope) as session:
        tf.graph_util.import_graph_def(graph, name="")
        calls = [f"{node.name}:0" for node in graph.node if "f" in node.attr]
        return [float(value) for value in session.run(calls, {"x:0": np.float32(3.0)})]


INNER = [affine("in0"), affine("in1"), affine("in2", 5.0)]
OUTER = [nested(f"out{number}", function) for number, function in enumerate(INNER)]


@pytest.mark.parametrize(
    ("graph", "kept", "called"),
    [
        # Stages of equal layers had functions of their own, which TensorFlow copied and searched 32 times.
        pytest.param(of_functions(*map(affine, "abc")), "a", "a a a", id="equal"),
        pytest.param(of_functions(affine("a"), affine("b", 3.0)), "a b", "a b", id="another constant"),
        pytest.param(
            of_functions(affine("a", op="Sub"), affine("b", op="Sub", backwards=True)), *("a b", "a b"), id="inputs"
        ),
        pytest.param(
            of_functions(waiting(affine("a")), waiting(affine("b")), affine("c")), *("a c", "a a c"), id="what waits"
        ),
        pytest.param(
            of_functions(*INNER, *OUTER, calls=range(3, 6)),
            *("in0 in2 out0 out2", "out0 out0 out2"),
            id="callees first",
        ),
        pytest.param(
            of_functions(*OUTER, *INNER, calls=range(3)), *("out0 out2 in0 in2", "out0 out0 out2"), id="callers first"
        ),
    ],
)
def test_equal_functions_are_there_once(graph: GraphDef, kept: str, called: str) -> None:
    assert told(shared(graph)) == (kept, called)
    assert results(shared(graph)) == results(graph)


def test_functions_with_state_stay() -> None:
    """Two layers draw numbers of their own, even where both have the same seed.

    So do those that call one by an operator without: TensorFlow says that of branches, whatever is in them.
    """
    for op in ("RandomUniform", "EagerPyFunc"):
        drawn = [also(affine(name), op, f"^{name}/product") for name in "ab"]
        assert told(shared(of_functions(*drawn))) == ("a b", "a b")
    branching = [also(affine(name), "StatelessCase", calls=["a"]) for name in "cd"]
    assert told(shared(of_functions(drawn[0], *branching))) == ("a c d", "a c d")


def test_later_graphs_call_earlier_ones_functions() -> None:
    functions = SharedFunctions()
    first = shared(of_functions(affine("one")), functions)
    later = shared(of_functions(affine("other"), affine("new", 4.0), affine("one")), functions)
    assert (told(first), told(later)) == (("one", "one"), ("new", "one new one"))


def test_functions_that_nodes_know_by_name_stay() -> None:
    """Of an operator of a function's name others read ``node:result``, by the function's own word for its result."""
    user = also(affine("user"), "operator", "user/product:z:0")
    graph = of_functions(*map(affine, ("plain", "first", "operator", "own_gradient")), user, calls=[0, 1])
    graph.library.gradient.add(function_name="first", gradient_func="own_gradient")
    result = shared(graph)
    assert told(result) == ("plain first operator own_gradient user", "plain first")
    assert [(pair.function_name, pair.gradient_func) for pair in result.library.gradient] == [("first", "own_gradient")]


def test_a_function_that_was_left_out_comes_back_where_it_is_known_by_name() -> None:
    """As an operator of a later graph, it was missing."""
    functions, user = SharedFunctions(), also(affine("user"), "other", "user/product:z:0")
    assert told(shared(of_functions(affine("one"), affine("other")), functions)) == ("one", "one one")
    assert told(shared(of_functions(affine("other"), user, calls=[1]), functions))[0] == "other user"
    assert told(shared(of_functions(affine("other"), affine("third")), functions)) == ("", "other one")


def test_functions_that_calls_are_given_and_branches_are_renamed_too() -> None:
    graph = of_functions(affine("one"), affine("other"), affine("third", 7.0))
    graph.node[-1].attr["f"].func.attr["given"].func.name = "other"
    case = graph.node.add(name="case", op="StatelessCase")
    for name in ("one", "other"):
        case.attr["branches"].list.func.add(name=name)
    result = shared(graph)
    assert told(result)[0] == "one third"
    assert result.node[-2].attr["f"].func.attr["given"].func.name == "one"
    assert [f.name for f in result.node[-1].attr["branches"].list.func] == ["one", "one"]


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
