"""Pass 5: one call for each phase, stage, micro-batch and replica."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from program_text import read_program
from programs import (
    BACKWARD,
    FORWARD,
    HOST,
    devices,
    layout,
    node,
    replicated,
    run,
    staged,
    stateful_layers,
    step_of,
    two_stages,
)

from graph_passes.ir.graph import NodeDef, Ref, data_inputs
from graph_passes.ir.program import Normalizer, Program, Value
from graph_passes.ir.tasks import Task
from graph_passes.ir.tensorflow_bridge import constant_value
from graph_passes.ir.text import graph_text, library_text


def tasks(program: Program, phase: str) -> list[NodeDef]:
    """The calls of a phase."""
    return [each for each in program.graph.node if each.attr["_dapple_phase"].s.decode() == phase]


def argument(program: Program, task: str, value: Value) -> Ref:
    """What a task gets for an argument."""
    parsed = Task.parse(task)
    stage = program.stages[parsed.stage]
    function = stage.forward if parsed.phase is FORWARD else stage.backward
    assert function is not None
    return data_inputs(node(program, step_of(program).entry[parsed]))[function.inputs.index(value)]


def scalar(program: Program, ref: Ref) -> float:
    """The value of a constant."""
    return float(constant_value(node(program, ref.node)))


def test_a_step_of_a_stage_with_two_replicas(golden: Callable[[str, str], None]) -> None:
    program = replicated(two_stages(), layout([2, 1], 3))
    pending = "".join(f"{task} waits for {value}\n" for task, value in step_of(program).pending)
    golden("replicate.txt", f"{graph_text(program.graph)}\n{library_text(program)}\n{pending}")


# ---- which calls there are


@pytest.mark.parametrize(("counts", "batch", "micro_batches"), [([2, 1], 8, 4), ([3, 2], 5, 2), ([4, 1], 2, 2)])
def test_every_replica_with_samples_runs_each_micro_batch_forwards_and_backwards_once(
    counts: list[int], batch: int, micro_batches: int
) -> None:
    cut = layout(counts, batch, micro_batches)
    step = step_of(replicated(two_stages(), cut))
    assert set(step.entry) == {
        Task(stage, phase, micro_batch, replica)
        for stage, micro_batch, phase in itertools.product(range(2), range(micro_batches), (FORWARD, BACKWARD))
        for replica in range(counts[stage])
        if cut.active(stage, micro_batch, replica)
    }
    assert len(set(step.entry.values())) == len(step.entry)


# ---- samples


def sized() -> Program:
    """A program whose stages read all three scalars of their slice."""
    factors = "\n".join(
        f"""
        {layer}/number = Cast(number, DstT=float64)
        {layer}/samples = Cast(samples, DstT=float64)
        {layer}/matmul = MatMul({h}, {kernel})
        {layer}/factor = AddN(weight, {layer}/number, {layer}/samples)
        {layer}/scaled = Mul({layer}/matmul, {layer}/factor)"""
        for layer, h, kernel in (("a", "x", "w"), ("b", "a/scaled", "v"))
    )
    return staged(read_program(f"x[?, 2], w[2, 2], v[2, 2]{factors}\nloss = L2Loss(b/scaled)"), "a")


def test_each_call_is_told_the_weight_the_number_and_the_samples_of_its_slice() -> None:
    program = replicated(sized(), layout([2, 3], 5, 2))  # micro-batches of 3 and 2
    scalars = program.roles.slice
    told = {
        task: tuple(scalar(program, argument(program, task, Value(ref))) for ref in scalars)
        for task in ("0F0", "0F0.r1", "0F1", "0F1.r1", "1F0", "1F0.r1", "1F0.r2", "1F1", "1F1.r1")
    }
    assert told == {
        "0F0": (2 / 5, 0, 2),
        "0F0.r1": (1 / 5, 1, 1),
        "0F1": (1 / 5, 2, 1),
        "0F1.r1": (1 / 5, 3, 1),
        "1F0": (1 / 5, 0, 1),
        "1F0.r1": (1 / 5, 1, 1),
        "1F0.r2": (1 / 5, 2, 1),
        "1F1": (1 / 5, 3, 1),
        "1F1.r1": (1 / 5, 4, 1),
    }


# ---- loss, outputs, metrics and divisors


def test_the_loss_is_the_sum_of_all_slices_on_the_first_device_of_its_stage() -> None:
    program = replicated(two_stages(), layout([1, 2], 8, 2))
    step = step_of(program)
    assert step.loss == Ref("loss")
    sums = [node(program, name) for name in ("loss/first2", "loss/first3", "loss")]
    assert all((call.op, call.device) == ("AddN", devices(1, 2)[1][0]) for call in sums)
    slices = [f"stage1/replica{replica}/forward{m}" for m in range(2) for replica in range(2)]
    # Two by two: of three, TensorFlow adds the last one first if its buffer is free, so that steps wouldn't repeat.
    pairs = [slices[:2], ["loss/first2", slices[2]], ["loss/first3", slices[3]]]
    assert [[str(ref) for ref in data_inputs(call)] for call in sums] == pairs


def test_a_metric_value_that_is_no_sum_passes_through_all_replicas_in_the_order_of_samples() -> None:
    flat = stateful_layers()
    variables = tuple(dataclasses.replace(v, additive=v.name != "total") for v in flat.roles.variables)
    flat = flat.replace(roles=dataclasses.replace(flat.roles, variables=variables))
    program = replicated(staged(flat, "a"), layout([1, 2], 7, 3))  # micro-batches of 3, 2 and 2 samples
    names = [f"stage1/replica{replica}/metrics{m}" for m in range(3) for replica in range(2)]
    for name, before in zip(names[1:], names, strict=False):
        assert Ref(before) in data_inputs(node(program, name))
    assert step_of(program).metric_results == {"total": (Ref(names[-1]),)}


def test_metrics_of_replicas_without_samples_are_left_out() -> None:
    step = step_of(replicated(staged(stateful_layers(), "a"), layout([1, 3], 3, 2)))
    assert step.metric_results["total"] == (Ref("stage1/replica0/metrics1"), Ref("stage1/replica1/metrics0"))


def test_the_divisor_of_the_whole_batch_is_computed_once_on_the_host() -> None:
    program = read_program("""
        x[?, 2], w[2, 2], inverse[]
        a/matmul = MatMul(x, w)
        total = Sum(x, [0, 1])
        size = Cast(samples, DstT=float64)
        all = AddV2(total, size)
        reciprocal = Reciprocal(all)
        l2 = L2Loss(a/matmul)
        loss = Mul(l2, inverse)
    """)
    inverse = Ref("inverse")
    divisor = Normalizer(inverse, Ref("reciprocal"), "masked")
    roles = dataclasses.replace(program.roles, variables=program.roles.variables[:1], normalizers=(divisor,))
    program = replicated(staged(program.replace(roles=roles)), layout([2], 6, 2))
    given = {argument(program, task, Value(inverse)) for task in ("0F0", "0F0.r1", "0F1", "0F1.r1")}
    assert given == {Ref("normalizers")} and node(program, "normalizers").device == HOST
    x = np.arange(12.0).reshape(6, 2)
    assert run(program.graph, [Ref("normalizers")], {Ref("batch/x"): x}, devices=2) == [1 / (x.sum() + 6)]
