"""What is told of a model that slices don't train as plain Keras does, and that nothing is told of others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from models_for_tests import Computed, classifier, plan, samples, transform
from zoo import ZOO

from dapple_tf.errors import CaptureError, StepError
from dapple_tf.execution.notes import Note, NoteKind, notes_of, summary
from dapple_tf.frontend.batch import spec_of
from dapple_tf.frontend.capture import Mode, build, capture
from dapple_tf.frontend.variables import VariableTable
from graph_passes.pass_manager import run_passes
from graph_passes.passes.assign_stages import AssignStages

layers = keras.layers
RANDOM, COUPLED, PLACE, SIZE = NoteKind.RANDOM, NoteKind.COUPLED, NoteKind.PLACE, NoteKind.BATCH_SIZE


def noted(model: keras.Model, x: Any, y: Any, slices: int = 2, micro_batches: int = 2) -> tuple[Note, ...]:
    """The notes of a training step whose only stage has several slices."""
    table, spec = VariableTable(model), spec_of(model, x, y)
    build(model, table, spec)
    program = capture(model, table, Mode.TRAIN, spec)
    return notes_of(run_passes(program, [AssignStages(())]), [slices], micro_batches)


class Largest(keras.metrics.Metric):
    """The largest of what a function gives for batches."""

    def __init__(self, name: str, function: Callable[[Any], Any]) -> None:
        super().__init__(name=name)
        self.function, self.kept = function, self.add_weight(shape=(), initializer="zeros", name="kept")

    def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
        self.kept.assign(tf.maximum(self.kept, self.function(p)))

    def result(self) -> Any:
        return self.kept


def logged(caplog: pytest.LogCaptureFixture, text: str) -> list[int]:
    """The levels of the records that contain a text."""
    return [record.levelno for record in caplog.records if text in record.message]


def test_layers_that_draw_are_noted_where_their_stage_has_slices(caplog: pytest.LogCaptureFixture) -> None:
    def dropout() -> keras.Model:
        return classifier(layers.Dropout(0.5, name="noise"))

    with caplog.at_level(logging.INFO, "dapple_tf"):
        pipelined = transform(dropout())
        assert pipelined.notes == ()  # Training's first batch brings them.
        for _ in range(2):
            pipelined.train_on_batch(*samples(7)[:2])
    assert logged(caplog, "draws other random numbers") == [logging.INFO]  # Results are as good as plain Keras'.
    assert [(note.kind, note.layer) for note in pipelined.notes] == [(RANDOM, "noise")]
    whole = transform(dropout(), plan(devices=[[0], [1]], micro_batches=1))
    whole.train_on_batch(*samples(7)[:2])
    assert whole.notes == noted(dropout(), *samples(7)[:2], slices=1) == ()


def test_the_first_batch_tells_of_layers_losses_and_metrics(caplog: pytest.LogCaptureFixture) -> None:
    model = classifier(layers.BatchNormalization(name="norm"))
    metrics = [Largest("last", tf.reduce_mean), "accuracy"]
    model.compile("sgd", lambda y, p: keras.ops.sqrt(keras.ops.mean((y - p) ** 2)), metrics=metrics)
    pipelined = transform(model)
    for _ in range(2):
        pipelined.train_on_batch(samples(7)[0], np.ones((7, 3), "float32"))
    assert (
        len(logged(caplog, "across the samples")) == len(logged(caplog, "neither a sum nor a mean over samples")) == 1
    )
    assert logged(caplog, "isn't a sum over samples: it sees slices") == [logging.WARNING]
    assert {note.kind for note in pipelined.notes} == {COUPLED, NoteKind.LOSS, NoteKind.METRIC}
    assert "synchronized=True" in pipelined.notes[0].way_out


def repeated(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Three times, in a loop."""
    return lambda x: tf.while_loop(lambda i, _: i < 3, lambda i, x: (i + 1, function(x)), (0, x))[1]


