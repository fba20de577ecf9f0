"""Pass 7: slices travel between the replicas of stages, whatever their numbers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same_training, pair, use_float64
from models_for_tests import Computed
from program_text import read_program
from programs import (
    BACKWARD,
    DOUBLE,
    FORWARD,
    GRADIENT,
    Machine,
    apply,
    connected,
    interpret,
    layout,
    node,
    owners,
    replicated,
    sent,
    show_changes,
    staged,
    step_of,
    two_stages,
)
from selection import thorough

import dapple_tf as dapple
from graph_passes.ir.batching import Interval, split_by_shares
from graph_passes.ir.graph import Graph, Ref, data_inputs
from graph_passes.ir.program import Boundary, Layout, Program, Value
from graph_passes.ir.tasks import Task
from graph_passes.ir.text import graph_text
from graph_passes.ir.verify import verify
from graph_passes.passes.replicate import Replicate
from graph_passes.passes.split_concat import SplitConcat

HOST = "/job:localhost/replica:0/task:0/device:CPU:0"
WIDTH = 3
"""Rows of a sample, or length of the other axis."""


@functools.cache
def program_of(kind: str) -> Program:
    return staged(sent(kind), "a")


class Exchange:
    """What each replica of two adjacent stages gets when the others give known slices.

    A sample's data are its number and, behind the decimal point, the numbers of its rows or columns.
    """

    def __init__(self, program: Program, layout: Layout) -> None:
        self.program, self.layout, self.step = program, layout, step_of(program)
        (self.boundary,) = program.boundaries

    def data(self, samples: Interval) -> np.ndarray:
        """The boundary tensor for some samples."""
        return encoded(self.boundary, range(*samples))

    def samples(self, task: Task) -> Interval:
        return self.layout.slice(task.stage, task.micro_batch, task.replica)

    def given(self, phase: Any) -> dict[Ref, np.ndarray]:
        """The boundary tensor (or its gradient) as every sender makes it."""
        value = Value(self.boundary.ref) if phase is FORWARD else Value(self.boundary.ref, GRADIENT)
        stage = 0 if phase is FORWARD else 1
        return {
            ref: self.data(self.samples(task))
            for (task, meaning), ref in self.step.values.items()
            if meaning == value and task.stage == stage and task.phase is phase
        }

    def wanted(self, phase: Any) -> dict[Task, Ref]:
        """Task -> what it gets of the boundary tensor (or its gradient)."""
        receiver = self.program.stages[1] if phase is FORWARD else self.program.stages[0]
        function = receiver.forward if phase is FORWARD else receiver.backward
        assert function is not None
        value = Value(self.boundary.ref) if phase is FORWARD else Value(self.boundary.ref, GRADIENT)
        position = function.inputs.index(value)
        return {
            task: data_inputs(node(self.program, name))[position]
            for task, name in self.step.entry.items()
            if task.stage == receiver.index and task.phase is phase
        }

    def senders(self, phase: Any, receiver: Task) -> set[Task]:
        """The tasks from which a receiver gets anything."""
        given = {ref: task for task, ref in self.given_by(phase).items()}
        graph = Graph(self.program.graph)
        ref = self.wanted(phase)[receiver]
        nodes = graph.ancestors([ref], given, control=False)
        return {given[read] for name in nodes for read in graph.inputs(name) if read in given} | (
            {given[ref]} if ref in given else set()
        )

    def given_by(self, phase: Any) -> dict[Task, Ref]:
        given = self.given(phase)
        return {task: ref for (task, _), ref in self.step.values.items() if ref in given}


def encoded(boundary: Boundary, samples: Sequence[int]) -> np.ndarray:
    """Samples as a tensor of the boundary's layout."""
    rows = np.array([[sample + column / 10 for column in range(WIDTH)] for sample in samples]).reshape(-1, WIDTH)
    if boundary.batch_axis is None:
        return rows.mean()
    if boundary.batch_axis == 1:
        return rows.T
    if boundary.outer == WIDTH:
        return rows.T.reshape(-1)
    return rows.reshape(-1) if len(boundary.shape) == 1 else rows[:, : boundary.shape[1]]


def exchanged(kind: str, layout: Layout) -> Exchange:
    """An exchange, without the checks of :func:`programs.apply`, for long sweeps."""
    program = program_of(kind)
    program = SplitConcat().run(Replicate(layout, HOST, owners(program)).run(program))
    verify(program)
    return Exchange(program, layout)


# ---- structure


def test_what_is_changed_in_a_step(golden: Callable[[str, str], None]) -> None:
    before = replicated(two_stages(), layout([3, 2], 5))
    after = apply(before, SplitConcat())
    golden("split_concat.txt", show_changes(graph_text(before.graph), graph_text(after.graph)))


