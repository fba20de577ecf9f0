"""Costs of a model's layers from the costs of their operators.

Measuring layer by layer needs a step with functions for each, whose preparation takes a minute for models of a few
hundred layers. Operators are measured in a second, in a traced step without functions (`measured_operators.py`), or
estimated by rooflines (`operators/rooflines.py`). Shapes give the bytes of tensors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from dapple_tf.common.garbage import without_collection
from dapple_tf.describe.layer_profile import ZERO, Cost, LayerProfile, NeededLater
from dapple_tf.describe.profile import Profile, Tensor
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.layer_memory import has_gradient, kept_tensors, layers_with_variables, stage_shapes
from dapple_tf.measuring.timed_step import input_gradients_of
from dapple_tf.operators.build_op_graph import OperatorSeconds, operator_signatures
from dapple_tf.operators.op_costs import OperatorCosts, device_kind
from dapple_tf.operators.signatures import OpSignature
from graph_passes.ir.graph import Graph, Ref
from graph_passes.ir.node_kinds import METADATA
from graph_passes.ir.program import Program, Stage, ValueKind
from graph_passes.ir.tensorflow_bridge import Shape, dtype_size, is_stateful

_TASK_SECONDS = 50e-6
"""Seconds to start a task."""


@dataclasses.dataclass(frozen=True)
class Amounts:
    """Costs of one layer for slices of one size: seconds of F, B and the weight gradients' part of B; bytes."""

    forward: float
    backward: float
    weight: float
    residual: float
    temporary: float


@dataclasses.dataclass(frozen=True)
class MeasuredOperators:
    """Times of operators, for the sizes of slices for which there was time.

    Attributes:
        operators: samples of a slice -> for each stage, operator -> seconds, one operator at a time. Operators that
            TensorFlow fused or computed beforehand are missing.
        seconds: samples of a slice -> seconds of one forward and backward.
    """

    operators: Mapping[int, Sequence[Mapping[str, float]]]
    seconds: Mapping[int, float]


class StageOperators:
    """The operators of a stage's F and B, for slices of one size.

    Attributes:
        signatures: operator -> what its time depends on.
    """

    def __init__(
        self, program: Program, stage: Stage, shapes: Mapping[Ref, Shape | None], residuals: Sequence[Ref]
    ) -> None:
        self._program, self._stage, self._shapes, self._residuals = program, stage, shapes, residuals
        self._graph = Graph(stage.own_graph)
        self.signatures = operator_signatures(stage.own_graph, shapes)

    def estimates(self, costs: OperatorCosts, kind: str) -> dict[str, float]:
        """Returns operator -> its time by its roofline on a kind of device."""
        seconds = OperatorSeconds(self._stage.own_graph, costs, self._shapes)
        return {name: seconds.of(self._graph.nodes[name], made, kind) for name, made in self.signatures.items()}

    def amounts(self, seconds: Mapping[str, float]) -> Amounts:
        """Returns the stage's costs by its operators' times; operators without a time cost nothing."""
        stage, graph, made = self._stage, self._graph, self.signatures

        def total(nodes: set[str]) -> float:
            return sum(seconds.get(name, 0.0) for name in nodes)

        def behind(results: Sequence[Ref], start: Sequence[Ref]) -> set[str]:
            return set(graph.ancestors(results, start, control=False))

        forward = forward_nodes(stage)
        kept = [stage.arguments.get(value, value.ref) for value in stage.own_backward.inputs]
        backward = behind([stage.results[value] for value in stage.own_backward.outputs], kept)
        of_input = behind([stage.results[value] for value in input_gradients_of(self._program, stage)], kept)
        return Amounts(
            forward=total(forward),
            backward=total(backward),
            weight=total(backward - of_input),
            residual=float(
                sum(made[ref.node].outputs[ref.output].bytes for ref in self._residuals if ref.node in made)
            ),
            temporary=float(max((_largest(made[name]) for name in backward & made.keys()), default=0)),
        )


@without_collection
def stage_operators(
    program: Program, sample_shapes: Sequence[Sequence[int]], samples: int
) -> tuple[StageOperators, ...]:
    """Returns the operators of each stage for slices of ``samples`` samples.

    Args:
        program: a stage for each layer, with functions.
        sample_shapes: the shape of one sample of each batch input.
        samples: samples of a slice.
    """
    known = zip(program.stages, stage_shapes(program, sample_shapes, samples), kept_tensors(program), strict=True)
    return tuple(StageOperators(program, *of_stage) for of_stage in known)