def count(x: Any) -> Any:
    """A number from 1 to 6 for each sample."""
    return 1 + tf.argmax(x, -1, output_type=tf.int32)


def longest(x: Any) -> Any:
    return tf.reduce_max(count(x))


def pooled(h: Any) -> Any:
    """The mean of each sample's row, whatever its length."""
    return tf.tile(tf.reduce_mean(h, 1, keepdims=True), (1, 6))


def crop(x: Any) -> Any:
    return x[:, : longest(x)]


def own_last(h: Any, x: Any) -> Any:
    """Of [batch, places] each sample's last own place."""
    return x + tf.gather(h, count(x) - 1, batch_dims=1)[:, None]


def convolved(x: Any, padding: str) -> Any:
    return tf.nn.conv1d(crop(x)[..., None], tf.ones((3, 1, 1)), 1, padding)[..., 0]


MIXING: dict[NoteKind, dict[str, Callable[[Any], Any]]] = {
    COUPLED: {
        "cropped_to_the_longest": lambda x: pooled(x[:, : longest(x)]),
        "cropped_by_places": lambda x: pooled(tf.gather(x, tf.range(longest(x)), axis=1)),
        "a_mask_as_wide_as_the_longest": lambda x: x + pooled(tf.cast(tf.sequence_mask(count(x)), x.dtype)),
        "the_length_of_the_crop": lambda x: x / tf.cast(tf.shape(x[:, : longest(x)])[1], x.dtype),
        "the_length_of_a_list": lambda x: x / tf.cast(tf.shape(tf.map_fn(tf.tanh, tf.transpose(crop(x))))[0], x.dtype),
        "one_after_the_other_in_the_crop": lambda x: (
            x * tf.scan(lambda a, v: 0.5 * a + v, tf.transpose(x[:, : longest(x)]))[-1][:, None]
        ),
        "resized_to_the_longest": lambda x: pooled(
            tf.image.resize(x[:, None, :, None], tf.stack([1, longest(x)]))[:, 0, :, 0]
        ),
        "a_window_over_the_crop": lambda x: own_last(convolved(x, "SAME"), x),
        "a_mean_over_the_batch": lambda x: x - tf.reduce_mean(x, 0, keepdims=True),
        "a_mean_in_a_loop": repeated(lambda x: x - tf.reduce_mean(x, 0)),
        "a_mean_in_a_branch": lambda x: tf.cond(tf.shape(x)[1] > 3, lambda: x - tf.reduce_mean(x, 0), lambda: x),
        "a_branch_by_any_sample": lambda x: tf.cond(tf.reduce_any(x > 1), lambda: -x, lambda: x),
        "mapped_with_all": lambda x: tf.vectorized_map(lambda row: row - tf.reduce_mean(x, 0), x),
    },
    PLACE: {
        "reversed": lambda x: x[::-1],
        "the_first_sample": lambda x: x + x[:1],
        "looked_up_by_place": lambda x: x + tf.gather(tf.eye(64, 6), tf.range(tf.shape(x)[0])),
        "summed_up_one_after_the_other": lambda x: tf.scan(lambda total, row: total + row, x),
    },
    SIZE: {
        "divided_by_the_batch_s_size": lambda x: x / tf.cast(tf.shape(x)[0], x.dtype),
    },
}


def differs(function: Callable[[Any], Any]) -> bool:
    """Whether a function of a batch has other values than of its halves."""
    x = np.random.default_rng(4).normal(size=(8, 6)).astype("float32")
    x[:4] = -np.sort(-x[:4]) / 10  # They count 1, the others more.
    x[4:, 0] = -9
    return not np.allclose(function(x), tf.concat([function(x[:4]), function(x[4:])], 0), atol=1e-5)


def own_class(x: Any) -> Any:
    """Each sample's largest feature, looked up by pairs of places and columns."""
    places = tf.stack([tf.range(tf.shape(x)[0]), tf.argmax(x, -1, output_type=tf.int32)], 1)
    return x + tf.gather_nd(x, places)[:, None]


