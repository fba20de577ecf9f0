"""Updates of variables: which gradients are in them, what running values add, and updates of shards.

Gradients and elements are followed through an optimizer's graph and the functions that it calls.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from graph_passes.analysis.operator_traits import BRANCHES, NUMERIC
from graph_passes.errors import PassError
from graph_passes.ir.call_order import CALLS
from graph_passes.ir.graph import Graph, GraphDef, NodeDef, Ref, copied, function_names, make_node, rename_functions
from graph_passes.ir.group_update import Captured, shard_storage
from graph_passes.ir.program import Variable, VariableKind, storage_shape
from graph_passes.ir.resource_use import READS
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.tensorflow_bridge import (
    FunctionDefLibrary,
    Shape,
    constant_value,
    function_graph,
    make_constant,
    output_dtypes,
)

_Fact = TypeVar("_Fact")
_NONE: frozenset[str] = frozenset()
_PASS_ON = frozenset({"Identity", "IdentityN"})
_SUMS = frozenset({"AddV2", "Add", "Sub"})
_EXTREMES = frozenset({"Maximum", "Minimum"})
_ELEMENT_OPS = NUMERIC | {"Select"}
"""Ops of which each element of the result depends on the same element of the inputs, or on inputs of one element."""
_ASSIGNMENTS = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})
_Constant: TypeAlias = tuple[str, str]
"""Name of a function of the library, or of none for the graph itself, and of a node in it."""


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
            elif node.op in _PASS_ON:
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
        under = under if node.op in CALLS else under | gradients_in.get(inputs[0], _NONE)
        results: list[frozenset[str]] = []
        for _, body, given, wanted in _entered(self._library, node, inputs):
            inside, _ = self.walk(body, _inside(gradients_in, given), _inside(named, given), under)
            parts = [inside.get(ref, _NONE) | under for ref in wanted]
            results = [a | b for a, b in itertools.zip_longest(results, parts, fillvalue=_NONE)]
        return results


def _entered(
    library: FunctionDefLibrary, node: NodeDef, inputs: Sequence[Ref]
) -> Iterator[tuple[str, GraphDef, Mapping[Ref, Ref], Sequence[Ref]]]:
    """Yields the functions that a call or a branch runs: name, graph, argument -> tensor outside, results."""
    given = inputs[1:] if node.op in BRANCHES else inputs
    for function in function_names(node):
        body, results = function_graph(library, function)
        arguments = [Ref(own.name) for own in itertools.islice(body.node, len(given))]
        yield function, body, dict(zip(arguments, given, strict=True)), results


def _inside(facts: Mapping[Ref, _Fact], given: Mapping[Ref, Ref]) -> dict[Ref, _Fact]:
    """Returns the facts of a function's arguments."""
    return {argument: facts[ref] for argument, ref in given.items() if ref in facts}


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


class CoupledElementsError(PassError):
    """An update computes elements of a variable from others.

    Attributes:
        computation: what it computes.
    """

    def __init__(self, computation: str) -> None:
        super().__init__(f"an update computes {computation}: elements depend on each other")
        self.computation = computation


