"""Finds the gradients from which an optimizer computes each variable's new value."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from graph_passes.ir.call_order import CALLS
from graph_passes.ir.graph import Graph, GraphDef, NodeDef, Ref, function_names
from graph_passes.ir.group_update import Captured
from graph_passes.ir.resource_use import READS
from graph_passes.ir.tensorflow_bridge import function_graph, output_dtypes

_NONE: frozenset[str] = frozenset()
PASS_ON = frozenset({"Identity", "IdentityN"})
BRANCHES = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})


def gradients_behind(update: Captured) -> Mapping[str, frozenset[str]]:
    """Maps each variable of an update to the parameters whose gradients its new value depends on.

    w -= g_w / norm([g_w, g_v])   gives   {w: {w, v}}
    """
    flow = _Flow(update.graph)
    places = {name: (place,) for name, place in update.gradients.items()} | dict(update.slices)
    sources = {place: frozenset({name}) for name, own in places.items() for place in own}
    handles = {ref: variable.name for ref, variable in update.variables.items()}
    flow.walk(update.graph, sources, handles, _NONE)
    return {name: flow.assigned.get(name, _NONE) for name in handles.values()}


class _Flow:
    """Follows values through a graph, the functions that it calls, and variables.

    Attributes:
        assigned: variable -> the gradients in its value so far.
    """

    def __init__(self, graph: GraphDef) -> None:
        self._library = graph.library
        self.assigned: dict[str, frozenset[str]] = {}

    def walk(
        self, graph: GraphDef, sources: Mapping[Ref, frozenset[str]], handles: Mapping[Ref, str], under: frozenset[str]
    ) -> tuple[dict[Ref, frozenset[str]], dict[Ref, str]]:
        """Follows the nodes of a graph, producers first; returns tensors' gradients, and variables' handles.

        Args:
            graph: the graph.
            sources: tensors -> the gradients in them.
            handles: tensors that are variables' handles.
            under: the gradients that decided whether the graph runs at all.
        """
        view = Graph(graph)
        gradients_in, named = dict(sources), dict(handles)
        for name in view.topological():
            node, inputs = view.nodes[name], view.inputs(name)
            if not inputs:
                continue
            used = [named[ref] for ref in inputs if ref in named]
            if node.op in CALLS or node.op in BRANCHES:
                results = self._called(node, inputs, gradients_in, named, under)
            elif node.op in PASS_ON:
                named |= {Ref(name, at): named[ref] for at, ref in enumerate(inputs) if ref in named}
                results = [gradients_in.get(ref, _NONE) for ref in inputs]
            else:
                mixed = under.union(*(gradients_in.get(ref, _NONE) for ref in inputs))
                mixed = mixed.union(*(self.assigned.get(variable, _NONE) for variable in used))
                if node.op not in READS:
                    self.assigned |= dict.fromkeys(used, mixed)
                results = [mixed] * len(output_dtypes(node))
            gradients_in |= {Ref(name, output): gradients for output, gradients in enumerate(results) if gradients}
        return gradients_in, named

    def _called(
        self,
        node: NodeDef,
        inputs: Sequence[Ref],
        gradients_in: Mapping[Ref, frozenset[str]],
        named: Mapping[Ref, str],
        under: frozenset[str],
    ) -> list[frozenset[str]]:
        """Returns the gradients in the results of a call, or of any of the branches that a tensor chooses from."""
        arguments = inputs[1:] if node.op in BRANCHES else inputs
        under = under if node.op in CALLS else under | gradients_in.get(inputs[0], _NONE)
        results: list[frozenset[str]] = []
        for function in function_names(node):
            body, wanted = function_graph(self._library, function)
            places = [Ref(own.name) for own in itertools.islice(body.node, len(arguments))]
            pairs = list(zip(places, arguments, strict=True))
            inside, _ = self.walk(
                body,
                {place: gradients_in[given] for place, given in pairs if given in gradients_in},
                {place: named[given] for place, given in pairs if given in named},
                under,
            )
            parts = [inside.get(ref, _NONE) | under for ref in wanted]
            results = [a | b for a, b in itertools.zip_longest(results, parts, fillvalue=_NONE)]
        return results
