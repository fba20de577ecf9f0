"""Example batches: given ones repeat, drawn ones fit the model and its losses."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import keras
import numpy as np
import pytest
from profiled import mlp

from dapple_tf.describe.layer_profile import ProfileError
from dapple_tf.errors import CaptureError
from dapple_tf.frontend.capture import Mode, build, capture
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.measuring.example_batch import ExampleBatch

layers = keras.layers


def test_drawn_batches_fit_the_model_and_are_the_same_every_time() -> None:
    example = ExampleBatch.of(mlp())
    x, y = example.batch(5)
    assert (x.shape, x.dtype, y.shape, y.dtype) == ((5, 4), "float32", (5,), "int32")
    assert y.min() >= 0 and y.max() < 3  # as many classes as logits
    np.testing.assert_array_equal(example.batch(5)[0], x)


def test_given_examples_repeat() -> None:
    x, y = np.arange(8.0, dtype="float32").reshape(2, 4), np.array([0, 2], "int32")
    example = ExampleBatch.of(mlp(), x, y, np.array([1.0, 2.0], "float32"))
    batch = example.batch(3)
    np.testing.assert_array_equal(batch[0], x[[0, 1, 0]])
    np.testing.assert_array_equal(batch[1], [0, 2, 0])
    np.testing.assert_array_equal(batch[2], [1, 2, 1])
    with pytest.raises(ProfileError, match="x has no samples"):
        ExampleBatch.of(mlp(), x[:0], y[:0])


def test_trees_have_the_model_s_structure() -> None:
    inputs = {"a": keras.Input((3,), name="a"), "b": keras.Input((2,), name="b")}
    outputs = {"p": layers.Dense(1, activation="sigmoid")(inputs["a"]), "q": layers.Dense(4)(inputs["b"])}
    model = keras.Model(inputs, outputs)
    sparse = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", {"p": "binary_crossentropy", "q": sparse})
    x, y, weights = ExampleBatch.of(model).trees(6)
    assert {key: value.shape for key, value in (x | y).items()} == {"a": (6, 3), "b": (6, 2), "p": (6, 1), "q": (6,)}
    assert y["p"].min() >= 0 and y["p"].max() <= 1  # probabilities
    assert y["q"].dtype == "int32" and weights is None


def places(number: int) -> keras.Model:
    """A model with learned vectors for some places, behind a strided layer."""

    class Places(layers.Layer):
        def build(self, shape: Any) -> None:
            self.table = self.add_weight(shape=(number, shape[-1]), name="table")

        def call(self, x: Any) -> Any:
            return x + keras.ops.take(self.table, keras.ops.arange(keras.ops.shape(x)[1]), axis=0)

    x = keras.Input((None, 2))
    out = layers.Dense(3)(Places(name="places")(layers.Conv1D(4, 3, strides=2, padding="same")(x)))
    model = keras.Model(x, out, name="m")
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def test_open_lengths_are_some_that_the_model_can_be_computed_for(caplog: pytest.LogCaptureFixture) -> None:
    """128 was taken whatever the model, and labels were as long as the inputs, also behind strides."""
    model = places(5)
    with caplog.at_level(logging.WARNING):
        x, y = ExampleBatch.of(model).batch(2)
    assert (x.shape, y.shape) == ((2, 8, 2), (2, 4))
    assert "model 'm' leaves lengths open; its profile takes them for 8: give example inputs" in caplog.text
    caplog.clear()
    x, y = ExampleBatch.of(model, length=5).batch(3)
    assert (x.shape, y.shape) == ((3, 5, 2), (3, 3)) and not caplog.text
    x, y = ExampleBatch.of(model, np.zeros((1, 10, 2), "float32")).batch(1)
    assert (x.shape, y.shape) == ((1, 10, 2), (1, 5)) and not caplog.text
    with pytest.raises(ProfileError, match=r"can't be computed for length 11: give example inputs .* x=\.\.\. \(11: "):
        ExampleBatch.of(model, length=11)


def test_what_cannot_be_guessed() -> None:
    class OwnLoss(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
            return keras.ops.mean(y_pred)

    def made(*loss: str) -> keras.Model:
        features = keras.Input((2,))
        model = OwnLoss(features, layers.Dense(1)(features))
        model.compile("sgd", *loss)
        return model

    with pytest.raises(ProfileError, match=r"can't be guessed: give examples to transform\(\.\.\., x=\.\.\., y="):
        ExampleBatch.of(made("mse"))
    assert ExampleBatch.of(made()).spec.y is None


def masked(y: Any, p: Any) -> Any:
    """Takes a mask in the labels' last channel."""
    return keras.ops.mean(y[..., -1:] * keras.ops.abs(y[..., :-1] - p), axis=-1)


@pytest.mark.parametrize(
    ("loss", "outcome", "warned"),
    [
        (
            masked,
            pytest.raises(CaptureError, match=r"labels are guessed, y float32 \(\?, 4\): give exam"),
            False,
        ),
        (lambda y, p: keras.ops.mean(y[:, :1] - p, axis=-1), contextlib.nullcontext(), True),
        (keras.losses.MeanSquaredError(), contextlib.nullcontext(), False),
    ],
)
def test_guessed_labels_are_told(loss: Any, outcome: Any, warned: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The error spoke of labels that nobody had given."""
    features = keras.Input((2,))
    model = keras.Model(features, layers.Dense(4)(features), name="m")
    model.compile("sgd", loss)
    example, table = ExampleBatch.of(model), VariableTable(model)
    with outcome, example.told(model):
        build(model, table, example.spec)
        capture(model, table, Mode.TRAIN, example.spec)
    assert ("labels are guessed" in caplog.text) == warned
