"""Which nodes touch which variables, whether they may change them, and what order of calls has to stay for that."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tensorflow as tf
from programs import FLOAT, HOST, node

from graph_passes.errors import PassError
from graph_passes.ir.call_order import CallOrder, Touch
from graph_passes.ir.graph import Builder, Graph, GraphDef, Ref, dtype_attr, function_attr, make_node
from graph_passes.ir.outline import FunctionDef, call_node, outline, placeholder
from graph_passes.ir.resource_use import ResourceUse, Use, called_functions
from graph_passes.ir.storage import assign, merge_library, read
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


class Calls:
    """A top level whose calls read or write the variable ``v``, or nothing."""

    def __init__(self) -> None:
        self.builder = Builder(empty_graph())

    def add(
        self, name: str, kind: str, given: Sequence[str] = (), after: Sequence[str] = (), device: str = HOST
    ) -> Calls:
        """A call that gives the sum of what it is given and, for ``read``, the variable; ``write`` sets it to that."""
        body = Builder(empty_graph())
        arguments = [body.append(placeholder(body.names.fresh("given"), FLOAT)) for _ in given]
        parts = [*arguments, body.const(1.0, FLOAT), *([read(body, "v", FLOAT, ())] if "read" in kind else [])]
        total = body.add("sum", "AddN", parts, T=dtype_attr(FLOAT), N=len(parts))
        effects = [assign(body, "v", total, FLOAT, ())] if "write" in kind else []
        function = outline(f"{name}_function", Graph(body.graph), arguments, [total], effects=effects)
        merge_library(self.builder.graph, [function])
        self.builder.append(call_node(name, function, [Ref(each) for each in given], device=device, control=after))
        return self

    @property
    def order(self) -> CallOrder:
        """Their order."""
        return CallOrder(Graph(self.builder.graph))

    @property
    def touches(self) -> dict[tuple[str, str], list[Touch]]:
        """What they do."""
        functions = {function.signature.name: function for function in self.builder.graph.library.function}
        return self.order.touches(ResourceUse(functions))

    @property
    def kept(self) -> set[tuple[str, str]]:
        """The pairs of nodes of ``v`` that stay in order, as ``call.read`` and ``call.assign``."""
        return {
            (f"{one.call}.{first.split('/')[0]}", f"{other.call}.{second.split('/')[0]}")
            for touches in self.touches.values()
            for one, before, other, after in self.order.conflicts(touches)
            for first in before
            for second in after
        }


def test_calls_are_ordered_by_what_they_read_and_wait_for() -> None:
    calls = Calls().add("a", "none").add("b", "none", ["a"]).add("c", "none", [], ["b"]).add("d", "none")
    order = calls.order
    pairs = [(one, other) for one in "abcd" for other in "abcd" if order.is_before(one, other)]
    assert pairs == [("a", "b"), ("a", "c"), ("b", "c")]
    assert order.up_to(["b"]) == ["b", "a"]
    assert set(order.up_to(["c", "d"])) == set("abcd")


def test_a_cycle_is_shown() -> None:
    with pytest.raises(PassError, match="cycle"):
        _ = Calls().add("a", "none", [], ["b"]).add("b", "none", ["a"]).order


def test_uses_are_told_by_device_and_variable() -> None:
    other = HOST[:-1] + "1"
    calls = Calls().add("a", "read").add("b", "read write", ["a"]).add("c", "read", device=other)
    assert calls.touches == {
        (HOST, "v"): [Touch("a", ("read/v",), ()), Touch("b", ("read/v",), ("assign/v",))],
        (other, "v"): [Touch("c", ("read/v",), ())],
    }
    assert calls.touches[HOST, "v"][1].nodes == ("read/v", "assign/v")


def test_writes_wait_for_reads_and_reads_for_writes() -> None:
    calls = Calls().add("a", "read").add("b", "read", ["a"]).add("c", "write", ["b"]).add("d", "read", [], ["c"])
    assert calls.kept == {("a.read", "c.assign"), ("b.read", "c.assign"), ("c.assign", "d.read")}


def test_what_others_imply_is_left_out() -> None:
    calls = Calls().add("a", "read").add("b", "write", ["a"]).add("c", "write", ["b"]).add("d", "read", ["c"])
    assert calls.kept == {("a.read", "b.assign"), ("b.assign", "c.assign"), ("c.assign", "d.read")}


def test_a_call_that_reads_and_writes_comes_after_and_before() -> None:
    calls = Calls().add("a", "write").add("b", "read write", ["a"]).add("c", "read", ["b"])
    assert calls.kept == {("a.assign", "b.read"), ("a.assign", "b.assign"), ("b.assign", "c.read")}