def layers_by_operator(
    program: Program,
    names: Sequence[str],
    table: VariableTable,
    sample_shapes: Sequence[Sequence[int]],
    operators: Mapping[int, Sequence[StageOperators]],
    measured: MeasuredOperators | None,
    profile: Profile,
) -> Profile:
    """Returns a profile whose layers take as long as their operators.

    Args:
        program: a stage for each layer, with functions.
        names: names of the layers.
        table: the variables of the model and the optimizer.
        sample_shapes: the shape of one sample of each batch input.
        operators: samples of a slice -> operators of each stage, for two sizes.
        measured: times of single operators, and of all together; None estimates them by rooflines.
        profile: any profile of the model; its layers and tensors are replaced.
    """
    costs, kind = OperatorCosts(), device_kind(profile.device)
    ends = sorted(operators)
    seconds = {samples: [each.estimates(costs, kind) for each in operators[samples]] for samples in ends}
    seconds_of_byte = costs.copy_seconds(kind)
    if measured is not None:
        expected = _sum(seconds[min(measured.seconds)])
        seconds = {samples: _scaled(seconds, measured, samples) for samples in ends}
        seconds_of_byte *= _sum(seconds[min(measured.seconds)]) / expected if expected else 1.0
    few, many = (
        [each.amounts(own) for each, own in zip(operators[samples], seconds[samples], strict=True)] for samples in ends
    )

    def line(of: Sequence[float]) -> Cost:
        return Cost.through(ends, of)

    between, output = [], [ZERO] * len(names)
    for boundary in program.boundaries:
        sizes = [_elements(boundary.example_slice_shape(samples)) * dtype_size(boundary.dtype) for samples in ends]
        size = line(sizes)
        between.append(Tensor(boundary.producer, boundary.consumers, size, has_gradient(program, boundary)))
        output[boundary.producer] = output[boundary.producer] + size
    known, shared = layers_with_variables(program, names, None, table, sample_shapes)
    later = needed_later(program, seconds[ends[-1]])
    layers = []
    for index, layer in enumerate(known):
        less, more = few[index], many[index]
        backward = line((less.backward, more.backward))
        layers.append(
            dataclasses.replace(
                layer,
                forward=line((less.forward, more.forward)),
                backward=backward,
                backward_weight=backward * (more.weight / more.backward if more.backward else 0.0),
                residual_bytes=line((less.residual, more.residual)),
                temporary_bytes=line((less.temporary, more.temporary)),
                output_bytes=output[index],
                apply_seconds=(layer.parameter_bytes + layer.slot_bytes) * seconds_of_byte,
                needed_later=later[index],
            )
        )
    return dataclasses.replace(
        profile,
        layers=tuple(layers),
        tensors=tuple(between),
        shared=shared,
        task_seconds=_TASK_SECONDS,
        method="rooflines" if measured is None else "operators",
    )


def _scaled(
    estimates: Mapping[int, Sequence[Mapping[str, float]]], measured: MeasuredOperators, samples: int
) -> list[dict[str, float]]:
    """Returns the times of each stage's operators for a slice, scaled to add up to the measured total.

    For a size that wasn't measured, times of the nearest measured size grow as their rooflines do.
    """
    nearest = min(measured.seconds, key=lambda known: abs(known - samples))
    traced = measured.operators[nearest]
    total = _sum(traced)
    ratio = measured.seconds[nearest] / total if total else 1.0
    return [
        {name: seconds * ratio * (now[name] / then[name] if then[name] else 1.0) for name, seconds in own.items()}
        for own, now, then in zip(traced, estimates[samples], estimates[nearest], strict=True)
    ]


def _sum(seconds: Sequence[Mapping[str, float]]) -> float:
    return sum(sum(own.values()) for own in seconds)


def _largest(signature: OpSignature) -> int:
    return max((tensor.bytes for tensor in signature.outputs), default=0)


def _elements(shape: Shape) -> int:
    """Returns the number of elements; an unknown length counts as 1."""
    return math.prod(1 if size is None else size for size in shape)


