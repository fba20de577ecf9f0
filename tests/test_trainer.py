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


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "arguments"),
    {
        "arrays": ((X, Y), {"epochs": 2, "validation_data": (VAL_X, VAL_Y)}),
        "validation split": ((X, Y), {"epochs": 3, "initial_epoch": 1, "validation_split": 0.25}),
        "sample weights": ((X, Y), {"sample_weight": W, "validation_data": (VAL_X, VAL_Y, VAL_W)}),
        "class weights": ((X, Y), {"class_weight": {0: 0.5, 1: 2.0, 2: 1.0}}),
        "fewer samples than a batch": ((X[:5], Y[:5]), {"epochs": 3}),
        "dataset": ((lambda: dataset(X, Y),), {"epochs": 2, "validation_data": lambda: dataset(VAL_X, VAL_Y, batch=9)}),
        "dataset that repeats": (
            (lambda: dataset(X, Y).repeat(),),
            {
                "epochs": 3,
                "steps_per_epoch": 3,
                "validation_data": lambda: dataset(X, Y).repeat(),
                "validation_steps": 2,
            },
        ),
        "dataset of weighted samples": ((lambda: dataset(X, Y, W),), {}),
    }.values(),
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


@pytest.mark.slow
def test_several_steps_per_execution(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    for model in (pair.plain, pair.model):
        monkeypatch.setattr(model, "steps_per_execution", 3)
        monkeypatch.setattr(model, "train_function", None)
        monkeypatch.setattr(model, "test_function", None)
        monkeypatch.setattr(model, "predict_function", None)
    seen: list[int] = []
    pair.fit(
        *(X, Y),
        epochs=2,
        validation_data=(VAL_X, VAL_Y),
        callbacks=lambda: [keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))],
    )
    assert seen == [2, 5, 2, 5] * 2
    assert_close(pair.pipelined.predict(X, verbose=0), pair.plain.predict(X, verbose=0))


def multi_output() -> keras.Model:
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((2,), name="b")}
    x = layers.Dense(5, activation="tanh", name="from_a")(inputs["a"])
    early = layers.Dense(1, activation="sigmoid", name="early")(x)
    x = layers.Concatenate(name="joined")([x, inputs["b"]])
    model = keras.Model(inputs, {"early": early, "late": layers.Dense(3, name="late")(x)})
    model.compile(
        keras.optimizers.SGD(0.1),
        loss={"early": "binary_crossentropy", "late": "mse"},
        loss_weights={"early": 0.5, "late": 2.0},
        metrics={"early": [keras.metrics.AUC(20, name="auc"), keras.metrics.Precision(name="precision")]},
        weighted_metrics={"late": ["mae"]},
    )
    return model


@pytest.mark.thorough
@pytest.mark.slow
def test_dict_inputs_and_outputs() -> None:
    pair = Pair(multi_output, plan(cuts=["joined"]))
    pair.plain.run_eagerly = False  # Operator by operator Keras weighs the losses of outputs with numbers of samples.
    rng = np.random.default_rng(0)
    x = {"a": X, "b": rng.normal(size=(24, 2)).astype("float32")}
    y = {"early": rng.integers(0, 2, size=(24, 1)), "late": rng.normal(size=(24, 3)).astype("float32")}
    weights = {"early": W, "late": W[::-1].copy()}
    history = pair.fit(x, y, sample_weight=weights, epochs=2, validation_data=(x, y, weights))
    assert {"loss", "early_loss", "late_loss", "early_auc", "early_precision", "late_mae", "val_early_auc"} <= set(
        history
    )
    expected = pair.plain.evaluate(x, y, sample_weight=weights, batch_size=20, verbose=0, return_dict=True)
    got = pair.pipelined.evaluate(x, y, sample_weight=weights, batch_size=20, verbose=0, return_dict=True)
    assert_close(got, expected)
    for few in (20, 1):
        some = {name: array[:few] for name, array in x.items()}
        expected = pair.plain.predict(some, batch_size=20, verbose=0)
        assert_close(pair.pipelined.predict(some, batch_size=20, verbose=0), expected)


@pytest.mark.thorough
@pytest.mark.slow
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


