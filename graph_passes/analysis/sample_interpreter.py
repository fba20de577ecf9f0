"""Interprets a graph node by node: how each treats the samples of a slice."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.analysis.operator_shapes import CallShapes, KnownShapes, ShapeInference
from graph_passes.analysis.operator_traits import ASKING, ELEMENTWISE, draws_numbers
from graph_passes.analysis.sample_lengths import with_lengths
from graph_passes.analysis.shape_values import ShapeValues
from graph_passes.errors import PassError
from graph_passes.ir.graph import COUNTABLE_DTYPES, Graph, NodeDef, Ref, in_order
from graph_passes.ir.spreads import CONSTANT, Coupling, Spread, all_shared, common_outer, degree_of
from graph_passes.ir.tensorflow_bridge import Shape, function_graph, is_stateful, output_dtypes

Rule: TypeAlias = "Callable[[Interpreter, NodeDef], Spread | Sequence[Spread] | None]"
_SOME_LENGTH = 48
"""Assumed length of an axis of unknown length: growth with the samples doesn't depend on it."""
_LIKE_INPUTS = ELEMENTWISE | {"BiasAdd"}
"""Ops whose output has the rows of their inputs, even where shape inference doesn't know how many these are."""
_DEEPEST = 8
"""The deepest nesting of calls that is interpreted."""


class Whole(NamedTuple):
    """A tensor that a node of the loss, or of a metric, must read of the whole batch: it is no sum or mean there.

    Attributes:
        node: the reader.
        argument: the index of its input.
        ref: the tensor; computed from batch inputs alone.
    """

    node: str
    argument: int
    ref: Ref


class Body(NamedTuple):
    """A function, and its inner shapes, for two numbers of samples.

    Attributes:
        graph: producers first.
        arguments: its placeholders.
        results: what it gives.
        known: shapes of its tensors, and of what is behind handles.
    """

    graph: Graph
    arguments: tuple[Ref, ...]
    results: tuple[Ref, ...]
    known: Sequence[KnownShapes]


