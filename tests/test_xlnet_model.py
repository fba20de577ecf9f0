"""XLNet: relative attention against plain loops, what each of its two streams sees, sizes, saving, mixed precision."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
from models_for_tests import assert_mixed, assert_saved, randomised

import dapple_tf as dapple
from dapple_tf.models import xlnet

DRAW = np.random.default_rng(0)
SMALL = dataclasses.replace(xlnet.TINY, sequence=6, width=8, inner=8, vocabulary=11)


@pytest.fixture(scope="module")
def one() -> keras.Model:
    return randomised(xlnet.build(SMALL))


@pytest.fixture(scope="module")
def two() -> keras.Model:
    return randomised(xlnet.build(dataclasses.replace(SMALL, two_streams=True)))


def _batch(samples: int = 2, **others: Any) -> dict[str, np.ndarray]:
    shape = (samples, SMALL.sequence)
    tokens = DRAW.integers(0, SMALL.vocabulary, shape).astype("int32")
    return {"tokens": tokens, "segments": np.zeros(shape, "int32"), "present": np.ones(shape, "int32"), **others}


def test_relative_shift_is_a_loop_over_distances() -> None:
    given = DRAW.normal(size=(2, 3, 5, 10))
    expected = np.empty((2, 3, 5, 5))
    for i in range(5):
        for j in range(5):
            expected[:, :, i, j] = given[:, :, i, 5 - (i - j)]
    np.testing.assert_array_equal(np.asarray(xlnet.relative_shift(given)), expected)


def test_relative_positions() -> None:
    positions = np.asarray(xlnet.relative_positions(3, 4, "float64"))
    assert positions.shape == (6, 4)
    for row, distance in enumerate([3, 2, 1, 0, -1, -2]):
        angles = np.array([distance, distance / 100])
        np.testing.assert_allclose(positions[row], [*np.sin(angles), *np.cos(angles)], atol=1e-15)


def test_attention_is_that_of_the_papers_loop_by_loop() -> None:
    heads, size, sequence = 2, 3, 4
    width = heads * size
    layer = xlnet.RelativeAttention(heads, dtype="float64")
    x, content = DRAW.normal(size=(2, 1, sequence, width))
    other = DRAW.integers(0, 2, (1, sequence, sequence)).astype(bool)
    visible = DRAW.integers(0, 2, (1, sequence, sequence)).astype(bool)
    visible[0, 1], visible[0, 2] = False, True
    layer.build(x.shape)
    for variable in layer.trainable_variables:
        variable.assign(DRAW.normal(size=variable.shape))
    kernels = {part: np.asarray(dense.kernel) for part, dense in layer.projections.items()}
    r_w, r_r, r_s, segments = (
        np.asarray(bias) for bias in (layer.content_bias, layer.distance_bias, layer.segment_bias, layer.segments)
    )

    def head(part: str, vector: np.ndarray, number: int) -> np.ndarray:
        return (vector @ kernels[part])[number * size : (number + 1) * size]

    expected = np.zeros((sequence, width))
    for i in range(sequence):
        attended = []
        for n in range(heads):
            q, seen = head("query", x[0, i], n), np.flatnonzero(visible[0, i])
            scores = []
            for j in seen:
                angles = (i - j) / 10000 ** (np.arange(0, width, 2) / width)
                distance = head("distance", np.concatenate([np.sin(angles), np.cos(angles)]), n)
                score = (q + r_w[n]) @ head("key", content[0, j], n) + (q + r_r[n]) @ distance
                scores.append(score + (q + r_s[n]) @ segments[int(other[0, i, j]), n])
            weights = np.exp(np.array(scores) / np.sqrt(size))
            values = np.array([head("value", content[0, j], n) for j in seen]).reshape(-1, size)
            attended.append(weights @ values / max(weights.sum(), 1e-300))
        expected[i] = np.concatenate(attended) @ kernels["output"]
    assert np.all(expected[1] == 0)  # It sees nothing.
    np.testing.assert_allclose(np.asarray(layer(x, content, other, visible))[0], expected, atol=1e-12)


@pytest.mark.slow
def test_layers_shapes_and_parameters(one: keras.Model, two: keras.Model) -> None:
    for model, two_streams in ((one, False), (two, True)):
        assert [layer.name for layer in model.layers if layer.weights] == ["embedding", "layer_0", "layer_1", "logits"]
        assert model.output_shape == (None, 6, 11)
        config = dataclasses.replace(SMALL, two_streams=two_streams)
        assert model.count_params() == config.parameters


def test_spans() -> None:
    config = dataclasses.replace(SMALL, depth=1, head="spans")
    model = xlnet.build(config)
    assert model.count_params() == config.parameters
    batch = _batch()
    batch["present"][0, 4:] = 0
    logits = model.predict_on_batch(batch)
    assert logits.shape == (2, 2, 6)
    assert np.array_equal(logits == -1e4, np.repeat(batch["present"][:, None] == 0, 2, axis=1))


def test_padding_is_not_seen_and_segments_are(one: keras.Model) -> None:
    batch = _batch()
    batch["present"][:, 4:] = 0
    before = one.predict_on_batch(batch)
    batch["tokens"][:, 4:] = 0
    np.testing.assert_array_equal(one.predict_on_batch(batch)[:, :4], before[:, :4])
    batch["segments"][:, 3] = 1
    assert np.abs(one.predict_on_batch(batch)[:, 0] - before[:, 0]).max() > 1e-4


def test_a_query_sees_neither_its_own_token_nor_later_ones(two: keras.Model) -> None:
    """Exactly those positions that the permutation puts before the query's reach its logits."""
    content, query = two.get_layer("layer_1").output
    streams = keras.Model(two.input, [content, query, two.output])
    order = np.array([[3, 0, 5, 1, 4, 2]], "int32")
    batch = _batch(1, permutation=order)
    before = streams.predict_on_batch(batch)
    for position in range(SMALL.sequence):
        changed = {**batch, "tokens": batch["tokens"].copy()}
        changed["tokens"][0, position] = (changed["tokens"][0, position] + 1) % SMALL.vocabulary
        after = streams.predict_on_batch(changed)
        content, query, logits = (np.abs(b - a)[0].max(axis=-1) > 1e-5 for a, b in zip(before, after, strict=True))
        np.testing.assert_array_equal(content, order[0] >= order[0, position])
        np.testing.assert_array_equal(query, order[0] > order[0, position])
        np.testing.assert_array_equal(logits, query)