HARMLESS: dict[str, Callable[[Any], Any]] = {
    "the_past_of_the_crop": lambda x: own_last(
        tf.nn.conv1d(tf.pad(crop(x), [[0, 0], [2, 0]])[..., None], tf.ones((3, 1, 1)), 1, "VALID")[..., 0], x
    ),
    "transposed_and_back": lambda x: tf.transpose(tf.tanh(tf.transpose(x))),
    "each_its_own_class": own_class,
    "in_a_loop": repeated(lambda x: tf.nn.softmax(x, -1) - tf.reduce_mean(x, 1, keepdims=True)),
    "mapped_one_by_one": lambda x: tf.map_fn(lambda row: tf.nn.softmax(row - tf.reduce_mean(row)), x),
    "its_own_last": lambda x: x + tf.gather(x, count(x) - 1, axis=1, batch_dims=1)[:, None],
    "the_crop_with_a_mask": lambda x: (
        x
        + tf.reduce_sum(x[:, : longest(x)] * tf.cast(tf.sequence_mask(count(x)), x.dtype), 1, keepdims=True)
        / tf.cast(count(x), x.dtype)[:, None]
    ),
    "as_often_as_it_says": lambda x: tf.math.unsorted_segment_sum(
        tf.repeat(x, count(x), axis=0), tf.repeat(tf.range(tf.shape(x)[0]), count(x)), tf.shape(x)[0]
    ),
    "different_values_and_back": lambda x: (
        x + tf.gather(tf.gather(tf.range(9.0), tf.unique(count(x)).y), tf.unique(count(x)).idx)[:, None]
    ),
}


def notes_of_branches(branches: dict[str, Callable[[Any], Any]], micro_batches: int = 2) -> set[tuple[NoteKind, str]]:
    """Kinds and layers of the notes of a model of many branches, each of some layers."""
    features = keras.Input((4,))
    x = layers.Dense(6, name="first")(features)
    x = layers.Concatenate()([branch(x) for branch in branches.values()])
    model = keras.Model(features, layers.Dense(3)(x))
    model.compile("sgd", "mse")
    notes = noted(model, np.ones((7, 4)), np.ones((7, 3)), micro_batches=micro_batches)
    assert all(note.text and note.way_out for note in notes)
    found = {(note.kind, note.layer) for note in notes}
    assert len(found) == len(notes)
    return found


def test_what_mixes_samples_is_noted_and_what_treats_each_by_itself_is_not() -> None:
    mixing = {name: function for own in MIXING.values() for name, function in own.items()}
    assert [name for name, function in (mixing | HARMLESS).items() if differs(function)] == [*mixing]
    found = notes_of_branches({name: Computed(function, name) for name, function in (mixing | HARMLESS).items()})
    assert found == {(kind, name) for kind, own in MIXING.items() for name in own}


def test_ordinary_models_have_no_notes() -> None:
    x, y, _ = ZOO["lstm"].batch(np.random.default_rng(0), 8)
    assert noted(ZOO["lstm"].build(), x, y) == ()


def test_metrics_logs_and_state_are_noted_by_the_names_that_users_know() -> None:
    def rms(y: Any, p: Any) -> Any:
        return tf.sqrt(tf.reduce_mean(tf.square(p)))

    def of_positive(y: Any, p: Any) -> Any:
        return tf.reduce_mean(p[p > 0])

    class Own(keras.Model):
        def train_step(self, data: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(data[0])[0])
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"loss": loss, "parts": {"root": tf.sqrt(loss)}}

    class Counts(layers.Layer):
        def build(self, _: Any) -> None:
            self.seen = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

        def call(self, x: Any) -> Any:
            self.seen.assign(tf.cast(tf.reduce_sum(x), tf.int32))
            return x

    def model(kind: type[keras.Model], **options: Any) -> keras.Model:
        features = keras.Input((4,))
        x = Counts(name="counts")(features)
        model = kind(features, [layers.Dense(3, name=name)(x) for name in ("left", "right")])
        model.compile("sgd", **options)
        return model

    metrics = [rms, of_positive, Largest("mean", tf.reduce_mean), Largest("largest", tf.reduce_max), "accuracy"]
    x, y = np.ones((7, 4)), np.ones((7, 3))
    compiled = noted(model(keras.Model, loss=["mse", "mse"], metrics=[[], metrics]), x, [y, y])
    told = {(NoteKind.METRIC, f"right_{name}") for name in ("rms", "of_positive", "mean")}
    assert {(note.kind, note.layer) for note in compiled} == told | {(NoteKind.STATE, "counts")}
    own = noted(model(Own), x, [y, y])
    assert {(note.kind, note.layer) for note in own} == {(NoteKind.STATE, "counts"), (NoteKind.METRIC, "parts_root")}


