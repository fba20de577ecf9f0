"""Questions on texts: answers are where they should be, in every part of a long text that has them."""

from __future__ import annotations

import pathlib

import keras
import numpy as np
import pytest
from reading import (
    QUESTION_SPECIAL,
    QUESTION_TOKENS,
    QUESTION_WORDS,
    question_model,
    question_tokenizer,
    taken,
    write_questions,
)

from dapple_tf.models.readers.squad import Question, examples, read_questions
from dapple_tf.models.registry import find_data

SPANS = question_model("spans")
pytestmark = pytest.mark.usefixtures("_cache_of_readers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_questions(tmp_path_factory.mktemp("questions"))


def test_parts_of_a_long_text() -> None:
    """Nine words, four at a time, of which one is shared; the answer is whole in the third part alone."""
    context = " ".join(f"w{number}" for number in range(9))
    start = context.index("w6")
    asked = Question("who what w0", context, start, start + len("w6 w7"))
    parts = list(examples([asked], question_tokenizer(), 9, 2, 1, (2, 3)))
    head = [2, 25, 26, 3]  # The third word of the question is left out.
    assert [example.tokens for example in parts] == [
        [*head, 5, 6, 7, 8, 3],
        [*head, 8, 9, 10, 11, 3],
        [*head, 11, 12, 13, 3],
    ]
    assert [(example.start, example.end) for example in parts] == [(0, 0), (0, 0), (4, 5)]
    assert {example.text for example in parts} == {4}


@pytest.mark.parametrize(
    ("text", "start", "answer"), [("w1 w2 w3", 3, "w2"), ("w1 w2 w3", 0, "w1 w2"), ("w12", 1, "1")]
)
def test_answers_within_words_are_the_words(text: str, start: int, answer: str) -> None:
    (example,) = examples([Question("who", text, start, start + len(answer))], question_tokenizer(), 12, 3, 1, (2, 3))
    expected = [index for index, word in enumerate(text.split()) if word in answer.split() or answer in word]
    assert (example.start - example.text, example.end - example.text) == (expected[0], expected[-1])


def test_samples_against_the_answers(folder: pathlib.Path) -> None:
    data = find_data(f"squad:{folder}/train.json?tokenizer={folder}/words.json&valid={folder}/train.json&stride=2")
    assert data.held_out is not None
    batches = taken(data.held_out(SPANS, 4), 999)
    x, y = next(iter(data.held_out(SPANS, 4)))
    assert set(x) == {"tokens", "segments", "present"} and {value.dtype.name for value in x.values()} == {"int32"}
    assert y.shape == (4, 2)
    present, segments, tokens, answers = (np.concatenate([batch[i] for batch in batches]) for i in range(4))
    asked = read_questions(folder / "train.json", "")
    expected = {asked.context[asked.start : asked.end] for asked in asked if asked.start >= 0}
    known = QUESTION_SPECIAL + QUESTION_WORDS
    got = set()
    for row in range(len(tokens)):
        count = present[row].sum()
        assert present[row].tolist() == [1] * count + [0] * (QUESTION_TOKENS - count)
        line = [known[token] for token in tokens[row]]
        assert (
            line[0] == "[CLS]" and line[count:] == ["[PAD]"] * (QUESTION_TOKENS - count) and line[count - 1] == "[SEP]"
        )
        text = line.index("[SEP]") + 1
        assert segments[row].tolist() == [0] * text + [1] * (count - text) + [0] * (QUESTION_TOKENS - count)
        start, end = answers[row]
        assert (start, end) == (0, 0) or text <= start <= end < count - 1
        got |= {" ".join(line[start : end + 1])} if end else set()
    assert got == expected


def test_labels_follow_the_model(folder: pathlib.Path) -> None:
    data = find_data(f"squad:{folder}/train.json?tokenizer={folder}/words.json&valid={folder}/train.json")
    assert data.held_out is not None
    spans = taken(data.held_out(SPANS, 999), 1)[0]
    x, labels, weights = keras.utils.unpack_x_y_sample_weight(
        next(data.held_out(question_model("classes"), 999).as_numpy_iterator())
    )
    np.testing.assert_array_equal(labels, spans[-1][:, 1] > 0)
    assert weights is None and 0 < labels.mean() < 1
    masked = next(data.held_out(question_model("tokens"), 999).as_numpy_iterator())
    changed, labels, weights = masked
    np.testing.assert_array_equal(labels, x["tokens"])
    assert weights.sum(1).min() >= 1 and 0.1 < weights[labels > 4].mean() < 0.3
    assert not weights[labels <= 4].any()
    np.testing.assert_array_equal(changed["tokens"][weights == 0], labels[weights == 0])
    assert 0.6 < (changed["tokens"][weights == 1] == 4).mean() < 0.95


def test_tokens_are_predicted_in_an_order_where_the_model_takes_one(folder: pathlib.Path) -> None:
    data = find_data(f"squad:{folder}/train.json?tokenizer={folder}/words.json&valid={folder}/train.json")
    assert data.held_out is not None
    x, labels, weights = next(data.held_out(question_model("tokens", ordered=True), 999).as_numpy_iterator())
    plain, _, _ = next(data.held_out(question_model("tokens"), 999).as_numpy_iterator())
    np.testing.assert_array_equal(x["tokens"], labels)
    np.testing.assert_array_equal(x["present"], plain["present"])
    np.testing.assert_array_equal(weights, x["permutation"] > 0)
    assert weights.sum(1).min() >= 1 and 0.1 < weights[labels > 4].mean() < 0.3
    assert not weights[labels <= 4].any()  # Padding, and what stands between question and text.
    for places in x["permutation"]:
        assert sorted(places[places > 0]) == list(range(1, (places > 0).sum() + 1))
