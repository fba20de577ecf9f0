"""The input of the update pass: the user's optimizer as graphs, one part for each parameter group."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from graph_passes.ir.graph import GraphDef, Ref
from graph_passes.ir.program import Variable


def shard_storage(parameter: str) -> str:
    """Returns the storage of a device's shard of a parameter while it is updated."""
    return f"{parameter}/shard"


@dataclasses.dataclass(frozen=True)
class Captured:
    """A traced computation on variables: a part of the user's optimizer.

    Attributes:
        graph: its nodes.
        gradients: parameter -> placeholder of its gradient.
        slices: parameter -> placeholders of the rows of its gradient and of their indices.
        row_shapes: parameter -> placeholder of its shape, where that is asked for besides (int32).
        variables: resource placeholder -> the variable that it stands for.
        totals: placeholder of the statistics' sum over all groups (float64); None when the computation needs none.
        outputs: results.
        effects: nodes that change variables.
    """

    graph: GraphDef
    gradients: Mapping[str, Ref]
    variables: Mapping[Ref, Variable]
    slices: Mapping[str, tuple[Ref, Ref]] = dataclasses.field(default_factory=dict)
    row_shapes: Mapping[str, Ref] = dataclasses.field(default_factory=dict)
    totals: Ref | None = None
    outputs: tuple[Ref, ...] = ()
    effects: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Shards:
    """The parameters of a group of which each device updates an equal part of the elements, and keeps their slots.

    Attributes:
        parameters: their names. ``apply`` takes a shard of each one's gradient, or its rows in the shard.
        statistics: as in `GroupUpdate`, of a device's shards of their gradients.
        stored: those of which each device keeps only its shard of the parameter itself, too.
    """

    parameters: frozenset[str]
    statistics: Captured | None = None
    stored: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class GroupUpdate:
    """How one parameter group is updated: the parameters that the same stages read.

    Attributes:
        stages: those stages, ascending.
        apply: the optimizer on the group's parameters.
        statistics: what the optimizer needs of all gradients (a vector that adds up over groups: the squared norm, the
            number of non-finite values); None if it needs nothing.
        loss_scale: the factor of the loss, by this group's part of the optimizer; None for 1.
        shards: the parameters that the group's devices update together; None if each updates all of them.
    """

    stages: tuple[int, ...]
    apply: Captured
    statistics: Captured | None = None
    loss_scale: Captured | None = None
    shards: Shards | None = None
