"""The Keras front against plain Keras: fit, evaluate, predict, callbacks, and what happens to values."""

from __future__ import annotations

import csv
import functools
import pathlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models_for_tests import (
    ATTACHED,
    Pair,
    assert_close,
    assert_same_values,
    classifier,
    layers,
    plan,
    samples,
    transform,
    values,
)

import dapple_tf as dapple
from dapple_tf import automatic

X, Y, W = samples(24)
VAL_X, VAL_Y, VAL_W = samples(10, seed=1)


def dataset(*parts: Any, batch: int = 7) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(parts).batch(batch)


def generator() -> Iterator[tuple[np.ndarray, ...]]:
    for start in range(0, 24, 7):
        yield X[start : start + 7], Y[start : start + 7]


@pytest.fixture(scope="module")
def shared() -> Pair:
    return Pair(lambda: classifier(metrics=["accuracy"], weighted_metrics=["sparse_categorical_crossentropy"]))


@pytest.fixture
def pair(shared: Pair) -> Pair:
    shared.reset()
    return shared


# --- fit


@pytest.mark.parametrize(
    ("data", "arguments"),
    [
        ((X, Y), {"epochs": 3, "initial_epoch": 1, "validation_split": 0.25}),
        ((X[:5], Y[:5]), {"sample_weight": W[:5], "validation_data": (VAL_X, VAL_Y, VAL_W)}),
        (
            (lambda: dataset(X, Y, W).repeat(),),
            {
                "epochs": 2,
                "steps_per_epoch": 3,
                "validation_data": lambda: dataset(X, Y).repeat(),
                "validation_steps": 2,
            },
        ),
    ],
    ids=["split", "few weighted samples", "dataset"],
)
def test_fit_equals_keras(pair: Pair, data: tuple[Any, ...], arguments: dict[str, Any]) -> None:
    pair.fit(*data, **arguments)


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
def test_fit_on_a_generator_equals_keras(pair: Pair) -> None:
    histories = [model.fit(generator(), shuffle=False, verbose=0).history for model in (pair.plain, pair.pipelined)]
    assert_close(histories[1], histories[0])
    # Not the optimizer's: plain Keras counts the end of the data as one more iteration.
    assert_close(pair.model.get_weights(), pair.plain.get_weights())
    assert int(pair.model.optimizer.iterations.numpy()) == 4


def test_data_that_end_early(pair: Pair) -> None:
    with pytest.warns(UserWarning, match="Your input ran out of data"):
        pair.fit(lambda: dataset(X[:14], Y[:14]), steps_per_epoch=5, epochs=2)


def test_several_steps_per_execution(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (pair.plain, pair.model):
        monkeypatch.setattr(model, "steps_per_execution", 3)
        for name in ("train_function", "test_function", "predict_function"):
            monkeypatch.setattr(model, name, None)
    seen: list[int] = []
    pair.fit(
        *(X, Y),
        epochs=2,
        validation_data=(VAL_X, VAL_Y),
        callbacks=lambda: [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))],
    )
    assert seen == [2, 5, 2, 5] * 2
    assert_close(pair.pipelined.predict(X, verbose=0), pair.plain.predict(X, verbose=0))


def test_loss_without_labels() -> None:
    class Bottleneck(layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.1 * keras.ops.mean(x * x))
            return x

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), layers.Dense(5, name="first"), layers.Dense(3), Bottleneck()])
        model.compile(keras.optimizers.SGD(0.1))
        return model

    Pair(build).fit(X, epochs=2)


# --- evaluate, predict, batch by batch


def test_evaluate_and_predict_equal_keras(pair: Pair) -> None:
    plain, pipelined = pair.plain, pair.pipelined
    assert_close(pipelined.evaluate(X, Y, verbose=0), plain.evaluate(X, Y, batch_size=7, verbose=0))
    assert_close(pipelined.evaluate(X, Y, batch_size=24, verbose=0), plain.evaluate(X, Y, batch_size=24, verbose=0))
    assert_close(pipelined.predict(dataset(X, batch=24), verbose=0), plain.predict(X, verbose=0))
    assert_close(pipelined.predict(X[:1], verbose=0), plain.predict(X[:1], verbose=0))


