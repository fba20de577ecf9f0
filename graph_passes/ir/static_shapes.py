"""Static shapes of a flat graph's tensors, under assumptions on its placeholders."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

from tensorflow.core.framework import types_pb2

from graph_passes.errors import PassError
from graph_passes.ir.graph import (
    GraphDef,
    NodeDef,
    Ref,
    copied,
    layer_or_node,
    make_const,
    renamed_input,
    shape_attr,
)
from graph_passes.ir.tensorflow_bridge import Shape
from graph_passes.ir.tensorflow_private import shapes_of_outputs


def infer_shapes(
    graph: GraphDef, placeholders: Mapping[str, Sequence[int | None]], values: Mapping[Ref, int]
) -> dict[Ref, Shape | None]:
    """Returns the static shape of every tensor, as `ShapesOf.under`."""
    return ShapesOf(graph).under(placeholders, values)


class ShapesOf:
    """Infers the shapes of a flat graph's tensors, under as many assumptions as one likes.

    Args:
        graph: the graph.
    """

    def __init__(self, graph: GraphDef) -> None:
        self._graph = graph
        self._number = {node.name: number for number, node in enumerate(graph.node)}

    @functools.cached_property
    def _anonymous(self) -> GraphDef:
        """The graph with nodes n0, n1, ... and without what shapes don't depend on."""
        names = {name: f"n{number}" for name, number in self._number.items()}
        anonymous = GraphDef(versions=self._graph.versions, library=self._graph.library)
        for original in self._graph.node:
            node = anonymous.node.add(name=names[original.name], op=original.op)
            attrs = node.attr
            for attr, value in original.attr.items():
                if not attr.startswith("_"):  # names, places and the like
                    attrs[attr].CopyFrom(value)
            node.input.extend(renamed_input(text, names) for text in original.input)
        return anonymous

    def node(self, name: str) -> NodeDef:
        """Returns a node of the graph."""
        return self._graph.node[self._number[name]]

    def under(
        self, placeholders: Mapping[str, Sequence[int | None]], values: Mapping[Ref, int]
    ) -> dict[Ref, Shape | None]:
        """Returns the static shape of every tensor; None is an unknown rank.

        Args:
            placeholders: shapes to assume for placeholders.
            values: values to assume for scalar int32 placeholders.

        Raises:
            PassError: the shapes contradict each other though they didn't when less was known; the text names the
                layer.
        """
        constants = {ref.node: value for ref, value in values.items()}
        assumed = [name for name in {**placeholders, **constants} if name in self._number]
        changed = {name: self._anonymous.node[self._number[name]] for name in assumed}
        originals = {name: copied(node) for name, node in changed.items()}
        for name, node in changed.items():
            if name in constants:
                node.CopyFrom(make_const(node.name, constants[name], types_pb2.DT_INT32))
            else:
                node.attr["shape"].CopyFrom(shape_attr(placeholders[name]))
        try:
            shapes = _shapes_of_outputs(self._anonymous.SerializeToString(deterministic=True))
        except ValueError as error:
            raise PassError(_contradiction(self._graph, str(error))) from error
        finally:
            for name, node in changed.items():
                node.CopyFrom(originals[name])
        return {
            Ref(node.name, index): shape
            for number, node in enumerate(self._graph.node)
            for index, shape in enumerate(shapes[f"n{number}"])
        }


def _contradiction(graph: GraphDef, text: str) -> str:
    """Returns which layer can't be computed from which shapes, from TensorFlow's error for the numbered graph."""
    said = re.fullmatch(
        r"(.*?) for '\{\{node n(\d+)\}\}.*? with input shapes: (.*?)\.?", text.partition(" and with ")[0], re.S
    )
    if said is None:
        return f"the shapes of the model's tensors contradict each other: {text}"
    node = graph.node[int(said[2])]
    return f"{layer_or_node(node)} can't compute {node.op} of tensors of shapes {said[3]}: {said[1]}"


_shapes_of_outputs = functools.lru_cache(maxsize=8)(shapes_of_outputs)
"""Stages of equal layers have equal graphs, apart from names."""
