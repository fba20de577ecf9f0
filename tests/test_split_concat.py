"""Pass 7: slices travel between the replicas of stages, whatever their numbers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
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
    FORWARD,
    GRADIENT,
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

import dapple_tf as dapple
from graph_passes.ir.batching import Interval, split_by_shares
from graph_passes.ir.graph import Ref, data_inputs
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

    def given_by(self, phase: Any) -> dict[Task, Ref]:
        given = self.given(phase)
        return {task: ref for (task, _), ref in self.step.values.items() if ref in given}

    def check(self) -> None:
        """Every receiver gets its samples."""
        for phase in (FORWARD, BACKWARD):
            wanted = self.wanted(phase)
            got = interpret(self.program.graph, list(wanted.values()), self.given(phase))
            for task, tensor in zip(wanted, got, strict=True):
                np.testing.assert_array_equal(tensor, self.data(self.samples(task)), err_msg=f"{self.layout} {task}")


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


# ---- who gets what


@pytest.mark.parametrize(("senders", "receivers"), [(1, 1), (1, 4), (2, 3), (3, 3), (4, 2), (5, 6), (6, 1)])
def test_each_replica_gets_its_rows_in_order_and_gradients_come_back_mirrored(senders: int, receivers: int) -> None:
    for size in range(1, 14):  # the small ones leave replicas without samples
        micro_batches = min(2, size)  # the second has one sample less
        cut = layout([senders, receivers], 2 * size - 1 if micro_batches == 2 else 1, micro_batches)
        exchange = exchanged("rows", cut)
        exchange.check()
        active = {(t.stage, t.micro_batch, t.replica) for t in (*exchange.wanted(FORWARD), *exchange.wanted(BACKWARD))}
        assert len(active) == sum(
            min(count, interval.size) for count in (senders, receivers) for interval in cut.micro_batch_intervals
        )


@pytest.mark.parametrize(
    ("kind", "shares"),
    [
        ("rows", (15, 1)),
        ("time_major", (1, 15)),
        ("merged", (11, 5)),
        ("merged_unknown", (5, 11)),
        ("heads", (3, 2)),
        ("rows", ((2, 1), (1, 3))),
        ("time_major", ((3, 2, 1), (1,))),
        ("merged_unknown", ((1, 4), (2, 2, 5))),
        ("heads", ((5, 1), (1, 5))),
    ],
)
def test_slices_are_right_in_every_layout_of_the_batch_axis_and_by_shares(kind: str, shares: Any) -> None:
    counts = [own if isinstance(own, int) else len(own) for own in shares]
    for size in (1, 7, 13, 31):
        cut = layout(counts, size)
        exchange = exchanged(kind, cut if counts == [*shares] else dataclasses.replace(cut, shares=shares))
        exchange.check()
        if counts != [*shares]:
            sizes = [exchange.layout.slice(0, 0, replica).size for replica in range(counts[0])]
            assert sizes == list(split_by_shares(size, shares[0]))


# ---- tensors without a batch axis


@pytest.mark.parametrize(("senders", "receivers", "batch"), [(1, 1, 3), (3, 2, 7), (2, 3, 7), (4, 1, 2)])
def test_without_a_batch_axis_it_is_the_mean_by_samples_and_its_gradient_is_shared_out(
    senders: int, receivers: int, batch: int
) -> None:
    exchange = exchanged("scalar", layout([senders, receivers], batch))
    values = np.arange(float(batch)) ** 2
    given = {ref: values[slice(*exchange.samples(task))].mean() for task, ref in exchange.given_by(FORWARD).items()}
    got = interpret(exchange.program.graph, list(exchange.wanted(FORWARD).values()), given)
    assert len(got) == min(receivers, batch)
    np.testing.assert_allclose(got, values.mean(), rtol=1e-15)
    given = {ref: 10.0**index for index, ref in enumerate(exchange.given(BACKWARD))}
    wanted = exchange.wanted(BACKWARD)
    shares = [sum(given.values()) * exchange.samples(task).size / batch for task in wanted]
    np.testing.assert_allclose(interpret(exchange.program.graph, list(wanted.values()), given), shares, rtol=1e-14)
    for task, ref in (*exchange.wanted(FORWARD).items(), *wanted.items()):
        if senders > 1 < receivers:
            assert node(exchange.program, ref.node).device == exchange.layout.devices[task.stage][task.replica]


# ---- several readers


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


def test_integers_and_masks_are_cut_for_other_numbers_of_replicas() -> None:
    use_float64()
    model, plain = pair(routed)
    plan = dapple.Plan.manual(["told"], [[0, 1], [2, 3, 4]], 2, 10)
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(count, 4)), rng.normal(size=(count, 2)), None) for count in (10, 7)]
    assert_same_training(dapple.transform(model, dapple.Cluster.local(5, kind="cpu"), plan), plain, batches)
