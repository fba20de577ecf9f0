"""Losses that are written as functions: sums, means and ratios of sums of the whole batch, however it is sliced."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, assert_same_variables, pair, pipeline, use_float64
from test_sample_dependence import program_of

from dapple_tf.execution.notes import NoteKind
from graph_passes.ir.graph import Ref
from graph_passes.ir.program import Variable, VariableKind
from graph_passes.ir.spreads import Coupling
from graph_passes.passes.scale_losses import scale_losses

layers = keras.layers


def mask(y: Any, dtype: Any) -> Any:
    """The positive labels."""
    return tf.cast(y > 0, dtype)


def masked_mean(y: Any, p: Any) -> Any:
    """Of the errors at positive labels, of which each slice has another number."""
    return tf.reduce_sum(mask(y, p.dtype) * tf.square(y - p)) / tf.reduce_sum(mask(y, p.dtype))


def mean_of_chosen_rows(y: Any, p: Any) -> Any:
    """Of the squares of samples whose first label is positive, of which some slices may have none."""
    chosen = y[:, 0] > 0.5
    return tf.reduce_mean(tf.reduce_sum(tf.square(tf.boolean_mask(y, chosen) - tf.boolean_mask(p, chosen)), -1))


EXACT: dict[str, Callable[[Any, Any], Any]] = {
    "a sum over the number of samples": lambda y, p: tf.reduce_sum(tf.abs(y - p)) / tf.cast(tf.shape(y)[0], p.dtype),
    "tensordot": lambda y, p: tf.tensordot(y - p, y - p, 2),
    "a product that contracts the batch": lambda y, p: tf.linalg.trace(tf.matmul(y - p, y - p, transpose_a=True)),
    "a mean and a tenth of a sum": lambda y, p: tf.reduce_mean(tf.abs(y - p)) + 0.1 * tf.reduce_sum(tf.square(y - p)),
    "a masked mean": masked_mean,
    "a masked mean, safe without valid entries": lambda y, p: tf.math.divide_no_nan(
        tf.reduce_sum(mask(y, p.dtype) * tf.square(y - p)), tf.maximum(tf.reduce_sum(mask(y, p.dtype)), 1.0) + 1e-6
    ),
    "a sum over chosen entries": lambda y, p: tf.reduce_sum(tf.boolean_mask(tf.square(y - p), y > 0)),
    "a mean over chosen entries": lambda y, p: tf.reduce_mean(tf.boolean_mask(tf.square(y - p), y > 0)),
    "a mean over chosen rows": mean_of_chosen_rows,
    "errors by the labels' deviation": lambda y, p: tf.reduce_mean(tf.square((y - p) / tf.math.reduce_std(y))),
    "root mean squares of samples": lambda y, p: tf.reduce_mean(tf.sqrt(tf.reduce_mean(tf.square(y - p), -1))),
}
TOLD: dict[str, tuple[Callable[[Any, Any], Any], NoteKind]] = {
    "the root of the mean": (lambda y, p: tf.sqrt(tf.reduce_mean(tf.square(y - p))), NoteKind.LOSS),
    "a divisor of trained values": (
        lambda y, p: tf.reduce_sum(tf.square(y - p)) / tf.reduce_sum(tf.abs(p)),
        NoteKind.LOSS,
    ),
    "contrastive": (
        lambda y, p: tf.reduce_mean(
            tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.range(tf.shape(p)[0]), tf.matmul(p, tf.cast(y, p.dtype), transpose_b=True)
            )
        ),
        NoteKind.COUPLED,
    ),
}


class Adds(layers.Layer):
    """Adds a loss: a tenth of the sum of the squares."""

    def call(self, x: Any) -> Any:
        """Returns its input."""
        self.add_loss(0.1 * keras.ops.sum(keras.ops.square(x)))
        return x


class Counts(layers.Layer):
    """Counts samples, and keeps a moving mean."""

    def build(self, _: Any) -> None:
        """Makes both."""
        self.samples = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.mean = self.add_weight(shape=(5,), initializer="zeros", trainable=False)

    def call(self, x: Any) -> Any:
        """Returns its input."""
        self.samples.assign(self.samples + keras.ops.cast(keras.ops.shape(x)[0], self.samples.dtype))
        self.mean.assign(0.9 * self.mean + 0.1 * keras.ops.mean(x, axis=0))
        return x


def by_mask(y: Any, p: Any) -> Any:
    """The mean of entries that a mask chooses, computed once for each of its readers."""
    return tf.reduce_mean(tf.abs(y[y > 0] - p[y > 0]))


def by_share(y: Any, p: Any) -> Any:
    """A vector, divided by the share of positive labels."""
    return tf.reduce_mean(mask(y, p.dtype) * tf.square(y - p), -1) / tf.reduce_mean(mask(y, p.dtype))


def balanced(y: Any, p: Any) -> Any:
    """The mean of two masked means, and a tenth of a sum."""
    other = 1 - mask(y, p.dtype)
    negative = tf.reduce_sum(other * tf.square(y - p)) / tf.maximum(tf.reduce_sum(other), 1)
    return 0.5 * masked_mean(y, p) + 0.5 * negative + 0.1 * tf.reduce_sum(tf.abs(y - p))


def by_largest(y: Any, p: Any) -> Any:
    """Errors of entries, relative to the batch's largest label."""
    return tf.abs(y - p) / tf.reduce_max(y)


