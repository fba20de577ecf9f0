"""What the nodes of a step's top level are for: one enum, which passes write into nodes and views look up."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

from graph_passes.ir.graph import (
    GROUP_ATTR,
    MICRO_BATCH_ATTR,
    PHASE_ATTR,
    REPLICA_ATTR,
    STAGE_ATTR,
    NodeDef,
    integers_attr,
)
from graph_passes.ir.tasks import Phase, Task

METADATA = frozenset({"Shape", "ShapeN", "Size", "Rank", "BroadcastGradientArgs", "ConcatOffset"})
"""The ops that read only the shape of a tensor."""


class NodeKind(enum.Enum):
    """The purpose of a node of a step. Its value is the node's `PHASE_ATTR`.

    Attributes:
        phase: of a task's call, and of an operator that was in one.
        traced: the category of its time in a trace; empty for connections.
        drawn: its category in a drawing of the step; empty for connections.
    """

    FORWARD = "forward", "F", "F"
    BACKWARD = "backward", "B", "B"
    INPUT_GRAD = "input_grad", "Bx", "Bx"
    WEIGHT_GRAD = "weight_grad", "Bw", "Bw"
    METRICS = "metrics", "metrics", "metrics"
    BATCH = "batch", "host", "other"  # the batch that a worker has read itself
    SLICES = "slices", "host", "split"  # the batch, cut for the replicas of a stage
    NORMALIZERS = "normalizers", "host", "other"  # what slices need to know of the whole batch
    READ = "read", "", "read"  # variables
    INTEGERS = "integers", "", ""  # that a GPU's host computes before a task
    INDICES = "indices", "", ""  # of the rows that a task needs, before it
    LOOKUP = "lookup", "", "read"  # these rows, read where they are kept
    LOSS = "loss", "", "other"  # the sum over slices
    LOSS_SCALE = "loss_scale", "", "other"
    SPLIT = "split", "", "split"
    CONCAT = "concat", "", "concat"
    LENGTHS = "lengths", "", ""  # of the parts of a split, where they are known at run time only
    MEAN = "mean", "", ""
    SHARE = "share", "", ""
    SUM = "sum", "", ""
    RELAY = "relay", "relay", "relay"  # a tensor of another stage, or the sum of its gradients, that a stage hands on
    ZEROS = "zeros", "", ""
    ACCUMULATE = "accumulate", "accumulate", "accumulate"
    ACCUMULATE_NOTHING = "accumulate_nothing", "accumulate", "accumulate"  # of a replica without samples
    PACK = "pack", "pack", "all_reduce"  # gradients into vectors
    ALL_REDUCE = "all_reduce", "all_reduce", "all_reduce"
    REDUCE_SCATTER = "reduce_scatter", "all_reduce", "all_reduce"  # before an all-reduce between servers, or an update
    ALL_GATHER = "all_gather", "all_reduce", "all_reduce"  # after it, or of parameters before forwards
    STATISTICS = "statistics", "apply", "other"  # what the optimizer needs to know of all gradients
    TOTALS = "totals", "", "other"  # their sum over groups
    APPLY = "apply", "apply", "apply"
    CARRIED_APPLY = "carried_apply", "apply", "apply"  # of the step before
    COUNTERS = "counters", "apply", "apply"  # what a step assigns of a group that it carries over
    GRADIENTS = "gradients", "", "other"  # reduced gradients, to be fetched
    TRAIN = "train", "", "other"  # the end of the step
    JOINED = "joined", "", "other"  # a whole step as one call

    def __new__(cls, text: str, traced: str, drawn: str) -> NodeKind:
        """The text alone is a member's value."""
        member = object.__new__(cls)
        member._value_ = text
        return member

    def __init__(self, text: str, traced: str, drawn: str) -> None:
        self.traced, self.drawn = traced, drawn
        phases = {phase.value: phase for phase in Phase}
        self.phase: Phase | None = phases.get(traced)

    @property
    def text(self) -> str:
        """The text in the node."""
        return str(self.value)

    def marks(
        self, stage: int | None = None, replica: int | None = None, *, group: Sequence[int] = ()
    ) -> dict[str, Any]:
        """Returns the attributes of a node of this kind: of a stage or its replica, or of a group of stages."""
        marks = {PHASE_ATTR: self.text, STAGE_ATTR: stage, REPLICA_ATTR: replica}
        if group:
            marks |= {STAGE_ATTR: group[0], GROUP_ATTR: integers_attr(group)}
        return {name: value for name, value in marks.items() if value is not None}

    @classmethod
    def of_phase(cls, phase: Phase) -> NodeKind:
        """Returns the kind of the calls of a phase's tasks."""
        return _OF_PHASES[phase]

    @classmethod
    def of(cls, node: NodeDef) -> NodeKind | None:
        """Returns the purpose of a node; None if no pass has marked it, or a user's pass has marked it otherwise."""
        return _BY_TEXT.get(node.attr[PHASE_ATTR].s) if PHASE_ATTR in node.attr else None


_BY_TEXT = {kind.text.encode(): kind for kind in NodeKind}
_OF_PHASES = {kind.phase: kind for kind in NodeKind if kind.phase is not None}


def task_attrs(task: Task, kind: NodeKind) -> dict[str, Any]:
    """Returns the attributes that identify a node of a task."""
    return {**kind.marks(task.stage, task.replica), MICRO_BATCH_ATTR: task.micro_batch}
