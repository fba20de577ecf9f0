"""Infers the shapes of all tensors of a flat graph with a known batch size, also after loops, branches and lists.

TensorFlow's own inference assigns the outputs of loops, branches, calls and lists of tensors the traced shapes, with an
unknown batch size. Here their bodies are inferred too, and handles (of lists and variables) are followed into them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from tensorflow.core.framework import types_pb2

from graph_passes.analysis.operator_traits import BRANCHES, LOOPS
from graph_passes.ir.call_order import CALLS
from graph_passes.ir.graph import (
    AttrValue,
    GraphDef,
    NodeDef,
    Ref,
    copied,
    data_inputs,
    dtype_attr,
    function_names,
    make_node,
    shape_attr,
)
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.tensorflow_bridge import (
    FunctionDefLibrary,
    Shape,
    constant_value,
    function_graph,
    output_dtypes,
    takes_functions,
)

_HANDLES = frozenset({types_pb2.DT_RESOURCE, types_pb2.DT_VARIANT})
# Op that reads what is behind a handle -> (output that has its shape, dimensions before it).
_READERS = {
    "TensorListGetItem": (0, 0),
    "TensorListPopBack": (1, 0),
    "TensorListStack": (0, 1),
    "ReadVariableOp": (0, 0),
}
# Ops whose first output is the list that they take, with as many elements.
_KEEPING = frozenset({"Identity", "TensorListSetItem"})
_ZEROS = "Fill"
_MOST_ROUNDS = 50
"""The most rounds of inference with new knowledge of loops: each loop after another takes one more."""
_DEEPEST = 8
"""The deepest nesting of calls that is inferred."""

_Given: TypeAlias = tuple[Shape | None, ...]


class CallShapes(NamedTuple):
    """Shapes of a function's arguments or results, and of handles' variables; None is unknown."""

    shapes: _Given
    elements: _Given

    def arguments(self, node: NodeDef) -> CallShapes:
        """Returns the shapes of a node's function arguments, if they are its inputs."""
        return CallShapes(self.shapes[1:], self.elements[1:]) if node.op in BRANCHES else self


def operator_shapes(graph: GraphDef, placeholders: Mapping[str, Sequence[int | None]]) -> dict[Ref, Shape | None]:
    """Returns the shape of every tensor of a flat graph; None is an unknown rank.

    Shapes that depend on values (the rows that a mask leaves, say) stay unknown.

    Args:
        graph: a flat graph.
        placeholders: shapes of fed tensors, with the number of samples.

    Raises:
        PassError: the shapes contradict each other.
    """
    return ShapeInference(graph.library).of(graph, placeholders).shapes


class KnownShapes(NamedTuple):
    """The known shapes of one graph.

    Attributes:
        shapes: see `operator_shapes`.
        elements: handle -> the shape of a list's elements, or of a variable, where it is known.
        lengths: list -> the number of its elements, for lists that loops take or that are asked for it.
    """

    shapes: dict[Ref, Shape | None]
    elements: dict[Ref, Shape]
    lengths: dict[Ref, int]