def test_between_single_replicas_nothing_is_inserted() -> None:
    before = replicated(two_stages(), layout([1, 1], 6, 3))
    after = apply(before, SplitConcat())
    assert not [each.op for each in after.graph.node if each.op in ("SplitV", "ConcatV2") and "slices" not in each.name]
    assert len(after.graph.node) == len(before.graph.node) - 2 * 3  # a tensor and its gradient for each micro-batch
    assert {str(value) for _, value in step_of(after).pending} == {str(Value(Ref("loss"), GRADIENT))}


def test_equal_numbers_of_replicas_are_connected_pairwise() -> None:
    exchange = exchanged("rows", layout([3, 3], 7))
    for phase in (FORWARD, BACKWARD):
        assert all(
            {t.replica for t in exchange.senders(phase, task)} == {task.replica} for task in exchange.wanted(phase)
        )
    assert not [each.op for each in exchange.program.graph.node if each.op == "ConcatV2"]


# ---- who gets what


@pytest.mark.few(12)  # Each number of senders and of receivers twice, of which each has more and less.
@pytest.mark.parametrize(
    ("senders", "receivers"), [(s, 1 + (s + r) % 6) for s in range(1, 7) for r in (0, 3, 1, 4, 2, 5)]
)
def test_each_replica_gets_its_rows_in_order_from_their_owners_and_gradients_come_back_mirrored(
    senders: int, receivers: int
) -> None:
    for size in range(1, 14):
        micro_batches = min(2, size)  # the second has one sample less
        cut = layout([senders, receivers], 2 * size - 1 if micro_batches == 2 else 1, micro_batches)
        exchange = exchanged("rows", cut)
        for phase in (FORWARD, BACKWARD):
            given, wanted = exchange.given(phase), exchange.wanted(phase)
            got = interpret(exchange.program.graph, list(wanted.values()), given)
            for task, tensor in zip(wanted, got, strict=True):
                np.testing.assert_array_equal(tensor, exchange.data(exchange.samples(task)), err_msg=f"{cut} {task}")
                overlapping = {
                    other
                    for other in exchange.given_by(phase)
                    if exchange.samples(other).overlap(exchange.samples(task)).size
                }
                assert exchange.senders(phase, task) == overlapping
        active = {(t.stage, t.micro_batch, t.replica) for t in (*exchange.wanted(FORWARD), *exchange.wanted(BACKWARD))}
        assert len(active) == sum(
            min(count, interval.size) for count in (senders, receivers) for interval in cut.micro_batch_intervals
        )


RATIOS = [(15, 1), (1, 15), (11, 5), (5, 11), (3, 2), (2, 3)]
KINDS = ["rows", "time_major", "merged", "merged_unknown", "heads"]


# `make test` runs each ratio once, and each kind.
@pytest.mark.parametrize(
    ("kind", "senders", "receivers"),
    [
        case if number % 5 == index else thorough(case)
        for number, ratio in enumerate(RATIOS)
        for index, case in enumerate((kind, *ratio) for kind in KINDS)
    ],
)
def test_published_ratios_in_every_layout_of_the_batch_axis(kind: str, senders: int, receivers: int) -> None:
    for size in (1, 7, 15, 16, 31):
        exchange = exchanged(kind, layout([senders, receivers], size))
        for phase in (FORWARD, BACKWARD):
            wanted = exchange.wanted(phase)
            got = interpret(exchange.program.graph, list(wanted.values()), exchange.given(phase))
            for task, tensor in zip(wanted, got, strict=True):
                np.testing.assert_array_equal(tensor, exchange.data(exchange.samples(task)))


@pytest.mark.parametrize("kind", ["rows", "time_major", "merged_unknown", "heads"])
@pytest.mark.parametrize("shares", [((2, 1), (1, 3)), ((3, 2, 1), (1,)), ((1, 4), (2, 2, 5)), ((5, 1), (1, 5))])
def test_slices_by_shares(kind: str, shares: tuple[tuple[int, ...], ...]) -> None:
    for size in (1, 6, 13, 18):  # the small ones leave replicas without samples
        exchange = exchanged(kind, dataclasses.replace(layout(list(map(len, shares)), size), shares=shares))
        for phase in (FORWARD, BACKWARD):
            wanted = exchange.wanted(phase)
            got = interpret(exchange.program.graph, list(wanted.values()), exchange.given(phase))
            for task, tensor in zip(wanted, got, strict=True):
                np.testing.assert_array_equal(tensor, exchange.data(exchange.samples(task)))
        assert [exchange.layout.slice(0, 0, replica).size for replica in range(len(shares[0]))] == list(
            split_by_shares(size, shares[0])
        )