def test_tokens_that_share_a_place_see_each_other(two: keras.Model) -> None:
    content = keras.Model(two.input, two.get_layer("layer_1").output[0])
    batch = _batch(1, permutation=np.array([[0, 0, 1, 0, 2, 0]], "int32"))
    before = content.predict_on_batch(batch)
    batch["tokens"][0, 5] = (batch["tokens"][0, 5] + 1) % SMALL.vocabulary
    assert np.all(np.abs(content.predict_on_batch(batch) - before)[0].max(axis=-1) > 1e-5)


@pytest.mark.thorough
@pytest.mark.slow
def test_trains_as_a_pipeline_of_two_streams() -> None:
    model = xlnet.build(dataclasses.replace(SMALL, two_streams=True))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    plan = dapple.Plan.manual(["layer_0"], [[0, 1], [2]], micro_batches=2, global_batch_size=4)
    pipelined = dapple.transform(model, dapple.Cluster.local(3, kind="cpu"), plan)
    order = np.argsort(DRAW.random((4, SMALL.sequence)), axis=1).astype("int32")
    batch = _batch(4, permutation=order)
    checked = pipelined.verify(batch, batch["tokens"], (order > 2).astype("float32"), steps=0)
    assert checked.worst[1] < 1e-4, str(checked)
    assert checked.largest["embedding/first_query"] > 1e-6
    pipelined.close()


@pytest.mark.thorough
@pytest.mark.slow
def test_saved_and_loaded(two: keras.Model, tmp_path: pathlib.Path) -> None:
    batch = _batch(2, permutation=np.tile(np.arange(6, dtype="int32"), (2, 1)))
    assert_saved(two, batch, tmp_path)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy: str) -> None:
    layer = xlnet.XlnetLayer(2, 8, dropout=0.1, dtype=policy)
    vectors = DRAW.normal(size=(2, 4, 8)).astype("float32")
    ones, places = np.ones((2, 4), "int32"), np.tile(np.arange(4, dtype="int32"), (2, 1))
    assert len(assert_mixed(layer, policy, vectors, ones, ones, vectors, places, training=True)) == 2
