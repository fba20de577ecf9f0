"""What a model does with strings, tables and Python code.

Strings and tables are on the client, as a whole, before the first stage; Python code is on devices of this process.
"""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import (
    TOLERANCE,
    assert_same_training,
    assert_same_variables,
    assert_trains_as_keras,
    pair,
    pipeline,
    use_float64,
)
from models_for_tests import with_layer

import dapple_tf as dapple
from dapple_tf.frontend.batch import BatchSpec, Leaf
from dapple_tf.frontend.capture import Mode, capture
from dapple_tf.frontend.custom_gradients import check_py_functions
from dapple_tf.frontend.variables import VariableTable

layers = keras.layers
rng = np.random.default_rng(0)
WORDS = ["a pipeline of stages", "stages of a model", "words", "a b", "unknown here", "of of of", "model words stages"]
TEXTS = tf.constant(WORDS)
Y = rng.normal(size=(7, 2))
NUMBERS = rng.normal(size=(7, 3))
X = rng.normal(size=(7, 4))
IDS = rng.integers(0, 9, size=(7, 2))


def compiled(inputs: Any, x: Any) -> keras.Model:
    x = layers.Dense(4, activation="tanh", name="second")(x)
    model = keras.Model(inputs, layers.Dense(2, name="last")(x))
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    return model


def vectorized() -> keras.Model:
    """Token ids that are looked up, and a mask of them."""
    vectorize = layers.TextVectorization(output_sequence_length=4, vocabulary=["stages", "of", "a", "model"])
    texts = keras.Input((), dtype="string", name="texts")
    x = layers.Embedding(8, 4, mask_zero=True, name="first")(vectorize(texts))
    return compiled(texts, layers.GlobalAveragePooling1D()(x))


def features() -> keras.Model:
    """Several kinds of inputs, among them numbers for which tables and hashes stand."""
    text, numbers, ids = keras.Input((1,), dtype="string"), keras.Input((3,)), keras.Input((2,), dtype="int64")
    lookup = layers.StringLookup(vocabulary=["words", "a b"], output_mode="multi_hot")(text)
    hashed = layers.CategoryEncoding(5, output_mode="multi_hot")(layers.Hashing(5)(text))
    counted = layers.Embedding(4, 2)(layers.IntegerLookup(vocabulary=[3, 5, 7])(ids))
    parts = [layers.Dense(3)(numbers), lookup, hashed, layers.Flatten()(counted)]
    return compiled([text, numbers, ids], layers.Dense(4, name="first")(layers.Concatenate()(parts)))


def test_models_that_take_strings_train_as_in_plain_keras() -> None:
    """They were refused: strings can't be fed to the devices."""
    use_float64()
    x = [TEXTS[:, None], NUMBERS, IDS]
    model, plain = pair(features)
    plain.run_eagerly = False  # Else Keras refuses strings beside arrays for one layer.
    pipelined = pipeline(model, ["first"], (2, 1), 2, 7)
    assert_same_training(pipelined, plain, [(x, Y, None)] * 2)
    assert np.allclose(pipelined.predict_on_batch(x), plain.predict_on_batch(x))


def test_strings_of_a_dataset_are_fitted_evaluated_predicted_and_saved(tmp_path: pathlib.Path) -> None:
    use_float64()
    model, plain = pair(vectorized)
    pipelined = pipeline(model, ["first"], (1, 1), 2, 4)
    data = tf.data.Dataset.from_tensor_slices((WORDS, Y)).batch(4)
    for each in (pipelined, plain):
        each.fit(data, verbose=0)
    pipelined.sync()
    assert_same_variables(model, plain, TOLERANCE["float64"])
    np.testing.assert_allclose(pipelined.evaluate(data, verbose=0), plain.evaluate(data, verbose=0), rtol=2e-5)
    pipelined.save(tmp_path / "model.keras")
    saved = keras.models.load_model(tmp_path / "model.keras")
    assert np.allclose(saved.predict(TEXTS, verbose=0), pipelined.predict(TEXTS, verbose=0))


def test_a_model_that_takes_strings_is_profiled_with_examples_of_them() -> None:
    with pytest.raises(dapple.ProfileError, match=r"x takes strings, which can't be made up: give examples"):
        dapple.profile(vectorized(), 4, cache=False, progress=False)


def test_generators_that_keras_does_not_know_are_refused() -> None:
    """Their state was taken for a lookup table."""

    class Noise(layers.Layer):
        def build(self, shape: Any) -> None:
            self.generator = tf.random.Generator.from_seed(1)

        def call(self, x: Any) -> Any:
            return x + self.generator.normal(tf.shape(x))

    numbers = keras.Input((3,))
    x = Noise(name="noise")(layers.Dense(3, name="first")(numbers))
    pipelined = pipeline(compiled(numbers, x), ["first"], (1, 1), 1, 7)
    with pytest.raises(dapple.CaptureError, match=r"layer 'noise' draws from a tf.random.Generator, .*SeedGenerator"):
        pipelined.train_on_batch(NUMBERS, Y)


def test_strings_that_depend_on_weights_are_refused() -> None:
    class Shown(layers.Layer):
        def call(self, x: Any) -> Any:
            return tf.cast(tf.strings.length(tf.strings.as_string(x)), "float32")

    class Told(layers.Layer):
        def call(self, x: Any) -> Any:
            return tf.cast(tf.strings.length(x), "float32")[:, None]

    text, numbers = keras.Input((), dtype="string"), keras.Input((3,))
    x = layers.Concatenate()([Told()(text), Shown(name="shown")(layers.Dense(3, name="first")(numbers))])
    pipelined = pipeline(compiled([text, numbers], x), ["second"], (1, 1), 1, 7)
    with pytest.raises(dapple.CaptureError, match=r"layer 'shown' .* works on strings or by a table with what isn't"):
        pipelined.train_on_batch([TEXTS, NUMBERS], Y)


# ---- Python code


class Sine(layers.Layer):
    """A result with a gradient and one without, of Python code."""

    def call(self, x: Any) -> Any:
        def python(x: Any) -> Any:
            return tf.sin(x) * 2, tf.cast(x.numpy() > 0, "int32")

        sine, positive = tf.py_function(python, [x], [x.dtype, tf.int32])
        return tf.ensure_shape(sine, x.shape) + tf.cast(tf.ensure_shape(positive, x.shape), x.dtype)


def with_python() -> keras.Model:
    return with_layer(lambda: Sine(name="waves"), Sine)


def test_a_py_function_has_the_gradient_of_its_own_slice() -> None:
    """TensorFlow's is that of the slice that ran last, once: steps of several micro-batches were cancelled."""
    assert_trains_as_keras(with_python, ["second"], (2, 1), 3, [(X, Y, None)] * 2)


def test_python_code_is_refused_where_devices_are_in_other_processes() -> None:
    model = with_python()
    spec = BatchSpec(Leaf("x", "float32", (None, 4)))
    program = capture(model, VariableTable(model), Mode.PREDICT, spec)
    check_py_functions(program.graph, ())
    with pytest.raises(dapple.CaptureError, match=r"layer 'waves' calls tf.py_function .*workers \(there:1\)"):
        check_py_functions(program.graph, ("there:1",))
