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
        return self.logs_of(loss, y, y_pred, sample_weight)

    def test_step(self, data: Any) -> Any:
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        y_pred = self(x, training=False)
        loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
        return self.logs_of(loss, y, y_pred, sample_weight)

    def logs_of(self, loss: Any, y: Any, y_pred: Any, sample_weight: Any) -> Any:
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
        return {m.name: m.result() for m in self.metrics}


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


class Super(keras.Model):
    """Adds to Keras' own step."""

    def train_step(self, data: Any) -> Any:
        return {**super().train_step(data), "two": 2.0}


class Parts(keras.Model):
    """It is never called as a whole, as keras.io's variational autoencoder; a loss for each sample, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((4,)), layers.Dense(3, activation="tanh", name="first")])
        self.decoder = keras.Sequential([keras.Input((3,)), layers.Dense(4, name="last")])
        self.tracker = keras.metrics.Mean(name="reconstruction")

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.tracker]

    def train_step(self, data: Any) -> Any:
        with tf.GradientTape() as tape:
            losses = keras.losses.mean_squared_error(data, self.decoder(self.encoder(data)))
            penalties = tf.stack([tf.reduce_sum(tf.abs(weight)) for weight in self.trainable_weights])
        loss = tf.reduce_mean(losses)
        grads = tape.gradient([losses, penalties], self.trainable_weights)
        self.optimizer.apply_gradients(zip(grads, self.trainable_weights, strict=True))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


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
        results = {}
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(target, predictions)
            results[metric.name] = metric.result()
        return results


def functional(cls: type[keras.Model], **options: Any) -> Callable[[], keras.Model]:
    def build() -> keras.Model:
        features = keras.Input((4,))
        x = layers.Dense(4, activation="tanh", kernel_regularizer="l2", name="first")(features)
        model = cls(features, layers.Dense(2, name="last")(layers.Dense(3, activation="tanh", name="second")(x)))
        model.compile(**{"optimizer": keras.optimizers.Adam(1e-2), **options})
        return model

    return build


def parts() -> keras.Model:
    model = Parts()
    model.compile(keras.optimizers.Adam(1e-2))
    return model


COMPILED = {"loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mse"]}
slow = pytest.mark.slow
CASES = {
    "compiled": (functional(Compiled, **COMPILED), (X, Y, WEIGHTS)),
    "own loss": (functional(OwnLoss), (X, Y)),
    "super": (functional(Super, loss="mse", metrics=["mae"]), (X, Y)),
    "parts": (parts, (X,)),
}


def same_logs(own: Any, other: Any) -> None:
    """Of the same names, in the same order, and equal as far as Keras' float32 metrics go."""
    assert list(own) == list(other)
    for name, value in other.items():
        np.testing.assert_allclose(own[name], value, rtol=2e-5, err_msg=name)


@pytest.mark.few(1)
@pytest.mark.parametrize("case", [case if case == "own loss" else pytest.param(case, marks=slow) for case in CASES])
def test_such_a_model_fits_and_evaluates_as_in_plain_keras(case: str) -> None:
    """Weights, logs of each epoch and those of evaluation; the second batch of an epoch is smaller."""
    use_float64()
    build, (x, *rest) = CASES[case]
    model, plain = pair(build)
    pipelined = pipeline(model, ["first"], (2, 1), 2, 8)
    y, weights = (*rest, None, None)[:2]
    assert (
        pipelined.verify(*(None if part is None else part[:8] for part in (x, y, weights)), steps=0).worst[1]
        <= TOLERANCE["float64"]
    )
    options = {"epochs": 2, "verbose": 0, "shuffle": False}
    own = pipelined.fit(x, y, sample_weight=weights, **options).history
    same_logs(own, plain.fit(x, y, batch_size=8, sample_weight=weights, **options).history)
    pipelined.sync()
    assert_same_variables(model, plain, TOLERANCE["float64"])
    if case != "parts":
        same_logs(
            pipelined.evaluate(x, y, sample_weight=weights, return_dict=True, verbose=0),
            plain.evaluate(x, y, batch_size=8, sample_weight=weights, return_dict=True, verbose=0),
        )
        assert np.allclose(pipelined.predict(x, verbose=0), plain.predict(x, verbose=0))


