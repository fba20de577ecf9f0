"""What a model's layers cost, estimated by their operators and scaled to measured steps of the whole model.

Measuring layer by layer needs a step with a stage for each, whose preparation takes a minute for models of a few
hundred layers. Here nothing is run but ordinary steps: rooflines (`operators/rooflines.py`) say what part of a step is
each layer's, and how it grows with the samples; shapes say what tensors take.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from dapple_tf.frontend.variables import VariableTable
from dapple_tf.operators.build_op_graph import operator_signatures
from dapple_tf.operators.function_work import FunctionWork
from dapple_tf.operators.op_costs import OperatorCosts, device_kind
from dapple_tf.operators.signatures import OpSignature
from dapple_tf.profiling.cost_fit import cost_through
from dapple_tf.profiling.layer_memory import has_gradient, kept_tensors, stage_shapes, variable_bytes
from dapple_tf.profiling.profile import ZERO, Cost, LayerProfile, Profile, Tensor
from dapple_tf.profiling.timed_step import input_gradients_of
from graph_passes.graph import Graph, Ref
from graph_passes.group_update import GroupUpdate
from graph_passes.program import Program, Stage
from graph_passes.tensorflow_bridge import Shape, dtype_size, takes_functions

_SECONDS_PER_NODE = 0.025
"""What measuring layer by layer takes for each node of the captured graph, on two cores: 60 s for MobileNetV3Small."""
_TASK_SECONDS = 50e-6
"""What starting a task takes."""


def measuring_seconds(flat: Program) -> float:
    """About how long measuring a captured model layer by layer takes; what steps take comes to it."""
    inside = sum(len(function.node_def) for function in flat.graph.library.function)
    return (len(flat.graph.node) + inside) * _SECONDS_PER_NODE


@dataclasses.dataclass(frozen=True)
class _Amounts:
    """Of one layer, with slices of one size: seconds of F, B and the weight gradients' part of B; bytes."""

    forward: float
    backward: float
    weight: float
    residual: float
    temporary: float


def estimated(
    program: Program,
    names: Sequence[str],
    updates: Sequence[GroupUpdate],
    table: VariableTable,
    sample_shapes: Sequence[Sequence[int]],
    sizes: Sequence[int],
    profile: Profile,
) -> Profile:
    """A profile whose times are those of rooflines.

    Args:
        program: a stage for each layer, with functions.
        names: of the layers.
        updates: the optimizer's part for each parameter group.
        table: the model's variables.
        sample_shapes: the shape of one sample of each batch input.
        sizes: samples of slices, the smallest first.
        profile: anything of the model; its layers and tensors are replaced.
    """
    least, most = sizes[0], sizes[-1]
    ends = (least, most if most > least else 2 * least)
    costs, kind = OperatorCosts(), device_kind(profile.device)
    amounts: list[list[_Amounts]] = []
    tensors: list[dict[Ref, int]] = []
    for samples in ends:
        shapes = stage_shapes(program, sample_shapes, samples)
        amounts.append([_amounts(program, stage, shapes[stage.index], costs, kind) for stage in program.stages])
        tensors.append(
            {
                boundary.ref: _elements(boundary.example_slice_shape(samples)) * dtype_size(boundary.dtype)
                for boundary in program.boundaries
            }
        )

    def line(of: Sequence[float]) -> Cost:
        return cost_through(ends, of)

    between, output = [], [ZERO] * len(names)
    for boundary in program.boundaries:
        size = line([of_size[boundary.ref] for of_size in tensors])
        between.append(Tensor(boundary.producer, boundary.consumers, size, has_gradient(program, boundary)))
        output[boundary.producer] = output[boundary.producer] + size
    variables = variable_bytes(program, updates, table)
    bandwidth = costs.copy_seconds(kind)
    layers = []
    for index, name in enumerate(names):
        few, many = amounts[0][index], amounts[1][index]
        backward = line((few.backward, many.backward))
        moved = variables.parameters[index] + variables.slots[index]
        layers.append(
            LayerProfile(
                name=name,
                forward=line((few.forward, many.forward)),
                backward=backward,
                backward_weight=backward * (many.weight / many.backward if many.backward else 0.0),
                residual_bytes=line((few.residual, many.residual)),
                temporary_bytes=line((few.temporary, many.temporary)),
                output_bytes=output[index],
                parameter_bytes=variables.parameters[index],
                slot_bytes=variables.slots[index],
                state_bytes=variables.state[index],
                apply_seconds=moved * bandwidth,
            )
        )
    return dataclasses.replace(
        profile,
        layers=tuple(layers),
        tensors=tuple(between),
        shared=variables.shared,
        task_seconds=_TASK_SECONDS,
        estimated=True,
    )


def scaled_to(profile: Profile, samples: int, micro_batches: int, seconds: float) -> Profile:
    """A profile whose step on one device, micro-batches one after the other, takes as long as was measured.

    Args:
        profile: the profile.
        samples: of a micro-batch.
        micro_batches: of the step.
        seconds: that the step took.
    """
    cost = profile.total("forward") + profile.total("backward")
    expected = micro_batches * cost.at(samples) + sum(layer.apply_seconds for layer in profile.layers)
    started = 2 * micro_batches * profile.task_seconds
    return profile.scaled(max(seconds - started, 0.1 * seconds) / expected) if expected else profile


def _amounts(
    program: Program, stage: Stage, shapes: Mapping[Ref, Shape | None], costs: OperatorCosts, kind: str
) -> _Amounts:
    assert stage.graph is not None and stage.forward is not None and stage.backward is not None
    graph, functions = Graph(stage.graph), FunctionWork(stage.graph, costs, shapes)
    made = operator_signatures(stage.graph, shapes)
    seconds: dict[str, float] = {}

    def total(nodes: set[str]) -> float:
        for name in nodes & made.keys() - seconds.keys():
            node = graph.nodes[name]
            whole = takes_functions(node.op)
            seconds[name] = functions.seconds(node, made[name], kind) if whole else costs.seconds(made[name], kind)
        return sum(seconds.get(name, 0.0) for name in nodes)

    def behind(results: Sequence[Ref], start: Sequence[Ref]) -> set[str]:
        return set(graph.ancestors(results, start, control=False))

    places = [stage.arguments.get(value, value.ref) for value in stage.forward.inputs]
    ends = [stage.results.get(value, value.ref) for value in stage.forward.outputs]
    forward = behind([ref for ref in ends if ref.node in graph.nodes], places)
    kept = [stage.arguments.get(value, value.ref) for value in stage.backward.inputs]
    backward = behind([stage.results[value] for value in stage.backward.outputs], kept)
    of_input = behind([stage.results[value] for value in input_gradients_of(program, stage)], kept)
    residuals = [
        made[ref.node].outputs[ref.output].bytes for ref in kept_tensors(program, stage.index) if ref.node in made
    ]
    return _Amounts(
        forward=total(forward),
        backward=total(backward),
        weight=total(backward - of_input),
        residual=float(sum(residuals)),
        temporary=float(max((_largest(made[name]) for name in backward & made.keys()), default=0)),
    )


def _largest(signature: OpSignature) -> int:
    return max((tensor.bytes for tensor in signature.outputs), default=0)


def _elements(shape: Shape) -> int:
    """Number of elements; an unknown length counts as 1."""
    return math.prod(1 if size is None else size for size in shape)
