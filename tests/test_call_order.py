"""The order of calls, and what has to stay of it for the variables that they touch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from programs import FLOAT, HOST

from graph_passes.errors import PassError
from graph_passes.ir.call_order import CallOrder, Touch
from graph_passes.ir.graph import Builder, Graph, Ref, dtype_attr
from graph_passes.ir.outline import call_node, outline, placeholder
from graph_passes.ir.resource_use import ResourceUse
from graph_passes.ir.storage import assign, merge_library, read
from graph_passes.ir.tensorflow_bridge import empty_graph


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


def test_other_nodes_hand_the_order_on() -> None:
    calls = Calls().add("a", "none")
    barrier = calls.builder.add("barrier", "NoOp", control=["a"]).node
    assert calls.add("b", "none", [], [barrier]).order.is_before("a", "b")


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


def test_readers_dont_wait_for_each_other() -> None:
    assert not Calls().add("a", "read").add("b", "read", ["a"]).kept


def test_writes_wait_for_reads_and_reads_for_writes() -> None:
    calls = Calls().add("a", "read").add("b", "read", ["a"]).add("c", "write", ["b"]).add("d", "read", [], ["c"])
    assert calls.kept == {("a.read", "c.assign"), ("b.read", "c.assign"), ("c.assign", "d.read")}


def test_what_others_imply_is_left_out() -> None:
    calls = Calls().add("a", "read").add("b", "write", ["a"]).add("c", "write", ["b"]).add("d", "read", ["c"])
    assert calls.kept == {("a.read", "b.assign"), ("b.assign", "c.assign"), ("c.assign", "d.read")}


def test_a_call_that_reads_and_writes_comes_after_and_before() -> None:
    calls = Calls().add("a", "write").add("b", "read write", ["a"]).add("c", "read", ["b"])
    assert calls.kept == {("a.assign", "b.read"), ("a.assign", "b.assign"), ("b.assign", "c.read")}


def test_what_calls_dont_order_stays_unordered() -> None:
    assert not Calls().add("a", "read").add("b", "write").kept