def test_the_summary_has_a_line_for_each_kind() -> None:
    notes = [Note(COUPLED, f"norm_{index}", "mixes", "don't") for index in range(5)] + [
        Note(RANDOM, "a", "draws", "so")
    ]
    assert summary(notes, "net").splitlines() == [
        "model 'net' under this plan differs from plain Keras (pipelined.notes tells it layer by layer):",
        "  norm_0, norm_1, norm_2, ...: mixes; don't",
        "  a: draws; so",
    ]


class Cell(layers.Layer):
    """A recurrent cell that takes the mean over the batch away."""

    state_size = output_size = 2

    def call(self, x: Any, states: Any) -> Any:
        """[batch, 2], [[batch, 2]] -> the same."""
        x = tf.tanh(x + states[0])
        return x - tf.reduce_mean(x, 0, keepdims=True), [x]


def test_layers_are_noted_for_what_they_compute_not_for_what_they_are() -> None:
    recurrent = {
        "cell": layers.RNN(Cell(), name="cell"),
        "lstm": layers.LSTM(2, name="lstm"),
        "dropped": layers.LSTM(2, dropout=0.2, name="dropped"),
    }
    by_name = {
        "drop": layers.Dropout(0.5, name="drop"),
        "norm": layers.BatchNormalization(name="norm"),
        "synchronized": layers.BatchNormalization(synchronized=True, name="synchronized"),
        "kept": layers.BatchNormalization(trainable=False, name="kept"),
        "noise": Computed(lambda x: x + tf.random.normal(tf.shape(x)), "noise"),
        "same_noise": Computed(lambda x: x * tf.random.stateless_normal(tf.shape(x), (1, 2)), "same_noise"),
        "one_noise": Computed(lambda x: x * tf.random.stateless_normal((6,), (1, 2)), "one_noise"),
        **{name: lambda x, layer=layer: layer(layers.Reshape((3, 2))(x)) for name, layer in recurrent.items()},
    }
    random = {(RANDOM, name) for name in ("drop", "noise", "same_noise", "dropped")}
    assert notes_of_branches(by_name, micro_batches=1) == random | {(COUPLED, "norm"), (COUPLED, "cell")}


def test_state_that_steps_read_makes_all_else_differ() -> None:
    class Largest(layers.Layer):
        def __init__(self, read: bool) -> None:
            super().__init__(name="largest")
            self.read = read

        def build(self, _: Any) -> None:
            self.seen = self.add_weight(shape=(), initializer="zeros", trainable=False, name="seen")

        def call(self, x: Any) -> Any:
            before = self.seen.value
            self.seen.assign(tf.maximum(before, tf.reduce_mean(x)))
            return x + before if self.read else x

    for read in (False, True):
        (note,) = noted(classifier(Largest(read)), *samples(7)[:2])
        assert (note.kind, note.layer, note.alone) == (NoteKind.STATE, "largest", not read)


class Pairs(layers.Layer):
    """Compares each sample with all others, as CLIP does."""

    def call(self, x: Any) -> Any:
        """[batch, width] -> [batch, batch]."""
        return tf.matmul(x, x, transpose_b=True)


