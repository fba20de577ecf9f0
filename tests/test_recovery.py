"""Training that loses workers ends with the values that it ends with undisturbed."""

from __future__ import annotations

import collections
import gc
import itertools
import os
import shutil
import signal
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models_for_tests import classifier, values
from workers import PATIENCE, children, mend, wait_until

import dapple_tf as dapple
from dapple_tf.clusters import connection as connection_module
from dapple_tf.clusters import remote_session, shared_connections
from dapple_tf.execution import recovery
from dapple_tf.execution.runtime import Runtime
from dapple_tf.network.inquiry import reachable
from dapple_tf.operators.op_costs import OperatorCosts
from dapple_tf.tools.hosts import LocalWorkers

pytestmark = pytest.mark.slow

BATCH = 6
FAULTS: dict[str, Any] = {"notice_seconds": 2.0, "wait_seconds": PATIENCE}
RESTART = dapple.FaultPolicy("restart", **FAULTS)
X = np.random.default_rng(0).normal(size=(4 * BATCH, 4)).astype("float32")
Y = np.random.default_rng(1).integers(0, 3, size=4 * BATCH)

PARALLEL = dapple.Plan.manual([], [[0, 1]], 1, BATCH)
PIPELINE = dapple.Plan.manual(["first"], [[0], [1]], 2, BATCH)


@pytest.fixture(autouse=True)
def _free_workers(workers: LocalWorkers) -> Iterator[None]:
    """Nobody uses the workers before a test, nor after it."""
    wait_until(lambda: all(reachable(workers.addresses, PATIENCE)))
    yield
    assert not shared_connections._connections


def build(optimizer: keras.Optimizer | None = None) -> keras.Model:
    keras.utils.set_random_seed(3)
    return classifier(optimizer=optimizer or keras.optimizers.Adam(0.05), metrics=["accuracy"])


def transform(
    workers: LocalWorkers,
    plan: dapple.Plan = PARALLEL,
    faults: dapple.FaultPolicy = RESTART,
    optimizer: keras.Optimizer | None = None,
) -> dapple.PipelinedModel:
    cluster = dapple.Cluster.of_servers(workers.addresses[: max(max(plan.devices)) + 1])
    return dapple.transform(build(optimizer), cluster, plan, faults=faults)


def end_server(workers: LocalWorkers, worker: int = 1) -> None:
    """Kills the process that a worker has for its client; the worker has another one at once."""
    (child,) = children(workers.processes[worker].pid)
    os.kill(child, signal.SIGKILL)


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    part = slice(number % 4 * BATCH, (number % 4 + 1) * BATCH)
    return X[part], Y[part]


def train(pipelined: dapple.PipelinedModel, steps: range) -> None:
    for step in steps:
        pipelined.train_on_batch(*batch(step))


def ended(pipelined: dapple.PipelinedModel) -> list[np.ndarray]:
    pipelined.close()
    return values(pipelined.model)


def assert_same(ours: list[np.ndarray], theirs: list[np.ndarray], tolerance: float = 0.0) -> None:
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance)


def undisturbed(
    workers: LocalWorkers, does: Callable[[dapple.PipelinedModel], None], **options: Any
) -> list[np.ndarray]:
    pipelined = transform(workers, **options)
    does(pipelined)
    return ended(pipelined)


_fitted: dict[dapple.Plan, tuple[list[np.ndarray], Any]] = {}


def undisturbed_fit(workers: LocalWorkers, plan: dapple.Plan = PARALLEL) -> tuple[list[np.ndarray], Any]:
    """Values after `fit`, and its history: found once for all tests of a plan."""
    if plan not in _fitted:
        histories = []
        ended_with = undisturbed(workers, lambda pipelined: histories.append(fit(pipelined)), plan=plan)
        _fitted[plan] = ended_with, histories[0]
    return _fitted[plan]


class At(keras.callbacks.Callback):
    """Does something after the step of a number, counted over all epochs."""

    def __init__(self, step: int, does: Callable[[], None]) -> None:
        super().__init__()
        self._left, self._does = step, does

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._left -= 1
        if self._left == 0:
            self._does()