def sharded_update(
    update: Captured,
    count: int,
    by_row: Container[str] = frozenset(),
    apart: Container[str] = frozenset(),
    *,
    dense: bool = True,
    stored: Container[str] = frozenset(),
) -> Captured:
    """Returns an update of a shard of each variable in place of an update of whole variables.

        m += g, w -= m   of [5, 3] elements   becomes, for 4 devices,   the same of [4] elements

    Parameters with a dense gradient of which each device gets an element are in shards (if ``dense``), and so are slots
    of their shapes; other variables stay whole. While the update runs, a parameter's `shard_storage` has the shard that
    changes, or its own storage does.

    Args:
        update: the optimizer's part for a group.
        count: number of devices, and of shards.
        by_row: parameters and slots that are in shards, too, though gradients are rows: their update is known to be one
            of each row by itself.
        apart: slots that stay whole, whatever their shape.
        dense: whether parameters with a dense gradient are.
        stored: the parameters of which each device keeps only its shard, under their own names.

    Raises:
        CoupledElementsError: the update of an element depends on more than the same element of the gradient and the
            slots, and numbers that all elements have in common.
    """
    variables = {variable.name: variable for variable in update.variables.values()}
    shapes = {name: _gradient_shape(update.graph, ref) for name, ref in update.gradients.items()}
    gradients = {name: shape for name, shape in shapes.items() if dense and math.prod(shape) >= count}
    cut = set(gradients.values())
    whole = {name for name, variable in variables.items() if name in by_row or name in apart or name in update.slices}
    elements = {name for name, variable in variables.items() if variable.shape in cut and name not in whole}
    walk = _Walk(update, elements, by_row)
    walk.whole_graph(shapes, gradients)
    graph = copied(update.graph)
    for (function, node), shape in walk.constants.items():
        value = constant_value(_node(graph, function, node)).flat[0]
        own = storage_shape(shape, count)
        make_constant(_node(graph, function, node), np.full(own, value, value.dtype))
    for (function, node), shape in walk.lengths.items():
        lengths = _node(graph, function, node)
        make_constant(lengths, np.array(storage_shape(shape, count), constant_value(lengths).dtype))
    for name, ref in update.row_shapes.items():
        own = storage_shape(variables[name].shape, count)
        make_constant(_node(graph, "", ref.node), np.array(own, np.int32))
    in_shards = {
        ref: _in_shards(variable, count, stored) if variable.name in elements or variable.name in by_row else variable
        for ref, variable in update.variables.items()
    }
    rename_functions(graph, f"_of_{count}_shards")  # A group alike may have the whole ones.
    return dataclasses.replace(update, graph=graph, variables=in_shards, row_shapes={})


def _gradient_shape(graph: GraphDef, ref: Ref) -> tuple[int, ...]:
    """Returns the shape of a dense gradient, whose parameter needn't be in the update, from its placeholder."""
    return tuple(dim.size for dim in _node(graph, "", ref.node).attr["shape"].shape.dim)


def _in_shards(variable: Variable, count: int, stored: Container[str]) -> Variable:
    begun = variable.kind is VariableKind.PARAMETER and variable.name not in stored
    storage = shard_storage(variable.name) if begun else variable.storage
    return dataclasses.replace(variable, shards=count, storage=storage)


def _node(graph: GraphDef, function: str, name: str) -> NodeDef:
    nodes = graph.node
    if function:
        nodes = next(each for each in graph.library.function if each.signature.name == function).node_def
    return next(each for each in nodes if each.name == name)


class _Scope(NamedTuple):
    """A graph, or a function of its library, while it is followed.

    Attributes:
        function: its name; empty for the graph itself.
        view: its nodes.
        elements: tensor -> a variable whose elements it has one for each of, as far as is known.
        handles: tensor -> the variable whose handle it is.
        shapes: tensor -> its static shape.
    """

    function: str
    view: Graph
    elements: dict[Ref, str]
    handles: Mapping[Ref, Variable]
    shapes: Mapping[Ref, Shape | None]


