"""Gradients of calls: functions that stay one node, for XLA say, get one for B.

TensorFlow finds the gradient of a call by the traced Python function, which a GraphDef doesn't have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from graph_passes.ir.call_order import CALLS
from graph_passes.ir.graph import (
    COUNTABLE_DTYPES,
    Graph,
    GraphDef,
    Names,
    NodeDef,
    Ref,
    copied,
    dtype_attr,
    function_attr,
    make_node,
)
from graph_passes.ir.outline import FunctionDef, dtype_of, is_compiled, outline
from graph_passes.ir.resource_use import library_of
from graph_passes.ir.storage import merge_gradients, merge_library
from graph_passes.ir.tensorflow_bridge import (
    CALL_GRADIENT,
    CALL_GRADIENT_DTYPES,
    CALL_GRADIENT_FUNCTION,
    CALL_GRADIENT_READS,
    CALL_GRADIENT_RESULTS,
    add_gradients,
    function_graph,
)

_GRADIENT_TYPE = "_gradient_op_type"
_SHAPES = "_output_shapes"


@dataclasses.dataclass(frozen=True)
class _Split:
    """A function and its gradient.

    Attributes:
        forward: the function, which also returns the inner tensors that its gradient needs.
        gradient: (what it reads) -> gradients.
        reads: numbers of the call's inputs that the gradient reads, then of its outputs, then of the outputs whose
            gradients it reads: three lists in sequence, with -1 between.
        results: for each of the gradient's results twice the number of its input, plus 1 for the first of a pair:
            values and indices of rows.
    """

    forward: FunctionDef
    gradient: FunctionDef
    reads: tuple[int, ...]
    results: tuple[int, ...]


def differentiable_calls(graph: GraphDef) -> GraphDef:
    """Returns a graph whose calls can all be differentiated.

        y = f(x)   becomes   y, r = f'(x),   with the gradient   dx = g(x, r, dy)

    f' also returns the inner tensors that its gradient g reads, as TensorFlow's own gradients of functions do. Each is
    one node, compiled by XLA if f is. Calls in the bodies of loops, branches and other calls are treated alike.

    Args:
        graph: a flat graph with its library; it isn't changed.
    """
    called = any(node.op in CALLS for node in graph.node)
    if not called and not any(node.op in CALLS for function in graph.library.function for node in function.node_def):
        return graph
    return _Rewriting(graph).result()


class _Rewriting:
    """A graph while its calls are given gradients."""

    def __init__(self, graph: GraphDef) -> None:
        self.graph = copied(graph)
        self.functions = {function.signature.name: function for function in self.graph.library.function}
        self.names = Names(self.functions)
        self.splits: dict[str, _Split | None] = {}
        self.rewritten: set[str] = set()

    def result(self) -> GraphDef:
        for name in list(self.functions):
            self._rewrite_body(name)
        self._rewrite(self.graph.node)
        splits = [split for split in self.splits.values() if split is not None]
        merge_library(self.graph, [part for split in splits for part in (split.forward, split.gradient)])
        return self.graph

    def _rewrite_body(self, name: str) -> None:
        """Rewrites a function's body, after the functions that it calls."""
        if name in self.rewritten:
            return
        self.rewritten.add(name)
        self._rewrite(self.functions[name].node_def)

    def _rewrite(self, nodes: Iterable[NodeDef]) -> None:
        for node in nodes:
            if node.op not in CALLS or _GRADIENT_TYPE in node.attr:
                continue
            name = node.attr["f"].func.name
            if name not in self.functions:
                continue
            if name not in self.splits:
                self._rewrite_body(name)
                self.splits[name] = self._split(self.functions[name])
            split = self.splits[name]
            if split is not None:
                _call_both(node, split)

    def _split(self, function: FunctionDef) -> _Split | None:
        """Returns a function with its gradient; None if no gradient flows through it."""
        name = function.signature.name
        flat, results = function_graph(self.graph.library, name)
        before = Graph(flat)
        inputs = [Ref(node.name) for node in flat.node[: len(function.signature.input_arg)]]
        outputs = [number for number, ref in enumerate(results) if dtype_of(before, ref) in COUNTABLE_DTYPES]
        sources = [number for number, ref in enumerate(inputs) if dtype_of(before, ref) in COUNTABLE_DTYPES]
        names = Names(before.nodes)
        arriving: dict[int, Ref] = {}
        for number in outputs:
            placeholder = names.fresh(f"gradient{number}")
            dtype = dtype_attr(dtype_of(before, results[number]))
            flat.node.append(make_node(placeholder, "Placeholder", attrs={"dtype": dtype}))
            arriving[number] = Ref(placeholder)
        if not outputs or not sources:
            return None
        whole, gradients = add_gradients(
            flat, [(results[number], arriving[number]) for number in outputs], [inputs[number] for number in sources]
        )
        wanted: list[Ref] = []
        belongs: list[int] = []
        for number, gradient in zip(sources, gradients, strict=True):
            if gradient is not None and gradient.slices is not None:
                wanted += gradient.slices
                belongs.append(2 * number + 1)
            elif gradient is not None:
                wanted.append(gradient.dense)
                belongs.append(2 * number)
        if not wanted:
            return None
        joint = Graph(whole)
        given = {*inputs, *arriving.values()}
        first = joint.ancestors(results, given, control=False)
        second = joint.ancestors(wanted, given, control=False) - first
        read = {ref for node in joint.ordered(second) for ref in joint.inputs(node)} | set(wanted)
        own = set(results) | given
        inside = [ref for ref in read if ref.node in first and ref not in own and joint.nodes[ref.node].op != "Const"]
        kept = [*results, *sorted(inside, key=lambda ref: (joint.position[ref.node], ref.output))]
        of_inputs = [number for number, ref in enumerate(inputs) if ref in read]
        places = {ref: number for number, ref in enumerate(kept)}
        of_outputs = [number for ref, number in places.items() if ref in read and ref not in given]
        of_gradients = [number for number, ref in arriving.items() if ref in read]
        arguments = [inputs[number] for number in of_inputs]
        arguments += [kept[number] for number in of_outputs] + [arriving[number] for number in of_gradients]
        compiled = is_compiled(function)
        forward = outline(self.names.fresh(f"{name}_forward"), joint, inputs, kept, jit_compile=compiled)
        gradient = outline(self.names.fresh(f"{name}_gradient"), joint, arguments, wanted, jit_compile=compiled)
        self._take_over(whole, (forward, gradient))
        return _Split(forward, gradient, (*of_inputs, -1, *of_outputs, -1, *of_gradients), tuple(belongs))

    def _take_over(self, whole: GraphDef, callers: Iterable[FunctionDef]) -> None:
        """Adds the functions of a graph that ``callers`` call to the library."""
        called = library_of((node for caller in callers for node in caller.node_def), whole.library)
        merge_library(self.graph, called.function)
        merge_gradients(self.graph, called)


def _call_both(node: NodeDef, split: _Split) -> None:
    """Makes a call use the function that also returns its gradient's inputs, and names the gradient."""
    more = [argument.type for argument in split.forward.signature.output_arg][len(node.attr["Tout"].list.type) :]
    node.attr["f"].func.name = split.forward.signature.name
    node.attr["Tout"].list.type.extend(more)
    if _SHAPES in node.attr:
        for _ in more:
            node.attr[_SHAPES].list.shape.add(unknown_rank=True)
    node.attr[_GRADIENT_TYPE].s = CALL_GRADIENT.encode()
    node.attr[CALL_GRADIENT_FUNCTION].CopyFrom(function_attr(split.gradient.signature.name))
    node.attr[CALL_GRADIENT_READS].list.i.extend(split.reads)
    node.attr[CALL_GRADIENT_DTYPES].list.type.extend(arg.type for arg in split.gradient.signature.output_arg)
    node.attr[CALL_GRADIENT_RESULTS].list.i.extend(split.results)