@pytest.mark.slow
def test_evaluate_and_predict_equal_keras(pair: Pair) -> None:
    plain, pipelined = pair.plain, pair.pipelined
    for batch_size in (None, 24):
        expected = plain.evaluate(X, Y, batch_size=batch_size or 7, verbose=0)
        assert_close(pipelined.evaluate(X, Y, batch_size=batch_size, verbose=0), expected)
        assert_close(pipelined.predict(X, batch_size=batch_size, verbose=0), plain.predict(X, verbose=0))
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


@pytest.mark.parametrize("method", ["train_on_batch", "test_on_batch"])
def test_a_first_batch_with_several_losses(method: str) -> None:
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
            getattr(model, method)(X[:7], labels, return_dict=return_dict) for model in (two.pipelined, two.plain)
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


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("devices", [[[0], [1]], [[0, 1], [2]]])
def test_state_that_layers_assign_in_evaluation_and_prediction_is_kept(devices: list[list[int]]) -> None:
    """It was computed and thrown away; ``last``, which nothing reads, in training, too."""

    def build() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), Remembering(name="state"), layers.Dense(3, name="logits")])
        model.compile("sgd", cross_entropy())
        return model

    pair = Pair(build, plan(cuts=["state"], devices=devices))
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


@pytest.mark.slow
def test_callbacks_see_fresh_values(pair: Pair) -> None:
    """At any time by get_weights, evaluate and predict; after an epoch in every variable."""
    seen: list[list[Any]] = []

    class Look(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.own: list[Any] = []
            seen.append(self.own)

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 1:
                self.own += [*self.model.get_weights(), self.model.predict(X, verbose=0)]

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.own += [*values(self.model), self.model.evaluate(VAL_X, VAL_Y, verbose=0)]

    pair.fit(X, Y, epochs=2, callbacks=lambda: [Look()])
    assert_close(seen[1], seen[0])


@pytest.mark.thorough
@pytest.mark.slow
def test_model_checkpoint(pair: Pair, tmp_path: pathlib.Path) -> None:
    names = iter(("plain", "pipelined"))

    def checkpoints() -> list[Any]:
        folder = tmp_path / next(names)
        return [
            keras.callbacks.ModelCheckpoint(folder / "epoch_{epoch}.keras"),
            keras.callbacks.ModelCheckpoint(folder / "batch_{batch}.weights.h5", save_weights_only=True, save_freq=3),
        ]

    pair.fit(X, Y, epochs=2, callbacks=checkpoints)
    files = sorted(path.name for path in (tmp_path / "plain").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "pipelined").iterdir())
    assert {"epoch_1.keras", "epoch_2.keras"} < set(files)
    loaded = keras.saving.load_model(tmp_path / "pipelined" / "epoch_2.keras")
    assert_close(loaded.predict(X, verbose=0), pair.pipelined.predict(X, verbose=0))
    assert_same_values(loaded, pair.plain)
    other = classifier()
    values(other)
    for name in files:
        if name.startswith("batch"):
            other.load_weights(tmp_path / "pipelined" / name)
            ours = other.get_weights()
            other.load_weights(tmp_path / "plain" / name)
            assert_close(ours, other.get_weights())


@pytest.mark.thorough
@pytest.mark.slow
def test_early_stopping_restores_the_best_weights(pair: Pair) -> None:
    def stopping() -> list[Any]:
        monitor = keras.callbacks.EarlyStopping("loss", mode="max", patience=1, restore_best_weights=True)
        return [monitor]

    history = pair.fit(X, Y, epochs=5, callbacks=stopping)
    assert len(history["loss"]) == 2
    # What was restored is what the devices go on with.
    assert_close(pair.pipelined.evaluate(X, Y, verbose=0), pair.plain.evaluate(X, Y, batch_size=7, verbose=0))
    pair.fit(X, Y)


