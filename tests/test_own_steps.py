"""Models with a ``train_step`` of their own train as with plain Keras, in the forms of keras.io's guides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, assert_same_variables, pair, pipeline, use_float64

import dapple_tf as dapple

layers = keras.layers
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(11, 4)), rng.normal(size=(11, 2))
WEIGHTS = rng.uniform(0.5, 2, size=11)


def logs_of(model: keras.Model, loss: Any, *batch: Any) -> Any:
    for metric in model.metrics:
        metric.update_state(*((loss,) if metric.name == "loss" else batch))
    return {metric.name: metric.result() for metric in model.metrics}


class Compiled(keras.Model):
    """ "A first simple example", with sample weights: the losses and metrics that it is compiled with."""

    def train_step(self, data: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
        trainable_vars = self.trainable_variables
        gradients = tape.gradient(loss, trainable_vars)
        self.optimizer.apply(gradients, trainable_vars)
        return logs_of(self, loss, y, y_pred, sample_weight)


class OwnLoss(keras.Model):
    """ "Going lower-level": losses and metrics of its own, logs of several kinds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.mae_metric = keras.metrics.MeanAbsoluteError(name="mae")
        self.loss_fn = keras.losses.MeanSquaredError()

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_tracker, self.mae_metric]

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            plain = self.loss_fn(y, y_pred)
            loss = plain + 0.1 * tf.reduce_mean(tf.square(y_pred)) + tf.add_n(self.losses)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.loss_tracker.update_state(loss)
        self.mae_metric.update_state(y, y_pred)
        return {
            "loss": self.loss_tracker.result(),
            "root": tf.sqrt(self.mae_metric.result()),
            "now": {"plain": plain, "constant": 3.0},
        }

    def test_step(self, data: Any) -> Any:
        x, y = data
        y_pred = self(x, training=False)
        self.mae_metric.update_state(y, y_pred)
        return {"mae": self.mae_metric.result()}


class FromParts(keras.Model):
    """Called on parts of the batch, as keras.io's speech recognition; its metrics are built by the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = layers.Dense(3, activation="tanh", name="first"), layers.Dense(2, name="last")

    def call(self, inputs: Any) -> Any:
        source, scale = inputs
        return self.last(self.first(source)) * scale

    def train_step(self, data: Any) -> Any:
        target = data["target"]
        with tf.GradientTape() as tape:
            predictions = self([data["source"], target[:, :1]])
            loss = self.compute_loss(y=target, y_pred=predictions)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return logs_of(self, loss, target, predictions)


def functional(cls: type[keras.Model], **options: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        features = keras.Input((4,))
        x = layers.Dense(4, activation="tanh", kernel_regularizer="l2", name="first")(features)
        model = cls(features, layers.Dense(2, name="last")(layers.Dense(3, activation="tanh", name="second")(x)))
        model.compile(**{"optimizer": keras.optimizers.Adam(1e-2), **options})
        return model

    return build


class Scaled(keras.Model):
    """Scales its loss itself, and logs something else."""

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = self.optimizer.scale_loss(self.compute_loss(data[0], data[1], self(data[0])))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        return {"two": 2.0}


def from_parts() -> keras.Model:
    """Losses and metrics were to be built by calling it on x, which it can't be."""
    model = FromParts()
    model([X[:1], Y[:1, :1]])
    model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
    return model


COMPILED = {"loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mse"]}
CASES: dict[str, tuple[Callable[[], keras.Model], dict[str, Any]]] = {
    "compiled": (functional(Compiled, **COMPILED), {"x": X, "y": Y, "sample_weight": WEIGHTS}),
    "own loss": (functional(OwnLoss), {"x": X, "y": Y}),
    "from parts": (from_parts, {"x": {"source": X, "target": Y}}),
    "scaled": (lambda: functional(Scaled, loss="mse", optimizer=scaled_adam())(), {"x": X, "y": Y}),
}


def scaled_adam() -> keras.optimizers.Optimizer:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())


def same_logs(own: Any, other: Any) -> None:
    """Of the same names, in the same order, and equal as far as Keras' float32 metrics go."""
    assert list(own) == list(other)
    for name, value in other.items():
        np.testing.assert_allclose(own[name], value, rtol=2e-5, err_msg=name)


@pytest.mark.parametrize("case", CASES)
def test_such_a_model_fits_and_evaluates_as_in_plain_keras(case: str) -> None:
    """Weights, logs and evaluation; the second batch is smaller."""
    use_float64()
    build, data = CASES[case]
    model, plain = pair(build)
    pipelined = pipeline(model, ["first"], (2, 1), 2, 8)
    own = pipelined.fit(**data, verbose=0, shuffle=False).history
    same_logs(own, plain.fit(**data, batch_size=8, verbose=0, shuffle=False).history)
    pipelined.sync()
    assert_same_variables(model, plain, TOLERANCE["float64"])
    if case in ("compiled", "own loss"):
        options = {"return_dict": True, "verbose": 0}
        same_logs(pipelined.evaluate(**data, **options), plain.evaluate(**data, batch_size=8, **options))
        assert np.allclose(pipelined.predict(X, verbose=0), plain.predict(X, verbose=0))


