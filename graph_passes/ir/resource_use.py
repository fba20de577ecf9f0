"""Which nodes touch which resources (variables, tables), and whether they may change them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tensorflow.core.framework import types_pb2

from graph_passes.ir.graph import NodeDef, function_names
from graph_passes.ir.outline import FunctionDef
from graph_passes.ir.tensorflow_bridge import FunctionDefLibrary, makes_resource, output_dtypes, takes_functions

READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape", "VarIsInitializedOp"})
"""Ops that don't change the resources whose handles they take."""
_PASSES_ON = frozenset({"Identity", "IdentityN"})
# Op -> the data input that is the first argument of its functions.
_FIRST_ARGUMENT = {
    "While": 0,
    "StatelessWhile": 0,
    "PartitionedCall": 0,
    "StatefulPartitionedCall": 0,
    "If": 1,
    "StatelessIf": 1,
    "Case": 1,
    "StatelessCase": 1,
}


class Use(NamedTuple):
    """One node's use of one resource.

    Attributes:
        node: the node.
        resource: name of the resource on its device: of a variable, its ``shared_name``.
        written: whether the node may change it.
    """

    node: str
    resource: str
    written: bool


class ResourceUse:
    """Finds nodes' uses of resources; results for library functions are cached.

    Args:
        functions: the library, by name.
    """

    def __init__(self, functions: Mapping[str, FunctionDef]) -> None:
        self._functions = functions
        self._of_functions: dict[str, tuple[Use, ...]] = {}
        self._written: dict[str, frozenset[str]] = {}

    def of_function(self, name: str) -> tuple[Use, ...]:
        """Returns the uses by handles that are made inside a library function, each once."""
        if name not in self._of_functions:
            self._of_functions[name] = ()  # of a function that calls itself
            self._of_functions[name] = tuple(self.of_nodes(self._functions[name].node_def))
        return self._of_functions[name]

    def of_nodes(self, nodes: Iterable[NodeDef], handles: Mapping[str, str] | None = None) -> list[Use]:
        """Returns the uses of one graph's or function body's nodes, in their order, without the handles themselves.

        Args:
            nodes: the nodes.
            handles: name of a node or argument -> the resource that it stands for, besides those of the nodes.
        """
        nodes = list(nodes)
        uses: dict[Use, None] = {}
        made = {node.name: {resource_name(node)} for node in nodes if self._primitive(node) and makes_resource(node.op)}
        tracked: dict[str, set[str]] = made | {name: {resource} for name, resource in (handles or {}).items()}
        grown = True
        while grown:  # repeats only if handles are passed to earlier nodes
            grown = False
            for node in nodes:
                given = [(at, name) for at, name in enumerate(_producers(node)) if name in tracked]
                for at, name in given:
                    for resource in sorted(tracked[name]):
                        if node.op not in _PASSES_ON:
                            uses.setdefault(Use(node.name, resource, self._writes(node, at)))
                        if self._hands_on(node) and resource not in tracked.setdefault(node.name, set()):
                            tracked[node.name].add(resource)
                            grown = True
        for node in nodes:
            for function in called_functions(node, self._functions):
                for use in self.of_function(function):
                    uses.setdefault(Use(node.name, use.resource, use.written))
        place = {node.name: number for number, node in enumerate(nodes)}
        return sorted(uses, key=lambda use: place[use.node])

    def _primitive(self, node: NodeDef) -> bool:
        return node.op not in self._functions

    def _hands_on(self, node: NodeDef) -> bool:
        if not self._primitive(node):
            return any(arg.type == types_pb2.DT_RESOURCE for arg in self._functions[node.op].signature.output_arg)
        return types_pb2.DT_RESOURCE in output_dtypes(node)

    def _writes(self, node: NodeDef, at: int) -> bool:
        """Returns whether a node may change the resource that is its data input number ``at``."""
        if node.op in READS:
            return False
        called = called_functions(node, self._functions)
        first = 0 if not self._primitive(node) else _FIRST_ARGUMENT.get(node.op)
        if first is None or not called:
            return True
        return any(self._changes_argument(function, at - first) for function in called)

    def _changes_argument(self, name: str, number: int) -> bool:
        function = self._functions[name]
        argument = function.signature.input_arg[number].name
        if name not in self._written:
            arguments = [arg.name for arg in function.signature.input_arg if arg.type == types_pb2.DT_RESOURCE]
            self._written[name] = frozenset(arguments)  # of a function that calls itself
            # A resource of the body can't be named like this.
            uses = self.of_nodes(function.node_def, {text: f":{text}" for text in arguments})
            self._written[name] = frozenset(use.resource.removeprefix(":") for use in uses if use.written)
        return argument in self._written[name]


def called_functions(node: NodeDef, functions: Mapping[str, FunctionDef]) -> list[str]:
    """Returns the library functions that a node runs, in the same order for nodes with the same attributes."""
    if node.op in functions:
        return [node.op]
    if not takes_functions(node.op):
        return []
    return [name for name in function_names(node) if name in functions]


def library_of(nodes: Iterable[NodeDef], library: FunctionDefLibrary) -> FunctionDefLibrary:
    """Returns the part of a library that nodes run, with the gradients of its functions."""
    functions = {function.signature.name: function for function in library.function}
    gradients = {gradient.function_name: gradient.gradient_func for gradient in library.gradient}
    used: set[str] = set()
    pending = [name for node in nodes for name in called_functions(node, functions)]
    while pending:
        name = pending.pop()
        if name in functions and name not in used:
            used.add(name)
            pending += [called for node in functions[name].node_def for called in called_functions(node, functions)]
            pending += [gradients[name]] if name in gradients else []
    return FunctionDefLibrary(
        function=[function for function in library.function if function.signature.name in used],
        gradient=[gradient for gradient in library.gradient if gradient.function_name in used],
    )


def resource_name(node: NodeDef) -> str:
    """Returns the name, on its device, of the resource whose handle a node makes."""
    for key in ("shared_name", "table_name"):
        if key in node.attr and node.attr[key].s:
            return node.attr[key].s.decode()
    return node.name


def _producers(node: NodeDef) -> list[str]:
    """Returns the nodes or arguments that a node reads, in a graph or in a function's body."""
    return [text.partition(":")[0] for text in node.input if not text.startswith("^")]
