"""For a single device with one micro-batch: the whole step becomes one function."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from graph_passes.errors import PassError
from graph_passes.ir.call_order import CALLS
from graph_passes.ir.graph import CALL_ATTR, Graph, GraphDef, Ref, control_inputs, data_inputs, set_inputs
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.outline import call_node, compiled, outline
from graph_passes.ir.program import Fact, Program, Step
from graph_passes.ir.storage import merge_gradients, merge_library
from graph_passes.passes.flatten import Flatten


@dataclasses.dataclass(frozen=True)
class Join:
    """Makes one call of all calls of a device.

        read -> F -> B -> apply   becomes   step { read/W -> F/MatMul -> B/MatMul -> apply/Descent -> write/W }

    Nothing comes between the calls of a device that has the step for itself. Within one function TensorFlow runs
    operators as soon as their inputs are there: a parameter is updated while its gradient is still in the cache, and
    while the layers before it compute theirs. There are no tasks any more.

    Attributes:
        jit_compile: compile it with XLA, but for metrics, which have calls of their own then.
    """

    name: ClassVar[str] = "join"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.COMPLETE,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.COMPLETE,)
    jit_compile: bool = False

    def run(self, program: Program) -> Program:
        """Complete step of one device -> the same with one call.

        Raises:
            PassError: the tasks are on several devices, or there are several micro-batches.
        """
        step = program.own_step
        devices = {name for names in step.layout.devices for name in names}
        if len(devices) != 1:
            raise PassError(f"a step's tasks are on {len(devices)} devices; only those of one device can be joined")
        if (count := len(step.layout.micro_batch_intervals)) != 1:
            raise PassError(f"a step has {count} micro-batches, whose order would be lost; only one can be joined")
        stages = frozenset(range(len(step.layout.devices)))
        kept = frozenset({NodeKind.METRICS} if self.jit_compile else ())
        flat = Flatten(stages, kept=kept, compiled=self.jit_compile).run(program)
        graph = Graph(flat.graph)
        inside = _inside(graph)
        waited_for = {name for own in inside for name in control_inputs(graph.nodes[own])} - inside
        left = {name for name in inside if graph.nodes[name].op in CALLS and CALL_ATTR not in graph.nodes[name].attr}
        if waited_for or left:
            # Metrics that use variables or tables of their own: XLA might not compile them.
            return program
        inputs = dict.fromkeys(
            ref
            for name in graph.ordered(inside)
            for ref in graph.inputs(name)
            if ref.node not in inside and graph.nodes[ref.node].op != "Const"
        )
        outside = [node for node in graph if node.name not in inside]
        read = dict.fromkeys(ref for node in outside for ref in data_inputs(node))
        outputs = [ref for ref in dict.fromkeys((*read, *flat.own_step.results)) if ref.node in inside]
        effects = [
            name for name in dict.fromkeys(w for node in outside for w in control_inputs(node)) if name in inside
        ]
        function = outline(f"{step.prefix}joined_of{step.layout.batch}", graph, list(inputs), outputs, effects=effects)
        functions = [*flat.graph.library.function, *(compiled(function) if self.jit_compile else (function,))]
        (device,) = devices
        call = call_node("joined", function, list(inputs), device=device, attrs=NodeKind.JOINED.marks())
        moved = {ref: Ref(call.name, index) for index, ref in enumerate(outputs)}
        made = GraphDef(versions=flat.graph.versions)
        constants = {ref.node for ref in read}
        for node in outside:
            if node.op != "Const" or node.name in constants:
                waits = (call.name if name in inside else name for name in control_inputs(node))
                made.node.append(node)
                set_inputs(made.node[-1], [moved.get(ref, ref) for ref in data_inputs(node)], waits)
        made.node.append(call)
        merge_library(made, functions)
        merge_gradients(made, flat.graph.library)
        return program.replace(graph=made, step=_joined(flat.own_step, moved))


def _inside(graph: Graph) -> set[str]:
    """Returns the operators that were in calls, and the nodes between them."""
    called = [node.name for node in graph if CALL_ATTR in node.attr]
    after = set(called)
    for name in graph.topological():
        if not after.isdisjoint(graph.sources(name)):
            after.add(name)
    return after & graph.ancestors(map(Ref, called))


def _joined(step: Step, moved: Mapping[Ref, Ref]) -> Step:
    """Returns the step without tasks."""
    return dataclasses.replace(step.moved(lambda ref: moved.get(ref, ref)), values={}, reads={}, gradients={})