def total(y: Any, p: Any) -> Any:
    """A sum over samples."""
    return tf.reduce_sum(tf.abs(y - p))


class OneNumber(keras.losses.Loss):
    """A loss that is one number before any reduction."""

    def call(self, y: Any, p: Any) -> Any:
        return masked_mean(y, p)


class Tracking(keras.Model):
    """Gives parts of its loss to means and a sum, and has a log of its own, computed from both outputs' labels."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.part, self.counted = keras.metrics.Mean(name="part"), keras.metrics.Mean(name="counted")
        self.added, self.last = keras.metrics.Sum(name="added"), {}

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any) -> Any:
        both = tf.logical_and(y[0] > 0, y[1] > 0)
        part = tf.reduce_mean(tf.boolean_mask(tf.square(y[0] - y_pred[0]), both))
        self.part.update_state(part)
        self.counted.update_state(part, sample_weight=tf.shape(x)[0])
        self.added.update_state(part)
        return part + total(y[1], y_pred[1])

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        own = {"loss": loss, "deviation": tf.math.reduce_std(y[0]), "ratio": masked_mean(y[0], y[1])}
        return {**own, **{metric.name: metric.result() for metric in self.metrics}}


def two_outputs(kind: type[keras.Model], *args: Any, **options: Any) -> keras.Model:
    """4 features -> dense -> two outputs, compiled with what else is given."""
    features = keras.Input((4,))
    x = layers.Dense(5, activation="tanh", name="first")(features)
    model = kind(features, [layers.Dense(3, name=name)(x) for name in ("left", "right")])
    model.compile(keras.optimizers.SGD(0.1), *args, **options)
    return model


WITH_LOGS: dict[str, Callable[[], keras.Model]] = {
    "own": lambda: two_outputs(Tracking),
    "weighted": lambda: two_outputs(
        keras.Model,
        [balanced, OneNumber(reduction="mean_with_sample_weight")],
        loss_weights=[0.3, 2.0],
        metrics=[[by_mask, masked_mean, total], ["hinge"]],
        weighted_metrics=[[by_share], ["mae", by_largest]],
    ),
}


def model_of(loss: Any, *middle: layers.Layer, metrics: Any = ()) -> keras.Model:
    """4 features -> dense -> ... -> 3 outputs, with a regularizer, which is no sum over samples."""
    features = keras.Input((4,))
    x = layers.Dense(5, activation="tanh", name="first")(features)
    for layer in middle:
        x = layer(x)
    model = keras.Model(features, layers.Dense(3, kernel_regularizer="l2", name="last")(x))
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=list(metrics))
    return model


def all_of_them(y: Any, p: Any) -> Any:
    """The sum of all exact losses."""
    return tf.add_n([tf.cast(loss(y, p), p.dtype) for loss in EXACT.values()])


def test_losses_and_state_of_the_whole_batch_are_those_of_plain_keras() -> None:
    """A layer's sum crosses the cut as the mean over the slices of its stage; each slice of the last one adds it up."""
    use_float64()
    middle = {"adds": Adds, "counts": Counts, "exact": Extremes}
    own, plain = pair(lambda: model_of(all_of_them, *(kind(name=name) for name, kind in middle.items())))
    pipelined = pipeline(own, ["adds"], (2, 3), 2, 7)
    rng = np.random.default_rng(0)
    for count in (7, 5):
        x, y = rng.normal(size=(count, 4)), rng.normal(size=(count, 3))
        logs = pipelined.train_on_batch(x, y), plain.train_on_batch(x, y)
        assert np.allclose(*logs, rtol=1e-5)
    assert np.allclose(pipelined.test_on_batch(x, y), plain.test_on_batch(x, y), rtol=1e-5)
    pipelined.sync()
    assert_same_variables(own, plain, TOLERANCE["float64"])
    assert pipelined.notes == ()