def test_batch_by_batch(pair: Pair) -> None:
    plain, pipelined = pair.plain, pair.pipelined
    for size in (7, 3, 7):
        assert_close(pipelined.train_on_batch(X[:size], Y[:size]), plain.train_on_batch(X[:size], Y[:size]))
    batch = {"sample_weight": W[:7], "return_dict": True}
    assert_close(pipelined.train_on_batch(X[:7], Y[:7], **batch), plain.train_on_batch(X[:7], Y[:7], **batch))
    weights = {"class_weight": {0: 3.0, 1: 1.0, 2: 1.0}}
    assert_close(pipelined.train_on_batch(X[:7], Y[:7], **weights), plain.train_on_batch(X[:7], Y[:7], **weights))
    assert_close(pipelined.test_on_batch(X, Y), plain.test_on_batch(X, Y))
    assert_close(pipelined.test_on_batch(X, Y, return_dict=True), plain.test_on_batch(X, Y, return_dict=True))
    assert_close(pipelined.predict_on_batch(X[:2]), plain.predict_on_batch(X[:2]))
    assert_same_values(pipelined.sync(), plain)


def test_metrics_that_somebody_uses_between_two_steps(pair: Pair) -> None:
    """What steps leave in metrics is assigned only when somebody uses them."""
    seen = []

    class Uses(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            loss, accuracy = self.model.metrics[0], self.model.metrics[1].metrics[0]
            if batch == 1:
                seen.append([float(loss.result()), float(accuracy.total.numpy())])
                loss.reset_state()
                accuracy.count.assign_add(5.0)

    pair.fit(X, Y, epochs=2, callbacks=lambda: [Uses()])
    assert_close(seen[:2], seen[2:])
    for model in (pair.pipelined, pair.plain):
        model.train_on_batch(X[:7], Y[:7])
    tracked = [[variable.numpy() for variable in model.metrics_variables] for model in (pair.model, pair.plain)]
    assert_close(*tracked)
    twice = transform(pair.model)
    for model in (pair.pipelined, twice, pair.pipelined):
        assert_close(model.train_on_batch(X[:7], Y[:7]), pair.plain.train_on_batch(X[:7], Y[:7]))
    twice.close()
    pair.pipelined.close()
    tracked = [[variable.numpy() for variable in model.metrics_variables] for model in (pair.model, pair.plain)]
    assert_close(*tracked)


def test_a_first_batch_with_several_losses() -> None:
    """Keras makes their metrics in the first step, whose logs had lacked them."""

    def build() -> keras.Model:
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        hidden = layers.Dense(4, name="first")(inputs)
        model = keras.Model(inputs, [layers.Dense(1, name="one")(hidden), layers.Dense(1, name="other")(hidden)])
        model.compile("sgd", loss=["mse", "mae"], metrics=[["mae"], []])
        return model

    two = Pair(build)
    labels = [Y[:7, None].astype("float32"), X[:7, :1]]
    for return_dict in (False, True):
        own, plain = (
            model.train_on_batch(X[:7], labels, return_dict=return_dict) for model in (two.pipelined, two.plain)
        )
        assert len(own) == len(plain) == 4
        assert_close(own, plain)
    two.pipelined.close()


def test_metrics_after_a_batch_that_fails(pair: Pair) -> None:
    """Keras has reset them."""
    for model in (pair.pipelined, pair.plain):
        model.train_on_batch(X[:7], Y[:7])
        with pytest.raises(Exception, match=r"."):
            model.train_on_batch(X[:7])
        assert float(model.metrics[0].result()) == 0


def test_a_metric_with_a_reset_of_its_own() -> None:
    def build() -> keras.Model:
        model = classifier(metrics=["accuracy"])
        tracker = model.metrics[0]
        tracker.reset_state = lambda: (tracker.total.assign(5.0), tracker.count.assign(2.0))
        return model

    two = Pair(build)
    for _ in range(2):
        assert_close(*(model.train_on_batch(X[:7], Y[:7]) for model in (two.pipelined, two.plain)))
    two.pipelined.close()


class Remembering(layers.Layer):
    """Counts batches, adds up their means and keeps the last one's, in inference, too; subtracts the sum before it."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        state = functools.partial(self.add_weight, initializer="zeros", trainable=False)
        self.batches = state(name="batches", shape=(), dtype="int32")
        self.total = state(name="total", shape=())
        self.last = state(name="last", shape=shape[1:])

    def call(self, x: Any) -> Any:
        shifted = x - self.total
        self.batches.assign_add(1)
        self.total.assign_add(0.1 * keras.ops.mean(x))
        self.last.assign(keras.ops.mean(x, axis=0))
        return shifted


def test_state_that_layers_assign_in_evaluation_and_prediction_is_kept() -> None:
    """It was computed and thrown away; ``last``, which nothing reads, in training, too."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), Remembering(name="state"), layers.Dense(3, name="logits")])
        model.compile("sgd", cross_entropy())
        return model

    pair = Pair(build, plan(cuts=["state"], devices=[[0, 1], [2]]))
    for model in (pair.plain, pair.pipelined):
        model.evaluate(X[:14], Y[:14], batch_size=7, verbose=0)
        model.evaluate(X[:1], Y[:1], verbose=0)  # One of two replicas has no samples.
    assert_same_values(pair.pipelined.sync(), pair.plain)
    assert int(pair.model.get_layer("state").batches) == 3
    assert_close(*(model.predict(X[:14], batch_size=7, verbose=0) for model in (pair.pipelined, pair.plain)))
    assert_close(*(model.predict_on_batch(X[:7]) for model in (pair.pipelined, pair.plain)))
    pair.fit(X[:7], Y[:7], epochs=2, validation_data=(VAL_X[:7], VAL_Y[:7]))
    assert int(pair.model.get_layer("state").batches) == 3 + 2 + 1 + 2 * (1 + 1)


def test_random_numbers_of_predictions_differ_from_call_to_call() -> None:
    """Layers that always drop are used to tell how uncertain a prediction is; each call drew the same numbers."""

    class Dropping(layers.Dropout):
        def call(self, inputs: Any, training: bool | None = None) -> Any:
            return super().call(inputs, training=True)

    def build() -> keras.Model:
        stack = [layers.Dense(6, name="first"), Dropping(0.5, seed=1), layers.Dense(3, name="logits")]
        model = keras.Sequential([keras.Input((4,)), *stack])
        model.compile("sgd", cross_entropy())
        return model

    pair = Pair(build, plan(devices=[[0], [1]], micro_batches=1))
    first, second = (pair.pipelined.predict_on_batch(X[:7]) for _ in range(2))
    assert np.abs(first - second).max() > 0.1
    assert_close([first, second], [pair.plain.predict_on_batch(X[:7]) for _ in range(2)])


# --- callbacks


def test_callbacks_see_and_set_fresh_values(pair: Pair, tmp_path: pathlib.Path) -> None:
    """Values by get_weights, evaluate and predict at any time, after an epoch in every variable; and rates are set."""
    seen: list[list[Any]] = []

    class Look(keras.callbacks.Callback):
        def __init__(self, own: list[Any]) -> None:
            super().__init__()
            self.own = own
            seen.append(own)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.1 / (1 + batch)
            if batch == 1:
                self.own += [*self.model.get_weights(), self.model.predict(X, verbose=0)]

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.own += [*values(self.model), self.model.evaluate(VAL_X, VAL_Y, verbose=0)]

    def callbacks() -> list[Any]:
        folder = tmp_path / ("pipelined" if seen else "plain")
        return [
            Look([]),
            keras.callbacks.LearningRateScheduler(lambda epoch: 0.2 / (1 + epoch)),
            keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras"),
            keras.callbacks.CSVLogger(f"{folder}.csv"),
            keras.callbacks.TensorBoard(folder / "logs", histogram_freq=1),
        ]

    pair.fit(X, Y, epochs=2, callbacks=callbacks)
    assert_close(seen[1], seen[0])
    loaded = [keras.saving.load_model(tmp_path / name / "2.keras") for name in ("plain", "pipelined")]
    assert_same_values(*loaded)
    assert_same_values(loaded[1], pair.plain)
    losses = []
    for name in ("plain", "pipelined"):
        with (tmp_path / f"{name}.csv").open() as file:
            losses.append([float(row["loss"]) for row in csv.DictReader(file)])
    assert_close(*losses)


def test_early_stopping_restores_the_best_weights(pair: Pair) -> None:
    stop = functools.partial(keras.callbacks.EarlyStopping, "loss", mode="max", restore_best_weights=True)
    assert len(pair.fit(X, Y, epochs=5, callbacks=lambda: [stop(patience=1)])["loss"]) == 2
    pair.fit(X, Y)  # The devices go on with what was restored.


def test_moving_averages_of_the_weights() -> None:
    """They are the model's values after fit, as in Keras; callbacks may swap them in for validation."""
    pair = Pair(lambda: classifier(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.6)))
    pair.fit(
        *(X, Y),
        epochs=2,
        validation_data=(VAL_X, VAL_Y),
        callbacks=lambda: [keras.callbacks.SwapEMAWeights(swap_on_epoch=False)],
    )


