"""Memory in traced steps, whose traces list every tensor with its buffer, and every allocation."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

from tensorflow.core.framework import types_pb2

from dapple_tf.describe.layer_profile import ZERO, Cost, LayerBuffers, LayerProfile, ProfileError
from dapple_tf.describe.profile import Tensor
from dapple_tf.measuring.layer_memory import forward_tensors, has_gradient, kept_tensors, stage_shapes, tensor_bytes
from dapple_tf.measuring.timed_step import LAST, input_gradients_of
from graph_passes.ir.graph import Graph, Ref
from graph_passes.ir.program import Boundary, Program, Stage, Step, Value, ValueKind
from graph_passes.ir.tasks import Phase, Task
from graph_passes.ir.tensorflow_bridge import dtype_size


class StepTrace:
    """Memory in a traced step, for its last micro-batch.

    Attributes:
        samples: number of samples in a micro-batch.
        gradients: stage -> bytes of the dense gradients of parameters that its B returns.
        rows: stage -> bytes of the embeddings' gradients as rows that its B returns.
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
        self.gradients, self.rows = Counter[int](), Counter[int]()
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
            self.gradients[task.stage], self.rows[task.stage] = gradients, rows

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


# ---- layers with the memory of two traced steps, which separate the part that grows with the samples


_ALIASES = frozenset({"ExpandDims", "Identity", "PreventGradient", "Reshape", "Squeeze", "StopGradient"})
"""Operators whose result is the buffer of their first argument."""

_Sizes = Mapping[tuple[int, Ref], int]
"""(stage, tensor) -> bytes that follow from shapes alone."""


def with_memory(
    layers: Sequence[LayerProfile],
    program: Program,
    min_cut: Program,
    split: Program,
    sample_shapes: Sequence[Sequence[int]],
    traces: Sequence[StepTrace],
) -> tuple[list[LayerProfile], tuple[Tensor, ...]]:
    """Returns layers with the bytes of their tensors, and the tensors between them, from traces at two sizes.

    Args:
        layers: the layers.
        program: the stages of the traced step.
        min_cut: the same stages with ``recompute="min_cut"``.
        split: the same stages with Bx and Bw in place of B.
        sample_shapes: the shape of one sample of each batch input.
        traces: traces of two sizes, the smaller first.
    """
    kept = kept_tensors(program)
    roots = [_weight_inputs(stage) for stage in split.stages]
    read = [forward_tensors(program, stage.index, stage.own_backward.inputs) for stage in program.stages]
    read_late = [forward_tensors(split, stage, own) for stage, own in enumerate(roots)]

    def bytes_at(trace: StepTrace) -> Sequence[tuple[int, ...]]:
        """Returns each layer's bytes in one of the steps."""
        residual, static = trace.kept_bytes(kept), _static_sizes(split, sample_shapes, trace.samples)
        fewest = _min_cut_bytes(min_cut, trace, _static_sizes(min_cut, sample_shapes, trace.samples), residual)
        sizes = []
        for stage, aliases in enumerate(roots):
            outside = _outside(program, trace, stage)
            own, delayed = (_own_bytes(trace, static, stage, reads[stage], outside) for reads in (read, read_late))
            partial = sum(
                max(static.get((stage, ref), 0) for ref in (root.ref, *refs))
                for root, refs in aliases.items()
                if root.kind is ValueKind.PARTIAL
            )
            temporary = trace.temporary_bytes(stage)
            sizes.append((residual[stage], fewest[stage], temporary, own, delayed, partial, trace.rows[stage]))
        return sizes

    samples = [trace.samples for trace in traces]
    output, tensors = [ZERO] * len(layers), []
    readers = zip(*(_readers(program, traces[-1], reads) for reads in (read, read_late)), strict=True)
    for boundary, (kept_by, delayed_by) in zip(program.boundaries, readers, strict=True):
        producer, ref = boundary.producer, boundary.ref
        size = Cost.through(samples, [trace.size(producer, ref) for trace in traces])
        output[producer] = output[producer] + size
        tensors.append(
            Tensor(
                producer,
                boundary.consumers,
                size,
                has_gradient(program, boundary),
                kept=tuple(sorted(kept_by)),
                delayed=tuple(sorted(delayed_by)),
                gradient_delayed=Value(ref, ValueKind.GRADIENT) in roots[producer],
            )
        )
    measured = []
    for stage, (layer, *points) in enumerate(zip(layers, *map(bytes_at, traces), strict=True)):
        residual, fewest, temporary, own, delayed, partial, rows = (
            Cost.through(samples, sizes) for sizes in zip(*points, strict=True)
        )
        gradients = max(trace.gradients[stage] for trace in traces)
        apply = min(trace.apply_bytes(stage) for trace in traces)
        measured.append(
            dataclasses.replace(
                layer,
                residual_bytes=residual,
                min_cut_residual_bytes=fewest,
                temporary_bytes=temporary,
                output_bytes=output[stage],
                buffers=LayerBuffers(own, delayed, partial, gradients, rows, apply),
            )
        )
    return measured, tuple(tensors)


