"""Keeps TensorFlow from fusing operators whose order and devices have been decided one by one."""

from __future__ import annotations

from graph_passes.ir.graph import Graph, GraphDef, Names, NodeDef, control_inputs, data_inputs, make_node

_READERS = frozenset({"BiasAdd", "BiasAddGrad"})
_PADDED = frozenset({"Conv2D", "DepthwiseConv2dNative"})


def unfused(graph: GraphDef) -> GraphDef:
    """Returns a graph in which fusible nodes read through an Identity, which also takes their control edges.

        Conv2D -> BiasAdd (^x)   becomes   Conv2D -> Identity (^x) -> BiasAdd

    TensorFlow's layout pass for oneDNN (mkl_layout_pass.cc) merges a convolution with its BiasAdd, a Pad with its
    convolution, and the gradients of a filter and of a bias. It takes two of them with the same control edges for
    mergeable, and then aborts the process because there are control edges. Merged, they wouldn't run in the order of
    the queue either.
    """
    view = Graph(graph)
    names = Names(view.nodes)
    rewritten = GraphDef(versions=graph.versions, library=graph.library)
    for node in graph.node:
        own = rewritten.node.add()
        own.CopyFrom(node)
        if node.op in _READERS or (node.op in _PADDED and view.nodes[view.inputs(node.name)[0].node].op == "Pad"):
            rewritten.node.append(_apart(own, names))
    return rewritten


def _apart(node: NodeDef, names: Names) -> NodeDef:
    """Inserts an Identity before a node, which is changed."""
    waits = control_inputs(node)
    first, *others = data_inputs(node)
    kind = {"T": node.attr["T"]}
    identity = make_node(
        names.fresh(f"{node.name}/unfused"), "Identity", [first], device=node.device, control=waits, attrs=kind
    )
    del node.input[:]
    node.input.extend([identity.name, *map(str, others)])
    return identity
