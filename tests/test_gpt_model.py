from __future__ import annotations

import math
import pathlib

import keras
import numpy as np
import pytest
from models_for_tests import assert_saved, randomised

from dapple_tf.models import gpt

TOKENS = np.random.default_rng(0).integers(0, 256, (3, 32))


@pytest.mark.parametrize("tied", [False, True])
def test_layers_that_a_plan_may_cut_after(tied: bool) -> None:
    names = [layer.name for layer in gpt.gpt_tiny(tied=tied).layers]
    assert [name for name in names if name != "tokens"] == [
        "embedding",
        "block_0",
        "block_1",
        "final_norm",
        "logits",
    ]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("vocabulary", "sequence", "depth", "width", "heads"), [(256, 32, 2, 32, 2), (7, 5, 3, 8, 4)])
def test_parameter_count_by_config(
    vocabulary: int, sequence: int, depth: int, width: int, heads: int, tied: bool
) -> None:
    config = gpt.GptConfig(vocabulary=vocabulary, sequence=sequence, depth=depth, width=width, heads=heads, tied=tied)
    assert gpt.build(config).count_params() == config.parameters


def test_medium_has_the_parameters_of_gpt2_medium() -> None:
    """The number of the published GPT-2 medium checkpoint; the formula is checked on small models above."""
    assert gpt.MEDIUM.parameters == 354_823_168


def test_changes_reach_the_model() -> None:
    model = gpt.gpt_medium(vocabulary=11, sequence=6, depth=1, width=16, heads=2)
    assert model.input_shape == (None, 6)
    assert model.output_shape == (None, 6, 11)
    assert gpt.gpt(sequence=6, depth=1, width=16, heads=2).output_shape == (None, 6, 256)


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_attention_is_causal(tied: bool) -> None:
    model = gpt.gpt_tiny(tied=tied)
    randomised(model, 0.3)
    changed = TOKENS.copy()
    changed[:, 20] = (changed[:, 20] + 1) % 256
    before, after = model.predict_on_batch(TOKENS), model.predict_on_batch(changed)
    np.testing.assert_array_equal(before[:, :20], after[:, :20])
    # Every position from the changed one on sees the change.
    assert np.all(np.abs(before[:, 20:] - after[:, 20:]).max(axis=-1) > 1e-4)


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_mixed_precision(tied: bool) -> None:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = gpt.gpt_tiny(tied=tied)
    finally:
        keras.config.set_dtype_policy("float32")
    randomised(model, 0.3)
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}
    assert all(layer.output.dtype == "bfloat16" for layer in model.layers[1:])
    assert np.isfinite(np.asarray(model(TOKENS)).astype(np.float32)).all()


def test_positions_matter() -> None:
    model = gpt.gpt_tiny()
    logits = model.predict_on_batch(np.full((1, 32), 65))
    assert np.abs(logits[0, 0] - logits[0, 1]).max() > 1e-4


@pytest.mark.slow
def test_tied_logits_use_the_embedding() -> None:
    model = gpt.gpt_tiny(tied=True)
    randomised(model, 0.3)
    hidden = keras.Model(model.input, model.get_layer("final_norm").output).predict_on_batch(TOKENS)
    matrix = model.get_layer("embedding").tokens.numpy()
    np.testing.assert_allclose(model.predict_on_batch(TOKENS), hidden @ matrix.T, rtol=1e-4, atol=1e-4)
    assert not model.get_layer("logits").weights


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_saved_and_loaded_model_predicts_the_same(tied: bool, tmp_path: pathlib.Path) -> None:
    model = gpt.gpt_tiny(tied=tied, dropout=0.1)
    randomised(model, 0.3)
    assert_saved(model, TOKENS, tmp_path)


@pytest.mark.slow
def test_dropout_is_random_in_training_only() -> None:
    model = gpt.gpt_tiny(dropout=0.5)
    first, second = (np.asarray(model(TOKENS, training=True)) for _ in range(2))
    assert np.abs(first - second).max() > 1e-3
    np.testing.assert_array_equal(np.asarray(model(TOKENS, training=False)), np.asarray(model(TOKENS, training=False)))


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_learns(tied: bool) -> None:
    """A tiny model learns one batch by heart, and no parameter is left out."""
    model = gpt.gpt_tiny(tied=tied)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(2e-2), loss, run_eagerly=True)  # A few steps take less time than a trace.
    before = [variable.numpy() for variable in model.trainable_variables]
    targets = np.roll(TOKENS, -1, axis=1)
    losses = [float(model.train_on_batch(TOKENS, targets)) for _ in range(9)]
    assert losses[0] == pytest.approx(math.log(256), abs=0.2)
    for variable, old in zip(model.trainable_variables, before, strict=True):
        # A bias of the keys shifts all scores of a query alike, which the softmax takes back: its gradient is zero.
        if not variable.path.endswith("key/bias"):
            assert np.abs(variable.numpy() - old).max() > 1e-4, variable.path
    model.reset_metrics()
    assert float(model.test_on_batch(TOKENS, targets)) < losses[0] / 2


@pytest.mark.thorough
@pytest.mark.slow
def test_sample_continues_the_prompt() -> None:
    model = gpt.gpt_tiny()
    randomised(model, 0.3)
    text = gpt.sample(model, b"def ", 40, seed=3)
    assert len(text) == 40  # More than the model's 32 positions.
    assert text == gpt.sample(model, b"def ", 40, seed=3)
    assert text != gpt.sample(model, b"def ", 40, seed=4)


@pytest.mark.slow
def test_sample_at_temperature_zero_takes_the_likeliest_byte() -> None:
    model = gpt.gpt_tiny()
    randomised(model, 0.3)
    tokens = TOKENS[:1, :8]
    (byte,) = gpt.sample(model, bytes(tokens[0].tolist()), 1, temperature=0.0)
    padded = np.concatenate([tokens, np.zeros((1, 24), int)], axis=1)
    assert byte == model.predict_on_batch(padded)[0, 7].argmax()


def test_sample_follows_the_distribution() -> None:
    logits = np.log(np.array([0.7, 0.2, 0.1], np.float32))
    generator = np.random.default_rng(0)
    draws = np.bincount([gpt._draw(logits, 0.5, generator) for _ in range(4000)]) / 4000
    expected = np.array([0.49, 0.04, 0.01]) / 0.54
    np.testing.assert_allclose(draws, expected, atol=0.03)


@pytest.mark.parametrize(("prompt", "temperature"), [(b"", 1.0), (b"a", -1.0)])
def test_sample_refuses(prompt: bytes, temperature: float) -> None:
    with pytest.raises(ValueError, match="need a prompt and temperature >= 0"):
        gpt.sample(gpt.gpt_tiny(), prompt, 1, temperature=temperature)
