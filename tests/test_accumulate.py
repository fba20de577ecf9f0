"""Pass 8: gradients and state are added up over micro-batches, in place."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from programs import (
    apply,
    connected,
    layout,
    node,
    show_changes,
    staged,
    stateful_layers,
    step_of,
    task,
    two_stages,
)

from graph_passes.ir.graph import Ref, data_inputs
from graph_passes.ir.program import Program, Value
from graph_passes.ir.text import graph_text, library_text
from graph_passes.passes.accumulate import Accumulate


def accumulations(program: Program) -> dict[str, str]:
    """Name of each accumulating call -> its function."""
    return {
        each.name: each.attr["f"].func.name
        for each in program.graph.node
        if each.attr["_dapple_phase"].s == b"accumulate"
    }


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


def test_the_first_micro_batch_of_a_replica_overwrites_and_the_next_ones_add() -> None:
    program = apply(connected(two_stages(), layout([2, 1], 7, 3)), Accumulate())
    assert accumulations(program) == {
        f"stage{stage}/replica{replica}/accumulate_B{micro_batch}": (
            f"stage{stage}_accumulate_backward_{'next' if micro_batch else 'first'}"
        )
        for stage, replica, micro_batch in itertools.product(range(2), range(2), range(3))
        if (stage, replica) != (1, 1)
    }


def test_the_first_micro_batch_that_a_replica_has_samples_of_is_its_first() -> None:
    program = apply(connected(two_stages(), layout([3, 1], 4, 2)), Accumulate())  # 2 and 2 samples for 3 replicas
    assert [name for name in accumulations(program) if "stage0/replica2" in name] == []
    assert accumulations(program)["stage0/replica1/accumulate_B0"] == "stage0_accumulate_backward_first"


def test_state_is_accumulated_behind_forward_and_gradients_behind_backward_tasks() -> None:
    program = apply(connected(staged(stateful_layers(), "a"), layout([1, 1], 4, 2)), Accumulate())
    step = step_of(program)
    assert step.exit[task("0F1")] == ("stage0/replica0/forward1", "stage0/replica0/accumulate_F1")
    assert step.exit[task("0B1")] == ("stage0/replica0/backward1", "stage0/replica0/accumulate_B1")
    assert step.exit[task("1F0")] == ("stage1/replica0/forward0", "stage1/replica0/metrics0")
    average = Value(program.variables["average"].update or Ref(""))
    assert data_inputs(node(program, "stage0/replica0/accumulate_F1")) == [step.values[task("0F1"), average]]


def test_names_of_functions_begin_with_the_prefix() -> None:
    program = apply(connected(two_stages(), layout([1, 1], 2)), Accumulate("train0_"))
    assert set(accumulations(program).values()) == {f"train0_stage{s}_accumulate_backward_first" for s in range(2)}
