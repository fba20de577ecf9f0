from __future__ import annotations

import keras
import numpy as np
import pytest

from dapple_tf.models import bert

DRAW = np.random.default_rng(0)


def _batch(samples: int) -> dict[str, np.ndarray]:
    shape = (samples, bert.TINY.sequence)
    return {
        "tokens": DRAW.integers(0, bert.TINY.vocabulary, shape).astype("int32"),
        "segments": DRAW.integers(0, 2, shape).astype("int32"),
        "present": np.ones(shape, "int32"),
    }


def test_defaults_are_bert_48_of_the_dapple_paper() -> None:
    """Table 1: 640 million parameters."""
    assert round(bert.BertConfig().parameters, -7) == 640_000_000
    assert round(bert.BertConfig(head="classes").parameters, -7) == 640_000_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "head", "shape"),
    [
        ({}, ["transform", "transform_norm", "logits"], (None, 16, 67)),
        ({"tied": False}, ["transform", "transform_norm", "logits"], (None, 16, 67)),
        ({"head": "classes", "classes": 3}, ["pooler", "logits"], (None, 3)),
        ({"head": "spans"}, ["logits"], (None, 2, 16)),
    ],
)
def test_layers_shapes_and_parameters(options: dict[str, object], head: list[str], shape: tuple[int | None]) -> None:
    model = bert.bert_tiny(**options)
    names = [layer.name for layer in model.layers]
    assert [name for name in names if name in ("embedding", "layer_0", "layer_1", *head)] == [
        "embedding",
        "layer_0",
        "layer_1",
        *head,
    ]
    assert model.output_shape == shape
    assert model.count_params() == bert.BertConfig(**{**vars(bert.TINY), **options}).parameters


@pytest.mark.slow
def test_padding_is_not_seen() -> None:
    model = bert.bert_tiny()
    batch = _batch(2)
    batch["present"][:, 10:] = 0
    before = model.predict_on_batch(batch)
    batch["tokens"][:, 10:] = 0
    np.testing.assert_array_equal(model.predict_on_batch(batch)[:, :10], before[:, :10])
    batch["tokens"][:, 9] += 1
    assert np.abs(model.predict_on_batch(batch)[:, 0] - before[:, 0]).max() > 0


@pytest.mark.slow
def test_answers_are_not_in_padding() -> None:
    model = bert.bert_tiny(head="spans")
    batch = _batch(3)
    batch["present"][:, 10:] = 0
    logits = model.predict_on_batch(batch)
    assert np.all(logits[..., 10:] == -1e4) and np.all(np.abs(logits[..., :10]) < 100)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    starts_and_ends = np.array([[2, 4], [9, 9], [0, 0]])
    chances = np.take_along_axis(np.exp(logits[..., :10]), starts_and_ends[..., None], -1)[..., 0]
    expected = -np.log(chances / np.exp(logits[..., :10]).sum(axis=-1)).mean()
    assert float(loss(starts_and_ends, logits)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_layers_have_the_same_names_whenever_a_model_is_built() -> None:
    """Between two layers stands an operation without a name of its own; a plan that named it fitted one model only."""
    first, second = (bert.bert_tiny() for _ in range(2))
    assert [layer.name for layer in first.layers] == [layer.name for layer in second.layers]
