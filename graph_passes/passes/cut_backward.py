"""The backward that completes a stage's gradients runs in pieces, so that reductions run during the rest of it."""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from tensorflow.core.framework import function_pb2

from graph_passes.ir.collectives import order_sums
from graph_passes.ir.graph import (
    POSITION_ATTR,
    Builder,
    Graph,
    GraphDef,
    Ref,
    control_inputs,
    data_inputs,
    reroute,
    set_inputs,
)
from graph_passes.ir.node_kinds import NodeKind, task_attrs
from graph_passes.ir.outline import add_call, is_compiled, outline
from graph_passes.ir.program import Fact, Program, Stage, StageFunction, Step, Value, ValueKind
from graph_passes.ir.tasks import Task
from graph_passes.ir.tensorflow_bridge import function_graph
from graph_passes.passes.assign_stages import find_call


@dataclasses.dataclass(frozen=True)
class CutBackward:
    """Cuts the last backward of each replica into consecutive calls, each but the last of which completes gradients.

        cuts ("block_1",), last micro-batch 3:  B3   becomes   B3 of what follows block_1 -> B3 of the rest

    A piece computes what its gradients need and no piece before it has computed, by data flow. The gradients of a
    layer's parameters belong to the piece of the first layer that reads them. Other micro-batches aren't cut: their
    gradients are complete only with the last one's.

    Attributes:
        cuts: names of layers, as in `AssignStages`, within stages: a piece ends with the backward of what follows.

    Source: wait-free backpropagation, which Out-Of-Order BackProp (EuroSys'22), section 2, takes as its baseline:
    "starts the synchronization of a layer's gradients as soon as they are computed".
    """

    name: ClassVar[str] = "cut_backward"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.STEP,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.STEP,)
    cuts: tuple[str, ...]

    def run(self, program: Program) -> Program:
        """A step -> the same, whose stages have ``pieces`` where these cuts lie, and whose last backwards are these.

        Raises:
            PassError: a cut names no layer, or several.
        """
        positions = sorted(find_call(name, program.roles.calls).stop for name in self.cuts)
        stages = tuple(_with_pieces(program, stage, positions) for stage in program.stages)
        graph, step = program.graph, program.own_step
        for stage in stages:
            if stage.pieces:
                graph, step = _place(graph, step, stage)
        return program.replace(graph=graph, step=step, stages=stages)


# ---- pieces of a function


def _with_pieces(program: Program, stage: Stage, positions: Sequence[int]) -> Stage:
    """Returns the stage with the pieces of the function that gives its parameters' gradients, if there are several."""
    _, function = stage.parameter_gradients
    if function is None:
        return stage
    number = _PieceNumbers(program, stage.index, positions)
    dense = {value for value, _, _ in stage.gradients}
    parts: list[list[Value]] = []
    before: list[Value] = []
    for piece in range(len(positions) + 1):
        before += [value for value in function.outputs if number.of(value.ref) == piece]
        if dense.intersection(before):
            parts.append(before)
            before = []
    parts += [before] if before else []  # It gives what is sent back.
    if len(parts) < 2:
        return stage
    return dataclasses.replace(stage, pieces=_cut(function, parts))


class _PieceNumbers:
    """Which piece of a stage's backward ends with the gradient of a tensor: that of the first layer that reads it."""

    def __init__(self, program: Program, stage: int, positions: Sequence[int]) -> None:
        self._graph, self._positions = Graph(program.flat_graph), positions
        self._first: dict[str, int] = {}  # node -> the position of the stage's first node that needs it
        position, places = -1, {}
        for node in self._graph:
            if POSITION_ATTR in node.attr:
                position = int(node.attr[POSITION_ATTR].i)
            places[node.name] = position
        for name in reversed(list(self._graph.nodes)):
            own = program.node_stage.get(name)
            if own == stage:
                self._first[name] = places[name]
            elif own is None:  # computed wherever it is read
                readers = [self._first[reader] for reader in self._graph.consumers(name) if reader in self._first]
                if readers:
                    self._first[name] = min(readers)

    def of(self, ref: Ref) -> int:
        """Returns the number of the piece, 0 after all cuts."""
        readers = [
            self._first[reader]
            for reader in self._graph.consumers(ref.node)
            if reader in self._first and ref in self._graph.inputs(reader)
        ]
        return len(self._positions) - bisect.bisect_right(self._positions, min(readers, default=-1))


