"""GNMT: attention against plain loops, padding, order of layers, what each position sees, and pairs to translate."""

from __future__ import annotations

import dataclasses
import pathlib

import keras
import numpy as np
import pytest
from models_for_tests import assert_mixed, assert_saved, randomised

import dapple_tf as dapple
from dapple_tf.frontend.batch import declared_spec
from dapple_tf.frontend.capture import Mode, capture
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.models import gnmt
from dapple_tf.models.generated_data import BEGIN, END, reversed_pairs, reversed_pairs_for
from dapple_tf.models.sources import ModelError
from graph_passes.analysis import slice_shapes
from graph_passes.passes.assign_stages import AssignStages

SMALL = dataclasses.replace(gnmt.TINY, vocabulary=9, source=5, target=4, width=4)
DRAW = np.random.default_rng(0)


@pytest.fixture(scope="module")
def model() -> keras.Model:
    return randomised(gnmt.build(SMALL), 0.6)


def _batch(samples: int = 2, config: gnmt.GnmtConfig = SMALL) -> dict[str, np.ndarray]:
    sizes = {"source": config.source, "target": config.target}
    return {key: DRAW.integers(1, config.vocabulary, (samples, size), "int32") for key, size in sizes.items()}


@pytest.mark.slow
def test_layers_in_the_order_of_the_profile_and_parameters(model: keras.Model) -> None:
    names = [layer.name for layer in model.layers if layer.weights]
    halves = [["source_embedding", "encoder_0", "encoder_1"], ["target_embedding", "decoder_0", "decoder_1"]]
    assert names == [*halves[0], *halves[1], "logits"]
    assert model.output_shape == (None, 4, 9)
    assert model.count_params() == SMALL.parameters
    deeper = dataclasses.replace(SMALL, depth=3, width=3)
    assert gnmt.build(deeper).count_params() == deeper.parameters


@pytest.mark.thorough
@pytest.mark.slow
def test_residual_connections_begin_with_the_third_layer() -> None:
    with dapple.deferred_init():
        deep = gnmt.gnmt_16(depth=4, width=4, vocabulary=5)
    residual = {layer.name for layer in deep.layers if getattr(layer, "residual", False)}
    assert residual == {f"{half}_{index}" for half in ("encoder", "decoder") for index in (2, 3)}


def test_attention_is_normalised_and_additive_loop_by_loop() -> None:
    layer = gnmt.NormalizedBahdanauAttention(3, dtype="float64")
    queries, context = DRAW.normal(size=(2, 2, 4)), DRAW.normal(size=(2, 5, 6))
    there = np.arange(5) < np.array([[5], [3]])
    layer.build(queries.shape, context.shape)
    for variable in layer.trainable_variables:
        variable.assign(DRAW.normal(size=variable.shape))
    kernels = np.asarray(layer.query.kernel), np.asarray(layer.key.kernel)
    vector, scale, bias = (np.asarray(value) for value in (layer.vector, layer.scale, layer.bias))
    expected = np.zeros((2, 2, 6))
    for sample in range(2):
        for i in range(2):
            scores = []
            for j in range(there[sample].sum()):
                hidden = np.tanh(queries[sample, i] @ kernels[0] + context[sample, j] @ kernels[1] + bias)
                scores.append(scale * vector @ hidden / np.linalg.norm(vector))
            weights = np.exp(scores) / np.sum(np.exp(scores))
            expected[sample, i] = sum(w * context[sample, j] for j, w in enumerate(weights))
    attended = layer(queries, context, context_mask=keras.ops.convert_to_tensor(there))
    np.testing.assert_allclose(np.asarray(attended), expected, atol=1e-12)


