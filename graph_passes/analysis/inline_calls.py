"""Replaces a flat graph's calls by their bodies, for analyses of operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph_passes.ir.call_order import CALLS
from graph_passes.ir.graph import Graph, GraphDef, NodeDef, Ref
from graph_passes.ir.tensorflow_bridge import function_graph


def inline_calls(graph: GraphDef) -> tuple[GraphDef, Mapping[Ref, Ref]]:
    """Returns a graph without calls, also within the functions that they call; loops and branches stay.

        y = f(x), f(a) = { b, c }   becomes   y/b(x) -> y/c

    Args:
        graph: a flat graph, producers first; it isn't changed.

    Returns:
        The graph, and the tensors that replace calls' results.
    """
    if not any(node.op in CALLS for node in graph.node):
        return graph, {}
    inlining = _Inlining(graph)
    view = Graph(graph)
    for node in graph.node:
        inlining.place(node, node.name, [inlining.now(ref) for ref in view.inputs(node.name)])
    return inlining.graph, inlining.moved


class _Inlining:
    """A graph while calls are being inlined."""

    def __init__(self, graph: GraphDef) -> None:
        self._library = graph.library
        self.graph = GraphDef(versions=graph.versions, library=graph.library)
        self.moved: dict[Ref, Ref] = {}

    def now(self, ref: Ref) -> Ref:
        """Returns the tensor that replaces a tensor."""
        return self.moved.get(ref, ref)

    def place(self, node: NodeDef, name: str, inputs: Sequence[Ref]) -> None:
        """Adds a node under a name, or the body that it calls."""
        if node.op not in CALLS:
            own = self.graph.node.add()
            own.CopyFrom(node)
            own.name = name
            del own.input[:]
            own.input.extend(str(ref) for ref in inputs)
            return
        body, results = function_graph(self._library, node.attr["f"].func.name)
        view = Graph(body)
        arguments = list(view.nodes)[: len(inputs)]
        for argument, given in zip(arguments, inputs, strict=True):
            self.moved[Ref(f"{name}/{argument}")] = given
        for inner in view.topological():
            if inner not in arguments:
                read = [self.now(Ref(f"{name}/{ref.node}", ref.output)) for ref in view.inputs(inner)]
                self.place(view.nodes[inner], f"{name}/{inner}", read)
        for output, ref in enumerate(results):
            self.moved[Ref(name, output)] = self.now(Ref(f"{name}/{ref.node}", ref.output))
