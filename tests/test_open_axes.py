"""Axes that a model leaves open, or whose lengths data and variables decide, equal plain Keras over cuts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from equivalence import TOLERANCE, assert_same_variables, largest_difference, pair, pipeline, use_float64
from models_for_tests import Computed

from dapple_tf import DataError
from dapple_tf.errors import StepError
from dapple_tf.execution.notes import NoteKind
from graph_passes.errors import PassError

layers, ops = keras.layers, keras.ops


def compiled(inputs: Any, outputs: Any) -> keras.Model:
    model = keras.Model(inputs, outputs, name="m")
    model.compile("adam", "mse")
    return model


def strided() -> keras.Model:
    x = keras.Input((None, 8))
    h = layers.Dense(8, "gelu", name="d")(layers.Conv1D(8, 3, strides=2, name="conv")(x))
    return compiled(x, layers.Dense(1)(layers.GlobalAveragePooling1D()(h)))


class Positions(layers.Layer):
    """Adds one of 6 learned vectors to each place."""

    supports_masking = True

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(6, shape[-1]), name="table")

    def call(self, x: Any) -> Any:
        return x + self.table[: ops.shape(x)[1]]


def attention() -> keras.Model:
    """An encoder behind a strided layer, of one open length, and a decoder of another: labels are as long as that."""
    source, target = keras.Input((None, 4), name="source"), keras.Input((None,), dtype="int32", name="target")
    h = Positions(name="positions")(layers.Conv1D(4, 3, strides=2, padding="same")(source))
    memory = layers.MultiHeadAttention(2, 2, name="encoder")(h, h)
    queries = Positions(name="places")(layers.Embedding(5, 4, mask_zero=True, name="words")(target))
    queries = layers.MultiHeadAttention(2, 2, name="self")(queries, queries, use_causal_mask=True)
    out = layers.MultiHeadAttention(2, 2, name="cross")(queries, memory)
    return compiled({"source": source, "target": target}, layers.Dense(3)(out))


class Flat(layers.Layer):
    """Merges samples and places."""

    def call(self, x: Any) -> Any:
        return ops.reshape(x, (-1, 4))

    def compute_output_shape(self, shape: Any) -> Any:
        return (None, 4)


class Back(layers.Layer):
    """Takes them apart again."""

    def call(self, inputs: Any) -> Any:
        flat, like = inputs
        return ops.reshape(flat, (-1, ops.shape(like)[1], 4))

    def compute_output_shape(self, shapes: Any) -> Any:
        return shapes[1]


def merged() -> keras.Model:
    x = keras.Input((None, 4))
    h = layers.Dense(4, "tanh", name="before")(layers.Conv1D(4, 3, strides=2)(x))
    flat = layers.Dense(4, "tanh", name="flat_dense")(Flat(name="flat")(h))
    like = layers.AveragePooling1D(3, 2, name="like")(x)
    return compiled(x, layers.Dense(1)(layers.GlobalMaxPooling1D()(Back(name="back")([flat, like]))))


def batch(model: keras.Model, sizes: Sequence[int]) -> tuple[Any, Any]:
    """A random batch: samples, then the lengths."""
    rng = np.random.default_rng(sum(sizes))
    if not isinstance(model.input, dict):
        return rng.normal(size=(*sizes, model.input.shape[-1])), rng.normal(size=(sizes[0], 1))
    samples, places, words = sizes
    target = rng.integers(1, 5, size=(samples, words))
    target[0, -1] = 0  # padding
    x = {"source": rng.normal(size=(samples, places, 4)), "target": target.astype("int32")}
    return x, rng.normal(size=(samples, words, 3))


@pytest.mark.parametrize(
    ("build", "cut", "sizes"),
    [
        # A length that equals the batch, then others, and a smaller last batch.
        (strided, "conv", [(5, 3), (5, 20), (3, 5)]),
        (attention, "encoder", [(4, 7, 4), (4, 3, 2)]),
    ],
)
def test_batches_of_any_lengths_train_as_in_plain_keras(
    build: Callable[[], keras.Model], cut: str, sizes: list[tuple[int, ...]]
) -> None:
    """Open axes were taken for 16 and 128, of each tensor for itself, also of those behind strides."""
    use_float64()
    own, plain = pair(build)
    pipelined = pipeline(own, [cut], (2, 1), 2, sizes[0][0])
    for each in sizes:
        x, y = batch(own, each)
        pipelined.train_on_batch(x, y)
        plain.train_on_batch(x, y)
    pipelined.close()
    assert_same_variables(own, plain, TOLERANCE["float64"])


# ---- no axis of samples


class Messages(keras.Model):
    """Nodes and edges, whose number a later stage reads."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.last = layers.Dense(4, name="cut"), layers.Dense(3, name="last")

    def call(self, inputs: Any) -> Any:
        nodes, edges = inputs
        messages = self.cut(ops.concatenate([ops.take(nodes, edges[:, end], axis=0) for end in (0, 1)], -1))
        arrived = ops.segment_sum(messages, edges[:, 1], num_segments=ops.shape(nodes)[0])
        return self.last(arrived) / ops.cast(ops.shape(messages)[0], arrived.dtype)


