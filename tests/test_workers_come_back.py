"""Faults of real workers: one is killed, hangs, and is left out and taken in again; others are in test_faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, use_float64
from models_for_tests import assert_close, classifier, values
from workers import PATIENCE, wait_until

import dapple_tf as dapple
from dapple_tf.clusters import shared_connections
from dapple_tf.clusters.returning import Returning
from dapple_tf.execution import growing
from dapple_tf.network.inquiry import reachable
from dapple_tf.tools.hosts import LocalWorkers

pytestmark = pytest.mark.slow

BATCH = 6
EXACT = TOLERANCE["float64"]
X = np.random.default_rng(0).normal(size=(8 * BATCH, 4))
Y = np.random.default_rng(1).integers(0, 3, size=8 * BATCH)
PIPELINE = dapple.Plan.manual(["first"], [[0], [1]], 2, BATCH)
FOUR = dapple.Plan.manual(["first", "second"], [[0, 1], [2], [3]], 2, BATCH)


@pytest.fixture(autouse=True)
def _free_workers(workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody uses the workers before a test, nor after it; lost ones are asked without a pause."""
    use_float64()
    monkeypatch.setattr(growing, "Returning", lambda seconds, pause: Returning(seconds, 0.0))
    wait_until(lambda: all(reachable(workers.addresses, PATIENCE)))
    yield
    assert not set(workers.addresses) & {own for addresses in shared_connections._connections for own in addresses}


def build() -> keras.Model:
    keras.utils.set_random_seed(3)
    return classifier(optimizer=keras.optimizers.Adam(0.01), metrics=["accuracy"])


def data() -> tf.data.Dataset:
    """In another order in each epoch, which checkpoints don't change."""
    tf.random.set_seed(4)
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(len(X), seed=5).batch(BATCH)


class After(keras.callbacks.Callback):
    """Does something after steps of these numbers, counted over all epochs."""

    def __init__(self, **does: Callable[[], object]) -> None:
        super().__init__()
        self._does, self._steps = does, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        self._does.get(f"step{self._steps}", int)()
        self._does.get("each", int)()


def assert_as_plain_keras(pipelined: dapple.PipelinedModel, history: Any, **options: Any) -> None:
    pipelined.close()
    plain = build()
    assert_close(history, plain.fit(data(), verbose=0, **options).history, EXACT)
    assert_close(values(pipelined.model), values(plain), EXACT)


@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_workers_that_come_back(workers: LocalWorkers, fault: str) -> None:
    def meet() -> None:
        if fault == "kill":
            workers.kill(1)
            workers.restart(1, wait=False)
        else:
            workers.stop(1)
            wait_until(lambda: pipelined.lost is not None)
            workers.cont(1)

    cluster = dapple.Cluster.of_servers(workers.addresses[:2])
    policy = dapple.FaultPolicy("restart", notice_seconds=2.0, wait_seconds=PATIENCE)
    pipelined = dapple.transform(build(), cluster, PIPELINE, faults=policy)
    history = pipelined.fit(data(), epochs=2, verbose=0, callbacks=[After(step11=meet)]).history
    (record,) = pipelined.faults
    assert (record.error.task, record.replayed, record.without) == (1, 3, ())
    assert_as_plain_keras(pipelined, history, epochs=2)


def test_four_workers_three_and_four_again(workers: LocalWorkers, tmp_path: Any) -> None:
    """In one fit, with validation and checkpoints; steps that were prepared before the growth are made again."""

    def answered() -> bool:
        returning = pipelined._runtime._growing._returning
        return returning is None or not returning._asking or not returning._answers.empty()

    cluster = dapple.Cluster.of_servers(workers.addresses)
    policy = dapple.FaultPolicy("replan", notice_seconds=2.0, wait_seconds=0.0)
    pipelined = dapple.transform(build(), cluster, FOUR, faults=policy)
    disturb = After(step3=lambda: workers.kill(2), step6=lambda: workers.restart(2), each=lambda: wait_until(answered))
    history = pipelined.fit(
        dapple.on_workers(data()),
        epochs=3,
        verbose=0,
        validation_data=(X, Y),
        callbacks=[disturb],
        checkpoint=dapple.Checkpointing(tmp_path, every_steps=5),
    ).history
    assert (pipelined.plan, pipelined.cluster) == (FOUR, cluster)
    (fault,) = pipelined.faults
    (growth,) = pipelined.growths
    assert fault.without == growth.added == (workers.addresses[2],)
    assert 6 <= growth.step < 12
    assert (growth.replayed, growth.present, growth.latency) == (0, None, None)
    assert_as_plain_keras(pipelined, history, epochs=3, validation_data=(X, Y))


def test_a_plan_is_made_of_what_workers_take(workers: LocalWorkers) -> None:
    """Profiled on a worker, whose batches come from the client, not from a device of a process on its own."""
    cluster = dapple.Cluster.of_servers(workers.addresses[:2])
    profile = dapple.profile(build(), (2, BATCH), cluster=cluster, cache=False, repeats=1)
    assert profile.method == "layers"
    assert all(layer.forward.at(BATCH) > 0 for layer in profile.layers)
