"""Graphs as they are written for readers that know less of functions than TensorFlow does."""

from __future__ import annotations

from graph_passes.ir.graph import GraphDef, Names, copied, dtype_attr
from graph_passes.ir.outline import FunctionDef


def readable(graph: GraphDef) -> GraphDef:
    """The graph with functions none of whose nodes gives results of several dtypes; itself if it is like that.

        f() = while:output:0 (int32), while:output:1 (float32)   becomes   f() = while/result, while/result_1

    Netron takes all results of one node for one tensor, and refuses a tensor of two dtypes. What is computed is the
    same.
    """
    names = [function.signature.name for function in graph.library.function if _mixed(function)]
    if not names:
        return graph
    changed = copied(graph)
    for function in changed.library.function:
        if mixed := _mixed(function):
            _separate(function, mixed)
    return changed


def _mixed(function: FunctionDef) -> set[str]:
    """The nodes that give the function results of several dtypes."""
    dtypes: dict[str, set[int]] = {}
    for arg in function.signature.output_arg:
        node, _, _ = function.ret[arg.name].partition(":")  # as function bodies spell outputs
        dtypes.setdefault(node, set()).add(arg.type)
    return {node for node, found in dtypes.items() if len(found) > 1}


def _separate(function: FunctionDef, mixed: set[str]) -> None:
    """Gives each result of these nodes a node of its own, which hands it on."""
    fresh = Names(node.name for node in function.node_def)
    for arg in function.signature.output_arg:
        source = function.ret[arg.name]
        node, _, _ = source.partition(":")
        if node in mixed:
            own = function.node_def.add(name=fresh.fresh(f"{node}/result"), op="Identity", input=[source])
            own.attr["T"].CopyFrom(dtype_attr(arg.type))
            function.ret[arg.name] = f"{own.name}:output:0"
