"""Gradients, and state that the forward pass updates, are added up over micro-batches, in place."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

from graph_passes.ir.graph import Builder, control_inputs, copied
from graph_passes.ir.node_kinds import NodeKind, task_attrs
from graph_passes.ir.outline import add_call
from graph_passes.ir.program import Contribution, Fact, Program, Step
from graph_passes.ir.storage import accumulate_function
from graph_passes.ir.tasks import Phase, Task


@dataclasses.dataclass(frozen=True)
class Accumulate:
    """Adds each task's contributions to the replica's accumulators: GA in the paper's figure 10.

        B0 B1 B2   becomes   B0 -> GA(=)   B1 -> GA(+=)   B2 -> GA(+=)

    An accumulator is a variable of the device, so that memory doesn't grow with the number of micro-batches. Adding
    belongs to the task: the next task of the device waits for it, and finds the gradient's memory free. Gradients that
    are rows of an embedding aren't added up but kept; they are as large as the embedding's output.

    Attributes:
        accumulated: False leaves gradients where tasks have made them, which is enough for one micro-batch.

    Source: DAPPLE (PPoPP'21), section 5.2.3: "each device produces and accumulates gradients for all micro-batches."
    """

    name: ClassVar[str] = "accumulate"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.CONNECTED,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.CONNECTED,)
    accumulated: bool = True

    def run(self, program: Program) -> Program:
        """Adds accumulation to the exit of each task of a program with connected tasks."""
        if not self.accumulated:
            return program
        step, graph = program.own_step, copied(program.graph)
        builder, exits = Builder(graph), dict(step.exit)
        added: dict[str, str] = {}  # call -> the node that adds up its results
        function = functools.cache(accumulate_function)
        last: dict[tuple[int, Phase, int], Task] = {}
        for task in sorted(step.entry, key=lambda each: (each.stage, each.phase, each.replica, each.micro_batch)):
            stage, place = program.stages[task.stage], (task.stage, task.phase, task.replica)
            sources = {Phase.FORWARD: stage.state, stage.parameter_gradients[0]: stage.gradients}.get(task.phase, ())
            # Additions run in sequence even where no schedule orders the tasks.
            mode, after = ("next", exits[last[place]]) if place in last else ("first", ())
            last[place] = task
            by_call = _by_call(step, task, sources)
            for number, (call, part) in enumerate(by_call.items()):
                named = f"{step.prefix}stage{task.stage}_accumulate_{task.phase.name.lower()}"
                named += (f"_part{number}" if len(by_call) > 1 else "") + f"_{mode}"
                adding = function(named, tuple(source.accumulator for source in part), mode)
                inputs = [step.values[task, source.value] for source in part]
                name = f"stage{task.stage}/replica{task.replica}/accumulate_{task.phase.value}{task.micro_batch}"
                device, attrs = step.layout.device_of(task), task_attrs(task, NodeKind.ACCUMULATE)
                added[call] = add_call(builder, name, adding, inputs, device=device, control=after, attrs=attrs).node
                exits[task] = (*exits[task], added[call])
        for node in graph.node:  # What comes after a call finds the memory of its results free.
            waits = control_inputs(node)
            node.input.extend(f"^{added[name]}" for name in waits if name in added and added[name] not in waits)
        return program.replace(graph=graph, step=dataclasses.replace(step, exit=exits, accumulated=True))


def _by_call(step: Step, task: Task, sources: Sequence[Contribution]) -> dict[str, list[Contribution]]:
    """Returns call -> the contributions that it makes."""
    calls: dict[str, list[Contribution]] = {}
    for source in sources:
        calls.setdefault(step.values[task, source.value].node, []).append(source)
    return calls
