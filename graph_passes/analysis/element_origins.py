"""Origins of the elements of a stage's tensors, which decide how slices of a batch differ.

    constants, variables          the same in every slice
    ids, ids + 1, flat ids        a set of elements for each sample: those of a batch are those of its slices together
    unique(ids)                   fewer in a batch than in its slices together, but no two of them are equal
    max(ids), range(batch size)   other elements in a batch than in its slices

They follow from data flow: from operators' effects on the elements of their inputs, and otherwise from shapes, in which
an axis that grows with the batch has a part for each sample.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.analysis.operator_traits import (
    ACCUMULATING,
    ELEMENTWISE,
    GATHERS,
    JOINING,
    KEEPING_ELEMENTS,
    KEEPING_ORDER,
    REPEATING,
    SEGMENT_GRADIENTS,
    SHAPE_OPERANDS,
    UNIQUE,
    draws,
)
from graph_passes.analysis.several_slices import Grows, SeveralSlices
from graph_passes.ir.call_order import CALLS
from graph_passes.ir.graph import Graph, GraphDef, NodeDef, Ref, data_inputs
from graph_passes.ir.program import Boundary, Program, Stage, Value, ValueKind
from graph_passes.ir.tensorflow_bridge import (
    Shape,
    evaluate,
    function_graph,
    is_stateful,
    make_constant,
    numpy_dtype,
    output_dtypes,
)


class Origin(enum.Enum):
    """The origin of a tensor's elements."""

    CONSTANT = "the same in every slice"
    SAMPLES = "a set of elements for each sample"
    DISTINCT = "computed one by one from elements of which no two of a batch are equal"
    PLACES = "the places of samples in a slice"
    SIZE = "the size of a slice"
    DRAWN = "drawn at random for each slice"
    COUPLED = "computed from several samples together"


class Part(NamedTuple):
    """Consecutive elements of a tensor, in row-major order.

    Attributes:
        origin: their origin.
        tensor: a tensor that has them, perhaps in another shape or order.
        root: for DISTINCT ones, the different elements that they are computed from.
    """

    origin: Origin
    tensor: Ref
    root: Ref | None = None


Parts: TypeAlias = tuple[Part, ...]


