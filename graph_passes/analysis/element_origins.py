"""Origins of the elements of a stage's tensors, which decide how slices of a batch differ.

    constants, variables          the same in every slice
    ids, ids + 1, flat ids        a set of elements for each sample: those of a batch are those of its slices together
    unique(ids)                   fewer in a batch than in its slices together, but no two of them are equal
    max(ids), range(batch size)   other elements in a batch than in its slices

They follow from data flow: from operators' effects on the elements of their inputs, and otherwise from the interpreter
of `sample_dependence`, which tells places and couplings, and from shapes: an axis that grows with the batch has a part
for each sample.
"""

from __future__ import annotations

import enum
import itertools
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.analysis.operator_shapes import KnownShapes, ShapeInference
from graph_passes.analysis.operator_traits import (
    ACCUMULATING,
    ELEMENTWISE,
    GATHERS,
    KEEPING_ELEMENTS,
    KEEPING_ORDER,
    REPEATING,
    SEGMENT_GRADIENTS,
    SHAPE_OPERANDS,
    UNIQUE,
    draws,
)
from graph_passes.analysis.sample_interpreter import Interpreter, grows_once
from graph_passes.analysis.sample_rules import RULES
from graph_passes.analysis.shape_values import strided
from graph_passes.analysis.slice_shapes import SAMPLES, input_shapes, part_before
from graph_passes.errors import PassError
from graph_passes.ir.call_order import CALLS
from graph_passes.ir.graph import Graph, GraphDef, NodeDef, Ref, data_inputs, in_order
from graph_passes.ir.program import Boundary, Program, Stage, Value, ValueKind
from graph_passes.ir.spreads import Coupling, Spread
from graph_passes.ir.tensorflow_bridge import (
    Shape,
    constant_value,
    evaluate,
    function_graph,
    is_stateful,
    make_constant,
    measure_shapes,
    numpy_dtype,
    output_dtypes,
    takes_functions,
)

logger = logging.getLogger(__name__)

