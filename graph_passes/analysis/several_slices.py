"""A stage's tensors for slices of several sizes: shapes, and values that follow from the size."""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.analysis.constant_folding import fold_shapes
from graph_passes.analysis.operator_shapes import ShapeInference
from graph_passes.analysis.slice_shapes import SAMPLES, input_shapes
from graph_passes.errors import PassError
from graph_passes.ir.graph import Graph, GraphDef, Ref, make_const
from graph_passes.ir.program import Boundary, Program, Value
from graph_passes.ir.tensorflow_bridge import Shape, constant_value, measure_shapes, output_dtypes

logger = logging.getLogger(__name__)

SIZES = tuple((few, many, few + many, 2 * (few + many)) for few, many in SAMPLES)
"""Slice sizes, the first that the stage can be computed for count: two, their sum, and twice that."""
_LENGTHS = (16, 4, 1, None)
"""Values for lengths that the model leaves open, the first without contradictions counts; None leaves them open."""
_MOST_ELEMENTS = 1 << 16
"""The most elements of a tensor that is computed to find how it depends on the size of a slice."""


class Grows(enum.Enum):
    """How a tensor grows with the batch."""

    ALONG_AN_AXIS = enum.auto()
    NOT = enum.auto()  # or otherwise: along two axes, or by a fixed part and one for each sample
    UNKNOWN = enum.auto()


class _Known(NamedTuple):
    """Known facts of a stage's tensors for slices of one size."""

    shapes: Mapping[Ref, Shape | None]
    values: Mapping[Ref, np.ndarray]