class Adjacent(Messages):
    """Nodes and their adjacency matrix."""

    def call(self, inputs: Any) -> Any:
        nodes, adjacency = inputs
        return self.last(ops.matmul(adjacency, ops.tanh(self.cut(ops.matmul(adjacency, nodes)))))


class Pairs(Messages):
    """Two rows of outputs, and labels, for each sample."""

    def call(self, x: Any) -> Any:
        return ops.reshape(self.last(ops.expand_dims(self.cut(x), 1) * ops.ones((1, 2, 1))), (-1, 3))


def graph(nodes: int, edges: int) -> Any:
    return (rng.normal(size=(nodes, 4)), rng.integers(0, nodes, (edges, 2))), rng.normal(size=(nodes, 3))


rng = np.random.default_rng(0)


def test_batches_that_cannot_be_cut_train_where_stages_have_one_slice() -> None:
    """They were refused. Each shape of a tensor at the cut is that of the tensor, not a multiple of the samples."""
    batches = [graph(5, 5), graph(5, 9), graph(9, 4)]

    def build() -> keras.Model:
        model = Messages()
        model(batches[0][0])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
        return model

    use_float64()
    model, plain = pair(build)
    pipelined = pipeline(model, ["cut"], (1, 1), 1, 5)
    for x, y in batches:
        for method in ("train_on_batch", "test_on_batch"):
            logs = [getattr(own, method)(x, y) for own in (pipelined, plain)]
            assert largest_difference(*logs) < 1e-6  # Keras' metrics are float32.
        assert largest_difference(pipelined.predict_on_batch(x), plain.predict_on_batch(x)) < 1e-10
    pipelined.sync()
    assert_same_variables(model, plain, TOLERANCE["float64"])


def first_batch(model: keras.Model, plan: tuple[Sequence[str], tuple[int, ...], int], x: Any, y: Any) -> None:
    model(x)
    model.compile("sgd", "mse")
    pipeline(model, *plan, 5).train_on_batch(x, y)


def test_batches_that_cannot_be_cut_are_refused_where_they_would_be() -> None:
    """With a matrix, a step failed, with "RecvAsync is cancelled" elsewhere: all arrays have as many rows."""
    x, y = rng.normal(size=(5, 4)), rng.normal(size=(10, 3))
    with pytest.raises(DataError, match=r"x has 5, y has 10; .* takes a plan of one micro-batch and one replica"):
        first_batch(Pairs(), (["cut"], (1, 1), 2), x, y)
    with pytest.raises(PassError, match=r"MatMul.* for a slice of 2 of the batch's 5 samples, in stage 0: .* plan one"):
        first_batch(Adjacent(), ([], (2,), 1), (x, rng.normal(size=(5, 5))), y[:5])


