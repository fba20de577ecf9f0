"""Turns values that follow from shapes into constants, inside the bodies of loops, too.

The gradient of a loop is a second loop. What it needs of the first, the first's body pushes to a list, and its own body
pops, round by round: shapes, positions in a sequence, lengths of lists. On a GPU each popped integer stops the queue of
kernels until the host has it.

    push(a, Shape(x))            Reshape(dy, pop(a))     becomes                  Reshape(dy, Const)
    push(b, t), t' = t + 1       GetItem(l, pop(b))      becomes    t' = t + 1    t = t' - 1, GetItem(l, t)
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import ClassVar

import numpy as np
from tensorflow.core.framework import types_pb2

from graph_passes.analysis.constant_folding import Folded, fold_shapes
from graph_passes.analysis.operator_shapes import CallShapes, KnownShapes, ShapeInference
from graph_passes.analysis.operator_traits import LOOPS
from graph_passes.ir.graph import (
    Graph,
    GraphDef,
    Names,
    NodeDef,
    Ref,
    control_inputs,
    copied,
    data_inputs,
    dtype_attr,
    make_node,
    reroute,
    set_inputs,
    shape_attr,
    substitute,
)
from graph_passes.ir.outline import outline
from graph_passes.ir.program import Fact, Program
from graph_passes.ir.storage import merge_library
from graph_passes.ir.tensorflow_bridge import Shape, constant_value, function_graph, make_constant, output_dtypes

_INT32 = types_pb2.DT_INT32
_ADDING = frozenset({"Add", "AddV2"})


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


def fold(
    graph: GraphDef,
    placeholders: Mapping[str, Sequence[int | None]],
    values: Mapping[Ref, int] | None = None,
    *,
    kept: Collection[str] = (),
    results: Sequence[Ref] = (),
    elements: Mapping[str, Shape] | None = None,
    lengths: Mapping[str, int] | None = None,
) -> Folded:
    """Returns a graph with constants for values that follow from shapes; see `fold_shapes`.

    Args:
        graph: a flat graph; it isn't changed.
        placeholders: shapes of placeholders.
        values: of placeholders that are int32 scalars.
        kept: nodes that stay, see `fold_shapes`.
        results: tensors that stay, see `fold_shapes`.
        elements: shapes of what is behind placeholders that are handles.
        lengths: numbers of elements of placeholders that are lists.

    Raises:
        PassError: shapes contradict each other, or such a value can't be computed.
    """
    rewritten, moved, names = graph, dict[Ref, Ref](), list[str]()
    if any(node.op in LOOPS for node in graph.node):
        rewritten = _without_unread(graph, [*results, *map(Ref, kept)])
        view = Graph(rewritten)
        names = [name for name in view.topological() if view.nodes[name].op in LOOPS]
    inference = ShapeInference(rewritten.library)
    inference.loops |= dict.fromkeys(names)

    def known() -> KnownShapes:
        return inference.of(rewritten, placeholders, elements, values, lengths)

    loops: dict[str, _Loop] = {}
    for name in names:
        loops[name] = _Loop(rewritten, name, known(), loops)
        inference.loops[name] = loops[name].shapes
    for name in reversed(names):
        moved |= loops[name].rewrite(kept, results)
        inference.loops[name] = loops[name].shapes
    folded = _folded(rewritten, known(), kept, [moved.get(ref, ref) for ref in results])
    return folded._replace(moved={**folded.moved, **{ref: folded.moved.get(now, now) for ref, now in moved.items()}})


def _folded(graph: GraphDef, known: KnownShapes, kept: Collection[str], results: Collection[Ref]) -> Folded:
    return fold_shapes(_with_list_sizes(graph, known), known.shapes, kept, results)


def _without_unread(graph: GraphDef, wanted: Sequence[Ref]) -> GraphDef:
    """Returns a copy of a graph, to be changed, with the ancestors of the wanted tensors, and all placeholders."""
    needed = Graph(graph).ancestors(wanted)
    nodes = [node for node in graph.node if node.op == "Placeholder" or node.name in needed]
    return GraphDef(node=nodes, versions=graph.versions, library=graph.library)


class _Loop:
    """A loop of a graph while it is rewritten; its body is folded.

    Attributes:
        shapes: of its variables, the same from round to round; None if they are unknown.

    Args:
        graph: the flat graph, which is changed.
        name: the loop's node.
        known: shapes of the graph's tensors.
        loops: the loops before it.
    """

    def __init__(self, graph: GraphDef, name: str, known: KnownShapes, loops: Mapping[str, _Loop]) -> None:
        self._graph = graph
        self._node = _node(graph, Ref(name))
        self._functions = {function.signature.name: function for function in graph.library.function}
        self._cond, self._ends = function_graph(graph.library, self._node.attr["cond"].func.name)
        self._body, self._results = function_graph(graph.library, self._node.attr["body"].func.name)
        self._arguments = _arguments(self._body)
        inference, listed = ShapeInference(graph.library), list(enumerate(data_inputs(self._node)))
        lengths = {
            self._arguments[number]: known.lengths[ref]
            for number, ref in listed
            if ref in known.lengths and inference.keeps_length(self._node.attr["body"].func.name, number)
        }
        for number, _ in listed:
            self._replace_pop(number, loops)
        refs = data_inputs(self._node)
        given = CallShapes(tuple(map(known.shapes.get, refs)), tuple(map(known.elements.get, refs)))
        stable = inference.stable(self._body, self._results, given, lengths)
        self.shapes = None if stable is None else stable[0]
        if stable is not None:
            self._fold(*stable, lengths)

    def _fold(self, shapes: CallShapes, known: KnownShapes, lengths: Mapping[str, int]) -> None:
        """Folds the body.

        Args:
            shapes: of its arguments.
            known: shapes of its tensors.
            lengths: of its arguments that are lists.
        """
        if any(node.op in LOOPS for node in self._body.node):
            of_arguments, elements = (
                {name: shape for name, shape in zip(self._arguments, own, strict=True) if shape is not None}
                for own in shapes
            )
            folded = fold(
                self._body,
                of_arguments,
                kept=self._effects,
                results=self._results,
                elements=elements,
                lengths=lengths,
            )
        else:
            folded = _folded(self._body, known, self._effects, self._results)
        self._body, moved = drop_no_ops(folded.graph, folded.shapes)
        results = [folded.moved.get(ref, ref) for ref in self._results]
        self._results = tuple(moved.get(ref, ref) for ref in results)

    @property
    def _effects(self) -> list[str]:
        """Nodes of the body that run though no result needs them."""
        return list(self._functions[self._node.attr["body"].func.name].control_ret.values())

    def _replace_pop(self, number: int, loops: Mapping[str, _Loop]) -> None:
        """Replaces what the body pops from a variable, a list of another loop, where it follows without the list."""
        nodes, argument = {node.name: node for node in self._body.node}, Ref(self._arguments[number])
        readers = [node for node in self._body.node if argument in data_inputs(node)]
        source = data_inputs(self._node)[number]
        alone = len(readers) == 1 and readers[0].op == "TensorListPopBack"
        if source.node not in loops or not alone or self._results[number] != Ref(readers[0].name):
            return
        maker, (pop,), names = loops[source.node], readers, Names(nodes)
        pushed = maker.pushed(source.output)
        if pushed is None:
            return
        if maker.node(pushed).op == "Const":
            value = copied(maker.node(pushed))
            value.name = names.fresh(f"{pop.name}/value")
            set_inputs(value, ())
            self._body.node.append(value)
            new = Ref(value.name)
        else:
            counted = maker.counted(pushed)
            read = any(Ref(self._node.name, number) in data_inputs(node) for node in self._graph.node)
            if counted is None or read or argument.node in self._cond_reads:
                return
            variable, step = counted
            make_constant(self._body.node.add(name=names.fresh(f"{pop.name}/step")), step)
            int32 = {"T": dtype_attr(_INT32)}
            new = Ref(names.fresh(f"{pop.name}/value"))
            self._body.node.append(make_node(new.node, "Sub", [argument, Ref(self._body.node[-1].name)], attrs=int32))
            self._set_input(number, Ref(source.node, variable))
            self._results = (*self._results[:number], new, *self._results[number + 1 :])
            self._body.node.remove(pop)
        reroute(self._body, {Ref(pop.name, 1): new})
        self._results = tuple(new if ref == Ref(pop.name, 1) else ref for ref in self._results)

    def _set_input(self, number: int, ref: Ref) -> None:
        """Starts a variable, a list, with an int32 scalar instead."""
        self._node.input[number] = str(ref)
        self._node.attr["T"].list.type[number] = _INT32
        for graph in (self._body, self._cond):
            graph.node[number].attr["dtype"].type = _INT32

    def node(self, ref: Ref) -> NodeDef:
        """Returns a node of the body."""
        return _node(self._body, ref)

    def pushed(self, number: int) -> Ref | None:
        """Returns the tensor that each round pushes to a variable, a list; None if it does something else with it."""
        node, start = self.node(self._results[number]), data_inputs(self._node)[number]
        reads, begins_empty = data_inputs(node), _node(self._graph, start).op == "EmptyTensorList"
        if node.op != "TensorListPushBack" or reads[0] != Ref(self._arguments[number]) or not begins_empty:
            return None
        return self._origin(reads[1])

    def counted(self, ref: Ref) -> tuple[int, np.ndarray] | None:
        """Returns the variable that a tensor of the body is, and its growth by round; None if it isn't a count."""
        if ref.node not in self._arguments or self._node.attr["T"].list.type[self._arguments.index(ref.node)] != _INT32:
            return None
        number = self._arguments.index(ref.node)
        node = self.node(self._origin(self._results[number]))
        terms = [self._origin(each) for each in data_inputs(node)]
        if node.op not in _ADDING or ref not in terms:
            return None
        terms.remove(ref)
        step = self.node(terms[0])
        return (number, constant_value(step)) if step.op == "Const" else None

    def _origin(self, ref: Ref) -> Ref:
        while (node := self.node(ref)).op == "Identity":
            ref = data_inputs(node)[0]
        return ref

    @property
    def _cond_reads(self) -> set[str]:
        names = dict(zip(_arguments(self._cond), self._arguments, strict=True))
        return {names[name] for name in Graph(self._cond).ancestors(self._ends) if name in names}

    def rewrite(self, kept: Collection[str], results: Collection[Ref]) -> dict[Ref, Ref]:
        """Lets the loop run the folded body, without variables that nothing needs; returns old -> new outputs."""
        name, body = self._node.name, Graph(self._body)
        count = range(len(self._arguments))
        read = {*results, *(ref for node in self._graph.node for ref in data_inputs(node))}
        live = {number for number in count if name in kept or Ref(name, number) in read}
        live |= {self._arguments.index(argument) for argument in self._cond_reads}
        effects = [Ref(node) for node in self._effects]
        before = None
        while live != before:
            before = live
            needed = body.ancestors([*(self._results[number] for number in live), *effects], control=bool(effects))
            live = live | {number for number in count if self._arguments[number] in needed}
        order = sorted(live)
        own = {
            "cond": (self._cond, _arguments(self._cond), self._ends),
            "body": (self._body, self._arguments, [self._results[number] for number in order]),
        }
        for attr, (graph, arguments, wanted) in own.items():
            original = self._functions[self._node.attr[attr].func.name]
            given = [Ref(arguments[number]) for number in order]
            function = outline("", Graph(graph), given, wanted, effects=list(original.control_ret.values()))
            function.attr.clear()
            for key, value in original.attr.items():
                function.attr[key].CopyFrom(value)
            digest = hashlib.sha256(function.SerializeToString(deterministic=True)).hexdigest()[:12]
            function.signature.name = f"{original.signature.name}_{digest}"
            merge_library(self._graph, [*graph.library.function, function])  # loops inside
            self._node.attr[attr].func.name = function.signature.name
        self._keep(order)
        moved = {Ref(name, number): Ref(name, new) for new, number in enumerate(order)}
        reroute(self._graph, {ref: now for ref, now in moved.items() if ref != now})
        return moved

    def _keep(self, order: Sequence[int]) -> None:
        """Leaves the node some of its variables."""
        node, inputs, dtypes = self._node, data_inputs(self._node), list(self._node.attr["T"].list.type)
        set_inputs(node, [inputs[number] for number in order], control_inputs(node))
        node.attr["T"].list.type[:] = [dtypes[number] for number in order]
        if self.shapes is not None:
            self.shapes = CallShapes(*(tuple(own[number] for number in order) for own in self.shapes))
        shapes = [None] * len(order) if self.shapes is None else self.shapes.shapes
        node.attr["output_shapes"].Clear()
        node.attr["output_shapes"].list.shape.extend(shape_attr(shape).shape for shape in shapes)