class Halve(keras.callbacks.Callback):
    """Assigns the learning rate within the epoch, and values at its end."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if batch == 2:
            self.model.optimizer.learning_rate = float(self.model.optimizer.learning_rate.numpy()) / 2

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        kernel = self.model.get_layer("first").kernel
        kernel.assign(kernel * 0.5)


def fit(pipelined: dapple.PipelinedModel, *callbacks: Any) -> Any:
    return pipelined.fit(
        X, Y, epochs=2, shuffle=False, verbose=0, callbacks=[Halve(), *callbacks], validation_data=(X, Y)
    ).history


@pytest.mark.few(1)
@pytest.mark.parametrize("plan", [PARALLEL, PIPELINE], ids=["parallel", "pipeline"])
@pytest.mark.parametrize("fault", ["kill", "stop"])
def test_workers_that_come_back(workers: LocalWorkers, plan: dapple.Plan, fault: str) -> None:
    """Values and History are the same to the bit, with the rate that each step had and what callbacks assigned."""
    expected, history = undisturbed_fit(workers, plan)

    def meet() -> None:
        if fault == "kill":
            workers.kill(1)
            workers.restart(1, wait=False)
        else:
            workers.stop(1)
            wait_until(lambda: pipelined.lost is not None)
            workers.cont(1)

    pipelined = transform(workers, plan)
    assert fit(pipelined, At(4 + 3, meet)) == history
    assert_same(ended(pipelined), expected)
    (record,) = pipelined.faults
    assert (record.error.task, record.replayed, record.without) == (1, 3, ())


def fail(pipelined: dapple.PipelinedModel, times: int) -> None:
    """Has the next steps fail as TensorFlow tells of links that break, and sometimes of an operator that fails."""
    left = itertools.count(1)
    run = pipelined._engine.run

    def fails(*arguments: Any, **options: Any) -> Any:
        if next(left) <= times:
            raise tf.errors.AbortedError(None, None, "Step 17 cancelled.\x1b]0;title\nCancelling rendezvous.")
        return run(*arguments, **options)

    pipelined._engine.__dict__["run"] = fails


def test_a_link_that_breaks_and_is_whole_again(workers: LocalWorkers) -> None:
    """Packets that were dropped one way for half a minute ended training: no worker was lost."""
    expected, history = undisturbed_fit(workers)
    pipelined = transform(workers)
    assert fit(pipelined, At(4 + 3, lambda: fail(pipelined, 1))) == history
    assert_same(ended(pipelined), expected)
    (record,) = pipelined.faults
    assert str(record.error) == "a run was cancelled, though all workers answer: Step 17 cancelled.\\x1b]0;title"


@pytest.mark.parametrize(("label", "tries", "text"), [(99, 0, "label value of 99"), (1, 1, "Step 17 cancelled")])
def test_an_operator_that_fails_is_no_lost_worker(workers: LocalWorkers, label: int, tries: int, text: str) -> None:
    """Plain Keras' error is known at once, and any other one at the second attempt."""
    pipelined = transform(workers)
    fail(pipelined, 2)
    with pytest.raises(dapple.StepError, match=text):
        pipelined.train_on_batch(X[:BATCH], np.full(BATCH, label))
    assert len(pipelined.faults) == tries
    pipelined.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("action", ["restart", "replan"])
