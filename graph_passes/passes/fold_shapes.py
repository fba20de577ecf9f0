"""Turns values that follow from shapes alone into constants, so that they don't tie operators to each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from graph_passes.ir.program import Fact, Program
from graph_passes.passes.fold_loops import fold


@dataclasses.dataclass(frozen=True)
class FoldShapes:
    """Computes beforehand what depends on shapes and constants alone.

        x -> Shape -> Reshape(dy)    becomes   Const -> Reshape(dy)

    Gradients read the shapes of the forward pass's tensors. On one device that costs nothing; across devices a whole
    tensor would be sent for it, and parts of a split operator would be joined.

    Attributes:
        fed: shapes of the tensors that are fed, by node.
    """

    name: ClassVar[str] = "fold_shapes"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.CONNECTED,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.CONNECTED,)
    fed: Mapping[str, Sequence[int | None]]

    def run(self, program: Program) -> Program:
        """Flat step program -> the same with constants."""
        step = program.step
        kept = set() if step is None else step.named_nodes
        return program.replace(graph=fold(program.graph, self.fed, kept=kept).graph)
