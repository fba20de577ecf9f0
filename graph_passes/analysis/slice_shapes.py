"""How shapes of a flat graph's tensors depend on a slice: on its samples, and on lengths that the model leaves open.

Shapes are inferred for two numbers of samples, so that an axis that differs between them is the batch's; with the
lengths of the batch at hand, so that none is invented which the model can't be computed for; and once with these left
open, so that what is known then holds for all lengths.

    samples, length at hand    7, 20        11, 20       7, ?         depends on
    x                          7, 20, 8     11, 20, 8    7, ?, 8      batch, length, nothing
    Conv1D(4, 3, strides=2)    7, 9, 4      11, 9, 4     7, ?, 4      batch, length, nothing
    Reshape((-1,))             252          396          ?            both
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import NamedTuple

from tensorflow.core.framework import types_pb2

from graph_passes.analysis.operator_shapes import ShapeInference
from graph_passes.errors import PassError
from graph_passes.ir.collectives import without_sums
from graph_passes.ir.graph import (
    POSITION_ATTR,
    AttrValue,
    Builder,
    Graph,
    GraphDef,
    Names,
    NodeDef,
    Ref,
    copied,
    dtype_attr,
    make_const,
    make_node,
)
from graph_passes.ir.program import Program, Roles
from graph_passes.ir.static_shapes import ShapesOf
from graph_passes.ir.tensorflow_bridge import Shape, measure_shapes, output_dtypes

SAMPLES = ((7, 11), (84, 132))
"""Pairs of numbers of samples, the first that the model can be computed for counts.

Multiples of primes, so that nothing else grows as they do; the second pair is for models that take samples by twos,
threes or fours.
"""
_Shapes = Mapping[Ref, Shape | None]
_Inputs = Mapping[str, Sequence[int | None]]


class LengthsUnknownError(PassError):
    """A tensor's axes depend on lengths that the model leaves open, and no batch is at hand."""


class Dependence(enum.Enum):
    """What the length of an axis depends on."""

    FIXED = enum.auto()
    LENGTH = enum.auto()  # the lengths that the model leaves open
    BATCH = enum.auto()  # proportional to the batch
    BOTH = enum.auto()  # proportional to the batch, by a factor that depends on those lengths
    UNKNOWN = enum.auto()  # the data themselves, or not proportional, or lengths that aren't known


class Axis(NamedTuple):
    """One axis of a tensor.

    Attributes:
        dependence: what its length depends on.
        size: its length with the lengths of the batch at hand: per sample if it depends on the batch. None if unknown.
    """

    dependence: Dependence
    size: int | None

    @property
    def of_batch(self) -> bool:
        """Whether it grows with the batch."""
        return self.dependence in (Dependence.BATCH, Dependence.BOTH)