def test_callbacks_may_be_a_list_of_kerass_own(pair: Pair) -> None:
    calls: list[int] = []
    one = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: calls.append(epoch))
    pair.pipelined.fit(X, Y, verbose=0, callbacks=one)
    own = keras.callbacks.CallbackList([one], model=pair.model, add_history=True, epochs=1, verbose=0, steps=4)
    before = list(own.callbacks)
    pair.pipelined.fit(X, Y, verbose=0, callbacks=own)
    assert calls == [0, 0]
    assert own.callbacks == before


@pytest.mark.parametrize("terminates", [True, False])
def test_a_loss_is_not_finite(terminates: bool) -> None:
    """As in Keras: TerminateOnNaN was never asked, and steps that loss scaling leaves out ended training."""
    bad = X.copy()
    bad[10] = np.nan

    def build() -> keras.Model:
        inner = keras.optimizers.SGD(0.1)
        return classifier(optimizer=inner if terminates else keras.optimizers.LossScaleOptimizer(inner, 8.0))

    plain, model = build(), build()
    model.set_weights(plain.get_weights())
    callbacks = [keras.callbacks.TerminateOnNaN()] if terminates else []
    options = {"batch_size": 7, "epochs": 2, "verbose": 0, "shuffle": False, "callbacks": callbacks}
    losses = [own.fit(bad, Y, **options).history["loss"] for own in (plain, transform(model))]
    assert [len(own) for own in losses] == [1 if terminates else 2] * 2
    assert np.isnan(losses).all()
    if not terminates:
        assert_close(model.get_weights(), plain.get_weights())


