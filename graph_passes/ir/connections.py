"""Checks shapes of tensors between stages, through the splits and joins between tasks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from graph_passes.errors import PassError
from graph_passes.ir.call_order import CALLS
from graph_passes.ir.graph import Graph, NodeDef, Ref
from graph_passes.ir.outline import layer_of
from graph_passes.ir.program import Boundary, Layout, Program, Value, ValueKind
from graph_passes.ir.tasks import Task
from graph_passes.ir.tensorflow_bridge import Shape, constant_value

_Integers = tuple[int, ...] | None

_KEEPING = frozenset({"Cast", "Identity", "Mul"})
"""Ops whose result has the shape of their first input."""
CONNECTING = frozenset({"AddN", "ConcatV2", "Identity", "Mul", "SplitV", "StridedSlice"})
"""Ops whose result has the dtype of their first input."""


def verify_connections(program: Program, graph: Graph) -> None:
    """Checks that each task reads its slice of other stages' tensors, as far as shapes are known before the step.

    Args:
        program: a program with a step.
        graph: its top level.

    Raises:
        PassError: names the node or task, and both sides of the disagreement.
    """
    step = program.own_step
    shapes = _Shapes(program, graph)
    calls = [(task, *call) for task in step.entry for call in program.calls_of(task)]
    for task, name, function in calls:
        if graph.nodes[name].op not in CALLS:  # It is inlined.
            continue
        for value, ref in zip(function.inputs, graph.inputs(name), strict=True):
            boundary = shapes.boundary(value)
            if boundary is None:
                continue
            actual, wanted = shapes.of(ref), shapes.slice(boundary, task)
            if actual is not None and not _agree(actual, wanted):
                raise PassError(
                    f"task {task} reads {value} from {str(ref)!r} with shape {_text(actual)}, but its slice has shape "
                    f"{_text(wanted)}"
                )


def check_rows(program: Program, layout: Layout) -> None:
    """Checks that each tensor that some stages cut differently can be split and joined.

    Its samples' rows must be in an order that is known, and samples mustn't decide its lengths together.

    Args:
        program: a program with boundaries.
        layout: how a batch is cut.

    Raises:
        PassError: names the tensor, its layer, the stages, and the way out.
    """
    for boundary in (each for each in program.boundaries if each.own_lengths or each.outer is None):
        apart = boundary.whole or boundary.outer is None
        for micro_batch, stage in itertools.product(range(len(layout.micro_batch_intervals)), boundary.consumers):
            sent, read = (layout.slices(own, micro_batch) for own in (boundary.producer, stage))
            joins = any(sum(own.overlap(wanted).size > 0 for own in sent) > 1 for wanted in read)
            sizes = [[own.size for own in intervals if own.size] for intervals in (sent, read)]
            if sizes[0] != sizes[1] and (apart or joins):
                layer = layer_of(Graph(program.flat_graph), boundary.ref)
                rows = "several" if boundary.rows_per_sample is None else boundary.rows_per_sample
                why = f"{rows} rows for each sample in an order that isn't known"
                if boundary.own_lengths:
                    why = "lengths, or a value, that differ between slices"
                raise PassError(
                    f"tensor {boundary.ref} of layer {layer!r} has {why}, so that it can't be "
                    f"{'cut' if apart else 'joined'}: stage {boundary.producer} makes it in slices of {sizes[0]} "
                    f"samples, stage {stage} reads it in slices of {sizes[1]}; give both stages the same number of "
                    f"replicas and the same shares, or cut elsewhere"
                )


class _Shapes:
    """Shapes of the tensors between tasks."""

    def __init__(self, program: Program, graph: Graph) -> None:
        self._graph, self._layout = graph, program.own_step.layout
        self._boundaries = {boundary.ref: boundary for boundary in program.boundaries}
        self._made = {
            ref: (boundary, task)
            for (task, value), ref in program.own_step.values.items()
            if (boundary := self.boundary(value)) is not None
        }
        self._known: dict[Ref, Shape | None] = {}

    def boundary(self, value: Value) -> Boundary | None:
        """Returns the boundary tensor that a value is, or is the gradient of."""
        known = value.kind in (ValueKind.FORWARD, ValueKind.GRADIENT)
        return self._boundaries.get(value.ref) if known else None

    def slice(self, boundary: Boundary, task: Task) -> Shape:
        """Returns the shape of a task's slice."""
        return boundary.slice_shape(self._layout.samples(task).size)

    def of(self, ref: Ref) -> Shape | None:
        """Returns the shape of a tensor; None where it isn't known."""
        if ref not in self._known:
            made = self._made.get(ref)
            self._known[ref] = self.slice(*made) if made else connected_shape(self._graph, ref, self.of)
        return self._known[ref]