@dataclasses.dataclass(frozen=True)
class SliceShapes:
    """Shapes of the tensors of a flat graph under three assumptions.

    Attributes:
        samples: the two numbers of samples; None where shapes contradict each other for all of `SAMPLES`.
        assumed: shapes of batch inputs: few samples, many, and few with lengths open.
        found: shapes of all tensors under these assumptions.
        contradiction: why shapes contradict each other for some number of samples; empty if they don't.
        lengths_known: whether the model leaves no lengths open, or a batch is at hand.
    """

    samples: tuple[int, int] | None
    assumed: tuple[_Inputs, _Inputs, _Inputs]
    found: tuple[_Shapes, _Shapes, _Shapes]
    contradiction: str = ""
    lengths_known: bool = True

    @classmethod
    def of(cls, program: Program, part: GraphDef | None = None) -> SliceShapes:
        """Infers the shapes of a flat program's tensors, or of a part of its graph.

        Raises:
            PassError: they contradict each other whatever the number of samples, with the lengths of the batch at hand;
                the text names the layer.
        """
        graph: GraphDef = program.graph if part is None else part
        roles, number = program.roles, program.roles.slice.samples
        contradiction, shapes_of = "", ShapesOf(graph)
        for pair in (None,) if roles.uncut else (*SAMPLES, None):
            few, many = pair or (None, None)
            whole = Graph(program.graph)
            assumed = (
                input_shapes(whole, roles, few),
                input_shapes(whole, roles, many),
                input_shapes(whole, roles, few, lengths=False),
            )
            known = all(size is not None for shape in assumed[0].values() for size in shape[1:])
            values = [{} if samples is None else {number: samples} for samples in (few, many, few)]
            try:
                inferred = _each(assumed, values, shapes_of.under)
            except PassError as error:
                contradiction = contradiction or str(error)
                if pair is None:
                    raise PassError(f"{error}, for {_told(roles, assumed[0])}") from error
                continue
            return cls(pair, assumed, inferred, contradiction, known)
        raise AssertionError("the last attempt returns or raises")

    def axes(self, ref: Ref) -> list[Axis] | None:
        """Returns what each axis of a tensor depends on; None where not even its rank is known."""
        few, many, whatever = (shapes.get(ref) for shapes in self.found)
        if few is None or many is None:
            return None
        whatever = (None,) * len(few) if whatever is None else whatever
        return [self._axis(*sizes) for sizes in zip(few, many, whatever, strict=True)]

    def _axis(self, few: int | None, many: int | None, whatever: int | None) -> Axis:
        if few is None or many is None:
            return Axis(Dependence.UNKNOWN, None)
        if few == many and (few or whatever is not None):
            return Axis(Dependence.FIXED if whatever == few else Dependence.LENGTH, few)
        least, most = self.samples or (0, 0)
        if 0 in (few, many, least) or few * most != many * least or few % least:
            return Axis(Dependence.UNKNOWN, None)
        return Axis(Dependence.BATCH if whatever == few else Dependence.BOTH, few // least)

    def vague(self, refs: Iterable[Ref]) -> list[Ref]:
        """Returns the tensors with an axis of unknown dependence."""
        axes_of = {ref: self.axes(ref) for ref in refs}
        return [
            ref
            for ref, axes in axes_of.items()
            if axes is None or any(axis.dependence is Dependence.UNKNOWN for axis in axes)
        ]

    def through_functions(self, program: Program, refs: Iterable[Ref]) -> SliceShapes:
        """Adds the shapes of ``refs`` inferred through loops, branches and lists: the batch after an LSTM, say.

        If the whole graph's shapes contradict each other, only the part before ``refs`` is inferred.
        """
        vague = self.vague(refs)
        if not vague:
            return self
        part = part_before(program.graph, vague)
        if self.samples is None:
            alone = SliceShapes.of(program, part)
            if alone.samples is None:
                return self.with_shapes(alone.found)
            known = dataclasses.replace(self, samples=alone.samples, assumed=alone.assumed)
            return known.with_shapes(alone.found).through_functions(program, vague)
        inference, number = ShapeInference(part.library), program.roles.slice.samples
        few, many = self.samples

        def infer(inputs: _Inputs, values: Mapping[Ref, int]) -> _Shapes:
            shapes = inference.of(part, inputs, values=values).shapes
            return {ref: shapes[ref] for ref in vague}

        return self.with_shapes(_each(self.assumed, [{number: samples} for samples in (few, many, few)], infer))

    def measured(self, program: Program, refs: Iterable[Ref]) -> SliceShapes:
        """Adds the axes of ``refs`` that grow with the batch, of shapes that depend on values, from a run.

        A run uses random inputs, so that a length that the data decide isn't proportional to the batch. One that is the
        same for all numbers of samples may be another one with other data: it stays unknown.
        """
        vague = self.vague(refs)
        if not vague or self.samples is None or not self.lengths_known:
            return self
        number = program.roles.slice.samples
        alone = without_sums(program.graph)
        few, many = (
            measure_shapes(alone, {name: _whole(shape) for name, shape in inputs.items()}, values, vague)
            for inputs, values in zip(self.assumed, [{number: samples} for samples in self.samples], strict=False)
        )
        grown = {ref: _grown(self.found[0].get(ref), few[ref], many[ref]) for ref in few.keys() & many.keys()}
        small, large = ({ref: shapes[number] for ref, shapes in grown.items()} for number in (0, 1))
        # What a run tells of an axis holds for the lengths of the batch at hand only.
        whatever = small if self.assumed[2] == self.assumed[0] else {ref: self.found[2].get(ref) for ref in grown}
        return self.with_shapes((small, large, whatever))

    def with_shapes(self, more: Sequence[_Shapes]) -> SliceShapes:
        """Returns these shapes and others, for few samples, many, and any number."""
        few, many, whatever = ({**shapes, **added} for shapes, added in zip(self.found, more, strict=True))
        return dataclasses.replace(self, found=(few, many, whatever))


def input_shapes(
    graph: Graph, roles: Roles, samples: int | None, *, lengths: bool = True
) -> dict[str, list[int | None]]:
    """Returns the shapes of a flat graph's batch inputs for a slice of ``samples`` samples.

    Args:
        graph: the flat graph.
        roles: what its tensors mean.
        samples: of the slice; None leaves them open.
        lengths: take lengths that the model leaves open from the batch at hand, if there is one; else they stay open.
    """
    examples = roles.example_shapes if lengths and roles.example_shapes else (None,) * len(roles.inputs)
    return {
        ref.node: input_shape(graph.nodes[ref.node], None if roles.uncut else samples, example)
        for ref, example in zip(roles.inputs, examples, strict=True)
    }


def input_shape(node: NodeDef, samples: int | None, example: Sequence[int | None] | None) -> list[int | None]:
    """Returns the shape of a batch input, with lengths that the model leaves open from an example if there is one."""
    dims = [samples, *(dim.size if dim.size >= 0 else None for dim in node.attr["shape"].shape.dim[1:])]
    known = dims if example is None else example
    return [other if size is None else size for size, other in zip(dims, known, strict=True)]


def _each(
    assumed: Sequence[_Inputs],
    values: Sequence[Mapping[Ref, int]],
    infer: Callable[[_Inputs, Mapping[Ref, int]], _Shapes],
) -> tuple[_Shapes, _Shapes, _Shapes]:
    """Shapes under each assumption; the third is the first where no lengths are open."""
    few, many = infer(assumed[0], values[0]), infer(assumed[1], values[1])
    return few, many, few if assumed[2] == assumed[0] else infer(assumed[2], values[2])


def part_before(graph: GraphDef, refs: Sequence[Ref]) -> GraphDef:
    """Returns the part of a graph that computes tensors."""
    names = Graph(graph).ancestors(refs)
    part = GraphDef(versions=graph.versions, library=graph.library)
    part.node.extend(node for node in graph.node if node.name in names)
    return part


def _grown(known: Shape | None, few: Shape, many: Shape) -> tuple[Shape, Shape]:
    """Returns measured shapes without the lengths that are equal, but for known ones."""
    sizes = (None,) * len(few) if known is None else known
    told = [size is not None or one != other for size, one, other in zip(sizes, few, many, strict=True)]
    return (
        tuple(one if sure else None for one, sure in zip(few, told, strict=True)),
        tuple(other if sure else None for other, sure in zip(many, told, strict=True)),
    )


def _whole(shape: Sequence[int | None]) -> list[int]:
    return [size for size in shape if size is not None]


def _told(roles: Roles, inputs: _Inputs) -> str:
    """Returns the batch inputs' shapes for a message."""
    shown = (
        f"{ref.node} of shape ({', '.join('?' if size is None else str(size) for size in inputs[ref.node])})"
        for ref in roles.inputs
    )
    return ", ".join(shown)


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
    samples, graph = program.roles.slice.samples, Graph(program.graph)
    builder = Builder(GraphDef(versions=program.graph.versions, library=program.graph.library))
    builder.names = Names(graph.nodes)
    even: set[str] = set()
    for node in program.graph.node:
        axes = shapes.axes(graph.inputs(node.name)[0]) if node.name in wanted else None
        told = axes is not None and all(axis.dependence is not Dependence.UNKNOWN for axis in axes)
        if axes is None or not told or output_dtypes(node) != [types_pb2.DT_INT32]:
            builder.graph.node.append(node)
            continue
        source = graph.inputs(node.name)[0].node
        open_lengths = any(axis.dependence in (Dependence.LENGTH, Dependence.BOTH) for axis in axes)
        if (open_lengths and source not in stage_of) or all(axis.dependence is Dependence.FIXED for axis in axes):
            builder.graph.node.append(node)  # Each stage reads it of its own slice.
            continue
        attrs = graph.nodes[source].attr
        position = {POSITION_ATTR: attrs[POSITION_ATTR]} if POSITION_ATTR in attrs else {}
        even |= _write_shape(builder, node, axes, samples, position)
    return builder.graph, frozenset(even)


def _write_shape(
    builder: Builder, node: NodeDef, axes: Sequence[Axis], samples: Ref, position: Mapping[str, AttrValue]
) -> set[str]:
    """Adds nodes that compute a shape: fixed + rate * samples + lengths + rows * samples.

    Lengths, and rows (per sample) that depend on them, are read of the tensor itself, where it is made.

    Args:
        builder: of the graph to add them to.
        node: the ``Shape`` node that they replace.
        axes: what each axis depends on.
        samples: the slice's number of samples.
        position: of the node that makes the tensor.

    Returns:
        The names of nodes that are equal in all slices.
    """
    int32 = {"T": dtype_attr(types_pb2.DT_INT32)}

    def const(part: str, values: Sequence[int]) -> Ref:
        return builder.append(make_const(builder.names.fresh(f"{node.name}/{part}"), values, types_pb2.DT_INT32))

    def add(part: str, op: str, *inputs: Ref, **attrs: AttrValue) -> Ref:
        return builder.add(f"{node.name}/{part}", op, inputs, **int32, **attrs)

    def own() -> Ref:
        copy = copied(node)
        copy.name = builder.names.fresh(f"{node.name}/own")
        with builder.marked(position):
            return builder.append(copy)

    def sizes(dependence: Dependence) -> list[int]:
        return [axis.size or 0 if axis.dependence is dependence else 0 for axis in axes]

    def chosen(dependence: Dependence) -> list[int]:
        return [int(axis.dependence is dependence) for axis in axes]

    terms, even = [], set()
    if any(rates := sizes(Dependence.BATCH)):
        terms.append(add("scaled", "Mul", const("rate", rates), samples))
    terms.append(const("fixed", sizes(Dependence.FIXED)))
    if any(lengths := chosen(Dependence.LENGTH)):
        terms.append(add("lengths", "Mul", own(), const("of_lengths", lengths), **position))
        even.add(terms[-1].node)
    if any(merged := chosen(Dependence.BOTH)):
        rows = add("merged", "Mul", own(), const("of_both", merged), **position)
        rows = add("rows", "FloorDiv", rows, samples, **position)
        even.add(rows.node)
        terms.append(add("grown", "Mul", rows, samples))
    total, *others, last = terms
    for term in others:
        total = add("sum", "AddV2", total, term)
    builder.append(make_node(node.name, "AddV2", [total, last], attrs=int32))
    return even
