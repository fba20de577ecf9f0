"""Steps whose stages hand on what they read: who gets what from whom, and training as plain Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from program_text import read_program
from programs import (
    BACKWARD,
    FORWARD,
    GRADIENT,
    apply,
    connected,
    interpret,
    layout,
    node,
    replicated,
    show_changes,
    staged,
    step_of,
)

import dapple_tf as dapple
from graph_passes.errors import PassError
from graph_passes.ir.graph import Graph, Ref, data_inputs
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.program import Layout, Program, Value
from graph_passes.ir.tasks import Task
from graph_passes.ir.text import graph_text
from graph_passes.ir.verify import verify
from graph_passes.passes.split_concat import SplitConcat

SKIP = Ref("a/scaled")


def skip_program(*, batched: bool = True) -> Program:
    """Four stages; the last three read a tensor of the first, which may be one for all samples."""
    own = "a/scaled" if batched else "a/own"
    return staged(
        read_program(f"""
            x[?, 2], w[1], v[1], u[1], t[1], s[1]
            a/scaled = Mul({"x" if batched else "s"}, w)
            {"" if batched else "a/own = Mul(x, a/scaled)"}
            b/weighted = Mul({own}, v)
            b/product = Mul(b/weighted, a/scaled)
            c/weighted = Mul(b/product, u)
            c/product = Mul(c/weighted, a/scaled)
            d/weighted = Mul(c/product, t)
            d/product = Mul(d/weighted, a/scaled)
            loss = L2Loss(d/product)
        """),
        *"abc",
    )


def relayed(program: Program, cut: Layout, relays: Sequence[int]) -> Program:
    """A connected step with relays."""
    made = apply(replicated(program, cut), SplitConcat(tuple(relays)))
    verify(made)
    return made


def slices(program: Program, value: Value, phase: Any) -> dict[Task, Ref]:
    """Task -> the tensor that it gets as a value."""
    read = {}
    for task, name in step_of(program).entry.items():
        stage = program.stages[task.stage]
        function = stage.forward if phase is FORWARD else stage.backward
        if task.phase is phase and function is not None and value in function.inputs:
            read[task] = data_inputs(node(program, name))[function.inputs.index(value)]
    return read


# ---- structure


def test_what_relays_change_in_a_step(golden: Callable[[str, str], None]) -> None:
    program, cut = skip_program(), layout([1, 1, 1, 1], 2)
    before, after = connected(program, cut), relayed(program, cut, [1, 2])
    golden("split_concat_relays.txt", show_changes(graph_text(before.graph), graph_text(after.graph)))


@pytest.mark.parametrize(
    ("counts", "relays"), [((2, 1, 3, 2), (1,)), ((1, 3, 2, 1), (1, 2)), ((3, 2, 1, 3), (0, 1, 2, 3))]
)
def test_each_reader_gets_its_slice_and_the_maker_the_sum_of_all_gradients(
    counts: Sequence[int], relays: Sequence[int]
) -> None:
    cut = layout(counts, 7, 2, 8)  # micro-batches of 4 and 3
    program = relayed(skip_program(), cut, relays)
    values = step_of(program).values
    samples = {task: range(*cut.slice(task.stage, task.micro_batch, task.replica)) for task in step_of(program).entry}
    made = {
        ref: np.array([[number, -number] for number in samples[task]], float)
        for (task, value), ref in values.items()
        if value == Value(SKIP)
    }
    wanted = slices(program, Value(SKIP), FORWARD)
    assert {task.stage for task in wanted} == {1, 2, 3}
    for task, tensor in zip(wanted, interpret(program.graph, list(wanted.values()), made), strict=True):
        np.testing.assert_array_equal(tensor[:, 0], samples[task])
    gradients = {
        ref: np.array([[10.0**task.stage * (1 + number)] * 2 for number in samples[task]])
        for (task, value), ref in values.items()
        if value == Value(SKIP, GRADIENT)
    }
    back = slices(program, Value(SKIP, GRADIENT), BACKWARD)
    assert {task.stage for task in back} == {0}
    for task, tensor in zip(back, interpret(program.graph, list(back.values()), gradients), strict=True):
        np.testing.assert_array_equal(tensor[:, 0], [1110.0 * (1 + number) for number in samples[task]])


def test_a_tensor_without_a_batch_axis_is_handed_on_as_it_is() -> None:
    cut = layout([2, 1, 3, 2], 7)
    program = relayed(skip_program(batched=False), cut, [1, 2])
    values = step_of(program).values
    made = {ref: np.full(1, 3.0) for (_, value), ref in values.items() if value == Value(SKIP)}
    wanted = slices(program, Value(SKIP), FORWARD)
    assert {task.stage for task in wanted} == {1, 2, 3}
    np.testing.assert_array_equal(interpret(program.graph, list(wanted.values()), made), np.full((len(wanted), 1), 3.0))
    tasks = [task for task, value in values if value == Value(SKIP, GRADIENT)]
    gradients = {values[task, Value(SKIP, GRADIENT)]: np.full(1, 2.0**index) for index, task in enumerate(tasks)}
    back = slices(program, Value(SKIP, GRADIENT), BACKWARD)
    total = sum(interpret(program.graph, list(back.values()), gradients))
    np.testing.assert_allclose(total, 2.0 ** len(tasks) - 1, rtol=1e-14)


def test_each_link_carries_a_tensor_once_and_its_gradient_once() -> None:
    cut = layout([2, 2, 2, 2], 4)
    program = relayed(skip_program(), cut, [1, 2])
    graph = Graph(program.graph)
    values = {ref for (_, value), ref in step_of(program).values.items() if value.ref == SKIP}
    relays = {name for name in graph.nodes if NodeKind.of(graph.nodes[name]) is NodeKind.RELAY}
    links = set()
    for reader in graph:
        for ref in graph.inputs(reader.name):
            maker = graph.nodes[ref.node].device
            if (ref in values or ref.node in relays) and maker != reader.device:
                links.add((ref, maker, reader.device))
    pairs = [(cut.devices.index(own), place) for own in cut.devices for place in own]
    stage_of = {place: stage for stage, place in pairs}
    assert sorted((stage_of[a], stage_of[b]) for _, a, b in links) == sorted(
        [(0, 1), (1, 2), (2, 3), (1, 0), (2, 1), (3, 2)] * 2
    )


def test_a_tensor_does_not_wait_for_its_relay_s_tasks() -> None:
    program = relayed(skip_program(), layout([1, 1, 1, 1], 2), [1, 2])
    step, graph = step_of(program), Graph(program.graph)
    wanted = slices(program, Value(SKIP), FORWARD)
    for task, ref in wanted.items():
        before = graph.ancestors([ref], (), control=True)
        assert {other.stage for other, name in step.entry.items() if name in before} == {0}, task


def test_a_relay_stands_on_its_own_device() -> None:
    program = relayed(skip_program(), layout([1, 1, 1, 1], 2), [1])
    moved = program.replace(graph=type(program.graph).FromString(program.graph.SerializeToString()))
    for own in moved.graph.node:
        if NodeKind.of(own) is NodeKind.RELAY and own.op == "Identity":
            own.device = step_of(program).layout.devices[3][0]
            wrong = own.name
    with pytest.raises(PassError, match=f"relay '{wrong}' of stage 1 is on '.*CPU:3', but replica 0 is on '.*CPU:1'"):
        verify(moved)


# ---- what is shown


def test_transfers_and_drawings_show_the_stage_that_sends() -> None:
    x = keras.Input((4,))
    first = h = keras.layers.Dense(4, name="first")(x)
    for name in ("second", "third", "last"):
        h = keras.layers.Dense(4, name=name)(h + first)
    model = keras.Model(x, h)
    model.compile("sgd", "mse")
    plan = dapple.Plan.manual(("first", "second", "third"), [[0], [1], [2], [3]], 2, 4, relays=[1, 2])
    pipelined = dapple.transform(model, dapple.Cluster.local(4, kind="cpu"), plan)
    timeline = pipelined.profile_step(np.ones((4, 4)), np.ones((4, 4))).step.timeline
    spans = [span for span in timeline.spans if span.kind == "send"]
    assert {(span.device, span.target) for span in spans} == {(0, 1), (1, 2), (2, 3), (3, 2), (2, 1), (1, 0)}
    assert all(span.stage == span.device and span.micro_batch is not None for span in spans)
