"""Data without any batch: one error, as early as their length is known, in place of what Keras makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same_variables, largest_difference, pair, pipeline, use_float64
from models_for_tests import classifier, samples, values, with_layer

import dapple_tf as dapple
from dapple_tf.frontend.empty_data import check_has_batches

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*Your input ran out of data:UserWarning"),
    pytest.mark.filterwarnings("ignore:.shuffle=True. was passed:UserWarning"),
]

X, Y, _ = samples(12)


def data() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(6)


def none() -> tf.data.Dataset:
    return data().take(0)


def filtered() -> tf.data.Dataset:
    """A dataset of which only reading tells that it is empty."""
    return data().filter(lambda x, y: tf.reduce_sum(x) > 1e9)


class Files(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 0

    def __getitem__(self, index: int) -> Any:
        raise IndexError(index)


@pytest.fixture(scope="module")
def pipelined() -> dapple.PipelinedModel:
    plan = dapple.Plan.manual(["first"], [[0], [1]], 2, 6)
    return dapple.transform(classifier(metrics=["accuracy"]), dapple.Cluster.local(2, kind="cpu"), plan)


def on_workers(make: Callable[[], tf.data.Dataset]) -> Callable[[], Any]:
    return lambda: dapple.on_workers(make)


EMPTY: dict[str, Callable[[], Any]] = {
    "dataset": none,
    "filtered": filtered,
    "endless": lambda: none().repeat(),
    "on workers": on_workers(none),
    "filtered on workers": on_workers(filtered),
    "files": Files,
    "arrays": lambda: X[:0],
}


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
@pytest.mark.parametrize("make", EMPTY.values(), ids=EMPTY)
def test_no_batch_at_all(pipelined: dapple.PipelinedModel, method: str, make: Callable[[], Any]) -> None:
    """Keras: "Cannot get result() since the metric has not yet been built", or an UnboundLocalError."""
    before = values(pipelined.model)
    arguments = [make(), Y[:0]] if make is EMPTY["arrays"] and method != "predict" else [make()]
    with pytest.raises(dapple.DataError, match=f"^{method}: x has no batch at all; give at least one"):
        getattr(pipelined, method)(*arguments, verbose=0)
    for one, other in zip(values(pipelined.model), before, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("make", EMPTY.values(), ids=EMPTY)
def test_validation_without_a_batch_is_told_before_training_where_its_length_is_known(
    pipelined: dapple.PipelinedModel, make: Callable[[], Any]
) -> None:
    steps: list[int] = []
    seen = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: steps.append(batch))
    empty = (X[:0], Y[:0]) if make is EMPTY["arrays"] else make()
    with pytest.raises(dapple.DataError, match=r"^fit: validation_data has no batch at all; give at least one"):
        pipelined.fit(data(), validation_data=empty, callbacks=[seen], verbose=0)
    assert steps == ([0, 1] if make in (filtered, EMPTY["filtered on workers"]) else [])
    assert pipelined.fit(data(), verbose=0).history["accuracy"]


def test_an_epoch_after_the_end_of_the_data_is_as_in_keras(pipelined: dapple.PipelinedModel) -> None:
    batches = iter([(X[:6], Y[:6]), (X[6:], Y[6:])])
    history = pipelined.fit((batch for batch in batches), steps_per_epoch=2, epochs=2, shuffle=False, verbose=0)
    assert len(history.history["loss"]) == 2


def test_no_steps_are_all_steps_as_in_keras(pipelined: dapple.PipelinedModel) -> None:
    assert len(pipelined.predict(data(), steps=0, verbose=0)) == 12


def test_a_resumed_training_of_nothing(pipelined: dapple.PipelinedModel, tmp_path: Any) -> None:
    checkpoint = dapple.Checkpointing(tmp_path)
    with pytest.raises(dapple.DataError, match=r"^fit: x has no batch at all"):
        pipelined.fit(dapple.on_workers(none), checkpoint=checkpoint, resume=True, verbose=0)


@pytest.mark.parametrize(
    "x", [None, X, (X, Y), {"a": X, "b": np.float32(1)}, tf.data.Dataset.range(3).repeat(), iter(())]
)
def test_other_data_are_left_to_whoever_reads_them(x: Any) -> None:
    check_has_batches("fit", {"x": x, "validation_data": None})


def test_a_batch_without_samples_among_others_is_that_of_keras() -> None:
    """It moves Adam and counts as a step, whatever the plan, and leaves later batches alone."""

    use_float64()
    model, plain = pair(lambda: with_layer(lambda: keras.layers.Dense(4, name="own")))
    pipelined = pipeline(model, ["first"], (2, 1), 2, 6)
    x, y = np.ones((6, 4)), np.ones((6, 2))
    batches = [(x, y), (x[:0], y[:0]), (x[:5], y[:5])]
    for x, y in batches:
        assert largest_difference(pipelined.train_on_batch(x, y), plain.train_on_batch(x, y)) < 1e-10
    pipelined.sync()
    assert_same_variables(model, plain, 1e-10)
    assert pipelined.predict_on_batch(x[:0]).shape == plain.predict_on_batch(x[:0]).shape == (0, 2)
