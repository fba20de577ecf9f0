"""The Keras front against plain Keras: fit, evaluate, predict, callbacks, and what happens to values."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import pathlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
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
from dapple_tf.frontend.batch_sizes import BatchSizes

X, Y, W = samples(24)
VAL_X, VAL_Y, VAL_W = samples(10, seed=1)


def dataset(*parts: Any, batch: int = 7) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(parts).batch(batch)


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


# --- evaluate, predict, batch by batch


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
    own, plain = (model.train_on_batch(X[:7], labels, return_dict=True) for model in (two.pipelined, two.plain))
    assert len(own) == 4
    assert_close(own, plain)


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
    pair.fit(X[:7], Y[:7])
    assert int(pair.model.get_layer("state").batches) == 3 + 2 + 1


def test_random_numbers_of_predictions_differ_from_call_to_call() -> None:
    """Layers that always drop are used to tell how uncertain a prediction is; each call drew the same numbers."""

    class Dropping(layers.Dropout):
        def call(self, inputs: Any, training: bool | None = None) -> Any:
            return super().call(inputs, training=True)

    def build() -> keras.Model:
        stack = [layers.Dense(6, name="first"), Dropping(0.5, seed=1), layers.Dense(3)]
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
            keras.callbacks.TensorBoard(folder / "logs", histogram_freq=1),
        ]

    pair.fit(X, Y, epochs=2, callbacks=callbacks)
    assert_close(seen[1], seen[0])
    loaded = [keras.saving.load_model(tmp_path / name / "2.keras") for name in ("plain", "pipelined")]
    assert_same_values(*loaded)
    assert_same_values(loaded[1], pair.plain)


def test_a_callback_that_has_others_calls_them_itself(pair: Pair) -> None:
    """It was taken for Keras' list, and its members were called in its place."""

    class EverySecondEpoch(keras.callbacks.Callback):
        def __init__(self, callbacks: list[Any]) -> None:
            super().__init__()
            self.callbacks = callbacks

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            for callback in self.callbacks if epoch % 2 else ():
                callback.on_epoch_end(epoch, logs)

    epochs: list[int] = []
    each = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: epochs.append(epoch))
    pair.pipelined.fit(X, Y, epochs=4, callbacks=EverySecondEpoch([each]), verbose=0)
    assert epochs == [1, 3]


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


def test_a_loss_that_is_not_a_number_ends_training_for_who_asks(pair: Pair) -> None:
    """TerminateOnNaN was never asked."""
    options = {"batch_size": 7, "epochs": 2, "verbose": 0, "callbacks": [keras.callbacks.TerminateOnNaN()]}
    for model in (pair.plain, pair.pipelined):
        assert len(model.fit(X * np.nan, Y, **options).history["loss"]) == 1


def test_steps_that_loss_scaling_leaves_out_do_not_end_training() -> None:
    bad = X[:14].copy()
    bad[10] = np.nan
    plain, model = (
        classifier(optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 8.0)) for _ in range(2)
    )
    model.set_weights(plain.get_weights())
    for own in (plain, transform(model)):
        assert len(own.fit(bad, Y[:14], batch_size=7, epochs=2, verbose=0, shuffle=False).history["loss"]) == 2
    assert_close(model.get_weights(), plain.get_weights())


# --- where values are


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
    assert automatic.beside_values(model, cluster) == cluster
    monkeypatch.setattr(automatic, "tensorflow_variable", lambda variable: held)
    automatic.beside_values(model, dapple.Cluster.local(2, kind="cpu"))
    assert not caplog.messages
    size = 4 * len(model.variables + model.optimizer.variables)
    for _ in range(2):
        left = [device.memory_bytes for device in automatic.beside_values(model, cluster).devices]
        assert left == [2**30, 2**30 - size * 2**20]
    (warning,) = caplog.messages
    assert f"'classifier' keeps {size} MiB of values on GPU:1, beside those that steps use there" in warning


# ---- The pipelined model as people know Keras': arguments by position, attributes, batch sizes, and what is refused

X3, Y3, W3 = X[:21], Y[:21], W[:21]


# --- arguments


def test_arguments_by_position(pair: Pair) -> None:
    for model in (pair.plain, pair.pipelined):
        model.fit(X3, Y3, 7, 2, 0, shuffle=False)
    assert_same_values(pair.model, pair.plain)
    ours, theirs = (
        [
            model.train_on_batch(X3[:7], Y3[:7], W3[:7]),
            model.train_on_batch(X3[:7], Y3[:7], None, {0: 2.0, 1: 1.0, 2: 0.5}, True),
            model.test_on_batch(X3[:7], Y3[:7], W3[:7], True),
            model.evaluate(X3, Y3, 7, 0, W3),
            model.predict(X3, 7, 0),
            model.predict_on_batch(X3[:1]),
        ]
        for model in (pair.pipelined, pair.plain)
    )
    assert_close(ours, theirs)