def pairing(labels: str) -> keras.Model:
    """4 features -> first -> a row and a column for each sample."""
    keras.utils.set_random_seed(0)
    x = keras.Input((4,))
    model = keras.Model(x, Pairs(name="logits")(layers.Dense(6, name="first")(x)))
    model.compile("sgd", f"{labels}_crossentropy")
    return model


def test_outputs_that_compare_all_samples_are_refused_in_slices_and_right_in_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Predictions of slices were concatenated to another shape; training failed without saying why."""
    x = samples(7)[0]
    with caplog.at_level(logging.WARNING, "dapple_tf"):
        pipelined = transform(pairing("categorical"))
        with pytest.raises(StepError, match=r"layer 'logits' compares each sample .* plan one slice for its stage"):
            pipelined.train_on_batch(x, np.eye(7))
    (pair,) = (note for note in pipelined.notes if note.kind is NoteKind.PAIRS)
    assert pair.layer == "logits"
    assert logged(caplog, "a row and a column for each sample") == [logging.WARNING]
    with pytest.raises(CaptureError, match=r"can't predict by slices of a batch: layer 'logits' compares each sample"):
        pipelined.predict(x, verbose=0)
    pipelined = transform(pairing("sparse_categorical"))
    with pytest.raises(StepError, match=r"layer 'logits' compares each sample"):
        pipelined.train_on_batch(x, np.arange(7))

    own, plain = pairing("categorical"), pairing("categorical")
    whole = transform(own, plan(devices=[[0], [1]], micro_batches=1))
    assert whole.train_on_batch(x, np.eye(7)) == pytest.approx(plain.train_on_batch(x, np.eye(7)), rel=1e-5)
    assert whole.notes == ()
    assert whole.predict(x, verbose=0).shape == (7, 7)


@pytest.mark.parametrize(
    ("value", "gradient", "kinds"),
    [
        (tf.identity, lambda x, arriving: tf.clip_by_norm(arriving, 0.05), [NoteKind.COUPLED]),
        (tf.identity, lambda x, arriving: arriving - tf.reduce_mean(arriving, 0), [NoteKind.COUPLED]),
        (tf.identity, lambda x, arriving: tf.clip_by_norm(arriving, 0.05, axes=1), []),
        (tf.identity, lambda x, arriving: -tf.nn.l2_normalize(x, -1) * arriving, []),
        (
            lambda x: x * tf.reduce_mean(x, -1, keepdims=True),
            lambda x, arriving: arriving * tf.reduce_sum(x, 1)[:, None],
            [],
        ),
    ],
)
def test_gradients_that_a_model_defines_are_looked_at_too(value: Any, gradient: Any, kinds: list[NoteKind]) -> None:
    """A gradient that was clipped by its norm was that of a slice's, without a word."""

    @tf.custom_gradient
    def own(x: Any) -> Any:
        return value(x), lambda arriving: gradient(x, arriving)

    x, y = samples(10)[:2]
    assert [note.kind for note in noted(classifier(Computed(own, "odd")), x, y)] == kinds


def test_a_loss_may_define_its_gradient() -> None:
    @tf.custom_gradient
    def mean(x: Any) -> Any:
        twice = 2 * tf.ones_like(x) / tf.cast(tf.shape(x)[0], x.dtype)
        return tf.reduce_mean(tf.reduce_sum(x, -1)), lambda arriving: arriving * twice

    x, y = samples(10)[:2]
    assert noted(classifier(loss=lambda y, outputs: mean(outputs)), x, y) == ()


def test_what_cannot_be_told_is_noted() -> None:
    """Samples by fives: no number of samples that the analysis tries can be computed."""

    def by_fives(x: Any) -> Any:
        return tf.reshape(tf.tanh(tf.reshape(x, (-1, 30))), (-1, 6))

    x, y = samples(10)[:2]
    assert [note.kind for note in noted(classifier(Computed(by_fives, "odd")), x, y)] == [NoteKind.UNKNOWN]
    assert noted(classifier(Computed(by_fives, "odd")), x, y, slices=1) == ()
