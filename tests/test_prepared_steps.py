"""Steps for new batch sizes make others leave: a session stays small, and nothing else changes."""

from __future__ import annotations

import functools
import gc
import logging
import threading
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from models_for_tests import classifier, samples, transform, values
from workers import PATIENCE

import dapple_tf as dapple
from dapple_tf.checkpoints import saver
from dapple_tf.checkpoints.checkpoint_files import checkpoints
from dapple_tf.frontend.batch import Batch
from dapple_tf.frontend.capture import Mode
from dapple_tf.variables.stored_values import StoredValues

X, Y, _ = samples(7)
SIZES = (7, 3, 7, 4, 5, 3, 7)


def model() -> keras.Model:
    """Random draws, moving statistics and slots: all kinds of values that a step changes."""
    keras.utils.set_random_seed(3)
    features = keras.Input((4,))
    x = keras.layers.Dense(6, activation="tanh", name="first")(features)
    x = keras.layers.BatchNormalization(name="second")(keras.layers.Dropout(0.3)(x))
    own = keras.Model(features, keras.layers.Dense(3, name="logits")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    own.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"])
    return own


def steps(pipelined: dapple.PipelinedModel) -> int:
    return pipelined._engine.builder.num_steps


def train(pipelined: dapple.PipelinedModel, sizes: tuple[int, ...] = SIZES) -> list[Any]:
    """Logs of training on batches of these sizes, with metrics that go on, and a prediction after the second."""
    logs: list[Any] = []
    for number, size in enumerate(sizes):
        logs.append(pipelined.train_on_batch(X[:size], Y[:size], return_dict=True))
        if number == 1:
            logs.append(pipelined.predict_on_batch(X[:2]).tolist())
    return logs


def assign(pipelined: dapple.PipelinedModel) -> None:
    kernel = pipelined.model.get_layer("first").kernel
    kernel.assign(keras.ops.clip(kernel, -0.1, 0.1))


class Round(NamedTuple):
    """Logs of training, and the values after it."""

    logs: list[Any]
    values: list[np.ndarray]

    def assert_equal(self, pipelined: dapple.PipelinedModel) -> None:
        for own, expected in zip(values(pipelined.sync()), self.values, strict=True):
            np.testing.assert_array_equal(own, expected)


@functools.cache
def unbounded() -> list[Round]:
    """Two rounds with as many steps as there are, and an assignment in between."""
    pipelined, rounds = transform(model(), prepared_steps=64), []
    for _ in range(2):
        rounds.append(Round(train(pipelined), values(pipelined.sync())))
        assign(pipelined)
    assert steps(pipelined) > 3
    return rounds


def test_what_is_trained_is_the_same_whatever_stays_prepared() -> None:
    """Every new size cost more than the one before, without bound: 0.3 s, then 1.4 s after 360 sizes.

    What is assigned in between counts, too.
    """
    first, second = unbounded()
    pipelined = transform(model(), prepared_steps=3)
    assert train(pipelined) == first.logs
    assign(pipelined)
    assert train(pipelined) == second.logs
    second.assert_equal(pipelined)
    assert steps(pipelined) <= 3


def test_what_runs_most_stays_and_the_rest_is_gone() -> None:
    pipelined = transform(classifier(), prepared_steps=4)
    engine = pipelined._engine
    first = weakref.ref(engine.session.graph)
    nodes, staying = [], []
    for size in (7, 7, 7, 2, 3, 3, 4, 5, 6, 7, 7, 1):
        pipelined.train_on_batch(X[:size], Y[:size])
        (built,) = engine.builder.builds.values()
        staying.append({kind.samples for kind in built.steps})
        nodes.append(len(engine.session.graph.get_operations()))
    full = [{7, 2, 3, 4}, {7, 3, 5}, {7, 3, 5, 6}, {7, 3, 5, 6}, {7, 3, 5, 6}, {7, 6, 1}]
    assert staying == [{7}, {7}, {7}, {7, 2}, {7, 2, 3}, {7, 2, 3}, *full]
    assert engine.prepared(Mode.TRAIN, Batch(pipelined._specs[Mode.TRAIN], [], 3)) is None
    assert max(nodes[7:]) < max(nodes[:7])
    gc.collect()
    assert first() is None


def test_a_step_on_data_that_workers_read_stays() -> None:
    """Each such step moved to a fresh session once as many were prepared as may stay."""
    pipelined = transform(classifier(), prepared_steps=1)
    data = dapple.on_workers(tf.data.Dataset.from_tensor_slices((X, Y)).repeat(3).batch(7, drop_remainder=True))
    sessions: list[Any] = []
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda *_, **__: sessions.append(pipelined._engine.session)
    )
    pipelined.fit(data, epochs=2, verbose=0, callbacks=[note])
    assert len(sessions) == 6 and len({id(session) for session in sessions}) == 1


@pytest.mark.parametrize("most", [0, True, 2.0])
def test_a_bound_that_means_nothing_is_refused(most: Any) -> None:
    with pytest.raises(ValueError, match=r"prepared_steps is .*; it must be a whole number from 1 on"):
        transform(classifier(), prepared_steps=most)


def test_values_that_only_devices_have_move_with_them() -> None:
    with dapple.deferred_init():
        own = model()
    pipelined = transform(own, prepared_steps=1)
    assert train(pipelined) == unbounded()[0].logs
    assert pipelined._engine.values.deferred
    unbounded()[0].assert_equal(pipelined)


def test_devices_without_memory_for_two_sessions_keep_the_old_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: StoredValues, other: StoredValues) -> None:
        raise tf.errors.ResourceExhaustedError(None, None, "no 8 bytes are left")

    pipelined = transform(model(), prepared_steps=3)
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, logger="dapple_tf"):
        patch.setattr(StoredValues, "take_over", full)
        assert train(pipelined) == unbounded()[0].logs
    told = [record.getMessage() for record in caplog.records if "stay prepared" in record.getMessage()]
    assert told == [
        "3 steps are prepared, but the devices' memory doesn't suffice to leave some out (no 8 bytes are left): up to "
        "6 steps stay prepared"
    ]
    unbounded()[0].assert_equal(pipelined)


def test_a_snapshot_is_written_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, going = saver._write, threading.Event()

    def late(*arguments: Any) -> None:
        assert going.wait(PATIENCE)
        write(*arguments)

    pipelined = transform(model(), prepared_steps=1)
    train(pipelined, (7, 3))
    expected = values(pipelined.sync())
    monkeypatch.setattr(saver, "_write", late)
    pipelined.save_checkpoint(tmp_path, wait=False)
    threading.Timer(0.1, going.set).start()
    train(pipelined, (4, 5))
    pipelined.wait_for_checkpoint()
    assert len(checkpoints(tmp_path)) == 1
    pipelined.restore_checkpoint(tmp_path)
    for own, its in zip(values(pipelined.sync()), expected, strict=True):
        np.testing.assert_array_equal(own, its)
