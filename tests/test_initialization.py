"""Models whose variables get their first values on the devices that keep them."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models_for_tests import assert_close, plan, samples, transform, values

import dapple_tf as dapple
from dapple_tf.frontend.initialization import initial_of, materialize, value_of
from dapple_tf.planning.replanning import Deployment

layers = keras.layers
initializers = keras.initializers


def classifier(**options: Any) -> keras.Model:
    """4 features -> first -> dropout -> second -> logits of 3 classes, by several initializers; values are seeded."""
    keras.utils.set_random_seed(7)
    features = keras.Input((4,))
    x = layers.Dense(24, activation="tanh", name="first", bias_initializer="truncated_normal")(features)
    x = layers.Dropout(0.1)(x)
    x = layers.Dense(20, activation="tanh", kernel_initializer="orthogonal", name="second")(x)
    model = keras.Model(features, layers.Dense(3, kernel_initializer="he_normal", name="logits")(x), name="deferred")
    given = {
        "optimizer": keras.optimizers.Adam(0.01),
        "loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "metrics": ["accuracy"],
    }
    model.compile(**(given | options))
    return model


def deferred(build: Callable[..., keras.Model] = classifier, **options: Any) -> keras.Model:
    with dapple.deferred_init():
        return build(**options)


def without_values(model: keras.Model) -> list[str]:
    return [v.path for v in [*model.variables, *model.optimizer.variables] if initial_of(v) is not None]


@pytest.fixture
def assigned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the variables that have been assigned on the client."""
    paths: list[str] = []
    original = keras.Variable._direct_assign

    def assign(variable: keras.Variable, value: Any) -> None:
        paths.append(variable.path)
        original(variable, value)

    monkeypatch.setattr(keras.Variable, "_direct_assign", assign)
    return paths


# ---- without devices


def test_first_values_are_those_of_an_ordinary_model() -> None:
    plain, model = classifier(), deferred()
    for own, other in zip(model.variables, plain.variables, strict=True):
        assert own.name == other.name and own.shape == other.shape and own.dtype == other.dtype
        np.testing.assert_array_equal(value_of(own), value_of(other), err_msg=own.path, strict=True)
    assert (
        without_values(model)
        == [f"{layer}/{name}" for layer in ("first", "second", "logits") for name in ("kernel", "bias")][:5]
    )  # three numbers are no gain


@pytest.mark.parametrize(
    "initializer",
    [
        initializers.Identity(),
        initializers.RandomUniform(-1, 2, seed=3),
        initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal"),
        lambda shape, dtype=None: np.arange(np.prod(shape), dtype=dtype).reshape(shape),
    ],
)
def test_initializers_give_what_they_give_otherwise(initializer: Any) -> None:
    plain = keras.Variable(initializer, (6, 6), "float32")
    with dapple.deferred_init():
        own = keras.Variable(initializer, (6, 6), "float32")
    assert initial_of(own) is not None
    np.testing.assert_array_equal(value_of(own), plain.numpy(), strict=True)


def test_shared_seed_generators_go_on_as_they_would() -> None:
    """Of two kinds: one that is given, and Keras' own, which is made when it is first needed."""

    def build() -> list[keras.Variable]:
        keras.utils.set_random_seed(3)
        seeds = keras.random.SeedGenerator(4)
        shared = initializers.RandomNormal(seed=seeds)
        unseeded = lambda shape, dtype=None: keras.random.normal(shape, dtype=dtype)  # noqa: E731
        made = [keras.Variable(how, (5, 5)) for how in (shared, unseeded, shared, unseeded, unseeded)]
        return [*made, seeds.state]

    plain = build()
    keras.backend.clear_session()
    with dapple.deferred_init():
        own = build()
    for one, other in zip(own, plain, strict=True):
        np.testing.assert_array_equal(value_of(one), value_of(other))
    assert not np.array_equal(value_of(own[0]), value_of(own[2]))
    assert sum(initial_of(variable) is not None for variable in own) == 5


def test_stateful_initializers_give_each_variable_a_value_of_its_own() -> None:
    draw = lambda shape, dtype=None: tf.random.normal(shape, dtype=dtype)  # noqa: E731
    with dapple.deferred_init():
        variables = [keras.Variable(draw, (5, 5)) for _ in range(2)]
    initials = [initial_of(variable) for variable in variables]
    assert [initial is not None and initial.repeatable for initial in initials] == [False, False]
    assert not np.array_equal(*map(value_of, variables))


def test_what_runs_in_python_only_is_initialised_at_once() -> None:
    def python(shape: Any, dtype: Any = None) -> Any:
        return tf.numpy_function(lambda: np.ones((6, 6), "float32"), [], "float32")

    def reads(shape: Any, dtype: Any = None) -> Any:
        return float(tf.reduce_sum(tf.ones(()))) * tf.ones(shape, dtype)

    large = initializers.Constant(np.ones((600, 600), "float32"))
    with dapple.deferred_init():
        made = [keras.Variable(how, (6, 6)) for how in (python, reads)] + [keras.Variable(large, (600, 600))]
    assert [initial_of(variable) for variable in made] == [None] * 3
    assert all(np.all(variable.numpy() == 1) for variable in made)


def test_reading_and_assigning() -> None:
    model = deferred()
    kernel = model.get_layer("first").kernel
    with pytest.raises(
        dapple.DappleError, match=r"variable 'first/kernel:0' was made under dapple_tf.deferred_init\(\) and"
    ):
        kernel.numpy()
    with pytest.raises(dapple.DappleError, match="fetch all values by its sync"):
        model(np.zeros((1, 4)))
    kernel.assign(np.ones((4, 24)))
    assert initial_of(kernel) is None
    assert np.all(kernel.numpy() == 1)
    materialize(model.variables)
    assert without_values(model) == []
    assert model(np.zeros((1, 4))).shape == (1, 3)