def _node(graph: GraphDef, ref: Ref) -> NodeDef:
    return next(node for node in graph.node if node.name == ref.node)


def _arguments(graph: GraphDef) -> list[str]:
    return [node.name for node in graph.node if node.op == "Placeholder"]


def _with_list_sizes(graph: GraphDef, known: KnownShapes) -> GraphDef:
    """Returns the graph with constants for lengths of lists, and shapes of their elements, that are known."""
    sizes = dict(_list_sizes(graph, known))
    if not sizes:
        return graph
    graph = copied(graph)
    for node in graph.node:
        if node.name in sizes:
            dtype = np.int64 if output_dtypes(node)[0] == types_pb2.DT_INT64 else np.int32
            make_constant(node, np.array(sizes[node.name], dtype))
    return graph


def _list_sizes(graph: GraphDef, known: KnownShapes) -> Iterator[tuple[str, int | Shape]]:
    for node in graph.node:
        if node.op == "TensorListLength" and (length := known.lengths.get(data_inputs(node)[0])) is not None:
            yield node.name, length
        elif node.op == "TensorListElementShape":
            shape = known.elements.get(data_inputs(node)[0])
            if shape is not None and None not in shape:
                yield node.name, shape


_SHAPING = frozenset({"BroadcastTo", "Reshape"})
_REDUCING = frozenset({"Max", "Mean", "Min", "Prod", "Sum"})


