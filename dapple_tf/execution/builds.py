"""What an engine builds: stage functions and steps; and a step's request and result."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dapple_tf.errors import CaptureError, StepError
from dapple_tf.frontend.batch import BatchSpec
from dapple_tf.frontend.capture import Mode
from dapple_tf.frontend.host_part import shapes_on_devices
from dapple_tf.operators.op_graph import OpPlacement
from dapple_tf.operators.step_placer import PlacedStep
from dapple_tf.tracing.step_nodes import StepNode
from dapple_tf.tracing.step_trace import TracedStep
from dapple_tf.variables.device_values import Holding
from dapple_tf.variables.parameter_groups import Arrangement
from graph_passes.analysis.sample_dependence import spreads_of
from graph_passes.ir.graph import GraphDef, Ref
from graph_passes.ir.group_update import GroupUpdate
from graph_passes.ir.program import Layout, Program, Step
from graph_passes.ir.spreads import Spread

PREPARED_STEPS = 64
"""Number of steps that stay prepared, by default: more than training, evaluation and prediction of a few sizes need."""


@dataclasses.dataclass(frozen=True)
class StepResult:
    """The result of one step.

    Attributes:
        loss: mean loss over the batch, regularizers and the like included; None for prediction.
        metrics: metric variable -> its new value.
        outputs: the model's outputs for the whole batch; empty unless predicting.
        gradients: parameter -> gradient; empty unless requested.
        traced: the step's trace of times and memory; None unless requested.
    """

    loss: float | None
    metrics: Mapping[str, np.ndarray]
    outputs: tuple[np.ndarray, ...]
    gradients: Mapping[str, np.ndarray]
    traced: TracedStep | None = None


class StepKind(NamedTuple):
    """The purpose of a step graph.

    Attributes:
        samples: number of samples in its batch.
        carries: whether it leaves updates to the next step.
        head: whether it begins with the updates that the previous step left.
        apart: whether the graph is a separate one: for fetching gradients if operators are placed, whose order would
            otherwise make them wait for updates; for fetching gradients and tracing if a step is one function. Other
            steps serve all purposes.
        on_workers: whether workers take the batch that they have read themselves.
        in_parts: whether each of them has only a part of it.
    """

    samples: int
    carries: bool = False
    head: bool = False
    apart: bool = False
    on_workers: bool = False
    in_parts: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class StepRequest:
    """A step's feeds and fetches, by names in the session's graph.

    Attributes:
        feeds: placeholders of the batch's arrays, or of the number under which workers keep it, then two for each of
            `Step.metric_feeds`.
        fetches: tensors for "metrics", "outputs", "gradients" and "loss", and the node "train", if they exist.
        sums: whether tasks add up over replicas.
    """

    feeds: tuple[str, ...]
    fetches: Mapping[str, Any]
    sums: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class BuiltStep:
    """A step for a session.

    Attributes:
        name: its name in the session's graph, before those of its nodes.
        step: its tensors.
        graph: its graph.
        nodes: purposes of the graph's nodes.
        placements: stage -> placement of its operators, if they are placed one by one.
    """

    name: str
    step: Step
    graph: GraphDef
    nodes: Mapping[str, StepNode]
    placements: Mapping[int, OpPlacement]
    _requests: dict[bool, StepRequest] = dataclasses.field(default_factory=dict)

    def request(self, program: Program, want_gradients: bool) -> StepRequest:
        """Returns its feeds and fetches, made once; with gradients it leaves the variables unchanged.

        Args:
            program: the program with its stage functions.
            want_gradients: whether gradients are fetched.
        """
        if want_gradients not in self._requests:
            self._requests[want_gradients] = self._requested(program, want_gradients)
        return self._requests[want_gradients]

    def _requested(self, program: Program, want_gradients: bool) -> StepRequest:
        def name(ref: Ref) -> str:
            return f"{self.name}/{ref.node}:{ref.output}"

        step = self.step
        feeds = [step.feeds[ref] for ref in program.roles.inputs] if step.taken is None else [step.taken.number]
        feeds += [ref for placeholders in step.metric_feeds.values() for ref in placeholders]
        fetches: dict[str, Any] = {
            "metrics": {key: [name(ref) for ref in refs] for key, refs in step.metric_results.items()},
            "outputs": [[name(ref) for ref in refs] for refs in step.outputs],
            "gradients": {key: name(ref) for key, ref in step.gradients.items()} if want_gradients else {},
        }
        if step.loss is not None:
            fetches["loss"] = name(step.loss)
        if step.train is not None and not want_gradients:
            fetches["train"] = f"{self.name}/{step.train}"
        return StepRequest(tuple(map(name, feeds)), fetches, program.roles.peers is not None)


class Flush(NamedTuple):
    """A graph for a session that makes left-over updates without a step.

    Attributes:
        name: its name in the session's graph.
        graph: the graph.
        node: the node to run, by its name in the session's graph.
    """

    name: str
    graph: GraphDef
    node: str


@dataclasses.dataclass
class Build:
    """The stage functions of one mode and batch structure, and the steps made of them so far.

    Attributes:
        carried: the parameter groups whose updates steps leave to the next one, by their stages.
        flush: makes these updates without a step; None as long as no step has left any.
        placed: steps whose operators have been placed, and that aren't built yet.
        output_spreads: output -> its relation to the whole batch's; empty as long as nobody has asked.
    """

    mode: Mode
    spec: BatchSpec
    program: Program
    updates: tuple[GroupUpdate, ...]
    prefix: str
    steps: dict[StepKind, BuiltStep] = dataclasses.field(default_factory=dict)
    carried: tuple[tuple[int, ...], ...] = ()
    flush: Flush | None = None
    placed: dict[StepKind, PlacedStep] = dataclasses.field(default_factory=dict)
    output_spreads: dict[Ref, Spread] = dataclasses.field(default_factory=dict)

    def joined(self, number: int, parts: Sequence[np.ndarray], layout: Layout) -> np.ndarray:
        """Joins the slices of an output of the model to the whole batch's.

        Args:
            number: of the output.
            parts: its slices, in the order of samples.
            layout: how the batch is cut.

        Raises:
            CaptureError: its values aren't known to belong to single samples.
            StepError: samples decide the slices' lengths, which differ.
        """
        if len(parts) == 1:
            return parts[0]
        program, roles = self.program, self.program.roles
        ref, shape = roles.outputs[number], roles.output_shapes[number]
        stage, count = program.node_stage.get(ref.node, len(program.stages) - 1), len(layout.micro_batch_intervals)
        sizes = [own.size for micro_batch in range(count) for own in layout.slices(stage, micro_batch) if own.size]
        one_each = all(part.shape[:1] == (size,) for part, size in zip(parts, sizes, strict=True))
        lengths = list(dict.fromkeys(part.shape[1:] for part in parts))
        if one_each and len(lengths) > 1:
            raise StepError(
                f"slices of a batch predict samples of shapes {lengths[0]} and {lengths[1]}, which can't be joined: "
                f"the samples of each slice decide their lengths (cropped to the longest, say); plan one slice for "
                f"stage {stage} (one micro-batch, one replica), or give all predictions one length"
            )
        if one_each and shape is not None and None not in shape[1:]:
            return np.concatenate(parts)
        if not self.output_spreads:
            self.output_spreads |= spreads_of(program.replace(graph=program.flat_graph), roles.outputs)
        spread = self.output_spreads.get(ref, Spread(axis=0, outer=None))
        if spread.constant:
            return parts[0]
        outer = 1 if one_each and spread.axis == 0 else spread.outer
        if spread.axis is None or outer is None:
            raise CaptureError(
                f"output {number} of the model has shape {list(parts[0].shape)} for a slice of {sizes[0]} samples: "
                f"which of its values belong to which sample isn't known, so that the slices of a batch can't be "
                f"joined; plan one slice for stage {stage} (one micro-batch, one replica), or return an output with a "
                f"row for each sample"
            )
        pieces = [np.split(part, outer or 1, spread.axis) for part in parts]
        return np.concatenate([piece for several in zip(*pieces, strict=True) for piece in several], spread.axis)

    def input_shapes(self, kind: StepKind) -> list[tuple[int | None, ...]]:
        """Returns the shapes of the batch inputs of a step."""
        rows = None if self.spec.uncut else kind.samples
        return [(rows, *shape[1:]) for shape in shapes_on_devices(self.program, self.spec)]


class StepSource(NamedTuple):
    """The parts that a step is made from.

    Attributes:
        built: the stage functions.
        training: whether layers behave as in training.
        kind: the largest step made from them; None if there is none yet.
        arrangement: the stages that keep each variable.
        holdings: what devices keep.
    """

    built: Build
    training: bool
    kind: StepKind | None
    arrangement: Arrangement
    holdings: Sequence[Holding]
