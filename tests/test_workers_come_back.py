"""Training goes on without a worker and takes it in again when it is back: 4 -> 3 -> 4 workers, as plain Keras."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, use_float64
from models_for_tests import assert_close, classifier, values
from profiles_for_tests import profile_of
from workers import PATIENCE, wait_until, wish

import dapple_tf as dapple
from dapple_tf.clusters import connection as connection_module
from dapple_tf.clusters import shared_connections
from dapple_tf.clusters.returning import Returning
from dapple_tf.execution import growing
from dapple_tf.network.control import Channel
from dapple_tf.network.inquiry import reachable
from dapple_tf.tools.hosts import LocalWorkers

pytestmark = pytest.mark.slow

BATCH = 6
STEPS = 8
EXACT = TOLERANCE["float64"]
X = np.random.default_rng(0).normal(size=(STEPS * BATCH, 4))
Y = np.random.default_rng(1).integers(0, 3, size=STEPS * BATCH)
POLICY = dapple.FaultPolicy("replan", notice_seconds=2.0, wait_seconds=0.0)

TWO = dapple.Plan.manual([], [[0, 1]], 1, BATCH)
FOUR = dapple.Plan.manual(["first", "second"], [[0, 1], [2], [3]], 2, BATCH)


@pytest.fixture(autouse=True)
def _free_workers(workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody uses the workers before a test, nor after it; lost ones are asked without a pause."""
    use_float64()
    monkeypatch.setattr(growing, "Returning", lambda seconds, pause: Returning(seconds, 0.0))
    wait_until(lambda: all(reachable(workers.addresses, PATIENCE)))
    yield
    assert not shared_connections._connections


def build() -> keras.Model:
    keras.utils.set_random_seed(3)
    return classifier(optimizer=keras.optimizers.Adam(0.01), metrics=["accuracy"])


def transform(workers: LocalWorkers, plan: dapple.Plan = TWO) -> dapple.PipelinedModel:
    cluster = dapple.Cluster.of_servers(workers.addresses[: max(map(max, plan.devices)) + 1])
    return dapple.transform(build(), cluster, plan, faults=POLICY)


def answered(pipelined: dapple.PipelinedModel) -> bool:
    """Whether no question to a lost worker is under way."""
    returning = pipelined._runtime._growing._returning
    return returning is None or not returning._asking or not returning._answers.empty()


class Steps:
    """Training step by step on the same batches, by turns."""

    def __init__(self, pipelined: dapple.PipelinedModel) -> None:
        self.pipelined, self.count = pipelined, 0

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            part = slice(self.count % STEPS * BATCH, (self.count % STEPS + 1) * BATCH)
            self.pipelined.train_on_batch(X[part], Y[part])
            self.count += 1
            wait_until(lambda: answered(self.pipelined))

    def train_until(self, condition: Callable[[], object]) -> None:
        """Trains until something is true, which takes a few steps: a question, its answer, what follows from it."""
        for _ in range(6):
            self.train()
            if condition():
                return
        raise AssertionError(f"not within {self.count} steps")

    def assert_as_plain_keras(self) -> None:
        """Ends it; losses and values are those of plain Keras after as many steps."""
        self.pipelined.close()
        plain = build()
        for step in range(self.count):
            part = slice(step % STEPS * BATCH, (step % STEPS + 1) * BATCH)
            plain.train_on_batch(X[part], Y[part])
        assert_close(values(self.pipelined.model), values(plain), EXACT)


class Disturb(keras.callbacks.Callback):
    """Kills a worker after some steps, and starts it again after more."""

    def __init__(self, pipelined: dapple.PipelinedModel, workers: LocalWorkers, lost: int) -> None:
        super().__init__()
        self._pipelined, self._workers, self._lost, self._steps = pipelined, workers, lost, 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._steps += 1
        if self._steps == 3:
            self._workers.kill(self._lost)
        if self._steps == 6:
            assert self._pipelined.faults
            self._workers.restart(self._lost)
        wait_until(lambda: answered(self._pipelined))


def batches() -> tf.data.Dataset:
    """In another order in each epoch, which checkpoints don't change."""
    tf.random.set_seed(4)
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(len(X), seed=5).batch(BATCH)


