"""Computes equal small values only once."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Hashable, Mapping
from typing import ClassVar

from graph_passes.ir.graph import CALL_ATTR, Graph, GraphDef, NodeDef, Ref, computation, control_inputs, set_inputs
from graph_passes.ir.program import Fact, Program
from graph_passes.ir.tensorflow_bridge import Shape, is_stateful, makes_resource, output_dtypes, takes_functions

_LARGEST = 1024
"""The most elements of a shared value."""
_READ = "ReadVariableOp"


@dataclasses.dataclass(frozen=True)
class ShareValues:
    """One node in place of several that compute the same small value.

        read rate -> scale a, read rate -> scale b   becomes   read rate -> scale a, scale b

    An optimizer traced variable by variable reads the learning rate and counts steps for each: on several devices each
    of these would be sent separately. Larger values stay: they may be recomputed on purpose, to save memory.

    Attributes:
        shapes: of all tensors of the step.
        within_calls: whether to share only within former calls, where tasks have an order.
    """

    name: ClassVar[str] = "share_values"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.CONNECTED,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.CONNECTED,)
    shapes: Mapping[Ref, Shape | None]
    within_calls: bool = False

    def run(self, program: Program) -> Program:
        """Flat step program -> the same with fewer nodes."""
        kept = set() if program.step is None else program.step.named_nodes
        return program.replace(graph=self.shared(program.graph, kept))

    def shared(self, graph: GraphDef, kept: Collection[str] = ()) -> GraphDef:
        """Returns a flat graph in which equal small values are computed once, but for nodes that must stay."""
        view = Graph(graph)
        first: dict[Hashable, str] = {}
        instead: dict[str, str] = {}  # node -> the one that computes the same
        for name in view.topological():
            node = view.nodes[name]
            if _can_be_shared(node, self.shapes):
                inputs = tuple((instead.get(ref.node, ref.node), ref.output) for ref in view.inputs(name))
                waits = frozenset(instead.get(waited, waited) for waited in control_inputs(node))
                roles = (CALL_ATTR,) if self.within_calls else ()
                other = first.setdefault((node.device, computation(node, (inputs, waits), roles)), name)
                if other != name and name not in kept:
                    instead[name] = other
        shared = GraphDef(versions=graph.versions, library=graph.library)
        for node in graph.node:
            if node.name in instead:
                continue
            shared.node.append(node)
            data, waits_for = view.inputs(node.name), control_inputs(node)
            if not instead.keys().isdisjoint([*(ref.node for ref in data), *waits_for]):
                data = [Ref(instead.get(ref.node, ref.node), ref.output) for ref in data]
                set_inputs(shared.node[-1], data, [instead.get(waited, waited) for waited in waits_for])
        return shared


def _can_be_shared(node: NodeDef, shapes: Mapping[Ref, Shape | None]) -> bool:
    """Returns whether a node yields a small value that depends only on its inputs and control edges."""
    if node.op == "VarHandleOp":
        return True
    if node.op == _READ:
        # Without control edges, it reads the variable's value before the step.
        return not control_inputs(node) and _is_small(node, shapes)
    if node.op in ("Placeholder", "NoOp") or is_stateful(node.op) or makes_resource(node.op):
        return False
    return not takes_functions(node.op) and _is_small(node, shapes)


def _is_small(node: NodeDef, shapes: Mapping[Ref, Shape | None]) -> bool:
    outputs = [shapes.get(Ref(node.name, index)) for index in range(len(output_dtypes(node)))]
    return bool(outputs) and all(
        shape is not None and None not in shape and math.prod(size or 0 for size in shape) <= _LARGEST
        for shape in outputs
    )