@pytest.mark.thorough
@pytest.mark.slow
def test_learning_rates_that_callbacks_set(pair: Pair, tmp_path: pathlib.Path) -> None:
    class EachBatch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.optimizer.learning_rate = 0.1 / (1 + batch)

    names = iter(("plain", "pipelined"))
    rates = []
    for callbacks in (
        lambda: [keras.callbacks.LearningRateScheduler(lambda epoch: 0.2 / (1 + epoch))],
        lambda: [keras.callbacks.ReduceLROnPlateau("loss", factor=0.3, patience=1, min_delta=10, cooldown=0)],
        lambda: [
            EachBatch(),
            keras.callbacks.CSVLogger(tmp_path / f"{next(names)}.csv"),
        ],
    ):
        pair.reset()
        pair.fit(X, Y, epochs=3, callbacks=callbacks)
        rates.append(float(pair.model.optimizer.learning_rate.numpy()))
    np.testing.assert_allclose(rates, [0.2 / 3, 0.1 * 0.3**2, 0.1 / 4], rtol=1e-6)
    rows = []
    for name in ("plain", "pipelined"):
        with (tmp_path / f"{name}.csv").open() as file:
            rows.append(list(csv.DictReader(file)))
    assert [row["epoch"] for row in rows[1]] == ["0", "1", "2"]
    assert_close([float(row["loss"]) for row in rows[1]], [float(row["loss"]) for row in rows[0]])


@pytest.mark.thorough
@pytest.mark.slow
def test_backup_and_restore(pair: Pair, tmp_path: pathlib.Path) -> None:
    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise InterruptedError

    for name, model in (("plain", pair.plain), ("pipelined", pair.pipelined)):
        backup = keras.callbacks.BackupAndRestore(tmp_path / name)
        with pytest.raises(InterruptedError):
            model.fit(X, Y, batch_size=7, epochs=4, shuffle=False, verbose=0, callbacks=[backup, Interrupt()])
    pair.reset()
    names = iter(("plain", "pipelined"))
    history = pair.fit(X, Y, epochs=4, callbacks=lambda: [keras.callbacks.BackupAndRestore(tmp_path / next(names))])
    assert len(history["loss"]) == 2


def test_tensorboard(pair: Pair, tmp_path: pathlib.Path) -> None:
    pair.fit(X, Y, epochs=2, callbacks=lambda: [keras.callbacks.TensorBoard(tmp_path, histogram_freq=1)])
    assert any(tmp_path.rglob("events*"))


def test_callbacks_may_be_a_list_of_kerass_own(pair: Pair) -> None:
    calls: list[int] = []
    one = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: calls.append(epoch))
    pair.pipelined.fit(X, Y, verbose=0, callbacks=one)
    own = keras.callbacks.CallbackList([one], model=pair.model, add_history=True, epochs=1, verbose=0, steps=4)
    before = list(own.callbacks)
    pair.pipelined.fit(X, Y, verbose=0, callbacks=own)
    assert calls == [0, 0]
    assert own.callbacks == before


@pytest.mark.thorough
@pytest.mark.slow
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


def test_sync_gives_the_users_model(pair: Pair) -> None:
    old = values(pair.model)
    pair.pipelined.train_on_batch(X[:7], Y[:7])
    pair.pipelined.evaluate(X, Y, verbose=0)
    pair.pipelined.predict(X, verbose=0)
    assert pair.pipelined.sync() is pair.model
    pair.plain.train_on_batch(X[:7], Y[:7])
    assert_same_values(pair.model, pair.plain)
    assert not np.array_equal(values(pair.model)[0], old[0])


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


@pytest.mark.thorough
@pytest.mark.slow
def test_ordinary_use_after_training(pair: Pair, tmp_path: pathlib.Path) -> None:
    """Saving and loading with the optimizer's state, training on with plain Keras, and pipelined again."""
    before = attachments(pair.model)
    pair.fit(X, Y)
    assert attachments(pair.model) == before
    pair.pipelined.train_on_batch(X[:7], Y[:7])
    pair.plain.train_on_batch(X[:7], Y[:7])
    pair.pipelined.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert_same_values(loaded, pair.plain)
    histories = [
        model.fit(X, Y, batch_size=7, shuffle=False, verbose=0).history for model in (pair.plain, pair.model, loaded)
    ]
    assert_close(histories[1], histories[0])
    assert_close(histories[2], histories[0])
    pair.fit(X, Y)


@pytest.mark.slow
def test_compiled_again_or_frozen() -> None:
    pair = Pair(classifier)
    pair.pipelined.train_on_batch(X[:7], Y[:7])
    pair.plain.train_on_batch(X[:7], Y[:7])
    for model in (pair.plain, pair.model):
        model.get_layer("first").trainable = False
        model.compile(keras.optimizers.Adam(0.05, epsilon=1e-3), cross_entropy(), metrics=["accuracy"])
    before = pair.pipelined.sync().get_layer("first").get_weights()
    pair.fit(X[:14], Y[:14])
    assert_equal(pair.model.get_layer("first").get_weights(), before)