_LENGTHS = (16, 4, 1, None)
"""Values for lengths that the model leaves open, the first without contradictions counts; None leaves them open."""


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
        self._given = {ref: self._argument(value) for ref, value in self._arguments.items()}
        refs = list(wanted)
        names = whole.ancestors(refs, self._arguments, control=False)
        read = {ref for name in names for ref in whole.inputs(name)} | set(refs)
        names |= {ref.node for ref in self._arguments if ref in read}
        part = GraphDef(versions=graph.versions, library=graph.library)
        for name in whole.ordered(names):
            _add(part, whole.nodes[name], () if Ref(name) in self._arguments else whole.inputs(name))
        self._part, self._moved = inline_calls(part)
        self._real = names
        self._interpreter = self._interpreted()
        self._view = self._interpreter.graph
        self._mixing = {
            name for name, why in self._interpreter.couplings if why not in (Coupling.DRAWS, Coupling.PYTHON)
        }
        self._coupled = {name for name in self._mixing if self._is_exact(Ref(name))}
        self._found: dict[Ref, Parts] = {}
        for node in self._view:
            for output in range(len(output_dtypes(node))):
                self._found[Ref(node.name, output)] = self._parts(node, Ref(node.name, output))

    def _interpreted(self) -> Interpreter:
        """Interprets the part for two sizes of a slice, the first that it can be computed for count."""
        number, inference = self._program.roles.slice.samples, ShapeInference(self._part.library)
        known = [KnownShapes({}, {}, {})] * 2
        for self._length, samples in itertools.product(_LENGTHS, SAMPLES):
            assumed = [self._argument_shapes(own, self._length) for own in samples]
            try:
                known = [
                    inference.of(self._part, shapes, values={number: own})
                    for own, shapes in zip(samples, assumed, strict=True)
                ]
                break
            except PassError as error:
                logger.debug("with %s samples, length %s: %s", samples, self._length, error)
        scalars = [{number: float(own)} for own in samples]
        graph = in_order(self._part)
        interpreter = Interpreter(graph, RULES, samples, known, scalars, inference=inference)
        interpreter.run({ref: self._spread(ref, origin) for ref, origin in self._given.items()})
        return interpreter

    def _spread(self, ref: Ref, origin: Origin) -> Spread:
        if origin is not Origin.SAMPLES:
            return Spread(degree=int(origin is Origin.SIZE))
        boundary = self._boundaries.get(self._arguments[ref].ref)
        return Spread(0 if boundary is None else boundary.batch_axis, boundary.outer if boundary else 1, varies=True)

    def _argument_shapes(self, samples: int, length: int | None) -> dict[str, list[int | None]]:
        inputs = input_shapes(Graph(self._program.flat_graph), self._program.roles, samples)
        shapes: dict[str, list[int | None]] = {}
        for node in self._part.node:
            value, dims = self._arguments.get(Ref(node.name)), node.attr["shape"].shape
            if value is None or (dims.unknown_rank and value.ref not in self._boundaries):
                continue
            shape = inputs.get(value.ref.node, [dim.size if dim.size >= 0 else None for dim in dims.dim])
            if (boundary := self._boundaries.get(value.ref)) is not None:
                shape = list(boundary.example_slice_shape(samples))
                axis = boundary.batch_axis
                if axis is not None and shape[axis] is None and length is not None:
                    shape[axis] = length * samples
            shapes[node.name] = [length if size is None else size for size in shape]
        return shapes

    def _value(self, ref: Ref) -> np.ndarray | None:
        """Returns the value of a tensor that is the same for all slices."""
        node, numbers = self._view.nodes[ref.node], self._interpreter.numbers(ref)
        if node.op == "Const":
            return constant_value(node)
        return numbers[0].astype(self._dtype(ref)) if numbers is not None and np.array_equal(*numbers) else None

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
            value = self._value(ref)
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
            _add(graph, self._view.nodes[name], [constants.get(ref, ref) for ref in self._view.inputs(name)])
        wanted = constants.get(part.tensor, part.tensor)
        return evaluate(graph, [wanted])[wanted]

    def _is_exact(self, ref: Ref) -> bool:
        """Whether a tensor has integers, say: couplings of floating-point numbers are told of the model as a whole."""
        return not self._interpreter.is_float(ref) and not self._interpreter.is_handle(ref)

    def _dtype(self, ref: Ref) -> np.dtype[Any]:
        return numpy_dtype(output_dtypes(self._view.nodes[ref.node])[ref.output])

    # ---- tensors that no operator of the stage makes, or that no data are needed for

    def _parts(self, node: NodeDef, ref: Ref) -> Parts:
        if ref in self._given:
            return (Part(self._given[ref], ref),)
        if node.op == "Const":
            return (Part(Origin.CONSTANT, ref),)
        numbers = self._interpreter.numbers(ref)
        if numbers is not None and not np.isnan(numbers[0]).any():
            return (Part(self._computed(*numbers), ref),)
        return self._operator(node, ref)

    def _argument(self, value: Value) -> Origin:
        roles, boundary = self._program.roles, self._boundaries.get(value.ref)
        if value.kind is not ValueKind.FORWARD:
            return Origin.COUPLED
        if value.ref in roles.inputs or (boundary is not None and boundary.batch_axis is not None):
            return Origin.SAMPLES
        if value.ref in (roles.slice.weight, roles.slice.samples):
            return Origin.SIZE
        if value.ref == roles.slice.number:
            return Origin.DRAWN
        if boundary is None:
            return Origin.CONSTANT  # a variable, or a divisor of the whole batch
        given = {ref.node for ref in (*roles.inputs, *roles.slice)}
        before = Graph(self._program.graph).ancestors([value.ref], control=False)
        return Origin.COUPLED if given & before else Origin.CONSTANT

    def _computed(self, few: np.ndarray, many: np.ndarray) -> Origin:
        """Returns the origin of a value that depends only on a slice's size."""
        if np.array_equal(few, many):
            return Origin.CONSTANT
        if few.shape == many.shape:
            return Origin.SIZE
        (kinds, counts), (others, more) = (np.unique(value, return_counts=True) for value in (few, many))
        one, other = self._interpreter.sizes
        each = np.array_equal(kinds, others) and np.array_equal(counts * other, more * one)
        return Origin.SAMPLES if each else Origin.PLACES

    # ---- operators

    def _operator(self, node: NodeDef, ref: Ref) -> Parts:
        inputs = data_inputs(node)
        given = [self._found[each] for each in inputs]
        dtypes = [output_dtypes(self._view.nodes[each.node])[each.output] for each in inputs]
        origins = {part.origin for parts in given for part in parts}
        repeats = not is_stateful(node.op) or not given or types_pb2.DT_RESOURCE in dtypes
        if origins <= {Origin.CONSTANT} and repeats:
            return (Part(Origin.CONSTANT, ref),)
        if origins <= {Origin.CONSTANT, Origin.SIZE, Origin.DRAWN} and (draws(node.op) or not repeats):
            return (Part(Origin.SAMPLES if self._interpreter.grows_once(ref) else Origin.DRAWN, ref),)
        by_rule: Parts | Origin | None = None
        if node.op in KEEPING_ELEMENTS:
            by_rule = given[0] if len(given[0]) == 1 or node.op in KEEPING_ORDER else None
        elif node.op in ELEMENTWISE:
            by_rule = self._elementwise(inputs, ref, given)
        elif node.op in ("ConcatV2", "Pack"):
            by_rule = self._joined(node, given)
        elif node.op in GATHERS:
            by_rule = self._gathered(node, ref, *given[:2])
        elif node.op in UNIQUE:
            others = Origin.PLACES if ref.output == 1 else Origin.COUPLED
            by_rule = others if ref.output else self._different(inputs[0])
        elif node.op in SEGMENT_GRADIENTS and ref.output == 1:
            by_rule = self._different(inputs[1])
        elif node.op == "StridedSlice" and self._is_within_samples(node, given):
            by_rule = Origin.SAMPLES
        elif node.op == "SparseFillEmptyRows":  # the elements of a sparse tensor, and one where a sample has none
            filled = {part.origin for index in (1, 3) for part in given[index]}
            own = ref.output == 1 and Origin.SAMPLES in filled and filled <= {Origin.SAMPLES, Origin.CONSTANT}
            by_rule = Origin.SAMPLES if own else Origin.PLACES
        elif node.op == "Range" and origins == {Origin.CONSTANT, Origin.COUPLED}:  # up to a number from the data
            by_rule = Origin.DISTINCT
        if isinstance(by_rule, Origin):
            return (Part(by_rule, ref, ref if by_rule is Origin.DISTINCT else None),)
        return self._by_spread(node, ref, given) if by_rule is None else by_rule

    def _by_spread(self, node: NodeDef, ref: Ref, given: Sequence[Parts]) -> Parts:
        """Returns the parts of an operator's result from its dependence on samples."""
        aside, grows = SHAPE_OPERANDS.get(node.op, ()), self._interpreter.grows_once(ref)
        used = [pair for index, pair in enumerate(zip(data_inputs(node), given, strict=True)) if index not in aside]
        content = {part.origin for _, parts in used for part in parts}
        exact = {part.origin for each, parts in used if self._is_exact(each) for part in parts}
        mixed = Origin.COUPLED in exact and self._is_exact(ref) and not takes_functions(node.op)
        if node.name in self._coupled or mixed or (Origin.DISTINCT in content and not grows):
            origin = Origin.COUPLED
        elif Origin.PLACES in content or self._interpreter.of(ref).place or self._accumulates(node):
            origin = Origin.PLACES
        elif content <= {Origin.CONSTANT, Origin.SIZE} and not (node.op in REPEATING and Origin.SIZE not in content):
            origin = Origin.PLACES if grows else Origin.SIZE
        elif grows or (Origin.SAMPLES in content and self._may_grow(node, ref)):
            origin = Origin.SAMPLES
        elif content <= {Origin.CONSTANT, Origin.DRAWN}:
            origin = Origin.DRAWN
        else:
            origin = Origin.COUPLED
        return (Part(origin, ref),)

    def _accumulates(self, node: NodeDef) -> bool:
        """Returns whether a running sum or an order is along the batch, where it counts samples, or may be."""
        if node.op not in ACCUMULATING:
            return False
        if node.name in self._mixing:
            return True
        source, axis = data_inputs(node)[:2]  # TopK: their number instead
        return self._interpreter.shape(source) is None or self._value(axis) is None

    def _may_grow(self, node: NodeDef, ref: Ref) -> bool:
        """Returns whether a tensor of unknown size has a part for each sample: a run tells."""
        shape = self._interpreter.shape(ref)
        if shape is not None and (None not in shape or self._interpreter.differing(ref)):
            return False
        if node.op in ELEMENTWISE:
            return shape is None or shape.count(None) == 1
        return node.op == "DynamicPartition" or self._measured(ref)

    def _measured(self, ref: Ref) -> bool:
        """Returns whether a tensor grows with the batch in a run with random inputs."""
        part, shapes = part_before(self._part, [ref]), []
        for samples in self._interpreter.sizes:
            assumed = self._argument_shapes(samples, self._length or _LENGTHS[0])
            names = assumed.keys() & {node.name for node in part.node}
            known = {name: [size or 0 for size in assumed[name]] for name in names}
            number = {self._program.roles.slice.samples: samples}
            shapes.append(measure_shapes(part, known, number, [ref]).get(ref))
        return grows_once(shapes, self._interpreter.sizes)

    def _elementwise(self, inputs: Sequence[Ref], ref: Ref, given: Sequence[Parts]) -> Parts | None:
        mixed = {parts for parts in given if len(parts) > 1}
        origins = {parts[0].origin for parts in given if len(parts) == 1}
        if mixed:
            if len(mixed) > 1 or origins - {Origin.CONSTANT} or not self._keeps_size(ref, inputs):
                return None
            return tuple(
                part._replace(origin=Origin.COUPLED) if part.origin is Origin.DISTINCT else part for part in mixed.pop()
            )
        if Origin.DISTINCT in origins:
            roots = {parts[0].root for parts in given if parts[0].origin is Origin.DISTINCT}
            alone = origins <= {Origin.DISTINCT, Origin.CONSTANT} and len(roots) == 1
            alone = alone and self._keeps_size(ref, inputs)
            return (Part(Origin.DISTINCT, ref, roots.pop()),) if alone else None
        return None

    def _keeps_size(self, ref: Ref, given: Sequence[Ref]) -> bool:
        """Returns whether an elementwise result has as many elements as the inputs that aren't constant."""
        sizes = {each: _sizes(self._interpreter.shapes(each)) for each in (ref, *given)}
        growing = {sizes[each] for each in given if {part.origin for part in self._found[each]} != {Origin.CONSTANT}}
        if growing == {sizes[ref]} and None not in sizes[ref]:
            return True
        ranks = {None if shape is None else len(shape) for shape in map(self._interpreter.shape, given)}
        constants = [each for each in given if {part.origin for part in self._found[each]} == {Origin.CONSTANT}]
        # Of unknown lengths: vectors and scalars.
        return ranks <= {0, 1} and len(growing) == 1 and all(set(sizes[each]) == {1} for each in constants)

    def _joined(self, node: NodeDef, given: Sequence[Parts]) -> Parts | Origin | None:
        if node.op == "Pack":
            axis, given_refs = int(node.attr["axis"].i), data_inputs(node)
        else:
            chosen = self._value(data_inputs(node)[-1])
            if chosen is None:
                return None
            axis, given, given_refs = int(chosen), given[:-1], data_inputs(node)[:-1]
        if {part.origin for parts in given for part in parts} == {Origin.SAMPLES}:
            return Origin.SAMPLES
        shapes = [shape for each in given_refs for shape in self._interpreter.shapes(each)]
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

    def _gathered(self, node: NodeDef, ref: Ref, values: Parts, indices: Parts) -> Parts | Origin | None:
        """Handles values at indices: from a constant map they have the indices' origin; else mostly their shape's."""
        origins, own = {part.origin for part in indices}, {part.origin for part in values}
        unique = values[0].tensor
        if (unique.node, 1) == indices[0].tensor and self._view.nodes[unique.node].op in UNIQUE:
            return self._found[data_inputs(self._view.nodes[unique.node])[0]]
        if Origin.PLACES in own:
            return None
        if own != {Origin.CONSTANT}:
            shape, samples = self._interpreter.shape(ref), own == {Origin.SAMPLES}
            unknown = samples and origins <= {Origin.SAMPLES, Origin.PLACES} and (shape is None or None in shape)
            apart = (self._interpreter.grows_once(ref) or unknown) and node.name not in self._coupled
            return Origin.SAMPLES if apart else Origin.COUPLED
        if len(indices) > 1:
            one_each = _sizes(self._interpreter.shapes(ref)) == _sizes(self._interpreter.shapes(data_inputs(node)[1]))
            mapped = origins <= {Origin.CONSTANT, Origin.SAMPLES} and node.op != "GatherNd"
            return indices if one_each and mapped else None
        return Origin.SAMPLES if origins == {Origin.SAMPLES} else None

    def _different(self, source: Ref) -> Origin:
        """Returns the origin of a vector of the different elements of another one."""
        shape, origins = self._interpreter.shape(source), {part.origin for part in self._found[source]}
        if {Origin.PLACES, Origin.SIZE} & origins:
            return Origin.PLACES
        known = origins <= {Origin.CONSTANT, Origin.SAMPLES, Origin.DISTINCT}
        return Origin.DISTINCT if known and shape is not None and len(shape) == 1 else Origin.COUPLED

    def _is_within_samples(self, node: NodeDef, given: Sequence[Parts]) -> bool:
        """Returns whether columns of a list of places belong to axes behind the batch's."""
        inputs = data_inputs(node)
        source = inputs[0]
        while self._view.nodes[source.node].op in ("Identity", "Cast"):
            source = data_inputs(self._view.nodes[source.node])[0]
        bounds = [bound for each in inputs[1:] if (bound := self._value(each)) is not None]
        if self._view.nodes[source.node].op != "Where" or given[0][0].origin is not Origin.PLACES:
            return False
        mask = data_inputs(self._view.nodes[source.node])[0]
        shape, batch = self._interpreter.shape(mask), self._interpreter.of(mask).axis
        if shape is None or batch is None or len(bounds) < 3:
            return False
        return batch not in strided(
            node, np.arange(len(shape))[None], *(bound for bound in bounds if bound is not None)
        )