class ElementOrigins:
    """The origins of some tensors of a stage.

    Args:
        program: the flat program.
        stage: a stage with its arguments.
        graph: the stage's graph.
        wanted: the tensors.
    """

    def __init__(self, program: Program, stage: Stage, graph: GraphDef, wanted: Iterable[Ref]) -> None:
        self._program = program
        self._boundaries: dict[Ref, Boundary] = {boundary.ref: boundary for boundary in program.boundaries}
        whole = Graph(graph)
        self._arguments = {ref: value for value, ref in stage.arguments.items()}
        refs = list(wanted)
        names = whole.ancestors(refs, self._arguments, control=False)
        read = {ref for name in names for ref in whole.inputs(name)} | set(refs)
        names |= {ref.node for ref in self._arguments if ref in read}
        part = GraphDef(versions=graph.versions, library=graph.library)
        for name in whole.ordered(names):
            node = part.node.add()
            node.CopyFrom(whole.nodes[name])
            del node.input[:]
            if Ref(name) not in self._arguments:
                node.input.extend(str(ref) for ref in whole.inputs(name))
        self._part, self._moved = inline_calls(part)
        self._view = Graph(self._part)
        self._real = names
        self._slices = SeveralSlices(program, self._arguments, self._part)
        self._found: dict[Ref, Parts] = {}
        for name in self._view.topological():
            node = self._view.nodes[name]
            for output in range(len(output_dtypes(node))):
                self._found[Ref(name, output)] = self._parts(node, Ref(name, output))

    def of(self, ref: Ref) -> Parts:
        """Returns a wanted tensor's elements, part by part, as far as their sizes are known outside calls."""
        parts = self._found[self._moved.get(ref, ref)]
        inside = {each.node for part in parts for each in (part.tensor, part.root or part.tensor)} - self._real
        asked = len(parts) > 1 or parts[0].origin is Origin.DISTINCT
        return (Part(Origin.COUPLED, ref),) if asked and inside else parts

    def image(self, part: Part, elements: np.ndarray) -> np.ndarray | None:
        """Computes DISTINCT elements from given root elements; None if they depend on more."""
        assert part.root is not None
        stop = {part.root: elements.astype(self._dtype(part.root))}
        names = self._view.ancestors([part.tensor], stop, control=False)
        for ref in {ref for name in names for ref in self._view.inputs(name)} - stop.keys():
            value = self._slices.value(ref)
            if value is not None:
                stop[ref] = value
        names = self._view.ancestors([part.tensor], stop, control=False)
        if any(self._view.nodes[name].op == "Placeholder" for name in names):
            return None
        graph = GraphDef(versions=self._part.versions, library=self._part.library)
        constants = {ref: Ref(f"{ref.node}/value{ref.output}") for ref in stop}
        for ref, value in stop.items():
            make_constant(graph.node.add(name=constants[ref].node), value)
        for name in self._view.ordered(names):
            node = graph.node.add()
            node.CopyFrom(self._view.nodes[name])
            del node.input[:]
            node.input.extend(str(constants.get(ref, ref)) for ref in self._view.inputs(name))
        wanted = constants.get(part.tensor, part.tensor)
        return evaluate(graph, [wanted])[wanted]

    def _dtype(self, ref: Ref) -> np.dtype[Any]:
        return numpy_dtype(output_dtypes(self._view.nodes[ref.node])[ref.output])

    # ---- tensors that no operator of the stage makes, or that no data are needed for

    def _parts(self, node: NodeDef, ref: Ref) -> Parts:
        if ref in self._arguments:
            return (Part(self._argument(self._arguments[ref]), ref),)
        if node.op == "Const":
            return (Part(Origin.CONSTANT, ref),)
        values = self._slices.values(ref)
        if values is not None:
            return (Part(self._computed(values), ref),)
        return self._operator(node, ref)

    def _argument(self, value: Value) -> Origin:
        roles = self._program.roles
        if value.kind is not ValueKind.FORWARD:
            return Origin.COUPLED
        if value.ref in roles.inputs:
            return Origin.SAMPLES
        if value.ref in (roles.slice.weight, roles.slice.samples):
            return Origin.SIZE
        if value.ref == roles.slice.number:
            return Origin.DRAWN
        boundary = self._boundaries.get(value.ref)
        if boundary is None:
            return Origin.CONSTANT  # a variable, or a divisor of the whole batch
        if boundary.batch_axis is not None:
            return Origin.SAMPLES
        flat = Graph(self._program.graph)
        given = {ref.node for ref in (*roles.inputs, *roles.slice)}
        return Origin.COUPLED if given & flat.ancestors([value.ref], control=False) else Origin.CONSTANT

    @staticmethod
    def _computed(values: Sequence[np.ndarray]) -> Origin:
        """Returns the origin of a value that depends only on a slice's size, from its values for `SAMPLES`."""
        if all(np.array_equal(value, values[0]) for value in values):
            return Origin.CONSTANT
        if all(value.ndim == 0 or value.shape == values[0].shape for value in values):
            return Origin.SIZE
        few, many, both, twice = (np.sort(value, axis=None) for value in values)
        adds_up = all(
            np.array_equal(np.sort(np.concatenate(slices)), batch)
            for slices, batch in (((few, many), both), ((both, both), twice))
        )
        return Origin.SAMPLES if adds_up else Origin.PLACES

    # ---- operators

    def _operator(self, node: NodeDef, ref: Ref) -> Parts:
        given = [self._found[each] for each in data_inputs(node)]
        dtypes = [output_dtypes(self._view.nodes[each.node])[each.output] for each in data_inputs(node)]
        origins = {part.origin for parts in given for part in parts}
        repeats = not is_stateful(node.op) or not given or types_pb2.DT_RESOURCE in dtypes
        if origins <= {Origin.CONSTANT} and repeats:
            return (Part(Origin.CONSTANT, ref),)
        if origins <= {Origin.CONSTANT, Origin.SIZE, Origin.DRAWN} and (draws(node.op) or not repeats):
            along = self._slices.grows(ref) is Grows.ALONG_AN_AXIS
            return (Part(Origin.SAMPLES if along else Origin.DRAWN, ref),)
        rules: dict[str, Callable[[NodeDef, Ref, list[Parts]], Parts | None]] = {
            **dict.fromkeys(KEEPING_ELEMENTS, self._kept),
            **dict.fromkeys(ELEMENTWISE, self._elementwise),
            **dict.fromkeys(JOINING, self._joined),
            **dict.fromkeys(GATHERS, self._gathered),
            **dict.fromkeys(UNIQUE, self._unique),
            **dict.fromkeys(SEGMENT_GRADIENTS, self._segments),
            **dict.fromkeys(ACCUMULATING, self._accumulated),
            "Where": self._where,
            "StridedSlice": self._columns,
            "DynamicPartition": self._partitioned,
            "SparseFillEmptyRows": self._filled,
            "Range": self._range,
        }
        rule = rules.get(node.op)
        by_rule = None if rule is None else rule(node, ref, given)
        return self._by_shape(node, ref, given) if by_rule is None else by_rule

    def _by_shape(self, node: NodeDef, ref: Ref, given: Sequence[Parts]) -> Parts:
        """Returns the parts of an operator's result from shapes alone."""
        aside = SHAPE_OPERANDS.get(node.op, ())
        content = {part.origin for index, parts in enumerate(given) if index not in aside for part in parts}
        grows = self._slices.grows(ref)
        if grows is Grows.UNKNOWN and Origin.SAMPLES in content and node.op not in ELEMENTWISE:
            grows = self._slices.run(ref)
        along = grows is Grows.ALONG_AN_AXIS
        if Origin.PLACES in content:
            origin = Origin.COUPLED if grows is Grows.NOT else Origin.PLACES
        elif content <= {Origin.CONSTANT, Origin.SIZE} and not (node.op in REPEATING and Origin.SIZE not in content):
            origin = Origin.PLACES if along else Origin.SIZE
        elif along:
            origin = Origin.SAMPLES
        elif content <= {Origin.CONSTANT, Origin.DRAWN}:
            origin = Origin.DRAWN
        else:
            origin = Origin.COUPLED
        return (Part(origin, ref),)

    def _kept(self, node: NodeDef, ref: Ref, given: list[Parts]) -> Parts | None:
        """Handles operators that return the elements of their first input, in another shape or order."""
        parts = given[0]
        return parts if len(parts) == 1 or node.op in KEEPING_ORDER else None

    def _elementwise(self, node: NodeDef, ref: Ref, given: list[Parts]) -> Parts | None:
        mixed = {parts for parts in given if len(parts) > 1}
        origins = {parts[0].origin for parts in given if len(parts) == 1}
        if mixed:
            if len(mixed) > 1 or origins - {Origin.CONSTANT} or not self._keeps_size(ref, data_inputs(node)):
                return None
            return tuple(
                part._replace(origin=Origin.COUPLED) if part.origin is Origin.DISTINCT else part for part in mixed.pop()
            )
        if Origin.DISTINCT in origins:
            roots = {parts[0].root for parts in given if parts[0].origin is Origin.DISTINCT}
            alone = origins <= {Origin.DISTINCT, Origin.CONSTANT} and len(roots) == 1
            alone = alone and self._keeps_size(ref, data_inputs(node))
            return (Part(Origin.DISTINCT, ref, roots.pop()),) if alone else None
        if Origin.SAMPLES in origins and origins <= {Origin.SAMPLES, Origin.CONSTANT, Origin.DRAWN, Origin.SIZE}:
            shape = self._slices.shapes(ref)[0]
            unknown = shape is None or sum(size is None for size in shape) <= 1
            if self._slices.grows(ref) is Grows.UNKNOWN and unknown:
                return (Part(Origin.SAMPLES, ref),)
        return None

    def _keeps_size(self, ref: Ref, given: Sequence[Ref]) -> bool:
        """Returns whether an elementwise result has as many elements as the inputs that aren't constant."""
        sizes = {each: _sizes(self._slices.shapes(each)) for each in (ref, *given)}
        growing = {sizes[each] for each in given if {part.origin for part in self._found[each]} != {Origin.CONSTANT}}
        if growing == {sizes[ref]} and None not in sizes[ref]:
            return True
        ranks = {None if shape is None else len(shape) for each in given for shape in self._slices.shapes(each)[:1]}
        constants = [each for each in given if {part.origin for part in self._found[each]} == {Origin.CONSTANT}]
        # Of unknown lengths: vectors and scalars.
        return ranks <= {0, 1} and len(growing) == 1 and all(set(sizes[each]) == {1} for each in constants)

    def _joined(self, node: NodeDef, ref: Ref, given: list[Parts]) -> Parts | None:
        if node.op == "Pack":
            axis, given_refs = int(node.attr["axis"].i), data_inputs(node)
        else:
            chosen = self._slices.value(data_inputs(node)[-1])
            if chosen is None:
                return None
            axis, given, given_refs = int(chosen), given[:-1], data_inputs(node)[:-1]
        if {part.origin for parts in given for part in parts} == {Origin.SAMPLES}:
            return (Part(Origin.SAMPLES, ref),)
        shapes = [shape for each in given_refs for shape in self._slices.shapes(each)]
        if axis != 0:
            if any(shape is None for shape in shapes):
                return None
            rank = len(shapes[0] or ()) + (node.op == "Pack")
            if any(size != 1 for shape in shapes for size in (shape or ())[: axis % rank]):
                return None
        return tuple(
            part if len(parts) > 1 else part._replace(tensor=each)
            for each, parts in zip(given_refs, given, strict=True)
            for part in parts
        )

    def _gathered(self, node: NodeDef, ref: Ref, given: list[Parts]) -> Parts | None:
        """Handles values at indices: from a constant map they have the indices' origin; else mostly their shape's."""
        values, indices = given[0], given[1]
        origins = {part.origin for part in indices}
        unique = values[0].tensor
        if (unique.node, 1) == indices[0].tensor and self._view.nodes[unique.node].op in UNIQUE:
            return self._found[data_inputs(self._view.nodes[unique.node])[0]]
        if {part.origin for part in values} != {Origin.CONSTANT}:
            if Origin.PLACES in {part.origin for part in values}:
                return None
            grows = self._slices.grows(ref)
            own = {part.origin for part in values} == {Origin.SAMPLES}
            unknown = grows is Grows.UNKNOWN and own and origins <= {Origin.SAMPLES, Origin.PLACES}
            return (Part(Origin.SAMPLES if unknown or grows is Grows.ALONG_AN_AXIS else Origin.COUPLED, ref),)
        if len(indices) > 1:
            one_each = _sizes(self._slices.shapes(ref)) == _sizes(self._slices.shapes(data_inputs(node)[1]))
            mapped = origins <= {Origin.CONSTANT, Origin.SAMPLES} and node.op != "GatherNd"
            return indices if one_each and mapped else None
        return (Part(Origin.SAMPLES, ref),) if origins == {Origin.SAMPLES} else None

    def _unique(self, node: NodeDef, ref: Ref, given: list[Parts]) -> Parts | None:
        if ref.output == 1:
            return (Part(Origin.PLACES, ref),)
        return self._different(data_inputs(node)[0], ref) if ref.output == 0 else (Part(Origin.COUPLED, ref),)

    def _segments(self, node: NodeDef, ref: Ref, given: list[Parts]) -> Parts | None:
        return self._different(data_inputs(node)[1], ref) if ref.output == 1 else None

    def _different(self, source: Ref, ref: Ref) -> Parts:
        """Returns the parts of a vector of the different elements of another one."""
        shape, origins = self._slices.shapes(source)[0], {part.origin for part in self._found[source]}
        if {Origin.PLACES, Origin.SIZE} & origins:
            return (Part(Origin.PLACES, ref),)
        known = origins <= {Origin.CONSTANT, Origin.SAMPLES, Origin.DISTINCT}
        if known and shape is not None and len(shape) == 1:
            return (Part(Origin.DISTINCT, ref, ref),)
        return (Part(Origin.COUPLED, ref),)

    def _range(self, node: NodeDef, ref: Ref, given: list[Parts]) -> Parts | None:
        """Handles 0, 1, ... up to a number from the data: all different."""
        origins = {part.origin for parts in given for part in parts}
        return (Part(Origin.DISTINCT, ref, ref),) if origins == {Origin.CONSTANT, Origin.COUPLED} else None

    def _accumulated(self, node: NodeDef, ref: Ref, given: list[Parts]) -> Parts | None:
        """Handles cumulative sums, and orders: along the batch they count its samples."""
        inputs = data_inputs(node)
        axis = self._slices.value(inputs[1]) if node.op not in ("TopKV2", "TopK") else np.array(-1)
        shape, batch = self._slices.shapes(inputs[0])[0], self._slices.batch_axis(inputs[0])
        if {part.origin for part in given[0]} != {Origin.SAMPLES}:
            return None
        if axis is None or shape is None or batch is None:
            return (Part(Origin.PLACES, ref),)
        return (Part(Origin.PLACES, ref),) if int(axis) % len(shape) == batch else None

    def _where(self, node: NodeDef, ref: Ref, given: list[Parts]) -> Parts | None:
        """Handles places where a mask is true, a column for each of its axes."""
        along = {part.origin for part in given[0]} == {Origin.SAMPLES}
        return (Part(Origin.PLACES if along else Origin.COUPLED, ref),)

    def _partitioned(self, node: NodeDef, ref: Ref, given: list[Parts]) -> Parts | None:
        """Handles elements that are distributed to outputs by number."""
        own = all(len(parts) == 1 and parts[0].origin is Origin.SAMPLES for parts in given)
        return (Part(Origin.SAMPLES, ref),) if own else None

    def _filled(self, node: NodeDef, ref: Ref, given: list[Parts]) -> Parts | None:
        """Handles the elements of a sparse tensor, the second input, with one more for each sample that has none."""
        origins = {part.origin for index in (1, 3) for part in given[index]}
        own = ref.output == 1 and Origin.SAMPLES in origins and origins <= {Origin.SAMPLES, Origin.CONSTANT}
        return (Part(Origin.SAMPLES if own else Origin.PLACES, ref),)

    def _columns(self, node: NodeDef, ref: Ref, given: list[Parts]) -> Parts | None:
        """Handles columns of a list of places; axes after the batch's are within a sample."""
        source = data_inputs(node)[0]
        while self._view.nodes[source.node].op in ("Identity", "Cast"):
            source = data_inputs(self._view.nodes[source.node])[0]
        bounds = [self._slices.value(each) for each in data_inputs(node)[1:]]
        if self._view.nodes[source.node].op != "Where" or any(bound is None for bound in bounds):
            return None
        mask = data_inputs(self._view.nodes[source.node])[0]
        shape, batch = self._slices.shapes(mask)[0], self._slices.batch_axis(mask)
        if given[0][0].origin is not Origin.PLACES or shape is None or batch is None:
            return None
        graph = GraphDef(versions=self._part.versions)
        taken = graph.node.add()
        taken.CopyFrom(node)
        taken.attr["T"].type = types_pb2.DT_INT64
        del taken.input[:]
        numbers = np.arange(len(shape), dtype=np.int64)[None]
        for index, value in enumerate([numbers, *bounds]):
            assert value is not None
            make_constant(graph.node.add(name=f"operand{index}"), value)
            taken.input.append(f"operand{index}")
        chosen = evaluate(graph, [Ref(node.name)])[Ref(node.name)]
        return None if batch in chosen else (Part(Origin.SAMPLES, ref),)