class ShapeInference:
    """Infers shapes, also through the functions of a library.

    Attributes:
        loops: loop of the graph at hand -> shapes of its results, None for unknown ones; others are inferred.

    Args:
        library: the functions.
    """

    def __init__(self, library: FunctionDefLibrary) -> None:
        self.loops: dict[str, CallShapes | None] = {}
        self._library = library
        self._results: dict[tuple[str, CallShapes], CallShapes] = {}
        self._kept: dict[tuple[str, int], bool] = {}
        self._depth = 0

    def of(
        self,
        graph: GraphDef,
        placeholders: Mapping[str, Sequence[int | None]],
        elements: Mapping[str, Shape] | None = None,
        values: Mapping[Ref, int] | None = None,
        lengths: Mapping[str, int] | None = None,
    ) -> KnownShapes:
        """Returns the shapes of a graph.

        Args:
            graph: a flat graph.
            placeholders: shapes of placeholders.
            elements: shapes of what is behind placeholders that are handles.
            values: of placeholders that are int32 scalars.
            lengths: numbers of elements of placeholders that are lists.

        Raises:
            PassError: the shapes contradict each other.
        """
        asked = [node for node in graph.node if node.op in _READERS or node.op == _ZEROS or takes_functions(node.op)]
        own = {node.name for node in graph.node}
        asking = _with_lengths(graph)
        more: dict[Ref, Shape] = {}
        for _ in range(_MOST_ROUNDS):
            inferred = infer_shapes(_with_shapes(asking, more), placeholders, values or {})
            shapes = {ref: more.get(ref, shape) for ref, shape in inferred.items() if ref.node in own}
            reserved = {name: shape[0] for name in own if (shape := inferred.get(Ref(_length_name(name))))}
            handles = Handles(self, graph, shapes, elements or {}, {**(lengths or {}), **reserved})
            refinements = {
                ref: refined
                for node in asked
                for ref, shape in handles.outputs(node).items()
                if (refined := _refined(shapes.get(ref), shape)) is not None and refined != shapes.get(ref)
            }
            if not refinements:
                break
            more |= refinements
        return KnownShapes(shapes, handles.known(), handles.asked_lengths())

    def of_function(self, graph: GraphDef, given: CallShapes, lengths: Mapping[str, int] | None = None) -> KnownShapes:
        """Infers shapes inside a function for arguments of given shapes; ``graph`` is the `function_graph`."""
        arguments = [node.name for node in graph.node if node.op == "Placeholder"]
        shapes = zip(arguments, given.shapes, strict=False)
        elements = zip(arguments, given.elements, strict=False)
        return self.of(
            graph,
            {name: shape for name, shape in shapes if shape is not None},
            {name: shape for name, shape in elements if shape is not None},
            lengths=lengths,
        )

    def results(self, name: str, given: CallShapes) -> CallShapes | None:
        """Returns the shapes of a function's results for given arguments; None if calls nest too deeply."""
        key = name, given
        if key not in self._results:
            if self._depth == _DEEPEST:
                return None
            self._depth += 1
            try:
                graph, results = function_graph(self._library, name)
                known = self.of_function(graph, given)
            finally:
                self._depth -= 1
            self._results[key] = CallShapes(
                tuple(known.shapes.get(ref) for ref in results), tuple(known.elements.get(ref) for ref in results)
            )
        return self._results[key]

    def call(self, node: NodeDef, given: CallShapes) -> CallShapes | None:
        """Returns the shapes of a loop's, branch's or call's results; None for other nodes that run functions."""
        if not self._depth and node.name in self.loops:
            return self.loops[node.name]
        if node.op in LOOPS:
            body = node.attr["body"].func.name
            return _stable(given, lambda shapes: self.results(body, shapes))
        if node.op in CALLS:
            return self.results(node.attr["f"].func.name, given)
        if node.op not in BRANCHES:
            return None
        sides = [self.results(name, given.arguments(node)) for name in function_names(node)]
        joined = sides[0] if sides else None
        for side in sides[1:]:
            joined = None if joined is None or side is None else _joined(joined, side)
        return joined

    def stable(
        self, body: GraphDef, results: Sequence[Ref], given: CallShapes, lengths: Mapping[str, int]
    ) -> tuple[CallShapes, KnownShapes] | None:
        """Returns the shapes of a loop's variables that all rounds share, and the body's.

        Args:
            body: the `function_graph` of its body.
            results: the body's results.
            given: shapes of what the loop begins with.
            lengths: see `of`.
        """
        known = KnownShapes({}, {}, {})

        def after(shapes: CallShapes) -> CallShapes:
            nonlocal known
            known = self.of_function(body, shapes, lengths)
            return CallShapes(tuple(map(known.shapes.get, results)), tuple(map(known.elements.get, results)))

        stable = _stable(given, after)
        return None if stable is None else (stable, known)

    def keeps_length(self, body: str, index: int) -> bool:
        """Returns whether a loop's body returns a list with as many elements as it takes: it only replaces some."""
        if (body, index) not in self._kept:
            graph, results = function_graph(self._library, body)
            nodes = {node.name: node for node in graph.node}
            ref = results[index]
            while (node := nodes[ref.node]).op in _KEEPING and not _may_grow(node):
                ref = data_inputs(node)[0]
            arguments = [name for name, node in nodes.items() if node.op == "Placeholder"]
            self._kept[body, index] = ref.node in arguments and arguments.index(ref.node) == index
        return self._kept[body, index]


