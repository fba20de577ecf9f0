"""``fit`` that was interrupted goes on from a checkpoint as if nothing had happened, to the last bit."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import variables_of
from keras.src.backend.tensorflow.trainer import TFEpochIterator
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter
from models_for_tests import classifier, samples, transform

import dapple_tf as dapple
from dapple_tf.checkpoints.checkpoint_files import checkpoints
from dapple_tf.checkpoints.checkpoint_manifest import CheckpointError
from dapple_tf.checkpoints.data_position import TrainingData
from dapple_tf.checkpoints.data_sources import ArraySource, PyDatasetSource

COUNT = 31  # samples: four batches of 7, and one of 3
X, Y, _ = samples(COUNT)


class InterruptionError(Exception):
    """Something happened."""


class Log(keras.callbacks.Callback):
    """Remembers what callbacks are told; raises after so many steps."""

    def __init__(self, stop_after: int | None = None) -> None:
        super().__init__()
        self.entries: list[Any] = []
        self._left = stop_after

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.entries.append((batch, dict(logs)))
        if self._left is not None:
            self._left -= 1
            if self._left == 0:
                raise InterruptionError

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.entries.append(("epoch", epoch, dict(logs)))


def dropout_model() -> keras.Model:
    keras.utils.set_random_seed(3)
    own = keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)
    return classifier(*own, optimizer=keras.optimizers.Adam(0.01), metrics=["accuracy"])


class Slices(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return X[7 * index : 7 * index + 7], Y[7 * index : 7 * index + 7]


def drawn() -> Iterator[Any]:
    draw = np.random.default_rng(1)
    while True:
        chosen = draw.integers(0, COUNT, 7)
        yield X[chosen], Y[chosen]


def slices() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y))


DATA: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled": lambda: {"x": slices().shuffle(COUNT, seed=5).batch(7).prefetch(2)},
    # Each round ends with a smaller batch, at which the next one is looked at.
    "rounds": lambda: {"x": slices().shuffle(COUNT, seed=5).batch(7).repeat(), "steps_per_epoch": 4},
    "arrays": lambda: {"x": X, "y": Y, "shuffle": "batch", "steps_per_epoch": 3, "validation_split": 0.3},
    "generator": lambda: {"x": drawn(), "steps_per_epoch": 4},
    "py_dataset": lambda: {"x": Slices(), "class_weight": {0: 1.0, 1: 2.0, 2: 0.5}},
}


def values(model: keras.Model) -> list[np.ndarray]:
    return [variable.numpy() for variable in variables_of(model)]


Pair = tuple[dapple.PipelinedModel, dapple.PipelinedModel, pathlib.Path]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """Two pipelined models, and a checkpoint with their first values; for many tests, as it takes long to make."""
    first, second = (transform(dropout_model()) for _ in range(2))
    return first, second, first.save_checkpoint(tmp_path_factory.mktemp("initial"))


def check_resumption(
    directory: pathlib.Path,
    pair: Pair,
    data: Callable[[], dict[str, Any]],
    *,
    every: int | None = 2,
    stop_after: int | None = 9,
    steps_per_execution: int = 1,
) -> None:
    """An undisturbed run, and one that is interrupted and goes on with another model and data that are made again.

    With ``stop_after=None`` another process has been interrupted after 9 steps.
    """
    ours, others, initial = pair

    def run(pipelined: dapple.PipelinedModel, name: str, stop: int | None = None, resume: bool = False) -> list[Any]:
        pipelined.model.steps_per_execution = steps_per_execution
        log = Log(stop)
        tf.random.set_seed(7)  # from which datasets have seeds, too
        random.seed(9 if resume else 8)
        settings = dapple.Checkpointing(directory / name, every_steps=every)
        with contextlib.suppress(InterruptionError):
            pipelined.fit(**data(), epochs=3, checkpoint=settings, resume=resume, callbacks=[log], verbose=0)
        return log.entries

    ours.restore_checkpoint(initial)
    whole = run(ours, "whole")
    expected = values(ours.model)
    first = whole[: 9 + 1]  # steps, and the end of an epoch
    if stop_after is not None:
        ours.restore_checkpoint(initial)
        first = run(ours, "parts", stop=stop_after)
        assert first == whole[: len(first)]
    if isinstance(data()["x"], tf.data.Dataset):
        assert all((path / "data.index").exists() for path in checkpoints(directory / "parts"))  # the iterator's state
    second = run(others, "parts", resume=True)
    assert 0 < len(second) < len(whole) <= len(first) + len(second)
    assert second == whole[-len(second) :]
    for own, other, variable in zip(values(others.model), expected, variables_of(others.model), strict=True):
        np.testing.assert_array_equal(own, other, err_msg=variable.path)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # Keras says this of data whose size it doesn't know.
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {}) for kind in DATA if kind != "shuffled"),  # that of the process that is killed
        ("shuffled", {"every": None}),
        ("shuffled", {"every": 3, "stop_after": 4, "steps_per_execution": 2}),
    ],
)
def test_data_go_on_where_they_were(tmp_path: pathlib.Path, pair: Pair, kind: str, options: dict[str, Any]) -> None:
    check_resumption(tmp_path, pair, DATA[kind], **options)


_KILLED = """
    import os, signal, sys
    from test_checkpoint_resume import DATA, dapple, dropout_model, keras, tf, transform

    class Kill(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if next(steps) == 9:
                os.kill(os.getpid(), signal.SIGKILL)

    steps = iter(range(1, 100))
    pipelined = transform(dropout_model())
    tf.random.set_seed(7)
    settings = dapple.Checkpointing(sys.argv[1], every_steps=2)
    pipelined.fit(**DATA["shuffled"](), epochs=3, checkpoint=settings, callbacks=[Kill()], verbose=0)
"""


def test_a_run_goes_on_in_another_process(tmp_path: pathlib.Path, pair: Pair) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(pathlib.Path(__file__).parent), *sys.path])}
    command = [sys.executable, "-c", textwrap.dedent(_KILLED), str(tmp_path / "parts")]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    check_resumption(tmp_path, pair, DATA["shuffled"], stop_after=None)


def test_a_run_begins_anew_is_over_or_is_prolonged(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture, pair: Pair
) -> None:
    """Callbacks may be in a list of Keras' own."""
    pipelined, _, initial = pair
    pipelined.restore_checkpoint(initial)
    settings, log = dapple.Checkpointing(tmp_path, every_steps=4), Log()
    callbacks = keras.callbacks.CallbackList([log], add_history=True, model=pipelined.model)

    def fit(epochs: int) -> keras.callbacks.History:
        log.entries.clear()
        return pipelined.fit(X, Y, epochs=epochs, checkpoint=settings, resume=True, callbacks=callbacks, verbose=0)

    with caplog.at_level(logging.INFO, "dapple_tf"):
        history = fit(2)
    assert history.epoch == [0, 1] and history.history["loss"][1] == log.entries[-1][2]["loss"]
    assert "has no checkpoint: training starts from the beginning" in caplog.text
    kept = checkpoints(tmp_path)
    assert kept[-1].name == "save-000003-step-10"
    fit(2)
    assert not log.entries
    for path in kept[1:]:
        shutil.rmtree(path)
    fit(2)
    assert [entry[0] for entry in log.entries] == [4, "epoch", 0, 1, 2, 3, 4, "epoch"]
    assert fit(3).epoch == [2]
    assert callbacks.callbacks == [log, history]


def test_a_damaged_checkpoint_does_not_block_the_older_ones(
    tmp_path: pathlib.Path, pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    """The newest ones were in the way for good."""
    damaged = ["shard-0.data-00000-of-00001", "checkpoint.json"]
    pipelined, _, initial = pair
    pipelined.restore_checkpoint(initial)
    settings = dapple.Checkpointing(tmp_path)
    pipelined.fit(X, Y, epochs=3, checkpoint=settings, verbose=0)
    expected = values(pipelined.model)
    saved = checkpoints(tmp_path)
    for path, file in zip(saved[::-1], damaged, strict=False):
        content = (path / file).read_bytes()
        (path / file).write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    history = pipelined.fit(X, Y, epochs=3, checkpoint=settings, resume=True, verbose=0)
    intact = saved[-1 - len(damaged)]
    assert caplog.text.count(f"training goes on from the older checkpoint {intact}, which is intact") == len(damaged)
    assert f"checkpoint {saved[-1]}" in caplog.text and f"{saved[-2]}/checkpoint.json" in caplog.text
    assert history.epoch == list(range(3 - len(damaged), 3))
    for own, other in zip(values(pipelined.model), expected, strict=True):
        np.testing.assert_array_equal(own, other)


def test_without_any_intact_checkpoint_or_with_a_newer_one_it_does_not_resume(
    tmp_path: pathlib.Path, pair: Pair
) -> None:
    pipelined, _, initial = pair
    pipelined.restore_checkpoint(initial)
    settings = dapple.Checkpointing(tmp_path)
    paths = [pipelined.save_checkpoint(tmp_path) for _ in range(2)]
    manifest = paths[-1] / "checkpoint.json"
    content = manifest.read_text()
    manifest.write_text(content.replace("checkpoint/2", "checkpoint/3"))
    with pytest.raises(CheckpointError, match=r"checkpoint\.json was written by a newer version of dapple_tf"):
        pipelined.fit(X, Y, checkpoint=settings, resume=True)
    for path in paths:
        (path / "client.index").unlink()
    manifest.write_text(content)
    with pytest.raises(CheckpointError, match=r"client\.index.*; none of the 2 checkpoints in .* is intact"):
        pipelined.fit(X, Y, checkpoint=settings, resume=True)


def test_mistakes_are_told(tmp_path: pathlib.Path, pair: Pair) -> None:
    pipelined = pair[0]
    with pytest.raises(ValueError, match="give checkpoint=Checkpointing"):
        pipelined.fit(X, Y, resume=True)
    with pytest.raises(TypeError, match="checkpoint is 'runs'"):
        pipelined.fit(X, Y, checkpoint="runs")
    for options, message in (({"every_steps": 0}, "every_steps is 0"), ({"keep": 0}, "keep is 0")):
        with pytest.raises(ValueError, match=message):
            dapple.Checkpointing(tmp_path, **options)
    pipelined.restore_checkpoint(pair[2])
    settings = dapple.Checkpointing(tmp_path, every_steps=3)
    with pytest.raises(InterruptionError):
        pipelined.fit(X, Y, checkpoint=settings, callbacks=[Log(4)], verbose=0)
    with pytest.raises(CheckpointError, match="written while training on a 'arrays', but now the data are a 'dataset'"):
        pipelined.fit(slices().batch(7), checkpoint=settings, resume=True)
    with pytest.raises(CheckpointError, match="in the middle of an epoch over data with samples 31, but now it is 30"):
        pipelined.fit(X[:30], Y[:30], checkpoint=settings, resume=True)


def shuffled(size: int = 20) -> tf.data.Dataset:
    return tf.data.Dataset.range(20).shuffle(size, seed=3)


def symbolic() -> tf.data.Options:
    options = tf.data.Options()
    options.experimental_symbolic_checkpoint = True
    return options


def stateful(batch: tf.Tensor) -> tf.Tensor:
    return batch + tf.random.uniform((), 0, 1, tf.int64)


ORDERS: dict[str, tuple[Callable[[], tf.data.Dataset], int | None]] = {
    "unknown size": (lambda: shuffled(6).filter(lambda number: number >= 0).batch(5), None),
    "steps": (lambda: shuffled().batch(5).repeat(), 3),
    "shuffled twice": (lambda: shuffled().map(lambda number: number).shuffle(7, seed=4).batch(5), None),
    "symbolic": (lambda: shuffled().batch(5).with_options(symbolic()), None),
    "no state": (lambda: shuffled().batch(5).map(stateful), None),
    "shuffled twice, no state": (lambda: shuffled().shuffle(7, seed=4).batch(5).map(stateful), None),
}


def epochs(data: Any, steps: int | None, first: int = 0, after: Callable[..., None] | None = None) -> list[list[int]]:
    """The numbers of epochs up to the third, as Keras' ``fit`` reads them."""
    iterator = TFEpochIterator(x=data, steps_per_epoch=steps, distribute_strategy=tf.distribute.get_strategy())
    iterator.reset()
    numbers: list[list[int]] = []
    for epoch in range(first, 3):
        numbers.append([])
        with iterator.catch_stop_iteration():
            for step, _, batches in iterator:
                if first == epoch and isinstance(data, TrainingData) and batches.skip():
                    continue
                numbers[-1] += np.ravel(next(batches)).tolist()
                if after is not None:
                    after(epoch, step + 1, sum(map(len, numbers)))
        if after is not None:
            after(epoch + 1, 0, sum(map(len, numbers)))
    return numbers


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
@pytest.mark.parametrize("kind", ORDERS)
def test_a_dataset_comes_in_the_order_that_keras_gives_it(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """``checkpoint=`` changed it from the second epoch on; a process that goes on at any position keeps it."""
    make, steps = ORDERS[kind]
    positions: list[Any] = []

    def after(epoch: int, step: int, count: int) -> None:
        positions.append((epoch, step, count, *data.position(epoch_over=step == 0)))

    def source() -> TrainingData:
        return TrainingData.of(dataset, batch_size=5, steps_per_epoch=steps)

    tf.random.set_seed(7)
    dataset = make()
    expected = [epochs(dataset, steps) for _ in range(2)]
    tf.random.set_seed(7)
    dataset = make()
    for numbers in expected:  # The next call of ``fit`` goes on with the dataset's seeds.
        positions.clear()
        data = source()
        assert epochs(data, steps, after=after) == numbers
        if numbers is expected[0]:
            resumptions = list(positions)
            assert caplog.text.count("the position in the dataset can't be saved") == kind.endswith("no state")
    for epoch, step, count, position, state in resumptions[:-1:4]:
        tf.random.set_seed(7)
        dataset = make()
        data = source()
        data.resume(json.loads(json.dumps(position)), state, step)
        assert list(itertools.chain(*epochs(data, steps, epoch))) == list(itertools.chain(*expected[0]))[count:]


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: shuffled().shuffle(7).repeat(), True),
        (lambda: tf.data.Dataset.range(9).shuffle(9, reshuffle_each_iteration=False).shuffle(7).repeat(), False),
    ],
)
def test_an_order_that_no_state_has_is_told(
    make: Callable[[], tf.data.Dataset], told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    iter(TrainingData.of(make(), batch_size=5))
    assert ("reads later epochs in another order than an undisturbed one" in caplog.text) == told


@pytest.mark.parametrize("shuffle", [True, "batch"])
def test_arrays_come_in_the_order_that_keras_gives_them(shuffle: bool | str) -> None:
    """``checkpoint=`` changed it. A process that goes on with another global seed keeps the order."""

    def order(data: Any) -> list[int]:
        return [int(number) for batch in data for number in np.ravel(batch[0])]

    numbers, none = np.arange(10, dtype="int32"), np.zeros(10)
    keras.utils.set_random_seed(11)
    expected = order(ArrayDataAdapter(numbers, none, batch_size=4, shuffle=shuffle).get_tf_dataset())
    source = ArraySource(numbers, none, None, 4, shuffle, None)
    assert order(source.open(0, 0)) == order(source.open(1, 0)) == expected != sorted(expected)
    assert order(source.open(0, 1)) == expected[4:]
    keras.utils.set_random_seed(12)
    other = ArraySource(numbers, none, None, 4, shuffle, None)
    assert order(other.open(0, 0)) != expected
    other.resume(source.describe(), started=True)
    assert order(other.open(0, 0)) == expected


def test_a_py_dataset_comes_in_the_order_that_keras_gives_it() -> None:
    """``checkpoint=`` changed it. What else draws from Python's generator meanwhile changes it in both."""

    class Numbers(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 7

        def __getitem__(self, index: int) -> Any:
            return np.array([index]), np.zeros(1)

    def order(data: Any) -> list[int]:
        numbers = [int(batch[0][0]) for batch in data]
        random.random()
        return numbers

    def of_keras() -> list[int]:
        adapter.on_epoch_begin()
        numbers = order(adapter.get_tf_dataset())
        adapter.on_epoch_end()
        return numbers

    random.seed(5)
    adapter = PyDatasetAdapter(Numbers(workers=2), shuffle=True)
    expected = [of_keras() for _ in range(3)]
    random.seed(5)
    source = PyDatasetSource(Numbers(workers=2), True, None)
    assert order(source.open(0, 0)) == expected[0]
    items = source.open(1, 0)
    first = [int(next(items)[0][0]) for _ in range(3)]
    within = source.describe()
    assert first + order(items) == expected[1]
    between = json.loads(json.dumps(source.describe()))
    assert order(source.open(2, 0)) == expected[2] != sorted(expected[2])
    for saved, started in ((within, True), (between, False)):
        other = PyDatasetSource(Numbers(workers=2), True, None)
        random.seed(6)
        other.resume(saved, started)
        if started:
            assert order(other.open(1, 3)) == expected[1][3:]
        assert order(other.open(2, 0)) == expected[2]
    with pytest.raises(CheckpointError, match="no state of Python's generator"):
        other.resume(between | {"random": [3, [1, 2], None]}, started=False)


ARRAYS = {"kind": "arrays", "round": 0, "done": 0, "batches": 5, "shuffle": True, "samples": 31, "batch_size": 7}


@pytest.mark.parametrize("saved", [{}, ARRAYS, ARRAYS | {"seed": 1, "global_seed": None, "done": 6}])
def test_a_position_that_cannot_be_is_refused(saved: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError):
        TrainingData.of(X, Y, batch_size=7).resume(saved, {}, 0)


def test_the_state_of_another_dataset_is_refused() -> None:
    data = TrainingData.of(slices().shuffle(5, seed=1).batch(7), batch_size=7)
    next(iter(data))
    position, state = data.position(epoch_over=False)
    assert position == {"kind": "dataset", "round": 0, "done": 1, "opened": 1, "read": 1}
    other = TrainingData.of(tf.data.Dataset.range(9).batch(7), batch_size=7)
    with pytest.raises(CheckpointError, match="the position in the dataset can't be restored"):
        other.resume(position, state, 1)
    for opened in (None, -1, 10**9):
        with pytest.raises(CheckpointError, match="how often the dataset was opened"):
            other.resume({**position, "opened": opened}, {}, 1)