def _cut(function: StageFunction, parts: Sequence[Sequence[Value]]) -> tuple[StageFunction, ...]:
    """Returns functions that compute consecutive parts of a function's results, each from those before it."""
    body, results = function_graph(function_pb2.FunctionDefLibrary(function=[function.function]), function.name)
    graph = Graph(body)
    arguments = dict(zip(function.inputs, (Ref(node.name) for node in graph), strict=False))
    result_of = dict(zip(function.outputs, results, strict=True))
    given, done = set(arguments.values()), set[str]()
    reads: list[list[Ref]] = []  # what each part reads that parts before it have computed
    for part in parts:
        wanted = [result_of[value] for value in part]
        own = graph.ancestors(wanted, given, control=False) - done
        read = dict.fromkeys([ref for name in graph.ordered(own) for ref in graph.inputs(name)] + wanted)
        reads.append([ref for ref in read if ref.node in done])
        # A constant is made again rather than kept.
        done |= {name for name in own if graph.nodes[name].op != "Const"}
    pieces = []
    made: dict[Value, Ref] = {}
    for number, part in enumerate(parts):
        inputs = {**arguments, **{value: ref for value, ref in made.items() if ref in reads[number]}}
        own = graph.ancestors([result_of[value] for value in part], inputs.values(), control=False)
        later = dict.fromkeys(ref for read in reads[number + 1 :] for ref in read if ref.node in own)
        partial = {Value(ref, ValueKind.PARTIAL): ref for ref in later if ref not in made.values()}
        outputs = {value: result_of[value] for value in part} | partial
        made |= partial
        read_refs = {ref for name in own for ref in graph.inputs(name)} | set(outputs.values())
        used = {value: ref for value, ref in inputs.items() if ref in read_refs}
        name, jit_compile = f"{function.name}_piece{number}", is_compiled(function.function)
        piece = outline(name, graph, list(used.values()), list(outputs.values()), jit_compile=jit_compile)
        order_sums(piece)  # Of those that were in order through one of another piece.
        told = function.function.arg_attr  # shapes
        for index, value in enumerate(used):
            if value in function.inputs and (known := function.inputs.index(value)) in told:
                piece.arg_attr[index].CopyFrom(told[known])
        pieces.append(StageFunction(piece, tuple(used), tuple(outputs)))
    return tuple(pieces)


# ---- calls


def _place(graph: GraphDef, step: Step, stage: Stage) -> tuple[GraphDef, Step]:
    """Returns the graph and the step with pieces in place of each replica's last call."""
    phase, function = stage.parameter_gradients
    assert function is not None
    last: dict[int, Task] = {}
    for task in sorted(step.entry):
        if (task.stage, task.phase) == (stage.index, phase):
            last[task.replica] = task
    old = {step.entry[task]: task for task in last.values()}
    made = GraphDef(versions=graph.versions, library=graph.library)
    builder = Builder(made)
    entry, exits, values, pieces = dict(step.entry), dict(step.exit), dict(step.values), dict(step.pieces)
    moved: dict[Ref, Ref] = {}
    ends: dict[str, str] = {}
    for node in graph.node:
        if node.name not in old:
            made.node.append(node)
            continue
        task = old[node.name]
        given = dict(zip(function.inputs, data_inputs(node), strict=True))
        waits, calls, attrs = control_inputs(node), [], task_attrs(task, NodeKind.of_phase(phase))
        for number, piece in enumerate(stage.pieces):
            name, inputs = f"{node.name}_piece{number}", [given[value] for value in piece.inputs]
            call = add_call(builder, name, piece.function, inputs, device=node.device, control=waits, attrs=attrs).node
            calls.append(call)
            waits = [call]
            given |= {value: Ref(call, index) for index, value in enumerate(piece.outputs)}
        moved |= {Ref(node.name, index): given[value] for index, value in enumerate(function.outputs)}
        entry[task], pieces[task] = calls[0], tuple(calls)
        exits[task] = tuple(calls[-1] if name == node.name else name for name in step.exit[task])
        ends[node.name] = calls[-1]
    reroute(made, moved)
    for node in made.node:
        if not ends.keys().isdisjoint(waits := control_inputs(node)):
            set_inputs(node, data_inputs(node), [ends.get(name, name) for name in waits])
    values = {key: moved.get(ref, ref) for key, ref in values.items()}
    return made, dataclasses.replace(step, entry=entry, exit=exits, values=values, pieces=pieces)
