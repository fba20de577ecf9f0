"""Pass 8: gradients and state are added up over micro-batches, in place."""

from __future__ import annotations

from collections.abc import Callable

from programs import apply, connected, layout, node, show_changes, staged, stateful_layers, step_of, task, two_stages

from graph_passes.ir.graph import Ref, data_inputs
from graph_passes.ir.program import Value
from graph_passes.ir.text import graph_text, library_text
from graph_passes.passes.accumulate import Accumulate


def test_what_is_added_to_a_step(golden: Callable[[str, str], None]) -> None:
    before = connected(two_stages(), layout([1, 1], 2, 2))
    after = apply(before, Accumulate())
    known = [function.signature.name for function in before.graph.library.function]
    changes = show_changes(graph_text(before.graph), graph_text(after.graph))
    golden("accumulate.txt", f"{changes}\n{library_text(after, *known)}")


# ---- what is accumulated


def test_floating_point_state_is_accumulated_and_counters_are_not() -> None:
    program = staged(stateful_layers(), "a")
    (average,), nothing = (stage.state for stage in program.stages)
    assert (average.variable.name, average.accumulator.name, nothing) == ("average", "average/update/stage0", ())


# ---- modes and order


def test_state_is_accumulated_behind_forward_and_gradients_behind_backward_tasks() -> None:
    program = apply(connected(staged(stateful_layers(), "a"), layout([1, 1], 4, 2)), Accumulate())
    step = step_of(program)
    assert step.exit[task("0F1")] == ("stage0/replica0/forward1", "stage0/replica0/accumulate_F1")
    assert step.exit[task("0B1")] == ("stage0/replica0/backward1", "stage0/replica0/accumulate_B1")
    assert step.exit[task("1F0")] == ("stage1/replica0/forward0", "stage1/replica0/metrics0")
    average = Value(program.variables["average"].update or Ref(""))
    assert data_inputs(node(program, "stage0/replica0/accumulate_F1")) == [step.values[task("0F1"), average]]