def test_wrong_arguments(pair: Pair) -> None:
    pipelined = pair.pipelined
    with pytest.raises(TypeError, match=r"fit\(\) has no argument 'epoch'; did you mean 'epochs'\?"):
        pipelined.fit(X3, Y3, epoch=2)
    with pytest.raises(TypeError, match=r"fit\(\) has no argument 'checkpoints'; did you mean 'checkpoint'\?"):
        pipelined.fit(X3, Y3, checkpoints=None)
    with pytest.raises(TypeError, match=r"evaluate\(\) got 'batch_size' twice"):
        pipelined.evaluate(X3, Y3, 7, batch_size=7)
    with pytest.raises(TypeError, match=r"predict\(\) takes 5 arguments \(x, batch_size, verbose, steps, callbacks\)"):
        pipelined.predict(X3, 7, 0, None, None, 1)


def test_signatures_are_those_of_keras_with_ours_behind(pair: Pair) -> None:
    for method in ("fit", "evaluate", "predict", "train_on_batch", "compile", "save"):
        names, theirs = (
            [each.name for each in inspect.signature(own).parameters.values() if each.kind is not each.VAR_KEYWORD]
            for own in (getattr(pair.pipelined, method), getattr(pair.plain, method))
        )
        assert names == [*theirs, *(("checkpoint", "resume") if method == "fit" else ())]


class Own(keras.Model):
    """Has methods with arguments of their own."""

    def fit(self, pairs: Any, *, rounds: int = 1) -> Any:
        return [super(Own, self).fit(*pairs, epochs=2, verbose=0, shuffle=False).history for _ in range(rounds)]

    def predict(self, x: Any, scale: float) -> Any:
        return scale * super().predict(x, verbose=0)

    def train_on_batch(self, pairs: Any) -> Any:
        return super().train_on_batch(*pairs)


def own() -> Own:
    functional = classifier()
    model = Own(functional.inputs[0], functional.outputs[0])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), functional.loss)
    return model


def test_methods_of_the_models_own(tmp_path: pathlib.Path) -> None:
    """They were given Keras' arguments, and theirs were refused. Within them batches are by default the plan's."""
    before, pair, pairs = keras.Model.fit, Pair(own), (X3[:7], Y3[:7])
    ours, theirs = (
        [
            model.fit(pairs, rounds=2),
            model.predict(X3, 3.0),
            model.train_on_batch(pairs),
        ]
        for model in (pair.pipelined, pair.plain)
    )
    assert_close(ours, theirs)
    assert_same_values(pair.model, pair.plain)
    pair.pipelined.fit((X3, Y3))
    assert int(pair.model.optimizer.iterations) == 5 + 6
    assert keras.Model.fit is before
    with pytest.raises(TypeError, match="unexpected keyword argument 'epochs'"):
        pair.pipelined.fit(pairs, epochs=3)
    checkpoint = dapple.Checkpointing(tmp_path)
    pair.pipelined.fit(pairs, checkpoint=checkpoint)
    resumed = transform(own())
    assert resumed.fit(pairs, checkpoint=checkpoint, resume=True) == [{}]
    assert_same_values(resumed.sync(), pair.model)
    for rounds, how in ((2, "more than once"), (0, "never calls")):
        with pytest.raises(dapple.DappleError, match=rf"own fit\(\) of model 'own.*' .*{how}"):
            pair.pipelined.fit(pairs, rounds=rounds, checkpoint=checkpoint)


def test_copies(pair: Pair) -> None:
    for copied in (copy.copy, copy.deepcopy, keras.models.clone_model):
        with pytest.raises(dapple.DappleError, match=r"holds devices, and can't be copied.* call dapple_tf.transform"):
            copied(pair.pipelined)


def test_two_threads(pair: Pair) -> None:
    """Two calls of ``fit`` at once ended in a PassError about a cut."""
    pipelined, errors = pair.pipelined, list[BaseException | None]()
    calls = [
        lambda: pipelined.train_on_batch(X3[:7], Y3[:7]),
        lambda: pipelined.evaluate(X3, Y3, verbose=0),
        lambda: pipelined.get_weights(),
        lambda: pipelined.verify(X3[:7], Y3[:7]),
        lambda: pair.model.predict(X3, verbose=0),
        lambda: pair.model.layers[1].kernel.numpy(),
    ]

    def call(logs: Any) -> None:
        with ThreadPoolExecutor(1) as other:
            errors.extend(other.submit(each).exception() for each in calls)

    pipelined.fit(X3[:7], Y3[:7], verbose=0, callbacks=[keras.callbacks.LambdaCallback(on_train_begin=call)])
    assert errors.pop() is None  # Single variables may be read.
    assert {type(error) for error in errors} == {dapple.DappleError}
    assert "another thread is in fit() of pipelined model 'classifier'" in str(errors[0])
    assert int(pair.model.optimizer.iterations) == 1
    with ThreadPoolExecutor(1) as other:
        other.submit(calls[0]).result()


