"""Questions on texts in SQuAD's JSON format, for ``bert`` and ``xlnet``.

A sample is ``[CLS] question [SEP] text [SEP]`` and padding: ``{"tokens", "segments", "present"}``, where segments are 1
from the text on and present is 0 at padding. Long texts make several samples, which overlap. The model's outputs
decide the labels:

* logits [batch, 2, sequence]: where the answer starts and ends, [batch, 2]; both 0 (``[CLS]``) if there is none;
* logits [batch, classes]: 1 if the text has the answer, else 0;
* logits [batch, sequence, vocabulary]: the tokens themselves, of which 15% are masked, with weights 0 at all others.
  For a model with the input ``"permutation"``, none are masked: a sixth are predicted in a random order.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from dapple_tf.models.readers import fit, predicted_tokens, samples, vocabulary
from dapple_tf.models.readers.options import Request, TokenizedOptions
from dapple_tf.models.readers.order import Samples, by_number, evaluation_batches, parts, seeds_of, training_batches
from dapple_tf.models.readers.ragged import Ragged, padded
from dapple_tf.models.sources import DataSource, ModelError

Task = Literal["spans", "classes", "masked", "ordered"]
"""Task of a model: find the answer, decide whether there is one, or predict tokens, masked or last in an order."""

_INPUTS = ("tokens", "segments", "present")
_PERMUTATION = "permutation"
"""Additional input of models with two streams."""


@dataclasses.dataclass(frozen=True)
class SquadOptions(TokenizedOptions):
    """Options of questions: the tokenizer has [CLS], [SEP], [PAD] and, for models of masked tokens, [MASK].

    Attributes:
        stride: tokens by which the parts of a long text overlap; by default a quarter of the model's sequence.
        question: maximum tokens of a question; by default half of the model's sequence less 3.
    """

    stride: int = 0
    question: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.stride, self.question) < 0:
            raise ValueError(f"stride is {self.stride} and question is {self.question}; need at least 0")


class Question(NamedTuple):
    """A question on a text.

    Attributes:
        question: the question.
        context: the text.
        start: position of the answer's first character in the text; -1 if there is none.
        end: position after its last character.
    """

    question: str
    context: str
    start: int
    end: int


class Example(NamedTuple):
    """A sample.

    Attributes:
        tokens: all tokens.
        text: position of the text's first token.
        start: position of the answer's first token; 0 if there is none.
        end: position of its last token.
    """

    tokens: list[int]
    text: int
    start: int
    end: int


def open_squad(request: Request) -> DataSource:
    """Returns the data in a file of questions.

    Raises:
        ModelError: there is none, or it isn't in that format.
    """
    options = request.options(SquadOptions)
    if len(request.paths) > 1:
        raise ModelError(f"{request.text}: give one file, not {len(request.paths)}")
    path, valid = (request.paths[0], options.valid) if request.paths else samples.questions()
    train = read_questions(request.existing(path), request.text)
    if valid:
        held_out = read_questions(request.existing(pathlib.Path(valid)), request.text)
    else:
        kept, left = parts(len(train), options.held_out)
        train, held_out = [train[number] for number in kept], [train[number] for number in left]

    def part(model: keras.Model, questions: list[Question], seed: int) -> Samples:
        ordered = _PERMUTATION in {tensor.name for tensor in fit.declared(model, "inputs")}
        inputs = (*_INPUTS, _PERMUTATION) if ordered else _INPUTS
        sequence = fit.named_inputs(request.text, model, inputs)["tokens"][1]
        task = _task(request.text, model, sequence, ordered)
        tokenizer = _tokenizer(request, options, path, train, model)
        fit.check_vocabulary(request.text, vocabulary.size_of(tokenizer), model, logits=False)
        return _samples(request.text, options, tokenizer, questions, task, sequence, seed)

    def batches(model: keras.Model, batch_size: int, seed: int) -> tf.data.Dataset:
        return training_batches(part(model, train, seed), batch_size, seed)

    def evaluation(model: keras.Model, batch_size: int) -> tf.data.Dataset:
        return evaluation_batches(part(model, held_out, 0), batch_size)

    return DataSource(request.text, f"{len(train)} questions of {path}", batches, evaluation if held_out else None)


def read_questions(path: pathlib.Path, text: str) -> list[Question]:
    """Returns the questions of a file.

    Raises:
        ModelError: it isn't in SQuAD's format, an answer isn't in its text, or there are fewer than 2 questions.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{text}: {path} isn't JSON: {error}") from error
    try:
        questions = list(_questions(given["data"]))
    except (TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{text}: {path} isn't in SQuAD's format, data -> paragraphs -> context, qas -> question, answers -> text, "
            f"answer_start: {type(error).__name__} {error}"
        ) from error
    if len(questions) < 2:
        raise ModelError(f"{text}: {path} has {len(questions)} questions; need at least 2")
    for number, asked in enumerate(questions):
        if asked.start >= 0 and not 0 <= asked.start < asked.end <= len(asked.context):
            raise ModelError(
                f"{text}: the answer to question {number} of {path}, {asked.question!r:.60}, is at characters "
                f"{asked.start} to {asked.end} of a text of {len(asked.context)}"
            )
    return questions


def _questions(articles: Any) -> Iterator[Question]:
    for article in articles:
        for paragraph in article["paragraphs"]:
            context = paragraph["context"]
            for asked in paragraph["qas"]:
                answers = asked.get("answers") or []
                if asked.get("is_impossible") or not answers:
                    yield Question(str(asked["question"]), str(context), -1, -1)
                else:
                    start = int(answers[0]["answer_start"])
                    yield Question(str(asked["question"]), str(context), start, start + len(answers[0]["text"]))


