"""Meaning, dtype, shape and bytes of the tensors at a step's top level, as far as they are known."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping

from dapple_tf.view.task_graph import TensorText
from graph_passes.errors import PassError
from graph_passes.ir.connections import CONNECTING, connected_shape
from graph_passes.ir.graph import BYTES_ATTR, Graph, NodeDef, Ref, dtype_name
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.program import Boundary, Program, Stage, StageFunction, Value, ValueKind
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.tasks import Task
from graph_passes.ir.tensorflow_bridge import dtype_size, output_dtypes

logger = logging.getLogger(__name__)

Shape = tuple[int | None, ...]


class StepTensors:
    """The tensors of a complete step.

    Args:
        program: program after all passes.
        graph: its top level's graph.
    """

    def __init__(self, program: Program, graph: Graph) -> None:
        self.program, self.graph, self.step = program, graph, program.own_step
        self._variables = {v.value: v for v in program.roles.variables if v.value is not None}
        self._updated = {v.update: v for v in program.roles.variables if v.update is not None}
        self._shapes_of: dict[tuple[int, int], Mapping[Ref, Shape | None]] = {}
        self._meanings: dict[Ref, Value] = {}
        self._made_by: dict[Ref, Task] = {}
        self._known: dict[Ref, TensorText] = {}
        variables = program.variables
        self._flat = Graph(program.flat_graph)
        self._batches = {ref: batch for batch, ref in self.step.feeds.items()}
        for arrays in () if self.step.taken is None else self.step.taken.arrays.values():
            self._batches |= dict(zip(arrays, program.roles.inputs, strict=True))
        self._named = {ref: batch.node for ref, batch in self._batches.items()}
        self._named |= {ref: name for name, refs in self.step.metric_feeds.items() for ref in refs}
        self._named |= {ref: f"gradient({name})" for name, ref in self.step.gradients.items()}
        self._shaped = {ref: variables[name].shape for name, ref in self.step.gradients.items()}
        for task in self.step.entry:
            for name, function in program.calls_of(task):
                self._note_call(task, name, function)
            for other in self.step.exit[task]:
                if NodeKind.of(graph.nodes[other]) is NodeKind.METRICS:
                    self._note_call(task, other, program.stages[task.stage].metrics)

    def outputs(self, node: str) -> tuple[TensorText, ...]:
        """Returns the results of a node."""
        return tuple(self.text(Ref(node, index)) for index in range(len(output_dtypes(self.graph.nodes[node]))))

    def text(self, ref: Ref) -> TensorText:
        """Returns a tensor's description."""
        if ref not in self._known:
            dtype = output_dtypes(self.graph.nodes[ref.node])[ref.output]
            shape = self._shape(ref)
            size = dtype_size(dtype)
            known = shape is not None and None not in shape and size > 0
            shown = "" if shape is None else f"[{', '.join('?' if dim is None else str(dim) for dim in shape)}]"
            self._known[ref] = TensorText(
                self._name(ref),
                dtype_name(dtype),
                shown,
                float(math.prod(dim or 0 for dim in shape or ()) * size) if known else None,
            )
        return self._known[ref]

    def _note_call(self, task: Task, name: str, function: StageFunction | None) -> None:
        if function is None:  # There is nothing to compute.
            return
        for index, value in enumerate(function.outputs):
            ref = Ref(name, index)
            self._meanings[ref], self._made_by[ref] = value, task
        for value, ref in zip(function.inputs, self.graph.inputs(name), strict=True):
            self._meanings.setdefault(ref, value)

    def _name(self, ref: Ref) -> str:
        value = self._meanings.get(ref)
        if value is None or ref in self._named:
            reduced = BYTES_ATTR in self.graph.nodes[ref.node].attr
            return self._named.get(ref, "summed gradients" if reduced else str(ref))
        variable = self._variables.get(value.ref) or self._updated.get(value.ref)
        if variable is None:
            return str(value)
        return variable.name if value.kind is ValueKind.FORWARD else f"{value.kind.value}({variable.name})"

    # ---- shapes

    def _shape(self, ref: Ref) -> Shape | None:
        if ref in self._made_by:
            return self._result_shape(self._made_by[ref], self._meanings[ref])
        if ref in self._shaped:
            return self._shaped[ref]
        node = self.graph.nodes[ref.node]
        if ref in self._batches:
            return (self.step.layout.batch, *_declared(self._flat.nodes[self._batches[ref].node])[1:])
        if BYTES_ATTR in node.attr:
            return (node.attr[BYTES_ATTR].i // dtype_size(output_dtypes(node)[0]),)
        if node.op == "Placeholder":
            return _declared(node)
        if node.op == "Const":
            return tuple(dim.size for dim in node.attr["value"].tensor.tensor_shape.dim)
        if node.op in CONNECTING:
            return connected_shape(self.graph, ref, self._shape)
        variable = self._variables.get(self._meanings[ref].ref) if ref in self._meanings else None
        return None if variable is None else variable.shape

    def _result_shape(self, task: Task, value: Value) -> Shape | None:
        variable = self._updated.get(value.ref) or self._variables.get(value.ref)
        if variable is not None and value.kind in (ValueKind.FORWARD, ValueKind.GRADIENT):
            return variable.shape
        stage, samples = self.program.stages[task.stage], self.step.layout.samples(task).size
        if value.kind in (ValueKind.FORWARD, ValueKind.GRADIENT) and value.ref in self._boundaries:
            shape = self._boundaries[value.ref].slice_shape(samples)
            if None not in shape:  # Within a stage a loop hides the batch axis.
                return shape
        shapes = self._stage_shapes(stage, samples)
        if value.kind is ValueKind.GRADIENT:  # It has the shape of its tensor.
            ref = stage.arguments.get(Value(value.ref), value.ref)
        else:
            ref = stage.results.get(value, value.ref)
        return shapes.get(ref)

    def _stage_shapes(self, stage: Stage, samples: int) -> Mapping[Ref, Shape | None]:
        """Returns the shapes of all tensors of a stage for a slice of ``samples`` samples."""
        key = stage.index, samples
        if key not in self._shapes_of:
            try:
                shapes = infer_shapes(
                    stage.own_graph, self._assumed(stage, samples), {self.program.roles.slice.samples: samples}
                )
            except PassError as error:
                logger.warning("shapes of stage %d aren't known for %d samples: %s", stage.index, samples, error)
                shapes = {}
            self._shapes_of[key] = shapes
        return self._shapes_of[key]

    def _assumed(self, stage: Stage, samples: int) -> dict[str, Shape]:
        """Returns the shapes of a stage's inputs for a slice."""
        placeholders = {node.name: node for node in stage.own_graph.node if node.op == "Placeholder"}
        shapes: dict[str, Shape] = {}
        for value, ref in stage.arguments.items():
            boundary = self._boundaries.get(value.ref)
            if boundary is not None:
                shapes[ref.node] = boundary.slice_shape(samples)
            elif value.ref in self.program.roles.inputs:
                dims = placeholders[ref.node].attr["shape"].shape.dim
                shapes[ref.node] = (samples, *(None if dim.size < 0 else dim.size for dim in dims[1:]))
        return shapes

    @functools.cached_property
    def _boundaries(self) -> Mapping[Ref, Boundary]:
        return {boundary.ref: boundary for boundary in self.program.boundaries}


def _declared(placeholder: NodeDef) -> Shape:
    return tuple(None if dim.size < 0 else dim.size for dim in placeholder.attr["shape"].shape.dim)
