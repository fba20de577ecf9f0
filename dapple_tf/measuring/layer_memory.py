"""Memory of layers: their tensors, read from traced steps, and their variables.

The trace of a step lists every tensor with its buffer, and every allocation. Steps of two sizes separate the part
that grows with the samples. All of this is for a step with a stage for each layer (`layer_cuts.py`).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from tensorflow.core.framework import types_pb2

from dapple_tf.describe.layer_profile import ZERO, Cost, LayerBuffers, ProfileError
from dapple_tf.describe.profile import SharedParameters, Tensor
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.cost_fit import cost_through
from dapple_tf.measuring.layer_buffers import buffers_of, fitted
from dapple_tf.measuring.timed_step import LAST, input_gradients_of
from graph_passes.ir.graph import Graph, Ref
from graph_passes.ir.group_update import GroupUpdate
from graph_passes.ir.outline import dtype_of
from graph_passes.ir.program import Boundary, Program, Step, Value, ValueKind, VariableKind
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.tasks import Phase, Task
from graph_passes.ir.tensorflow_bridge import Shape, dtype_size

# ---- tensors


@dataclasses.dataclass(frozen=True)
class LayerMemory:
    """Bytes of each layer, as in `LayerProfile`, and the tensors between layers."""

    tensors: tuple[Tensor, ...]
    output: tuple[Cost, ...]
    residual: tuple[Cost, ...]
    min_cut: tuple[Cost, ...]
    delayed: tuple[Cost | None, ...]
    temporary: tuple[Cost, ...]
    buffers: tuple[LayerBuffers, ...]


def layer_memory(
    program: Program,
    min_cut: Program,
    split: Program,
    sample_shapes: Sequence[Sequence[int]],
    traces: Sequence[StepTrace],
) -> LayerMemory:
    """Returns each layer's bytes from the traces of a step at two sizes.

    Args:
        program: the stages of the traced step.
        min_cut: the same stages with ``recompute="min_cut"``.
        split: the same stages with Bx and Bw in place of B.
        sample_shapes: the shape of one sample of each batch input.
        traces: traces of two sizes, the smaller first.
    """
    samples = [trace.samples for trace in traces]
    stages = range(len(program.stages))

    def costs(sizes: Sequence[Sequence[float]]) -> tuple[Cost, ...]:
        """Returns each layer's cost from its bytes at each size."""
        return tuple(cost_through(samples, [of_size[stage] for of_size in sizes]) for stage in stages)

    tensors, output = [], [ZERO] * len(stages)
    for boundary in program.boundaries:
        size = cost_through(samples, [trace.size(boundary.producer, boundary.ref) for trace in traces])
        differentiable = has_gradient(program, boundary)
        tensors.append(Tensor(boundary.producer, boundary.consumers, size, differentiable))
        output[boundary.producer] = output[boundary.producer] + size
    kept = [kept_tensors(program, stage) for stage in stages]
    residual = [trace.kept_bytes(kept) for trace in traces]
    fewest = [
        _min_cut_bytes(min_cut, trace, static_sizes(min_cut, sample_shapes, trace.samples), otherwise)
        for trace, otherwise in zip(traces, residual, strict=True)
    ]
    static = [static_sizes(split, sample_shapes, trace.samples) for trace in traces]
    delays = [_delayed_bytes(split, trace, sizes) for trace, sizes in zip(traces, static, strict=True)]
    delayed = []
    for sizes in zip(*delays, strict=True):
        known = [size for size in sizes if size is not None]
        delayed.append(cost_through(samples, known) if len(known) == len(sizes) else None)
    temporary = [[trace.temporary_bytes(stage) for stage in stages] for trace in traces]
    measured = [buffers_of(program, split, trace, sizes) for trace, sizes in zip(traces, static, strict=True)]
    buffers, read = fitted(samples, measured, tensors)
    return LayerMemory(
        tensors=read,
        output=tuple(output),
        residual=costs(residual),
        min_cut=costs(fewest),
        delayed=tuple(delayed),
        temporary=costs(temporary),
        buffers=buffers,
    )


def kept_tensors(program: Program, stage: int) -> list[Ref]:
    """Returns the tensors that a stage makes and backward functions read, its own or those of later stages."""
    made = {boundary.ref for boundary in program.boundaries if boundary.producer == stage}
    kept: dict[Ref, None] = {}
    for reader in program.stages[stage:]:
        for value in reader.own_backward.inputs:
            own = reader.index == stage and value.kind is ValueKind.RESIDUAL
            if own or (value.kind is ValueKind.FORWARD and value.ref in made):
                kept[value.ref] = None
    return list(kept)


