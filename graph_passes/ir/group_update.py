"""The input of the update pass: the user's optimizer as graphs, one part for each parameter group."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from graph_passes.ir.graph import GraphDef, Ref
from graph_passes.ir.program import Variable


@dataclasses.dataclass(frozen=True)
class Captured:
    """A traced computation on variables: a part of the user's optimizer.

    Attributes:
        graph: its nodes.
        gradients: parameter -> placeholder of its gradient.
        slices: parameter -> placeholders of the rows of its gradient and of their indices.
        variables: resource placeholder -> the variable that it stands for.
        totals: placeholder of the statistics' sum over all groups (float64); None when the computation needs none.
        outputs: results.
        effects: nodes that change variables.
    """

    graph: GraphDef
    gradients: Mapping[str, Ref]
    variables: Mapping[Ref, Variable]
    slices: Mapping[str, tuple[Ref, Ref]] = dataclasses.field(default_factory=dict)
    totals: Ref | None = None
    outputs: tuple[Ref, ...] = ()
    effects: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class GroupUpdate:
    """How one parameter group is updated: the parameters that the same stages read.

    Attributes:
        stages: those stages, ascending.
        apply: the optimizer on the group's parameters.
        statistics: what the optimizer needs of all gradients (a vector that adds up over groups: the squared norm, the
            number of non-finite values); None if it needs nothing.
        loss_scale: the factor of the loss, by this group's part of the optimizer; None for 1.
    """

    stages: tuple[int, ...]
    apply: Captured
    statistics: Captured | None = None
    loss_scale: Captured | None = None