@pytest.mark.slow
def test_padding_changes_nothing(model: keras.Model) -> None:
    """Logits of a padded batch are those of a model for shorter sentences."""
    shorter = gnmt.build(dataclasses.replace(SMALL, source=3, target=2))
    shorter.set_weights(model.get_weights())
    batch = _batch()
    batch["source"][:, 3:], batch["target"][:, 2:] = 0, 0
    expected = shorter.predict_on_batch({"source": batch["source"][:, :3], "target": batch["target"][:, :2]})
    np.testing.assert_allclose(model.predict_on_batch(batch)[:, :2], expected, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.slow
def test_padding_is_left_out_of_the_loss(model: keras.Model) -> None:
    batch = _batch()
    batch["target"][0, 2:] = 0
    labels = DRAW.integers(1, SMALL.vocabulary, (2, SMALL.target))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tensors = {key: keras.ops.convert_to_tensor(value) for key, value in batch.items()}
    loss = float(model.compute_loss(y=keras.ops.convert_to_tensor(labels), y_pred=model(tensors)))
    logits = model.predict_on_batch(batch)
    losses = np.log(np.exp(logits).sum(axis=-1)) - np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    assert loss == pytest.approx(losses[batch["target"] != 0].mean(), rel=1e-5)


def test_the_target_is_read_from_left_to_right_and_the_source_in_both_directions(model: keras.Model) -> None:
    batch = _batch()
    before = model.predict_on_batch(batch)

    def differs(key: str, position: int) -> np.ndarray:
        changed = {**batch, key: batch[key].copy()}
        changed[key][:, position] = changed[key][:, position] % (SMALL.vocabulary - 1) + 1
        return np.abs(model.predict_on_batch(changed) - before).max(axis=-1) > 0

    for position in range(SMALL.target):
        np.testing.assert_array_equal(differs("target", position), [np.arange(SMALL.target) >= position] * 2)
    assert differs("source", 0).all() and differs("source", SMALL.source - 1).all()


def test_the_first_encoder_layer_reads_in_both_directions(model: keras.Model) -> None:
    encoded = keras.Model(model.input, model.get_layer("encoder_0").output)
    batch = _batch()
    before = encoded.predict_on_batch(batch)
    batch["source"][:, 2] = batch["source"][:, 2] % (SMALL.vocabulary - 1) + 1
    moved = np.abs(encoded.predict_on_batch(batch) - before).max(axis=0) > 0
    assert moved[:, : SMALL.width].any(axis=1).tolist() == [False, False, True, True, True]
    assert moved[:, SMALL.width :].any(axis=1).tolist() == [True, True, True, False, False]


@pytest.mark.thorough
@pytest.mark.slow
def test_saved_and_loaded(model: keras.Model, tmp_path: pathlib.Path) -> None:
    batch = _batch()
    batch["source"][0, 2:] = 0
    assert_saved(model, batch, tmp_path)


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision(policy: str) -> None:
    layer = gnmt.AttendingLayer(4, dtype=policy)
    masks = [np.array([[True, True, False]]), np.array([[True, False]])]
    assert_mixed(layer, policy, [np.ones((1, 3, 5), "float32"), np.ones((1, 2, 4), "float32")], mask=masks)


def test_shapes_at_cuts_are_known_without_running_the_model(
    model: keras.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind an LSTM's loop the batch was lost, so that a run with all parameters, of 3.5 GB, had to find it again."""
    monkeypatch.setattr(slice_shapes, "measure_shapes", lambda *_: pytest.fail("the model was run"))
    spec = declared_spec(model)
    assert spec is not None
    program = capture(model, VariableTable(model), Mode.PREDICT, spec)
    cuts = ("source_embedding", "encoder_0", "encoder_1", "decoder_0", "decoder_1")
    assert len(AssignStages(cuts).run(program).stages) == 6


@pytest.mark.thorough
def test_trains_as_a_pipeline_cut_in_both_halves() -> None:
    """Encoder, decoder and the attention's answer cross cuts, and padding is of different lengths in each slice."""
    model = gnmt.build(SMALL)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    plan = dapple.Plan.manual(["encoder_0", "decoder_0"], [[0, 1], [2], [3]], micro_batches=2, global_batch_size=4)
    pipelined = dapple.transform(model, dapple.Cluster.local(4, kind="cpu"), plan)
    pairs = reversed_pairs(4, SMALL.vocabulary, SMALL.source, SMALL.target, seed=2)
    checked = pipelined.verify({"source": pairs.source, "target": pairs.target}, pairs.labels, pairs.weights, steps=0)
    assert checked.worst[1] < 1e-4, str(checked)
    pipelined.close()


def test_pairs_are_sentences_and_their_reverses() -> None:
    pairs = reversed_pairs(50, 9, 5, 7, seed=0)
    lengths = (pairs.source != 0).sum(axis=1)
    assert set(lengths) == {3, 4, 5}
    for row, length in enumerate(lengths):
        words = pairs.source[row, :length].tolist()
        assert set(words) <= set(range(3, 9)) and not pairs.source[row, length:].any()
        assert pairs.target[row].tolist() == [BEGIN, *words[::-1], *[0] * (6 - length)]
        assert pairs.labels[row].tolist() == [*words[::-1], END, *[0] * (6 - length)]
        assert pairs.weights[row].tolist() == [1.0] * (length + 1) + [0.0] * (6 - length)
    same, other = reversed_pairs(50, 9, 5, 7, seed=0), reversed_pairs(50, 9, 5, 7, seed=1)
    np.testing.assert_array_equal(pairs.source, same.source)
    assert (pairs.source != other.source).any()


@pytest.mark.parametrize("sizes", [(3, 5, 5), (9, 0, 5), (9, 5, 1)])
def test_pairs_that_cannot_be(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"pairs of \d tokens, \d read and \d written; need at least 4 tokens"):
        reversed_pairs(2, *sizes, seed=0)


def test_pairs_for_other_models_are_refused(model: keras.Model) -> None:
    x, y, weights = reversed_pairs_for(model, 3, seed=0)
    assert {key: array.shape for key, array in x.items()} == {"source": (3, 5), "target": (3, 4)}
    assert y.shape == weights.shape == (3, 4)
    other = keras.Sequential([keras.Input((3,), name="numbers"), keras.layers.Dense(2)], name="other")
    with pytest.raises(ModelError, match="for gnmt, but 'other' takes numbers; use other data"):
        reversed_pairs_for(other, 3, seed=0)
    no_words = gnmt.build(dataclasses.replace(SMALL, vocabulary=3))
    with pytest.raises(ModelError, match="don't fit 'gnmt': pairs of 3 tokens"):
        reversed_pairs_for(no_words, 3, seed=0)
