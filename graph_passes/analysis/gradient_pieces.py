"""Gradients of a graph piece by piece: equal pieces are differentiated once.

    x -> layer a -> y -> layer b -> z,  dz   becomes   b' : y, dz -> dy,   a' : x, dy -> dx

A graph is cut where one tensor alone carries what is differentiated. TensorFlow makes each gradient in Python, which
takes longer than copying it by far.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tensorflow.core.framework import types_pb2

from graph_passes.ir.graph import (
    Graph,
    GraphDef,
    Names,
    NodeDef,
    Ref,
    copied,
    dtype_attr,
    make_node,
    shape_attr,
)
from graph_passes.ir.tensorflow_bridge import (
    Gradient,
    Shape,
    add_gradients,
    gradients_of_twin,
    output_dtypes,
    takes_functions,
)
from graph_passes.ir.tensorflow_private import shapes_of_outputs
from graph_passes.ir.twin import Twin

_TRAINABLE = frozenset(
    {
        *(types_pb2.DT_HALF, types_pb2.DT_BFLOAT16, types_pb2.DT_FLOAT, types_pb2.DT_DOUBLE),
        *(types_pb2.DT_COMPLEX64, types_pb2.DT_COMPLEX128, types_pb2.DT_RESOURCE, types_pb2.DT_VARIANT),
    }
)
"""Dtypes of tensors through which gradients flow, as in TensorFlow."""

_OWN_GRADIENT = "_gradient_op_type"
"""Attribute of an operator with a gradient of its own."""
_ANYWHERE = frozenset({"Const", "Placeholder"})
"""Operators that each piece that reads them has for itself."""

_Outputs = Sequence[tuple[Ref, Ref]]
_Shapes = Mapping[Ref, Shape | None]


class _Cut(NamedTuple):
    """A place to cut: behind node ``number``, where ``crossing`` alone carries gradients."""

    number: int
    crossing: Ref | None


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A part of a graph that is differentiated by itself.

    Attributes:
        graph: its nodes, and placeholders for tensors from outside.
        outside: name of a placeholder -> the tensor of the whole graph; that of the arriving gradient is missing.
        outputs: pairs of an output and the tensor that holds its gradient; last the tensor that leaves the piece.
        sources: tensors to differentiate with respect to; first the one that enters it, if one does.
    """

    graph: GraphDef
    outside: Mapping[str, Ref]
    outputs: _Outputs
    sources: Sequence[Ref]

    @functools.cached_property
    def twin(self) -> Twin:
        """The graph's twin."""
        return Twin(self.graph)

    @property
    def key(self) -> tuple[bytes, tuple[Ref, ...]]:
        """What equal pieces share: the twin, and the outputs and sources in it."""
        refs = (*itertools.chain.from_iterable(self.outputs), *self.sources)
        return self.twin.serialized, tuple(map(self.twin.of, refs))

    def shapes(self) -> list[Shape | None]:
        """Returns the static shapes of its tensors, in the order of the graph."""
        shapes = shapes_of_outputs(self.twin.serialized)
        return [shape for node in self.graph.node for shape in shapes[self.twin.name(node.name)]]


def gradients_by_pieces(
    serialized: bytes, outputs: tuple[tuple[Ref, Ref], ...], sources: tuple[Ref, ...]
) -> tuple[GraphDef, tuple[Gradient | None, ...]]:
    """Extends a graph by the gradients of its outputs, as `add_gradients` does; it is for ``differentiate`` there.

    A piece ends where all gradients go through one tensor, so that each sum of gradients has the summands that it has
    in the whole graph, in their order. What doesn't repeat is differentiated at once.

    Args:
        serialized: the twin of a flat graph, with nodes n0, n1, ...
        outputs: pairs of an output and the tensor (of the same shape) that holds the gradient with respect to it.
        sources: tensors to differentiate with respect to.

    Returns:
        The extended graph and, for each source, its gradient (None when no output depends on it differentiably).
    """
    graph = GraphDef.FromString(serialized)
    view = Graph(graph)
    cuts = _cuts(view, outputs, sources)
    if cuts:
        of_nodes = shapes_of_outputs(serialized).items()
        shapes = {Ref(name, index): shape for name, own in of_nodes for index, shape in enumerate(own)}
        cuts = _beside_repeated(cuts, _pieces(view, shapes, outputs, sources, cuts))
    if cuts:
        extended = _joined(view, shapes, outputs, sources, cuts)
        if extended is not None:
            return extended
    return gradients_of_twin(serialized, outputs, sources)