def test_a_model_may_be_called_on_other_things_than_its_data() -> None:
    """Losses and metrics were to be built by calling it on x, which it can't be."""

    def build() -> keras.Model:
        model = FromParts()
        model([X[:1], Y[:1, :1]])
        model.compile(keras.optimizers.Adam(1e-2), "mse", metrics=["mae"])
        return model

    use_float64()
    model, plain = pair(build)
    pipelined, batch = pipeline(model, ["first"], (2, 1), 2, 11), {"source": X, "target": Y}
    options = {"batch_size": 11, "epochs": 2, "verbose": 0, "shuffle": False}
    same_logs(*(each.fit(batch, **options).history for each in (pipelined, plain)))
    pipelined.sync()
    assert_same_variables(model, plain, TOLERANCE["float64"])


@pytest.mark.thorough
@slow
def test_loss_scaling_is_that_of_the_step() -> None:
    class Scaled(Compiled):
        def train_step(self, data: Any) -> Any:
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                loss = self.optimizer.scale_loss(self.compute_loss(x, y, self(x)))
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {}

    def build() -> keras.Model:
        return functional(Scaled, loss="mse", optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))()

    use_float64()
    model, plain = pair(build)
    pipelined = pipeline(model, ["first"], (1, 1), 2, 8)
    for _ in range(2):
        assert pipelined.train_on_batch(X[:8], Y[:8], return_dict=True) == {}
        plain.train_on_batch(X[:8], Y[:8])
    pipelined.sync()
    assert_same_variables(model, plain, TOLERANCE["float64"])


class Read(Compiled):
    """Logs what tutorials log of the optimizer, before and after its update."""

    def train_step(self, data: Any) -> Any:
        rate = self.optimizer.learning_rate
        logs = super().train_step(data)
        return {**logs, "rate": rate, "next": self.optimizer.learning_rate, "steps": self.optimizer.iterations + 1}


@pytest.mark.few(1)
@pytest.mark.parametrize("schedule", [False, True])
def test_logs_of_the_learning_rate(schedule: bool) -> None:
    """They were refused as an untracked variable. A schedule's rate before the update isn't there any more."""
    rate: Any = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5) if schedule else 0.1

    class After(Read):
        def train_step(self, data: Any) -> Any:
            return {**Compiled.train_step(self, data), "next": self.optimizer.learning_rate}

    build = functional(After if schedule else Read, optimizer=keras.optimizers.SGD(rate), loss="mse")
    model, plain = (keras.models.clone_model(build()) for _ in range(2))
    for own in (model, plain):
        own.compile(keras.optimizers.SGD(rate), "mse")
    plain.run_eagerly = True
    plain.set_weights(model.get_weights())
    pipelined = pipeline(model, ["first"], (1, 1), 2, 8)
    halve = keras.callbacks.LearningRateScheduler(lambda epoch, now: now / 2)
    options = {"epochs": 2, "verbose": 0, "shuffle": False, "callbacks": [] if schedule else [halve]}
    same_logs(pipelined.fit(X, Y, **options).history, plain.fit(X, Y, batch_size=8, **options).history)


