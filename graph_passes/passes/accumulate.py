"""Gradients, and state that the forward pass updates, are added up over micro-batches, in place."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import ClassVar

from graph_passes.ir.graph import Builder, copied
from graph_passes.ir.node_kinds import NodeKind, task_attrs
from graph_passes.ir.outline import FunctionDef, call_node
from graph_passes.ir.program import Contribution, Fact, Program, Step
from graph_passes.ir.storage import accumulate_function, merge_library
from graph_passes.ir.tasks import Phase, Task


@dataclasses.dataclass(frozen=True)
class Accumulate:
    """Adds each task's contributions to the replica's accumulators: GA in the paper's figure 10.

        B0 B1 B2   becomes   B0 -> GA(=)   B1 -> GA(+=)   B2 -> GA(+=)

    An accumulator is a variable of the device, so that memory doesn't grow with the number of micro-batches. Adding
    belongs to the task: the next task of the device waits for it, and finds the gradient's memory free. Gradients that
    are rows of an embedding aren't added up but kept; they are as large as the embedding's output.

    Attributes:
        prefix: start of the functions' names.
        accumulated: False leaves gradients where tasks have made them, which is enough for one micro-batch.

    Source: DAPPLE (PPoPP'21), section 5.2.3: "each device produces and accumulates gradients for all micro-batches."
    """

    name: ClassVar[str] = "accumulate"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.CONNECTED,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.CONNECTED,)
    prefix: str = ""
    accumulated: bool = True

    def run(self, program: Program) -> Program:
        """Adds accumulation to the exit of each task of a program with connected tasks."""
        if not self.accumulated:
            return program
        step = program.own_step
        graph = copied(program.graph)
        builder = Builder(graph)
        exits, pieces = dict(step.exit), dict(step.pieces)
        functions: list[FunctionDef] = []
        for stage in program.stages:
            for phase, sources in (
                (Phase.FORWARD, stage.state),
                (stage.parameter_gradients[0], stage.gradients),
            ):
                if not sources:
                    continue
                named = f"{self.prefix}stage{stage.index}_accumulate_{phase.name.lower()}"
                by_mode = {mode: _function(f"{named}_{mode}", sources, mode) for mode in ("first", "next")}
                functions += by_mode.values()
                for replica in range(len(step.layout.devices[stage.index])):
                    tasks = self._tasks(program, stage.index, phase, replica)
                    for index, task in enumerate(tasks):
                        mode = "next" if index else "first"
                        # Additions run in sequence even where no schedule orders the tasks.
                        after = exits[tasks[index - 1]] if index else ()
                        device = step.layout.devices[stage.index][replica]
                        attrs = task_attrs(task, NodeKind.ACCUMULATE)
                        name = f"stage{stage.index}/replica{replica}/accumulate_{phase.value}{task.micro_batch}"
                        for piece, part in _parts(step, task, sources):
                            function = by_mode[mode]
                            if piece is not None:
                                function = _function(f"{named}_piece{piece}_{mode}", part, mode)
                                functions.append(function)
                            inputs = [step.values[task, source.value] for source in part]
                            node = call_node(
                                builder.names.fresh(name), function, inputs, device=device, control=after, attrs=attrs
                            )
                            builder.append(node)
                            exits[task] = (*exits[task], node.name)
                            if piece is not None:
                                calls = pieces[task]
                                pieces[task] = (*calls[:piece], (*calls[piece], node.name), *calls[piece + 1 :])
        merge_library(graph, functions)
        nodes = {node.name: node for node in graph.node}
        for parts_of_task in pieces.values():
            for before, after_it in itertools.pairwise(parts_of_task):
                nodes[after_it[0]].input.extend(f"^{name}" for name in before[1:])  # and finds its memory free
        return program.replace(graph=graph, step=dataclasses.replace(step, exit=exits, pieces=pieces, accumulated=True))

    def _tasks(self, program: Program, stage: int, phase: Phase, replica: int) -> Sequence[Task]:
        return sorted(
            task
            for task in program.own_step.entry
            if task.stage == stage and task.phase is phase and task.replica == replica
        )


def _function(name: str, sources: Sequence[Contribution], mode: str) -> FunctionDef:
    return accumulate_function(name, [source.accumulator for source in sources], mode)


def _parts(step: Step, task: Task, sources: Sequence[Contribution]) -> list[tuple[int | None, Sequence[Contribution]]]:
    """Returns contributions that are added at once: of a whole task, or of each piece."""
    if task not in step.pieces:
        return [(None, sources)]
    makers = {source: step.values[task, source.value].node for source in sources}
    parts = [
        (number, [source for source, maker in makers.items() if maker == nodes[0]])
        for number, nodes in enumerate(step.pieces[task])
    ]
    return [(number, part) for number, part in parts if part]
