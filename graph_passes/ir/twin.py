"""Graphs that differ in names only."""

from __future__ import annotations

import re
from collections.abc import Callable

from graph_passes.ir.graph import COLOCATION, OWN_ATTRS, GraphDef, Names, NodeDef, Ref, copied, renamed_input

KINDS_OF_STAGES = 8
"""Number of kinds of stages that a pass remembers; equal layers have few."""
_DERIVED = re.compile(r"(?<![^/])n(\d+)(?=_|/|$)")
"""Names of new nodes begin with that of an old one: n3_grad is TensorFlow's for the gradient of node n3."""


class Twin:
    """A graph with nodes n0, n1, ... in place of another's: that of equal layers, say, is the same.

    What is done to it can be taken over for all graphs whose twin it is.

    Attributes:
        serialized: the twin, without what passes note at nodes.

    Args:
        graph: the graph; it isn't changed.
    """

    def __init__(self, graph: GraphDef) -> None:
        self._graph = graph
        self._names = {node.name: f"n{number}" for number, node in enumerate(graph.node)}
        twin = copied(graph)
        for node in twin.node:
            _rename(node, self._names)
            for attr in _noted(node):
                del node.attr[attr]
        self.serialized: bytes = twin.SerializeToString(deterministic=True)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def of(self, ref: Ref) -> Ref:
        """Returns the twin's counterpart of a tensor."""
        return Ref(self._names[ref.node], ref.output)

    def name(self, name: str) -> str:
        """Returns the name of a node's counterpart."""
        return self._names[name]

    def named(self, changed: GraphDef) -> tuple[GraphDef, Callable[[Ref], Ref]]:
        """Gives a graph that the twin was turned into this graph's names.

        Args:
            changed: the twin with new nodes, or without some; it isn't changed.

        Returns:
            The graph, and tensor of ``changed`` -> tensor of that graph.
        """
        names = [node.name for node in self._graph.node]
        own = {name: node for node, name in zip(self._graph.node, self._names.values(), strict=True)}
        renaming = {label: name for name, label in self._names.items()}
        taken = Names(names)
        graph = copied(changed)
        for node in graph.node:
            if node.name not in renaming:
                renaming[node.name] = taken.fresh(_DERIVED.sub(lambda match: names[int(match[1])], node.name))
        for node in graph.node:
            original = own.get(node.name)
            if original is None:
                node.attr.pop(COLOCATION, None)
                # A further output that has become a constant, see `fold_shapes`.
                original = own.get(node.name.partition("/")[0]) if node.op == "Const" else None
            _rename(node, renaming)
            if original is None:
                continue
            for attr, value in original.attr.items():
                # Importing drops some, too.
                if attr not in node.attr and (attr.startswith(OWN_ATTRS) or node.op == original.op):
                    node.attr[attr].CopyFrom(value)
        return graph, lambda ref: Ref(renaming[ref.node], ref.output)


def _noted(node: NodeDef) -> list[str]:
    """Returns the attributes of a node that don't change its results."""
    return [attr for attr in node.attr if attr.startswith(OWN_ATTRS) or attr == COLOCATION]


def _rename(node: NodeDef, names: dict[str, str]) -> None:
    """Renames a node, and the nodes that it reads."""
    node.name = names[node.name]
    node.input[:] = [renamed_input(text, names) for text in node.input]