class Kept(Computed):
    """A function of its inputs, and of a number that it keeps."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        super().__init__(function, name)
        three = keras.initializers.Constant(3)
        self.number = self.add_weight(shape=(), dtype="int32", initializer=three, trainable=False, name="number")

    def call(self, *inputs: Any) -> Any:
        return self.function(*inputs, self.number.value)


def cropped(x: Any, n: Any, _: Any) -> Any:
    return x[:, : tf.reduce_max(n)]


def mean(h: Any, *_: Any) -> Any:
    return tf.reduce_mean(h, 1)


def masked_mean(h: Any, n: Any, _: Any) -> Any:
    mask = tf.cast(tf.sequence_mask(n, tf.reduce_max(n)), h.dtype)
    return tf.reduce_sum(h * mask[..., None], 1) / tf.reduce_sum(mask, 1)[:, None]


def taken_apart(h: Any, n: Any, _: Any) -> Any:
    return tf.reduce_mean(tf.reshape(h, (-1, tf.reduce_max(n), 4)), 1)


def flattened(x: Any, n: Any, _: Any) -> Any:
    return tf.reshape(cropped(x, n, _), (-1, 4))


LENGTHS: dict[str, tuple[Callable[..., Any], Callable[..., Any], bool]] = {
    "cropped to the longest": (cropped, mean, False),
    "cropped, with a mask": (cropped, masked_mean, True),
    "cropped to a variable": (lambda x, n, k: x[:, :k], mean, True),
    "places merged with samples": (flattened, taken_apart, False),
}  # fmt: skip


def decided(case: str, then: str = "dense") -> keras.Model:
    """6 vectors of 4 -> p -> a, which decides lengths -> d -> m -> logits."""
    make, back, _ = LENGTHS[case]
    x, n = keras.Input((6, 4), name="x"), keras.Input((), dtype="int32", name="n")
    h = Kept(make, "a")(layers.Dense(4, "tanh", name="p")(x), n)
    h = (layers.GRU(4, return_sequences=True, name="d") if then == "gru" else layers.Dense(4, "tanh", name="d"))(h)
    return compiled({"x": x, "n": n}, layers.Dense(1)(Kept(back, "m")(h, n)))


def lengths() -> tuple[Any, Any]:
    """Samples of which the halves and the whole have other longest ones."""
    rng = np.random.default_rng(2)
    x = {"x": rng.normal(size=(8, 6, 4)), "n": np.array([2, 4, 3, 1, 4, 5, 1, 4], "int32")}
    return x, rng.normal(size=(8, 1))


@pytest.mark.parametrize(
    ("case", "then"), [(case, "gru" if case == "cropped to the longest" else "dense") for case in LENGTHS]
)
def test_lengths_that_data_or_variables_decide_cross_cuts(case: str, then: str) -> None:
    """A run with integers 0 and 1 decided them; slices that keep them whole are as exact as one."""
    use_float64()
    exact = LENGTHS[case][2]
    own, plain = pair(lambda: decided(case, then))
    pipelined = pipeline(own, ["a", "d"], (2, 2, 2) if exact else (1, 1, 1), 1, 8)
    x, y = lengths()
    for number in (3, 5):
        for model in (own, plain):
            model.get_layer("a").number.assign(number)
        pipelined.train_on_batch(x, y)
        plain.train_on_batch(x, y)
    pipelined.sync()
    assert_same_variables(own, plain, TOLERANCE["float64"])
    assert pipelined.test_on_batch(x, y) == pytest.approx(plain.test_on_batch(x, y), rel=1e-5)
    assert largest_difference(pipelined.predict_on_batch(x), plain.predict_on_batch(x)) <= TOLERANCE["float64"]
    assert pipelined.notes == ()


def test_lengths_of_a_slice_are_noted_and_refused_between_unlike_slices() -> None:
    use_float64()
    x, y = lengths()
    own, plain = pair(lambda: decided("cropped to the longest"))
    pipelined = pipeline(own, ["a"], (2, 2), 1, 8)
    assert abs(pipelined.train_on_batch(x, y) - plain.train_on_batch(x, y)) > 1e-4
    assert [(note.kind, note.layer) for note in pipelined.notes] == [(NoteKind.COUPLED, "m")]
    with pytest.raises(PassError) as caught:
        pipeline(decided("cropped, with a mask"), ["a"], (1, 2), 1, 8).train_on_batch(x, y)
    assert str(caught.value).endswith(
        "of layer 'a' has lengths, or a value, that differ between slices, so that it can't be cut: stage "
        "0 makes it in slices of [8] samples, stage 1 reads it in slices of [4, 4]; give both stages the same number "
        "of replicas and the same shares, or cut elsewhere"
    )
    with pytest.raises(PassError, match=r"layer 'a' has .* that it can't be joined: .* in slices of \[4, 4\] samples"):
        pipeline(decided("cropped to the longest"), ["a"], (2, 1), 1, 8).train_on_batch(x, y)


def test_predictions_of_unlike_lengths_are_refused() -> None:
    inputs = keras.Input((6, 4), name="x"), keras.Input((), dtype="int32", name="n")
    pipelined = pipeline(compiled(list(inputs), Kept(cropped, "a")(*inputs)), [], (1,), 2, 8)
    with pytest.raises(StepError, match=r"of shapes \(4, 4\) and \(5, 4\), which can't be joined: .* plan one slice"):
        pipelined.predict_on_batch(lengths()[0])