def _static_sizes(program: Program, sample_shapes: Sequence[Sequence[int]], samples: int) -> _Sizes:
    """Returns the sizes of residuals and partial results of Bx whose shape is known without running anything."""
    sizes: dict[tuple[int, Ref], int] = {}
    for stage, shapes in zip(program.stages, stage_shapes(program, sample_shapes, samples), strict=True):
        graph = Graph(stage.own_graph)
        for value in {value for _, function in stage.phases if function is not None for value in function.inputs}:
            if value.kind in (ValueKind.RESIDUAL, ValueKind.PARTIAL):
                size = tensor_bytes(graph, value.ref, shapes)
                if size is not None:
                    sizes[stage.index, value.ref] = size
    return sizes


def _min_cut_bytes(program: Program, trace: StepTrace, static: _Sizes, otherwise: Sequence[int]) -> list[int]:
    """Returns the bytes that each stage keeps with recomputation; those without, if they aren't known.

    Most of it is also kept without recomputation, and was measured; shapes give the rest.
    """
    kept = kept_tensors(program)
    measured = trace.kept_bytes([[ref for ref in refs if trace.knows(stage, ref)] for stage, refs in enumerate(kept)])
    sizes = []
    for stage, refs in enumerate(kept):
        fresh = [static.get((stage, ref)) for ref in refs if not trace.knows(stage, ref)]
        known = [size for size in fresh if size is not None]
        sizes.append(measured[stage] + sum(known) if len(known) == len(fresh) else otherwise[stage])
    return sizes


def _weight_inputs(stage: Stage) -> dict[Value, list[Ref]]:
    """Returns the inputs of Bw, without variables and scalars, each with the tensors by which it is read.

    Partial results that only reshape count as their source.
    """
    if stage.weight_grad is None or stage.graph is None:
        return {}
    graph = Graph(stage.own_graph)
    known = {} if stage.input_grad is None else {value.ref: value for value in stage.input_grad.inputs}
    known |= {ref: value for value, ref in stage.arguments.items()}
    roots: dict[Value, list[Ref]] = {}
    for value in stage.weight_grad.inputs:
        root, ref = value, value.ref
        if value.kind is ValueKind.PARTIAL:
            while ref not in known and graph.nodes[ref.node].op in _ALIASES:
                ref = graph.inputs(ref.node)[0]
            root = known.get(ref, Value(ref, ValueKind.PARTIAL))
        roots.setdefault(root, []).append(value.ref)
    return roots


def _readers(program: Program, trace: StepTrace, reads: Sequence[Sequence[tuple[int, Ref]]]) -> list[frozenset[int]]:
    """Returns, for each boundary, the stages that read its buffer, also through a receiving stage's alias of it."""
    own = [
        {address for maker, ref in tensors if maker == stage and (address := trace.address(maker, ref)) is not None}
        for stage, tensors in enumerate(reads)
    ]
    readers: dict[Ref, frozenset[int]] = {}
    addresses = {boundary.ref: trace.address(boundary.producer, boundary.ref) for boundary in program.boundaries}
    for boundary in sorted(program.boundaries, key=lambda boundary: -boundary.producer):
        address = addresses[boundary.ref]
        stages = {stage for stage, tensors in enumerate(reads) if (boundary.producer, boundary.ref) in tensors}
        # The buffer is alive while these run, so that a result of theirs at its address is the buffer.
        stages |= {stage for stage in (boundary.producer, *boundary.consumers) if address in own[stage]}
        for other in program.boundaries:
            if other.producer in boundary.consumers and addresses[other.ref] == address and other.ref in readers:
                stages |= readers[other.ref]
        readers[boundary.ref] = frozenset(stages)
    return [readers[boundary.ref] for boundary in program.boundaries]


def _outside(program: Program, trace: StepTrace, stage: int) -> set[Hashable]:
    """Returns the buffers that a stage receives or passes on: they count as tensors between layers."""

    def passes(boundary: Boundary) -> bool:
        return boundary.producer == stage or stage in boundary.consumers

    return {trace.address(b.producer, b.ref) for b in program.boundaries if passes(b)}


def _own_bytes(
    trace: StepTrace, static: _Sizes, stage: int, reads: Sequence[tuple[int, Ref]], outside: set[Hashable]
) -> int:
    """Bytes of the buffers that a stage makes for itself."""
    own = [(maker, ref) for maker, ref in reads if maker == stage]
    known = [made for made in own if trace.knows(*made)]
    inside = [made for made in known if trace.address(*made) not in outside]
    unknown = sum(static.get(made, 0) for made in own if not trace.knows(*made))
    return trace.buffer_bytes(inside) + unknown + trace.list_bytes(stage, [ref for _, ref in known])