class Interpreter:
    """Finds the spreads of one graph's tensors.

    Args:
        graph: a flat graph, producers first.
        rules: op -> its effect on its inputs' spreads; None if it treats each sample by itself.
        samples: two numbers of samples of a slice.
        known: shapes of its tensors and of lists' elements, for each of them.
        scalars: values of some placeholders, for each of them.
        loss_nodes: the nodes that serve only the loss and metrics, which may read statistics of the whole batch.
        open_shapes: ``Shape`` nodes that can only be computed where their tensor is.
        inference: of the graph's library.
        depth: of calls.

    Attributes:
        inference: tells shapes inside functions.
        sizes: the two numbers of samples.
        spreads: those found so far.
        couplings: (node, what it does), in the order of the graph.
        places: where elements of lists with one for each sample are taken from and put to.
        wholes: see `Whole`.
    """

    def __init__(
        self,
        graph: Graph,
        rules: Mapping[str, Rule],
        samples: tuple[int, int],
        known: Sequence[KnownShapes],
        scalars: Sequence[Mapping[Ref, float]],
        loss_nodes: Container[str] = (),
        open_shapes: Container[str] = (),
        *,
        inference: ShapeInference | None = None,
        depth: int = 0,
    ) -> None:
        self.graph, self._rules, self.sizes = graph, rules, samples
        self._known = [own._replace(shapes=dict(own.shapes)) for own in known]
        self._shapes = [own.shapes for own in self._known]
        self.inference = inference or ShapeInference(graph.graph.library)
        self._loss_nodes, self._open_shapes, self._depth = loss_nodes, open_shapes, depth
        constants: dict[str, np.ndarray | None] = {}

        def values() -> list[ShapeValues]:
            pairs = zip(known, scalars, strict=True)
            return [ShapeValues(graph, own.shapes, given, constants) for own, given in pairs]

        self._values = self._supposed = values()
        if any(None in (shape or ()) for shape in known[0].shapes.values()):
            self._supposed = values()
        self._dtypes: dict[str, list[int]] = {}
        self.spreads: dict[Ref, Spread] = {}
        self.couplings: list[tuple[str, Coupling]] = []
        self.places: set[Ref] = set()
        self.wholes: list[Whole] = []

    def run(self, given: Mapping[Ref, Spread]) -> None:
        """Interprets all nodes; ``given`` are the spreads of placeholders."""
        self.spreads |= given
        for node in self.graph:
            self._evaluate(node)
            if Ref(node.name) in given:
                continue
            for output, spread in enumerate(with_lengths(self, node, self._outputs(node))):
                ref = Ref(node.name, output)
                self.spreads[ref] = spread._replace(outer=self._outer(ref, spread))

    def _outputs(self, node: NodeDef) -> list[Spread]:
        count = len(self.dtypes(node.name))
        if node.op in ("Const", "Placeholder"):
            return [CONSTANT] * count
        numbers = self.numbers(Ref(node.name))
        if numbers is not None and count == 1 and numbers[0].shape == numbers[1].shape:
            known = all(self.of(ref).known for ref in self.graph.inputs(node.name))
            known |= node.op == "Shape" and not np.isnan(numbers[0]).any()
            if np.isnan(numbers[0]).any() and any(spread.partial for spread in self.inputs(node)):
                return [Spread(varies=True, degree=1, known=known)]  # the number of rows that a mask leaves
            if np.isnan(numbers[0]).any() and any(spread.lengths for spread in self.inputs(node)):
                return [Spread(varies=True, linear=False, known=known)]
            decided = node.op not in ASKING and any(spread.decides for spread in self.inputs(node))
            if np.isnan(numbers[0]).any() and not decided:
                numbers = self._numbers(self._supposed, Ref(node.name)) or numbers
            if np.isnan(numbers[0]).any() and any(spread.degree is None for spread in self.inputs(node)):
                return [Spread(degree=None, known=known)]  # of lengths that nobody knows, perhaps the slice's own
            if not np.isnan(numbers[0]).any() or node.op in ASKING:
                return [Spread(degree=degree_of(*numbers, self.sizes[1] / self.sizes[0]), known=known)]
        rule = self._rules.get(node.op)
        if rule is not None:
            by_rule = rule(self, node)
            if by_rule is not None:
                return [by_rule] * count if isinstance(by_rule, Spread) else list(by_rule)
        return self.generic(node)

    def _outer(self, ref: Ref, spread: Spread) -> int | None:
        """Returns the parts of a tensor's batch axis, as far as its length allows them."""
        rows = self.rows(ref)
        if spread.axis is None or rows == 1:  # whatever moves such a row, it is the sample in its place from then on
            return 1
        return None if rows is not None and spread.outer and rows % spread.outer else spread.outer

    def _evaluate(self, node: NodeDef) -> None:
        """Evaluates what follows from shapes; an axis with samples of unknown length has one row for each."""
        spread = self.inputs(node)[0] if node.op in ASKING else CONSTANT
        axis = None if spread.partial or spread.one_by_one else spread.axis
        for own, samples in zip(self._values, self.sizes, strict=True):
            own.add(node, axis, samples * (spread.outer or 1))
        if self._supposed is not self._values:
            for own, samples in zip(self._supposed, self.sizes, strict=True):
                own.add(node, axis, samples * (spread.outer or 1), _SOME_LENGTH)
        if node.op == "Reshape" and (sizes := self.numbers(self.graph.inputs(node.name)[1])) is not None:
            for shapes, asked in zip(self._shapes, sizes, strict=True):
                known = shapes.get(Ref(node.name)) or (None,) * asked.size
                told = [int(size) if size >= 0 else None for size in asked]  # Neither -1 nor unknown.
                shapes[Ref(node.name)] = tuple(map(_either, known, told))

    # ---- functions

    def call_shapes(self, refs: Sequence[Ref]) -> tuple[CallShapes, CallShapes]:
        """Returns the known shapes of a call's inputs, for both numbers of samples."""
        few, many = (known.at(refs) for known in self._known)
        return few, many

    def body(self, name: str, few: CallShapes, many: CallShapes) -> Body | None:
        """Returns a function for arguments of some shapes; None if it doesn't fit these, or calls nest too deeply."""
        if self._depth == _DEEPEST:
            return None
        graph, results = function_graph(self.graph.graph.library, name)
        arguments = tuple(Ref(node.name) for node in graph.node if node.op == "Placeholder")
        try:
            known = [self.inference.of_function(graph, given) for given in (few, many)]
        except PassError:
            return None
        return Body(in_order(graph), arguments, results, known)

    def scalars_of(self, body: Body, refs: Sequence[Ref], same: Sequence[bool] = ()) -> list[dict[Ref, float]]:
        """Returns a function's arguments that follow from shapes; ``same`` marks rounds' equal ones."""
        kept = same or [True] * len(refs)
        return [
            {
                inner: float(own.values[ref])
                for inner, ref, known in zip(body.arguments, refs, kept, strict=True)
                if known and ref in own.values and own.values[ref].ndim == 0
            }
            for own in self._values
        ]

    def inside(self, body: Body, given: Sequence[Spread], scalars: Sequence[Mapping[Ref, float]]) -> Interpreter:
        """Interprets a function for arguments of these spreads."""
        interpreter = Interpreter(
            body.graph,
            self._rules,
            self.sizes,
            body.known,
            scalars,
            inference=self.inference,
            depth=self._depth + 1,
        )
        interpreter.run(dict(zip(body.arguments, given, strict=True)))
        return interpreter

    # ---- what rules ask

    def of(self, ref: Ref) -> Spread:
        """Returns a tensor's spread."""
        return self.spreads.get(ref, CONSTANT)

    def inputs(self, node: NodeDef) -> list[Spread]:
        """Returns the spreads of a node's inputs."""
        return [self.of(ref) for ref in self.graph.inputs(node.name)]

    def dtypes(self, name: str) -> list[int]:
        """Returns the dtypes of a node's outputs."""
        if name not in self._dtypes:
            self._dtypes[name] = output_dtypes(self.graph.nodes[name])
        return self._dtypes[name]

    def is_float(self, ref: Ref) -> bool:
        """Returns whether a tensor is of floating-point numbers."""
        return self.dtypes(ref.node)[ref.output] in COUNTABLE_DTYPES

    def is_integer(self, ref: Ref) -> bool:
        """Returns whether a tensor is of integers, as lengths are."""
        return self.dtypes(ref.node)[ref.output] in (types_pb2.DT_INT32, types_pb2.DT_INT64)

    def is_handle(self, ref: Ref) -> bool:
        """Returns whether a tensor is a list of tensors, say."""
        return self.dtypes(ref.node)[ref.output] in (types_pb2.DT_VARIANT, types_pb2.DT_RESOURCE)

    def shapes(self, ref: Ref) -> list[Shape | None]:
        """Returns a tensor's shapes for both numbers of samples."""
        return [shapes.get(ref) for shapes in self._shapes]

    def shape(self, ref: Ref) -> Shape | None:
        """Returns a tensor's shape for the smaller number of samples."""
        return self._shapes[0].get(ref)

    def numbers(self, ref: Ref) -> tuple[np.ndarray, np.ndarray] | None:
        """Returns a value that follows from shapes, for both numbers of samples."""
        return self._numbers(self._values, ref)

    @staticmethod
    def _numbers(values: Sequence[ShapeValues], ref: Ref) -> tuple[np.ndarray, np.ndarray] | None:
        few, many = (own.values.get(ref) for own in values)
        return None if few is None or many is None else (few, many)

    def is_zero(self, ref: Ref) -> bool:
        """Returns whether a tensor follows from shapes, and is zero for both numbers of samples."""
        numbers = self.numbers(ref)
        return numbers is not None and all(not value.any() for value in numbers)

    def integers(self, ref: Ref) -> list[int] | None:
        """Returns the value of a small tensor that is the same for all slices."""
        numbers = self.numbers(ref)
        if numbers is None or numbers[0].shape != numbers[1].shape or not np.array_equal(*numbers):
            return None
        return [int(number) for number in numbers[0].ravel()]

    def axes_of(self, ref: Ref, rank: int) -> list[int] | None:
        """Returns the axes that a constant input names, counted from the first."""
        axes = self.integers(ref)
        return None if axes is None else [axis % rank if rank else 0 for axis in axes]

    def growing(self, ref: Ref) -> list[int]:
        """Returns the axes of a tensor whose lengths are proportional to the number of samples."""
        few, many = self.shapes(ref)
        return _growing(few, many, self.sizes)

    def differing(self, ref: Ref) -> list[int]:
        """Returns the axes of a tensor whose lengths depend on the number of samples, in whatever way."""
        return _differing(*self.shapes(ref))

    def grows_once(self, ref: Ref) -> bool:
        """Returns whether one axis of a tensor is proportional to the number of samples, and no other depends on it."""
        return grows_once(self.shapes(ref), self.sizes)

    @property
    def samples(self) -> int:
        """The smaller number of samples."""
        return self.sizes[0]

    def rows(self, ref: Ref) -> int | None:
        """Returns the rows of each sample in a tensor with a batch axis; None where they aren't known."""
        shape = self.shape(ref) or ()
        lengths = {shape[axis] for axis in self.growing(ref)}
        length = lengths.pop() if len(lengths) == 1 else None
        return length // self.samples if length and length % self.samples == 0 else None

    def outer(self, node: NodeDef, output: int, inputs: Sequence[tuple[Ref, Spread]]) -> int | None:
        """Returns the parts of the batch axis of an output whose rows are computed from rows at the same places."""
        ref = Ref(node.name, output)
        rows, of_list = self.rows(ref), self.is_handle(ref)
        moved = [(source, spread) for source, spread in inputs if spread.axis is not None]
        like = rows is None and node.op in _LIKE_INPUTS
        same = [own for ref, own in moved if (like or self.rows(ref) == rows) and self.is_handle(ref) == of_list]
        alike = [spread for spread in same if spread.varies]
        if not alike and any(spread.varies for _, spread in moved):
            return None
        outer = common_outer(alike)
        others = {spread.outer for spread in same if not spread.varies} - {0, None}
        if rows != 1 and outer is None and len({spread.outer for spread in alike} - {0, None}) > 1:
            self.couple(node, Coupling.TOGETHER)
        elif outer and others - {outer}:
            self.couple(node, Coupling.PLACE)
        return outer if alike or len(others) != 1 else others.pop()

    def batch_axis(self, node: NodeDef, output: int, inputs: Sequence[tuple[Ref, Spread]]) -> int | None:
        """Returns the axis with the samples of an output that is computed from others; two such axes are a coupling."""
        ref = Ref(node.name, output)
        axes = self.growing(ref)
        rows = [
            (source, spread.axis)
            for source, spread in inputs
            if spread.axis is not None and not self.is_handle(source)  # the axis of a list is that of its elements
        ]
        if len(axes) > 1:
            same = [axis for axis in axes if any(axis == own for _, own in rows)]
            if self.is_float(ref) and any(spread.varies for _, spread in inputs):
                self.couple(node, Coupling.TOGETHER)
            return (same or axes)[0]
        single = [axis for _, axis in rows if axis < 0]
        if axes and single and any(spread.varies for _, spread in inputs):
            self.couple(node, Coupling.TOGETHER)  # one sample beside all others
        if axes or single:
            return (axes or single)[0]
        shape = self.shape(ref)
        for source, axis in rows:
            before = self.shape(source)
            if shape is None or before is None:
                return axis
            if len(shape) == len(before) and shape[axis] is None:
                return axis
            open_axes = [number for number, size in enumerate(shape) if size is None]
            if before[axis] is None and len(open_axes) == 1:
                return open_axes[0]
        return None

    def lead(self, ref: Ref) -> int | None:
        """Returns the number of places before the samples' own in the order of a tensor's elements."""
        spread, shape = self.of(ref), self.shape(ref)
        if spread.axis is None or spread.one_by_one or shape is None or not spread.outer:
            return None
        lead = spread.outer
        for size in shape[: spread.axis]:
            if size is None:
                return None
            lead *= size
        return lead

    def couple(self, node: NodeDef, coupling: Coupling) -> None:
        """Notes what a node does."""
        self.couplings.append((node.name, coupling))

    def couple_size(self, node: NodeDef) -> None:
        """Notes that samples depend on the size of their slice, of the node where they begin to."""
        before: str | None = node.name
        while before is not None:
            name = before
            sized = (ref for ref in self.graph.inputs(name) if self.of(ref).axis is not None and self.of(ref).degree)
            before = next((ref.node for ref in sized), None)
        self.couple(self.graph.nodes[name], Coupling.BATCH_SIZE)

    def in_loss(self, node: NodeDef) -> bool:
        """Returns whether a node serves only the loss and metrics."""
        return node.name in self._loss_nodes

    def _asks_open_shapes(self, ref: Ref) -> bool:
        """Returns whether a tensor depends on a shape that can only be read from the tensor itself."""
        asked = [Ref(node.name) for node in self.graph if node.op == "Shape"]
        body = self.graph.ancestors([ref], asked, control=False)
        return any(own.node in self._open_shapes for name in body for own in self.graph.inputs(name))

    def fixed(self, node: NodeDef, index: int, *, rows: bool) -> Spread:
        """Returns the spread of an input that isn't used linearly: the whole batch's, if known before the step.

        Args:
            node: the reader.
            index: which input.
            rows: whether the reader combines it with samples.
        """
        ref = self.graph.inputs(node.name)[index]
        spread = self.of(ref)
        if spread.axis is not None or spread.constant or not self.is_float(ref):
            return spread
        if spread.known and self.in_loss(node) and not self._asks_open_shapes(ref):
            self.wholes.append(Whole(node.name, index, ref))
            return CONSTANT
        if spread.varies or not spread.linear:
            together = Coupling.MICRO_BATCH if spread.shared else Coupling.TOGETHER
            while self.of(ref).extreme:  # What takes the extreme of samples couples them.
                node = self.graph.nodes[ref.node]
                ref = next((own for own in self.graph.inputs(node.name) if self.of(own).extreme), Ref(""))
            self.couple(node, together if rows or not self.in_loss(node) else Coupling.NOT_LINEAR)
        else:
            self.couple(node, Coupling.BATCH_SIZE)
        return spread._replace(degree=0, linear=False)

    def choice(self, node: NodeDef) -> Spread:
        """Returns the spread of the first input, by which a node chooses: the whole batch's, if that can be known."""
        ref = self.graph.inputs(node.name)[0]
        spread = self.of(ref)
        if spread.axis is not None or not (spread.varies and spread.known and self.in_loss(node)):
            return spread
        if self._asks_open_shapes(ref):
            return spread
        self.wholes.append(Whole(node.name, 0, ref))
        return CONSTANT

    def by_sample(self, node: NodeDef, used: Sequence[tuple[Ref, Spread]], degree: int | None = 0) -> Spread:
        """Returns the spread of a tensor with a batch axis that is computed from others sample by sample."""
        axis = self.batch_axis(node, 0, used)
        if degree is None:
            self.couple_size(node)
        spreads = [spread for _, spread in used]
        return Spread(
            axis=axis,
            outer=self.outer(node, 0, used),
            varies=any(spread.varies for spread in spreads),
            degree=degree or 0,
            known=all(spread.known for spread in spreads),
            place=any(spread.place for spread in spreads),
            partial=any(spread.partial for spread in spreads),
        )

    def generic(self, node: NodeDef) -> list[Spread]:
        """Returns the default spreads of an operation: it treats each sample by itself."""
        refs = self.graph.inputs(node.name)
        spreads = self.inputs(node)
        has_rows = any(spread.axis is not None and spread.varies for spread in spreads)
        used = [(ref, self.fixed(node, index, rows=has_rows)) for index, ref in enumerate(refs)]
        if draws_numbers(node) and (is_stateful(node.op) or self.growing(Ref(node.name))):
            self.couple(node, Coupling.DRAWS)
        if any(s.axis is not None and s.degree != 0 and self.is_float(ref) for ref, s in used):
            self.couple_size(node)
        known = all(spread.known for _, spread in used) and not draws_numbers(node)
        given = any(spread.varies for _, spread in used)
        outputs = []
        for output in range(len(self.dtypes(node.name))):
            ref = Ref(node.name, output)
            axis = self.batch_axis(node, output, used)
            varies = given or (axis is not None and draws_numbers(node))
            place = any(spread.place for _, spread in used)
            if place and self.is_float(ref):
                self.couple(node, Coupling.PLACE)
                place = False
            outer = self.outer(node, output, used)
            collapsed = axis is None and has_rows
            linear = not collapsed and (axis is not None or not varies)
            partial = axis is not None and any(spread.partial for _, spread in used)
            shared = axis is None and all_shared(spread for _, spread in used)
            sized = axis is None and not self.is_float(ref) and any(s.axis is None and s.degree != 0 for _, s in used)
            outputs.append(Spread(axis, outer, varies, None if sized else 0, linear, known, place, partial, shared))
        return outputs

    def unordered(self, node: NodeDef) -> list[Spread]:
        """Returns the default spreads of an operation that puts rows where data say, or of which nothing is known."""
        return [spread._replace(outer=None) for spread in self.generic(node)]


def _either(known: int | None, told: int | None) -> int | None:
    return told if known is None else known


def _growing(few: Shape | None, many: Shape | None, samples: tuple[int, int]) -> list[int]:
    """Returns the axes whose lengths are proportional to the number of samples."""
    return [axis for axis, one, other in _pairs(few, many) if one and other and one * samples[1] == other * samples[0]]


def _differing(few: Shape | None, many: Shape | None) -> list[int]:
    """Returns the axes whose lengths differ."""
    return [axis for axis, one, other in _pairs(few, many) if one != other]


def _pairs(few: Shape | None, many: Shape | None) -> Iterator[tuple[int, int | None, int | None]]:
    """Yields the lengths of each axis of two shapes; nothing if their ranks aren't known to be the same."""
    if few is not None and many is not None and len(few) == len(many):
        yield from zip(itertools.count(), few, many)


def grows_once(shapes: Sequence[Shape | None], sizes: tuple[int, int]) -> bool:
    """Returns whether one axis alone depends on the number of samples, to which it is proportional."""
    few, many = shapes
    axes = _differing(few, many)
    return len(axes) == 1 and axes == _growing(few, many, sizes)
