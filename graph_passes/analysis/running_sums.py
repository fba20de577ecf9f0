"""Updates of running values: what they add, or compare with."""

from __future__ import annotations

from typing import NamedTuple

from graph_passes.ir.graph import Graph, Ref

_SUMS = frozenset({"AddV2", "Add", "Sub"})
_EXTREMES = frozenset({"Maximum", "Minimum"})


class Part(NamedTuple):
    """One operand beside the running value.

    Attributes:
        ref: the operand; it doesn't depend on that value.
        op: the operation that combines both.
    """

    ref: Ref
    op: str

    @property
    def added(self) -> bool:
        """Whether it is added or subtracted; else the larger or the smaller one is kept."""
        return self.op in _SUMS


def parts_of_update(graph: Graph, update: Ref, value: Ref) -> list[Part] | None:
    """Returns the operands that are combined with a running value, in order.

        (value + a) - b   has   a, b

    Args:
        graph: a flat graph.
        update: the new value.
        value: the value before.

    Returns:
        The operands; None if the new value is computed in another way.
    """
    if update == value:
        return []
    operands, op = graph.inputs(update.node), str(graph.nodes[update.node].op)
    if op == "Identity":
        return parts_of_update(graph, operands[0], value)
    if op not in _SUMS | _EXTREMES:
        return None
    one, other = operands
    for running, own in [(one, other)] if op == "Sub" else [(one, other), (other, one)]:
        before = parts_of_update(graph, running, value)
        if before is not None and value.node not in graph.ancestors([own], control=False):
            return [*before, Part(own, op)]
    return None
