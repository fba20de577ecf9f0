"""Pass 8: gradients and state are added up over micro-batches, in place."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from programs import (
    Machine,
    apply,
    connected,
    devices,
    interpret,
    layout,
    mlp,
    node,
    schedule_of,
    show_changes,
    staged,
    stateful_layers,
    step_of,
    task,
    tied_layers,
    two_stages,
)

from dapple_tf.frontend.capture import Mode
from graph_passes.ir.graph import Ref, control_inputs, data_inputs
from graph_passes.ir.program import Program, Value, ValueKind
from graph_passes.ir.text import graph_text, library_text
from graph_passes.passes.accumulate import Accumulate
from graph_passes.passes.schedule import OrderTasks


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


def test_each_parameter_with_a_gradient_has_an_accumulator_for_each_of_its_stages() -> None:
    program = staged(tied_layers(2), "layer_0")
    w = program.variables["w"]
    for index, stage in enumerate(program.stages):
        (gradient,) = stage.gradients
        assert (gradient.value, gradient.variable) == (Value(w.value or Ref(""), ValueKind.GRADIENT), w)
        assert (gradient.accumulator.name, gradient.accumulator.shape) == (f"w/gradient/stage{index}", w.shape)


def test_floating_point_state_is_accumulated_and_counters_are_not() -> None:
    program = staged(stateful_layers(), "a")
    (average,), nothing = (stage.state for stage in program.stages)
    assert (average.variable.name, average.accumulator.name, nothing) == ("average", "average/update/stage0", ())


def test_a_program_without_gradients_and_state_is_left_as_it_is() -> None:
    program = connected(staged(mlp(mode=Mode.TEST), "dense_0", training=False), layout([1, 1], 4, 2))
    after = apply(program, Accumulate())
    assert graph_text(after.graph) == graph_text(program.graph)
    assert step_of(after) == step_of(program)


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


def test_each_addition_waits_for_the_one_before_it_and_runs_on_its_replicas_device() -> None:
    program = apply(connected(two_stages(), layout([2, 1], 6, 3)), Accumulate())
    for replica, micro_batch in itertools.product(range(2), range(3)):
        call = node(program, f"stage0/replica{replica}/accumulate_B{micro_batch}")
        before = [f"stage0/replica{replica}/{each}{micro_batch - 1}" for each in ("backward", "accumulate_B")]
        assert control_inputs(call) == (before if micro_batch else [])
        assert call.device == devices(2, 1)[0][replica]
        assert call.attr["_dapple_stage"].i == 0


def test_an_accumulation_reads_its_own_tasks_gradients_in_the_order_of_the_accumulators() -> None:
    program = apply(connected(staged(mlp(2), "dense_0"), layout([1, 1], 4, 2)), Accumulate())
    step = step_of(program)
    for stage in program.stages:
        expected = [step.values[task(f"{stage.index}B1"), gradient.value] for gradient in stage.gradients]
        assert len(expected) == 2
        assert data_inputs(node(program, f"stage{stage.index}/replica0/accumulate_B1")) == expected


def test_names_of_functions_begin_with_the_prefix() -> None:
    program = apply(connected(two_stages(), layout([1, 1], 2)), Accumulate("train0_"))
    assert set(accumulations(program).values()) == {f"train0_stage{s}_accumulate_backward_first" for s in range(2)}


# ---- numbers


def loaded(machine: Machine, program: Program, values: dict[str, np.ndarray]) -> None:
    """Loads variables on every device of the stages that read them."""
    for stage in program.stages:
        for device in step_of(program).layout.devices[stage.index]:
            variables = [program.variables[name] for name in stage.reads if name in values]
            for dtype in {variable.dtype for variable in variables}:
                group = [variable for variable in variables if variable.dtype == dtype]
                machine.load(device, group, [values[variable.name] for variable in group])


def last_nodes(program: Program) -> list[str]:
    return [name for names in step_of(program).exit.values() for name in names]


@pytest.mark.parametrize("policy", ["gpipe", "dapple_a"])
def test_after_a_step_the_accumulators_of_all_replicas_hold_their_sums(policy: str) -> None:
    rng = np.random.default_rng(0)
    x, w, v = rng.normal(size=(7, 2)), rng.normal(size=(2, 3)), rng.normal(size=(3, 1))
    cut = layout([2, 1], 7, 3)
    program = apply(connected(two_stages(), cut), Accumulate())
    names = tuple(itertools.chain.from_iterable(cut.devices))
    program = apply(program, OrderTasks(schedule_of(cut, policy), names))
    ones = {Ref(place): 1.0 for place in step_of(program).pending.values()}

    def gradients(rows: list[int]) -> tuple[np.ndarray, np.ndarray]:
        h = np.tanh(x[rows] @ w)
        return x[rows].T @ ((h @ v @ v.T) * (1 - h**2)), h.T @ h @ v

    with Machine(program.graph, devices=3) as machine:
        loaded(machine, program, {"w": w, "v": v})
        for _ in range(2):  # the second step starts afresh
            machine.run([], {Ref("batch/x"): x, **ones}, after=last_nodes(program))
            for stage, name in enumerate(("w", "v")):
                own = {gradient.variable.name: gradient for gradient in program.stages[stage].gradients}
                for replica, device in enumerate(cut.devices[stage]):
                    rows = [row for m in range(3) for row in range(*cut.slice(stage, m, replica))]
                    (total,) = machine.read(device, own[name].accumulator)
                    np.testing.assert_allclose(total, gradients(rows)[stage], rtol=1e-12)
                    assert np.abs(total).min() > 0


def test_contributions_to_a_moving_average_add_up_to_that_of_the_whole_batch() -> None:
    rng = np.random.default_rng(0)
    cut = layout([2, 1], 5, 2)
    values = {name: rng.normal(size=(2, 2)) for name in ("w", "v")} | {
        "average": rng.normal(size=2),
        "count": np.int32(3),
    }
    x = rng.normal(size=(5, 2))
    program = apply(connected(staged(stateful_layers(), "a"), cut), Accumulate())
    step = step_of(program)
    feeds = {Ref(place): 1.0 for place in step.pending.values()} | {ref: 0.0 for ref in step.metric_feeds["total"]}
    accumulator = program.stages[0].state[0].accumulator
    with Machine(program.graph, devices=3) as machine:
        loaded(machine, program, values)
        machine.run([], {Ref("batch/x"): x, **feeds}, after=last_nodes(program))
        parts = [machine.read(device, accumulator)[0] for device in cut.devices[0]]
    np.testing.assert_allclose(sum(parts), values["average"] + (x @ values["w"]).mean(axis=0), rtol=1e-12)


def test_accumulating_does_not_touch_what_other_passes_made() -> None:
    before = connected(two_stages(), layout([2, 1], 4, 2))
    after = apply(before, Accumulate())
    assert graph_text(after.graph).startswith(graph_text(before.graph))
    assert step_of(after).entry == step_of(before).entry
    assert step_of(after).pending == step_of(before).pending
    assert interpret(after.graph, [Ref("constant")], {})[0].tolist() == [1, 1, 1, 1]
