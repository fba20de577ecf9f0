"""How every tensor of a captured graph depends on the samples of a slice, by abstract interpretation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

from graph_passes.analysis.operator_shapes import KnownShapes, ShapeInference
from graph_passes.analysis.operator_traits import BRANCHES, LOOPS
from graph_passes.analysis.sample_interpreter import Interpreter, Whole
from graph_passes.analysis.sample_rules import RULES
from graph_passes.analysis.slice_shapes import Dependence, SliceShapes, part_before
from graph_passes.errors import PassError
from graph_passes.ir.graph import Graph, GraphDef, Ref
from graph_passes.ir.program import Program
from graph_passes.ir.spreads import TRAINED, Coupling, Spread
from graph_passes.ir.tensorflow_bridge import Shape


class SampleDependence(NamedTuple):
    """The result of the interpretation.

    Attributes:
        spreads: tensor -> how it relates to that of the whole batch.
        couplings: (node, what it does), in the order of the graph.
        wholes: see `Whole`.
        shapes: those of tensors without batch axes, and of others for some number of samples.
        partial: whether it covers only the outputs' computation, as shapes contradict each other in the rest.
    """

    spreads: Mapping[Ref, Spread]
    couplings: Sequence[tuple[str, Coupling]]
    wholes: Sequence[Whole]
    shapes: Mapping[Ref, Shape | None]
    partial: bool = False


def sample_dependence(
    program: Program, loss_nodes: Container[str], outputs: Sequence[Ref] = ()
) -> SampleDependence | None:
    """Interprets a captured graph.

    Args:
        program: a flat program, producers first.
        loss_nodes: the nodes that serve only the loss and metrics, which may read statistics of the whole batch.
        outputs: the model's outputs: with the samples along two axes, they are coupled as pairs. If shapes contradict
            each other (of the loss and the labels, say), only the outputs' computation is interpreted.

    Returns:
        The result; None if shapes contradict each other in that part too, for all numbers of samples.
    """
    graph, partial = Graph(program.graph), False
    shapes = _shapes(program, program.graph)
    if shapes is None:
        part, partial = part_before(program.graph, [ref for ref in outputs if ref.node in graph]), True
        graph, shapes = Graph(part), _shapes(program, part)
    if shapes is None:
        return None
    interpreter, few = _interpreted(program, graph, shapes, loss_nodes)
    pairs = [(ref.node, Coupling.PAIRS) for ref in outputs if ref.node in graph and len(interpreter.growing(ref)) > 1]
    couplings = list(dict.fromkeys([*interpreter.couplings, *pairs]))
    return SampleDependence(interpreter.spreads, couplings, interpreter.wholes, few, partial)


def spreads_of(program: Program, refs: Sequence[Ref]) -> Mapping[Ref, Spread]:
    """Returns the spreads of some of a flat program's tensors.

    Where the parts of an axis depend on lengths that the model leaves open, they count as unknown: graphs made by one
    batch serve all others. The result is empty if shapes contradict each other for all numbers of samples.
    """
    part, examples = part_before(program.graph, refs), program.roles.example_shapes
    # Other lengths than at hand: each by itself, all together, and left open. The first count that shapes allow.
    factors = itertools.count(2)
    apart = tuple((None, *(size and size * next(factors) for size in shape[1:])) for shape in examples)
    doubled = tuple((None, *(size and size * 2 for size in shape[1:])) for shape in examples)
    spreads: dict[Ref, Spread] | None = None
    for lengths in (examples, apart, doubled, ()):
        assumed = program.replace(roles=dataclasses.replace(program.roles, example_shapes=lengths))
        shapes = _shapes(assumed, part)
        if spreads is None and shapes is None:
            return {}
        if shapes is None:
            continue
        interpreter, _ = _interpreted(assumed, Graph(part), shapes)
        now = {ref: interpreter.of(ref) for ref in refs}
        if spreads is not None:
            return {ref: own if own.outer == now[ref].outer else _unordered(own) for ref, own in spreads.items()}
        spreads = {ref: own if own.outer == 1 or interpreter.rows(ref) else _unordered(own) for ref, own in now.items()}
        if not examples or shapes.assumed[2] == shapes.assumed[0]:
            return spreads
    return {ref: _unordered(own) for ref, own in (spreads or {}).items()}


def _unordered(spread: Spread) -> Spread:
    return spread._replace(outer=None)


def _interpreted(
    program: Program, graph: Graph, shapes: SliceShapes, loss_nodes: Container[str] = ()
) -> tuple[Interpreter, Mapping[Ref, Shape | None]]:
    """Interprets a part of a program's graph; returns the shapes for the smaller number of samples, too."""
    assert shapes.samples is not None
    inference, samples = ShapeInference(program.graph.library), shapes.samples
    shapes, elements = _inside(program, graph.graph, shapes, inference)
    roles = program.roles
    spreads: dict[Ref, Spread] = {ref: Spread(axis=0, varies=True) for ref in roles.inputs}
    for variable in roles.variables:
        if variable.value is not None:
            spreads[variable.value] = TRAINED
    spreads |= {normalizer.placeholder: TRAINED for normalizer in roles.normalizers}
    spreads[roles.slice.weight] = Spread(degree=1, known=False)
    spreads[roles.slice.number] = TRAINED
    spreads[roles.slice.samples] = Spread(degree=1)
    scalars = [{roles.slice.weight: float(few), roles.slice.samples: float(few)} for few in samples]
    told = (Dependence.FIXED, Dependence.BATCH)
    sources = {node.name: shapes.axes(graph.inputs(node.name)[0]) for node in graph if node.op == "Shape"}
    open_shapes = {
        name for name, axes in sources.items() if axes is None or any(axis.dependence not in told for axis in axes)
    }
    interpreter = Interpreter(
        graph,
        RULES,
        samples,
        [KnownShapes(dict(own), elements_of, {}) for own, elements_of in zip(shapes.found, elements, strict=False)],
        scalars,
        loss_nodes,
        open_shapes,
        inference=inference,
    )
    interpreter.run(spreads)
    return interpreter, shapes.found[0]


def _shapes(program: Program, graph: GraphDef) -> SliceShapes | None:
    """Returns the shapes; None if they contradict each other for all numbers of samples: their readers raise that."""
    try:
        shapes = SliceShapes.of(program, graph)
    except PassError:
        return None
    return None if shapes.samples is None else shapes


def _inside(
    program: Program, graph: GraphDef, shapes: SliceShapes, inference: ShapeInference
) -> tuple[SliceShapes, Sequence[dict[Ref, Shape]]]:
    """Infers shapes after loops and branches too, and of lists' elements for both numbers of samples."""
    assert shapes.samples is not None
    few, many = shapes.samples
    nothing: Sequence[dict[Ref, Shape]] = ({}, {})
    try:
        if not any(node.op in (*LOOPS, *BRANCHES) for node in graph.node):
            return shapes.through_functions(program, shapes.found[0]), nothing
        open_lengths = [] if shapes.assumed[2] == shapes.assumed[0] else [(shapes.assumed[2], few)]
        known = [
            inference.of(graph, inputs, values={program.roles.slice.samples: samples})
            for inputs, samples in [(shapes.assumed[0], few), (shapes.assumed[1], many), *open_lengths]
        ]
    except PassError:  # sizes then follow from axes
        return shapes, nothing
    first, second, last = known[0], known[1], known[-1] if open_lengths else known[0]
    inferred = first.shapes, second.shapes, last.shapes
    return dataclasses.replace(shapes, found=inferred), (first.elements, second.elements)
