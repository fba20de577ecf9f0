"""Finds which forward nodes the backward of a stage computes again when it keeps only what the stage receives."""

from __future__ import annotations

from graph_passes.ir.graph import Graph, Ref
from graph_passes.ir.node_kinds import METADATA
from graph_passes.ir.program import Program, Stage, ValueKind
from graph_passes.ir.tensorflow_bridge import is_stateful


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
