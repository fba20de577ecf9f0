"""What faults mean for a user: errors, records, other plans and models; values after any faults are in test_faults."""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import itertools
import logging
import os
import shutil
import signal
import threading
import time
import types
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, use_float64
from fake_session import SECONDS, FakeWorkers, Fault
from hardware import cluster_of
from models_for_tests import assert_close, classifier, values
from profiles_for_tests import profile_of
from workers import wait_until

import dapple_tf as dapple
from dapple_tf.clusters import membership, remote_session, shared_connections
from dapple_tf.clusters.membership import Membership
from dapple_tf.errors import UnusableWorkersError
from dapple_tf.execution import elastic
from dapple_tf.execution.runtime import Runtime
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.planning.replanning import Deployment, Replanner

BATCH = 6
STEPS = 8
EXACT = TOLERANCE["float64"]
X = np.random.default_rng(0).normal(size=(STEPS * BATCH, 4))
Y = np.random.default_rng(1).integers(0, 3, size=STEPS * BATCH)

ONE = dapple.Plan.manual([], [[0]], 1, BATCH)
TWO = dapple.Plan.manual([], [[0, 1]], 1, BATCH)
PIPELINE = dapple.Plan.manual(["first"], [[0], [1]], 2, BATCH)
FOUR = dapple.Plan.manual(["first", "second"], [[0, 1], [2], [3]], 2, BATCH)
RAISE = dapple.FaultPolicy(notice_seconds=1.0)
RESTART = dapple.FaultPolicy("restart", notice_seconds=1.0, wait_seconds=SECONDS)
IMPATIENT = dapple.FaultPolicy("restart", notice_seconds=1.0, wait_seconds=0.0)
REPLAN = dapple.FaultPolicy("replan", notice_seconds=1.0, wait_seconds=0.0)


@pytest.fixture
def workers() -> Iterator[FakeWorkers]:
    """Four workers, which nobody uses after the test."""
    use_float64()
    with FakeWorkers(4).used() as own:
        yield own
        assert not any(set(addresses) & set(own.cluster.addresses) for addresses in shared_connections._connections)


def build(optimizer: str = "adam") -> keras.Model:
    keras.utils.set_random_seed(3)
    return classifier(optimizer=optimizer, metrics=["accuracy"])


def part(workers: FakeWorkers, count: int) -> dapple.Cluster:
    return dapple.Cluster.of_servers(workers.cluster.addresses[:count], devices_per_server=1)


def transform(
    workers: FakeWorkers, plan: dapple.Plan = TWO, faults: dapple.FaultPolicy = RESTART, **options: Any
) -> dapple.PipelinedModel:
    cluster = options.pop("cluster", None) or part(workers, max(map(max, plan.devices)) + 1)
    return dapple.transform(options.pop("model", None) or build(), cluster, plan, faults=faults, **options)


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    own = slice(step % STEPS * BATCH, (step % STEPS + 1) * BATCH)
    return X[own], Y[own]


def train(model: Any, *steps: int) -> Any:
    for step in steps:
        model.train_on_batch(*batch(step))
    return model


@functools.cache
def plain_values(*steps: int) -> list[np.ndarray]:
    """Values of plain Keras after these steps."""
    model = build()
    model.run_eagerly = True  # A few steps take less than to trace one.
    return values(train(model, *steps))


def assert_as_plain_keras(pipelined: dapple.PipelinedModel, *steps: int) -> None:
    """Ends it; its values are those of plain Keras after these steps."""
    pipelined.close()
    assert_close(values(pipelined.model), plain_values(*steps), EXACT)


def cancel(workers: FakeWorkers, calls: int) -> None:
    """Has the next calls end as TensorFlow tells of links that break, and sometimes of an operator that fails."""
    workers.begin(dict.fromkeys(range(calls), Fault("cancelled")))


# ---- errors and records