# ---- what ``recompute="boundary"`` computes again, and how long that takes


def needed_later(program: Program, seconds: Sequence[Mapping[str, float]]) -> list[tuple[NeededLater, ...]]:
    """Returns, for each layer, the parts of its F that its own backward doesn't need.

    Args:
        program: a stage for each layer, with functions.
        seconds: for each layer, operator -> its time, measured or estimated; others take none.
    """
    layers = []
    for index, (first, own) in enumerate(zip(needed_from(program), seconds, strict=True)):
        total = sum(own.get(name, 0.0) for name in first)
        parts: dict[int, float] = {}
        for name, layer in first.items():
            if layer > index and own.get(name, 0.0) > 0:
                parts[layer] = parts.get(layer, 0.0) + own[name]
        layers.append(tuple(NeededLater(layer, parts[layer] / total) for layer in sorted(parts)))
    return layers


def with_recomputation(layers: Sequence[LayerProfile], samples: int, ratio: float) -> list[LayerProfile]:
    """Returns layers with `LayerProfile.recomputation`, each in proportion to its F, and at most that.

    Args:
        layers: all of a model's layers.
        samples: of a slice.
        ratio: how many times as long F and B take together, as one stage of all layers that computes F again.
    """
    never = len(layers)
    once = sum(layer.forward.at(samples) + layer.backward.at(samples) for layer in layers)
    again = sum(
        layer.forward.at(samples) * (1 - sum(later.share for later in layer.needed_later if later.layer == never))
        for layer in layers
    )
    if again <= 0:
        return list(layers)
    factor = min(1.0, max(0.0, (ratio - 1) * once / again))
    return [dataclasses.replace(layer, recomputation=layer.forward * factor) for layer in layers]


def needed_from(program: Program) -> list[dict[str, int]]:
    """Returns, for each stage, forward node -> the first stage whose backward needs one of its results.

    ``Partition(recompute="boundary")`` lets the backward of the stages s to t, joined to one, compute a node of stage i
    (s <= i <= t) again exactly if this number is at most t. It is never less than i, and the number of stages for a
    node that no backward computes again: logits, say, or a random draw, whose result is kept.

    Nodes that read only the shape of a tensor don't need its values: with slices of known sizes they are constants.

    Args:
        program: stages with functions, made without recomputation.
    """
    never = len(program.stages)
    received = {boundary.ref: never for boundary in program.boundaries}  # tensor -> the first stage that needs it
    return [_of_stage(stage, received, never) for stage in reversed(program.stages)][::-1]


def forward_nodes(stage: Stage) -> set[str]:
    """Returns the nodes of a stage's graph that its F runs."""
    function, graph = stage.own_forward, Graph(stage.own_graph)
    places = [stage.arguments.get(value, value.ref) for value in function.inputs]
    ends = [stage.results.get(value, value.ref) for value in function.outputs]
    return graph.ancestors([ref for ref in ends if ref.node in graph], places, control=False)


def _of_stage(stage: Stage, received: dict[Ref, int], never: int) -> dict[str, int]:
    """Returns the entries of one stage, and notes in ``received`` the tensors that it needs from earlier ones."""
    graph, body = Graph(stage.own_graph), forward_nodes(stage)
    entering = {
        ref: value.ref
        for value, ref in stage.arguments.items()
        if value.kind is ValueKind.FORWARD and value.ref in received
    }
    needed: list[tuple[int, Ref]] = []
    for value in stage.own_backward.inputs:
        if value.kind in (ValueKind.FORWARD, ValueKind.RESIDUAL):
            needed.append((stage.index, stage.arguments.get(value, value.ref)))
    for value, ref in stage.results.items():
        if value.kind is ValueKind.FORWARD and received.get(value.ref, never) < never:
            needed.append((received[value.ref], ref))

    first: dict[str, int] = {}
    for by, result in sorted(needed):
        pending = [result]
        while pending:
            ref = pending.pop()
            if ref in entering:
                received[entering[ref]] = min(by, received[entering[ref]])
            elif ref.node in body and ref.node not in first:
                op = graph.nodes[ref.node].op
                first[ref.node] = never if is_stateful(op) else by
                if not is_stateful(op) and op not in METADATA:
                    pending += graph.inputs(ref.node)
    return {name: first.get(name, never) for name in graph.ordered(body)}
