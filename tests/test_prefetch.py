"""The next batch is read while a step runs: not too early, not too many, and mistakes are told in their turn."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest

import dapple_tf as dapple
from dapple_tf.errors import DataError
from dapple_tf.frontend.batch import Batches


def small_model() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="a")])
    model.compile("sgd", "mse")
    return model


def pair(samples: int = 4) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros((samples, 2), "float32"), np.zeros((samples, 1), "float32")


def test_a_batch_is_read_in_another_thread_and_handed_out_once() -> None:
    readers = []

    def items() -> Iterator[Any]:
        for _ in range(3):
            readers.append(threading.current_thread())
            yield pair()

    batches = Batches(small_model(), items())
    next(batches)
    batches.prefetch()
    batches.prefetch()  # One is under way already.
    assert [batch.samples for batch in batches] == [4, 4]
    here = threading.current_thread()
    assert [reader is here for reader in readers] == [True, False, True]


def test_an_array_that_is_filled_again_and_again() -> None:
    x, y = pair()

    def items() -> Iterator[Any]:
        for number in range(3):
            x.fill(number)
            yield x, y

    batches = Batches(small_model(), items())
    first = next(batches)
    batches.prefetch()
    second = next(batches)
    assert [float(batch.arrays[0][0, 0]) for batch in (first, second)] == [0, 1]


def test_the_end_of_the_data_and_mistakes_are_told_when_the_batch_is_asked_for() -> None:
    batches = Batches(small_model(), iter([pair(), (pair()[0], pair(3)[1])]))
    next(batches)
    batches.prefetch()
    with pytest.raises(DataError, match="x has 4, y has 3"):
        next(batches)
    batches = Batches(small_model(), iter([pair()]))
    next(batches)
    batches.prefetch()
    with pytest.raises(StopIteration):
        next(batches)

    def breaks() -> Iterator[Any]:
        yield pair()
        raise RuntimeError("the disk is gone")

    batches = Batches(small_model(), breaks())
    next(batches)
    batches.prefetch()
    with pytest.raises(RuntimeError, match="the disk is gone"):
        next(batches)


def test_no_more_is_read_than_the_steps_of_an_epoch() -> None:
    given = []

    class Data(keras.utils.PyDataset):  # type: ignore[misc]
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> Any:
            given.append(index)
            return pair()

    model = small_model()
    pipelined = dapple.transform(model, dapple.Cluster.local(1, kind="cpu"), dapple.Plan.data_parallel(1, 4))
    ahead = []

    class Told(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            coming = [batches._coming for batches in pipelined._passes.values()]
            ahead.append(coming)

    pipelined.fit(Data(), epochs=2, steps_per_epoch=3, verbose=0, callbacks=[Told()])
    assert ahead == [[True], [True], [False]] * 2
    pipelined.train_on_batch(*pair())
    pipelined.close()


def test_one_thread_reads_all_batches_of_a_pass_and_ends_with_it() -> None:
    """Each batch had a thread of its own, whose start took longer than reading a small batch."""
    readers = []

    def items() -> Iterator[Any]:
        for _ in range(4):
            readers.append(threading.current_thread())
            yield pair()

    batches = Batches(small_model(), items())
    next(batches)
    for _ in range(3):
        batches.prefetch()
        next(batches)
    assert len(set(readers[1:])) == 1
    reader = readers[1]
    del batches
    gc.collect()
    reader.join(timeout=60)
    assert not reader.is_alive()
