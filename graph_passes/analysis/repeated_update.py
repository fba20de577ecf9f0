"""Repeats what an optimizer computes for some parameters for others, which it updates in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from graph_passes.ir.graph import COLOCATION, GraphDef, Names, NodeDef, Ref, control_inputs, data_inputs, renamed_input
from graph_passes.ir.group_update import Captured
from graph_passes.ir.program import Variable

_Copies = Mapping[str, Mapping[str, Mapping[Ref, Variable]]]


def repeated_update(captured: Captured, owners: Mapping[Ref, str], copies: _Copies) -> Captured | None:
    """Returns an update of some parameters with copies for others.

        p -= rate * g   with copies {p: {q}}   becomes   p -= rate * g; q -= rate * h

    The part of a parameter is what is computed from its gradient, from itself, or from its slots; it is copied. What is
    computed from none of these, such as this step's learning rate, is there once, for all.

    Args:
        captured: the update of at least two parameters.
        owners: placeholder of a variable -> the parameter that it is, or is a slot of. Other variables are everybody's.
        copies: parameter of ``captured`` -> one that is updated in the same way -> placeholder of each variable of the
            first -> variable of the second.

    Returns:
        The update of all of them, sorted as ``captured`` is; None if the parts depend on each other: something is
        computed from several (a norm of all gradients, say), or written by several.
    """
    part_of = {ref.node: parameter for ref, parameter in owners.items()}
    part_of |= {ref.node: parameter for parameter, ref in captured.gradients.items()}
    part_of |= {ref.node: parameter for parameter, refs in captured.slices.items() for ref in refs}
    part_of |= {ref.node: parameter for parameter, ref in captured.row_shapes.items()}
    captured = dataclasses.replace(captured, graph=_without_tuples(captured))
    for node in captured.graph.node:
        parts = {part_of[name] for name in _reads(node, [node.name]) if name in part_of}
        waits = {part_of[name] for name in control_inputs(node) if name in part_of}
        if len(parts) > 1 or (parts and not waits <= parts):
            return None
        if parts:
            (part_of[node.name],) = parts
    if _writes_twice(captured, part_of):
        return None

    names = Names(node.name for node in captured.graph.node)
    graph = GraphDef(versions=captured.graph.versions, library=captured.graph.library)
    copied: dict[str, dict[str, str]] = {other: {} for others in copies.values() for other in others}

    def copies_of(node: str) -> list[str]:
        return [copied[other][node] for other in copies.get(part_of.get(node, ""), ())]

    for node in captured.graph.node:
        first = graph.node.add()
        first.CopyFrom(node)
        part = part_of.get(node.name)
        if part is None:
            first.input.extend(f"^{copy}" for waited in control_inputs(node) for copy in copies_of(waited))
            continue
        for other in copies.get(part, ()):
            renamed = copied[other]
            copy = graph.node.add()
            copy.CopyFrom(node)
            copy.name = renamed[node.name] = names.fresh(node.name)
            copy.attr.pop(COLOCATION, None)
            now = {name: renamed.get(name, name) for name in _reads(node, control_inputs(node))}
            copy.input[:] = [renamed_input(text, now) for text in node.input]

    def moved(ref: Ref, other: str) -> Ref:
        return Ref(copied[other][ref.node], ref.output)

    pairs = [(own, other) for own, others in copies.items() for other in others]
    gradients, slices, shapes = dict(captured.gradients), dict(captured.slices), dict(captured.row_shapes)
    variables = dict(captured.variables)
    for own, other in pairs:
        if own in captured.gradients:
            gradients[other] = moved(captured.gradients[own], other)
        if own in captured.slices:
            rows, indices = captured.slices[own]
            slices[other] = moved(rows, other), moved(indices, other)
        if own in captured.row_shapes:
            shapes[other] = moved(captured.row_shapes[own], other)
        variables |= {moved(ref, other): variable for ref, variable in copies[own][other].items()}
    effects = tuple(name for effect in captured.effects for name in (effect, *copies_of(effect)))
    return dataclasses.replace(
        captured,
        graph=graph,
        gradients=gradients,
        slices=slices,
        row_shapes=shapes,
        variables=variables,
        effects=effects,
    )


def _without_tuples(captured: Captured) -> GraphDef:
    """Returns the graph without ``IdentityN``, which takes all gradients and gives them back as they are."""
    needed = {ref.node for ref in captured.outputs} | set(captured.effects)
    needed |= {name for node in captured.graph.node for name in control_inputs(node)}
    origins: dict[Ref, Ref] = {}
    graph = GraphDef(versions=captured.graph.versions, library=captured.graph.library)
    for node in captured.graph.node:
        refs = [origins.get(ref, ref) for ref in data_inputs(node)]
        waits = control_inputs(node)
        if node.op == "IdentityN" and not waits and node.name not in needed:
            origins |= {Ref(node.name, output): ref for output, ref in enumerate(refs)}
            continue
        reader = graph.node.add()
        reader.CopyFrom(node)
        reader.input[:] = [*map(str, refs), *(f"^{name}" for name in waits)]
    return graph


def _reads(node: NodeDef, more: Iterable[str]) -> list[str]:
    """Returns the names of the nodes that a node reads, and others."""
    return [*(ref.node for ref in data_inputs(node)), *more]


def _writes_twice(captured: Captured, part_of: Mapping[str, str]) -> bool:
    """Returns whether a variable that is everybody's may be written twice: perhaps once for each parameter."""
    everybodys = {ref for ref in captured.variables if ref.node not in part_of}
    written = [
        ref
        for node in captured.graph.node
        if node.op != "ReadVariableOp"
        for ref in data_inputs(node)
        if ref in everybodys
    ]
    return len(set(written)) < len(written)
