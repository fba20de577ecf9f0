"""Pairs of sentences for ``bert`` and ``xlnet``: questions in SQuAD's JSON format, and MNLI, in GLUE's TSV format.

A sample is ``[CLS] first [SEP] second [SEP]`` and padding: ``{"tokens", "segments", "present"}``, where segments are 1
from the second on and present is 0 at padding. Long texts of questions make several samples, which overlap. The model's
outputs decide the labels:

* logits [batch, 2, sequence]: where the answer starts and ends, [batch, 2]; both 0 (``[CLS]``) if there is none;
* logits [batch, classes]: the class, of questions 1 if the text has the answer, else 0;
* logits [batch, sequence, vocabulary]: the tokens themselves, of which 15% are masked, with weights 0 at all others.
  For a model with the input ``"permutation"``, none are masked: a sixth are predicted in a random order.
"""

from __future__ import annotations

import csv
import functools
import json
import pathlib
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import keras
import tensorflow as tf

from dapple_tf.models.readers import fit, order, samples, vocabulary
from dapple_tf.models.readers.options import Request
from dapple_tf.models.sources import DataSource, ModelError

Task = Literal["spans", "classes", "masked", "ordered"]
"""Task of a model: find the answer, classify the pair, or predict tokens, masked or last in an order."""

_INPUTS = ("tokens", "segments", "present")
_PERMUTATION = "permutation"
"""Additional input of models with two streams."""

_MASKED = 0.15  # As BERT: of these 80% are masked, 10% replaced, 10% left.
_ORDERED = 1 / 6  # As XLNet: the last 1/K in the order of a permutation, K = 6 (section 2.3, "Partial Prediction").
_CLASSES = ("contradiction", "entailment", "neutral")
"""Labels of MNLI, as GLUE numbers them."""
_COLUMNS = ("sentence1", "sentence2", "gold_label")


class Pair(NamedTuple):
    """Two sentences, or a question and a text.

    Attributes:
        first: the first sentence, or the question.
        second: the second sentence, or the text.
        label: the class; of a question 1 if it has an answer.
        start: position of the answer's first character in the text.
        end: position after its last character; 0 if there is no answer.
    """

    first: str
    second: str
    label: int
    start: int = 0
    end: int = 0


Example = tuple[list[int], tuple[int, int, int, int]]
"""Tokens without padding; positions of the second sentence's first token and of the answer's first and last; class."""


def open_squad(request: Request) -> DataSource:
    """Returns the data in a file of questions.

    Raises:
        ModelError: there is none, or it isn't in that format.
    """
    options = request.options(**vocabulary.OPTIONS)
    files = request.files(options.valid, samples.questions)
    parts = [_read_squad(request, path) for path in files]
    return _source(request, options, f"{len(parts[0])} questions of {files[0]}", parts, 2)


def open_mnli(request: Request) -> DataSource:
    """Returns MNLI in a folder as GLUE has it: ``train.tsv``, and ``dev_matched.tsv`` to evaluate on.

    Raises:
        ModelError: there are no such files, or they have other columns.
    """
    options = request.options(**vocabulary.OPTIONS)
    root = request.folder(samples.sentences)
    files = root / "train.tsv", pathlib.Path(options.valid or root / "dev_matched.tsv")
    parts = [list(_read_mnli(request, request.existing(path))) for path in files]
    return _source(request, options, f"{len(parts[0])} pairs of sentences in {root}", parts, len(_CLASSES))


def _read_mnli(request: Request, path: pathlib.Path) -> Iterator[Pair]:
    """Yields the pairs of a file that have a label.

    Raises:
        ModelError: a column is missing, or a label is unknown.
    """
    rows = csv.DictReader(request.lines(path), delimiter="\t", quoting=csv.QUOTE_NONE)
    if missing := set(_COLUMNS).difference(rows.fieldnames or ()):
        raise ModelError(f"{request.text}: {path} has no column {', '.join(sorted(missing))} in its first line")
    for row in rows:
        first, second, label = (row[column] for column in _COLUMNS)
        if label in _CLASSES:
            yield Pair(first, second, _CLASSES.index(label))
        elif label != "-":  # People didn't agree.
            known = ", ".join(_CLASSES)
            raise ModelError(f"{request.text}: line {rows.line_num} of {path} has label {label!r}, not one of {known}")


