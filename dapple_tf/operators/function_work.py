"""Costs of loops, branches and calls: the operators inside, as often as they are known to run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.operators.signatures import Fingerprints, OpSignature, TensorType, output_dtype_names, signature
from graph_passes.analysis.operator_shapes import CallShapes, Handles, ShapeInference
from graph_passes.analysis.operator_traits import LOOPS
from graph_passes.errors import PassError
from graph_passes.ir.graph import GraphDef, NodeDef, Ref, data_inputs, function_names
from graph_passes.ir.tensorflow_bridge import Shape, constant_value, function_graph, takes_functions

logger = logging.getLogger(__name__)

_PASSED_ON = frozenset({"Identity", "Cast", "StopGradient", "EnsureShape"})
_COMPARED = frozenset({"Less", "LessEqual"})
_DEEPEST = 32
"""The deepest nesting of calls: more is a function that calls itself."""


class _Inside(NamedTuple):
    """An operator inside a function, and its inputs' known shapes."""

    node: NodeDef
    signature: OpSignature
    given: CallShapes


class _Body(NamedTuple):
    """A function's operators, without arguments and constants, and all of its nodes by name."""

    operators: tuple[_Inside, ...]
    nodes: Mapping[str, NodeDef]


class FunctionWork:
    """Costs of the nodes of a graph that run functions.

    Args:
        graph: a flat graph with its library.
        costs: of single operators.
        shapes: of the graph's tensors.
    """

    def __init__(self, graph: GraphDef, costs: OperatorCosts, shapes: Mapping[Ref, Shape | None]) -> None:
        self._library = graph.library
        self._fingerprints = Fingerprints(graph.library)
        self._nodes = {node.name: node for node in graph.node}
        self._costs = costs
        self._inference = ShapeInference(graph.library)
        self._handles = Handles(self._inference, graph, shapes, {})
        self._bodies: dict[tuple[str, CallShapes], _Body] = {}
        self._inside: dict[tuple[str, CallShapes, str], float] = {}
        self._depth = 0

    def seconds(self, node: NodeDef, made: OpSignature, kind: str) -> float:
        """Returns the seconds of one run of a node that runs functions.

        A measurement of the whole node takes precedence. A loop takes its body's and condition's time for each round
        if the number of rounds is known (a static number of time steps), else for one; a branch takes the time of the
        slower side.

        Args:
            node: the node, of the graph's top level.
            made: its signature.
            kind: of device.
        """
        if self._costs.measured(made, kind) is not None:
            return self._costs.seconds(made, kind)
        shapes = tuple(tensor.shape for tensor in made.inputs)
        given = CallShapes(shapes, tuple(map(self._handles.element, data_inputs(node))))
        return self._costs.seconds(made, kind, self._run(node, given, kind, self._nodes))

    def rounds(self, node: NodeDef) -> int | None:
        """Returns how often a loop of the top level runs its body; None if that depends on values."""
        return self._rounds(node, self._nodes)

    def _run(self, node: NodeDef, given: CallShapes, kind: str, around: Mapping[str, NodeDef]) -> float:
        if node.op in LOOPS:
            rounds = self._rounds(node, around)
            if rounds is None:
                logger.info("loop %s: its number of rounds isn't known, one is counted", node.name)
            return (1 if rounds is None else rounds) * sum(
                self._function(node.attr[part].func.name, given, kind) for part in ("cond", "body")
            )
        inside = given.arguments(node)
        return max((self._function(name, inside, kind) for name in function_names(node)), default=0.0)

    def _function(self, name: str, given: CallShapes, kind: str) -> float:
        """Returns the seconds of a function's operators, one after another."""
        key = (name, given, kind)
        if key not in self._inside:
            if self._depth == _DEEPEST:
                raise PassError(f"function {name!r} is called more than {_DEEPEST} calls deep; does it call itself?")
            self._depth += 1
            try:
                body = self._body(name, given)
                total = 0.0
                for node, made, shapes in body.operators:
                    inner = None
                    if takes_functions(node.op) and self._costs.measured(made, kind) is None:
                        inner = self._run(node, shapes, kind, body.nodes)
                    total += self._costs.seconds(made, kind, inner)
                self._inside[key] = total
            finally:
                self._depth -= 1
        return self._inside[key]

    def _body(self, name: str, given: CallShapes) -> _Body:
        key = name, given
        if key not in self._bodies:
            graph, _ = function_graph(self._library, name)
            known = self._inference.of_function(graph, given)
            dtypes = {node.name: output_dtype_names(node) for node in graph.node}

            def tensor(ref: Ref) -> TensorType:
                return TensorType(dtypes[ref.node][ref.output], known.shapes.get(ref))

            operators = []
            for node in graph.node:
                if node.op not in ("Placeholder", "Const"):
                    refs = data_inputs(node)
                    inputs = [tensor(ref) for ref in refs]
                    outputs = [tensor(Ref(node.name, output)) for output in range(len(dtypes[node.name]))]
                    made = signature(node, inputs, outputs, self._fingerprints.of(node))
                    shapes = tuple(known.shapes.get(ref) for ref in refs)
                    inside = CallShapes(shapes, tuple(known.elements.get(ref) for ref in refs))
                    operators.append(_Inside(node, made, inside))
            self._bodies[key] = _Body(tuple(operators), {node.name: node for node in graph.node})
        return self._bodies[key]

    # ---- how often

    def _rounds(self, node: NodeDef, around: Mapping[str, NodeDef]) -> int | None:
        """Returns the fewest rounds by the condition's comparisons ``counter < limit``, for counters that step by 1."""
        condition, results = function_graph(self._library, node.attr["cond"].func.name)
        body, after = function_graph(self._library, node.attr["body"].func.name)
        inside = {part.name: part for part in condition.node}
        arguments = [part.name for part in condition.node if part.op == "Placeholder"]
        steps = {part.name: part for part in body.node}
        body_arguments = [part.name for part in body.node if part.op == "Placeholder"]
        given = data_inputs(node)

        def argument(ref: Ref) -> int | None:
            """Returns the index of the condition's argument that a tensor is."""
            name = _source(ref, inside).node
            return arguments.index(name) if name in arguments else None

        def value(ref: Ref) -> int | None:
            index = argument(ref)
            return _scalar(ref, inside) if index is None else self._outer(given[index], around)

        rounds = []
        for part in condition.node:
            if part.op not in _COMPARED or not _needed(part.name, results, inside):
                continue
            counter, limit = data_inputs(part)
            index = argument(counter)
            if index is None or not _steps_by_one(after[index], body_arguments[index], steps):
                continue
            start, stop = self._outer(given[index], around), value(limit)
            if start is not None and stop is not None and stop >= 0:
                rounds.append(max(0, stop - start + (part.op == "LessEqual")))
        return min(rounds, default=None)

    def _outer(self, ref: Ref, around: Mapping[str, NodeDef]) -> int | None:
        """Returns the value of an integer scalar of a graph: a constant, or another loop's number of rounds."""
        place = _source(ref, around)
        node = around.get(place.node)
        if node is not None and node.op in LOOPS and place.output == 0:
            start, rounds = self._outer(data_inputs(node)[0], around), self._rounds(node, around)
            return None if start is None or rounds is None else start + rounds
        return _scalar(place, around)


