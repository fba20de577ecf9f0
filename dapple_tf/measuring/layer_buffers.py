"""The buffers that a layer's tasks leave in memory, and their readers: from a traced step, and from shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from dapple_tf.describe.layer_profile import LayerBuffers
from dapple_tf.describe.profile import Tensor
from dapple_tf.measuring.cost_fit import cost_through
from graph_passes.ir.graph import Graph, Ref
from graph_passes.ir.program import Boundary, Program, Stage, StageFunction, Value, ValueKind

if TYPE_CHECKING:
    from dapple_tf.measuring.layer_memory import StepTrace

_ALIASES = frozenset({"ExpandDims", "Identity", "PreventGradient", "Reshape", "Squeeze", "StopGradient"})
"""Operators whose result is the buffer of their first argument."""

Sizes = Mapping[tuple[int, Ref], int]
"""(stage, tensor) -> bytes that follow from shapes alone."""


@dataclasses.dataclass(frozen=True)
class Buffers:
    """The buffers that a step of layers leaves in memory at one size.

    Attributes:
        layers: bytes of each layer, as in `LayerBuffers`.
        readers: for each boundary, the layers whose backward reads it, those whose Bw does, and whether Bw of its
            producer reads its gradient.
    """

    layers: tuple[tuple[int, ...], ...]
    readers: tuple[tuple[frozenset[int], frozenset[int], bool], ...]


def buffers_of(program: Program, split: Program, trace: StepTrace, static: Sizes) -> Buffers:
    """Returns the buffers of a traced step.

    Args:
        program: the stages of the traced step, one for each layer.
        split: the same stages with Bx and Bw in place of B.
        trace: trace of a step.
        static: sizes for the same number of samples; unknown ones count as 0.
    """
    whole = [_read(program, stage, [stage.backward]) for stage in program.stages]
    delayed = [_read(split, stage, [stage.weight_grad]) for stage in split.stages]
    kept_by, delayed_by = (_readers(program, trace, reads) for reads in (whole, delayed))
    gradients = [{value.ref for value in _roots(stage) if value.kind is ValueKind.GRADIENT} for stage in split.stages]
    readers = []
    for kept, late, boundary in zip(kept_by, delayed_by, program.boundaries, strict=True):
        readers.append((kept, late, boundary.ref in gradients[boundary.producer]))
    layers = []
    for stage, of_weights in zip(program.stages, split.stages, strict=True):
        outside = _outside(program, trace, stage.index)
        sizes = [_own_bytes(trace, static, stage.index, reads[stage.index], outside) for reads in (whole, delayed)]
        sizes.append(_partial_bytes(of_weights, static))
        sizes += [trace.gradient_bytes(stage.index), trace.row_bytes(stage.index), trace.apply_bytes(stage.index)]
        layers.append(tuple(sizes))
    return Buffers(tuple(layers), tuple(readers))


def fitted(
    samples: Sequence[int], measured: Sequence[Buffers], tensors: Sequence[Tensor]
) -> tuple[tuple[LayerBuffers, ...], tuple[Tensor, ...]]:
    """Fits buffers at several sizes: their costs per sample, and the tensors with their readers."""
    layers = []
    for sizes in zip(*(buffers.layers for buffers in measured), strict=True):
        residual, delayed, partial, gradients, rows, apply = zip(*sizes, strict=True)
        layers.append(
            LayerBuffers(
                residual=cost_through(samples, residual),
                delayed=cost_through(samples, delayed),
                partial=cost_through(samples, partial),
                gradients=max(gradients),
                rows=cost_through(samples, rows),
                apply=min(apply),
            )
        )
    known = [
        dataclasses.replace(tensor, kept=tuple(sorted(kept)), delayed=tuple(sorted(late)), gradient_delayed=gradient)
        for tensor, (kept, late, gradient) in zip(tensors, measured[-1].readers, strict=True)
    ]
    return tuple(layers), tuple(known)


def _read(program: Program, stage: Stage, functions: Iterable[StageFunction | None]) -> list[tuple[int, Ref]]:
    """Returns (producing stage, tensor) for forward tensors that backward functions read, also through aliases."""
    makers = {boundary.ref: boundary.producer for boundary in program.boundaries}
    tensors: dict[tuple[int, Ref], None] = {}
    partial = False
    for function in functions:
        for value in function.inputs if function is not None else ():
            partial |= value.kind is ValueKind.PARTIAL
            if value.kind is ValueKind.RESIDUAL:
                tensors[stage.index, value.ref] = None
            elif value.kind is ValueKind.FORWARD and value.ref in makers:
                tensors[makers[value.ref], value.ref] = None
    for value in _roots(stage) if partial else ():
        if value.kind is ValueKind.RESIDUAL:
            tensors[stage.index, value.ref] = None
        elif value.kind is ValueKind.FORWARD and value.ref in makers:
            tensors[makers[value.ref], value.ref] = None
    return list(tensors)


def _roots(stage: Stage) -> list[Value]:
    """Returns what Bw reads besides variables and scalars; partial results that only reshape count as their source."""
    if stage.weight_grad is None or stage.graph is None:
        return []
    graph = Graph(stage.own_graph)
    arguments = {ref: value for value, ref in stage.arguments.items()}
    given = {value.ref: value for value in stage.input_grad.inputs} if stage.input_grad is not None else {}
    roots: dict[Value, None] = {}
    for value in stage.weight_grad.inputs:
        ref = value.ref
        if value.kind is ValueKind.PARTIAL:
            while ref not in arguments and ref not in given and graph.nodes[ref.node].op in _ALIASES:
                ref = graph.inputs(ref.node)[0]
            known = arguments.get(ref) or given.get(ref)
            value = known if known is not None else Value(ref, ValueKind.PARTIAL)
        roots[value] = None
    return list(roots)


def _partial_bytes(stage: Stage, static: Sizes) -> int:
    """Returns the bytes that Bx makes for Bw; reshapes of one buffer count once."""
    given = {value.ref for value in stage.weight_grad.inputs} if stage.weight_grad is not None else set()
    total = 0
    for value in _roots(stage):
        if value.kind is ValueKind.PARTIAL:
            size = static.get((stage.index, value.ref))
            if size is None and value.ref not in given:  # The alias that Bw reads has a known shape.
                size = max(
                    (static.get((stage.index, ref), 0) for ref in given if _leads(stage, ref, value.ref)), default=0
                )
            total += size or 0
    return total


def _leads(stage: Stage, alias: Ref, root: Ref) -> bool:
    graph = Graph(stage.own_graph)
    while alias != root:
        if alias.node not in graph.nodes or graph.nodes[alias.node].op not in _ALIASES:
            return False
        alias = graph.inputs(alias.node)[0]
    return True


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
    trace: StepTrace, static: Sizes, stage: int, reads: Sequence[tuple[int, Ref]], outside: set[Hashable]
) -> int:
    """Bytes of the buffers that a stage makes for itself."""
    own = [(maker, ref) for maker, ref in reads if maker == stage]
    known = [made for made in own if trace.knows(*made)]
    inside = [made for made in known if trace.address(*made) not in outside]
    unknown = sum(static.get(made, 0) for made in own if not trace.knows(*made))
    return trace.buffer_bytes(inside) + unknown + trace.list_bytes(stage, [ref for _, ref in known])