@pytest.mark.parametrize("lost", [2, pytest.param(0, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("data", ["on workers", pytest.param("fed", marks=pytest.mark.thorough)])
def test_four_workers_three_and_four_again(workers: LocalWorkers, tmp_path: Any, data: str, lost: int) -> None:
    """In one fit, with validation and checkpoints; steps that were prepared before the growth are made again."""
    pipelined = transform(workers, FOUR)
    history = pipelined.fit(
        dapple.on_workers(batches) if data == "on workers" else batches(),
        epochs=3,
        verbose=0,
        validation_data=(X, Y),
        callbacks=[Disturb(pipelined, workers, lost)],
        checkpoint=dapple.Checkpointing(tmp_path, every_steps=5),
    ).history
    assert pipelined.plan == FOUR
    assert list(pipelined.cluster.addresses) == workers.addresses
    (fault,) = pipelined.faults
    assert fault.without == (workers.addresses[lost],)
    (growth,) = pipelined.growths
    assert growth.added == (workers.addresses[lost],)
    assert 6 <= growth.step < 12
    assert (growth.replayed, growth.present, growth.latency) == (0, None, None)
    pipelined.close()

    plain = build()
    expected = plain.fit(batches(), epochs=3, verbose=0, validation_data=(X, Y)).history
    assert_close(history, expected, EXACT)
    assert_close(values(pipelined.model), values(plain), EXACT)


@pytest.mark.thorough
def test_data_in_parts(workers: LocalWorkers) -> None:
    """Which samples a worker reads depends on the plan: workers are taken in at the beginning of a round."""

    def part(context: tf.distribute.InputContext) -> tf.data.Dataset:
        own = tf.data.Dataset.from_tensor_slices((X, Y)).shard(context.num_input_pipelines, context.input_pipeline_id)
        return own.batch(context.get_per_replica_batch_size(BATCH), drop_remainder=True)

    pipelined = transform(workers)
    disturb = Disturb(pipelined, workers, 1)
    history = pipelined.fit(dapple.on_workers(part, in_parts=True), epochs=3, verbose=0, callbacks=[disturb]).history
    (growth,) = pipelined.growths
    assert growth.step in (STEPS, 2 * STEPS)
    pipelined.close()
    plain = build()
    expected = plain.fit(X, Y, BATCH, epochs=3, shuffle=False, verbose=0).history
    assert_close(history, expected, EXACT)
    assert_close(values(pipelined.model), values(plain), EXACT)


@pytest.mark.parametrize(("bandwidth", "grows"), [(1e9, True), pytest.param(10.0, False, marks=pytest.mark.thorough)])
def test_a_profile_decides(
    workers: LocalWorkers, caplog: pytest.LogCaptureFixture, bandwidth: float, grows: bool
) -> None:
    """Plans are made from it when a worker is lost; the worker is taken in if the step becomes faster by that.

    `prediction` is that of the plan that runs each time: it was None from the first fault on.
    """
    cluster = dataclasses.replace(dapple.Cluster.of_servers(workers.addresses[:2]), inter_bandwidth=bandwidth)
    plan, profile = dapple.Plan.straight(["first"], BATCH, 2), profile_of((10, 20), (10, 20), (10, 20))
    steps = Steps(dapple.transform(build(), cluster, plan, profile=profile, faults=POLICY))
    pipelined = steps.pipelined

    def assert_predicted() -> float:
        simulated = dapple.simulate(pipelined.plan, profile, pipelined.cluster).latency
        assert pipelined.prediction is not None and pipelined.prediction.predicted == simulated
        return simulated

    both = assert_predicted()
    steps.train(2)
    workers.kill(1)
    steps.train()
    assert pipelined.faults[0].without == (workers.addresses[1],)
    assert pipelined.plan == dapple.plan(profile, pipelined.cluster, BATCH)
    alone = assert_predicted()
    assert (both < alone) == grows
    steps.train()
    workers.restart(1)
    if grows:
        steps.train_until(lambda: pipelined.growths)
        assert (pipelined.growths[0].present, pipelined.growths[0].latency) == (alone, both)
        assert pipelined.plan == plan and assert_predicted() == both
        assert "took in workers" in caplog.text and "a step is predicted to take" in caplog.text
    else:
        steps.train_until(lambda: "are back, but the plan gains nothing by them" in caplog.text)
        steps.train(2)
        assert not pipelined.growths and assert_predicted() == alone
    steps.train(2)
    steps.assert_as_plain_keras()


@pytest.mark.thorough
def test_a_fault_while_growing(workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker that came back goes away again as it is taken in: training goes on with those of before."""
    steps = Steps(transform(workers))
    check_ports = connection_module.check_ports

    def disturbed(*arguments: Any) -> None:
        if len(arguments[0]) == 2:
            monkeypatch.setattr(connection_module, "check_ports", check_ports)
            workers.kill(1)
        check_ports(*arguments)

    steps.train(2)
    workers.kill(1)
    steps.train(2)
    workers.restart(1)
    monkeypatch.setattr(connection_module, "check_ports", disturbed)
    steps.train_until(lambda: len(steps.pipelined.faults) == 2)
    assert list(steps.pipelined.cluster.addresses) == workers.addresses[:1]
    assert f"taking in workers {workers.addresses[1]} failed" in str(steps.pipelined.faults[1].error)
    assert not steps.pipelined.growths
    steps.train(2)
    workers.restart(1)
    steps.train_until(lambda: steps.pipelined.growths)
    steps.train(2)
    assert steps.pipelined.plan == TWO
    steps.assert_as_plain_keras()


@pytest.mark.thorough
def test_a_worker_that_is_lost_again_and_again(workers: LocalWorkers) -> None:
    """Each time the same two plans are used."""
    steps = Steps(transform(workers))
    steps.train()
    for growths in (1, 2):
        workers.kill(1)
        steps.train(2)
        assert steps.pipelined.plan.devices == ((0,),)
        workers.restart(1)
        steps.train_until(lambda growths=growths: len(steps.pipelined.growths) == growths)
        steps.train()
        assert steps.pipelined.plan == TWO
    steps.assert_as_plain_keras()


@pytest.mark.thorough
def test_ctrl_c_while_growing(workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has the values of the last step, and can be trained on, by the workers of before."""
    steps = Steps(transform(workers))
    check_ports = connection_module.check_ports

    def struck(*arguments: Any) -> None:
        if len(arguments[0]) == 2:
            monkeypatch.setattr(connection_module, "check_ports", check_ports)
            os.kill(os.getpid(), signal.SIGINT)
        check_ports(*arguments)

    steps.train(2)
    workers.kill(1)
    steps.train(2)
    workers.restart(1)
    monkeypatch.setattr(connection_module, "check_ports", struck)
    with pytest.raises(KeyboardInterrupt):
        steps.train_until(lambda: steps.pipelined.growths)
    plain = build()
    for step in range(steps.count):
        plain.train_on_batch(X[step * BATCH :][:BATCH], Y[step * BATCH :][:BATCH])
    assert_close(values(steps.pipelined.model), values(plain), EXACT)
    steps.train_until(lambda: steps.pipelined.growths)
    steps.assert_as_plain_keras()


@pytest.mark.thorough
def test_a_worker_that_another_client_uses(workers: LocalWorkers, caplog: pytest.LogCaptureFixture) -> None:
    """It is taken in when that client has gone."""
    steps = Steps(transform(workers))
    steps.train(1)
    workers.kill(1)
    steps.train(1)
    workers.restart(1)
    with contextlib.closing(Channel.connect(workers.addresses[1], PATIENCE)) as channel:
        assert "port" in channel.ask(wish("another"), PATIENCE)
        steps.train_until(lambda: "is back, but in use by another client" in caplog.text)
        steps.train(4)
        assert not steps.pipelined.growths
        assert caplog.text.count("in use by another client") == 1
    wait_until(lambda: all(reachable(workers.addresses[1:2], PATIENCE)))
    steps.train_until(lambda: steps.pipelined.growths)
    steps.assert_as_plain_keras()


@pytest.mark.thorough
def test_another_model_of_this_process_keeps_its_workers(workers: LocalWorkers) -> None:
    """Two models share the worker that is left: neither grows before the other has given it back."""
    one, other = (Steps(transform(workers)) for _ in range(2))
    for steps in (one, other):
        steps.train(1)
    workers.kill(1)
    one.train(1)
    other.pipelined.close(sync=False)
    here = dapple.transform(
        build(), dapple.Cluster.of_servers(workers.addresses[:1]), dapple.Plan.manual([], [[0]], 1, BATCH)
    )
    workers.restart(1)
    one.train(6)
    assert not one.pipelined.growths
    here.close()
    one.train_until(lambda: one.pipelined.growths)
    one.assert_as_plain_keras()


@pytest.mark.thorough
def test_values_that_stay_on_the_devices(workers: LocalWorkers, tmp_path: Any) -> None:
    """A model without values of its own grows after a checkpoint, from which it is restored: few steps are repeated."""
    cluster = dapple.Cluster.of_servers(workers.addresses[:2])
    keras.utils.set_random_seed(3)
    with dapple.deferred_init():
        model = classifier(optimizer=keras.optimizers.Adam(0.01), metrics=["accuracy"])
    steps = Steps(dapple.transform(model, cluster, TWO, faults=POLICY))
    steps.train(1)
    workers.kill(1)
    steps.train(20)
    workers.restart(1)
    steps.train(6)
    assert not steps.pipelined.growths
    steps.pipelined.save_checkpoint(tmp_path)
    steps.train_until(lambda: steps.pipelined.growths)
    (growth,) = steps.pipelined.growths
    assert 0 < growth.replayed <= 6
    steps.train(2)
    steps.pipelined.sync()
    steps.assert_as_plain_keras()