def static_sizes(program: Program, sample_shapes: Sequence[Sequence[int]], samples: int) -> dict[tuple[int, Ref], int]:
    """Returns (stage, residual or partial result of Bx) -> bytes, if the shape is known without running anything.

    Args:
        program: stages with functions.
        sample_shapes: the shape of one sample of each batch input.
        samples: number of samples in a slice.
    """
    sizes: dict[tuple[int, Ref], int] = {}
    known_shapes = stage_shapes(program, sample_shapes, samples)
    for stage in program.stages:
        shapes = known_shapes[stage.index]
        graph = Graph(stage.own_graph)
        read = {value for _, function in stage.phases if function is not None for value in function.inputs}
        for value in read:
            dims = shapes.get(value.ref) if value.kind in (ValueKind.RESIDUAL, ValueKind.PARTIAL) else None
            known = [dim for dim in dims or () if dim is not None]
            if dims is not None and len(known) == len(dims):
                sizes[stage.index, value.ref] = math.prod(known) * dtype_size(dtype_of(graph, value.ref))
    return sizes


def stage_shapes(
    program: Program, sample_shapes: Sequence[Sequence[int]], samples: int
) -> list[dict[Ref, Shape | None]]:
    """Returns, for each stage, the shapes of its tensors for slices of ``samples`` samples; see `static_sizes`."""
    shapes = []
    boundaries = {boundary.ref: boundary for boundary in program.boundaries}
    inputs = dict(zip(program.roles.inputs, sample_shapes, strict=True))
    for stage in program.stages:
        assumed: dict[str, list[int | None]] = {}
        for value, ref in stage.arguments.items():
            boundary = boundaries.get(value.ref)
            if value.ref in inputs:
                assumed[ref.node] = [samples, *inputs[value.ref]]
            elif boundary is not None:
                assumed[ref.node] = list(boundary.example_slice_shape(samples))
        shapes.append(infer_shapes(stage.own_graph, assumed, {program.roles.slice.samples: samples}))
    return shapes


def has_gradient(program: Program, boundary: Boundary) -> bool:
    """Returns whether any stage that reads a tensor returns its gradient."""
    value = Value(boundary.ref, ValueKind.GRADIENT)
    return any(value in program.stages[stage].results for stage in boundary.consumers)


def _min_cut_bytes(
    program: Program, trace: StepTrace, static: Mapping[tuple[int, Ref], int], otherwise: Sequence[int]
) -> list[int]:
    """Returns the bytes that each stage keeps with recomputation; those without, if they aren't known.

    Most of it is also kept without recomputation, and was measured; shapes give the rest.
    """
    kept = [kept_tensors(program, stage) for stage in range(len(program.stages))]
    measured = trace.kept_bytes([[ref for ref in refs if trace.knows(stage, ref)] for stage, refs in enumerate(kept)])
    sizes = []
    for stage, refs in enumerate(kept):
        fresh = [static.get((stage, ref)) for ref in refs if not trace.knows(stage, ref)]
        known = [size for size in fresh if size is not None]
        sizes.append(measured[stage] + sum(known) if len(known) == len(fresh) else otherwise[stage])
    return sizes


def _delayed_bytes(program: Program, trace: StepTrace, static: Mapping[tuple[int, Ref], int]) -> list[int | None]:
    """Returns the bytes that each stage keeps from Bx to Bw: all that Bw reads except variables; None if unknown.

    Results of F were measured, and each buffer counts once; a gradient is as large as its tensor; shapes give
    partial results.
    """
    makers = {boundary.ref: boundary.producer for boundary in program.boundaries}
    delayed: list[int | None] = []
    for stage in program.stages:
        kept: list[tuple[int, Ref]] = []
        sizes: list[int | None] = []
        for value in stage.weight_grad.inputs if stage.weight_grad is not None else ():
            made = (makers.get(value.ref, stage.index), value.ref)
            if value.kind is ValueKind.PARTIAL:
                sizes.append(static.get((stage.index, value.ref)))
            elif value.kind is ValueKind.RESIDUAL or (value.kind is ValueKind.FORWARD and value.ref in makers):
                kept.append(made)
            elif value.kind is ValueKind.GRADIENT:
                sizes.append(trace.size(*made) if trace.knows(*made) else None)
        sizes += [static.get((stage.index, ref)) for maker, ref in kept if not trace.knows(maker, ref)]
        sizes.append(trace.buffer_bytes([made for made in kept if trace.knows(*made)]))
        known = [size for size in sizes if size is not None]
        delayed.append(sum(known) if len(known) == len(sizes) else None)
    return delayed


