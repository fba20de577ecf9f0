"""What an engine has built: stage functions and steps; and what a step gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.batch import BatchSpec
from dapple_tf.capture import Mode
from dapple_tf.device_values import Holding
from dapple_tf.operators.op_graph import OpPlacement
from dapple_tf.operators.step_placer import PlacedStep
from dapple_tf.step_nodes import StepNode
from dapple_tf.step_trace import TracedStep
from graph_passes.group_update import GroupUpdate
from graph_passes.program import Program, Step


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What one step gave.

    Attributes:
        loss: mean loss over the batch, regularizers and the like included; None for prediction.
        metrics: metric variable -> its new value.
        outputs: the model's outputs for the whole batch; empty unless predicting.
        gradients: parameter -> gradient; empty unless asked for.
        traced: what tells of its times and memory; None unless asked for.
    """

    loss: float | None
    metrics: Mapping[str, np.ndarray]
    outputs: tuple[np.ndarray, ...]
    gradients: Mapping[str, np.ndarray]
    traced: TracedStep | None = None


class Kind(NamedTuple):
    """What a step graph is for.

    Attributes:
        samples: of its batch.
        carries: whether it leaves updates to the next step.
        head: whether it begins with those that the step before has left.
        gradients: whether it is for fetching gradients, where operators are placed: their order would otherwise make
            them wait for updates. Other steps give both.
    """

    samples: int
    carries: bool = False
    head: bool = False
    gradients: bool = False


@dataclasses.dataclass
class Build:
    """The stage functions of one mode and batch structure, and the steps made of them so far.

    Attributes:
        carried: the parameter groups whose updates steps leave to the next one, by their stages.
        flush: node that makes these updates without a step; None as long as there is none.
        nodes: name of a step -> what the nodes of its graph do.
        placed: steps whose operators have been placed, and that aren't in the session yet.
        placements: step -> stage -> where its operators are.
    """

    mode: Mode
    spec: BatchSpec
    program: Program
    updates: tuple[GroupUpdate, ...]
    prefix: str
    steps: dict[Kind, tuple[str, Step]] = dataclasses.field(default_factory=dict)
    carried: tuple[tuple[int, ...], ...] = ()
    flush: str | None = None
    nodes: dict[str, Mapping[str, StepNode]] = dataclasses.field(default_factory=dict)
    placed: dict[Kind, PlacedStep] = dataclasses.field(default_factory=dict)
    placements: dict[Kind, Mapping[int, OpPlacement]] = dataclasses.field(default_factory=dict)

    def input_shapes(self, kind: Kind) -> list[tuple[int | None, ...]]:
        """The shapes of the batch inputs of a step."""
        return [(kind.samples, *leaf.shape[1:]) for leaf in self.spec.leaves]


class StepSource(NamedTuple):
    """What a step is made of.

    Attributes:
        built: the stage functions.
        training: whether layers behave as in training.
        kind: the largest step that was made of them; None if there is none yet.
        hosts: variable -> the stages that keep it.
        holdings: what devices keep.
    """

    built: Build
    training: bool
    kind: Kind | None
    hosts: Mapping[str, tuple[int, ...]]
    holdings: Sequence[Holding]