def _cuts(view: Graph, outputs: _Outputs, sources: Sequence[Ref]) -> list[_Cut]:
    """Returns where a graph can be cut."""
    given, ends = set(sources), {output for output, _ in outputs}
    if given & ends or any(view.nodes[ref.node].op != "Placeholder" for ref in sources):
        return []
    for number, node in enumerate(view):
        if takes_functions(node.op) or _OWN_GRADIENT in node.attr:
            return []  # Its gradient changes it, or is the user's own.
        if any(view.position[ref.node] > number for ref in view.inputs(node.name)):
            return []
    dtypes = {node.name: output_dtypes(node) for node in view}
    reached: set[str] = set()

    def carries(ref: Ref) -> bool:
        return ref in given or (ref.node in reached and dtypes[ref.node][ref.output] in _TRAINABLE)

    for node in view:
        if node.op != "StopGradient" and any(map(carries, view.inputs(node.name))):
            reached.add(node.name)
    first: dict[Ref, int] = {}
    last: dict[Ref, int] = {}
    needed = {ref.node for ref in ends}
    for number, node in reversed(list(enumerate(view))):
        if node.name in needed and node.name in reached:
            for ref in filter(carries, view.inputs(node.name)):
                needed.add(ref.node)
                first[ref] = number
                last.setdefault(ref, number)
    begun: dict[int, list[Ref]] = collections.defaultdict(list)
    ended: dict[int, list[Ref]] = collections.defaultdict(list)
    for ref, number in last.items():
        # A source is outside of all pieces, but only one of them may use it.
        begun[first[ref] if ref in given else view.position[ref.node]].append(ref)
        ended[number].append(ref)
    # TensorFlow begins with the outputs that no other one depends on, all at once: they are in one piece.
    within = {ref.node for ref in last}
    leaves = [view.position[ref.node] for ref in ends if ref.node in reached and ref.node not in within]
    cuts: list[_Cut] = []
    crossing: set[Ref] = set()
    for number in range(min(leaves, default=0)):
        crossing.update(begun[number])
        crossing.difference_update(ended[number])
        if len(crossing) == 1:
            (ref,) = crossing
            if ref not in given and ref not in ends and (not cuts or cuts[-1].crossing != ref):
                cuts.append(_Cut(number, ref))
    return cuts


def _beside_repeated(cuts: Sequence[_Cut], pieces: Sequence[_Piece]) -> list[_Cut]:
    """Returns the cuts beside pieces that occur again; the others stay together, since each has its costs."""
    counts = collections.Counter(piece.key for piece in pieces)
    again = [counts[piece.key] > 1 for piece in pieces]
    return [cut for cut, before, behind in zip(cuts, again, again[1:], strict=False) if before or behind]


def _pieces(
    view: Graph, shapes: _Shapes, outputs: _Outputs, sources: Sequence[Ref], cuts: Sequence[_Cut]
) -> list[_Piece]:
    """Returns the pieces between cuts, in the order of the graph."""
    names = Names(view.nodes)
    pieces = []
    begin, entering = -1, None
    for end, leaving in [*cuts, _Cut(len(view.nodes), None)]:
        there = [pair for pair in outputs if begin < view.position[pair[0].node] <= end]
        pieces.append(_piece(view, shapes, names, there, sources, begin, entering, leaving))
        begin, entering = end, leaving
    return pieces


