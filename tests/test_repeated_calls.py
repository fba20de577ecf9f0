"""Equal calls of Keras' own layers are traced once: the captured graph is that of a trace of each, node for node.

Names are the same, too, but for numbers that TensorFlow appends where one is taken.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.errors import CaptureError
from dapple_tf.frontend.batch import BatchSpec, declared_spec, spec_of
from dapple_tf.frontend.capture import Mode, capture
from dapple_tf.frontend.layer_calls import LayerCalls
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.models import bert
from graph_passes.ir.program import Program

_GRADIENT_TYPE = "_gradient_op_type"
"""Has a number that TensorFlow counts up with each trace."""


class _Traces:
    """Traces of one model, with and without equal calls shared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.share = True
        self.made: list[LayerCalls] = []
        original = LayerCalls.__init__

        def init(calls: LayerCalls, model: keras.Model, *, share: bool) -> None:
            self.made.append(calls)
            original(calls, model, share=share and self.share)

        monkeypatch.setattr(LayerCalls, "__init__", init)

    def of(
        self,
        model: keras.Model,
        *,
        training: bool,
        share: bool = True,
        spec: BatchSpec | None = None,
        mode: Mode = Mode.PREDICT,
    ) -> Program:
        spec = spec or declared_spec(model)
        assert spec is not None
        self.share = share
        self.made.clear()
        return capture(model, VariableTable(model), mode, spec, training=training)

    @property
    def stand_ins(self) -> list[str]:
        """The layers whose calls the last trace had nodes stand in for."""
        calls = self.made[-1]
        nodes = calls._graph.as_graph_def().node
        names = {node.name for node in nodes if calls._templates.stands_for(node) is not None}
        return sorted(name.rpartition("/")[0] for name in names)


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Traces]:
    return _Traces(monkeypatch)


def _assert_same(one: Program, other: Program) -> None:
    for program in (one, other):
        for node in program.graph.node:
            node.attr.pop(_GRADIENT_TYPE, None)
    assert list(one.graph.node) == list(other.graph.node)
    assert one.graph.library == other.graph.library
    assert one.roles == other.roles


def _both(traces: _Traces, model: keras.Model) -> list[str]:
    """Compares a model's programs, for prediction and for training; returns the layers that weren't traced."""
    names: list[str] = []
    for training in (False, True):
        shared = traces.of(model, training=training)
        names = traces.stand_ins
        _assert_same(shared, traces.of(model, training=training, share=False))
        assert not traces.stand_ins
    return names


def _bert() -> keras.Model:
    config = bert.BertConfig(depth=3, width=8, heads=2, inner=16, vocabulary=11, sequence=4)
    return bert.build(config)


def _convolutional(**options: Any) -> keras.Model:
    inputs = x = keras.Input((8, 8, 4))
    for number in range(3):
        y = keras.layers.Conv2D(4, 3, padding="same", use_bias=number > 0, activation="relu", **options)(x)
        y = keras.layers.BatchNormalization(momentum=0.9, **options)(y)
        y = keras.layers.DepthwiseConv2D(3, padding="same", **options)(y)
        y = keras.layers.GroupNormalization(2, **options)(y)
        y = keras.layers.SpatialDropout2D(0.1, seed=number, **options)(y)
        x = keras.layers.Add()([x, keras.layers.Activation("gelu", **options)(y)])
    return keras.Model(inputs, keras.layers.GlobalAveragePooling2D()(x))


def _masked() -> keras.Model:
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(7, 8, mask_zero=True)(inputs)
    for _ in range(3):
        attended = keras.layers.MultiHeadAttention(2, 4, dropout=0.1)(x, x, use_causal_mask=True)
        x = keras.layers.LayerNormalization()(x + attended)
        x = keras.layers.Dense(8, activation="silu", kernel_regularizer="l2", activity_regularizer="l1")(x)
    return keras.Model(inputs, x)


def _twice() -> keras.Model:
    """Layers that are called several times: what the first call assigns, the second reads."""
    inputs = x = keras.Input((6,))
    norm, drop, other = (
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.BatchNormalization(),
    )
    dense = keras.layers.Dense(6, activation="tanh")
    for _ in range(3):
        x = drop(norm(dense(x)))
        x = other(dense(x))
    return keras.Model(inputs, x)