def _tokenizer(
    request: Request, options: SquadOptions, path: pathlib.Path, questions: list[Question], model: keras.Model
) -> Any:
    if options.tokenizer:
        return vocabulary.load(pathlib.Path(options.tokenizer), request.text)
    size = options.vocabulary or min(fit.vocabulary_of(model, logits=False), vocabulary.MOST_LEARNT)

    def lines() -> Iterator[str]:
        last = ""
        for asked in questions:
            yield asked.question
            if asked.context != last:  # Several questions are about the same text.
                yield asked.context
            last = asked.context

    try:
        return vocabulary.trained("wordpiece", size, [path], lines)
    except ModelError as error:
        raise ModelError(f"{request.text}: {error}") from error


def examples(
    questions: list[Question], tokenizer: Any, sequence: int, most_asked: int, stride: int, special: tuple[int, int]
) -> Iterator[Example]:
    """Returns samples of at most ``sequence`` tokens.

    Args:
        questions: the questions.
        tokenizer: a tokenizer of the library ``tokenizers``.
        sequence: maximum tokens of a sample.
        most_asked: maximum tokens of a question; the rest is cut off.
        stride: number of tokens that one part of a text shares with the next.
        special: the tokens [CLS] and [SEP].
    """
    first, separator = special
    for asked in questions:
        head = [first, *tokenizer.encode(asked.question, add_special_tokens=False).ids[:most_asked], separator]
        room = sequence - len(head) - 1
        text = tokenizer.encode(asked.context, add_special_tokens=False)
        ends = [end for _, end in text.offsets]
        starts = [start for start, _ in text.offsets]
        # The tokens with the answer's first and last character.
        one = int(np.searchsorted(ends, asked.start, side="right"))
        last = int(np.searchsorted(starts, asked.end - 1, side="right")) - 1
        for begin in range(0, max(1, len(text.ids) - stride), room - stride):
            part = text.ids[begin : begin + room]
            inside = asked.start >= 0 and begin <= one <= last < begin + len(part)
            place = len(head) - begin
            yield Example([*head, *part, separator], len(head), *((one + place, last + place) if inside else (0, 0)))


def _task(text: str, model: keras.Model, sequence: int, ordered: bool) -> Task:
    """Returns the task of a model.

    Raises:
        ModelError: these data have no labels for it.
    """
    known = [tuple(output.shape[1:]) for output in fit.declared(model, "outputs")]
    if known == [(sequence, fit.vocabulary_of(model, logits=False))]:
        return "ordered" if ordered else "masked"
    if known == [(2, sequence)] and not ordered:
        return "spans"
    if len(known) == 1 and len(known[0]) == 1 and known[0][0] >= 2 and not ordered:
        return "classes"
    tokens = f"[{sequence}, {fit.vocabulary_of(model, logits=False)}] (tokens)"
    others = f"[2, {sequence}] (start and end), [2 or more classes] (has an answer) or {tokens}"
    raise ModelError(
        f"{text}: for each sample {model.name!r} gives {' and '.join(str(list(shape)) for shape in known)}; questions "
        f"are for logits {others}" + (f", but for a model that takes {_PERMUTATION!r} only the last" if ordered else "")
    )


def _samples(
    text: str,
    options: SquadOptions,
    tokenizer: Any,
    questions: list[Question],
    task: Task,
    sequence: int,
    seed: int,
) -> Samples:
    most_asked = options.question or sequence // 2 - 3
    stride = options.stride or sequence // 4
    room = sequence - most_asked - 3
    if most_asked < 1 or room <= stride:
        raise ModelError(
            f"{text}: of {sequence} tokens a question takes {most_asked} and 3 are special, which leaves {room} of the "
            f"text, with {stride} shared by two parts; use a smaller question or stride, or a longer sequence"
        )
    first, separator, padding = (vocabulary.token(tokenizer, name, text) for name in ("[CLS]", "[SEP]", "[PAD]"))
    all_examples = list(examples(questions, tokenizer, sequence, most_asked, stride, (first, separator)))
    tokens = Ragged.of(example.tokens for example in all_examples).lookup()
    texts = tf.constant([example.text for example in all_examples], tf.int32)
    answers = tf.constant([(example.start, example.end) for example in all_examples], tf.int32)
    mask = vocabulary.token(tokenizer, "[MASK]", text) if task == "masked" else 0
    size = vocabulary.size_of(tokenizer)

    def read(draw: tf.Tensor, index: tf.Tensor) -> tuple[Any, ...]:
        given = tokens[index]
        count = tf.shape(given)[0]
        places = tf.range(sequence)
        x = {
            "tokens": padded(given, sequence, padding),
            "segments": tf.cast((places >= texts[index]) & (places < count), tf.int32),
            "present": tf.cast(places < count, tf.int32),
        }
        if task == "spans":
            return x, answers[index]
        if task == "classes":
            return x, tf.cast(answers[index][1] > 0, tf.int32)
        special = (x["tokens"] == first) | (x["tokens"] == separator) | (places >= count)
        labels = x["tokens"]
        if task == "ordered":
            x[_PERMUTATION] = predicted_tokens.permutation(special, seeds_of(draw, seed))
            chosen = x[_PERMUTATION] > 0
        else:
            x["tokens"], chosen = predicted_tokens.masked(labels, special, mask, size, seeds_of(draw, seed))
        return x, labels, tf.cast(chosen, tf.float32)

    return by_number(len(all_examples), read)
