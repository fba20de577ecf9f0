"""Computes shapes of an earlier stage's tensors from the slice of the stage that reads them."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from tensorflow.core.framework import types_pb2

from graph_passes.analysis.slice_shapes import Axis, Dependence, SliceShapes
from graph_passes.ir.graph import POSITION_ATTR, Graph, GraphDef, Names, NodeDef, Ref, dtype_attr, make_const, make_node
from graph_passes.ir.program import Program
from graph_passes.ir.tensorflow_bridge import output_dtypes


def with_known_shapes(
    program: Program, shapes: SliceShapes, wanted: Container[str], stage_of: Mapping[str, int]
) -> tuple[GraphDef, frozenset[str]]:
    """Returns a copy that computes the ``wanted`` shapes from the slice's number of samples wherever possible.

    A model may take the batch size from one tensor and use it much later. Slices differ between stages, so such a
    value must not cross a cut; as a function of the stage's own slice it needn't. Lengths that the model leaves open
    are the same in all slices, and may cross.

    Returns:
        The copy, and its nodes that are the same in all slices.
    """
    samples = program.roles.slice.samples
    rewritten = GraphDef()
    rewritten.versions.CopyFrom(program.graph.versions)
    rewritten.library.CopyFrom(program.graph.library)
    names = Names(node.name for node in program.graph.node)
    graph = Graph(program.graph)
    even: set[str] = set()
    for node in program.graph.node:
        axes = shapes.axes(graph.inputs(node.name)[0]) if node.name in wanted else None
        told = axes is not None and all(axis.dependence is not Dependence.UNKNOWN for axis in axes)
        if axes is None or not told or output_dtypes(node) != [types_pb2.DT_INT32]:
            rewritten.node.add().CopyFrom(node)
            continue
        source = graph.inputs(node.name)[0].node
        open_lengths = any(axis.dependence in (Dependence.LENGTH, Dependence.BOTH) for axis in axes)
        if (open_lengths and source not in stage_of) or all(axis.dependence is Dependence.FIXED for axis in axes):
            rewritten.node.add().CopyFrom(node)  # Each stage reads it of its own slice.
            continue
        position = graph.nodes[source].attr[POSITION_ATTR].i if POSITION_ATTR in graph.nodes[source].attr else None
        rewriting = _KnownShape(rewritten, names, node, samples, position)
        even |= rewriting.write(axes)
    return rewritten, frozenset(even)


class _KnownShape:
    """Nodes that compute a shape: fixed + rate * samples + lengths + rows * samples.

    Lengths, and rows (per sample) that depend on them, are read of the tensor itself, where it is made.

    Args:
        graph: the graph to add them to.
        names: gives them names.
        node: the ``Shape`` node that they replace.
        samples: the slice's number of samples.
        position: of the node that makes the tensor.
    """

    def __init__(self, graph: GraphDef, names: Names, node: NodeDef, samples: Ref, position: int | None) -> None:
        self.graph, self.names, self.node, self.samples, self.position = graph, names, node, samples, position

    def write(self, axes: Sequence[Axis]) -> set[str]:
        """Adds the nodes; returns the names of nodes that are equal in all slices."""

        def sizes(dependence: Dependence) -> list[int]:
            return [axis.size or 0 if axis.dependence is dependence else 0 for axis in axes]

        def chosen(dependence: Dependence) -> list[int]:
            return [int(axis.dependence is dependence) for axis in axes]

        terms, even = [], set()
        if any(rates := sizes(Dependence.BATCH)):
            terms.append(self._add("scaled", "Mul", self._const("rate", rates), self.samples))
        terms.append(self._const("fixed", sizes(Dependence.FIXED)))
        if any(lengths := chosen(Dependence.LENGTH)):
            own = self._own()
            terms.append(self._add("lengths", "Mul", own, self._const("of_lengths", lengths), here=True))
            even.add(terms[-1].node)
        if any(merged := chosen(Dependence.BOTH)):
            own = self._add("merged", "Mul", self._own(), self._const("of_both", merged), here=True)
            rows = self._add("rows", "FloorDiv", own, self.samples, here=True)
            even.add(rows.node)
            terms.append(self._add("grown", "Mul", rows, self.samples))
        total = terms[0]
        for number, term in enumerate(terms[1:], start=2):
            total = self._add("" if number == len(terms) else "sum", "AddV2", total, term)
        return even

    def _name(self, part: str) -> str:
        return self.names.fresh(f"{self.node.name}/{part}") if part else self.node.name

    def _const(self, part: str, values: Sequence[int]) -> Ref:
        self.graph.node.append(make_const(self._name(part), values, types_pb2.DT_INT32))
        return Ref(self.graph.node[-1].name)

    def _own(self) -> Ref:
        """Returns the tensor's own shape."""
        copy = self.graph.node.add()
        copy.CopyFrom(self.node)
        copy.name = self._name("own")
        self._place(copy)
        return Ref(copy.name)

    def _add(self, part: str, op: str, *inputs: Ref, here: bool = False) -> Ref:
        """Returns a node, ``here`` if it is computed where the tensor is made."""
        attrs = {"T": dtype_attr(types_pb2.DT_INT32)}
        self.graph.node.append(make_node(self._name(part), op, list(inputs), attrs=attrs))
        if here:
            self._place(self.graph.node[-1])
        return Ref(self.graph.node[-1].name)

    def _place(self, node: NodeDef) -> None:
        if self.position is not None:
            node.attr[POSITION_ATTR].i = self.position