def drop_no_ops(graph: GraphDef, shapes: Mapping[Ref, Shape | None]) -> tuple[GraphDef, dict[Ref, Ref]]:
    """Returns a graph without reshapes to the same shape, and without reductions over no axes.

        x -> Sum(axes=[]) -> Reshape(shape of x) -> y   becomes   x -> y

    Gradients undo broadcasting in this way wherever it may have happened. For graphs with known shapes TensorFlow
    leaves these operators out; XLA fuses differently around them.

    Args:
        graph: a flat graph; it isn't changed.
        shapes: of its tensors, as far as known.

    Returns:
        The graph, and the replacement of each removed tensor.
    """
    view = Graph(graph)
    needed = {name for node in view for name in control_inputs(node)}
    moved: dict[Ref, Ref] = {}
    for name in view.topological():
        node = view.nodes[name]
        if name in needed or control_inputs(node) or node.op not in _SHAPING | _REDUCING:
            continue
        source, operand = view.inputs(name)
        source = moved.get(source, source)
        if node.op in _SHAPING:
            same = _is_known(shapes.get(source)) and shapes.get(source) == shapes.get(Ref(name))
        else:
            same = _is_empty(view.nodes[operand.node])
        if same:
            moved[Ref(name)] = source
    made = copied(graph)
    substitute(made, {ref.node: source for ref, source in moved.items()})
    return made, moved


def _is_known(shape: Shape | None) -> bool:
    return shape is not None and None not in shape


def _is_empty(axes: NodeDef) -> bool:
    return axes.op == "Const" and constant_value(axes).size == 0