def _read_squad(request: Request, path: pathlib.Path) -> list[Pair]:
    """Returns the questions of a file.

    Raises:
        ModelError: it isn't in SQuAD's format, or an answer isn't in its text.
    """
    try:
        return list(_questions(json.loads(path.read_text(encoding="utf-8-sig"))["data"]))
    except (ValueError, RecursionError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            f"{request.text}: {path} isn't in SQuAD's format, JSON of data -> paragraphs -> context, qas -> question, "
            f"answers -> text, answer_start: {type(error).__name__} {error}"
        ) from error


def _questions(articles: Any) -> Iterator[Pair]:
    for article in articles:
        for paragraph in article["paragraphs"]:
            for asked in paragraph["qas"]:
                question, context = str(asked["question"]), str(paragraph["context"])
                if asked.get("is_impossible") or not asked.get("answers"):
                    yield Pair(question, context, 0)
                    continue
                answer = asked["answers"][0]
                start, end = answer["answer_start"], answer["answer_start"] + len(answer["text"])
                if not 0 <= start < end <= len(context):
                    raise ValueError(f"{question!r:.60} is answered by characters {start} to {end} of {len(context)}")
                yield Pair(question, context, 1, start, end)


def _source(
    request: Request, options: SimpleNamespace, about: str, parts: Sequence[Sequence[Pair]], classes: int
) -> DataSource:
    """Returns data of pairs: to train on, and to evaluate on if there are two parts."""
    train = parts[0]

    @functools.cache
    def tokenizer_for(known: int) -> Any:
        texts = dict.fromkeys(text for pair in train for text in pair[:2])  # Many questions are about one text.
        return vocabulary.chosen(request, options, texts, known)

    def samples_for(model: keras.Model, pairs: Sequence[Pair], seed: int | None) -> order.Samples:
        inputs = fit.named_inputs(request.text, model, inputs_of(model))
        sequence, known = inputs["tokens"][1], fit.vocabulary_of(model, logits=False)
        tokenizer = tokenizer_for(known)
        tasks: dict[tuple[int, ...], Task] = {(sequence, known): "masked", (classes,): "classes"}
        if any(pair.end for pair in train):
            tasks[2, sequence] = "spans"
        if _PERMUTATION in inputs:
            tasks = {(sequence, known): "ordered"}
        outputs = [tuple(output.shape[1:]) for output in fit.declared(model, "outputs")]
        if len(outputs) != 1 or outputs[0] not in tasks:
            raise ModelError(
                f"{request.text}: {model.name!r} gives {' and '.join(map(str, outputs))} for each sample; these data "
                f"are for logits {', '.join(f'{shape} ({task})' for shape, task in tasks.items())}"
            )
        return _samples(pairs, tokenizer, tasks[outputs[0]], sequence, seed, request.text)

    return order.source(request.text, about, parts, samples_for, held_out=options.held_out)


def inputs_of(model: keras.Model) -> tuple[str, ...]:
    """Returns the names of inputs that a model must have; a permutation, only if it has one."""
    ordered = _PERMUTATION in {tensor.name for tensor in fit.declared(model, "inputs")}
    return (*_INPUTS, _PERMUTATION) if ordered else _INPUTS