def test_a_link_that_breaks_and_is_whole_again(workers: FakeWorkers) -> None:
    """Packets that were dropped one way for half a minute ended training: no worker was lost."""
    pipelined = train(transform(workers), 0, 1)
    cancel(workers, 1)
    train(pipelined, 2, 3)
    (record,) = pipelined.faults
    assert str(record.error) == "a run was cancelled, though all workers answer: RecvFromRemoteAsync is cancelled."
    assert (record.replayed, record.without, record.step) == (2, (), 2)
    assert_as_plain_keras(pipelined, 0, 1, 2, 3)


def test_an_operator_that_fails_is_no_lost_worker(workers: FakeWorkers) -> None:
    """Plain Keras' error is known at once, and any other one at the second attempt."""
    pipelined = transform(workers)
    for label, tries, text in ((99, 0, "label value of 99"), (1, 1, "is cancelled")):
        cancel(workers, 3)  # The second one is the end of the first's session.
        with pytest.raises(dapple.StepError, match=text):
            pipelined.train_on_batch(X[:BATCH], np.full(BATCH, label))
        assert len(pipelined.faults) == tries
    pipelined.close()


def test_keys_that_expire_before_a_recovery(workers: FakeWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error was of the keys alone, without the worker and the step."""

    def expired(_: dapple.Cluster) -> None:
        raise dapple.ClusterError("TLS: certificate has expired")

    pipelined = train(transform(workers, faults=REPLAN), 0, 1)
    workers.kill(1, away=0)
    monkeypatch.setattr(dapple.Cluster, "keys", property(expired))
    text = r"worker 1 .* it isn't back: TLS: .* expired; it ran .* finished step is 2;"
    with pytest.raises(dapple.WorkerLostError, match=text):
        train(pipelined, 2)
    pipelined.close(sync=False)


def test_errors_are_raised_and_the_model_can_be_used_again(workers: FakeWorkers) -> None:
    workers.kill(1, away=2)
    with pytest.raises(dapple.ClusterError, match=r"worker 1 .* can't be reached"):
        transform(workers, faults=RAISE)
    pipelined = train(transform(workers, faults=RAISE), 0, 1)
    pipelined.sync()
    train(pipelined, 2)
    workers.kill(1)
    with pytest.raises(dapple.WorkerLostError, match=r"it ran stage 0; the last finished step is 3; .* last sync"):
        train(pipelined, 3)
    with pytest.raises(dapple.ClusterError, match="worker 1"):
        train(pipelined, 3)
    workers.restart(1)
    train(pipelined, 3, 4)
    assert not pipelined.faults
    assert_as_plain_keras(pipelined, 0, 1, 3, 4)


def test_closing_frees_workers_also_when_one_is_lost_or_answers_and_cannot_be_used(workers: FakeWorkers) -> None:
    """It is back with fewer devices, or a firewall is between it and others."""
    pipelined = train(transform(workers, faults=IMPATIENT), 0)
    workers.kill(1)
    wait_until(lambda: pipelined.lost is not None)
    with pytest.raises(dapple.WorkerLostError, match=r"worker 1 .* keeps the values of its last sync"):
        pipelined.close()
    assert pipelined.cluster.addresses not in shared_connections._connections
    pipelined.close()
    workers.restart(1)
    assert_as_plain_keras(train(pipelined, 0, 1), 0, 1)
    train(pipelined, 2)
    workers.begin({0: Fault("parted", 1, away=1000)})
    with pytest.raises(dapple.WorkerLostError, match="it isn't back: TensorFlow's port of worker 1 can't be reach"):
        train(pipelined, 3)
    pipelined.close(sync=False)


@pytest.mark.parametrize("kind", ["dies", "parted"])
def test_a_fault_at_the_end_of_a_session_meets_the_next_one(workers: FakeWorkers, kind: str) -> None:
    """As `transform`, that waits for a worker, and tells of a closed port. It didn't wait, whatever the policy."""
    pipelined = train(transform(workers), 0)
    pipelined.sync()
    workers.begin({0: Fault(kind, 1, away=3)})
    pipelined.close()
    assert workers.met
    if kind == "parted":
        with pytest.raises(UnusableWorkersError, match="TensorFlow's port of worker 1 can't be reached"):
            train(pipelined, 1)
        workers.restart(1)
    assert_as_plain_keras(train(pipelined, 1), 0, 1)


def test_ctrl_c_while_waiting(workers: FakeWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has the values of its last sync, not those of a part of the batches since."""

    def pause(seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(seconds)

    pipelined = train(transform(workers), 0)
    expected = values(pipelined.sync())
    train(pipelined, 1, 2)
    workers.kill(1)
    # Between two attempts to reach the worker, whenever that is.
    monkeypatch.setattr(elastic, "time", types.SimpleNamespace(monotonic=time.monotonic, time=time.time, sleep=pause))
    with pytest.raises(KeyboardInterrupt):
        train(pipelined, 3)
    pipelined.close()
    assert_close(values(pipelined.model), expected, 0.0)


@pytest.mark.parametrize(("saves", "damage"), [(1, "deleted"), (2, "flipped")])
def test_a_checkpoint_that_is_damaged_is_not_what_recovery_rests_on(
    workers: FakeWorkers, tmp_path: Path, saves: int, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The base before it and the batches since then are kept until the next one."""
    pipelined = train(transform(workers), 0, 1)
    for step in range(2, 2 + saves):
        path = pipelined.save_checkpoint(tmp_path)
        train(pipelined, step)
    if damage == "deleted":
        shutil.rmtree(path)
    else:
        data = path / "shard-0.data-00000-of-00001"
        content = data.read_bytes()
        data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    workers.kill(1, away=0)
    train(pipelined, *range(2 + saves, 6))
    (record,) = pipelined.faults
    assert record.replayed == (3 if saves == 1 else 2)
    assert ("going back to the values in memory" if saves == 1 else "save-000001-step-2, 2 steps") in caplog.text
    assert_as_plain_keras(pipelined, *range(6))


# ---- sessions, and other models


def test_verification_begins_again_after_a_fault(workers: FakeWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps aren't the user's: nothing trains on them again, so that those before the fault were missing."""
    pipelined = train(transform(workers), 0)
    run, count = Runtime.run, itertools.count()

    def disturbed(runtime: Runtime, *args: Any, **kwargs: Any) -> Any:
        result = run(runtime, *args, **kwargs)
        if next(count) == 2:  # the gradients, and the first two steps
            workers.kill(1, away=0)
        return result

    monkeypatch.setattr(Runtime, "run", disturbed)
    pipelined.verify(*batch(1), steps=3, float64=False).assert_equal()
    assert pipelined.faults
    pipelined.close()


def test_collected_with_its_model_it_asks_nothing_of_its_session(
    workers: FakeWorkers, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python frees a session before it asks the model: "Attempted to use a closed Session", out of nowhere."""

    class Holder:
        pass

    holder: Any = Holder()
    holder.pipelined, holder.itself = train(transform(workers), 0), holder
    addresses = holder.pipelined.cluster.addresses
    del holder
    gc.collect()
    wait_until(lambda: addresses not in shared_connections._connections)
    assert "Exception ignored" not in capfd.readouterr().err


def test_two_models_on_one_cluster(workers: FakeWorkers) -> None:
    """Each goes on when it next meets the fault; evaluation before training keeps the workers this process' own."""
    one, other = transform(workers), transform(workers, PIPELINE)
    one.evaluate(X, Y, verbose=0)
    for pipelined in (one, other):
        train(pipelined, 0, 1)
    assert workers.opened == 1
    workers.kill(1, away=0)
    for pipelined in (one, other):
        train(pipelined, 2, 3)
        assert pipelined.faults
        assert_as_plain_keras(pipelined, 0, 1, 2, 3)


def test_a_fault_of_another_model_is_not_survived_in_its_place(workers: FakeWorkers) -> None:
    """A model that shares layers is looked at before each step: its lost worker was taken for one of this model's."""
    model = build()
    lost = transform(workers, ONE, RAISE, model=model)
    twin = keras.Model(model.inputs, model.outputs)
    twin.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy")
    here = dapple.transform(twin, dapple.Cluster.local(1, kind="cpu"), ONE, faults=RESTART)
    train(here, 0)
    train(lost, 0)
    workers.kill(0, away=0)
    with pytest.raises(dapple.WorkerLostError):
        train(here, 1)
    assert not here.faults
    lost.close(sync=False)
    here.close()


def test_nobody_waits_for_ever(workers: FakeWorkers) -> None:
    """All workers are there, but one is in use by this process without the other, which had been given up."""
    one, other = (train(transform(workers, faults=REPLAN), 0) for _ in range(2))
    workers.kill(1)
    train(one, 1)
    assert len(one.cluster.addresses) == 1
    workers.restart(1)
    with pytest.raises(dapple.WorkerLostError, match="in use by this process already, in another cluster of 1 worker"):
        train(other, 1)
    one.close()
    train(other, 1)
    other.close()


# ---- fewer workers, and more again


def test_another_worker_is_lost_as_training_goes_on_without_the_first(workers: FakeWorkers) -> None:
    """Numbers of lost workers were taken for those in the cluster without the first: a third one was left out."""
    pipelined = train(transform(workers, FOUR, REPLAN), 0, 1)
    addresses = workers.cluster.addresses
    gone = float("inf")
    workers.begin({0: Fault("dies", 2, away=gone), 1: Fault("dies", 1, away=gone)})
    train(pipelined, 2, 3)
    assert pipelined.cluster.addresses == (addresses[0], addresses[3])
    (record,) = pipelined.faults
    assert record.without == addresses[1:3]
    assert_as_plain_keras(pipelined, 0, 1, 2, 3)


def test_operators_are_placed_anew_without_a_worker(workers: FakeWorkers) -> None:
    """Also with a profile, from which stages of replicas would be planned."""
    profile = profile_of((10, 20), (10, 20), (10, 20))
    plan = dapple.Plan.by_operators(3, BATCH)
    cluster = dataclasses.replace(part(workers, 3), inter_bandwidth=1e9, intra_bandwidth=1e9)
    options: dict[str, Any] = {"cluster": cluster, "operator_costs": OperatorCosts(), "profile": profile}
    pipelined = train(transform(workers, plan, REPLAN, **options), 0, 1)
    workers.kill(0)
    train(pipelined, 2)
    assert pipelined.plan == dapple.Plan.by_operators(2, BATCH)
    assert_as_plain_keras(pipelined, 0, 1, 2)


@pytest.mark.parametrize(("bandwidth", "grows"), [(1e9, True), (10.0, False)])
def test_a_profile_decides(
    workers: FakeWorkers, caplog: pytest.LogCaptureFixture, bandwidth: float, grows: bool
) -> None:
    """Plans are made from it when a worker is lost; the worker is taken in if the step becomes faster by that.

    `prediction` is that of the plan that runs each time: it was None from the first fault on.
    """
    cluster = dataclasses.replace(part(workers, 2), inter_bandwidth=bandwidth)
    plan, profile = dapple.Plan.straight(["first"], BATCH, 2), profile_of((10, 20), (10, 20), (10, 20))
    pipelined = dapple.transform(build(), cluster, plan, profile=profile, faults=REPLAN)

    def predicted() -> float:
        simulated = dapple.simulate(pipelined.plan, profile, pipelined.cluster).latency
        assert pipelined.prediction is not None and pipelined.prediction.predicted == simulated
        return simulated

    both = predicted()
    train(pipelined, 0, 1)
    workers.kill(1)
    train(pipelined, 2)
    assert pipelined.plan == dapple.plan(profile, pipelined.cluster, BATCH)
    alone = predicted()
    assert (both < alone) == grows
    workers.restart(1)
    train(pipelined, 3, 4)
    if grows:
        (growth,) = pipelined.growths
        assert (growth.added, growth.step) == (cluster.addresses[1:], 3)
        assert (growth.present, growth.latency, growth.replayed) == (alone, both, 0)
        assert pipelined.plan == plan and predicted() == both
        assert "took in workers" in caplog.text and "a step is predicted to take" in caplog.text
    else:
        assert "are back, but the plan gains nothing by them" in caplog.text
        assert not pipelined.growths and predicted() == alone
    assert_as_plain_keras(pipelined, *range(5))


@pytest.mark.parametrize("happens", ["a fault", "Ctrl-C"])
def test_what_happens_while_growing(workers: FakeWorkers, happens: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on with the workers of before; the model has the values of the last step."""
    pipelined = train(transform(workers, faults=REPLAN), 0, 1)
    workers.kill(1)
    train(pipelined, 2)
    workers.restart(1)
    meet, address = workers.meet, workers.cluster.addresses[1]

    def disturbed(asked: str) -> None:
        if asked != address:
            return meet(asked)
        monkeypatch.setattr(workers, "meet", meet)
        if happens == "Ctrl-C":
            raise KeyboardInterrupt
        workers.kill(1)
        return meet(asked)

    monkeypatch.setattr(workers, "meet", disturbed)
    if happens == "Ctrl-C":
        with pytest.raises(KeyboardInterrupt):
            train(pipelined, 3)
        assert_close(values(pipelined.model), plain_values(0, 1, 2), EXACT)
    else:
        train(pipelined, 3)
        assert f"taking in workers {address} failed" in str(pipelined.faults[1].error)
        assert pipelined.cluster.addresses == workers.cluster.addresses[:1] and not pipelined.growths
        workers.restart(1)
        train(pipelined, 4)
        assert pipelined.growths and pipelined.plan == TWO
    pipelined.close()


def test_data_in_parts(workers: FakeWorkers) -> None:
    """Which samples a worker reads depends on the plan: workers are taken in at the beginning of a round."""

    def own_part(context: tf.distribute.InputContext) -> tf.data.Dataset:
        own = tf.data.Dataset.from_tensor_slices((X, Y)).shard(context.num_input_pipelines, context.input_pipeline_id)
        return own.batch(context.get_per_replica_batch_size(BATCH), drop_remainder=True)

    happens = {2: workers.kill, 5: workers.restart}
    steps = itertools.count()
    disturb = keras.callbacks.LambdaCallback()
    disturb.on_train_batch_end = lambda batch, logs=None: happens.get(next(steps), id)(1)
    pipelined = transform(workers, faults=REPLAN)
    data = dapple.on_workers(own_part, in_parts=True)
    history = pipelined.fit(data, epochs=3, verbose=0, callbacks=[disturb]).history
    (growth,) = pipelined.growths
    assert growth.step in (STEPS, 2 * STEPS)
    pipelined.close()
    plain = build()
    assert_close(history, plain.fit(X, Y, BATCH, epochs=3, shuffle=False, verbose=0).history, EXACT)
    assert_close(values(pipelined.model), values(plain), EXACT)


def test_values_that_stay_on_the_devices(workers: FakeWorkers, tmp_path: Path) -> None:
    """A model without values of its own grows after a checkpoint, from which it is restored: few steps are repeated."""
    keras.utils.set_random_seed(3)
    with dapple.deferred_init():
        model = classifier(optimizer="adam", metrics=["accuracy"])
    pipelined = train(transform(workers, faults=REPLAN, model=model), 0)
    workers.kill(1)
    train(pipelined, *range(1, 21))
    workers.restart(1)
    train(pipelined, 21, 22)
    assert not pipelined.growths
    pipelined.save_checkpoint(tmp_path)
    train(pipelined, 23, 24)
    (growth,) = pipelined.growths
    assert 0 < growth.replayed <= 2
    pipelined.sync()
    assert_as_plain_keras(pipelined, *range(25))


# ---- what faults leave behind

FAULTS_IN_A_ROW = 3


def ours() -> collections.Counter[str]:
    """Number of objects of this package's classes, by class, of TensorFlow's sessions and iterators, of tracebacks."""
    gc.collect()
    counts: collections.Counter[str] = collections.Counter()
    for value in gc.get_objects():
        kind = type(value)
        if isinstance(value, types.TracebackType):
            if "dapple_tf" in value.tb_frame.f_code.co_filename:
                counts["traceback"] += 1
        elif kind.__module__.startswith(("dapple_tf", "graph_passes")) or kind.__name__ in ("Session", "OwnedIterator"):
            counts[kind.__name__] += 1
    return counts


def test_faults_leave_no_object_and_no_thread(workers: FakeWorkers) -> None:
    """Errors kept frames, and with them batches, iterators and models.

    TensorFlow waited for two minutes as it freed such an iterator, in the middle of another step.
    """
    logging.getLogger("dapple_tf").setLevel(logging.CRITICAL)  # pytest keeps records.
    earlier = set(remote_session._running)
    pipelined = transform(workers)
    datasets: list[weakref.ref[Any]] = []

    def fault(step: int) -> None:
        dataset = tf.data.Dataset.from_tensors(batch(step))
        datasets.append(weakref.ref(dataset))
        workers.begin({0: Fault("hangs", 1)})
        pipelined.fit(dataset, verbose=0)

    train(pipelined, 0, 1)
    fault(2)
    wait_until(lambda: remote_session._running <= earlier)
    before, threads = ours(), threading.active_count()
    for step in range(3, 3 + FAULTS_IN_A_ROW):
        fault(step)
    wait_until(lambda: remote_session._running <= earlier)
    wait_until(lambda: threading.active_count() <= threads)
    left = ours() - before
    assert [left.pop(name) for name in ("FaultRecord", "WorkerLostError")] == [FAULTS_IN_A_ROW] * 2
    assert left.pop("Trained", 0) <= FAULTS_IN_A_ROW  # The batches since the last sync.
    assert not any(record.error.__traceback__ for record in pipelined.faults)
    assert not left
    assert not [reference for reference in datasets if reference() is not None]
    pipelined.close()


# ---- when workers are taken in again


def deployment(count: int, devices: int | None = None) -> Deployment:
    addresses = tuple(f"10.0.0.{number + 1}:1" for number in range(count))
    cluster = dataclasses.replace(cluster_of(*[1] * count), addresses=addresses)
    return Deployment(cluster, dapple.Plan.manual([], [range(devices or count)], 1, 12))


def test_pauses_grow_with_faults_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each time that a worker comes back costs the preparation of steps; a fault days later isn't one of a row."""
    now = [0.0]
    monkeypatch.setattr(membership, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    own = Membership(10.0)
    for pause in (10, 20, 40):
        own.left(deployment(3))
        assert own.pause == pause
        now[0] += 50
    own.put_off()
    assert own.pause == 80
    now[0] += 1e6
    own.left(deployment(3))
    assert own.pause == 10
    for _ in range(20):
        own.put_off()
    assert own.pause == 3600


def test_when_workers_are_taken_in_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Other models of this process may use them; and a gain that is none is told once."""
    for devices, held, users, lost, grows in (
        (3, 2, 1, False, True),  # its own connection
        (3, 2, 2, False, False),  # shared with another model
        (3, 3, 1, False, False),  # another model's of the same workers
        (3, 4, 1, True, False),  # another model's of more workers
        (2, 2, 1, False, False),  # no gain
    ):
        other = types.SimpleNamespace(users=users, lost=RuntimeError() if lost else None)
        monkeypatch.setattr(shared_connections, "_connections", {deployment(held).cluster.addresses: other})
        own = Membership(10.0)
        monkeypatch.setattr(own, "there", lambda cluster, tasks: frozenset({"10.0.0.3:1"}))  # the third, which is back
        own.left(deployment(3, devices))
        with caplog.at_level(logging.INFO):
            for _ in range(2):
                assert (own.growth(deployment(2), Replanner(None)) is not None) == grows
    (record,) = caplog.records
    assert record.getMessage() == "workers 10.0.0.3:1 are back, but the plan gains nothing by them"
