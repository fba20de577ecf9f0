"""Models of text: sizes as documented and published, what each position sees, attention against plain loops, saving."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pathlib
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import numpy as np
import pytest
from models_for_tests import randomised

import dapple_tf as dapple
from dapple_tf.frontend.batch import declared_spec
from dapple_tf.frontend.capture import Mode, capture
from dapple_tf.frontend.variables import VariableTable
from dapple_tf.models import bert, ffnn, gnmt, gpt, rnn, text, xlnet
from dapple_tf.models.generated_data import BEGIN, END, reversed_pairs
from dapple_tf.models.rnn import RecurrentLayer
from dapple_tf.models.sources import ModelError
from graph_passes.analysis import slice_shapes
from graph_passes.passes.assign_stages import AssignStages

DRAW = np.random.default_rng(0)

# ---- sizes

DOCUMENT = pathlib.Path(__file__).parents[1] / "docs" / "models.md"


CONFIGS = {
    "bert:12": bert.BASE,
    "bert:24": bert.LARGE,
    "bert:48": bert.BertConfig(),
    "xlnet:36": xlnet.XlnetConfig(),
    "xlnet_two_streams:36": xlnet.XlnetConfig(two_streams=True),
    "gnmt:16": gnmt.GnmtConfig(),
    "gpt:medium": gpt.MEDIUM,
    "rnn:16": rnn.RnnConfig(),
    "ffnn:16": ffnn.FfnnConfig(),
}


def test_the_document_says_how_large_models_are() -> None:
    section = DOCUMENT.read_text().partition("## Text and sequences")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w:]+)` \| ([\d,]+) \| (\w*) ?\|", section, re.MULTILINE)
    counts = {name: int(parameters.replace(",", "")) for name, parameters, _ in rows}
    assert counts == {name: config.parameters for name, config in CONFIGS.items()}
    # Table 1 of the DAPPLE paper; its M is 2^20 for XLNet, as for VGG-19 and ResNet-50.
    published = {"bert:48": ("640M", 640e6), "xlnet:36": ("500M", 500 * 2**20), "gnmt:16": ("291M", 291e6)}
    assert {name: paper for name, _, paper in rows if paper} == {name: text for name, (text, _) in published.items()}
    for name, (_, number) in published.items():
        assert CONFIGS[name].parameters == pytest.approx(number, rel=0.02)
    assert CONFIGS["gpt:medium"].parameters == 354_823_168  # the published checkpoint of GPT-2 medium


GNMT = dataclasses.replace(gnmt.TINY, vocabulary=9, source=5, target=4, width=4)
XLNET = dataclasses.replace(xlnet.TINY, sequence=6, width=8, inner=8, vocabulary=11)
TWO_STREAMS = dataclasses.replace(XLNET, two_streams=True)
GPT = gpt.GptConfig(vocabulary=7, sequence=5, depth=3, width=8, heads=4)
BLOCKS = ("embedding", "layer_0", "layer_1")
HALVES = ("source_embedding", "encoder_0", "encoder_1", "target_embedding", "decoder_0", "decoder_1")

BUILT: list[tuple[Any, Any, tuple[str, ...], tuple[Any, ...]]] = [
    (gpt, GPT, ("embedding", "block_0", "block_1", "block_2", "final_norm", "logits"), (5, 7)),
    (gpt, dataclasses.replace(GPT, depth=1, tied=True), ("embedding", "block_0", "final_norm"), (5, 7)),
    (bert, bert.TINY, (*BLOCKS, "transform", "transform_norm", "logits"), (16, 67)),
    (bert, dataclasses.replace(bert.TINY, head="classes", classes=3), (*BLOCKS, "pooler", "logits"), (3,)),
    (bert, dataclasses.replace(bert.TINY, head="spans"), (*BLOCKS, "logits"), (2, 16)),
    (gnmt, GNMT, (*HALVES, "logits"), (4, 9)),
    (xlnet, XLNET, (*BLOCKS, "logits"), (6, 11)),
    (xlnet, dataclasses.replace(XLNET, depth=1, head="spans"), ("embedding", "layer_0", "logits"), (2, 6)),
    (rnn, rnn.TINY, ("embedding", "cell_0", "cell_1", "logits"), (8, 256)),
    (ffnn, ffnn.FfnnConfig(depth=3, features=5, width=7, classes=2), ("layer_0", "layer_1", "layer_2"), (2,)),
]
"""Module, sizes, layers that have weights, and the shape of a sample's result."""