@pytest.mark.parametrize(
    ("build", "shared"),
    [
        (_bert, 2 * 5),
        (lambda: _convolutional(dtype="mixed_bfloat16"), 2 * 4 + 1),
        (_masked, 2),
        (_twice, 3),
    ],
    ids=["bert", "mixed precision", "masked", "twice"],
)
def test_the_graph_is_that_of_a_trace_of_each_call(
    build: Callable[[], keras.Model], shared: int, traces: _Traces
) -> None:
    """Names, order, attributes, calls of layers and updates of variables included."""
    assert len(_both(traces, build())) >= shared


class _OwnDense(keras.layers.Dense):
    """Depends on something that no attribute tells."""

    calls = 0

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        type(self).calls += 1
        return super().call(inputs) * float(self.calls)


_REPLACED: list[keras.layers.Layer] = []


def _activated() -> keras.layers.Layer:
    number = float(len(_REPLACED))
    _REPLACED.append(keras.layers.Dense(4, activation=lambda x: x * number))
    return _REPLACED[-1]


class _OwnSoftmax(keras.layers.Softmax):
    """Depends on something that no attribute tells, too."""

    def call(self, inputs: Any, mask: Any = None) -> Any:
        _REPLACED.append(self)
        return super().call(inputs, mask=mask) * float(len(_REPLACED))


def _with_own_layer(name: str) -> keras.layers.Layer:
    layer = keras.layers.MultiHeadAttention(2, 2, name=name)
    layer.build((None, 3, 4), (None, 3, 4))
    vars(layer)["_softmax"] = _OwnSoftmax()
    return layer


def test_a_layer_of_the_users_inside_one_of_keras_is_traced_each_time(traces: _Traces) -> None:
    inputs = x = keras.Input((3, 4))
    for number in range(3):
        x = _with_own_layer(f"own_{number}")(x, x)
        x = keras.layers.MultiHeadAttention(2, 2, name=f"plain_{number}")(x, x)
    traces.of(keras.Model(inputs, x), training=False)
    outer = [name for name in traces.stand_ins if name.count("/") == 1]
    assert [name for name in outer if "/plain_" in name]
    assert not [name for name in outer if "/own_" in name]


def test_losses_find_the_logits(traces: _Traces) -> None:
    """Keras notes them at the outputs of these activations."""
    inputs = keras.Input((4,))
    outputs = [keras.layers.Dense(3, activation="softmax")(inputs) for _ in range(3)]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", ["categorical_crossentropy"] * 3)
    logits: list[Any] = []
    original = model.compute_loss

    def compute_loss(x: Any, y: Any, y_pred: Any, *args: Any, **kwargs: Any) -> Any:
        logits.extend(getattr(output, "_keras_logits", None) for output in y_pred)
        return original(x, y, y_pred, *args, **kwargs)

    model.compute_loss = compute_loss
    x, y = np.zeros((2, 4), "float32"), np.zeros((2, 3), "float32")
    capture(model, VariableTable(model), Mode.TRAIN, spec_of(model, x, [y] * 3))
    assert logits
    assert None not in logits


class Inside(keras.layers.Layer):
    def __init__(self, inner: keras.layers.Layer) -> None:
        super().__init__()
        self.inner = inner

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        return self.inner(inputs)


class Calls(keras.layers.Layer):
    """Calls equal convolutions, whose activation inherits ``training``, under other layers."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = [keras.layers.Conv1D(4, 1, activation=keras.layers.Dropout(0.5)) for _ in range(4)]
        self.outer = [Inside(layer) for layer in self.convolutions]

    def build(self, shape: Any) -> None:
        for layer in self.convolutions:
            layer.build(shape)

    def call(self, inputs: Any) -> Any:
        for layer, training in zip(self.outer, (True, True, False, False), strict=True):
            inputs = layer(inputs, training=training)
        return inputs


def test_layers_inside_inherit_arguments(traces: _Traces) -> None:
    """``Conv1D.call`` takes no ``training``, the activation does: a third convolution dropped out in prediction."""
    inputs = keras.Input((3, 4))
    _both(traces, keras.Model(inputs, Calls()(inputs)))


class Perturbed(keras.layers.Layer):
    """Calls a layer with its own weights, and with others: a stand-in took its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(4, activation="tanh")
        self.norm = keras.layers.BatchNormalization()

    def build(self, shape: Any) -> None:
        self.dense.build(shape)
        self.norm.build(shape)

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        own = self.norm(self.dense(inputs, training=True), training=True)
        values = [(variable, variable.value * 2) for variable in (*self.dense.variables, *self.norm.variables)]
        with keras.StatelessScope(state_mapping=values):
            return own + self.norm(self.dense(inputs, training=True), training=True)


