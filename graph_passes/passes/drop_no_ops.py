"""Removes operators that return their input unchanged, where static shapes prove it."""

from __future__ import annotations

from collections.abc import Mapping

from graph_passes.ir.graph import Graph, GraphDef, NodeDef, Ref, control_inputs, copied, substitute
from graph_passes.ir.tensorflow_bridge import Shape, constant_value

_SHAPING = frozenset({"BroadcastTo", "Reshape"})
_REDUCING = frozenset({"Max", "Mean", "Min", "Prod", "Sum"})


def drop_no_ops(graph: GraphDef, shapes: Mapping[Ref, Shape | None]) -> tuple[GraphDef, dict[Ref, Ref]]:
    """Returns a graph without reshapes to the same shape, and without reductions over no axes.

        x -> Sum(axes=[]) -> Reshape(shape of x) -> y   becomes   x -> y

    Gradients undo broadcasting in this way wherever it may have happened. For graphs with known shapes TensorFlow
    leaves these operators out; XLA fuses differently around them.

    Args:
        graph: a flat graph; it isn't changed.
        shapes: of its tensors, as far as known.

    Returns:
        The graph, and the replacement of each removed tensor.
    """
    view = Graph(graph)
    needed = {name for node in view for name in control_inputs(node)}
    moved: dict[Ref, Ref] = {}
    for name in view.topological():
        node = view.nodes[name]
        if name in needed or control_inputs(node) or node.op not in _SHAPING | _REDUCING:
            continue
        source, operand = view.inputs(name)
        source = moved.get(source, source)
        if node.op in _SHAPING:
            same = _is_known(shapes.get(source)) and shapes.get(source) == shapes.get(Ref(name))
        else:
            same = _is_empty(view.nodes[operand.node])
        if same:
            moved[Ref(name)] = source
    made = copied(graph)
    substitute(made, {ref.node: source for ref, source in moved.items()})
    return made, moved


def _is_known(shape: Shape | None) -> bool:
    return shape is not None and None not in shape


def _is_empty(axes: NodeDef) -> bool:
    return axes.op == "Const" and constant_value(axes).size == 0