@pytest.mark.thorough
@pytest.mark.slow
def test_moving_averages_of_the_weights() -> None:
    """They are the model's values after fit, as in Keras; callbacks may swap them in for validation."""
    pair = Pair(lambda: classifier(optimizer=keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.6)))
    pair.fit(X, Y, epochs=2)
    assert_close(pair.pipelined.predict(X, verbose=0), pair.plain.predict(X, verbose=0))
    for swap_on_epoch in (False, True):
        pair.reset()
        callbacks = lambda on=swap_on_epoch: [keras.callbacks.SwapEMAWeights(swap_on_epoch=on)]  # noqa: E731
        pair.fit(X, Y, epochs=3, validation_data=(VAL_X, VAL_Y), callbacks=callbacks)


@pytest.mark.slow
def test_closing_and_going_on(pair: Pair) -> None:
    pair.pipelined.train_on_batch(X[:7], Y[:7])
    pair.plain.train_on_batch(X[:7], Y[:7])
    pair.pipelined.close()
    pair.pipelined.close()
    assert_same_values(pair.model, pair.plain)
    assert_close(pair.pipelined.evaluate(X, Y, verbose=0), pair.plain.evaluate(X, Y, batch_size=7, verbose=0))


# --- what is left behind


@pytest.mark.slow
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


class Subclassed(keras.Model):
    """Calls a functional model, then layers of its own; ``tokens`` may be of any length."""

    def __init__(self) -> None:
        super().__init__()
        inner_input = keras.Input((4,))
        x = layers.Dense(6, activation="tanh", name="inner_first")(inner_input)
        self.inner = keras.Model(inner_input, layers.Dense(5, name="inner_second")(x), name="inner")
        self.hidden = layers.Dense(5, activation="tanh", name="hidden")
        self.logits = layers.Dense(3, name="logits")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.logits(self.hidden(self.inner(x)))


def subclassed() -> keras.Model:
    model = Subclassed()
    model(X[:2])
    model.compile(keras.optimizers.SGD(0.1), cross_entropy(), metrics=["accuracy"])
    return model


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "cut", ["inner/inner_first", *(pytest.param(cut, marks=pytest.mark.slow) for cut in ("inner", "hidden"))]
)
def test_subclassed_model(cut: str) -> None:
    pair = Pair(subclassed, plan(cuts=[cut]))
    pair.fit(X[:14], Y[:14], validation_data=(VAL_X[:7], VAL_Y[:7]))
    assert_close(pair.pipelined.predict(X[:7], verbose=0), pair.plain.predict(X[:7], verbose=0))


class OverTime(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = layers.Embedding(9, 4, name="embedding")
        self.logits = layers.Dense(3, name="logits")

    def call(self, tokens: Any) -> Any:
        return self.logits(keras.ops.mean(self.embedding(tokens), axis=1))


@pytest.mark.thorough
@pytest.mark.slow
def test_lengths_that_vary_without_declared_inputs() -> None:
    """A dataset's shapes say which axes vary; batch by batch, each new length widens what is known."""
    tokens = np.random.default_rng(3).integers(0, 9, size=(21, 6))

    def build() -> keras.Model:
        model = OverTime()
        model(tokens[:2])
        model.compile(keras.optimizers.SGD(0.1), cross_entropy())
        return model

    def batches() -> tf.data.Dataset:
        def cut(index: Any, x: Any, y: Any) -> Any:
            return x[:, : 3 + index], y

        return dataset(tokens, Y[:21]).enumerate().map(lambda index, pair: cut(index, *pair))

    pair = Pair(build, plan(cuts=["embedding"]))
    pair.fit(batches, epochs=2)
    for length in (2, 5, 6):
        batch = tokens[:7, :length], Y[:7]
        assert_close(pair.pipelined.train_on_batch(*batch), pair.plain.train_on_batch(*batch))
        assert_close(pair.pipelined.predict_on_batch(batch[0]), pair.plain.predict_on_batch(batch[0]))


def assert_equal(ours: list[np.ndarray], theirs: list[np.ndarray]) -> None:
    for own, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(own, other)


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
