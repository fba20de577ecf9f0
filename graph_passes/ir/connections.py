"""Checks what goes from stage to stage: its dtype and shape, through the splits and joins between tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graph_passes.ir.call_order import CALLS
from graph_passes.ir.graph import Graph, NodeDef, PassError, Ref, dtype_name
from graph_passes.ir.program import Boundary, Program, Value, ValueKind
from graph_passes.ir.tasks import Task
from graph_passes.ir.tensorflow_bridge import constant_value

_Shape = tuple[int | None, ...]

_KEEPING = frozenset({"Cast", "Identity", "Mul"})
"""Ops whose result has the shape of their first input."""
_CONNECTING = frozenset({"AddN", "ConcatV2", "Identity", "Mul", "SplitV"})
"""Ops whose result has the dtype of their first input."""


def verify_connections(program: Program, graph: Graph, dtypes: Mapping[str, Sequence[int]]) -> None:
    """Checks that each task reads its slice of what other stages send, as far as shapes are known before the step.

    Args:
        program: a program with a step.
        graph: its top level.
        dtypes: node -> the dtypes of its outputs.

    Raises:
        PassError: names the node or task, and both sides of what disagrees.
    """
    step = program.own_step
    shapes = _Shapes(program, graph)
    for node in graph:
        _verify_dtypes(graph, node, dtypes)
    for task, name in step.entry.items():
        function = dict(program.stages[task.stage].phases)[task.phase]
        if function is None or graph.nodes[name].op not in CALLS:  # There is nothing to compute, or it is inlined.
            continue
        for value, ref in zip(function.inputs, graph.inputs(name), strict=True):
            boundary = shapes.boundary(value)
            if boundary is None:
                continue
            found, wanted = shapes.of(ref), shapes.slice(boundary, task)
            if found is not None and not _agree(found, wanted):
                raise PassError(
                    f"task {task} reads {value} from {str(ref)!r} with shape {_text(found)}, but its slice has shape "
                    f"{_text(wanted)}"
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
        self._known: dict[Ref, _Shape | None] = {}
        self._constants: dict[Ref, tuple[int, ...] | None] = {}

    def boundary(self, value: Value) -> Boundary | None:
        """The boundary tensor that a value is, or is the gradient of."""
        known = value.kind in (ValueKind.FORWARD, ValueKind.GRADIENT)
        return self._boundaries.get(value.ref) if known else None

    def slice(self, boundary: Boundary, task: Task) -> _Shape:
        """The shape of a task's slice."""
        return boundary.slice_shape(self._layout.slice(task.stage, task.micro_batch, task.replica).size)

    def of(self, ref: Ref) -> _Shape | None:
        """The shape of a tensor; None where it isn't known."""
        if ref not in self._known:
            made = self._made.get(ref)
            self._known[ref] = self._of_node(ref) if made is None else self.slice(*made)
        return self._known[ref]

    def _of_node(self, ref: Ref) -> _Shape | None:
        node, inputs = self._graph.nodes[ref.node], self._graph.inputs(ref.node)
        if node.op in _KEEPING:
            return self.of(inputs[0])
        if node.op == "AddN":
            return self._same(node, [self.of(part) for part in inputs])
        if node.op == "SplitV":
            return self._part(node, ref.output, *inputs)
        return self._joined(node, inputs) if node.op == "ConcatV2" else None

    def _same(self, node: NodeDef, shapes: Sequence[_Shape | None]) -> _Shape | None:
        known = [shape for shape in shapes if shape is not None]
        for shape in known[1:]:
            if not _agree(shape, known[0]):
                raise PassError(f"{node.op} {node.name!r} adds shapes {_text(known[0])} and {_text(shape)}")
        return known[0] if known else None

    def _part(self, node: NodeDef, output: int, whole: Ref, sizes: Ref, axis: Ref) -> _Shape | None:
        shape, place, lengths = self.of(whole), self._constant(axis), self._constant(sizes)
        if shape is None or place is None:
            return None
        length = shape[place[0]]
        if lengths is not None and length not in (None, sum(lengths)):
            raise PassError(
                f"split {node.name!r} cuts {str(whole)!r} with shape {_text(shape)} into parts of "
                f"{', '.join(map(str, lengths))} along axis {place[0]}, which are {sum(lengths)} instead of {length}"
            )
        part = None if lengths is None else lengths[output]
        return (*shape[: place[0]], part, *shape[place[0] + 1 :])

    def _joined(self, node: NodeDef, inputs: Sequence[Ref]) -> _Shape | None:
        *parts, axis = inputs
        place, shapes = self._constant(axis), [self.of(part) for part in parts]
        known = [shape for shape in shapes if shape is not None]
        if place is None or len(known) < len(parts):
            return None
        without = [(*shape[: place[0]], *shape[place[0] + 1 :]) for shape in known]
        for shape, rest in zip(known, without, strict=True):
            if not _agree(rest, without[0]):
                raise PassError(
                    f"concat {node.name!r} joins shapes {_text(known[0])} and {_text(shape)} along axis {place[0]}"
                )
        lengths = [shape[place[0]] for shape in known]
        total = None if None in lengths else sum(length or 0 for length in lengths)
        return (*known[0][: place[0]], total, *known[0][place[0] + 1 :])

    def _constant(self, ref: Ref) -> tuple[int, ...] | None:
        """The integers of a constant; None for what is computed."""
        if ref not in self._constants:
            node = self._graph.nodes[ref.node]
            value = constant_value(node).ravel().tolist() if node.op == "Const" else None
            self._constants[ref] = None if value is None else tuple(value)
        return self._constants[ref]


def _verify_dtypes(graph: Graph, node: NodeDef, dtypes: Mapping[str, Sequence[int]]) -> None:
    """Checks that what connects tasks is given tensors of the dtype of its results."""
    if node.op not in _CONNECTING:
        return
    inputs = graph.inputs(node.name)
    tensors = {"SplitV": inputs[:1], "ConcatV2": inputs[:-1]}.get(node.op, inputs)
    (result, *_) = dtypes[node.name]
    for ref in tensors:
        given = dtypes[ref.node][ref.output]
        if given != result:
            raise PassError(f"{node.op} {node.name!r} is for {dtype_name(result)}, but {ref} is {dtype_name(given)}")


def _agree(one: _Shape, other: _Shape) -> bool:
    """Whether two shapes may be the same, as far as they are known."""
    if len(one) != len(other):
        return False
    return all(a == b or a is None or b is None for a, b in zip(one, other, strict=True))


def _text(shape: _Shape) -> str:
    return f"[{', '.join('?' if size is None else str(size) for size in shape)}]"