class Handles:
    """Shapes behind a graph's handles, and of the results of loops, branches and calls.

    Args:
        inference: of the graph's library.
        graph: a flat graph.
        shapes: of its tensors, as far as known.
        elements: shapes behind placeholders that are handles.
        lengths: node that reserves a list, or placeholder -> the number of its elements, as far as known.
    """

    def __init__(
        self,
        inference: ShapeInference,
        graph: GraphDef,
        shapes: Mapping[Ref, Shape | None],
        elements: Mapping[str, Shape],
        lengths: Mapping[str, int | None] | None = None,
    ) -> None:
        self._inference = inference
        self._lengths = lengths or {}
        self._nodes = {node.name: node for node in graph.node}
        self._shapes = shapes
        self._found: dict[Ref, Shape | None] = {Ref(name): shape for name, shape in elements.items()}
        self._called: dict[str, CallShapes | None] = {}

    def known(self) -> dict[Ref, Shape]:
        """Returns all known shapes behind handles."""
        for node in self._nodes.values():
            for output, dtype in enumerate(output_dtypes(node) if _may_pass_on_handles(node) else ()):
                if dtype in _HANDLES:
                    self.element(Ref(node.name, output))
        return {ref: shape for ref, shape in self._found.items() if shape is not None}

    def asked_lengths(self) -> dict[Ref, int]:
        """Returns the known numbers of elements of lists that loops take, or that are asked for it."""
        asking = (node for node in self._nodes.values() if node.op in LOOPS or node.op == "TensorListLength")
        lengths = {ref: self._length(ref) for node in asking for ref in data_inputs(node)}
        return {ref: length for ref, length in lengths.items() if length is not None}

    def outputs(self, node: NodeDef) -> dict[Ref, Shape]:
        """Returns the known output shapes of a reader of a handle, or of a node that runs functions."""
        if node.op == _ZEROS:
            # The gradient of a variable that a loop reads begins with zeros of its shape.
            origin = self._nodes[data_inputs(node)[0].node]
            shape = self.element(data_inputs(origin)[0]) if origin.op == "VariableShape" else None
            return {} if shape is None else {Ref(node.name): shape}
        if node.op in _READERS:
            output, before = _READERS[node.op]
            element = self.element(data_inputs(node)[0])
            ref = Ref(node.name, output)
            if element is None:
                return {}
            shape = self._shapes.get(ref)
            outer = shape[:before] if shape else (None,) * before
            if outer == (None,):
                outer = (self._length(data_inputs(node)[0]),)
            return {ref: (*outer, *element)}
        called = self._call(node)
        if called is None:
            return {}
        dtypes = output_dtypes(node)
        return {
            Ref(node.name, output): shape
            for output, (shape, dtype) in enumerate(zip(called.shapes, dtypes, strict=True))
            if shape is not None and dtype not in _HANDLES
        }

    def _call(self, node: NodeDef) -> CallShapes | None:
        if node.name not in self._called:
            self._called[node.name] = None  # unknown if asked recursively
            given = data_inputs(node)
            shapes = tuple(self._shapes.get(ref) for ref in given)
            self._called[node.name] = self._inference.call(node, CallShapes(shapes, tuple(map(self.element, given))))
        return self._called[node.name]

    def element(self, ref: Ref) -> Shape | None:
        """Returns the shape behind a handle; None if unknown, and for other tensors."""
        if ref not in self._found:
            self._found[ref] = None
            self._found[ref] = self._element(ref)
        return self._found[ref]

    def _element(self, ref: Ref) -> Shape | None:
        node = self._nodes[ref.node]
        given = data_inputs(node)
        match node.op:
            case "Identity" | "TensorListResize" | "TensorListPopBack":
                return self.element(given[0]) if ref.output == 0 else None
            case "TensorListFromTensor":
                shape = self._shapes.get(given[0])
                return None if shape is None else shape[1:]
            case "TensorListSetItem" | "TensorListPushBack":
                item, others = self._shapes.get(given[-1]), self.element(given[0])
                return item if others is None else _join(item, others)
            case "TensorListReserve" | "EmptyTensorList":
                return self._declared(given[0])
            case "VarHandleOp":
                dims = node.attr["shape"].shape
                return None if dims.unknown_rank else tuple(dim.size if dim.size >= 0 else None for dim in dims.dim)
        if takes_functions(node.op):
            called = self._call(node)
            return None if called is None else called.elements[ref.output]
        return None

    def _length(self, ref: Ref) -> int | None:
        """Returns the number of a list's elements, where none is added after it was made."""
        node = self._nodes[ref.node]
        given = data_inputs(node)
        if node.op in ("TensorListReserve", "Placeholder"):
            return self._lengths.get(node.name)
        if node.op == "TensorListFromTensor":
            shape = self._shapes.get(given[0])
            return shape[0] if shape else None
        keeps = node.op in LOOPS and self._inference.keeps_length(node.attr["body"].func.name, ref.output)
        if keeps or (node.op in _KEEPING and not _may_grow(node)):
            return self._length(given[ref.output])
        return None

    def _declared(self, ref: Ref) -> Shape | None:
        """Returns the shape that a list was made for, if it is constant and complete."""
        node = self._nodes[ref.node]
        sizes = constant_value(node) if node.op == "Const" else None
        return None if sizes is None or sizes.ndim != 1 or (sizes < 0).any() else tuple(map(int, sizes))


