"""What holds of a model with a table whose replicas keep shards of some kind, for each kind's tests."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from equivalence import assert_same_variables_after, pair, pipeline, use_float64
from zoo import Specimen

import dapple_tf as dapple


def table(**options: Any) -> keras.Model:
    """An embedding of many rows, of which batches look up several twice, and a layer of elements in odd numbers."""
    words = keras.Input((6,), dtype="int32")
    x = keras.layers.Flatten()(keras.layers.Embedding(83, 3, name="embedding", **options)(words))
    x = keras.layers.Dense(7, activation="tanh", name="hidden", kernel_constraint="non_neg")(x)
    model = keras.Model(words, keras.layers.Dense(3, name="logits")(x))
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def _words(rng: np.random.Generator, samples: int) -> tuple[Any, Any, Any]:
    return rng.integers(0, 83, (samples, 6)).astype("int32"), rng.normal(size=(samples, 3)), None


def constrained() -> keras.Model:
    """Its constraint looks at all rows of the embedding."""
    return table(embeddings_constraint=keras.constraints.MaxNorm(0.1, axis=0))


TABLE = Specimen(table, ("embedding", "hidden", "logits"), _words)


def check_evaluation_before_and_after_training(**options: Any) -> None:
    """Evaluation equals plain Keras' before any training and after some.

    Args:
        options: of plans with these shards.
    """
    use_float64()
    model, plain = pair(table)
    pipelined = pipeline(model, (), [2], 1, 12, **options)
    x, y, _ = TABLE.batch(np.random.default_rng(0), 12)
    assert pipelined.evaluate(x, y, verbose=0) == pytest.approx(plain.evaluate(x, y, verbose=0), rel=1e-5)
    assert_same_variables_after(2, pipelined, plain, x, y)
    assert pipelined.evaluate(x, y, verbose=0) == pytest.approx(plain.evaluate(x, y, verbose=0), rel=1e-5)


def check_values_go_to(others: Sequence[tuple[int, Mapping[str, Any]]], folder: pathlib.Path, **options: Any) -> None:
    """Values go from shards of three replicas to other shards by files, and into these by hand.

    Args:
        others: numbers of replicas and options of the other plans.
        folder: for checkpoints.
        options: of the first plan.
    """
    x, y, _ = TABLE.batch(np.random.default_rng(0), 12)
    first = pipeline(table(), (), [3], 1, 12, **options)
    for _ in range(2):
        first.train_on_batch(x, y)
    first.save_checkpoint(folder)
    first.sync()
    expected = [np.asarray(variable.value) for variable in first.model.variables]
    for replicas, own in others:
        other = pipeline(table(), (), [replicas], 1, 12, **own)
        other.train_on_batch(x, y)
        other.restore_checkpoint(folder)
        parameter = other.model.variables[0]
        np.testing.assert_array_equal(np.asarray(parameter.value), expected[0])
        other.sync()
        for variable, value in zip(other.model.variables, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(variable.value), value)
        parameter.assign(keras.ops.zeros(parameter.shape))
        other.sync()
        assert not np.any(np.asarray(parameter.value))


def check_deferred_models(**options: Any) -> None:
    """A model without values of its own trains as one with values.

    Args:
        options: of plans with these shards.
    """
    keras.utils.set_random_seed(1)
    with dapple.deferred_init():
        model = table()
    keras.utils.set_random_seed(1)
    plain = table()
    x, y, _ = TABLE.batch(np.random.default_rng(0), 12)
    pipelined = pipeline(model, (), [3], 1, 12, **options)
    for _ in range(2):
        own, other = pipelined.train_on_batch(x, y), plain.train_on_batch(x, y)
        assert own == pytest.approx(other, rel=1e-4)