def _sizes(shapes: Sequence[Shape | None]) -> tuple[int | None, ...]:
    """Returns the numbers of elements; None for unknown ones."""
    return tuple(None if shape is None or None in shape else math.prod(size or 0 for size in shape) for shape in shapes)


def inline_calls(graph: GraphDef) -> tuple[GraphDef, Mapping[Ref, Ref]]:
    """Returns a graph without calls, also within the functions that they call; loops and branches stay.

        y = f(x), f(a) = { b, c }   becomes   y/b(x) -> y/c

    Args:
        graph: a flat graph, producers first; it isn't changed.

    Returns:
        The graph, and the tensors that replace calls' results.
    """
    if not any(node.op in CALLS for node in graph.node):
        return graph, {}
    inlining = _Inlining(graph)
    view = Graph(graph)
    for node in graph.node:
        inlining.place(node, node.name, [inlining.now(ref) for ref in view.inputs(node.name)])
    return inlining.graph, inlining.moved


class _Inlining:
    """A graph while calls are being inlined."""

    def __init__(self, graph: GraphDef) -> None:
        self._library = graph.library
        self.graph = GraphDef(versions=graph.versions, library=graph.library)
        self.moved: dict[Ref, Ref] = {}

    def now(self, ref: Ref) -> Ref:
        """Returns the tensor that replaces a tensor."""
        return self.moved.get(ref, ref)

    def place(self, node: NodeDef, name: str, inputs: Sequence[Ref]) -> None:
        """Adds a node under a name, or the body that it calls."""
        if node.op not in CALLS:
            own = self.graph.node.add()
            own.CopyFrom(node)
            own.name = name
            del own.input[:]
            own.input.extend(str(ref) for ref in inputs)
            return
        body, results = function_graph(self._library, node.attr["f"].func.name)
        view = Graph(body)
        arguments = list(view.nodes)[: len(inputs)]
        for argument, given in zip(arguments, inputs, strict=True):
            self.moved[Ref(f"{name}/{argument}")] = given
        for inner in view.topological():
            if inner not in arguments:
                read = [self.now(Ref(f"{name}/{ref.node}", ref.output)) for ref in view.inputs(inner)]
                self.place(view.nodes[inner], f"{name}/{inner}", read)
        for output, ref in enumerate(results):
            self.moved[Ref(name, output)] = self.now(Ref(f"{name}/{ref.node}", ref.output))