# --- where values are


def test_the_users_own_values_are_taken_over(pair: Pair) -> None:
    """Also when devices have newer ones of others."""
    others = [weight + 0.1 for weight in pair.plain.get_weights()]
    pair.pipelined.fit(X, Y, verbose=0)
    for change in (others, [2 * weight for weight in others]):
        for model in (pair.plain, pair.model):
            model.set_weights(change)
        assert_close(pair.pipelined.predict_on_batch(X), pair.plain.predict_on_batch(X))
    pair.pipelined.train_on_batch(X[:7], Y[:7])
    for model in (pair.plain, pair.model):
        model.set_weights(others)
    assert_close(pair.pipelined.predict_on_batch(X), pair.plain.predict_on_batch(X))
    pair.pipelined.load()
    assert_close(pair.pipelined.predict_on_batch(X), pair.plain.predict_on_batch(X))


def test_ordinary_use_after_training(pair: Pair, tmp_path: pathlib.Path) -> None:
    """Saving and loading with the optimizer's state, and training on with plain Keras; nothing stays attached."""
    before = attachments(pair.model)
    pair.fit(X, Y)
    assert attachments(pair.model) == before
    pair.pipelined.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    for model in (pair.plain, pair.model, loaded):
        model.fit(X[:7], Y[:7], batch_size=7, shuffle=False, verbose=0)
    assert_same_values(loaded, pair.plain)
    assert_same_values(pair.model, pair.plain)