# ---- on devices


def test_training_is_that_of_an_ordinary_model(assigned: list[str]) -> None:
    keras.utils.set_random_seed(1)
    ordinary = transform(classifier())
    x, y, _ = samples(14)
    options = {"shuffle": False, "verbose": 0, "validation_data": (x, y)}
    history = ordinary.fit(x, y, **options).history
    assigned.clear()
    pipelined = transform(deferred())
    assert pipelined.fit(x, y, **options).history == history
    np.testing.assert_array_equal(pipelined.predict(x, verbose=0), ordinary.predict(x, verbose=0))
    assert [path for path in assigned if "kernel" in path or "momentum" in path] == []
    assert len(without_values(pipelined.model)) == 5 + 2 * 5
    assert_close(values(pipelined.sync()), values(ordinary.sync()), 0)
    assert without_values(pipelined.model) == []
    assert pipelined.train_on_batch(x[:7], y[:7]) == ordinary.train_on_batch(x[:7], y[:7])


def test_replicas_have_the_same_values_of_stateful_initializers() -> None:
    def build() -> keras.Model:
        draw = lambda shape, dtype=None: tf.random.normal(shape, dtype=dtype)  # noqa: E731
        dense = [layers.Dense(20, "tanh", kernel_initializer=draw) for _ in range(2)]
        model = keras.Sequential([keras.Input((4,)), *dense])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        return model

    pipelined = transform(deferred(build), plan(cuts=[], devices=[[0, 1, 2]]))
    x, y, _ = samples(7)
    pipelined.train_on_batch(x, y)
    outputs = [pipelined.predict(x[index : index + 1].repeat(6, 0), verbose=0) for index in range(2)]
    for output in outputs:  # by all three replicas
        np.testing.assert_array_equal(output, output[:1].repeat(6, 0))


def test_what_is_assigned_while_other_values_are_on_devices_only_outlives_sync() -> None:
    """All of the devices' values were fetched, over what had been assigned."""
    x, y, _ = samples(7)
    own, ordinary = transform(deferred()), transform(classifier())
    for pipelined in (own, ordinary):
        pipelined.predict(x, verbose=0)
        pipelined.model.get_layer("second").kernel.assign(np.full((24, 20), 0.1))
    assert_close(values(own.sync()), values(ordinary.sync()), 0)
    assert own.train_on_batch(x, y) == ordinary.train_on_batch(x, y)
    assert_close(values(own.sync()), values(ordinary.sync()), 0)


def test_closing_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    x, y, _ = samples(7)
    pipelined = transform(deferred())
    pipelined.evaluate(x, y, verbose=0)
    pipelined.close()
    assert without_values(pipelined.model) != []
    loss = pipelined.train_on_batch(x, y)[0]
    with caplog.at_level(logging.WARNING, "dapple_tf"):
        pipelined.model.compile(pipelined.model.optimizer, pipelined.model.loss, metrics=["accuracy"])
        assert pipelined.train_on_batch(x, y)[0] < loss
    assert "all values are fetched" in caplog.text
    assert without_values(pipelined.model) == []


def test_a_lost_step_begins_anew_and_says_so() -> None:
    x, y, _ = samples(7)
    pipelined = transform(deferred(), on_non_finite_loss="stop")
    first = pipelined.train_on_batch(x, y)
    text = "the devices begin again with the model's initial values, of 2 steps ago"
    with pytest.raises(dapple.NonFiniteLossError, match=text):
        pipelined.train_on_batch(np.full_like(x, np.nan), y)
    assert pipelined.train_on_batch(x, y)[0] == pytest.approx(first[0], rel=0.2)


def test_checkpoints_of_values_that_are_on_devices_only(assigned: list[str], tmp_path: Any) -> None:
    x, y, _ = samples(7)
    pipelined = transform(deferred())
    pipelined.train_on_batch(x, y)
    after = pipelined.save_checkpoint(tmp_path)
    expected = pipelined.predict_on_batch(x)
    loss = pipelined.train_on_batch(x, y)

    pipelined.restore_checkpoint(after)
    assert pipelined._runtime.elastic.kept.endswith("the model's initial values, of 1 step ago")  # It was "0 steps".
    assert pipelined.train_on_batch(x, y) == loss
    assert not [path for path in assigned if "kernel" in path]
    other = transform(deferred(), plan(devices=[[2], [0]]))
    other.restore_checkpoint(after)
    other._runtime.elastic._give_up()  # A lost worker took along what its devices had never had.
    assert_close(other.predict_on_batch(x), expected)


def test_a_checkpoint_that_a_move_could_not_read_is_read_later(tmp_path: pathlib.Path) -> None:
    """It was forgotten: the next step failed, and the one after it began with initial values."""
    x, y, _ = samples(7)
    pipelined = transform(deferred())
    pipelined.train_on_batch(x, y)
    path = pipelined.save_checkpoint(tmp_path)
    expected = pipelined.predict_on_batch(x)
    other = transform(deferred())
    other.restore_checkpoint(path)
    away, elastic = path.rename(tmp_path / "away"), other._runtime.elastic
    with pytest.raises(dapple.CheckpointError), other._runtime._moving():
        elastic.restart(Deployment(other.cluster, other.plan))
    elastic._give_up()
    assert elastic.kept == "the devices begin with the checkpoint that was restored"
    away.rename(path)
    assert_close(other.predict_on_batch(x), expected)