@pytest.mark.parametrize("kind", KINDS)
def test_tensorflow_computes_what_the_interpreter_says(kind: str) -> None:
    exchange = exchanged(kind, layout([3, 2], 7))
    with Machine(exchange.program.graph, devices=5) as machine:
        for phase in (FORWARD, BACKWARD):
            wanted = exchange.wanted(phase)
            got = machine.run(list(wanted.values()), exchange.given(phase))
            for task, tensor in zip(wanted, got, strict=True):
                np.testing.assert_array_equal(tensor, exchange.data(exchange.samples(task)))


def test_a_micro_batch_smaller_than_the_number_of_replicas_leaves_some_out() -> None:
    exchange = exchanged("rows", layout([4, 3], 2))
    assert sorted(map(str, exchange.wanted(FORWARD))) == ["1F0", "1F0.r1"]
    assert sorted(map(str, exchange.wanted(BACKWARD))) == ["0B0", "0B0.r1"]


# ---- no gathering


@pytest.mark.parametrize(("senders", "receivers"), [(15, 1), (11, 5), (3, 2), (2, 3), (1, 4)])
def test_slices_are_cut_at_their_owner_and_joined_at_their_reader(senders: int, receivers: int) -> None:
    exchange = exchanged("rows", layout([senders, receivers], 33))
    places = {task: exchange.layout.devices[task.stage][task.replica] for task in exchange.step.entry}
    graph = Graph(exchange.program.graph)
    for phase in (FORWARD, BACKWARD):
        owners = {ref: places[task] for task, ref in exchange.given_by(phase).items()}
        readers = {ref: places[task] for task, ref in exchange.wanted(phase).items()}
        for name in graph.ancestors(readers, owners, control=False):
            each = graph.nodes[name]
            if each.op == "SplitV":
                assert each.device == owners[graph.inputs(name)[0]]
            elif each.op == "ConcatV2":
                assert each.device == readers[Ref(name)]
            else:
                assert each.op == "Const"


def test_the_number_of_transfers_is_that_of_overlapping_pairs() -> None:
    exchange = exchanged("rows", layout([11, 5], 55))  # 11 x 5 samples against 5 x 11
    pairs = sum(len(exchange.senders(FORWARD, task)) for task in exchange.wanted(FORWARD))
    assert pairs == 15  # 11 + 5 - 1: no receiver talks to all senders
    assert max(len(exchange.senders(FORWARD, task)) for task in exchange.wanted(FORWARD)) == 3


# ---- tensors without a batch axis


def scalar_exchange(senders: int, receivers: int, batch: int) -> Exchange:
    return exchanged("scalar", layout([senders, receivers], batch))


@pytest.mark.parametrize(
    ("senders", "receivers", "batch"), [(1, 1, 3), (3, 1, 5), (3, 2, 7), (2, 3, 7), (1, 3, 4), (4, 1, 2)]
)
def test_a_tensor_without_a_batch_axis_is_the_mean_weighted_by_samples(
    senders: int, receivers: int, batch: int
) -> None:
    exchange = scalar_exchange(senders, receivers, batch)
    values = np.arange(float(batch)) ** 2
    owners = exchange.step.values
    given = {
        ref: values[slice(*exchange.samples(task))].mean()
        for (task, value), ref in owners.items()
        if value == Value(exchange.boundary.ref) and task.phase is FORWARD and task.stage == 0
    }
    got = interpret(exchange.program.graph, list(exchange.wanted(FORWARD).values()), given)
    assert len(got) == min(receivers, batch)
    np.testing.assert_allclose(got, values.mean(), rtol=1e-15)


@pytest.mark.parametrize(("senders", "receivers", "batch"), [(1, 1, 3), (3, 1, 5), (3, 2, 7), (2, 3, 7), (1, 3, 4)])
def test_its_gradient_is_the_sum_shared_out_by_samples(senders: int, receivers: int, batch: int) -> None:
    exchange = scalar_exchange(senders, receivers, batch)
    given = {ref: 10.0**index for index, ref in enumerate(exchange.given(BACKWARD))}
    wanted = exchange.wanted(BACKWARD)
    got = interpret(exchange.program.graph, list(wanted.values()), given)
    shares = [sum(given.values()) * exchange.samples(task).size / batch for task in wanted]
    np.testing.assert_allclose(got, shares, rtol=1e-14)
    np.testing.assert_allclose(sum(got), sum(given.values()), rtol=1e-14)