class Shaped(keras.layers.Layer):
    """Tells the length of one of two inputs of a layer: the other's was it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(4, activation="tanh")

    def build(self, shape: Any) -> None:
        self.dense.build(shape[0])

    def call(self, pair: Any) -> Any:
        first, second = self.dense(pair[0]), self.dense(pair[0] + 1)
        first.set_shape([None, 5, 4])
        third = self.dense(pair[1])
        return tf.reduce_sum(first) + tf.reduce_sum(second) + third * tf.cast(tf.shape(third)[1], third.dtype)

    def compute_output_spec(self, pair: Any) -> Any:
        return keras.KerasTensor((None, None, 4))


def test_shapes_that_are_told_later_are_the_tensors_own(traces: _Traces) -> None:
    inputs = [keras.Input((None, 4)) for _ in range(2)]
    _both(traces, keras.Model(inputs, Shaped()(inputs)))
    assert traces.of(keras.Model(inputs, Shaped()(inputs)), training=False)
    assert traces.stand_ins


class Looks(keras.layers.Layer):
    """Looks behind the tensor that a layer has computed."""

    def __init__(self, look: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.look = look

    def call(self, pair: Any) -> Any:
        return self.look(*pair)

    def compute_output_spec(self, pair: Any) -> Any:
        return keras.KerasTensor(pair[1].shape)


def _slope(inputs: Any, outputs: Any) -> Any:
    try:
        return tf.gradients(outputs, [inputs])[0]
    except LookupError:
        return inputs


class _Scoped(keras.layers.Layer):
    """Calls equal layers in scopes that give operations more than they ask for, or that watch them."""

    def __init__(self, scope: Callable[[Any], contextlib.AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.scope = scope
        self.dense = [keras.layers.Dense(4, activation="tanh") for _ in range(3)]

    def build(self, shape: Any) -> None:
        for layer in self.dense:
            layer.build(shape)

    def call(self, inputs: Any) -> Any:
        for layer in self.dense:
            with self.scope(inputs):
                inputs = layer(inputs)
        return inputs


def _one_after_the_other(*made: keras.layers.Layer) -> keras.Model:
    inputs = x = keras.Input((4,))
    for layer in made:
        x = layer(x)
    return keras.Model(inputs, x)


def _looking(look: Callable[[Any, Any], Any]) -> keras.Model:
    inputs = x = keras.Input((4,))
    for _ in range(3):
        x = keras.layers.Dense(4, activation="tanh")(x)
    return keras.Model(inputs, Looks(look)([inputs, x]))


def _unlike(**options: Any) -> keras.Model:
    return _one_after_the_other(*(keras.layers.Dense(4, **own) for own in ({"activation": "tanh"}, options)))


TRACED: dict[str, Callable[[], keras.Model]] = {
    "own class": lambda: _one_after_the_other(*(_OwnDense(4) for _ in range(3))),
    "own activation": lambda: _one_after_the_other(*(_activated() for _ in range(3))),
    "without bias": lambda: _unlike(activation="tanh", use_bias=False),
    "not trained": lambda: _unlike(activation="tanh", trainable=False),
    "other values: a stand-in took the layer's own": lambda: _one_after_the_other(Perturbed()),
    "who looks at types": lambda: _looking(lambda _, outputs: outputs * float(len(outputs.op.type))),
    "who differentiates, and catches the error": lambda: _looking(_slope),
    "control inputs": lambda: _one_after_the_other(_Scoped(lambda tensor: tf.control_dependencies([tensor]))),
    "attributes": lambda: _one_after_the_other(_Scoped(lambda _: tf.xla.experimental.jit_scope())),
    "tapes": lambda: _one_after_the_other(_Scoped(lambda _: tf.GradientTape())),
}


@pytest.mark.parametrize("name", TRACED)
def test_what_differs_or_is_looked_at_is_traced_each_time(name: str, traces: _Traces) -> None:
    traces.of(TRACED[name](), training=True)
    assert not traces.stand_ins


def test_an_error_is_that_of_a_trace_of_each_call(traces: _Traces) -> None:
    class Fails(keras.layers.Layer):
        def compute_output_spec(self, inputs: Any) -> Any:
            return keras.KerasTensor(inputs.shape)

        def call(self, inputs: Any) -> Any:
            if inputs:
                return inputs
            return -inputs

    inputs = x = keras.Input((4,))
    for _ in range(3):
        x = keras.layers.Dense(4, activation="tanh")(x)
    model = keras.Model(inputs, Fails(name="fails")(x))
    with pytest.raises(CaptureError, match="layer 'fails' uses the value of a tensor"):
        traces.of(model, training=True)
    assert [calls._share for calls in traces.made] == [True, False]
