"""The backward graph of each stage, last stage to first."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

from graph_passes.analysis.gradient_pieces import gradients_by_pieces
from graph_passes.ir.graph import Graph, Names, Ref, copied, dtype_attr, make_node, shape_attr
from graph_passes.ir.outline import dtype_of
from graph_passes.ir.program import (
    OWN_ROWS,
    ROWS,
    SHARED_ROWS,
    Contribution,
    Fact,
    Program,
    Stage,
    Value,
    ValueKind,
    VariableKind,
)
from graph_passes.ir.tensorflow_bridge import Differentiate, add_gradients
from graph_passes.ir.twin import KINDS_OF_STAGES
from graph_passes.passes.call_gradients import differentiable_calls
from graph_passes.passes.row_sets import Rows, refusal, row_sets


@dataclasses.dataclass(frozen=True)
class BuildBackward:
    """Extends each stage's graph by its gradients.

        x, w -> y   becomes   x, w, dy -> y, dx, dw

    The gradients of the loss and of every tensor that the stage sends are arguments; the gradients of its received
    tensors and of its parameters are results. A parameter that is used several times in the stage gets the sum.

    A parameter from which all stages only gather rows (an embedding) keeps its gradient as rows and their indices.
    Keras' optimizers square the rows of such a gradient one by one, where the sum of rows would give another update.
    Rows that belong to samples stay apart from those of other slices; rows that all slices have in common (looked up by
    constants, say) are results of their own, to be added up.

    Attributes:
        slices: slices into which each stage's replicas and micro-batches cut a full batch; empty for one.

    Source: DAPPLE (PPoPP'21), section 5.2.1: "backward graphs will be built in reverse order for each stage."
    """

    name: ClassVar[str] = "build_backward"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.GRAPHS,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.GRAPHS,)
    slices: Sequence[int] = ()

    def run(self, program: Program) -> Program:
        """Program with forward graphs -> program whose stages have gradients among ``arguments`` and ``results``.

        Raises:
            PassError: it is unknown which rows of a gradient belong to samples, and a stage has several slices.
        """
        arriving: set[Ref] = set()  # boundary tensors for which some later stage computes a gradient
        differentiate = functools.lru_cache(maxsize=KINDS_OF_STAGES)(gradients_by_pieces)
        stages: list[Stage] = []
        for stage in reversed(program.stages):
            stages.append(self._stage(program, stage, arriving, differentiate))
            arriving |= {value.ref for value in stages[-1].results if value.kind is ValueKind.GRADIENT}
        sliced = {value.ref for stage in stages for value in stage.results if value.kind is ValueKind.SLICE_VALUES}
        dense = {
            value.ref
            for stage in stages
            for value in stage.results
            if value.kind is ValueKind.GRADIENT and Value(value.ref, ValueKind.SLICE_VALUES) not in stage.results
        }
        in_one_form = [_without(stage, sliced - dense, dense) for stage in reversed(stages)]
        return program.replace(
            stages=tuple(_with_gradients(program, self._with_row_sets(program, stage)) for stage in in_one_form)
        )

    def _with_row_sets(self, program: Program, stage: Stage) -> Stage:
        """Returns the stage with each slice's own rows separate from the rows that all slices have in common."""
        by_value = {variable.value: variable for variable in program.roles.variables if variable.value is not None}
        gradients = {
            by_value[value.ref]: Rows(values, stage.results[Value(value.ref, ValueKind.SLICE_INDICES)])
            for value, values in stage.results.items()
            if value.kind is ValueKind.SLICE_VALUES
        }
        if not gradients:
            return stage
        graph = copied(stage.own_graph)
        sets = row_sets(program, stage, graph, gradients)
        results: dict[Value, Ref] = {}
        for value, ref in stage.results.items():
            if value.kind not in ROWS:
                results[value] = ref
            elif value.kind is ValueKind.SLICE_VALUES:
                own, shared, _ = sets[by_value[value.ref]]
                for kinds, rows in ((OWN_ROWS, own), (SHARED_ROWS, shared)):
                    if rows is not None:
                        results |= {Value(value.ref, kind): part for kind, part in zip(kinds, rows, strict=True)}
        undecided = {variable.name: separated.undecided for variable, separated in sets.items() if separated.undecided}
        slices = self.slices[stage.index] if self.slices else 1
        for name, why in undecided.items():
            if slices > 1:
                raise refusal(name, why, stage.index, slices)
        return dataclasses.replace(stage, graph=graph, results=results, undecided_rows=undecided)

    def _stage(self, program: Program, stage: Stage, arriving: set[Ref], differentiate: Differentiate) -> Stage:
        graph = copied(stage.own_graph)
        view = Graph(stage.own_graph)
        names = Names(view.nodes)
        shapes = {boundary.ref: boundary.shape for boundary in program.boundaries}
        arguments = dict(stage.arguments)
        outputs = []
        for value, ref in stage.results.items():
            if value.ref != program.roles.loss and value.ref not in arriving:
                continue
            name = names.fresh(f"gradient_of/{value.ref.node}_{value.ref.output}")
            attrs = {"dtype": dtype_attr(dtype_of(view, ref)), "shape": shape_attr(shapes.get(value.ref, ()))}
            graph.node.append(make_node(name, "Placeholder", attrs=attrs))
            arguments[Value(value.ref, ValueKind.GRADIENT)] = Ref(name)
            outputs.append((ref, Ref(name)))

        parameters = [v.value for v in program.roles.variables if v.kind is VariableKind.PARAMETER]
        received = [b.ref for b in program.boundaries if b.differentiable and stage.index in b.consumers]
        sources = [ref for ref in (*received, *parameters) if ref is not None and Value(ref) in stage.arguments]
        results = dict(stage.results)
        if outputs and sources:
            graph = differentiable_calls(graph)
            arguments_of_sources = [stage.arguments[Value(ref)] for ref in sources]
            graph, gradients = add_gradients(graph, outputs, arguments_of_sources, differentiate)
            for ref, gradient in zip(sources, gradients, strict=True):
                if gradient is None:
                    continue
                results[Value(ref, ValueKind.GRADIENT)] = gradient.dense
                if gradient.slices is not None and ref in parameters:
                    results[Value(ref, ValueKind.SLICE_VALUES)] = gradient.slices[0]
                    results[Value(ref, ValueKind.SLICE_INDICES)] = gradient.slices[1]
        return dataclasses.replace(stage, graph=graph, arguments=arguments, results=results)


def _with_gradients(program: Program, stage: Stage) -> Stage:
    """Returns the stage with the list of its dense gradients."""
    values = ((Value(v.value, ValueKind.GRADIENT), v) for v in program.roles.variables if v.value is not None)
    gradients = tuple(
        Contribution(value, v, dataclasses.replace(v, name=f"{v.name}/gradient/stage{stage.index}"))
        for value, v in values
        if value in stage.results
    )
    return dataclasses.replace(stage, gradients=gradients)


def _without(stage: Stage, sliced: set[Ref], dense: set[Ref]) -> Stage:
    """Returns the stage with one form of each gradient: rows for ``sliced`` parameters, the whole for ``dense``."""
    results = {
        value: ref
        for value, ref in stage.results.items()
        if not (value.kind is ValueKind.GRADIENT and value.ref in sliced)
        and not (value.kind in OWN_ROWS and value.ref in dense)
    }
    return dataclasses.replace(stage, results=results)