def _add(graph: GraphDef, node: NodeDef, inputs: Iterable[Ref], name: str = "") -> None:
    """Adds a copy of a node with other inputs."""
    own = graph.node.add()
    own.CopyFrom(node)
    own.name = name or node.name
    own.input[:] = map(str, inputs)


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
    inlined, moved = GraphDef(versions=graph.versions, library=graph.library), dict[Ref, Ref]()

    def place(node: NodeDef, name: str, inputs: Iterable[Ref]) -> None:
        """Adds a node under a name, or the body that it calls."""
        given = [moved.get(ref, ref) for ref in inputs]
        if node.op not in CALLS:
            _add(inlined, node, given, name)
            return
        body, results = function_graph(graph.library, node.attr["f"].func.name)
        view = Graph(body)
        arguments = list(view.nodes)[: len(given)]
        moved.update({Ref(f"{name}/{argument}"): ref for argument, ref in zip(arguments, given, strict=True)})
        for inner in view.topological():
            if inner not in arguments:
                read = (Ref(f"{name}/{ref.node}", ref.output) for ref in view.inputs(inner))
                place(view.nodes[inner], f"{name}/{inner}", read)
        for output, ref in enumerate(results):
            own = Ref(f"{name}/{ref.node}", ref.output)
            moved[Ref(name, output)] = moved.get(own, own)

    for node in graph.node:
        place(node, node.name, data_inputs(node))
    return inlined, moved