def _examples(pairs: Sequence[Pair], tokenizer: Any, sequence: int, special: list[Any]) -> Iterator[Example]:
    """Yields samples of at most ``sequence`` tokens: of a long text several, which share a quarter of the sequence.

    ``special`` are the tokens ``first``, [CLS], and ``separator``, [SEP].
    """
    asked = sequence // 2 - 3
    tokenizer.no_truncation()
    whole = vocabulary.encodings(tokenizer, (pair.first for pair in pairs))
    ends = [each.offsets[asked - 1][1] if len(each) > asked else None for each in whole]
    tokenizer.post_processor = vocabulary.library().processors.TemplateProcessing(
        pair="first $A separator $B:1 separator:1", special_tokens=special
    )
    tokenizer.enable_truncation(sequence, stride=sequence // 4, strategy="only_second")
    texts = ((pair.first[:end], pair.second) for pair, end in zip(pairs, ends, strict=True))
    for pair, encoding in zip(pairs, vocabulary.encodings(tokenizer, texts, special=True), strict=True):
        for part in (encoding, *encoding.overflowing):
            second, start, end = part.type_ids.index(1), None, None
            if pair.end:
                start, end = part.char_to_token(pair.start, 1), part.char_to_token(pair.end - 1, 1)
            if start is not None and end is not None:
                yield part.ids, (second, start, end, pair.label)
            else:
                yield part.ids, (second, 0, 0, 0 if pair.end else pair.label)


def _samples(
    pairs: Sequence[Pair], tokenizer: Any, task: Task, sequence: int, seed: int | None, text: str
) -> order.Samples:
    if sequence < 8:
        raise ModelError(f"{text}: the model takes {sequence} tokens; need at least 8")
    first, separator, padding = (vocabulary.token(tokenizer, role, text) for role in ("start", "end", "padding"))
    mask = vocabulary.token(tokenizer, "mask", text) if task == "masked" else 0
    size = vocabulary.size_of(tokenizer)
    examples = list(_examples(pairs, tokenizer, sequence, [("first", first), ("separator", separator)]))
    lists = vocabulary.ragged(tokens for tokens, _ in examples)
    seconds, starts, ends, classes = tf.transpose(
        tf.reshape(tf.constant([numbers for _, numbers in examples], tf.int32), [-1, 4])
    )

    seconds, starts, ends, classes = map(tf.constant, (seconds, starts, ends, classes))

    def read(draw: tf.Tensor, number: tf.Tensor) -> tuple[Any, ...]:
        given = lists[number]
        tokens, count, places = vocabulary.padded(given, sequence, padding), tf.shape(given)[0], tf.range(sequence)
        x = {
            "tokens": tokens,
            "segments": tf.cast((places >= seconds[number]) & (places < count), tf.int32),
            "present": tf.cast(places < count, tf.int32),
        }
        if task == "spans":
            return x, tf.stack([starts[number], ends[number]])
        if task == "classes":
            return x, classes[number]
        special = (tokens == first) | (tokens == separator) | (places >= count)
        if task == "ordered":
            x[_PERMUTATION] = permutation(special, order.seeds_of(draw, seed))
            return x, tokens, tf.cast(x[_PERMUTATION] > 0, tf.float32)
        x["tokens"], chosen = masked(tokens, special, mask, size, order.seeds_of(draw, seed))
        return x, tokens, tf.cast(chosen, tf.float32)

    return order.Samples(len(examples), read)


def masked(
    tokens: tf.Tensor, special: tf.Tensor, mask: int, size: int, seeds: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Masks some tokens, as for BERT, and at least one if any isn't special.

    Args:
        tokens: int32 [sequence].
        special: bool [sequence], tokens that aren't predicted, such as padding.
        mask: the token [MASK].
        size: number of tokens in the vocabulary.
        seeds: int64 [2]; equal seeds give equal results.

    Returns:
        The tokens, some of them masked, and bool [sequence], whether each is to be predicted.
    """
    drawn = tf.where(special, 2.0, tf.random.stateless_uniform(tf.shape(tokens), seeds))
    chosen = ~special & ((drawn < _MASKED) | (drawn == tf.reduce_min(drawn)))
    way = tf.random.stateless_uniform(tf.shape(tokens), seeds + 1)
    others = tf.random.stateless_uniform(tf.shape(tokens), seeds + 2, 0, size, tf.int32)
    changed = tf.where(way < 0.8, mask, tf.where(way < 0.9, others, tokens))
    return tf.where(chosen, changed, tokens), chosen


def permutation(special: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
    """Returns the order in which some tokens are predicted, as for XLNet of two streams.

    They are drawn one by one, whereas XLNet draws spans of one to five; at least one in a sample if any isn't
    special.

    Args:
        special: bool [..., sequence], tokens that aren't predicted, such as padding.
        seeds: int64 [2]; equal seeds give equal results.

    Returns:
        int32 [..., sequence]: 1, 2, ... for tokens to be predicted, each of which may see those before it; 0 for the
        others, which all may see.
    """
    drawn = tf.where(special, 2.0, tf.random.stateless_uniform(tf.shape(special), seeds))
    place = tf.argsort(tf.argsort(drawn, axis=-1), axis=-1)
    candidates = tf.reduce_sum(tf.cast(~special, tf.float32), axis=-1, keepdims=True)
    count = tf.maximum(1, tf.cast(tf.round(candidates * _ORDERED), tf.int32))
    return tf.where(~special & (place < count), place + 1, 0)