def connected_shape(graph: Graph, ref: Ref, known: Callable[[Ref], Shape | None]) -> Shape | None:
    """Returns the shape of a result of a node that connects tasks.

    Args:
        graph: the node's.
        ref: its result.
        known: the shape of a tensor that it reads; None where it isn't known.

    Returns:
        The shape; None for other nodes, and where it isn't known.

    Raises:
        PassError: the shapes of its inputs don't fit.
    """
    node, inputs = graph.nodes[ref.node], graph.inputs(ref.node)
    if node.op in _KEEPING:
        return known(inputs[0])
    if node.op == "AddN":
        return _same(node, [known(part) for part in inputs])
    if node.op == "SplitV":
        whole, sizes, axis = inputs
        return _part(node, ref.output, whole, known(whole), _constant(graph, sizes), _constant(graph, axis))
    if node.op == "StridedSlice":
        whole, *ends, _ = inputs
        return _slice(node, whole, known(whole), *(_constant(graph, end) for end in ends))
    if node.op == "ConcatV2":
        *parts, axis = inputs
        return _joined(node, [known(part) for part in parts], _constant(graph, axis))
    return None


def _same(node: NodeDef, shapes: Sequence[Shape | None]) -> Shape | None:
    known = [shape for shape in shapes if shape is not None]
    for shape in known[1:]:
        if not _agree(shape, known[0]):
            raise PassError(f"{node.op} {node.name!r} adds shapes {_text(known[0])} and {_text(shape)}")
    return known[0] if known else None


def _part(
    node: NodeDef, output: int, whole: Ref, shape: Shape | None, lengths: _Integers, axis: _Integers
) -> Shape | None:
    if shape is None or axis is None:
        return None
    (place,) = axis
    length = shape[place]
    if lengths is not None and length not in (None, sum(lengths)):
        raise PassError(
            f"split {node.name!r} cuts {str(whole)!r} with shape {_text(shape)} into parts of "
            f"{', '.join(map(str, lengths))} along axis {place}, which are {sum(lengths)} instead of {length}"
        )
    part = None if lengths is None else lengths[output]
    return (*shape[:place], part, *shape[place + 1 :])


def _slice(node: NodeDef, whole: Ref, shape: Shape | None, start: _Integers, stop: _Integers) -> Shape | None:
    """Returns the shape of a part along one axis, as `Builder.split` cuts it; None for other slices."""
    masks = {key: node.attr[key].i for key in node.attr if key.endswith("_mask")}
    if shape is None or start is None or stop is None:
        return None
    place = len(start) - 1
    before = (1 << place) - 1
    if masks.pop("begin_mask", 0) != before or masks.pop("end_mask", 0) != before or any(masks.values()):
        return None
    length = shape[place]
    if length is not None and stop[place] > length:
        raise PassError(
            f"slice {node.name!r} cuts {str(whole)!r} with shape {_text(shape)} from {start[place]} to {stop[place]} "
            f"along axis {place}, which has {length}"
        )
    return (*shape[:place], stop[place] - start[place], *shape[place + 1 :])


def _joined(node: NodeDef, shapes: Sequence[Shape | None], axis: _Integers) -> Shape | None:
    known = [shape for shape in shapes if shape is not None]
    if axis is None or len(known) < len(shapes):
        return None
    (place,) = axis
    for shape in known[1:]:
        if not _agree((*shape[:place], None, *shape[place + 1 :]), known[0]):
            raise PassError(
                f"concat {node.name!r} joins shapes {_text(known[0])} and {_text(shape)} along axis {place}"
            )
    lengths = [shape[place] for shape in known]
    total = None if None in lengths else sum(length or 0 for length in lengths)
    return (*known[0][:place], total, *known[0][place + 1 :])


def _constant(graph: Graph, ref: Ref) -> _Integers:
    """Returns the integers of a constant; None for computed ones."""
    node = graph.nodes[ref.node]
    return tuple(constant_value(node).ravel().tolist()) if node.op == "Const" else None


def _agree(one: Shape, other: Shape) -> bool:
    """Returns whether two shapes may be the same, as far as they are known."""
    if len(one) != len(other):
        return False
    return all(a == b or a is None or b is None for a, b in zip(one, other, strict=True))


def _text(shape: Shape) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