@pytest.mark.parametrize(("module", "config", "names", "shape"), BUILT)
def test_layers_shapes_and_parameters(module: Any, config: Any, names: tuple[str, ...], shape: tuple[Any, ...]) -> None:
    """Plans name the layers."""
    model = module.build(config)
    assert tuple(layer.name for layer in model.layers if layer.weights) == names
    assert model.output_shape == (None, *shape)
    assert model.count_params() == config.parameters


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (bert.bert_tiny, {"sequence": 17}, "sequence"),
        (gpt.gpt_tiny, {"depth": 0}, "depth is 0; need at least 1"),
        (gnmt.gnmt_tiny, {"depth": 1}, "depth is 1; need at least 2"),
        (xlnet.xlnet_tiny, {"width": 33, "heads": 3}, "width 33 is odd"),
        (xlnet.xlnet_tiny, {"head": "spans", "two_streams": True}, "head is 'spans', but the second stream is there"),
        (partial(gpt.sample, None, b"", 1), {}, "need a prompt and temperature >= 0"),
        (
            partial(RecurrentLayer(4, bidirectional=True, residual=True), np.ones((1, 2, 3), "float32")),
            {},
            "an input of 3 numbers can't be added to an output of 8",
        ),
    ],
)
def test_impossible_sizes_are_refused(make: Callable[..., keras.Model], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


# ---- what each position sees


MADE: dict[str, Callable[[], keras.Model]] = {
    "gpt, tied": lambda: randomised(gpt.build(dataclasses.replace(GPT, tied=True)), 0.3),
    "bert": bert.bert_tiny,
    "gnmt": lambda: randomised(gnmt.build(GNMT), 0.6),
    "xlnet": lambda: randomised(xlnet.build(XLNET)),
    "two streams": lambda: randomised(xlnet.build(TWO_STREAMS)),
    "rnn": rnn.rnn_tiny,
}


@pytest.fixture(scope="module")
def models() -> Callable[[str], keras.Model]:
    """Each is built once."""
    built: dict[str, keras.Model] = {}
    return lambda name: built.get(name) or built.setdefault(name, MADE[name]())


def batch_for(model: keras.Model, samples: int = 2) -> dict[str, np.ndarray]:
    """Tokens above 0, one segment, no padding."""
    given = {}
    for tensor in model.inputs:
        shape = (samples, tensor.shape[1])
        given[tensor.name] = DRAW.integers(1, 7, shape).astype("int32")
        if tensor.name in ("segments", "present"):
            given[tensor.name] = np.full(shape, tensor.name == "present", "int32")
    return given


def predicted(model: keras.Model, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Results for a batch, of which some models take the tokens only."""
    return np.asarray(model(batch if len(batch) > 1 else batch["tokens"], training=False))


def changed(batch: dict[str, np.ndarray], key: str, position: int) -> dict[str, np.ndarray]:
    """The batch with other tokens at a position."""
    other = {**batch, key: batch[key].copy()}
    other[key][:, position] = other[key][:, position] % 6 + 1
    return other


@pytest.mark.parametrize(
    ("name", "key", "later_only"),
    [
        *(("gpt, tied", "tokens", True), ("rnn", "tokens", True), ("gnmt", "target", True)),
        *(("bert", "tokens", False), ("xlnet", "tokens", False)),
    ],
)
def test_texts_are_read_from_left_to_right_or_in_both_directions(
    name: str, key: str, later_only: bool, models: Callable[[str], keras.Model]
) -> None:
    model = models(name)
    batch = batch_for(model)
    before = predicted(model, batch)
    for position in (0, batch[key].shape[1] - 2, batch[key].shape[1] - 1):
        moved = np.abs(predicted(model, changed(batch, key, position)) - before).max(axis=-1) > 1e-7
        seen = np.arange(before.shape[1]) >= position if later_only else np.ones(before.shape[1], bool)
        np.testing.assert_array_equal(moved, [seen] * 2)


@pytest.mark.parametrize("name", ["bert", "xlnet"])
def test_padding_is_not_seen_and_segments_are(name: str, models: Callable[[str], keras.Model]) -> None:
    model = models(name)
    batch = batch_for(model)
    batch["present"][:, 4:] = 0
    before = model.predict_on_batch(batch)
    batch["tokens"][:, 4:] = 0
    np.testing.assert_array_equal(model.predict_on_batch(batch)[:, :4], before[:, :4])
    batch["segments"][:, 3] = 1
    assert np.abs(model.predict_on_batch(batch)[:, 0] - before[:, 0]).max() > 0


def test_padding_changes_no_translation_and_no_loss(models: Callable[[str], keras.Model]) -> None:
    """Logits of a padded batch are those of a model for shorter sentences."""
    model = models("gnmt")
    shorter = gnmt.build(dataclasses.replace(GNMT, source=3, target=2))
    shorter.set_weights(model.get_weights())
    batch = batch_for(model)
    batch["source"][:, 3:], batch["target"][:, 2:] = 0, 0
    logits = model.predict_on_batch(batch)
    expected = shorter.predict_on_batch({"source": batch["source"][:, :3], "target": batch["target"][:, :2]})
    np.testing.assert_allclose(logits[:, :2], expected, atol=1e-5)
    labels = DRAW.integers(1, GNMT.vocabulary, (2, GNMT.target))
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tensors = {key: keras.ops.convert_to_tensor(value) for key, value in batch.items()}
    loss = float(model.compute_loss(y=keras.ops.convert_to_tensor(labels), y_pred=model(tensors)))
    losses = np.log(np.exp(logits).sum(axis=-1)) - np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    assert loss == pytest.approx(losses[batch["target"] != 0].mean(), rel=1e-5)


def test_a_query_sees_neither_its_own_token_nor_later_ones(models: Callable[[str], keras.Model]) -> None:
    """Exactly those positions that the permutation puts before the query's reach its logits; equal places all."""
    two = models("two streams")
    content, query = two.get_layer("layer_1").output
    streams = keras.Model(two.input, [content, query, two.output])
    order = np.array([[3, 0, 4, 1, 4, 2]], "int32")
    batch = {**batch_for(two, 1), "permutation": order}
    before = streams.predict_on_batch(batch)
    for position in range(XLNET.sequence):
        after = streams.predict_on_batch(changed(batch, "tokens", position))
        content, query, logits = (np.abs(b - a)[0].max(axis=-1) > 1e-5 for a, b in zip(before, after, strict=True))
        np.testing.assert_array_equal(content, order[0] >= order[0, position])
        np.testing.assert_array_equal(query, order[0] > order[0, position])
        np.testing.assert_array_equal(logits, query)


# ---- what layers compute


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


def test_a_cell_is_an_lstm_whose_input_is_added(models: Callable[[str], keras.Model]) -> None:
    x = np.random.default_rng(0).normal(size=(2, 8, 16)).astype("float32")
    for name, residual in (("cell_0", False), ("cell_1", True)):
        layer = models("rnn").get_layer(name)
        plain = keras.layers.LSTM(16, return_sequences=True)
        plain.build(x.shape)
        plain.set_weights(layer.get_weights())
        expected = np.asarray(plain(x)) + (x if residual else 0)
        np.testing.assert_allclose(np.asarray(layer(x)), expected, atol=1e-6)


def test_tied_logits_use_the_embedding(models: Callable[[str], keras.Model]) -> None:
    model = models("gpt, tied")
    tokens = batch_for(model)["tokens"]
    hidden = keras.Model(model.input, model.get_layer("final_norm").output).predict_on_batch(tokens)
    matrix = model.get_layer("embedding").tokens.numpy()
    np.testing.assert_allclose(model.predict_on_batch(tokens), hidden @ matrix.T, rtol=1e-4, atol=1e-4)


def test_the_first_encoder_layer_reads_in_both_directions_and_residuals_begin_with_the_third(
    models: Callable[[str], keras.Model],
) -> None:
    model = models("gnmt")
    encoded = keras.Model(model.input, model.get_layer("encoder_0").output)
    batch = batch_for(model)
    moved = encoded.predict_on_batch(changed(batch, "source", 2)) != encoded.predict_on_batch(batch)
    directions = [half.any(axis=(0, 2)).tolist() for half in np.split(moved, 2, axis=-1)]
    assert directions == [[False, False, True, True, True], [True, True, True, False, False]]
    with dapple.deferred_init():
        deep = gnmt.gnmt_16(depth=4, width=4, vocabulary=5)
    residual = {layer.name for layer in deep.layers if getattr(layer, "residual", False)}
    assert residual == {f"{half}_{index}" for half in ("encoder", "decoder") for index in (2, 3)}


MASKS = [np.array([[True, True, False]]), np.array([[True, False]])]
HALF = "mixed_float16"
ONES = np.ones((2, 4), "int32")
VECTORS = DRAW.normal(size=(2, 4, 8)).astype("float32")


def test_mixed_precision_keeps_variables_in_float32_and_gives_finite_results_of_fewer_bits() -> None:
    pair = np.ones((1, 3, 5), "float32"), np.ones((1, 2, 4), "float32")
    places = np.tile(np.arange(4, dtype="int32"), (2, 1))
    inputs = np.ones((2, 3, 5), "float32"), np.ones((2, 3, 1), "float32")
    for layer, given, options in (
        (gnmt.AttendingLayer(4, dtype=HALF), [[*pair]], {"mask": MASKS}),
        (xlnet.XlnetLayer(2, 8, dropout=0.1, dtype=HALF), [VECTORS, ONES, ONES, VECTORS, places], {"training": True}),
        (RecurrentLayer(4, bidirectional=True, dropout=0.5, dtype=HALF), inputs, {"training": True}),
    ):
        results = keras.tree.flatten(layer(*given, **options))
        assert {variable.dtype for variable in layer.trainable_variables} == {"float32"}
        for result in results:
            assert result.dtype == "float16" and np.isfinite(np.asarray(result)).all()


@pytest.mark.parametrize("name", ["gpt, tied", "gnmt", "two streams"])
def test_saved_and_loaded(name: str, models: Callable[[str], keras.Model], tmp_path: pathlib.Path) -> None:
    model = models(name)
    batch = batch_for(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(predicted(model, batch), predicted(loaded, batch))


def test_shapes_at_cuts_are_known_without_running_the_model(
    models: Callable[[str], keras.Model], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind an LSTM's loop the batch was lost, so that a run with all parameters, of 3.5 GB, had to find it again."""
    monkeypatch.setattr(slice_shapes, "measure_shapes", lambda *_: pytest.fail("the model was run"))
    model = models("gnmt")
    spec = declared_spec(model)
    assert spec is not None
    program = capture(model, VariableTable(model), Mode.PREDICT, spec)
    cuts = ("source_embedding", "encoder_0", "encoder_1", "decoder_0", "decoder_1")
    assert len(AssignStages(cuts).run(program).stages) == 6


# ---- samples and pairs


def test_sample_continues_the_prompt_with_the_likeliest_byte_at_temperature_zero() -> None:
    model = randomised(gpt.gpt_tiny(), 0.3)
    sample = gpt.sample(model, b"def ", 34, seed=3)
    assert len(sample) == 34 and sample == gpt.sample(model, b"def ", 34, seed=3)  # More than the model's 32 positions.
    tokens = DRAW.integers(0, 256, (1, 8))
    (byte,) = gpt.sample(model, bytes(tokens[0].tolist()), 1, temperature=0.0)
    padded = np.concatenate([tokens, np.zeros((1, 24), int)], axis=1)
    assert byte == model.predict_on_batch(padded)[0, 7].argmax()


def test_pairs_are_sentences_and_their_reverses(models: Callable[[str], keras.Model]) -> None:
    x, labels, weights = next(reversed_pairs(models("gnmt"), 40, 0).as_numpy_iterator())
    lengths = (x["source"] != 0).sum(axis=1)
    assert set(lengths) == {2, 3}
    for row, length in enumerate(lengths):
        words = x["source"][row, :length].tolist()
        assert set(words) <= set(range(3, 9)) and not x["source"][row, length:].any()
        assert x["target"][row].tolist() == [BEGIN, *words[::-1], *[0] * (3 - length)]
        assert labels[row].tolist() == [*words[::-1], END, *[0] * (3 - length)]
        assert weights[row].tolist() == [1.0] * (length + 1) + [0.0] * (3 - length)
    with pytest.raises(ModelError, match="don't fit 'gnmt', which knows 3 tokens, reads 5 and writes 4"):
        reversed_pairs(gnmt.build(dataclasses.replace(GNMT, vocabulary=3)), 3, 0)


# ---- the source text of the standard library

DIGITS = np.arange(23, dtype=np.uint8)


def test_source_files_are_in_order_without_tests_and_packages_and_each_is_in_one_part(tmp_path: pathlib.Path) -> None:
    left_out = ("site-packages/a.py", "test/a.py", "package_0/tests/a.py", "_sysconfigdata_linux.py", "notes.txt")
    for name in [*(f"package_{index % 3}/module_{index}.py" for index in range(40)), *left_out]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(f"x = {name}\n")
    names = [path.relative_to(tmp_path).as_posix() for path in text.source_files(tmp_path)]
    assert len(names) == 40 and names == sorted(names) and not {*names} & {*left_out}
    corpus = text.standard_library(0.3, root=tmp_path)
    train, held_out = (set(bytes(part).split(b"\0")) - {b""} for part in (corpus.train, corpus.held_out))
    assert train and held_out and not train & held_out
    assert train | held_out == {f"x = {name}\n".encode() for name in names}


def test_the_split_of_source_files_is_the_same_everywhere() -> None:
    """Python's own hash of a string changes from run to run."""
    held_out = [index for index in range(100) if text.is_held_out(f"module_{index}.py", 0.05)]
    assert held_out == [5, 30, 60, 63, 68, 73]


def test_windows_of_source_are_in_order_or_shuffled_by_a_seed() -> None:
    batches = [(x.numpy().tolist(), y.numpy().tolist()) for x, y in text.windows(DIGITS, 4, 2)]
    assert [len(x) for x, _ in batches] == [2, 2, 1]
    starts = range(0, 20, 4)
    expected = [(DIGITS[at : at + 4].tolist(), DIGITS[at + 1 : at + 5].tolist()) for at in starts]
    assert [pair for x, y in batches for pair in zip(x, y, strict=True)] == expected
    assert len(list(text.windows(DIGITS[:9], 4, 2))) == 1

    def passes(seed: int) -> list[list[int]]:
        dataset = text.windows(DIGITS, 4, 5, seed=seed, repeat=True)
        return [x.numpy()[:, 0].tolist() for x, _ in itertools.islice(dataset, 6)]

    first = passes(seed=1)
    assert first == passes(seed=1) != passes(seed=2)
    assert all(sorted(starts) == [0, 4, 8, 12, 16] for starts in first) and len(set(map(tuple, first))) > 1


@pytest.mark.parametrize(
    ("count", "repeat", "message"),
    [(4, False, r"4 bytes make 0 windows of 4 \+ 1 bytes; need 1"), (12, True, "12 bytes make 2 windows .* need 3")],
)
def test_too_short_text_is_refused(count: int, repeat: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text.windows(DIGITS[:count], 4, 3, repeat=repeat)
    with pytest.raises(ValueError, match="need 0 < fraction < 1"):
        text.standard_library(1.0)


def test_unigram_bits_per_byte() -> None:
    assert text.unigram_bits_per_byte(np.repeat(np.arange(256, dtype=np.uint8), 7), DIGITS) == pytest.approx(8)
    # Each count plus one: byte 0 has 512 of 767, each other byte 1 of 767.
    skewed = text.unigram_bits_per_byte(np.zeros(511, np.uint8), np.array([0, 9], np.uint8))
    assert skewed == pytest.approx((-math.log2(512 / 767) + math.log2(767)) / 2)
    assert text.bits_per_byte(math.log(256)) == pytest.approx(8)