class StepTrace:
    """Memory in a traced step, for its last micro-batch.

    Attributes:
        samples: number of samples in a micro-batch.
    """

    def __init__(
        self,
        stats: Any,
        program: Program,
        step: Step,
        device: str,
        name: str,
        samples: int,
        applies: Mapping[str, int] | None = None,
    ) -> None:
        """Reads a trace.

        Args:
            stats: the step stats.
            program: the stages of the step.
            step: meaning of its nodes.
            device: name of the step's device.
            name: prefix of its nodes in the session's graph.
            samples: number of samples in a micro-batch.
            applies: the calls of the optimizer's updates, each with its stage.
        """
        self.samples = samples
        self._program = program
        calls = {f"{name}/{node}": task for task, node in step.entry.items() if task.micro_batch == LAST}
        ends = {f"{name}/{node}": task for task in calls.values() for node in step.exit[task]}
        self._sizes: dict[tuple[int, Ref], int] = {}  # (stage, tensor that its F returns) -> bytes
        self._pointers: dict[tuple[int, Ref], int] = {}  # the same -> address of the buffer, 0 if unknown
        self._spans: dict[Task, tuple[int, int]] = {}  # microseconds
        self._given_back: dict[int, int] = {}  # stage -> bytes of the input gradients that its B returns
        self._gradients: dict[int, int] = {}  # stage -> bytes of the dense gradients of parameters that its B returns
        self._rows: dict[int, int] = {}  # stage -> bytes of the rows that its B returns
        self._applies: dict[int, list[tuple[int, int]]] = {}  # stage -> when its parameters are updated
        updates = {f"{name}/{node}": stage for node, stage in (applies or {}).items()}
        allocations: list[tuple[int, int]] = []  # (microseconds, bytes); negative ones are freed
        for own in stats.dev_stats:
            if own.device != device:
                continue
            for node in own.node_stats:
                for memory in node.memory:
                    if "host" not in memory.allocator_name:
                        allocations += [(r.alloc_micros, r.alloc_bytes) for r in memory.allocation_records]
                if node.node_name in calls:
                    self._read_outputs(calls[node.node_name], node)
                if node.node_name in updates:
                    span = (node.all_start_micros, node.all_start_micros + node.all_end_rel_micros)
                    self._applies.setdefault(updates[node.node_name], []).append(span)
                if node.node_name in ends:
                    task = ends[node.node_name]
                    begin, end = node.all_start_micros, node.all_start_micros + node.all_end_rel_micros
                    known = self._spans.get(task, (begin, end))
                    self._spans[task] = (min(begin, known[0]), max(end, known[1]))
        allocations.sort()
        self._times = [moment for moment, _ in allocations]
        # In use before the first event, after it, and so on.
        self._in_use = list(itertools.accumulate((size for _, size in allocations), initial=0))

    def _read_outputs(self, task: Task, node: Any) -> None:
        stage = self._program.stages[task.stage]
        function = stage.own_forward if task.phase is Phase.FORWARD else stage.own_backward
        if len(node.output) != len(function.outputs):
            raise ProfileError(
                f"function {function.name!r} has {len(function.outputs)} results, but a trace shows "
                f"{len(node.output)}: TensorFlow has removed some, so that it can't be told which tensor is which"
            )
        input_gradients = input_gradients_of(self._program, stage)
        given_back = gradients = rows = 0
        for output in node.output:
            value = function.outputs[output.slot]
            description = output.tensor_description
            size = math.prod(dim.size for dim in description.shape.dim) * dtype_size(description.dtype)
            if task.phase is Phase.FORWARD:
                self._sizes[task.stage, value.ref] = size
                self._pointers[task.stage, value.ref] = description.allocation_description.ptr
            elif value in input_gradients:
                given_back += size
            elif value.kind is ValueKind.GRADIENT:
                gradients += size
            else:
                rows += size
        if task.phase is Phase.BACKWARD:
            self._given_back[task.stage] = given_back
            self._gradients[task.stage], self._rows[task.stage] = gradients, rows

    def knows(self, stage: int, ref: Ref) -> bool:
        """Returns whether a stage's F returns this tensor."""
        return (stage, ref) in self._sizes

    def size(self, stage: int, ref: Ref) -> int:
        """Returns the bytes of a tensor that a stage's F returns.

        Raises:
            ProfileError: the trace lacks the tensor.
        """
        if not self.knows(stage, ref):
            raise ProfileError(
                f"the trace of a step of {self.samples} samples doesn't tell the size of {ref}, which layer {stage} "
                f"hands on; is the device profiled by something else?"
            )
        return self._sizes[stage, ref]

    def address(self, stage: int, ref: Ref) -> Hashable | None:
        """Returns the buffer of a tensor that a stage's F returns; None if it isn't known."""
        return self._pointers.get((stage, ref)) or ((stage, ref) if self.knows(stage, ref) else None)

    def gradient_bytes(self, stage: int) -> int:
        """Returns the bytes of dense parameter gradients that a stage's B returns."""
        return self._gradients.get(stage, 0)

    def row_bytes(self, stage: int) -> int:
        """Returns the bytes of embedding gradients as rows that a stage's B returns."""
        return self._rows.get(stage, 0)

    def apply_bytes(self, stage: int) -> int:
        """Returns the peak use of the updates of a stage's parameters."""
        peak = 0
        for begin, end in self._applies.get(stage, ()):
            low, high = bisect.bisect_left(self._times, begin), bisect.bisect_right(self._times, end)
            peak = max(peak, max(self._in_use[low : high + 1]) - self._in_use[low])
        return peak

    def list_bytes(self, stage: int, refs: Sequence[Ref]) -> int:
        """Returns the bytes in the tensor lists among these results of a stage's F."""
        return self._list_bytes(stage) if self._keeps_lists(stage, refs) else 0

    def _buffers(self, stage: int, refs: Iterable[Ref]) -> dict[Hashable, int]:
        """Returns the buffers of tensors that a stage's F returns, with their bytes; tensors may share one."""
        buffers: dict[Hashable, int] = {}
        for ref in refs:
            key = self._pointers.get((stage, ref)) or (stage, ref)  # No address: a buffer of its own.
            buffers[key] = max(buffers.get(key, 0), self.size(stage, ref))
        return buffers

    def buffer_bytes(self, made: Iterable[tuple[int, Ref]]) -> int:
        """Returns the bytes of tensors, each with the stage whose F returns it; shared buffers count once."""
        buffers: dict[Hashable, int] = {}
        for stage, ref in made:
            for key, size in self._buffers(stage, [ref]).items():
                buffers[key] = max(buffers.get(key, 0), size)
        return sum(buffers.values())

    def kept_bytes(self, kept: Sequence[Iterable[Ref]]) -> list[int]:
        """Returns the bytes that each stage keeps of its kept tensors: each buffer counts for the first such stage.

        A layer that only reshapes passes on its input buffer. Kept buffers aren't freed before all F have
        run, so that no other tensor has the same address.
        """
        counted: set[Hashable] = set()
        sizes = []
        for stage, tensors in enumerate(kept):
            refs = list(tensors)
            buffers = self._buffers(stage, refs)
            own = sum(size for key, size in buffers.items() if key not in counted)
            counted |= buffers.keys()
            sizes.append(own + self.list_bytes(stage, refs))
        return sizes

    def _keeps_lists(self, stage: int, refs: Sequence[Ref]) -> bool:
        function = self._program.stages[stage].own_forward
        types = [arg.type for arg in function.function.signature.output_arg]
        pairs = zip(function.outputs, types, strict=True)
        return any(dtype == types_pb2.DT_VARIANT and value.ref in refs for value, dtype in pairs)

    def _list_bytes(self, stage: int) -> int:
        """Returns the bytes in tensor lists of loops, whose size isn't reported: what F leaves beyond its results."""
        task = Task(stage, Phase.FORWARD, LAST)
        function = self._program.stages[stage].forward
        if task not in self._spans or function is None:
            return 0
        low, high = self._events(task)
        results = self._buffers(stage, [value.ref for value in function.outputs if self.knows(stage, value.ref)])
        given = {
            self._pointers.get((boundary.producer, boundary.ref))
            for boundary in self._program.boundaries
            if stage in boundary.consumers
        }
        made = sum(size for key, size in results.items() if key not in given)
        return max(0, self._in_use[high] - self._in_use[low] - made)

    def _events(self, task: Task) -> tuple[int, int]:
        """Returns the numbers of allocations before a task's start and before its end."""
        begin, end = self._spans[task]
        return bisect.bisect_left(self._times, begin), bisect.bisect_right(self._times, end)

    def temporary_bytes(self, stage: int) -> int:
        """Returns the peak use of F or B beyond what remains afterwards (F), or what was before and its results (B)."""
        temporary = [0]
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            task = Task(stage, phase, LAST)
            if task not in self._spans:
                continue
            low, high = self._events(task)
            peak = max(self._in_use[low : high + 1])
            if phase is Phase.FORWARD:
                temporary.append(peak - self._in_use[high])
            else:
                temporary.append(peak - self._in_use[low] - self._given_back.get(stage, 0))
        return max(temporary)