def test_keys_that_expire_before_a_recovery(
    workers: LocalWorkers, action: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error was of the keys alone, without the worker and the step."""

    def expired(_: dapple.Cluster) -> None:
        raise dapple.ClusterError("TLS: certificate has expired")

    pipelined = transform(workers, faults=dapple.FaultPolicy(action, notice_seconds=2.0, wait_seconds=0.0))
    train(pipelined, range(2))
    end_server(workers)
    monkeypatch.setattr(dapple.Cluster, "keys", property(expired))
    with pytest.raises(
        dapple.WorkerLostError, match=r"worker 1 .* it isn't back: TLS: .* expired; it ran .* finished step is 2;"
    ):
        train(pipelined, range(2, 3))
    pipelined.close(sync=False)


@pytest.mark.thorough
def test_a_worker_that_is_just_restarting(workers: LocalWorkers) -> None:
    cluster = dapple.Cluster.of_servers(workers.addresses[:2])
    workers.kill(1)
    with pytest.raises(dapple.ClusterError, match=r"worker 1 .* can't be reached"):
        dapple.transform(build(), cluster, PARALLEL)
    workers.restart(1, wait=False)
    pipelined = dapple.transform(build(), cluster, PARALLEL, faults=RESTART)
    train(pipelined, range(1))
    pipelined.close()


@pytest.mark.few(1)
@pytest.mark.parametrize("number", [1, 4], ids=["first step", "first step of an epoch"])
def test_faults_before_anything_was_trained(workers: LocalWorkers, number: int) -> None:
    expected, _ = undisturbed_fit(workers)
    pipelined = transform(workers)

    class Before(keras.callbacks.Callback):
        left = number

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self.left -= 1
            if self.left == 0:
                end_server(workers)

    fit(pipelined, Before())
    assert len(pipelined.faults) == 1
    assert_same(ended(pipelined), expected)


@pytest.mark.thorough
def test_going_on_without_a_worker(workers: LocalWorkers) -> None:
    """Down to one; another plan rounds differently."""
    plan = dapple.Plan.manual(["first", "second"], [[0, 1], [2], [3]], 2, BATCH)
    expected = undisturbed(workers, lambda pipelined: train(pipelined, range(8)), plan=plan)
    policy = dapple.FaultPolicy("replan", notice_seconds=2.0, wait_seconds=0.0)
    pipelined = transform(workers, plan, policy)
    train(pipelined, range(3))
    workers.kill(2)
    train(pipelined, range(3, 5))
    assert pipelined.plan.devices == ((0, 1), (2,))
    assert pipelined.cluster.addresses == (*workers.addresses[:2], workers.addresses[3])
    workers.kill(0)
    workers.kill(3)
    train(pipelined, range(5, 8))
    assert pipelined.plan.devices == ((0,),)
    assert pipelined.evaluate(X, Y, verbose=0)
    assert [len(record.without) for record in pipelined.faults] == [1, 2]
    assert_same(ended(pipelined), expected, 1e-5)


@pytest.mark.thorough
def test_another_worker_is_lost_as_training_goes_on_without_the_first(
    workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers of lost workers were taken for those in the cluster without the first: a third one was left out."""
    plan = dapple.Plan.manual(["first", "second"], [[0, 1], [2], [3]], 2, BATCH)
    expected = undisturbed(workers, lambda pipelined: train(pipelined, range(4)), plan=plan)
    check_ports = connection_module.check_ports

    def disturbed(*arguments: Any) -> None:
        if len(arguments[0]) == 3:
            monkeypatch.setattr(connection_module, "check_ports", check_ports)
            workers.kill(1)
        check_ports(*arguments)

    pipelined = transform(workers, plan, dapple.FaultPolicy("replan", notice_seconds=2.0, wait_seconds=0.0))
    train(pipelined, range(2))
    monkeypatch.setattr(connection_module, "check_ports", disturbed)
    workers.kill(2)
    train(pipelined, range(2, 4))
    assert pipelined.cluster.addresses == (workers.addresses[0], workers.addresses[3])
    (record,) = pipelined.faults
    assert record.without == tuple(workers.addresses[1:3])
    assert_same(ended(pipelined), expected, 1e-5)


@pytest.mark.thorough
def test_operators_are_placed_anew_without_a_worker(workers: LocalWorkers) -> None:
    """Also with a profile, from which stages of replicas would be planned."""
    plan = dapple.Plan.by_operators(3, BATCH)
    cluster = dapple.Cluster.of_servers(workers.addresses[:3])
    profile = dapple.profile(build(), BATCH, cluster=dapple.Cluster.local(2, kind="cpu"), cache=False, repeats=1)
    options: dict[str, Any] = {"operator_costs": OperatorCosts(), "profile": profile}
    undisturbed_one = dapple.transform(build(), cluster, plan, **options)
    train(undisturbed_one, range(5))
    expected = ended(undisturbed_one)
    policy = dapple.FaultPolicy("replan", notice_seconds=2.0, wait_seconds=0.0)
    pipelined = dapple.transform(build(), cluster, plan, faults=policy, **options)
    train(pipelined, range(3))
    workers.kill(0)
    train(pipelined, range(3, 5))
    assert pipelined.plan == dapple.Plan.by_operators(2, BATCH)
    assert_same(ended(pipelined), expected, 1e-5)


@pytest.mark.thorough
def test_errors_are_raised_and_the_model_can_be_used_again(workers: LocalWorkers) -> None:
    def does(pipelined: dapple.PipelinedModel) -> None:
        train(pipelined, range(2))
        pipelined.sync()
        train(pipelined, range(3, 6))

    expected = undisturbed(workers, does)
    pipelined = transform(workers, faults=dapple.FaultPolicy(notice_seconds=2.0))
    train(pipelined, range(2))
    pipelined.sync()
    train(pipelined, range(2, 3))
    workers.kill(1)
    with pytest.raises(dapple.WorkerLostError, match=r"it ran stage 0; the last finished step is 3; .* last sync"):
        train(pipelined, range(3, 4))
    with pytest.raises(dapple.ClusterError, match="worker 1"):
        train(pipelined, range(3, 4))
    mend(workers)
    train(pipelined, range(3, 6))
    assert_same(ended(pipelined), expected)
    assert not pipelined.faults


@pytest.mark.thorough
@pytest.mark.parametrize("action", ["restart", "replan"])
def test_a_worker_that_comes_back_with_fewer_devices(action: str) -> None:
    plan = dapple.Plan.manual(["first"], [[0, 1], [2, 3]], 1, BATCH)
    policy = dapple.FaultPolicy(action, notice_seconds=2.0, wait_seconds=0.0)
    with LocalWorkers(2, devices=2, echo=lambda *_: None) as workers:
        pipelined = dapple.transform(build(), dapple.Cluster.of_servers(workers.addresses), plan, faults=policy)
        train(pipelined, range(2))
        workers.devices = 1
        workers.restart(1)
        if action == "restart":
            with pytest.raises(dapple.WorkerLostError, match="has 1 CPU device, but the cluster has 2 CPU devices of"):
                train(pipelined, range(2, 3))
        else:
            train(pipelined, range(2, 4))
            assert pipelined.plan.devices == ((0, 1),)
            (record,) = pipelined.faults
            assert record.without == (workers.addresses[1],)
        pipelined.close(sync=False)


# ---- values that others have assigned or restored


@pytest.mark.thorough
def test_loaded_values_are_not_forgotten(workers: LocalWorkers) -> None:
    """`load` makes the model's values count: batches before it don't matter any more, nor checkpoints."""

    def does(pipelined: dapple.PipelinedModel, fault: Callable[[], None] = lambda: None) -> None:
        train(pipelined, range(3))
        pipelined.model.set_weights([weight * 2 for weight in initial])
        pipelined.load()
        fault()
        train(pipelined, range(3, 5))

    initial = build().get_weights()
    expected = undisturbed(workers, does)
    pipelined = transform(workers)
    does(pipelined, lambda: end_server(workers))
    assert len(pipelined.faults) == 1
    assert_same(ended(pipelined), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("use", ["train", "evaluate"])
@pytest.mark.parametrize("when", ["before", "during"])
def test_restored_values_are_not_forgotten(workers: LocalWorkers, tmp_path: Path, use: str, when: str) -> None:
    """A checkpoint that is on the devices only, or not even there, as nothing has been run yet."""
    pipelined = transform(workers)
    train(pipelined, range(2))
    path = pipelined.save_checkpoint(tmp_path)
    if use == "train":
        train(pipelined, range(2, 4))
    else:
        expected_results = pipelined.evaluate(X, Y, verbose=0)
    expected = ended(pipelined)

    pipelined = transform(workers)
    pipelined.restore_checkpoint(path)
    if when == "before":
        end_server(workers)
    else:
        run = type(pipelined._engine).run

        def once(engine: Any, *arguments: Any, **options: Any) -> Any:
            pipelined._engine.__dict__.pop("run")
            end_server(workers)
            return run(engine, *arguments, **options)

        pipelined._engine.__dict__["run"] = once.__get__(pipelined._engine)
    if use == "train":
        train(pipelined, range(2, 4))
    else:
        assert pipelined.evaluate(X, Y, verbose=0) == expected_results
    assert len(pipelined.faults) == 1
    pipelined.sync()
    assert_same(ended(pipelined), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("next_use", ["train", "sync"])
def test_what_is_assigned_after_a_restoration_is_not_forgotten(
    workers: LocalWorkers, tmp_path: Path, next_use: str
) -> None:
    """Nothing was trained since, so that the checkpoint was read again, over what had been assigned."""
    pipelined = transform(workers)
    train(pipelined, range(1))
    path = pipelined.save_checkpoint(tmp_path)
    pipelined.close()

    def does(pipelined: dapple.PipelinedModel, fault: Callable[[], None] = lambda: None) -> None:
        pipelined.restore_checkpoint(path)
        pipelined.evaluate(X, Y, verbose=0)
        kernel = pipelined.model.get_layer("second").kernel
        kernel.assign(kernel * 0.5)
        pipelined.optimizer.learning_rate = 0.01
        fault()
        if next_use == "train":
            train(pipelined, range(1, 3))

    expected = undisturbed(workers, does)
    pipelined = transform(workers)
    does(pipelined, lambda: end_server(workers, 0))
    pipelined.sync()
    assert pipelined.faults
    assert_same(ended(pipelined), expected)


@pytest.mark.thorough
def test_workers_stay_this_process_own_when_training_decides_anew_where_variables_are(workers: LocalWorkers) -> None:
    """Evaluation came first; the session that followed its own was on workers that had been given back, and hung."""
    pipelined = transform(workers)
    pipelined.evaluate(X, Y, verbose=0)
    used = range(max(max(pipelined.plan.devices)) + 1)
    servers = [children(workers.processes[worker].pid) for worker in used]
    train(pipelined, range(1))
    assert [children(workers.processes[worker].pid) for worker in used] == servers
    pipelined.close()


@pytest.mark.thorough
def test_what_an_engine_restored_is_forgotten_with_it(workers: LocalWorkers, tmp_path: Path) -> None:
    """A fault of the next engine brought the checkpoint back, over all that had been assigned since."""
    pipelined = transform(workers)
    train(pipelined, range(2))
    path = pipelined.save_checkpoint(tmp_path / "restored")
    pipelined.restore_checkpoint(path)
    pipelined.close()
    pipelined.set_weights([np.full_like(value, 0.5) for value in pipelined.get_weights()])
    pipelined.save_checkpoint(tmp_path / "assigned")
    end_server(workers)
    pipelined.predict(X, verbose=0)
    assert pipelined.faults
    pipelined.close()
    for value in pipelined.model.get_weights():
        np.testing.assert_array_equal(value, np.full_like(value, 0.5))


@pytest.mark.thorough
def test_verification_begins_again_after_a_fault(workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its steps aren't the user's: nothing trains on them again, so that those before the fault were missing."""
    pipelined = transform(workers)
    train(pipelined, range(1))
    run, count = Runtime.run, itertools.count()

    def disturbed(runtime: Runtime, *args: Any, **kwargs: Any) -> Any:
        result = run(runtime, *args, **kwargs)
        if next(count) == 2:  # the gradients, and the first two steps
            end_server(workers)
        return result

    monkeypatch.setattr(Runtime, "run", disturbed)
    pipelined.verify(*batch(1), steps=3, float64=False).assert_equal()
    assert pipelined.faults
    pipelined.close()


@pytest.mark.thorough
def test_collected_with_its_model_it_asks_nothing_of_its_session(
    workers: LocalWorkers, capfd: pytest.CaptureFixture[str]
) -> None:
    """Python frees a session before it asks the model: "Attempted to use a closed Session", out of nowhere."""

    class Holder:
        pass

    holder = Holder()
    holder.pipelined, holder.itself = transform(workers), holder
    train(holder.pipelined, range(1))
    del holder
    gc.collect()
    wait_until(lambda: not shared_connections._connections)
    assert "Exception ignored" not in capfd.readouterr().err


@pytest.mark.thorough
def test_a_plan_is_made_of_what_workers_take(workers: LocalWorkers) -> None:
    """Profiled on a worker, whose batches come from the client, not from a device of a process on its own."""
    cluster = dapple.Cluster.of_servers(workers.addresses[:2])
    profile = dapple.profile(build(), (2, BATCH), cluster=cluster, cache=False, repeats=1)
    assert profile.method == "layers"
    assert all(layer.forward.at(BATCH) > 0 for layer in profile.layers)


@pytest.mark.thorough
def test_going_back_to_an_older_checkpoint(workers: LocalWorkers, tmp_path: Path) -> None:
    """The newer one isn't what recovery begins with then."""

    def does(pipelined: dapple.PipelinedModel, name: str, fault: Callable[[], None] = lambda: None) -> None:
        train(pipelined, range(1))
        path = pipelined.save_checkpoint(tmp_path / name)
        train(pipelined, range(1, 4))
        pipelined.save_checkpoint(tmp_path / name)
        pipelined.restore_checkpoint(path)
        train(pipelined, range(5, 6))
        fault()
        train(pipelined, range(6, 8))

    expected = undisturbed(workers, lambda pipelined: does(pipelined, "one"))
    pipelined = transform(workers)
    does(pipelined, "two", lambda: end_server(workers))
    assert len(pipelined.faults) == 1
    assert_same(ended(pipelined), expected)


@pytest.mark.thorough
@pytest.mark.parametrize(("saves", "damage"), [(1, "deleted"), (2, "flipped")])
def test_a_checkpoint_that_is_damaged_is_not_what_recovery_rests_on(
    workers: LocalWorkers, tmp_path: Path, saves: int, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The base before it and the batches since then are kept until the next one."""
    expected = undisturbed(workers, lambda pipelined: train(pipelined, range(6)))
    pipelined = transform(workers)
    train(pipelined, range(2))
    for step in range(2, 2 + saves):
        path = pipelined.save_checkpoint(tmp_path)
        train(pipelined, range(step, step + 1))
    if damage == "deleted":
        shutil.rmtree(path)
    else:
        data = path / "shard-0.data-00000-of-00001"
        content = data.read_bytes()
        data.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    end_server(workers)
    train(pipelined, range(2 + saves, 6))
    (record,) = pipelined.faults
    assert record.replayed == (3 if saves == 1 else 2)
    assert ("going back to the values in memory" if saves == 1 else "save-000001-step-2, 2 steps") in caplog.text
    assert_same(ended(pipelined), expected)


@pytest.mark.thorough
def test_arrays_that_are_used_again(workers: LocalWorkers) -> None:
    """A loop may fill the same array with each batch."""

    def does(pipelined: dapple.PipelinedModel, fault: Callable[[], None] = lambda: None) -> None:
        x, y = np.empty((BATCH, 4), "float32"), np.empty(BATCH, "int64")
        for step in range(4):
            x[:], y[:] = batch(step)
            if step == 3:
                fault()
            pipelined.train_on_batch(x, y)

    expected = undisturbed(workers, does)
    pipelined = transform(workers)
    does(pipelined, lambda: end_server(workers))
    assert_same(ended(pipelined), expected)


@pytest.mark.thorough
def test_two_models_on_one_cluster(workers: LocalWorkers) -> None:
    """Each goes on when it next meets the fault."""
    expected = undisturbed(workers, lambda pipelined: train(pipelined, range(4)))
    one, other = transform(workers), transform(workers, PIPELINE)
    train(one, range(2))
    train(other, range(2))
    end_server(workers)
    train(one, range(2, 4))
    train(other, range(2, 4))
    assert_same(ended(one), expected)
    assert_same(ended(other), expected, 1e-5)


@pytest.mark.thorough
def test_a_fault_of_another_model_is_not_survived_in_its_place(workers: LocalWorkers) -> None:
    """A model that shares layers is looked at before each step: its lost worker was taken for one of this model's."""
    model, plan = build(), dapple.Plan.manual([], [[0]], 1, BATCH)
    lost = dapple.transform(model, dapple.Cluster.of_servers(workers.addresses[:1]), plan)
    twin = keras.Model(model.inputs, model.outputs)
    twin.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy")
    here = dapple.transform(twin, dapple.Cluster.local(1, kind="cpu"), plan, faults=RESTART)
    train(here, range(1))
    train(lost, range(1))
    end_server(workers, 0)
    with pytest.raises(dapple.WorkerLostError):
        train(here, range(1, 2))
    assert not here.faults
    lost.close(sync=False)
    here.close()


@pytest.mark.thorough
def test_nobody_waits_for_ever(workers: LocalWorkers) -> None:
    """All workers are there, but one is in use by this process without the other, which had been given up."""
    policy = dapple.FaultPolicy("replan", notice_seconds=1.0, wait_seconds=0.0)
    one, other = transform(workers, faults=policy), transform(workers, faults=policy)
    train(one, range(1))
    train(other, range(1))
    workers.kill(1)
    train(one, range(1, 2))
    assert len(one.cluster.addresses) == 1
    workers.restart(1)
    with pytest.raises(dapple.WorkerLostError, match="in use by this process already, in another cluster of 1 worker"):
        train(other, range(1, 2))
    one.close()
    train(other, range(1, 2))
    other.close()


@pytest.mark.thorough
@pytest.mark.parametrize("action", ["raise", "restart"])
def test_closing_frees_workers_also_when_one_is_lost(workers: LocalWorkers, action: str) -> None:
    pipelined = transform(workers, faults=dapple.FaultPolicy(action, notice_seconds=2.0, wait_seconds=0.0))
    train(pipelined, range(1))
    workers.kill(1)
    while pipelined.lost is None:  # Until then the values may still be had from the other worker.
        time.sleep(0.01)
    with pytest.raises(dapple.WorkerLostError, match=r"worker 1 .* keeps the values of its last sync"):
        pipelined.close()
    assert not shared_connections._connections
    pipelined.close()
    mend(workers)
    train(pipelined, range(2))
    assert_same(ended(pipelined), undisturbed(workers, lambda again: train(again, range(2))))


@pytest.mark.thorough
def test_ctrl_c_while_waiting(workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model has the values of its last sync, not those of a part of the batches since."""

    def pause(seconds: float) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(seconds)

    pipelined = transform(workers)
    train(pipelined, range(1))
    expected = values(pipelined.sync())
    train(pipelined, range(1, 3))
    workers.kill(1)
    # Between two attempts to reach the worker, whenever that is.
    monkeypatch.setattr(recovery, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=pause))
    with pytest.raises(KeyboardInterrupt):
        train(pipelined, range(3, 4))
    assert_same(ended(pipelined), expected)


@pytest.mark.thorough
@pytest.mark.parametrize("plan", [PARALLEL, PIPELINE])
def test_what_is_assigned_between_batches_is_assigned_again(workers: LocalWorkers, plan: dapple.Plan) -> None:
    """Weights that are clipped after each batch: read from workers, assigned there, and once more after a fault."""

    def clip(pipelined: dapple.PipelinedModel, fault: bool) -> None:
        for step in range(4):
            train(pipelined, range(step, step + 1))
            kernel = pipelined.model.get_layer("second").kernel
            kernel.assign(keras.ops.clip(kernel, -0.05, 0.05))
            assert int(pipelined.optimizer.iterations) == step + 1
            if fault and step == 2:
                end_server(workers)

    expected = undisturbed(workers, lambda pipelined: clip(pipelined, fault=False), plan=plan)
    assert_same(undisturbed(workers, lambda pipelined: clip(pipelined, fault=True), plan=plan), expected)
    plain = build()
    plain.run_eagerly = True
    for step in range(4):
        plain.train_on_batch(*batch(step))
        plain.get_layer("second").kernel.assign(keras.ops.clip(plain.get_layer("second").kernel, -0.05, 0.05))
    assert_same(expected, values(plain), 1e-4)


# ---- what faults leave behind

FAULTS_IN_A_ROW = 20


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


@pytest.mark.thorough
@pytest.mark.parametrize("action", ["restart", "raise"])
def test_faults_leave_no_object_and_no_thread(workers: LocalWorkers, action: str) -> None:
    """Errors kept frames, and with them batches, iterators and models.

    TensorFlow waited for two minutes as it freed such an iterator, in the middle of another step.
    """

    # Tests before may have left calls: TensorFlow closes a session with a worker that is lost for good only once a
    # server listens at the worker's port again, and this test has two workers of four.
    earlier = set(remote_session._running)
    pipelined = transform(workers, faults=dapple.FaultPolicy(action, **FAULTS))
    datasets: list[weakref.ref[Any]] = []

    def fault(step: int) -> None:
        dataset = tf.data.Dataset.from_tensors(batch(step))
        datasets.append(weakref.ref(dataset))
        end_server(workers)
        try:
            pipelined.fit(dataset, verbose=0)
        except dapple.WorkerLostError:
            assert action == "raise"
            mend(workers)
            train(pipelined, range(1))

    train(pipelined, range(2))
    fault(2)
    wait_until(lambda: remote_session._running <= earlier)
    before, threads = ours(), threading.active_count()
    for step in range(3, 3 + FAULTS_IN_A_ROW):
        fault(step)
    wait_until(lambda: remote_session._running <= earlier)
    wait_until(lambda: threading.active_count() <= threads)
    left = ours() - before
    if action == "restart":
        assert [left.pop(kind) for kind in ("FaultRecord", "WorkerLostError")] == [FAULTS_IN_A_ROW] * 2
        assert left.pop("Trained", 0) <= FAULTS_IN_A_ROW  # The batches since the last sync.
        assert not any(record.error.__traceback__ for record in pipelined.faults)
    assert not left
    assert not [reference for reference in datasets if reference() is not None]
    pipelined.close()
