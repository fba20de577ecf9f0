"""Values are live: who reads a variable sees what devices have, what is assigned counts from the next step."""

from __future__ import annotations

import gc
import pathlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models_for_tests import (
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
from dapple_tf.execution import runtime
from dapple_tf.frontend import variable_hooks
from dapple_tf.frontend.variable_hooks import watchers_of

X, Y, W = samples(21)


def build() -> keras.Model:
    rate = keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.5)
    return classifier(optimizer=keras.optimizers.Adam(rate, epsilon=1e-3), metrics=["accuracy"])


@pytest.fixture(scope="module")
def shared() -> Pair:
    return Pair(build)


@pytest.fixture
def pair(shared: Pair) -> Pair:
    shared.reset()
    return shared


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, pair: Pair) -> list[Any]:
    """What the devices were asked for beside steps, on a machine that is never busy."""
    for name in ("_SHORT_SECONDS", "_LONG_SECONDS"):
        monkeypatch.setattr(runtime, name, np.inf)
    engine, asked = pair.pipelined._engine, list[Any]()
    own = engine.session.run
    monkeypatch.setattr(engine.session, "run", lambda fetches, *rest: asked.append(fetches) or own(fetches, *rest))
    return asked


# --- callbacks


def each(function: Callable[[keras.Model], Any]) -> list[Any]:
    """A callback that calls a function with its model after each batch."""

    class Own(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            function(self.model)

    return [Own()]


def clip(model: keras.Model) -> None:
    for variable in model.get_layer("second").trainable_variables:
        variable.assign(keras.ops.clip(variable, -0.05, 0.05))


def test_weights_that_are_clipped_after_each_batch(pair: Pair) -> None:
    """WGAN: what ``on_train_batch_end`` assigned was lost, and the largest weight 0.55 where 0.05 was the limit."""
    pair.fit(X, Y, epochs=2, callbacks=lambda: each(clip))
    assert np.abs(pair.model.get_layer("second").kernel.numpy()).max() == np.float32(0.05)


def test_what_was_assigned_to_looked_at_values_outlives_steps_that_do_not_count(pair: Pair) -> None:
    """A clipped kernel got back the value that it was looked at with, not the one of the last ``sync``."""
    pair.pipelined.train_on_batch(X[:7], Y[:7])
    clip(pair.model)
    expected = values(pair.pipelined.sync())
    for run in (
        lambda: pair.pipelined.profile_step(X[:7], Y[:7], warm_up=0),
        lambda: pair.pipelined.verify(X[:7], Y[:7], steps=0),
        lambda: pair.pipelined.close(sync=False),
    ):
        run()
        assert_close(values(pair.model), expected, 0)


# --- loops of one's own


def test_train_on_batch_and_look(pair: Pair, tmp_path: pathlib.Path) -> None:
    """Whatever reads the user's model between steps, by whatever way; a held variable of TensorFlow's, too."""
    plain, model = pair.plain, pair.model
    raw = model.get_layer("first").kernel.value

    def saved(model: keras.Model) -> Any:
        path = tf.train.Checkpoint(model=model).save(tmp_path / "check")
        return np.array(tf.train.load_variable(path, "save_counter/.ATTRIBUTES/VARIABLE_VALUE"))

    ways: list[Callable[[keras.Model], Any]] = [
        lambda own: (raw if own is model else own.get_layer("first").kernel).numpy(),
        lambda model: tf.function(model)(X).numpy(),
        lambda model: keras.ops.convert_to_numpy(model.get_layer("second").bias),
        saved,
    ]
    for way in ways:
        for each_model in (plain, pair.pipelined):
            each_model.train_on_batch(X[:7], Y[:7])
        assert_close(way(model), way(plain))


def test_functions_that_were_traced_before(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the variables' handles already: nothing of Python's is asked for when they run.

    Of those that were traced before ``import dapple_tf`` nobody knew, so that they read and assigned stale values.
    """
    model = classifier()
    function = tf.function(lambda x: tf.cond(x[0, 0] > 100, lambda: 0 * model(x), lambda: model(x)))

    @tf.function
    def decay() -> None:
        for variable in model.trainable_variables:
            variable.assign(0.9 * variable.value)

    model.set_weights(pair.plain.get_weights())
    function(X), decay()
    monkeypatch.setattr(variable_hooks, "_functions", weakref.WeakSet())
    monkeypatch.setattr(variable_hooks, "_searched", False)
    pipelined = transform(model)
    plain = classifier()
    plain.set_weights(model.get_weights())
    for _ in range(2):
        pipelined.train_on_batch(X[:7], Y[:7])
        plain.train_on_batch(X[:7], Y[:7])
        assert_close(function(X), plain(X))
        decay()
        for variable in plain.trainable_variables:
            variable.assign(0.9 * variable.value)
    assert_same_values(pipelined.sync(), plain)


# --- what it costs


def test_short_epochs_bring_values_only_to_who_reads_them(pair: Pair, runs: list[Any]) -> None:
    """Each epoch's end fetched all values, a step's time of a small model."""
    options = {"batch_size": 7, "epochs": 3, "verbose": 0, "shuffle": False}
    pair.pipelined.fit(X[:14], Y[:14], **options)
    assert len(runs) == 1  # The first step's values.
    pair.plain.fit(X[:14], Y[:14], **options)
    assert_same_values(pair.model, pair.plain)


def test_only_what_is_touched_is_fetched_and_loaded(pair: Pair, runs: list[Any]) -> None:
    pipelined, model = pair.pipelined, pair.model
    pipelined.train_on_batch(X[:7], Y[:7])
    runs.clear()
    for _ in range(2):
        int(model.optimizer.iterations)
        pipelined.train_on_batch(X[:7], Y[:7])
    assert [len(fetches) for fetches in runs] == [1, 1]
    runs.clear()
    kernel = model.get_layer("second").kernel
    kernel.assign(0.5 * kernel)
    pipelined.train_on_batch(X[:7], Y[:7])
    assert [len(fetches) for fetches in runs] == [1, 2]  # One is read from a device, and assigned on both that keep it.


# --- models that share layers


def networks() -> tuple[keras.Model, keras.Model, keras.Model]:
    """(generator, discriminator, generator and discriminator)."""
    keras.utils.set_random_seed(3)
    stack = [keras.Input((3,)), layers.Dense(5, "tanh", name="grow"), layers.Dense(4, name="sample")]
    generator = keras.Sequential(stack)
    stack = [keras.Input((4,)), layers.Dense(6, "tanh", name="judge"), layers.Dense(1, name="verdict")]
    discriminator = keras.Sequential(stack, name="discriminator")
    noise = keras.Input((3,))
    both = keras.Model(noise, discriminator(generator(noise)))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    discriminator.compile(keras.optimizers.Adam(0.05, epsilon=1e-3), loss)
    both.compile(keras.optimizers.SGD(0.05, momentum=0.5), loss)
    return generator, discriminator, both


def test_two_models_that_share_layers_in_turns() -> None:
    """A GAN trained on copies of the discriminator that were as old as the last epoch. Both train what they share."""
    noise = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")
    final = []
    for own in (False, True):
        generator, discriminator, both = networks()
        judge, fool = discriminator, both
        if own:
            judge = transform(discriminator, plan(cuts=["judge"]))
            fool = transform(both, plan(cuts=["grow"], devices=[[0, 1], [2]]))
        losses = []
        for _ in range(2):
            losses.append(judge.train_on_batch(X[:7], np.ones((7, 1))))
            losses.append(judge.train_on_batch(generator(noise), np.zeros((7, 1))))
            losses.append(fool.train_on_batch(noise, np.ones((7, 1))))
        final.append([losses, values(discriminator), values(both)])
    assert_close(final[1], final[0])


# --- what is left behind


def test_variables_are_what_they_were_when_devices_are_freed(pair: Pair) -> None:
    model = classifier()
    kinds = [type(variable.value) for variable in model.variables]
    pipelined = transform(model)
    pipelined.train_on_batch(X[:7], Y[:7])
    assert all(watchers_of(variable.value) for variable in model.variables if "seed" not in variable.path)
    expected = model.get_weights()
    pipelined.close()
    assert [type(variable.value) for variable in model.variables] == kinds
    assert not any(watchers_of(variable.value) for variable in [*model.variables, *model.optimizer.variables])
    assert_close(model.get_weights(), expected)


def test_a_pipelined_model_that_is_dropped_leaves_its_values() -> None:
    """They were lost with it."""
    model, plain = classifier(), classifier()
    plain.set_weights(model.get_weights())
    pipelined = transform(model)
    pipelined.train_on_batch(X[:7], Y[:7])
    plain.train_on_batch(X[:7], Y[:7])
    del pipelined
    gc.collect()
    assert not watchers_of(model.variables[0].value)
    assert_same_values(model, plain)


@pytest.mark.parametrize(("where", "left"), [("step", 4), ("on a batch", 5), ("evaluation", 6)])
def test_an_error_undoes_no_finished_epoch(pair: Pair, monkeypatch: pytest.MonkeyPatch, where: str, left: int) -> None:
    """In the sixth step, where epochs have two: ten epochs were lost, as values came back after a hundred steps."""
    for name, value in (("_SHORT_SECONDS", -1.0), ("_LONG_SECONDS", -1.0 if where == "on a batch" else np.inf)):
        monkeypatch.setattr(runtime, name, value)
    monkeypatch.setattr(runtime, "_SYNC_SHARE", np.inf)
    good, bad = (X[:7], Y[:7]), (X[:7], Y[:7] + 9)

    def batches() -> Iterator[Any]:
        yield from [good] * 5
        yield bad if where == "step" else good

    if where == "on a batch":
        for _ in range(5):
            pair.pipelined.train_on_batch(*good)
    with pytest.raises(dapple.DappleError):
        if where == "on a batch":
            pair.pipelined.train_on_batch(*bad)
        else:
            pair.pipelined.fit(batches(), epochs=3, steps_per_epoch=2, verbose=0)
            pair.pipelined.evaluate(*bad, verbose=0)
    assert int(pair.model.optimizer.iterations) == left