# ---- variables


@dataclasses.dataclass(frozen=True)
class VariableBytes:
    """Bytes of each layer's variables, as in `LayerProfile`, and of those that several layers use."""

    parameters: tuple[int, ...]
    slots: tuple[int, ...]
    state: tuple[int, ...]
    shared: tuple[SharedParameters, ...]


def variable_bytes(program: Program, updates: Sequence[GroupUpdate] | None, table: VariableTable) -> VariableBytes:
    """Returns the bytes of variables, each counted once: shared parameters apart, their state for the first layer.

    The optimizer's scalars (step counter, learning rate) aren't counted: they belong to no layer.

    Args:
        program: the stages.
        updates: the optimizer's part for each parameter group, which gives the owners of slots; None derives
            them from shapes.
        table: the variables of the model and the optimizer.
    """
    readers: dict[str, list[int]] = {}
    for stage in program.stages:
        for name in stage.reads:
            readers.setdefault(name, []).append(stage.index)
    if updates is None:
        updaters = _owners_by_shape(readers, table)
    else:
        updaters = {
            variable.name: update.stages
            for update in updates
            for variable in update.apply.variables.values()
            if variable.kind is VariableKind.OPTIMIZER and variable.shape
        }

    def size(name: str) -> int:
        variable = table.describe(name)
        return math.prod(variable.shape) * dtype_size(variable.dtype)

    count = len(program.stages)
    parameters, slots, state = [0] * count, [0] * count, [0] * count
    shared: dict[tuple[int, ...], tuple[int, int]] = {}  # stages -> bytes of parameters, of their slots
    for name, stages in readers.items():
        if table.describe(name).kind is not VariableKind.PARAMETER:
            state[stages[0]] += size(name)
        elif len(stages) == 1:
            parameters[stages[0]] += size(name)
        else:
            of_parameters, of_slots = shared.get(tuple(stages), (0, 0))
            shared[tuple(stages)] = (of_parameters + size(name), of_slots)
    for name, group in updaters.items():
        if len(group) == 1:
            slots[group[0]] += size(name)
        elif group in shared:
            of_parameters, of_slots = shared[group]
            shared[group] = (of_parameters, of_slots + size(name))
    groups = tuple(SharedParameters(stages, *sizes) for stages, sizes in sorted(shared.items()))
    return VariableBytes(tuple(parameters), tuple(slots), tuple(state), groups)


def _owners_by_shape(readers: Mapping[str, Sequence[int]], table: VariableTable) -> dict[str, tuple[int, ...]]:
    """Returns variable of the optimizer -> the stages whose parameters it belongs to.

    A parameter's slots have its shape: parameters of one shape have equally many. Slots of other shapes (rows
    and columns of Adafactor) are assigned in the order in which Keras makes variables: that of the parameters.
    """
    parameters = [name for name in readers if table.describe(name).kind is VariableKind.PARAMETER]
    by_shape: dict[tuple[int, ...], list[str]] = {}
    for name in parameters:
        by_shape.setdefault(table.describe(name).shape, []).append(name)
    turns: Counter[tuple[int, ...]] = Counter()
    owners = {}
    for name in table.keras_variables:
        variable = table.describe(name)
        if variable.kind is VariableKind.OPTIMIZER and variable.shape and parameters:
            like = variable.shape if variable.shape in by_shape else ()
            candidates = by_shape.get(like, parameters)
            owners[name] = tuple(readers[candidates[turns[like] % len(candidates)]])
            turns[like] += 1
    return owners
