"""What of Keras and TensorFlow isn't public, but used: `make test-oldest` runs this with the oldest versions, too."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import dapple_tf as dapple
from dapple_tf.common import keras_private
from dapple_tf.frontend.layer_kinds import layer_kind
from graph_passes.ir import tensorflow_private


def mlp() -> keras.Model:
    keras.utils.set_random_seed(0)
    stack = [keras.layers.Dense(8, "relu", name="first"), keras.layers.Dense(3, name="second")]
    model = keras.Sequential([keras.Input((4,)), *stack])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


X, Y = np.random.default_rng(0).standard_normal((8, 4)).astype("float32"), np.arange(8) % 3


def test_all_that_is_named_is_there() -> None:
    for module in (keras_private, tensorflow_private):
        assert [name for name in module.__all__ if not hasattr(module, name)] == []


CHANGES: dict[str, Callable[[keras.Model], None]] = {
    "freeze": lambda model: setattr(model.get_layer("first"), "trainable", False),
    "freeze one variable": lambda model: setattr(model.get_layer("second").bias, "trainable", False),
    "add a layer": lambda model: model.add(keras.layers.Dense(3)),
    "compile again": lambda model: model.compile("sgd", "mse"),
}


def test_what_a_model_consists_of() -> None:
    """All that the lists of variables and metrics depend on is noticed."""
    model = mlp()
    model.train_on_batch(X, Y)
    for change in CHANGES.values():
        makeup = keras_private.Makeup(model)
        assert not makeup.changed
        assert makeup.metrics == model.metrics
        change(model)
        assert makeup.changed


def test_kerass_own_training_on_a_batch() -> None:
    model = mlp()
    assert keras_private.plain_on_batch(model, "train_on_batch")
    vars(model)["reset_metrics"] = lambda: None
    assert not keras_private.plain_on_batch(model, "train_on_batch")
    keras_private.check_compiled(model, "train_on_batch")
    with pytest.raises(ValueError, match="compile"):
        keras_private.check_compiled(keras.Sequential([keras.layers.Dense(1)]), "train_on_batch")
    assert keras_private.python_logs({"b": np.float32(2), "a": {"c": np.float32(1)}}) == {"b": 2.0, "c": 1.0}


def test_names_are_counted_from_the_start() -> None:
    keras.layers.ReLU()
    with keras_private.names_from_start():
        assert [keras.layers.ReLU().name for _ in range(2)] == ["re_lu", "re_lu_1"]


@pytest.mark.parametrize("make", [keras.layers.BatchNormalization, lambda: keras.layers.MultiHeadAttention(2, 2)])
def test_attributes_of_equal_layers_are_equal(make: Callable[[], keras.layers.Layer]) -> None:
    """What Keras keeps at a layer beside them would make each layer another one."""
    layers = [make(), make()]
    for layer in layers:
        shape = (None, 3, 4)
        layer.build(*([shape, shape] if isinstance(layer, keras.layers.MultiHeadAttention) else [shape]))
    kinds = [layer_kind(layer, ()) for layer in layers]
    assert kinds[0] is not None and kinds[1] is not None
    assert kinds[0].key == kinds[1].key
    assert len(kinds[0].variables) == len(layers[0].variables)
    names = [name for name, _ in keras_private.attributes_of_calls(layers[0])]
    assert "autocast" in names and "name" not in names


def test_the_dtype_in_which_variables_are_read() -> None:
    dtypes = []

    class Asks(keras.layers.Layer):
        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            dtypes.append(keras_private.autocast_dtype())
            return inputs

    for policy in ("float32", "mixed_float16"):
        Asks(dtype=policy)(np.zeros((1, 2), "float32"))
    assert dtypes == [None, "float16"]


def test_what_layers_inherit() -> None:
    inherited = []

    class Asks(keras.layers.Layer):
        def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
            inherited.append(keras_private.inherited_arguments().get("training"))
            return inputs

    class Calls(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Asks(), Asks()

        def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
            inputs = self.first(inputs)
            keras_private.inherit_arguments({"training": False})
            return self.second(inputs)

    assert keras_private.inherited_arguments() == {}
    Calls()(np.zeros((1, 2), "float32"), training=True)
    assert inherited[-2:] == [True, False]  # Building the layer may call it, too.


def test_whose_values_layers_read() -> None:
    layer = keras.layers.Dense(2)
    layer.build((None, 2))
    assert keras_private.is_cast(layer.kernel)
    assert not keras_private.is_cast(keras.Variable(1.0, autocast=False))
    with keras.StatelessScope() as outer:
        assert keras_private.is_current(outer)
        with keras.StatelessScope():
            assert not keras_private.is_current(outer)


def test_who_looks_behind_a_tensor() -> None:
    looked: list[bool] = []
    with tf.Graph().as_default():
        tensor = tf.identity(tf.constant([1.0, 2.0]))
        tensorflow_private.watch_operation(tensor, lambda: looked.append(True))
        assert (tensor + 1).op.inputs[0] is tensor
        assert tf.get_static_value(tensor) is not None
        assert keras.ops.relu(tensor).shape == (2,)
        assert not looked
        assert tensor.op.type == "Identity"
    assert looked == [True]


def test_what_operations_get_more_than_they_ask_for() -> None:
    graph = tf.Graph()
    with graph.as_default():
        operation = tf.constant(1.0).op
        assert tensorflow_private.number_of_nodes(graph) == 1
        assert not tensorflow_private.has_scopes(graph)
        with graph.device("CPU:0"):
            assert not tensorflow_private.has_scopes(graph)
        for scope in (
            graph.control_dependencies([operation]),
            graph.gradient_override_map({"Relu": "Other"}),
            graph.colocate_with(operation),
            tf.xla.experimental.jit_scope(),
        ):
            with scope:
                assert tensorflow_private.has_scopes(graph)
        assert not tensorflow_private.has_scopes(graph)


def test_shapes_of_a_graph_with_unknown_lengths_and_ranks() -> None:
    """An unknown length is None here already, which had been compared with 0."""
    graph = tf.Graph()
    with graph.as_default():
        rows = tf.compat.v1.placeholder(tf.float32, [None, 3], name="rows")
        tf.compat.v1.placeholder(tf.float32, name="anything")
        tf.matmul(rows, rows, transpose_b=True, name="product")
        tf.constant(1.0, name="scalar")
    shapes = tensorflow_private.shapes_of_outputs(graph.as_graph_def().SerializeToString())
    expected = {"rows": ((None, 3),), "anything": (None,), "product": ((None, None),), "scalar": ((),)}
    assert {name: shapes[name] for name in expected} == expected


def test_functions_as_they_were_written() -> None:
    @tf.function(jit_compile=True)
    def doubled(x: tf.Tensor) -> tf.Tensor:
        return 2 * x if tf.reduce_sum(x) > 0 else x

    assert tensorflow_private.compiles_with_xla(doubled)
    with tf.Graph().as_default() as graph:
        tensorflow_private.python_body(doubled)(tf.constant([1.0]))
    assert any(operation.type in ("If", "StatelessIf") for operation in graph.get_operations())


def test_the_global_seed_is_another_one_for_a_while() -> None:
    tf.random.set_seed(3)
    first = [float(tf.random.uniform(())) for _ in range(2)]
    tf.random.set_seed(3)
    again = [float(tf.random.uniform(()))]
    with tensorflow_private.seeded(5):
        assert tensorflow_private.global_seed() == 5
        tf.random.uniform(())
    again.append(float(tf.random.uniform(())))
    assert again == first and tensorflow_private.global_seed() == 3


def test_a_pipeline_trains_as_plain_keras_does() -> None:
    plain, model = mlp(), mlp()
    plan = dapple.Plan.manual(["first"], [[0, 1], [2]], micro_batches=2, global_batch_size=8, schedule="zb_h1")
    pipelined = dapple.transform(model, dapple.Cluster.local(3, kind="cpu"), plan)
    expected = plain.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    history = pipelined.fit(X, Y, epochs=2, shuffle=False, verbose=0).history
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    for own, other in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(own.numpy(), other.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pipelined.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-4, atol=1e-5)
