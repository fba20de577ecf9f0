"""The forward graph of each stage, first stage to last, with its boundary tensors as arguments and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from graph_passes.errors import PassError
from graph_passes.ir.graph import (
    COLOCATION,
    FLOAT_DTYPES,
    Graph,
    GraphDef,
    Names,
    Ref,
    dtype_attr,
    make_node,
    set_inputs,
    shape_attr,
)
from graph_passes.ir.outline import dtype_of
from graph_passes.ir.program import Contribution, Fact, Program, Stage, Value, VariableKind


@dataclasses.dataclass(frozen=True)
class BuildForward:
    """Gives each stage its own graph.

    What the stage reads from outside becomes a placeholder: its slice of the batch inputs, variables, tensors of
    earlier stages. Nodes that belong to no stage are copied to each that needs them.

    Attributes:
        want_outputs: whether the model's outputs are results (for prediction; in training only metrics read them).

    Source: DAPPLE (PPoPP'21), section 5.2.1: "No backward graphs should be built until all forward graphs are ready."
    """

    name: ClassVar[str] = "build_forward"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.STAGES,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.GRAPHS,)
    want_outputs: bool = False

    def run(self, program: Program) -> Program:
        """Program with stages assigned -> program whose stages have ``graph``, ``arguments`` and ``results``."""
        graph = Graph(program.graph)
        return program.replace(
            flat=program.graph, stages=tuple(self._stage(program, graph, stage) for stage in program.stages)
        )

    def _stage(self, program: Program, graph: Graph, stage: Stage) -> Stage:
        roles, last = program.roles, len(program.stages) - 1

        def here(ref: Ref | None) -> bool:
            return ref is not None and program.node_stage.get(ref.node, last) == stage.index

        results = [boundary.ref for boundary in program.boundaries if boundary.producer == stage.index]
        if self.want_outputs:
            results += [ref for ref in roles.outputs if here(ref)]
        if roles.loss is not None and here(roles.loss):
            results.append(roles.loss)
        variables = [variable for variable in roles.variables if variable.update is not None and here(variable.update)]
        results += [v.update for v in variables if v.kind is VariableKind.STATE and v.update is not None]
        metrics = [v.update for v in variables if v.kind is VariableKind.METRIC and v.update is not None]
        results = list(dict.fromkeys(results))
        arguments = [boundary.ref for boundary in program.boundaries if stage.index in boundary.consumers]
        arguments += [*roles.inputs, *roles.scalars, *(normalizer.placeholder for normalizer in roles.normalizers)]
        arguments += [variable.value for variable in roles.variables if variable.value is not None]

        shapes = {boundary.ref: boundary.shape for boundary in program.boundaries}
        extracted, placed = extract(graph, [*results, *metrics], arguments, shapes)
        return dataclasses.replace(
            stage,
            graph=extracted,
            arguments={Value(ref): place for ref, place in placed.items()},
            results={Value(ref): placed.get(ref, ref) for ref in results},
            metric_results={Value(ref): placed.get(ref, ref) for ref in metrics},
            state=tuple(
                Contribution(Value(v.update), v, dataclasses.replace(v, name=f"{v.name}/update/stage{stage.index}"))
                for v in variables
                if v.kind is VariableKind.STATE and v.dtype in FLOAT_DTYPES and v.update is not None
            ),
        )


def extract(
    graph: Graph, results: Sequence[Ref], arguments: Iterable[Ref], shapes: Mapping[Ref, Sequence[int | None]]
) -> tuple[GraphDef, dict[Ref, Ref]]:
    """Extracts the part of a graph that computes ``results`` from ``arguments``, as a graph of its own.

    Returns:
        The graph, with unchanged node names, and for each argument that it needs the placeholder in its place.
    """
    candidates = list(dict.fromkeys(arguments))
    body = graph.ancestors(results, candidates, control=False)
    needed = {ref for name in body for ref in graph.inputs(name)} | set(results)
    names = Names(graph.nodes)
    extracted = GraphDef(versions=graph.graph.versions, library=graph.graph.library)
    placed: dict[Ref, Ref] = {}
    for ref in candidates:
        if ref not in needed:
            continue
        original = graph.nodes[ref.node]
        if original.op == "Placeholder":
            extracted.node.append(original)
            placed[ref] = ref
        else:
            name = names.fresh(f"{ref.node}/argument")
            attrs = {"dtype": dtype_attr(dtype_of(graph, ref)), "shape": shape_attr(shapes[ref])}
            extracted.node.append(make_node(name, "Placeholder", attrs=attrs))
            placed[ref] = Ref(name)
    for name in graph.ordered(body):
        original = graph.nodes[name]
        if original.op == "Placeholder":
            raise PassError(f"placeholder {name!r} of the captured graph has no role")
        extracted.node.append(original)
        extracted.node[-1].attr.pop(COLOCATION, None)
        set_inputs(extracted.node[-1], [placed.get(ref, ref) for ref in graph.inputs(name)])
    return extracted, placed
