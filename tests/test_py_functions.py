"""Python code in a model runs on devices of this process, and is told where it can't."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import assert_same_training, pair, pipeline, use_float64
from models_for_tests import with_layer

import dapple_tf as dapple
from dapple_tf.frontend.batch import BatchSpec, Leaf
from dapple_tf.frontend.capture import Mode, capture
from dapple_tf.frontend.py_functions import check_py_functions
from dapple_tf.frontend.variables import VariableTable

layers = keras.layers
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(7, 4)), rng.normal(size=(7, 2))


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
    use_float64()
    model, plain = pair(with_python)
    assert_same_training(pipeline(model, ["second"], (2, 1), 3, 7), plain, [(X, Y, None)] * 3)


def test_python_code_is_refused_where_devices_are_in_other_processes() -> None:
    model = with_python()
    spec = BatchSpec(Leaf("x", "float32", (None, 4)))
    program = capture(model, VariableTable(model), Mode.PREDICT, spec)
    check_py_functions(program.graph, ())
    with pytest.raises(dapple.CaptureError, match=r"layer 'waves' calls tf.py_function .*workers \(there:1\)"):
        check_py_functions(program.graph, ("there:1",))


@pytest.mark.slow
def test_transform_says_that_workers_lack_python_code(workers: Any) -> None:
    plan = dapple.Plan.manual(["second"], [[0], [1]], 2, 8)
    cluster = dapple.Cluster.of_servers(workers.addresses[:2])
    with pytest.raises(dapple.CaptureError, match="its Python code is in this process"):
        dapple.transform(with_python(), cluster, plan)