@pytest.mark.parametrize("loss", TOLD)
def test_a_loss_that_slices_cannot_add_up_is_told(loss: str) -> None:
    function, kind = TOLD[loss]
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 4)), rng.normal(size=(7, 3))
    pipelined = pipeline(model_of(function), ["first"], (2, 1), 2, 7)
    pipelined.train_on_batch(x, y)
    assert [(note.kind, note.layer) for note in pipelined.notes] == [(kind, "loss")]


@pytest.mark.parametrize("case", WITH_LOGS)
def test_logs_are_those_of_plain_keras(case: str) -> None:
    """Metrics and losses of an epoch of two unlike batches, then of an evaluation."""
    use_float64()
    own, plain = pair(WITH_LOGS[case])
    plain.run_eagerly = False  # Keras weighs losses of batches of a known size by that.
    pipelined = pipeline(own, ["first"], (2, 2), 2, 7)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(12, 4)), [rng.normal(size=(12, 3)), np.sign(rng.normal(size=(12, 3)))]
    y[0][:3, 0] = -1.0
    y[1][6] = 0.0
    weights = [rng.uniform(size=12), rng.uniform(size=12)] if case == "weighted" else None
    logs = []
    for model in (pipelined, plain):
        history = model.fit(x, y, sample_weight=weights, batch_size=7, shuffle=False, verbose=0).history
        found = model.evaluate(x, y, sample_weight=weights, batch_size=7, verbose=0, return_dict=True)
        logs.append({name: values[0] for name, values in history.items()} | {f"test {k}": v for k, v in found.items()})
    assert logs[0] == pytest.approx(logs[1], rel=1e-10)
    assert pipelined.notes == ()


class Noisy(keras.losses.Loss):
    """The square of noisy errors."""

    def __init__(self) -> None:
        super().__init__(name="noisy")
        self.seeds = keras.random.SeedGenerator(3)

    def call(self, y: Any, p: Any) -> Any:
        return tf.reduce_mean(tf.square(y - p + keras.random.normal(tf.shape(p), seed=self.seeds, dtype=p.dtype)), -1)


class Shuffled(keras.metrics.Metric):
    """Noisy errors, kept in another metric."""

    def __init__(self) -> None:
        super().__init__(name="shuffled")
        self.hits, self.noise = keras.metrics.Mean(name="hits"), Noisy()

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.hits.update_state(self.noise.call(y, p))

    def result(self) -> Any:
        return self.hits.result()


