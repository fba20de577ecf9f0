"""Questions on texts: answers are where they should be, in every part of a long text that has them."""

from __future__ import annotations

import functools
import json
import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tokenizers
from reading import assert_resumes, assert_seeded, taken

from dapple_tf.models import bert
from dapple_tf.models.readers.squad import Question, examples, read_questions
from dapple_tf.models.registry import find_data
from dapple_tf.models.sources import ModelError

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = [f"w{number}" for number in range(20)] + ["who", "what"]
SEQUENCE = 12


def question_model(outputs: str, words: int = 27, *, ordered: bool = False) -> keras.Model:
    """A model of questions that doesn't answer."""
    names = ("tokens", "segments", "present", *(("permutation",) if ordered else ()))
    inputs = {name: keras.Input((SEQUENCE,), dtype="int32", name=name) for name in names}
    hidden = keras.layers.Embedding(words, 4)(inputs["tokens"])
    if outputs == "spans":
        logits: Any = keras.layers.Permute((2, 1))(keras.layers.Dense(2)(hidden))
    elif outputs == "classes":
        logits = keras.layers.Dense(2)(hidden[:, 0])
    else:
        logits = keras.layers.Dense(words if outputs == "tokens" else 3)(hidden)
    return keras.Model(inputs, logits, name="answers")


SPANS = question_model("spans")
pytestmark = pytest.mark.usefixtures("_cache_of_readers")


def squad(*questions: tuple[str, str, str | None]) -> str:
    """SQuAD's JSON of questions, texts and answers."""
    paragraphs = []
    for question, context, answer in questions:
        answers = [] if answer is None else [{"text": answer, "answer_start": context.index(answer)}]
        asked = {"question": question, "id": "0", "answers": answers, "is_impossible": answer is None}
        paragraphs.append({"context": context, "qas": [asked]})
    return json.dumps({"version": "v2.0", "data": [{"title": "a", "paragraphs": paragraphs}]})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("questions")
    tokenizer = words()
    tokenizer.save(str(root / "words.json"))
    draw = np.random.default_rng(0)
    made: list[tuple[str, str, str | None]] = []
    for number in range(30):
        context = [f"w{word}" for word in draw.permutation(20)[: draw.integers(4, 16)]]
        start = draw.integers(len(context) - 2)
        answer = " ".join(context[start : start + draw.integers(1, 3)])
        made.append((f"who w{number % 20}", " ".join(context), None if number % 3 == 0 else answer))
    (root / "train.json").write_text(squad(*made))
    return root


def words() -> tokenizers.Tokenizer:
    numbers = {token: number for number, token in enumerate(SPECIAL + WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


def test_parts_of_a_long_text() -> None:
    """Nine words, four at a time, of which one is shared; the answer is whole in the third part alone."""
    context = " ".join(f"w{number}" for number in range(9))
    start = context.index("w6")
    asked = Question("who what w0", context, start, start + len("w6 w7"))
    parts = list(examples([asked], words(), 9, 2, 1, (2, 3)))
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
    (example,) = examples([Question("who", text, start, start + len(answer))], words(), 12, 3, 1, (2, 3))
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
    known = SPECIAL + WORDS
    got = set()
    for row in range(len(tokens)):
        count = present[row].sum()
        assert present[row].tolist() == [1] * count + [0] * (SEQUENCE - count)
        line = [known[token] for token in tokens[row]]
        assert line[0] == "[CLS]" and line[count:] == ["[PAD]"] * (SEQUENCE - count) and line[count - 1] == "[SEP]"
        text = line.index("[SEP]") + 1
        assert segments[row].tolist() == [0] * text + [1] * (count - text) + [0] * (SEQUENCE - count)
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


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(("outputs", "ordered"), [("spans", False), ("tokens", False), ("tokens", True)])
def test_order_is_seeded_and_resumes(outputs: str, ordered: bool, folder: pathlib.Path) -> None:
    model = question_model(outputs, ordered=ordered)
    data = find_data(f"squad:{folder}/train.json?tokenizer={folder}/words.json")
    assert_seeded(functools.partial(data.batches, model, 8), 5)
    assert_resumes(lambda: data.batches(model, 8, 0), steps=12, done=5)


@pytest.mark.thorough
@pytest.mark.slow
def test_bert_on_the_sample() -> None:
    model = bert.bert_tiny()
    x, labels, weights = find_data("squad").example(model, 4)
    assert x["tokens"].shape == labels.shape == weights.shape == (4, 16)
    assert labels.max() < bert.TINY.vocabulary
    answers = bert.bert_tiny(head="classes", sequence=64, positions=64, vocabulary=400)
    _, labels, _ = find_data("squad").example(answers, 64)
    assert set(labels.tolist()) == {0, 1}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", r"isn't JSON"),
        ('{"data": 3}', "isn't in SQuAD's format, .*TypeError"),
        ('{"data": [{"paragraphs": [{"context": "a"}]}]}', "isn't in SQuAD's format, .*KeyError 'qas'"),
        ('{"data": []}', "has 0 questions; need at least 2"),
        (
            squad(("who", "w1", "w1"), ("who", "w1", "w1")).replace('"answer_start": 0', '"answer_start": 7'),
            "7 to 9 of a",
        ),
    ],
)
def test_wrong_files_are_told(content: str, message: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ModelError, match=message):
        find_data(f"squad:{tmp_path}/a.json")


def test_models_that_do_not_fit_are_told(folder: pathlib.Path) -> None:
    name = f"squad:{folder}/train.json?tokenizer={folder}/words.json"
    for given, model, message in (
        (
            name,
            question_model("other"),
            r"for each sample 'answers' gives \[12, 3\]; questions are for logits",
        ),
        (
            name,
            question_model("spans", ordered=True),
            r"gives \[2, 12\]; questions are for .*\[12, 27\] \(tokens\), but .* 'permutation' only the last$",
        ),
        (name, question_model("spans", 9), "the data have 27 tokens, but 'answers' knows 9"),
        (f"{name}&question=8", SPANS, "of 12 tokens a question takes 8 and 3 are special, which leaves 1 of the text"),
        (name, keras.Sequential([keras.Input((3,)), keras.layers.Embedding(2, 2)]), "tokens and segments and present"),
    ):
        with pytest.raises(ModelError, match=message):
            find_data(given).example(model, 2)
