"""Models of text: sizes as documented and as in the papers; what RNN and FFNN compute."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from models_for_tests import assert_mixed, assert_saved

import dapple_tf as dapple
from dapple_tf.describe.profile_text import PUBLISHED
from dapple_tf.models import bert, ffnn, gnmt, gpt, rnn, xlnet
from dapple_tf.models.rnn import RecurrentLayer

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
TABLE_1 = {"bert:48": 640e6, "xlnet:36": 500 * 2**20, "gnmt:16": 291e6}
"""Parameters in table 1 of the DAPPLE paper. Its M is 2^20 for XLNet, as for VGG-19 and ResNet-50."""


def documented() -> dict[str, tuple[int, str]]:
    """Name -> parameters and what the paper says, of the document's table."""
    section = DOCUMENT.read_text().partition("## Text and sequences")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w:]+)` \| ([\d,]+) \| (\w*) ?\|", section, re.MULTILINE)
    return {name: (int(parameters.replace(",", "")), paper) for name, parameters, paper in rows}


def test_the_document_says_how_large_models_are() -> None:
    table = documented()
    assert {name: parameters for name, (parameters, _) in table.items()} == {
        name: config.parameters for name, config in CONFIGS.items()
    }
    assert {name: paper for name, (_, paper) in table.items() if paper} == {
        "bert:48": "640M",
        "xlnet:36": "500M",
        "gnmt:16": "291M",
    }


@pytest.mark.parametrize("name", TABLE_1)
def test_sizes_are_those_of_the_dapple_paper(name: str) -> None:
    assert CONFIGS[name].parameters == pytest.approx(TABLE_1[name], rel=0.02)


def test_sizes_are_those_of_the_dapple_authors_profiles() -> None:
    """Bytes of float32 parameters of a layer: to the byte for BERT, rounded for XLNet, with second biases for GNMT."""
    layers = {
        name: CONFIGS[name].parameters - type(CONFIGS[name])(depth=CONFIGS[name].depth - 1).parameters
        for name in ("bert:48", "xlnet:36", "gnmt:16")
    }

    def profiled(profile: str, layer: str) -> int:
        match = re.search(rf"-- {re.escape(layer)} -- .*parameter_size=(\d+)", PUBLISHED[profile].read_text())
        assert match is not None
        return int(match[1])

    assert 4 * layers["bert:48"] == profiled("bert-48", "layer_3")
    assert round(4 * layers["xlnet:36"] / 2**20) == profiled("xlnet-36", "Layer_3") // 10**6
    # One layer of each half, with 4096 more biases each.
    halves = [profiled("gnmt-16", f"LSTM({inputs}, 1024)") for inputs in (1024, 2048)]
    assert 4 * (layers["gnmt:16"] + 2 * 4096) == sum(halves)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_full_model_is_as_large_as_said() -> None:
    """Built without values; a formula and a build agree for small ones in the tests of each model."""
    with dapple.deferred_init():
        model = gnmt.gnmt_16()
    assert model.count_params() == CONFIGS["gnmt:16"].parameters


@pytest.fixture(scope="module")
def rnn_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    return rnn.rnn_tiny()


@pytest.fixture(scope="module")
def ffnn_model() -> keras.Model:
    keras.utils.set_random_seed(1)
    return ffnn.ffnn_tiny()


def test_layers_and_parameters(rnn_model: keras.Model, ffnn_model: keras.Model) -> None:
    assert [layer.name for layer in rnn_model.layers[1:]] == ["embedding", "cell_0", "cell_1", "logits"]
    assert [layer.name for layer in ffnn_model.layers[1:]] == ["layer_0", "layer_1", "layer_2", "layer_3"]
    assert rnn_model.count_params() == rnn.TINY.parameters
    assert ffnn_model.count_params() == ffnn.TINY.parameters
    uneven = ffnn.FfnnConfig(depth=3, features=5, width=7, classes=2)
    assert ffnn.build(uneven).count_params() == uneven.parameters
    assert (rnn_model.output_shape, ffnn_model.output_shape) == ((None, 8, 256), (None, 4))


def test_a_cell_is_an_lstm_whose_input_is_added(rnn_model: keras.Model) -> None:
    x = np.random.default_rng(0).normal(size=(2, 8, 16)).astype("float32")
    for name, residual in (("cell_0", False), ("cell_1", True)):
        layer = rnn_model.get_layer(name)
        plain = keras.layers.LSTM(16, return_sequences=True)
        plain.build(x.shape)
        plain.set_weights(layer.get_weights())
        expected = np.asarray(plain(x)) + (x if residual else 0)
        np.testing.assert_allclose(np.asarray(layer(x)), expected, atol=1e-6)


def test_text_is_read_from_left_to_right(rnn_model: keras.Model) -> None:
    tokens = np.random.default_rng(0).integers(0, 256, (2, 8))
    changed = tokens.copy()
    changed[:, 5] += 1
    before, after = rnn_model.predict_on_batch(tokens), rnn_model.predict_on_batch(changed % 256)
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert np.all(np.abs(before[:, 5:] - after[:, 5:]).max(axis=-1) > 1e-7)


def test_ffnn_is_a_chain_of_relu(ffnn_model: keras.Model) -> None:
    x = expected = np.random.default_rng(0).normal(size=(3, 16)).astype("float32")
    for index in range(4):
        kernel, bias = (np.asarray(value) for value in ffnn_model.get_layer(f"layer_{index}").get_weights())
        expected = expected @ kernel + bias
        expected = expected if index == 3 else np.maximum(expected, 0)
    np.testing.assert_allclose(ffnn_model.predict_on_batch(x), expected, rtol=1e-4, atol=1e-5)


def test_signals_keep_their_size_through_sixteen_layers() -> None:
    model = ffnn.build(ffnn.FfnnConfig(features=128, width=128, classes=128))
    x = np.random.default_rng(0).normal(size=(64, 128)).astype("float32")
    assert 0.2 < np.std(model.predict_on_batch(x)) < 5


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_of_recurrent_layers(policy: str) -> None:
    layer = RecurrentLayer(4, bidirectional=True, dropout=0.5, dtype=policy)
    given = np.ones((2, 3, 5), "float32"), np.ones((2, 3, 1), "float32")
    (result,) = assert_mixed(layer, policy, *given, training=True)
    assert result.shape == (2, 3, 8)


def test_saved_and_loaded(tmp_path: pathlib.Path, rnn_model: keras.Model) -> None:
    assert_saved(rnn_model, np.random.default_rng(0).integers(0, 256, (2, 8)), tmp_path)


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (bert.bert_tiny, {"width": 33}, "width"),
        (bert.bert_tiny, {"sequence": 17}, "sequence"),
        (bert.bert_tiny, {"head": "words"}, "head"),
        (bert.bert_tiny, {"dropout": 1.0}, "dropout"),
        (bert.bert_tiny, {"depth": 0}, "depth"),
        (gpt.gpt_tiny, {"depth": 0}, "depth is 0; need at least 1"),
        (gpt.gpt_tiny, {"width": 30, "heads": 4}, "width 30 isn't a multiple of 4 heads"),
        (gpt.gpt_tiny, {"dropout": 1.0}, "dropout is 1.0; need 0 <= dropout < 1"),
        (gnmt.gnmt_tiny, {"depth": 1}, "depth is 1; need at least 2"),
        (gnmt.gnmt_tiny, {"vocabulary": 1}, "vocabulary is 1; need at least 2"),
        (gnmt.gnmt_tiny, {"residual_from": 0}, "residual_from is 0; need at least 1"),
        (gnmt.gnmt_tiny, {"dropout": -0.1}, "dropout is -0.1; need 0 <= dropout < 1"),
        (xlnet.xlnet_tiny, {"depth": 0}, "depth is 0; need at least 1"),
        (xlnet.xlnet_tiny, {"width": 30, "heads": 4}, "width 30 isn't a multiple of 4 heads"),
        (xlnet.xlnet_tiny, {"width": 33, "heads": 3}, "width 33 is odd"),
        (xlnet.xlnet_tiny, {"head": "classes"}, "head is 'classes'; use one of tokens, spans"),
        (xlnet.xlnet_tiny, {"head": "spans", "two_streams": True}, "head is 'spans', but the second stream is there"),
        (xlnet.xlnet_tiny, {"dropout": 1.0}, "dropout is 1.0; need 0 <= dropout < 1"),
        (rnn.rnn_tiny, {"depth": 0}, "depth is 0; need at least 1"),
        (rnn.rnn_tiny, {"dropout": 1.0}, "dropout is 1.0; need 0 <= dropout < 1"),
        (ffnn.ffnn_tiny, {"classes": 0}, "classes is 0; need at least 1"),
    ],
)
def test_impossible_sizes_are_refused(make: Callable[..., keras.Model], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**changes)


def test_a_residual_needs_an_input_as_wide_as_the_output() -> None:
    with pytest.raises(ValueError, match="an input of 3 numbers can't be added to an output of 8"):
        RecurrentLayer(4, bidirectional=True, residual=True)(np.ones((1, 2, 3), "float32"))
