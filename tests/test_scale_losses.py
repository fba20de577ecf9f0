"""Losses that are written as functions: sums, means and ratios of sums of the whole batch, however it is sliced."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, assert_same_variables, pair, pipeline, use_float64
from slice_programs import program_of

from dapple_tf.execution.notes import NoteKind
from graph_passes.analysis.chosen_rows import with_counted_rows
from graph_passes.analysis.sample_dependence import sample_dependence
from graph_passes.ir.graph import Ref
from graph_passes.ir.program import Program, Variable, VariableKind
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
    "a sum": lambda y, p: tf.reduce_sum(tf.square(y - p)),
    "a sum over a constant": lambda y, p: tf.reduce_sum(tf.square(y - p)) / 40.0,
    "a sum over the number of samples": lambda y, p: tf.reduce_sum(tf.abs(y - p)) / tf.cast(tf.shape(y)[0], p.dtype),
    "half of the squares": lambda y, p: tf.nn.l2_loss(y - p),
    "einsum": lambda y, p: tf.einsum("ij,ij->", y - p, y - p),
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


def model_of(loss: Any, *middle: layers.Layer, metrics: Any = ()) -> keras.Model:
    """4 features -> dense -> ... -> 3 outputs, with a regularizer, which is no sum over samples."""
    features = keras.Input((4,))
    x = layers.Dense(5, activation="tanh", name="first")(features)
    for layer in middle:
        x = layer(x)
    model = keras.Model(features, layers.Dense(3, kernel_regularizer="l2", name="last")(x))
    model.compile(keras.optimizers.Adam(0.01), loss, metrics=list(metrics))
    return model


def check(build: Callable[[], keras.Model], cut: str = "first", replicas: tuple[int, int] = (2, 1)) -> None:
    """Two steps of two micro-batches, replicated first stage, the second batch smaller; then its evaluation."""
    own, plain = pair(build)
    pipelined = pipeline(own, [cut], replicas, 2, 7)
    rng = np.random.default_rng(0)
    for count in (7, 5):
        x, y = rng.normal(size=(count, 4)), rng.normal(size=(count, 3))
        logs = pipelined.train_on_batch(x, y), plain.train_on_batch(x, y)
        assert np.allclose(*logs, rtol=1e-5)
    assert np.allclose(pipelined.test_on_batch(x, y), plain.test_on_batch(x, y), rtol=1e-5)
    pipelined.sync()
    assert_same_variables(own, plain, TOLERANCE["float64"])
    assert pipelined.notes == ()


@pytest.mark.few(2)
@pytest.mark.slow
@pytest.mark.parametrize("loss", EXACT)
def test_a_loss_of_the_whole_batch_is_that_of_plain_keras(loss: str) -> None:
    use_float64()
    check(lambda: model_of(EXACT[loss]))


@pytest.mark.slow
def test_a_layer_may_add_a_sum_over_samples() -> None:
    use_float64()
    check(lambda: model_of("mse", Adds(name="adds")))


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("replicas", [(1, 2), (2, 1), (2, 3)])
@pytest.mark.parametrize("loss", ["mse", EXACT["a sum"]], ids=["mean", "sum"])
def test_a_sum_of_an_earlier_stage_counts_once(loss: Any, replicas: tuple[int, int]) -> None:
    """It crosses the cut as the mean over the slices of its stage, and each slice of the last one adds it up."""
    use_float64()
    check(lambda: model_of(loss, Adds(name="adds")), "adds", replicas)


@pytest.mark.slow
def test_state_that_counts_samples_counts_those_of_all_slices() -> None:
    use_float64()
    check(lambda: model_of("mse", Counts(name="counts")))


@pytest.mark.slow
def test_the_mean_of_what_a_loop_makes_is_a_mean() -> None:
    """Behind an LSTM nobody asked how many samples there were: the mean was taken for a sum, once for each slice."""

    def build() -> keras.Model:
        tokens = keras.Input((4, 3))
        x = layers.LSTM(3, return_sequences=True)(layers.Dense(3, name="first")(tokens))
        model = keras.Model(tokens, layers.Dense(2, activation="softmax")(x))
        model.compile(keras.optimizers.SGD(0.1), "categorical_crossentropy")
        return model

    use_float64()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 4, 3)), np.eye(2)[rng.integers(0, 2, size=(7, 4))]
    model, plain = pair(build)
    pipelined = pipeline(model, ["first"], (1, 2), 2, 7)
    assert pipelined.train_on_batch(x, y) == pytest.approx(plain.train_on_batch(x, y), rel=1e-6)
    pipelined.sync()
    assert pipelined.notes == ()
    assert_same_variables(model, plain, TOLERANCE["float64"])


@pytest.mark.parametrize("loss", TOLD)
def test_a_loss_that_slices_cannot_add_up_is_told(loss: str) -> None:
    function, kind = TOLD[loss]
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(7, 4)), rng.normal(size=(7, 3))
    pipelined = pipeline(model_of(function), ["first"], (2, 1), 2, 7)
    pipelined.train_on_batch(x, y)
    assert [(note.kind, note.layer) for note in pipelined.notes] == [(kind, "loss")]
    whole = pipeline(model_of(function), ["first"], (1, 1), 1, 7)
    whole.train_on_batch(x, y)
    assert whole.notes == ()


# ---- programs without Keras


def counted_rows(function: Callable[[Any, Any], Any]) -> tuple[Program, Program | None]:
    """A program with a mean ``part``, and the one that `with_counted_rows` makes of it."""
    program = program_of(function)
    dependence = sample_dependence(program, {"part", "result"})
    assert dependence is not None
    return program, with_counted_rows(program, dependence, {"part", "result"})


def result_of(program: Program, x: np.ndarray) -> np.ndarray:
    with tf.Graph().as_default() as graph:
        tf.graph_util.import_graph_def(program.graph, name="")
        with tf.compat.v1.Session(graph=graph) as session:
            value: np.ndarray = session.run("result:0", {"x:0": x, "w:0": np.arange(5.0)})
    return value


def test_a_mean_over_chosen_rows_becomes_a_sum_over_their_number() -> None:
    def mean(x: Any, w: Any) -> Any:
        return tf.reduce_mean(tf.square(tf.boolean_mask(x * w, x[:, 0] > 0)), name="part")

    program, counted = counted_rows(mean)
    assert counted is not None
    x = np.random.default_rng(0).normal(size=(7, 5))
    np.testing.assert_allclose(result_of(counted, x), result_of(program, x), rtol=1e-5)
    nodes = {node.name: node.op for node in counted.graph.node}
    assert nodes["part"] == "RealDiv" and "Mean" not in nodes.values()


def test_a_mean_over_all_samples_stays() -> None:
    assert counted_rows(lambda x, w: tf.reduce_mean(tf.square(x * w), name="part"))[1] is None


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