def test_closing_and_going_on(pair: Pair) -> None:
    pair.pipelined.train_on_batch(X[:7], Y[:7])
    pair.plain.train_on_batch(X[:7], Y[:7])
    pair.pipelined.close()
    pair.pipelined.close()
    assert_same_values(pair.model, pair.plain)
    assert_close(pair.pipelined.evaluate(X, Y, verbose=0), pair.plain.evaluate(X, Y, batch_size=7, verbose=0))


# --- what is left behind


@pytest.mark.skipif(not pathlib.Path("/proc/self/task").exists(), reason="threads are counted in /proc")
def test_steps_leave_no_threads_behind(pair: Pair) -> None:
    """Such as those that wait for the timeout of a collective."""

    def threads() -> int:
        return len(list(pathlib.Path("/proc/self/task").iterdir()))

    pair.pipelined.train_on_batch(X[:7], Y[:7])
    before = threads()
    for _ in range(20):
        pair.pipelined.train_on_batch(X[:7], Y[:7])
    assert threads() < before + 20


# --- models without declared inputs


class OverTime(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = layers.Embedding(9, 4, name="embedding")
        self.logits = layers.Dense(3, name="logits")

    def call(self, tokens: Any) -> Any:
        return self.logits(keras.ops.mean(self.embedding(tokens), axis=1))


def test_lengths_that_vary_without_declared_inputs() -> None:
    """A dataset's shapes say which axes vary; batch by batch, each new length widens what is known."""
    tokens = np.random.default_rng(3).integers(0, 9, size=(21, 6))

    def build() -> keras.Model:
        model = OverTime()
        model(tokens[:2])
        model.compile(keras.optimizers.SGD(0.1), cross_entropy())
        return model

    pair = Pair(build, plan(cuts=["embedding"]))
    pair.fit(lambda: dataset(tokens[:7, :4], Y[:7]).concatenate(dataset(tokens[:7, :3], Y[:7])))
    for length in (2, 6):
        batch = tokens[:7, :length], Y[:7]
        assert_close(pair.pipelined.train_on_batch(*batch), pair.plain.train_on_batch(*batch))


def attachments(model: keras.Model) -> dict[str, Any]:
    """What a model and its layers have of what is attached to them meanwhile."""
    objects = model._flatten_layers()
    return {f"{item.name}.{name}": vars(item)[name] for item in objects for name in ATTACHED if name in vars(item)}


def cross_entropy() -> Callable[..., Any]:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def test_models_whose_values_are_on_the_cluster_s_gpus_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Steps have values of their own there, and plans subtract the model's."""
    names = [f"/job:localhost/replica:0/task:0/device:GPU:{number}" for number in range(2)]
    cluster = dapple.Cluster(tuple(dapple.Device(name, 0, 2**30) for name in names))
    model = classifier()
    model.optimizer.build(model.trainable_variables)
    held = SimpleNamespace(device=names[1], shape=tf.TensorShape([2**20]), dtype=tf.float32)
    with dapple.deferred_init():
        large = keras.Sequential([keras.Input((1000,)), layers.Dense(1000)])
    assert automatic.beside_values(model, cluster) == cluster
    monkeypatch.setattr(automatic, "tensorflow_variable", lambda variable: held)
    assert automatic.beside_values(large, cluster) == cluster
    automatic.beside_values(model, dapple.Cluster.local(2, kind="cpu"))
    assert not caplog.messages
    size = 4 * len(model.variables + model.optimizer.variables)
    for _ in range(2):
        left = [device.memory_bytes for device in automatic.beside_values(model, cluster).devices]
        assert left == [2**30, 2**30 - size * 2**20]
    (warning,) = caplog.messages
    assert warning.startswith(
        f"model 'classifier' keeps {size} MiB of values on GPU:1, beside those that steps use there"
    )
    assert 'build it under tf.device("CPU:0"), or,' in warning