def _stable(given: CallShapes, after: Callable[[CallShapes], CallShapes | None]) -> CallShapes | None:
    """Returns the shapes that stay the same from round to round; ``after`` has those after a round."""
    for _ in range(_MOST_ROUNDS):
        results = after(given)
        if results is None:
            return None
        # A list that is still empty at first has the elements that the body gives it.
        elements = tuple(
            now if before is None else _join(before, now)
            for before, now in zip(given.elements, results.elements, strict=True)
        )
        joined = CallShapes(_joined(given, results).shapes, elements)
        if joined == given:
            return joined
        given = joined
    return None


def _may_pass_on_handles(node: NodeDef) -> bool:
    return node.op in ("Identity", "VarHandleOp") or "TensorList" in node.op or takes_functions(node.op)


def _may_grow(node: NodeDef) -> bool:
    return node.attr["resize_if_index_out_of_bounds"].b if "resize_if_index_out_of_bounds" in node.attr else False


def _refined(known: Shape | None, more: Shape | None) -> Shape | None:
    """Merges two known shapes; None if they contradict each other or nothing is known."""
    if known is None or more is None:
        return more if known is None else known
    if len(known) != len(more) or any(
        None not in pair and pair[0] != pair[1] for pair in zip(known, more, strict=True)
    ):
        return None
    return tuple(other if one is None else one for one, other in zip(known, more, strict=True))


def _join(one: Shape | None, other: Shape | None) -> Shape | None:
    """Returns the common part of two shapes."""
    if one is None or other is None or len(one) != len(other):
        return None
    return tuple(first if first == second else None for first, second in zip(one, other, strict=True))


def _joined(one: CallShapes, other: CallShapes) -> CallShapes:
    return CallShapes(
        tuple(map(_join, one.shapes, other.shapes)),
        tuple(map(_join, one.elements, other.elements)),
    )


def _name(ref: Ref) -> str:
    return f"{ref.node}/shaped{ref.output}"


def _length_name(name: str) -> str:
    return f"{name}/length"


def _with_lengths(graph: GraphDef) -> GraphDef:
    """Returns the graph with vectors that are as long as lists are when they are made."""
    reserved = [node for node in graph.node if node.op == "TensorListReserve"]
    if not reserved:
        return graph
    extended = copied(graph)
    int32 = {"T": dtype_attr(types_pb2.DT_INT32)}
    for node in reserved:
        number, dims = data_inputs(node)[1], f"{_length_name(node.name)}/dims"
        extended.node.append(make_node(dims, "Pack", [number], attrs={**int32, "N": AttrValue(i=1)}))
        extended.node.append(make_node(_length_name(node.name), "Fill", [Ref(dims), number], attrs=int32))
    return extended


def _with_shapes(graph: GraphDef, more: Mapping[Ref, Shape]) -> GraphDef:
    """Returns the graph with nodes that tell the shapes of some tensors to their readers."""
    if not more:
        return graph
    extended = copied(graph)
    nodes = {node.name: node for node in graph.node}
    for node in extended.node:
        for index, text in enumerate(node.input):
            if not text.startswith("^") and (ref := Ref.parse(text)) in more:
                node.input[index] = _name(ref)
    for ref, shape in more.items():
        attrs = {"T": dtype_attr(output_dtypes(nodes[ref.node])[ref.output]), "shape": shape_attr(shape)}
        extended.node.append(make_node(_name(ref), "EnsureShape", [ref], attrs=attrs))
    return extended
