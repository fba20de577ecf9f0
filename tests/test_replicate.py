"""Pass 5: one call for each phase, stage, micro-batch and replica."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
from program_text import read_program
from programs import FORWARD, HOST, layout, node, replicated, run, staged, stateful_layers, step_of, two_stages

from graph_passes.ir.graph import Ref, data_inputs
from graph_passes.ir.program import Normalizer, Program, Value
from graph_passes.ir.tasks import Task
from graph_passes.ir.text import graph_text, library_text


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


def passing() -> Program:
    """A program with a metric that is no sum over samples."""
    flat = stateful_layers()
    variables = tuple(dataclasses.replace(v, additive=v.name != "total") for v in flat.roles.variables)
    return staged(flat.replace(roles=dataclasses.replace(flat.roles, variables=variables)), "a")


def test_steps(golden: Callable[[str, str], None]) -> None:
    """Losses are added two by two: of three, TensorFlow adds the last one first if its buffer is free."""
    first = replicated(two_stages(), layout([2, 1], 3))
    steps = {
        "each call is told the weight, the number and the samples of its slice": (sized(), layout([2, 3], 5, 2)),
        "metrics pass through all replicas in the order of samples": (passing(), layout([1, 2], 7, 3)),
        "metrics of replicas without samples are left out": (staged(stateful_layers(), "a"), layout([1, 3], 3, 2)),
    }
    pending = "".join(f"{task} waits for {value}\n" for task, value in step_of(first).pending)
    texts = [f"{graph_text(first.graph)}\n{library_text(first)}\n{pending}"]
    for title, (program, own) in steps.items():
        made = replicated(program, own)
        metrics = {name: [*map(str, refs)] for name, refs in step_of(made).metric_results.items()}
        texts.append(f"{title}\n\n{graph_text(made.graph)}\nloss {step_of(made).loss}, metrics {metrics}\n")
    golden("replicate.txt", "\n".join(texts))


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
    forward = program.stages[0].forward
    assert forward is not None
    calls = [step_of(program).entry[Task(0, FORWARD, number, replica)] for number in range(2) for replica in range(2)]
    given = {data_inputs(node(program, call))[forward.inputs.index(Value(inverse))] for call in calls}
    assert given == {Ref("normalizers")} and node(program, "normalizers").device == HOST
    x = np.arange(12.0).reshape(6, 2)
    assert run(program.graph, [Ref("normalizers")], {Ref("batch/x"): x}, devices=2) == [1 / (x.sum() + 6)]