class Read(Compiled):
    """Logs what tutorials log of the optimizer, before and after its update."""

    def train_step(self, data: Any) -> Any:
        rate = self.optimizer.learning_rate
        logs = super().train_step(data)
        return {**logs, "rate": rate, "next": self.optimizer.learning_rate, "steps": self.optimizer.iterations + 1}


def test_logs_of_the_learning_rate() -> None:
    """They were refused as an untracked variable."""
    model, plain = pair(functional(Read, optimizer=keras.optimizers.SGD(0.1), loss="mse"))
    plain.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    pipelined = pipeline(model, ["first"], (1, 1), 2, 8)
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, now: now / 2)
    options = {"epochs": 2, "verbose": 0, "shuffle": False, "callbacks": [halve]}
    same_logs(pipelined.fit(X, Y, **options).history, plain.fit(X, Y, batch_size=8, **options).history)


def test_a_loss_of_the_optimizers_variables_is_refused_and_told_why() -> None:
    class Weighted(keras.Model):
        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(data[0])) * self.optimizer.learning_rate
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"loss": loss}

    def counted(y: Any, p: Any) -> Any:
        return tf.reduce_mean(y - p) * tf.cast(model.optimizer.iterations, p.dtype)

    what = "computes its loss, a metric or state from"
    for cls, loss, text in (
        (Weighted, "mse", rf"train_step\(\) of model .* {what} 'adam.*a weight of a layer"),
        (keras.Model, counted, rf"^model .* {what} 'adam\S*iteration'.* that counts steps"),
    ):
        model = functional(cls, loss=loss)()
        pipelined = pipeline(model, ["first"], (1, 1), 2, 8)
        with pytest.raises(dapple.CaptureError, match=text):
            pipelined.train_on_batch(X[:8], Y[:8])


def predicting(step: Callable[[keras.Model, Any], Any]) -> Callable[[], keras.Model]:
    class Own(keras.Model):
        def predict_step(self, data: Any) -> Any:
            return step(self, keras.utils.unpack_x_y_sample_weight(data)[0])

    return functional(Own, loss="mse")


def test_predictions_by_a_step_of_the_models_own() -> None:
    """Scaled inputs, classes and values of unknown rank beside scores; training has nothing of it."""

    def step(model: keras.Model, x: Any) -> Any:
        scores = model(x / 2.0, training=False)
        absolute = tf.numpy_function(np.abs, [scores], tf.float32)
        return {"scores": tf.nn.softmax(scores), "class": tf.argmax(scores, -1), "absolute": absolute}

    model, plain = pair(predicting(step))
    pipelined = pipeline(model, ["first"], (2, 1), 2, 8)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    for given in (X, data):
        own, other = pipelined.predict(given, verbose=0), plain.predict(given, verbose=0)
        np.testing.assert_allclose(own["scores"], other["scores"], rtol=1e-6)
        np.testing.assert_array_equal(own["class"], other["class"])
        np.testing.assert_allclose(own["absolute"], other["absolute"], rtol=1e-5)
    assert np.isfinite(pipelined.train_on_batch(X[:8], Y[:8]))


@pytest.mark.parametrize(
    ("what", "step"),
    [
        (r"a tensor of shape \(\)", lambda model, x: tf.reduce_max(model(x))),
        (r"a tensor of shape \(4, 4\)", lambda model, x: [model(x), model.layers[1].kernel + 0]),
    ],
)
def test_predictions_without_a_row_for_each_sample_are_refused(what: str, step: Any) -> None:
    pipelined = pipeline(predicting(step)(), ["first"], (1, 1), 2, 8)
    with pytest.raises(dapple.CaptureError, match=rf"predict_step\(\) of model .* returns {what}"):
        pipelined.predict(X, verbose=0)


def doubled(model: keras.Model, gradients: Any) -> None:
    model.optimizer.apply([2 * gradient for gradient in gradients], model.trainable_weights)


def applied(model: keras.Model, gradients: Any) -> None:
    model.optimizer.apply(gradients, model.trainable_weights)


OTHER = keras.optimizers.SGD(name="second")
REFUSED: dict[str, Callable[[keras.Model, Callable[..., Any]], Any]] = {
    "applies other gradients than those of its loss": lambda model, gradients: doubled(model, gradients()),
    "by another optimizer .second.": lambda model, gradients: OTHER.apply(gradients(), model.trainable_weights),
    "doesn't apply its gradients": lambda model, gradients: gradients(),
    "reads weights after": lambda model, gradients: (applied(model, gradients()), model.trainable_weights[0] + 1.0),
    "asks no tf.GradientTape": lambda *_: None,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_steps_are_refused_and_told_why(reason: str) -> None:
    class Other(keras.Model):
        def train_step(self, data: Any) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean(self(data[0]))
            REFUSED[reason](self, lambda count=6: tape.gradient(loss, self.trainable_weights[:count]))
            return {"loss": loss}

    pipelined = pipeline(functional(Other)(), ["first"], (1, 1), 2, 8)
    with pytest.raises(dapple.CaptureError, match=reason):
        pipelined.train_on_batch(X[:8], Y[:8])