def test_frozen_without_compile(caplog: pytest.LogCaptureFixture) -> None:
    pipelined = transform(classifier())
    for frozen in (False, True):
        pipelined.get_layer("first").trainable = not frozen
        before = pipelined.get_layer("first").get_weights()
        pipelined.train_on_batch(X3[:7], Y3[:7])
        assert ("were frozen, unfrozen or added without compile()" in caplog.text) == frozen
    assert_close(pipelined.get_layer("first").get_weights(), before)


# --- batch sizes


def test_batches_of_other_sizes_than_the_plans(caplog: pytest.LogCaptureFixture) -> None:
    """They were refused; plain Keras trains on any. What it costs is said once."""
    pair = Pair(classifier)
    with caplog.at_level(logging.WARNING, "dapple_tf"):
        for model in (pair.plain, pair.pipelined):
            model.fit(X3, Y3, 16, 2, 0, shuffle=False, validation_data=(X3, Y3))
    assert_same_values(pair.model, pair.plain)
    (told,) = [record.message for record in caplog.records if "global batch size is 7" in record.message]
    assert "batches have 16 samples" in told
    assert "train as 5 micro-batches of 3 and 4 samples, not as the plan's 2 micro-batches of 3 and 4 samples" in told


def test_smaller_last_batches_of_several_epochs_arent_taken_for_two_in_a_row(caplog: pytest.LogCaptureFixture) -> None:
    """They were: full batches between them didn't count."""
    sizes = BatchSizes()
    for size in (7, 7, 4, 7, 7, 4):
        sizes.trained(size, 7, lambda other: pytest.fail(f"a batch of {other} samples is told of"))
    assert not caplog.records


# --- attributes


def test_attributes_of_the_users_model(pair: Pair, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    pipelined, plain = pair.pipelined, pair.plain
    pipelined.summary()
    assert "classifier" in capsys.readouterr().out
    assert pipelined.get_layer("first") is pair.model.get_layer("first")
    assert pipelined.optimizer is pair.model.optimizer
    for model in (plain, pipelined):
        model.train_on_batch(X3[:7], Y3[:7])
    assert_close([pipelined.get_weights(), pipelined(X3)], [plain.get_weights(), plain(X3)])
    pipelined.save_weights(tmp_path / "own.weights.h5")
    for model in (plain, pipelined):
        model.train_on_batch(X3[:7], Y3[:7])
        model.load_weights(tmp_path / "own.weights.h5")
    assert_same_values(pipelined.sync(), plain)


def test_what_is_assigned_and_compiled_counts() -> None:
    pair = Pair(classifier)

    class Stop(keras.callbacks.Callback):
        def __init__(self, whole: Any) -> None:
            super().__init__()
            self.whole = whole

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.whole.stop_training = batch == 1

    for model in (pair.plain, pair.pipelined):
        model.fit(X3, Y3, 7, 3, 0, [Stop(model)], shuffle=False)
        assert int(model.optimizer.iterations) == 2
        model.get_layer("first").trainable = False
        model.compile(keras.optimizers.Adam(0.1, epsilon=1e-3), "mse")
        model.fit(X3[:7], np.zeros((7, 3)), 7, verbose=0, shuffle=False)
        model.trainable = False
        assert not model.trainable_weights
    assert_same_values(pair.model, pair.plain)


def test_with_closes_and_repr_names_the_plan() -> None:
    model = classifier()
    with transform(model) as pipelined:
        assert repr(pipelined) == "PipelinedModel('classifier', stages 1:2 on 3 devices, dapple_a, 2 x 3.5 samples)"
        pipelined.train_on_batch(X3[:7], Y3[:7])
        with pytest.raises(ValueError, match="mine"), pipelined:
            raise ValueError("mine")
        pipelined.train_on_batch(X3[:7], Y3[:7])
    assert not pipelined._compiled and int(model.optimizer.iterations) == 2
    with transform(classifier(), dapple.Plan.data_parallel(1, 7)) as single:
        assert repr(single).endswith("stages 1 on 1 device, dapple_a, 1 x 7 samples)")


def test_attributes_that_mean_nothing(pair: Pair) -> None:
    pipelined = pair.pipelined
    for name, text in {
        "summery": "has an attribute 'summery'; did you mean 'summary'",
        "train_step": r"call train_on_batch\(\) or fit\(\) of the pipelined model",
    }.items():
        with pytest.raises(AttributeError, match=text):
            getattr(pipelined, name)((X3, Y3))
    for name, text in {
        "stop_trainig": "setting 'stop_trainig' .* does nothing; did you mean 'stop_training'",
        "plan": r"keeps its plan; call dapple_tf.transform\(\) again",
        "model": r"keeps its model; call dapple_tf.transform\(\) again",
    }.items():
        with pytest.raises(AttributeError, match=text):
            setattr(pipelined, name, None)
    assert not hasattr(pipelined, "_no_such")