def test_mean_and_share_of_a_tensor_without_a_batch_axis_are_computed_where_they_are_read() -> None:
    exchange = scalar_exchange(3, 2, 7)
    places = {task: exchange.layout.devices[task.stage][task.replica] for task in exchange.step.entry}
    for phase in (FORWARD, BACKWARD):
        for task, ref in exchange.wanted(phase).items():
            assert node(exchange.program, ref.node).device == places[task]


# ---- several readers


def skip_program() -> Program:
    """Stage 0's tensor is read by stages 1 and 2."""
    program = read_program("""
        x[?, 2], w[1], v[1], u[1]
        a/scaled = Mul(x, w)
        b/scaled = Mul(a/scaled, v)
        c/scaled = Mul(b/scaled, u)
        c/product = Mul(c/scaled, a/scaled)
        loss = L2Loss(c/product)
    """)
    return staged(program, "a", "b")


def gradient_arguments(program: Program, ref: Ref) -> Mapping[str, Ref]:
    """Backward task of stage 0 -> where it gets the gradient of a tensor from."""
    backward = program.stages[0].backward
    assert backward is not None
    position = backward.inputs.index(Value(ref, GRADIENT))
    step = step_of(program)
    return {
        str(task): data_inputs(node(program, name))[position]
        for task, name in step.entry.items()
        if task.stage == 0 and task.phase is BACKWARD
    }


def test_the_gradients_of_all_readers_of_a_tensor_are_added_at_its_owner() -> None:
    cut = layout([2, 1, 3], 5)
    program = connected(skip_program(), cut)
    step, ref = step_of(program), Ref("a/scaled")
    given = {
        place: np.full((cut.slice(task.stage, 0, task.replica).size, 2), 10.0**task.stage)
        for (task, value), place in step.values.items()
        if value == Value(ref, GRADIENT)
    }
    wanted = gradient_arguments(program, ref)
    got = interpret(program.graph, list(wanted.values()), given)
    assert [tensor.shape for tensor in got] == [(3, 2), (2, 2)]
    assert all(np.all(tensor == 110.0) for tensor in got)
    assert [node(program, each.node).op for each in wanted.values()] == ["AddN"] * 2
    assert [node(program, each.node).device for each in wanted.values()] == list(cut.devices[0])


def test_a_boundary_tensor_that_its_reader_turns_out_not_to_need_is_not_sent() -> None:
    """A node that nothing needs (its result's shape was all that was read, say) left a SplitV of no parts behind."""
    program = read_program("""
        x[?, 2], w[1], v[1]
        a/scaled = Mul(x, w)
        a/unneeded = Square(a/scaled)
        b/nowhere = Square(a/unneeded)
        b/scaled = Mul(a/scaled, v)
        loss = L2Loss(b/scaled)
    """)
    program = connected(staged(program, "a"), layout([2, 1], 4))
    assert all(each.attr["num_split"].i for each in program.graph.node if each.op == "SplitV")
    assert "unneeded" not in "".join(each.name for each in program.graph.node)


def test_boundary_tensors_keep_their_dtype() -> None:
    program = connected(two_stages(), layout([3, 2], 5))
    for each in program.graph.node:
        if each.op in ("SplitV", "ConcatV2") and each.name.startswith(("split", "concat")):
            assert each.attr["T"].type == DOUBLE


def routed() -> keras.Model:
    """A stage's layer tells the next one an expert's number, a mask and int32 numbers, besides its features."""
    features = keras.Input((4,))
    first = keras.layers.Dense(4, name="first")(features)
    told = Computed(lambda z: (z, tf.argmax(z, -1), z > 0, tf.cast(z * 4, tf.int32)), name="told")(first)

    def routed_by(z: Any, expert: Any, mask: Any, numbers: Any) -> Any:
        scale = tf.gather(tf.constant([1.0, 2.0, 3.0, 4.0], z.dtype), expert)[:, None]
        return scale * tf.where(mask, z, tf.cast(numbers, z.dtype))

    model = keras.Model(features, keras.layers.Dense(2, name="last")(Computed(routed_by, name="routed")(*told)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


@pytest.mark.parametrize("devices", [[[0], [1, 2]], [[0, 1], [2, 3, 4]]])
def test_integers_and_masks_are_cut_for_other_numbers_of_replicas(devices: list[list[int]]) -> None:
    use_float64()
    model, plain = pair(routed)
    plan = dapple.Plan.manual(["told"], devices, 2, 10)
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(count, 4)), rng.normal(size=(count, 2)), None) for count in (10, 7)]
    assert_same_training(dapple.transform(model, dapple.Cluster.local(5, kind="cpu"), plan), plain, batches)
