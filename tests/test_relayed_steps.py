"""Steps whose stages hand on what they read: who gets what from whom, and training as plain Keras."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import keras
import numpy as np
import pytest
from program_text import read_program
from programs import FORWARD, connected, layout, node, show_changes, staged, step_of

import dapple_tf as dapple
from graph_passes.errors import PassError
from graph_passes.ir.graph import Graph, Ref, data_inputs
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.program import Layout, Program, Value
from graph_passes.ir.text import graph_text
from graph_passes.ir.verify import verify

SKIP = Ref("a/scaled")
SKIPS = """
    x[?, 2], w[1], v[1], u[1], t[1]
    a/scaled = Mul(x, w)
    b/weighted = Mul(a/scaled, v)
    b/product = Mul(b/weighted, a/scaled)
    c/weighted = Mul(b/product, u)
    c/product = Mul(c/weighted, a/scaled)
    d/weighted = Mul(c/product, t)
    d/product = Mul(d/weighted, a/scaled)
    loss = L2Loss(d/product)
"""


def skip_program() -> Program:
    """Four stages; the last three read a tensor of the first."""
    return staged(read_program(SKIPS), *"abc")


def relayed(cut: Layout, relays: Sequence[int]) -> Program:
    """A connected step with relays."""
    return connected(skip_program(), cut, relays=relays)


# ---- structure


def test_what_relays_change_in_a_step(golden: Callable[[str, str], None]) -> None:
    cut = layout([1, 1, 1, 1], 2)
    before, after = connected(skip_program(), cut), relayed(cut, [1, 2])
    golden("split_concat_relays.txt", show_changes(graph_text(before.graph), graph_text(after.graph)))


def test_each_link_carries_a_tensor_once_and_its_gradient_once() -> None:
    cut = layout([2, 2, 2, 2], 4)
    program = relayed(cut, [1, 2])
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
    program = relayed(layout([1, 1, 1, 1], 2), [1, 2])
    step, graph = step_of(program), Graph(program.graph)
    for task, name in step.entry.items():
        function = program.stages[task.stage].own_forward
        if task.phase is FORWARD and Value(SKIP) in function.inputs:
            ref = data_inputs(node(program, name))[function.inputs.index(Value(SKIP))]
            before = graph.ancestors([ref], (), control=True)
            assert {other.stage for other, entry in step.entry.items() if entry in before} == {0}, task


def test_a_relay_stands_on_its_own_device() -> None:
    program = relayed(layout([1, 1, 1, 1], 2), [1])
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
