"""A step without functions: forward and backward of one micro-batch on one device, operator by operator.

TensorFlow prepares it in a second, but a step with a function for each layer in half a minute: nothing is
optimized or instantiated. The operators run as written, and a trace names each of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from dapple_tf.measuring.timed_step import MARK, TimedStep, with_fed_sizes
from dapple_tf.variables.parameter_groups import readers_of
from graph_passes.ir.graph import Builder, Graph, Ref, substitute
from graph_passes.ir.outline import dtype_of
from graph_passes.ir.program import Layout, Program
from graph_passes.ir.tasks import Phase, Task
from graph_passes.pass_manager import run_passes
from graph_passes.passes.flatten import Flatten
from graph_passes.passes.replicate import Replicate
from graph_passes.passes.split_concat import SplitConcat


@dataclasses.dataclass(frozen=True)
class FlatStep:
    """A step of single operators.

    Attributes:
        timed: the step, without items: it is timed as a whole.
        stage_nodes: node -> its stage, and its name in that stage's graph.
    """

    timed: TimedStep
    stage_nodes: Mapping[str, tuple[int, str]]


def flat_step(program: Program, device: str, host_device: str, prefix: str) -> FlatStep:
    """Returns all stages' F and B for one micro-batch of any size, without updates.

    Args:
        program: stages with functions.
        device: name of the device that computes.
        host_device: name of the device that batches are fed to.
        prefix: start of the names of new functions; unique in the session.
    """
    layout = Layout(((device,),) * len(program.stages), MARK, MARK, 1)
    called = run_passes(program, [Replicate(layout, host_device, readers_of(program), prefix), SplitConcat()])
    flat = Flatten().run(called)
    graph = flat.graph
    view, builder = Graph(graph), Builder(graph)
    # What is pending is the gradient of the loss with respect to itself.
    ones = {
        name: builder.const(1.0, dtype_of(view, Ref(name)), device=device) for name in called.own_step.pending.values()
    }
    substitute(graph, ones)
    results = {ref.node for (task, _), ref in flat.own_step.values.items() if task.phase is Phase.BACKWARD}
    end = builder.add("end", "NoOp", control=sorted(results), device=device).node
    timed = TimedStep(graph, dataclasses.replace(flat.own_step, train=end), (), (), with_fed_sizes(graph, host_device))
    stage_nodes: dict[str, tuple[int, str]] = {}
    for stage in program.stages:
        for phase, function in stage.phases:
            call = called.own_step.entry[Task(stage.index, phase, 0)]
            nodes = () if function is None else function.function.node_def
            stage_nodes |= {f"{call}/{node.name}": (stage.index, node.name) for node in nodes}
    return FlatStep(timed, stage_nodes)