def test_a_loss_of_the_optimizers_variables_is_refused_and_told_why() -> None:
    class Weighted(keras.Model):
        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(data[0])) * self.optimizer.learning_rate
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"loss": loss}

    class Before(Read):
        def train_step(self, data: Any) -> Any:
            return {"steps": self.optimizer.iterations + 0, **Compiled.train_step(self, data)}

    def counted(y: Any, p: Any) -> Any:
        return tf.reduce_mean(y - p) * tf.cast(model.optimizer.iterations, p.dtype)

    what = "computes its loss, a metric or state from"
    for cls, loss, text in (
        (Weighted, "mse", rf"train_step\(\) of model .* {what} 'adam.*a weight of a layer"),
        (keras.Model, counted, rf"^model .* {what} 'adam\S*iteration'.* that counts steps"),
        (Before, "mse", r"computes a log from.*read after self.optimizer.apply\(\)"),
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


@pytest.mark.thorough
def test_predictions_by_a_step_of_the_models_own() -> None:
    """Scaled inputs, classes beside scores; training has nothing of it."""

    def step(model: keras.Model, x: Any) -> Any:
        scores = model(x / 2.0, training=False)
        return {"scores": tf.nn.softmax(scores), "class": tf.argmax(scores, -1)}

    model, plain = pair(predicting(step))
    pipelined = pipeline(model, ["first"], (2, 1), 2, 8)
    own, other = pipelined.predict(X, verbose=0), plain.predict(X, batch_size=8, verbose=0)
    assert own.keys() == other.keys()
    np.testing.assert_allclose(own["scores"], other["scores"], rtol=1e-6)
    np.testing.assert_array_equal(own["class"], other["class"])
    loss = pipelined.train_on_batch(X[:8], Y[:8])
    np.testing.assert_allclose(loss, plain.train_on_batch(X[:8], Y[:8]), rtol=1e-5)
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)
    np.testing.assert_allclose(
        pipelined.predict(data, verbose=0)["scores"], plain.predict(data, verbose=0)["scores"], rtol=1e-4
    )


@pytest.mark.parametrize(
    ("what", "step"),
    [
        (r"a tensor of shape \(\)", lambda model, x: tf.reduce_max(model(x))),
        (r"a tensor of shape \(4, 4\)", lambda model, x: [model(x), model.layers[1].kernel + 0]),
        ("something that isn't a tensor", lambda model, x: None),
    ],
)
def test_predictions_without_a_row_for_each_sample_are_refused(what: str, step: Any) -> None:
    pipelined = pipeline(predicting(step)(), ["first"], (1, 1), 2, 8)
    with pytest.raises(dapple.CaptureError, match=rf"predict_step\(\) of model .* returns {what}"):
        pipelined.predict(X, verbose=0)


def _changed(model: Any, tape: Any, loss: Any) -> None:
    gradients = tape.gradient(loss, model.trainable_weights)
    model.optimizer.apply([gradient * 2 for gradient in gradients], model.trainable_weights)


def _twice(model: Any, tape: Any, loss: Any) -> None:
    gradients = tape.gradient(loss, model.trainable_weights)
    model.optimizer.apply(gradients, model.trainable_weights)
    tape.gradient(loss, model.trainable_weights)


def _some(model: Any, tape: Any, loss: Any) -> None:
    tape.gradient(loss, model.trainable_weights[:1])


OTHER = keras.optimizers.SGD(name="second")


def _others(model: Any, tape: Any, loss: Any) -> None:
    OTHER.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)


def _unapplied(model: Any, tape: Any, loss: Any) -> None:
    tape.gradient(loss, model.trainable_weights)


def _reads(model: Any, tape: Any, loss: Any) -> None:
    model.optimizer.apply(tape.gradient(loss, model.trainable_weights), model.trainable_weights)
    model.trainable_weights[0] + 1.0


REFUSED = {
    "applies other gradients than those of its loss": _changed,
    "more than once": _twice,
    "with respect to 1 of 6 trainable weights": _some,
    "by another optimizer .second.": _others,
    "doesn't apply its gradients": _unapplied,
    "reads weights after": _reads,
    "asks no tf.GradientTape": lambda *_: None,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_other_steps_are_refused_and_told_why(reason: str) -> None:
    class Other(keras.Model):
        def train_step(self, data: Any) -> Any:
            with tf.GradientTape(persistent=True) as tape:
                loss = tf.reduce_mean(self(data[0]))
            REFUSED[reason](self, tape, loss)
            return {"loss": loss}

    pipelined = pipeline(functional(Other)(), ["first"], (1, 1), 2, 8)
    with pytest.raises(dapple.CaptureError, match=reason):
        pipelined.train_on_batch(X[:8], Y[:8])