def _piece(
    view: Graph,
    shapes: _Shapes,
    names: Names,
    outputs: _Outputs,
    sources: Sequence[Ref],
    begin: int,
    entering: Ref | None,
    leaving: Ref | None,
) -> _Piece:
    """Returns what computes ``outputs`` and ``leaving`` behind node number ``begin``."""
    here: set[str] = set()
    outside: dict[Ref, str] = {}
    pending = [*itertools.chain.from_iterable(outputs), *([] if leaving is None else [leaving])]
    while pending:
        ref = pending.pop()
        if ref.node in here or ref in outside:
            continue
        if ref != entering and (view.position[ref.node] > begin or view.nodes[ref.node].op in _ANYWHERE):
            here.add(ref.node)
            pending += view.inputs(ref.node)
        else:
            outside[ref] = names.fresh(f"outside/{ref.node}_{ref.output}")

    def placeholder(name: str, ref: Ref) -> NodeDef:
        attrs = {"dtype": dtype_attr(output_dtypes(view.nodes[ref.node])[ref.output]), "shape": shape_attr(shapes[ref])}
        return make_node(name, "Placeholder", attrs=attrs)

    piece = GraphDef(versions=view.graph.versions)
    ordered = sorted(outside, key=lambda ref: (view.position[ref.node], ref.output))
    piece.node.extend(placeholder(outside[ref], ref) for ref in ordered)
    for name in view.ordered(here):
        node = piece.node.add()
        node.CopyFrom(view.nodes[name])
        node.input[:] = [outside.get(ref) or str(ref) for ref in view.inputs(name)]
    pairs = list(outputs)
    if leaving is not None:
        arriving = names.fresh(f"gradient_of/{leaving.node}_{leaving.output}")
        piece.node.append(placeholder(arriving, leaving))
        pairs.append((leaving, Ref(arriving)))
    entrances = [] if entering is None else [Ref(outside[entering])]
    used = [ref for ref in sources if ref.node in here]
    return _Piece(piece, {name: ref for ref, name in outside.items()}, pairs, [*entrances, *used])


def _joined(
    view: Graph, shapes: _Shapes, outputs: _Outputs, sources: Sequence[Ref], cuts: Sequence[_Cut]
) -> tuple[GraphDef, tuple[Gradient | None, ...]] | None:
    """Returns the result of `gradients_by_pieces`; None if a piece depends on its surroundings."""
    extended, names = copied(view.graph), Names(view.nodes)
    gradients: dict[Ref, Gradient] = {}
    inferred: dict[object, list[Shape | None]] = {}
    arriving: Gradient | None = None
    for piece in reversed(_pieces(view, shapes, outputs, sources, cuts)):
        if piece.key not in inferred:
            inferred[piece.key] = piece.shapes()
        refs = (Ref(node.name, index) for node in piece.graph.node for index in range(len(output_dtypes(node))))
        if any(shapes.get(ref, shape) != shape for ref, shape in zip(refs, inferred[piece.key], strict=True)):
            return None  # A length is computed elsewhere.
        part, of_sources = add_gradients(piece.graph, piece.outputs, piece.sources)
        there = dict(piece.outside)
        if arriving is not None:
            name = piece.outputs[-1][1].node
            # TensorFlow begins with an Identity of it.
            begins = [node.name for node in part.node if node.op == "Identity" and list(node.input) == [name]]
            there |= dict.fromkeys([name, *begins], arriving.dense)
        of_piece = _added(extended, names, piece, part, there, of_sources)
        used = piece.sources
        if piece.sources and piece.sources[0].node in piece.outside:  # It is what enters the piece.
            arriving, used = of_piece.pop(0), piece.sources[1:]
            if arriving is None or arriving.slices is not None:
                return None  # Outputs before it may have gradients; or the operator before it would take the rows.
        gradients |= {ref: each for ref, each in zip(used, of_piece, strict=True) if each is not None}
    return extended, tuple(gradients.get(source) for source in sources)


def _added(
    extended: GraphDef,
    names: Names,
    piece: _Piece,
    part: GraphDef,
    outside: Mapping[str, Ref],
    gradients: Sequence[Gradient | None],
) -> list[Gradient | None]:
    """Adds what differentiates a piece to the whole graph, in place; returns the gradients there.

    Args:
        extended: the whole graph.
        names: its names.
        piece: the piece.
        part: the piece's graph with gradients.
        outside: name of a placeholder of the piece -> the tensor of the whole graph.
        gradients: those of the piece's sources, in ``part``.
    """
    own = {node.name for node in piece.graph.node}
    labels = {
        node.name: names.fresh(node.name) for node in part.node if node.name not in own and node.name not in outside
    }

    def located(ref: Ref) -> Ref:
        return outside.get(ref.node) or Ref(labels.get(ref.node, ref.node), ref.output)

    for original in part.node:
        if original.name in labels:
            node = extended.node.add()
            node.CopyFrom(original)
            node.name = labels[original.name]
            node.input[:] = [
                f"^{located(Ref(text[1:])).node}" if text.startswith("^") else str(located(Ref.parse(text)))
                for text in original.input
            ]
    return [None if gradient is None else gradient.located(located) for gradient in gradients]