class _Walk:
    """Follows elements of sharded variables through an update.

    Attributes:
        constants: the constants that take part with as many elements -> their shapes.
        lengths: the constants that are the shape of tensors of one number that take part so -> that shape.
    """

    def __init__(self, update: Captured, sharded: Container[str], by_row: Container[str]) -> None:
        self._update, self._sharded, self._by_row = update, sharded, by_row
        self._library = update.graph.library
        self.constants: dict[_Constant, tuple[int, ...]] = {}
        self.lengths: dict[_Constant, tuple[int, ...]] = {}

    def whole_graph(self, gradients: Mapping[str, Shape], sharded: Container[str]) -> None:
        """Follows them through all of the update.

        Args:
            gradients: parameter -> shape of its dense gradient.
            sharded: the parameters of whose gradient the update gets a shard.
        """
        placeholders = self._update.gradients
        shapes = {placeholders[name].node: shape for name, shape in gradients.items()}
        if self._update.totals is not None:
            shapes[self._update.totals.node] = (2,)
        elements = {ref: name for name, ref in placeholders.items() if name in sharded}
        self._walk("", self._update.graph, elements, self._update.variables, shapes)

    def _is_sharded(self, variable: Variable) -> bool:
        return variable.name in self._sharded

    def _walk(
        self,
        function: str,
        graph: GraphDef,
        elements: Mapping[Ref, str],
        handles: Mapping[Ref, Variable],
        placeholders: Mapping[str, Shape],
    ) -> _Scope:
        """Follows the nodes of a graph, producers first; returns facts of its tensors."""
        view, handles = Graph(graph), dict(handles)
        order = view.topological()
        for name in order:
            if view.nodes[name].op in _PASS_ON:
                handles |= {Ref(name, at): handles[ref] for at, ref in enumerate(view.inputs(name)) if ref in handles}
        scope = _Scope(function, view, dict(elements), handles, _shapes(graph, handles, placeholders))
        for name in order:
            results = self._node(scope, view.nodes[name])
            scope.elements.update({Ref(name, output): whose for output, whose in enumerate(results) if whose})
        for recorded in (*self.constants, *self.lengths):
            if recorded[0] == function:
                self._check_readers(scope, recorded[1])
        return scope

    def _node(self, scope: _Scope, node: NodeDef) -> list[str]:
        """Checks a node; returns the variables whose elements its results have."""
        inputs = scope.view.inputs(node.name)
        used = [scope.handles[ref] for ref in inputs if ref in scope.handles]
        if node.op in CALLS or node.op in BRANCHES:
            return self._called(scope, node)
        if node.op in _PASS_ON:
            return [scope.elements.get(ref, "") for ref in inputs]
        if used and node.op in READS | _ASSIGNMENTS:
            return self._used(scope, node, used[0])
        if (whose := next(filter(self._is_sharded, used), None)) is not None:
            raise CoupledElementsError(f"{node.op} of {whose.name!r}")
        return self._computed(scope, node)

    def _check_readers(self, scope: _Scope, name: str) -> None:
        """Refuses computations, except elementwise ones, with numbers of a shard's shape."""
        for reader in scope.view.consumers(name):
            node, inputs = scope.view.nodes[reader], scope.view.inputs(reader)
            if node.op in _PASS_ON or node.op == "Fill":
                self._check_readers(scope, reader)
                continue
            assigns = node.op in _ASSIGNMENTS and inputs[0] in scope.handles
            if not assigns and not any(ref in scope.elements for ref in inputs):
                raise CoupledElementsError(f"{node.op} of a number in the shape of elements")

    def _used(self, scope: _Scope, node: NodeDef, variable: Variable) -> list[str]:
        """Checks a variable's read or assignment; returns the origins of its results' elements."""
        is_sharded = self._is_sharded(variable)
        if node.op in READS:
            if is_sharded and node.op != "ReadVariableOp":
                raise CoupledElementsError(f"{node.op} of {variable.name!r}")
            return [variable.name if is_sharded else ""]
        value = scope.view.inputs(node.name)[1]
        if variable.name in self._by_row:
            self._is_number(scope, value.node, variable.shape)
        if is_sharded and value not in scope.elements:
            self._joins(scope, value, variable.shape, f"an assignment to {variable.name!r}")
        if not is_sharded and value in scope.elements:
            raise CoupledElementsError(f"{variable.name!r} from elements of {scope.elements[value]!r}")
        return []

    def _computed(self, scope: _Scope, node: NodeDef) -> list[str]:
        """Checks an operation; returns the origins of its results' elements."""
        elements, inputs = scope.elements, scope.view.inputs(node.name)
        mine = [ref for ref in inputs if ref in elements]
        outputs = len(output_dtypes(node))
        if not mine:
            return [""] * outputs
        whose = elements[mine[0]]
        if node.op not in _ELEMENT_OPS:
            raise CoupledElementsError(f"{node.op} of elements of {whose!r}")
        shape = scope.shapes[mine[0]]
        for ref in inputs:
            if ref not in elements:
                self._joins(scope, ref, shape, f"{node.op} of elements of {whose!r}")
            elif scope.shapes[ref] != shape:
                raise CoupledElementsError(f"{node.op} of elements of {whose!r} and of {elements[ref]!r}")
        return [whose] * outputs

    def _joins(self, scope: _Scope, ref: Ref, shape: Shape | None, what: str) -> None:
        """Checks a tensor that meets elements of shards: a number for all of them, or a constant that is one."""
        own = scope.shapes.get(ref)
        if own is not None and len(own) <= 1 and all(length == 1 for length in own):
            return
        if own is not None and own == shape and self._is_number(scope, ref.node, own):
            return
        raise CoupledElementsError(f"{what} and another tensor of shape {'(unknown)' if own is None else list(own)}")

    def _is_number(self, scope: _Scope, name: str, shape: Shape) -> bool:
        """Whether a node is one number in this shape, and records the constant that says so.

        TensorFlow traces zeros as a constant if they are few, and otherwise as a number that fills a shape.
        """
        view, node = scope.view, scope.view.nodes[name]
        if node.op == "Fill":
            lengths = view.nodes[view.inputs(name)[0].node]
            if lengths.op != "Const" or (filled := tuple(constant_value(lengths).tolist())) != shape:
                return False
            self.lengths[scope.function, lengths.name] = filled
            return True
        if node.op != "Const":
            return False
        value = constant_value(node)
        if value.shape != shape or not value.size or np.any(value != value.flat[0]):
            return False
        self.constants[scope.function, node.name] = value.shape
        return True

    def _called(self, scope: _Scope, node: NodeDef) -> list[str]:
        """Returns what the results of a call, or of any branch that a tensor chooses, have elements of."""
        inputs = scope.view.inputs(node.name)
        if node.op in BRANCHES and inputs[0] in scope.elements:
            raise CoupledElementsError(f"{node.op} by elements of {scope.elements[inputs[0]]!r}")
        branches: list[tuple[_Scope, Sequence[Ref]]] = []
        for function, body, given, wanted in _entered(self._library, node, inputs):
            shapes = {own.node: shape for own, shape in _inside(scope.shapes, given).items() if shape is not None}
            elements, handles = _inside(scope.elements, given), _inside(scope.handles, given)
            branches.append((self._walk(function, body, elements, handles, shapes), wanted))
        return [
            self._result(node, [(branch, wanted[output]) for branch, wanted in branches])
            for output in range(len(branches[0][1]))
        ]

    def _result(self, node: NodeDef, branches: Sequence[tuple[_Scope, Ref]]) -> str:
        """Returns what a result of a call or of branches has elements of: in all branches, but where it is a number."""
        known = [(branch.elements[ref], branch.shapes.get(ref)) for branch, ref in branches if ref in branch.elements]
        if not known:
            return ""
        whose, shape = known[0]
        for branch, ref in branches:
            if ref in branch.elements and branch.shapes.get(ref) == shape:
                continue
            while branch.view.nodes[ref.node].op in _PASS_ON:
                ref = branch.view.inputs(ref.node)[ref.output]
            if shape is None or not self._is_number(branch, ref.node, shape):
                raise CoupledElementsError(f"{node.op} of elements of {whose!r} or of another tensor")
        return whose


def _shapes(
    graph: GraphDef, handles: Mapping[Ref, Variable], placeholders: Mapping[str, Shape]
) -> dict[Ref, Shape | None]:
    """Returns the static shapes of a graph's tensors and read variables."""
    known = dict(placeholders)
    plain = GraphDef(versions=graph.versions, library=graph.library)
    for node in graph.node:
        source = Ref.parse(node.input[0]) if node.op == "ReadVariableOp" else None
        if source is not None and source in handles:
            node = make_node(node.name, "Placeholder", attrs={"dtype": node.attr["dtype"]})
            known[node.name] = handles[source].shape
        plain.node.append(node)
    return infer_shapes(plain, known, {})
