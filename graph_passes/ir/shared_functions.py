"""Functions that differ in names only, such as stages of equal layers have."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

from tensorflow.core.framework import attr_value_pb2

from graph_passes.ir.graph import GraphDef, NodeDef, copied, renamed_in_body
from graph_passes.ir.outline import FunctionDef
from graph_passes.ir.tensorflow_bridge import is_stateful, takes_functions
from graph_passes.ir.tensorflow_private import op_def_registry


class SharedFunctions:
    """The functions of graphs that come one after the other, where the first of equal ones stands for all.

    Equal functions differ in names only, their own and those of their nodes. Only functions without state are shared,
    in what they call, too: a stateful operator belongs to one place of the model. Functions that call each other in
    turn, that nodes call as operators, or that a graph registers a gradient of or as one, are left alone.
    """

    def __init__(self) -> None:
        self._first: dict[str, str] = {}  # function -> the first that is equal, itself perhaps
        self._digests: dict[bytes, str] = {}  # digest of what a first function computes -> its name
        self._stateless: set[str] = set()

    def share(self, graph: GraphDef) -> None:
        """Leaves a graph the functions that are new, and lets its nodes call these and earlier ones.

        Args:
            graph: the graph; a function with a name that has come before is the same one.
        """
        functions = {function.signature.name: function for function in graph.library.function}
        apart = {name for pair in graph.library.gradient for name in (pair.function_name, pair.gradient_func)}
        # Where the function is an operator, nodes read its results by the names that it gives them.
        apart |= {node.op for nodes in (graph.node, *(f.node_def for f in functions.values())) for node in nodes}
        fresh: set[str] = set()
        for name in _callees_first(functions):
            known = self._first.get(name)
            if known == name or (known is not None and name not in apart):
                continue
            function = functions[name]
            self._rename_calls(function.node_def)
            self._first[name] = name
            if not any(map(self._may_have_state, function.node_def)):
                self._stateless.add(name)
                if name not in apart:
                    self._first[name] = self._digests.setdefault(_digest(function), name)
            if self._first[name] == name:
                fresh.add(name)
        self._rename_calls(graph.node)
        library = graph.library.function
        for number in reversed(range(len(library))):
            if library[number].signature.name not in fresh:
                del library[number]

    def _rename_calls(self, nodes: Iterable[NodeDef]) -> None:
        for node in nodes:
            for called in _called(node):
                called.name = self._first.get(called.name, called.name)

    def _may_have_state(self, node: NodeDef) -> bool:
        """Whether a node has state, or runs a function that does; one that hasn't come yet may."""
        if not _is_primitive(node.op) or is_stateful(node.op):
            return True
        return any(called.name not in self._stateless for called in _called(node))


def _called(node: NodeDef) -> Iterator[attr_value_pb2.NameAttrList]:
    """Yields the functions that a node's attributes name, nested ones included."""
    pending = list(node.attr.values()) if not _is_primitive(node.op) or takes_functions(node.op) else []
    while pending:
        value = pending.pop()
        for called in (value.func, *value.list.func):
            if called.name:
                yield called
                pending += called.attr.values()


def _is_primitive(op: str) -> bool:
    return op_def_registry.get(op) is not None


def _callees_first(functions: dict[str, FunctionDef]) -> list[str]:
    """Returns the names of functions, callees first, except in recursion."""
    order: dict[str, None] = {}
    entered: set[str] = set()

    def visit(name: str) -> None:
        if name in functions and name not in entered:
            entered.add(name)
            for node in functions[name].node_def:
                for called in _called(node):
                    visit(called.name)
            order[name] = None

    for name in functions:
        visit(name)
    return list(order)


def _digest(function: FunctionDef) -> bytes:
    """Returns a digest of a function without its name and its nodes' names."""
    twin = copied(function)
    twin.signature.name = ""
    names = {node.name: str(number) for number, node in enumerate(twin.node_def)}  # No argument is called so.
    for node in twin.node_def:
        node.name = names[node.name]
        node.input[:] = [renamed_in_body(text, names) for text in node.input]
        node.ClearField("experimental_debug_info")
    for results in (twin.ret, twin.control_ret):
        for result in list(results):
            results[result] = renamed_in_body(results[result], names)
    return hashlib.sha256(twin.SerializeToString(deterministic=True)).digest()
