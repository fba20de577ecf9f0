"""Optimizers that update each element by itself: their updates of whole variables become updates of shards."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from graph_passes.analysis.gradient_flow import BRANCHES, PASS_ON
from graph_passes.errors import PassError
from graph_passes.ir.call_order import CALLS
from graph_passes.ir.graph import Graph, GraphDef, NodeDef, Ref, copied, function_names, make_node
from graph_passes.ir.group_update import Captured, shard_storage
from graph_passes.ir.program import Variable, VariableKind
from graph_passes.ir.resource_use import READS
from graph_passes.ir.static_shapes import infer_shapes
from graph_passes.ir.tensorflow_bridge import Shape, constant_value, function_graph, make_constant, output_dtypes

_ELEMENT_OPS = frozenset(
    "Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh Cast Ceil ClipByValue Cos Cosh Div DivNoNan Elu Equal "
    "Erf Erfc Exp Expm1 Floor FloorDiv FloorMod Greater GreaterEqual IsFinite IsInf IsNan LeakyRelu Less LessEqual Log "
    "Log1p LogicalAnd LogicalNot LogicalOr Maximum Minimum Mul MulNoNan Neg NotEqual OnesLike Pow RealDiv Reciprocal "
    "Relu Relu6 Rint Round Rsqrt Select SelectV2 Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square "
    "SquaredDifference StopGradient Sub Tan Tanh TruncateDiv TruncateMod Xdivy Xlog1py Xlogy ZerosLike".split()
)
"""Ops of which each element of the result depends on the same element of the inputs, or on inputs of one element."""
_ASSIGNMENTS = frozenset({"AssignVariableOp", "AssignAddVariableOp", "AssignSubVariableOp"})
_Constant: TypeAlias = tuple[str, str]
"""Name of a function of the library, or of none for the graph itself, and of a node in it."""


class CoupledElements(PassError):
    """An update computes elements of a variable from others.

    Attributes:
        computation: what it computes.
    """

    def __init__(self, computation: str) -> None:
        super().__init__(f"an update computes {computation}: elements depend on each other")
        self.computation = computation


def fits_shards(shape: Sequence[int], count: int) -> bool:
    """Whether a parameter of this shape is kept in shards: each device gets at least one element."""
    return math.prod(shape) >= count


def sharded_update(update: Captured, count: int) -> Captured:
    """Returns an update of a shard of each variable in place of an update of whole variables.

        m += g, w -= m   of [5, 3] elements   becomes, for 4 devices,   the same of [4] elements

    Parameters of which each device gets an element are in shards, and so are slots of their shapes; other variables
    stay whole. While the update runs, `shard_storage` has the parameter's shard, which it changes.

    Args:
        update: the optimizer's part for a group; all gradients are dense.
        count: number of devices, and of shards.

    Raises:
        CoupledElements: the update of an element depends on more than the same element of the gradient and the slots,
            and numbers that all elements have in common.
    """
    shapes = {v.shape for v in update.variables.values() if v.kind is VariableKind.PARAMETER}
    shapes = {shape for shape in shapes if fits_shards(shape, count)}
    walk = _Walk(update, shapes)
    walk.whole_graph()
    graph = copied(update.graph)
    for (function, node), shape in walk.constants.items():
        value = constant_value(_node(graph, function, node)).flat[0]
        make_constant(_node(graph, function, node), np.full([-(-math.prod(shape) // count)], value, value.dtype))
    for function, node in walk.axes:
        make_constant(_node(graph, function, node), np.zeros([1], np.int32))
    variables = {
        ref: _in_shards(variable, count) if variable.shape in shapes else variable
        for ref, variable in update.variables.items()
    }
    return dataclasses.replace(update, graph=graph, variables=variables)


def _in_shards(variable: Variable, count: int) -> Variable:
    storage = shard_storage(variable.name) if variable.kind is VariableKind.PARAMETER else variable.storage
    return dataclasses.replace(variable, shards=count, storage=storage)


def _node(graph: GraphDef, function: str, name: str) -> NodeDef:
    nodes = graph.node
    if function:
        nodes = next(each for each in graph.library.function if each.signature.name == function).node_def
    return next(each for each in nodes if each.name == name)


class _Place(NamedTuple):
    """What is known of a graph's or a function's tensors.

    Attributes:
        elements: tensor -> a variable whose elements it has one for each of.
        handles: tensor -> the variable whose handle it is.
        shapes: placeholder -> its shape.
    """

    elements: Mapping[Ref, str]
    handles: Mapping[Ref, Variable]
    shapes: Mapping[str, Shape]


class _Walk:
    """Follows elements of sharded variables through an update.

    Attributes:
        constants: the constants that take part with as many elements -> their shapes.
        axes: the constants that are all axes of such elements.
    """

    def __init__(self, update: Captured, shapes: set[tuple[int, ...]]) -> None:
        self._update, self._shapes = update, shapes
        self._library = update.graph.library
        self.constants: dict[_Constant, tuple[int, ...]] = {}
        self.axes: set[_Constant] = set()

    def whole_graph(self) -> None:
        """Follows them through all of the update."""
        variables = {variable.name: variable for variable in self._update.variables.values()}
        shapes: dict[str, Shape] = {ref.node: variables[name].shape for name, ref in self._update.gradients.items()}
        if self._update.totals is not None:
            shapes[self._update.totals.node] = (2,)
        elements = {ref: name for name, ref in self._update.gradients.items() if self._is_sharded(variables[name])}
        self._walk("", self._update.graph, _Place(elements, self._update.variables, shapes))

    def _is_sharded(self, variable: Variable) -> bool:
        return variable.shape in self._shapes

    def _walk(self, function: str, graph: GraphDef, place: _Place) -> tuple[dict[Ref, str], dict[Ref, Shape | None]]:
        """Follows the nodes of a graph, producers first; returns what tensors have elements of, and all shapes."""
        view = Graph(graph)
        elements, handles = dict(place.elements), dict(place.handles)
        order = view.topological()
        for name in order:
            if view.nodes[name].op in PASS_ON:
                handles |= {Ref(name, at): handles[ref] for at, ref in enumerate(view.inputs(name)) if ref in handles}
        shapes = _shapes(graph, handles, place.shapes)
        for name in order:
            node, inputs = view.nodes[name], view.inputs(name)
            variable = next((handles[ref] for ref in inputs if ref in handles), None)
            if node.op in CALLS or node.op in BRANCHES:
                results = self._called(node, inputs, _Place(elements, handles, {}), shapes)
            elif node.op in PASS_ON:
                results = [elements.get(ref, "") for ref in inputs]
            elif variable is not None and node.op in READS | _ASSIGNMENTS:
                results = self._used(function, view, node, variable, elements, shapes)
            else:
                results = self._computed(function, view, node, elements, shapes)
            elements |= {Ref(name, output): whose for output, whose in enumerate(results) if whose}
        return elements, shapes

    def _used(
        self,
        function: str,
        view: Graph,
        node: NodeDef,
        variable: Variable,
        elements: Mapping[Ref, str],
        shapes: Mapping[Ref, Shape | None],
    ) -> list[str]:
        """Checks a read or an assignment of a variable; returns what its results have elements of."""
        is_sharded = self._is_sharded(variable)
        if node.op in READS:
            if is_sharded and node.op != "ReadVariableOp":
                raise CoupledElements(f"{node.op} of {variable.name!r}")
            return [variable.name if is_sharded else ""]
        value = view.inputs(node.name)[1]
        if is_sharded and value not in elements:
            self._joins(function, view, value, variable.shape, f"an assignment to {variable.name!r}", shapes)
        if not is_sharded and value in elements:
            raise CoupledElements(f"{variable.name!r} from elements of {elements[value]!r}")
        return []

    def _computed(
        self,
        function: str,
        view: Graph,
        node: NodeDef,
        elements: Mapping[Ref, str],
        shapes: Mapping[Ref, Shape | None],
    ) -> list[str]:
        """Checks an operation; returns what its results have elements of."""
        inputs = view.inputs(node.name)
        mine = [ref for ref in inputs if ref in elements]
        outputs = len(output_dtypes(node))
        if not mine:
            return [""] * outputs
        whose = elements[mine[0]]
        if node.op == "All" and view.nodes[mine[0].node].op == "IsFinite" and not node.attr["keep_dims"].b:
            # Loss scaling: if a gradient isn't finite anywhere, statistics make all devices see that.
            axes, rank = view.nodes[inputs[1].node], len(shapes[mine[0]] or ())
            if axes.op == "Const" and constant_value(axes).size == rank:
                self.axes.add((function, axes.name))
                return [""] * outputs
        if node.op not in _ELEMENT_OPS:
            raise CoupledElements(f"{node.op} of elements of {whose!r}")
        shape = shapes[mine[0]]
        for ref in inputs:
            if ref in elements:
                if shapes[ref] != shape:
                    raise CoupledElements(f"{node.op} of elements of {whose!r} and of {elements[ref]!r}")
            else:
                self._joins(function, view, ref, shape, f"{node.op} of elements of {whose!r}", shapes)
        return [whose] * outputs

    def _joins(
        self,
        function: str,
        view: Graph,
        ref: Ref,
        shape: Shape | None,
        what: str,
        shapes: Mapping[Ref, Shape | None],
    ) -> None:
        """Checks a tensor that meets elements of shards: a number for all of them, or a constant that is one."""
        own, producer = shapes.get(ref), view.nodes[ref.node]
        if own is not None and len(own) <= 1 and all(length == 1 for length in own):
            return
        if own is not None and own == shape and producer.op == "Const":
            value = constant_value(producer)
            if value.size and np.all(value == value.flat[0]):
                self.constants[function, producer.name] = tuple(value.shape)
                return
        raise CoupledElements(f"{what} and another tensor of shape {'(unknown)' if own is None else list(own)}")

    def _called(
        self, node: NodeDef, inputs: Sequence[Ref], place: _Place, shapes: Mapping[Ref, Shape | None]
    ) -> list[str]:
        """Returns what the results of a call, or of any of the branches that a tensor chooses from, have elements of."""
        arguments = inputs
        if node.op in BRANCHES:
            if inputs[0] in place.elements:
                raise CoupledElements(f"{node.op} by elements of {place.elements[inputs[0]]!r}")
            arguments = inputs[1:]
        results: list[str] = []
        for function in function_names(node):
            body, wanted = function_graph(self._library, function)
            places = [Ref(own.name) for own in itertools.islice(body.node, len(arguments))]
            pairs = list(zip(places, arguments, strict=True))
            inside, _ = self._walk(
                function,
                body,
                _Place(
                    {own: place.elements[given] for own, given in pairs if given in place.elements},
                    {own: place.handles[given] for own, given in pairs if given in place.handles},
                    {own.node: shape for own, given in pairs if (shape := shapes.get(given)) is not None},
                ),
            )
            parts = [inside.get(ref, "") for ref in wanted]
            results = [a or b for a, b in itertools.zip_longest(results, parts, fillvalue="")]
        return results


def _shapes(
    graph: GraphDef, handles: Mapping[Ref, Variable], placeholders: Mapping[str, Shape]
) -> dict[Ref, Shape | None]:
    """Returns the static shapes of a graph's tensors, with those of the variables that it reads."""
    known = dict(placeholders)
    plain = GraphDef(versions=graph.versions, library=graph.library)
    for node in graph.node:
        source = Ref.parse(node.input[0]) if node.op == "ReadVariableOp" else None
        if source in handles:
            node = make_node(node.name, "Placeholder", attrs={"dtype": node.attr["dtype"]})
            known[node.name] = handles[source].shape
        plain.node.append(node)
    return infer_shapes(plain, known, {})
