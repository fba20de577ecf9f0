"""Sums over the replicas that work on one micro-batch: of a layer's moments, say, and of their gradients.

They are collective operations inside stage functions. The replicas to add up (`Peers`) are arguments, so that one
function serves all replicas and micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable

from graph_passes.ir.graph import (
    OWN_ATTRS,
    Graph,
    GraphDef,
    NodeDef,
    Ref,
    control_inputs,
    copied,
    data_inputs,
    set_inputs,
)
from graph_passes.ir.outline import FunctionDef

SUM_OP = "CollectiveReduceV2"


def sums_of(nodes: Iterable[NodeDef]) -> list[NodeDef]:
    """Returns the sums over replicas among nodes, in their order."""
    return [node for node in nodes if node.op == SUM_OP]


def without_sums(graph: GraphDef) -> GraphDef:
    """Returns the graph of a replica alone, whose sums are its own values.

    x -> CollectiveReduceV2 -> y   becomes   x -> Identity -> y
    """
    if not sums_of(graph.node):
        return graph
    alone = copied(graph)
    for node in sums_of(alone.node):
        node.op = "Identity"
        set_inputs(node, data_inputs(node)[:1], control_inputs(node))
        for key in [key for key in node.attr if key != "T" and not key.startswith(OWN_ATTRS)]:
            del node.attr[key]
    return alone


def key_nodes(graph: Graph, peers: Container[Ref]) -> set[str]:
    """Returns the nodes that compute keys of sums: from ``peers``, the stage's arguments, and constants alone."""
    keys: set[str] = set()
    for node in graph:
        producers = [ref for ref in graph.inputs(node.name) if graph.nodes[ref.node].op != "Const"]
        if producers and all(ref in peers or ref.node in keys for ref in producers):
            keys.add(node.name)
    return keys


def order_sums(function: FunctionDef) -> None:
    """Makes each sum of a function wait for the previous one, in place, so that all replicas run them in one order."""
    for before, after in itertools.pairwise(sums_of(function.node_def)):
        if before.name not in control_inputs(after):
            after.input.append(f"^{before.name}")
