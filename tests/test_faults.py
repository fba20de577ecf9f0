"""Training on workers that fail in any order ends with the values that it ends with undisturbed, and those of Keras."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, use_float64
from fake_session import SECONDS, FakeWorkers, Fault
from models_for_tests import assert_close, classifier, values, variables
from workers import PATIENCE, wait_until

import dapple_tf as dapple
from dapple_tf.checkpoints.checkpoint_manifest import CheckpointError
from dapple_tf.clusters.membership import Membership
from dapple_tf.network.inquiry import reachable
from dapple_tf.tools.hosts import LocalWorkers

BATCH = 6
EXACT = TOLERANCE["float64"]
X = np.random.default_rng(0).normal(size=(4 * BATCH, 4))
Y = np.random.default_rng(1).integers(0, 3, size=4 * BATCH)
PLANS = (
    dapple.Plan.manual([], [[0, 1]], 1, BATCH),
    dapple.Plan.manual(["first"], [[0], [1, 2]], 2, BATCH),
    dapple.Plan.manual(["first", "second"], [[0, 1], [2], [3]], 2, BATCH, "gpipe", carried_updates=1),
)
KINDS = ("dies", "hangs", "breaks", "parted", "cancelled", "stuck", "slow")
SCRIPTS = (
    "train train rate small assign train look assign train",
    "evaluate train train load train train sync train",
    "train save restore evaluate assign rate sync train train",
    "train save save_aside train train save_aside restore train save_aside train",
    "train save train close restore train look train",
    "train save close restore predict assign rate train train",
    "train train save restore close assign save_aside predict close",
    "train fit rate assign evaluate fit train",
    "train fit_there small fit_there save restore train",
    "train look load assign save train predict rate restore train sync small",
)


@pytest.fixture(autouse=True)
def _float64() -> None:
    use_float64()


def build() -> keras.Model:
    keras.utils.set_random_seed(3)
    return classifier(optimizer=keras.optimizers.Adam(0.05), metrics=["accuracy"])


class User:
    """Does what a script says with a plain or a pipelined model, which gives the same results."""

    def __init__(self, own: Any, folder: pathlib.Path, closed: Callable[[], object] = lambda: None) -> None:
        self._own, self._folder, self._closed = own, folder, closed
        self._plain = isinstance(own, keras.Model)
        self._model: keras.Model = own if self._plain else own.model
        self._saved: Any = None
        self._x, self._y, self._count = np.empty((BATCH, 4)), np.empty(BATCH, "int64"), 0

    def follow(self, script: str) -> list[Any]:
        """Returns losses, histories, outputs and values that are read on the way, and the last values."""
        results = [getattr(self, f"_{action}")() for action in script.split()]
        self._sync()
        return [result for result in results if result is not None] + values(self._model)

    def _train(self, size: int = BATCH) -> Any:
        """On the next batch, in the same arrays as the one before."""
        start, self._count = self._count % 4 * BATCH, self._count + 1
        self._x[:], self._y[:] = X[start : start + BATCH], Y[start : start + BATCH]
        return self._own.train_on_batch(self._x[:size], self._y[:size])

    def _small(self) -> Any:
        return self._train(BATCH - 2)

    def _fit(self) -> Any:
        return self._own.fit(X, Y, BATCH, shuffle=False, verbose=0, validation_data=(X[:8], Y[:8])).history

    def _fit_there(self) -> Any:
        """Two epochs of different orders, and other data in validation, which workers read themselves."""
        keras.utils.set_random_seed(3)
        data, other = (
            tf.data.Dataset.from_tensor_slices(own).shuffle(10, seed=4).batch(BATCH) for own in ((X, Y), (X[:8], Y[:8]))
        )
        if not self._plain:
            data, other = dapple.on_workers(data), dapple.on_workers(other)
        return self._own.fit(data, epochs=2, validation_data=other, verbose=0).history

    def _evaluate(self) -> Any:
        return self._own.evaluate(X[:8], Y[:8], BATCH, verbose=0)

    def _predict(self) -> Any:
        return self._own.predict(X[:8], BATCH, verbose=0)

    def _assign(self) -> None:
        kernel = self._model.get_layer("second").kernel
        kernel.assign(kernel * 0.5)

    def _rate(self) -> None:
        self._model.optimizer.learning_rate = 0.9 * float(self._model.optimizer.learning_rate)

    def _look(self) -> Any:
        return self._model.get_layer("first").bias.numpy(), self._model.optimizer.iterations.numpy()

    def _sync(self) -> None:
        if not self._plain:
            self._own.sync()

    def _save(self) -> None:
        if self._plain:
            self._saved = values(self._model)
            return
        try:
            self._saved = self._own.save_checkpoint(self._folder)
        except CheckpointError:  # A fault came while servers wrote it.
            self._saved = self._own.save_checkpoint(self._folder)

    def _save_aside(self) -> None:
        if not self._plain:
            self._own.save_checkpoint(self._folder / "aside", wait=False)

    def _restore(self) -> None:
        if not self._plain:
            self._own.restore_checkpoint(self._saved)
            return
        for variable, value in zip(variables(self._model), self._saved, strict=True):
            variable.assign(value)

    def _load(self) -> None:
        self._model.set_weights([weight * 1.25 for weight in self._model.get_weights()])
        if not self._plain:
            self._own.load()

    def _close(self) -> None:
        if not self._plain:
            self._own.close()
            self._closed()


class Trained:
    """A pipelined model on fake workers, for one script after the other: its steps stay prepared.

    Attributes:
        workers: its workers.
        pipelined: the model.
    """

    def __init__(self, plan: dapple.Plan, action: str) -> None:
        self.workers = FakeWorkers(max(map(max, plan.devices)) + 1)
        waits = 0.0 if action == "replan" else SECONDS
        policy = dapple.FaultPolicy(action, notice_seconds=1.0, wait_seconds=waits, replay_steps=5)
        with self.workers.used():
            self.pipelined = dapple.transform(build(), self.workers.cluster, plan, faults=policy)
        self._initial = values(self.pipelined.model)
        self._undisturbed: dict[str, tuple[list[Any], int]] = {}

    def follow(self, script: str, folder: pathlib.Path, faults: Mapping[int, Fault] | None = None) -> list[Any]:
        """Begins anew, with the values of the beginning; returns what the script gives."""
        with self.workers.used():
            for variable, value in zip(variables(self.pipelined.model), self._initial, strict=True):
                variable.assign(value)
            self.pipelined.reset_metrics()
            self.pipelined.load()
            self.workers.begin(faults or {})
            # The start of a session tells of workers that are parted, whatever the policy: test_elastic.py.
            results = User(self.pipelined, folder, self.workers.join).follow(script)
        assert not faults or self.workers.met or min(faults) >= self.workers.calls
        return results

    def undisturbed(self, script: str, folder: pathlib.Path) -> tuple[list[Any], int]:
        """What a script gives without faults, which is compared with plain Keras, and the number of its calls."""
        if script not in self._undisturbed:
            results = self.follow(script, folder)
            plain = build()
            plain.run_eagerly = True
            assert_close(results, User(plain, folder).follow(script), EXACT)
            self._undisturbed[script] = results, self.workers.calls
        return self._undisturbed[script]


@functools.cache
def trained(plan: dapple.Plan, action: str) -> Trained:
    """The model of a plan, for all scripts."""
    made = Trained(plan, action)
    _TRAINED.append(made)
    return made


_TRAINED: list[Trained] = []


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    """Others find no connection of these models left."""
    yield
    trained.cache_clear()
    for own in _TRAINED:
        with own.workers.used():
            own.pipelined.close(sync=False)
    _TRAINED.clear()


def drawn_faults(seed: int, kinds: tuple[str, ...], calls: int, count: int) -> dict[int, Fault]:
    """One to three faults; those after the first one may come while training recovers from it.

    Args:
        seed: draws them; of seeds in a row, the first faults are of all kinds.
        kinds: kinds of the first one.
        calls: the script's number of calls.
        count: number of workers.
    """
    generator = np.random.default_rng(seed)
    faults: dict[int, Fault] = {}
    kind, number = kinds[seed % len(kinds)], int(generator.integers(0, calls))
    for _ in range(generator.integers(1, 4)):
        runs = bool(generator.integers(0, 2))
        faults[number] = Fault(kind, int(generator.integers(0, count)), runs, int(generator.integers(0, 6)))
        number += int(generator.integers(1, 8))
        kind = str(generator.choice([other for other in KINDS if other != "cancelled"]))  # Two are no lost worker.
    return faults


def own_of(seed: int, action: str) -> tuple[Trained, str]:
    """Each script has its plan; seeds in a row have all of them."""
    number = seed % len(SCRIPTS)
    return trained(PLANS[number % len(PLANS)], action), SCRIPTS[number]


@pytest.mark.parametrize("seed", range(3 * len(KINDS)))
def test_any_faults_in_any_order(seed: int, tmp_path: pathlib.Path) -> None:
    """To the bit, if the workers come back."""
    own, script = own_of(seed, "restart")
    expected, calls = own.undisturbed(script, tmp_path / "undisturbed")
    faults = drawn_faults(seed, KINDS, calls, own.workers.cluster.num_devices)
    print(f"{script}\n{faults}")
    before = len(own.pipelined.faults)
    try:
        results = own.follow(script, tmp_path, faults)
        print([str(record.error) for record in own.pipelined.faults[before:]])
        assert_close(results, expected, 0.0)
    except BaseException:
        trained.cache_clear()
        raise


@pytest.mark.parametrize("seed", range(6))
def test_any_faults_with_fewer_workers(seed: int, tmp_path: pathlib.Path) -> None:
    """Training goes on without workers and takes them in again; another plan rounds differently."""
    (without, script), (whole, _) = (own_of(seed, action) for action in ("replan", "restart"))
    expected, calls = whole.undisturbed(script, tmp_path / "undisturbed")
    workers, pipelined = without.workers, without.pipelined
    faults = drawn_faults(seed, ("dies", "parted", "hangs", "dies"), calls, workers.cluster.num_devices)
    print(f"{script}\n{faults}")
    results = without.follow(script, tmp_path, faults)
    print([(str(record.error), record.without) for record in pipelined.faults], pipelined.growths)
    assert_close(results, expected, EXACT)
    workers.begin({})
    with workers.used():
        for _ in range(2):
            pipelined.train_on_batch(X[:BATCH], Y[:BATCH])
        pipelined.close()
    assert (pipelined.cluster, pipelined.plan) == (workers.cluster, whole.pipelined.plan)


def test_four_real_workers_three_and_four_again(
    workers: LocalWorkers, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one fit, with validation and checkpoints; steps that were prepared before the growth are made again."""

    class Disturb(keras.callbacks.Callback):
        steps = 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.steps += 1
            if self.steps == 3:
                workers.kill(2)
            if self.steps == 6:
                workers.restart(2)
            wait_until(answered)

    def answered() -> bool:
        answer = pipelined._runtime.elastic.members._answer
        return answer is None or not answer.empty()

    def fit(model: Any, data: Any, **options: Any) -> Any:
        return model.fit(data, epochs=3, verbose=0, validation_data=(X, Y), **options).history

    def data() -> tf.data.Dataset:
        """In another order in each epoch, which checkpoints don't change."""
        tf.random.set_seed(4)
        return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(len(X), seed=5).batch(BATCH)

    ask_after = Membership._ask_after
    monkeypatch.setattr(Membership, "_ask_after", lambda own, pause: ask_after(own, 0.0))
    wait_until(lambda: all(reachable(workers.addresses, PATIENCE)))
    cluster = dapple.Cluster.of_servers(workers.addresses)
    policy = dapple.FaultPolicy("replan", notice_seconds=2.0, wait_seconds=0.0)
    pipelined = dapple.transform(build(), cluster, PLANS[2], faults=policy)
    saved = dapple.Checkpointing(tmp_path, every_steps=5)
    history = fit(pipelined, dapple.on_workers(data()), callbacks=[Disturb()], checkpoint=saved)
    assert (pipelined.plan, pipelined.cluster) == (PLANS[2], cluster)
    (fault,) = pipelined.faults
    (growth,) = pipelined.growths
    assert fault.without == growth.added == (workers.addresses[2],)
    assert 6 <= growth.step < 12
    assert (growth.replayed, growth.present, growth.latency) == (0, None, None)
    pipelined.close()
    plain = build()
    assert_close(history, fit(plain, data()), EXACT)
    assert_close(values(pipelined.model), values(plain), EXACT)