def test_losses_and_metrics_draw_what_they_draw_in_plain_keras(tmp_path: pathlib.Path) -> None:
    """With one slice, also from a checkpoint on; more draw other numbers, which is noted."""
    use_float64()
    x, y = np.random.default_rng(0).normal(size=(7, 4)), np.zeros((7, 3))
    own, plain = pair(lambda: model_of(Noisy(), metrics=[Shuffled()]))
    pipelined = pipeline(own, ["first"], (1, 1), 1, 7)
    for method in ("train_on_batch", "train_on_batch", "test_on_batch", "train_on_batch"):
        assert getattr(pipelined, method)(x, y) == pytest.approx(getattr(plain, method)(x, y), rel=1e-10)
    assert pipelined.notes == ()
    resumed = pipeline(model_of(Noisy(), metrics=[Shuffled()]), ["first"], (1, 1), 1, 7)
    resumed.restore_checkpoint(pipelined.save_checkpoint(tmp_path))
    assert resumed.train_on_batch(x, y) == pytest.approx(plain.train_on_batch(x, y), rel=1e-10)
    sliced = pipeline(model_of(Noisy(), metrics=[Shuffled()]), ["first"], (1, 1), 2, 7)
    sliced.train_on_batch(x, y)
    assert {(note.kind, note.layer, note.alone) for note in sliced.notes} == {
        (NoteKind.RANDOM, "loss", False),
        (NoteKind.RANDOM, "shuffled", True),
    }


class Extremes(layers.Layer):
    """Keeps running extremes: plain, decayed, averaged, and some that aren't."""

    def build(self, shape: Any) -> None:
        """Makes the state."""
        names = ("low", "high", "decayed", "mean", "first", "count", "width", "moment")
        self.state = {name: self.add_weight(shape=shape[1:], trainable=False, name=name) for name in names}

    def call(self, x: Any, training: bool = False) -> Any:
        """Divides by an extreme of former steps."""
        state, ops = self.state, keras.ops
        result = x / (2 + state["high"])
        if training:
            low, high = ops.min(x, axis=0), ops.max(ops.abs(x), axis=0)
            state["low"].assign(ops.minimum(state["low"], low))
            state["high"].assign(ops.maximum(state["high"], high))
            state["decayed"].assign(ops.maximum(state["decayed"] - 0.1, ops.ceil(ops.log(high) / np.log(2.0))))
            state["mean"].assign(0.9 * state["mean"] - 0.1 * high)
            state["first"].assign(ops.where(state["count"] > 0, ops.maximum(state["first"], high), high))
            state["count"].assign(state["count"] + 1.0)
            if self.name != "exact":
                state["width"].assign(ops.max(x, axis=0) - low)
                state["moment"].assign(state["moment"] + ops.sum(ops.square(x - ops.mean(x, axis=0)), axis=0))
        return result


def test_state_that_slices_cannot_add_up_is_told() -> None:
    pipelined = pipeline(model_of("mse", Extremes(name="off")), ["first"], (1, 2), 2, 7)
    pipelined.train_on_batch(np.ones((7, 4)), np.ones((7, 3)))
    assert [(note.kind, note.layer) for note in pipelined.notes] == [(NoteKind.STATE, "off")]


# ---- programs without Keras


@pytest.mark.parametrize(
    ("update", "couplings"),
    [
        (lambda seen, x: seen + 1, []),
        (lambda seen, x: seen + tf.shape(x)[0], [Coupling.STATE]),
        (lambda seen, x: seen + tf.cast(tf.reduce_sum(x), tf.int32), [Coupling.STATE]),
    ],
    ids=["steps", "samples", "values"],
)
def test_whole_numbers_of_state_must_become_the_same_in_all_slices(
    update: Callable[[Any, Any], Any], couplings: list[Coupling]
) -> None:
    program = program_of(lambda x, w: update(tf.compat.v1.placeholder(tf.int32, [], name="seen"), x))
    seen = Variable("seen", tf.int32.as_datatype_enum, (), VariableKind.STATE, Ref("seen"), Ref("result"))
    roles = dataclasses.replace(program.roles, variables=(*program.roles.variables, seen))
    told = scale_losses(program.replace(roles=roles)).couplings
    assert [coupling for _, coupling in told if coupling is Coupling.STATE] == couplings