def _source(ref: Ref, nodes: Mapping[str, NodeDef]) -> Ref:
    """Returns the origin of a tensor's value, through nodes that only pass it on."""
    while (node := nodes.get(ref.node)) is not None and node.op in _PASSED_ON:
        ref = data_inputs(node)[0]
    return ref


def _scalar(ref: Ref, nodes: Mapping[str, NodeDef]) -> int | None:
    """Returns the value of a constant integer scalar; None for anything else."""
    node = nodes.get(_source(ref, nodes).node)
    if node is None or node.op != "Const":
        return None
    value = constant_value(node)
    return int(value) if value.shape == () and np.issubdtype(value.dtype, np.integer) else None


def _steps_by_one(result: Ref, argument: str, nodes: Mapping[str, NodeDef]) -> bool:
    """Returns whether a loop's result is its argument + 1."""
    node = nodes.get(_source(result, nodes).node)
    if node is None or node.op not in ("Add", "AddV2"):
        return False
    one, other = data_inputs(node)
    return (_source(one, nodes).node == argument and _scalar(other, nodes) == 1) or (
        _source(other, nodes).node == argument and _scalar(one, nodes) == 1
    )


def _needed(name: str, results: Sequence[Ref], nodes: Mapping[str, NodeDef]) -> bool:
    """Returns whether a loop's condition requires a comparison: is the comparison, or an "and" of it and others."""
    pending = list(results)
    while pending:
        place = _source(pending.pop(), nodes)
        if place.node == name:
            return True
        node = nodes.get(place.node)
        if node is not None and node.op == "LogicalAnd":
            pending += data_inputs(node)
    return False
