"""Turns values that follow from shapes alone into constants, so that they don't tie operators to each other."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.analysis.operator_traits import ASKING, asked
from graph_passes.errors import PassError
from graph_passes.ir.graph import (
    Graph,
    GraphDef,
    Names,
    NodeDef,
    Ref,
    control_inputs,
    layer_or_node,
    make_node,
    own_attrs,
)
from graph_passes.ir.tensorflow_bridge import (
    EvaluationError,
    Shape,
    constant_value,
    evaluate,
    is_stateful,
    make_constant,
    output_dtypes,
    takes_functions,
)

_SHAPES = ASKING | {"ShapeN"}
_LARGEST = 1024
"""The most elements of a tensor that may become a constant: shapes, axes and counts are small."""
_NUMBERS = frozenset(
    {types_pb2.DT_BOOL, types_pb2.DT_INT32, types_pb2.DT_INT64, types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE}
)


class Folded(NamedTuple):
    """A graph in which values that follow from shapes are constants.

    Attributes:
        graph: the graph.
        shapes: the given ones, and those of new constants. Inferring them again may yield more, such as a sum's shape
            now that its axes are known.
        moved: tensor -> the constant that has replaced it.
    """

    graph: GraphDef
    shapes: dict[Ref, Shape | None]
    moved: dict[Ref, Ref]


def fold_shapes(
    graph: GraphDef,
    shapes: Mapping[Ref, Shape | None],
    kept: Collection[str] = (),
    results: Collection[Ref] = (),
) -> Folded:
    """Returns a graph with constants for values that follow from known shapes; see `FoldShapes`.

    Constants have the names of the nodes that they replace; further outputs ``<node>/output<k>``. They wait for
    nothing. Nodes that only served to compute them are removed.

    Args:
        graph: a flat graph; it isn't changed.
        shapes: of its tensors.
        kept: nodes that stay, under their names, even where nothing reads them.
        results: tensors that stay, or that constants replace, even where nothing reads them.
    """
    return _Folding(graph, shapes).result(kept, results)


class _Folding:
    """A graph while it is being folded."""

    def __init__(self, graph: GraphDef, shapes: Mapping[Ref, Shape | None]) -> None:
        self.view = Graph(graph)
        self.shapes = shapes
        self.outputs = {name: output_dtypes(node) for name, node in self.view.nodes.items()}
        self.constant: set[str] = set()
        self.folded: list[str] = []  # producers first
        for name in self.view.topological():
            node = self.view.nodes[name]
            if node.op == "Const":
                self.constant.add(name)
            elif self._follows(node):
                self.constant.add(name)
                self.folded.append(name)

    def result(self, kept: Collection[str], results: Collection[Ref]) -> Folded:
        """Returns the folded graph."""
        read = {ref for name in self.view.nodes if name not in self.constant for ref in self.view.inputs(name)}
        read.update(results)
        named = {name for node in self.view for name in control_inputs(node)} | set(kept)
        wanted = [
            ref
            for name in self.folded
            for ref in self._refs(name)
            if ref in read or (name in named and ref.output == 0)
        ]
        shapes, names = dict(self.shapes), Names(self.view.nodes)
        made: dict[str, list[NodeDef]] = {}
        moved: dict[Ref, Ref] = {}
        for ref, value in self._values(wanted).items():
            name = ref.node if ref.output == 0 else names.fresh(f"{ref.node}/output{ref.output}")
            made.setdefault(ref.node, []).append(self._constant(name, self.view.nodes[ref.node], value))
            moved[ref] = Ref(name)
            shapes[Ref(name)] = tuple(value.shape)
        needed = {ref.node for ref in read} | named
        gone = {name for name in self.constant if name not in made and name not in needed}
        graph = GraphDef(versions=self.view.graph.versions, library=self.view.graph.library)
        for name, node in self.view.nodes.items():
            if name in made:
                graph.node.extend(made[name])
            elif name not in gone:
                own = graph.node.add()
                own.CopyFrom(node)
                for index, text in enumerate(node.input):
                    if not text.startswith("^"):
                        own.input[index] = str(moved.get(Ref.parse(text), text))
        return Folded(graph, shapes, moved)

    def _follows(self, node: NodeDef) -> bool:
        """Returns whether a node reads a known shape, or computes a small value from known ones."""
        inputs, refs = self.view.inputs(node.name), self._refs(node.name)
        if not inputs or not refs or not _NUMBERS.issuperset(self.outputs[node.name]):
            return False
        if node.op in _SHAPES:
            return all(self._size(ref) is not None for ref in inputs)
        if not all(ref.node in self.constant for ref in inputs) or takes_functions(node.op) or is_stateful(node.op):
            return False
        # Only lists of axes have no known length here (those of BroadcastGradientArgs).
        return all((self._size(ref) or 0) <= _LARGEST for ref in refs)

    def _refs(self, name: str) -> list[Ref]:
        return [Ref(name, output) for output in range(len(self.outputs[name]))]

    def _size(self, ref: Ref) -> int | None:
        """Returns a tensor's number of elements; None if its shape is unknown."""
        shape = self.shapes.get(ref)
        return None if shape is None or None in shape else math.prod(size or 0 for size in shape)

    def _values(self, wanted: Sequence[Ref]) -> dict[Ref, np.ndarray]:
        """Returns the values of tensors that follow from shapes."""
        told = {name: self._asked(name) for name in self.folded if self.view.nodes[name].op in _SHAPES}
        graph, names = GraphDef(versions=self.view.graph.versions), Names(self.view.nodes)
        constants: dict[Ref, Ref] = {}
        for name in self.folded:
            if name in told:
                continue
            for ref in self.view.inputs(name):
                producer = self.view.nodes[ref.node]
                if ref not in constants and (producer.op == "Const" or ref.node in told):
                    constants[ref] = Ref(names.fresh(f"{ref.node}/value{ref.output}"))
                    value = constant_value(producer) if producer.op == "Const" else told[ref.node][ref.output]
                    make_constant(graph.node.add(name=constants[ref].node), value)
            inputs, attrs = [constants.get(ref, ref) for ref in self.view.inputs(name)], self.view.nodes[name].attr
            attrs = {key: attr for key, attr in attrs.items() if not key.startswith("_")}
            graph.node.append(make_node(name, self.view.nodes[name].op, inputs, attrs=attrs))
        try:
            known = evaluate(graph, [ref for ref in wanted if ref.node not in told])
        except EvaluationError as error:
            raise self._explained(error.node, error.why) from error
        return {ref: told[ref.node][ref.output] if ref.node in told else known[ref] for ref in wanted}

    def _explained(self, name: str, why: str) -> PassError:
        node = self.view.nodes.get(name)
        if node is None:
            return PassError(f"a value that follows from shapes can't be computed: {why}")
        return PassError(
            f"{layer_or_node(node)} can't compute {node.op} ({name!r}) of values that follow from shapes: {why}"
        )

    def _asked(self, name: str) -> list[np.ndarray]:
        """Returns the values of a node that reads shapes."""
        node, values = self.view.nodes[name], []
        for ref, dtype in zip(self.view.inputs(name), self.outputs[name], strict=True):
            shape = self.shapes[ref]
            assert shape is not None
            answer = asked(node.op, [size or 0 for size in shape])
            values.append(np.array(answer, np.int64 if dtype == types_pb2.DT_INT64 else np.int32))
        return values

    def _constant(self, name: str, original: NodeDef, value: np.ndarray) -> NodeDef:
        """Returns a constant that replaces a node; it waits for nothing."""
        node = make_node(name, "Const", device=original.device)
        make_constant(node, value)
        for key, attr in own_attrs(original).items():
            node.attr[key].CopyFrom(attr)
        return node