class SeveralSlices:
    """A part of a stage's graph for slices of several sizes.

    Args:
        program: the flat program.
        arguments: what placeholders of the part mean, and others.
        part: the part.
    """

    def __init__(self, program: Program, arguments: Mapping[Ref, Value], part: GraphDef) -> None:
        self._program, self._arguments, self._part = program, arguments, part
        self._boundaries: dict[Ref, Boundary] = {boundary.ref: boundary for boundary in program.boundaries}
        self._view = Graph(part)
        self._samples, self._length, self._known = self._inferred()
        self._measured: dict[Ref, list[Shape | None]] = {}

    def _inferred(self) -> tuple[Sequence[int], int | None, Sequence[_Known]]:
        """Infers slice sizes, the assumed length of open axes, and the known shapes and values for each size."""
        for length in _LENGTHS:
            for sizes in SIZES:
                try:
                    return sizes, length, [self._known_for(samples, length) for samples in sizes]
                except PassError as error:
                    logger.debug("with %s samples, length %s: %s", sizes, length, error)
        return SIZES[0], None, ()

    def _known_for(self, samples: int, length: int | None) -> _Known:
        number = self._program.roles.slice.samples
        graph = GraphDef(versions=self._part.versions, library=self._part.library)
        for node in self._part.node:
            sized = node.name == number.node
            graph.node.append(make_const(node.name, samples, types_pb2.DT_INT32) if sized else node)
        shapes = ShapeInference(graph.library).of(graph, self._argument_shapes(samples, length)).shapes
        own = [
            Ref(node.name, output)
            for node in graph.node
            if node.op not in ("Const", "Placeholder")
            for output in range(len(output_dtypes(node)))
        ]
        folded = fold_shapes(graph, shapes, results=own, largest=_MOST_ELEMENTS)
        nodes = {node.name: node for node in folded.graph.node}
        values = {ref: constant_value(nodes[constant.node]) for ref, constant in folded.moved.items()}
        return _Known(shapes, {number: np.array(samples), **values})

    def _argument_shapes(self, samples: int, length: int | None) -> dict[str, list[int | None]]:
        flat = self._program.graph if self._program.flat is None else self._program.flat
        inputs = input_shapes(Graph(flat), self._program.roles, samples)
        shapes: dict[str, list[int | None]] = {}
        for ref, value in self._arguments.items():
            if ref.node not in self._view.nodes:
                continue
            known = self._view.nodes[ref.node].attr["shape"].shape
            boundary = self._boundaries.get(value.ref)
            if boundary is not None:
                shape = list(boundary.example_slice_shape(samples))
                axis = boundary.batch_axis
                if axis is not None and shape[axis] is None and length is not None:
                    shape[axis] = length * samples
            elif value.ref in self._program.roles.inputs:
                shape = inputs[value.ref.node]
            elif known.unknown_rank:
                continue
            else:
                shape = [dim.size if dim.size >= 0 else None for dim in known.dim]
            shapes[ref.node] = [length if size is None else size for size in shape]
        return shapes

    def values(self, ref: Ref) -> list[np.ndarray] | None:
        """Returns the values of a tensor for each of `SIZES`; None where they don't follow from the size alone."""
        values = [known.values[ref] for known in self._known if ref in known.values]
        return values if len(values) == len(self._samples) else None

    def shapes(self, ref: Ref) -> list[Shape | None]:
        """Returns the shapes of a tensor for each slice size; None where it isn't known."""
        return self._measured.get(ref) or [known.shapes.get(ref) for known in self._known] or [None]

    def value(self, ref: Ref) -> np.ndarray | None:
        """Returns the value of a tensor that is the same for all slice sizes; None for others."""
        node = self._view.nodes[ref.node]
        if node.op == "Const":
            return constant_value(node)
        values = self.values(ref)
        return values[0] if values and all(np.array_equal(value, values[0]) for value in values) else None

    def grows(self, ref: Ref) -> Grows:
        """Returns how a tensor grows with the batch."""
        shapes = self.shapes(ref)
        if any(shape is None for shape in shapes) or len({len(shape or ()) for shape in shapes}) > 1:
            return Grows.UNKNOWN
        kinds = [self._axis_grows(sizes) for sizes in zip(*(shape or () for shape in shapes), strict=True)]
        if kinds.count(Grows.ALONG_AN_AXIS) == 1 and None not in kinds:
            return Grows.ALONG_AN_AXIS
        return Grows.UNKNOWN if Grows.UNKNOWN in kinds and set(kinds) <= {Grows.UNKNOWN, Grows.NOT} else Grows.NOT

    def _axis_grows(self, sizes: Sequence[int | None]) -> Grows | None:
        """Returns how an axis grows; None for one that grows, but not as the batch does."""
        if None in sizes:
            return Grows.UNKNOWN
        lengths = [size or 0 for size in sizes]
        if len(set(lengths)) == 1:
            return Grows.NOT
        rates = {length / samples for length, samples in zip(lengths, self._samples, strict=False)}
        return Grows.ALONG_AN_AXIS if len(rates) == 1 and rates.pop().is_integer() else None

    def batch_axis(self, ref: Ref) -> int | None:
        """Returns the axis of a tensor that grows with the batch; None if there isn't one, or it isn't known."""
        shapes = self.shapes(ref)
        if self.grows(ref) is not Grows.ALONG_AN_AXIS:
            return None
        sizes = list(zip(*(shape or () for shape in shapes), strict=True))
        return next(axis for axis, of in enumerate(sizes) if self._axis_grows(of) is Grows.ALONG_AN_AXIS)

    def run(self, ref: Ref) -> Grows:
        """Finds how a tensor grows by a run with random inputs."""
        number = self._program.roles.slice.samples
        graph = GraphDef(versions=self._part.versions, library=self._part.library)
        before = self._view.ancestors([ref])
        graph.node.extend(node for node in self._part.node if node.name in before)
        measured: list[Shape | None] = []
        for samples in self._samples[:2]:
            shapes = self._argument_shapes(samples, self._length or _LENGTHS[0])
            known = {name: [size or 0 for size in shape] for name, shape in shapes.items() if name in before}
            measured.append(measure_shapes(graph, known, {number: samples}, [ref]).get(ref))
        self._measured[ref] = measured
        return self.grows(ref)
