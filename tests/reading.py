"""What tests of readers share: files of each kind, models that take them, and what holds of all readers."""

from __future__ import annotations

import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tokenizers

from dapple_tf.checkpoints.data_position import TrainingData

CLASSES = ("ant", "bee", "cat")
MNLI = ("contradiction", "entailment", "neutral")
NUMBERS, TOKENS = np.arange(103), 5
PAIR_WORDS = [f"w{number}" for number in range(20)]
PAIR_SPECIAL = ["<pad>", "<unk>", "<start>", "<end>"]
QUESTION_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
QUESTION_WORDS = [*PAIR_WORDS, "who", "what"]
QUESTION_TOKENS = 12


# ---- models


def image_model(classes: int = 3, side: int = 8, channels: int = 3) -> keras.Model:
    """A model of images."""
    layers = [keras.Input((side, side, channels)), keras.layers.Flatten(), keras.layers.Dense(classes)]
    return keras.Sequential(layers, name="small")


def language_model(vocabulary: int = 256, sequence: int = TOKENS) -> keras.Model:
    layers = [keras.Input((sequence,), dtype="int32"), keras.layers.Embedding(vocabulary, 2)]
    return keras.Sequential([*layers, keras.layers.Dense(vocabulary)], name="language")


def translator(words: int = 24, source: int = 5, target: int = 6) -> keras.Model:
    """A model of pairs that doesn't translate."""
    inputs = {
        name: keras.Input((length,), dtype="int32", name=name)
        for name, length in (("source", source), ("target", target))
    }
    read = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(words, 4)(inputs["source"]))
    written = keras.layers.Embedding(words, 4)(inputs["target"])
    hidden = keras.layers.Add()([written, keras.layers.Reshape((1, 4))(read)])
    return keras.Model(inputs, keras.layers.Dense(words)(hidden), name="translator")


def question_model(outputs: str, words: int = 27, *, ordered: bool = False) -> keras.Model:
    """A model of questions that doesn't answer."""
    names = ("tokens", "segments", "present", *(("permutation",) if ordered else ()))
    inputs = {name: keras.Input((QUESTION_TOKENS,), dtype="int32", name=name) for name in names}
    hidden = keras.layers.Embedding(words, 4)(inputs["tokens"])
    if outputs == "spans":
        logits: Any = keras.layers.Permute((2, 1))(keras.layers.Dense(2)(hidden))
    elif outputs in ("2 classes", "3 classes"):
        logits = keras.layers.Dense(int(outputs[0]))(hidden[:, 0])
    else:
        logits = keras.layers.Dense(words if outputs == "tokens" else 3)(hidden)
    return keras.Model(inputs, logits, name="answers")


# ---- files


def write_images(root: pathlib.Path) -> pathlib.Path:
    """Images of ImageNet's layout, of several sizes and formats; red tells the class, green the number."""
    for part, count in (("train", 7), ("val", 3)):
        for label, name in enumerate(CLASSES):
            place = root / part / name
            place.mkdir(parents=True)
            for number in range(count):
                pixels = np.zeros((20 + number, 30 - number, 3), "uint8")
                pixels[..., 0], pixels[..., 1] = 40 + 60 * label, 10 + 30 * number
                pixels[:, ::5, 2] = 255
                encode, suffix = ((tf.io.encode_png, "png"), (tf.io.encode_jpeg, "JPEG"))[number % 2]
                (place / f"{name}_{number}.{suffix}").write_bytes(encode(pixels).numpy())
            (place / "notes.txt").write_text("no image")
    return root


def write_tokens(root: pathlib.Path) -> pathlib.Path:
    """The numbers from 0 to 102 in every kind of file, and text."""
    for dtype in ("uint8", "uint16", "int64"):
        NUMBERS.astype(dtype).tofile(root / f"{dtype}.bin")
    np.save(root / "uint32.npy", NUMBERS.astype("uint32"))
    (root / "a.txt").write_text("the cat sat on the mat\nthe dog sat on the log\n" * 20 + "ünïcödé\n")
    (root / "more").mkdir()
    for name in ("b.txt", "a.txt", "notes.md"):
        (root / "more" / name).write_text(f"this is {name}, and the cat\n" * 3)
    return root


def write_pairs(root: pathlib.Path) -> pathlib.Path:
    """60 pairs of 0 to 7 words, the translation backwards and a word longer, and a tokenizer that knows the words."""
    draw = np.random.default_rng(0)
    sources = [[PAIR_WORDS[word] for word in draw.integers(0, 20, draw.integers(0, 8))] for _ in range(60)]
    targets = [["w0", *reversed(words)] for words in sources]
    for name, lists in (("a.en", sources), ("a.de", targets)):
        (root / name).write_text("".join(" ".join(words) + "\n" for words in lists))
    both = zip(sources, targets, strict=True)
    (root / "a.tsv").write_text("".join(f"{' '.join(a)}\t{' '.join(b)}\n" for a, b in both))
    tokens = {token: number for number, token in enumerate(PAIR_SPECIAL + PAIR_WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(root / "words.json"))
    return root


def write_mnli(root: pathlib.Path) -> pathlib.Path:
    """GLUE's columns, of which three are read, and a label on which people didn't agree."""
    question_tokenizer().save(str(root / "words.json"))
    rows = [f'{n}\tw{n} w1\tw{n} w2 "w3\t{label}' for n, label in enumerate([*MNLI, "-", *MNLI])]
    for name in ("train", "dev_matched"):
        (root / f"{name}.tsv").write_text("\n".join(["index\tsentence1\tsentence2\tgold_label", *rows]) + "\n")
    return root


def squad(*questions: tuple[str, str, str | None]) -> str:
    """SQuAD's JSON of questions, texts and answers."""
    paragraphs = []
    for question, context, answer in questions:
        answers = [] if answer is None else [{"text": answer, "answer_start": context.index(answer)}]
        asked = {"question": question, "id": "0", "answers": answers, "is_impossible": answer is None}
        paragraphs.append({"context": context, "qas": [asked]})
    return json.dumps({"version": "v2.0", "data": [{"title": "a", "paragraphs": paragraphs}]})


def question_tokenizer() -> tokenizers.Tokenizer:
    numbers = {token: number for number, token in enumerate(QUESTION_SPECIAL + QUESTION_WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return tokenizer


def write_questions(root: pathlib.Path) -> pathlib.Path:
    """30 questions on texts of 4 to 15 words, a third of them without an answer."""
    tokenizer = question_tokenizer()
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


# ---- batches


def taken(dataset: tf.data.Dataset, count: int) -> list[list[np.ndarray]]:
    """The first batches, as arrays."""
    return [flat(batch) for batch in itertools.islice(dataset.as_numpy_iterator(), count)]


def flat(batch: Any) -> list[np.ndarray]:
    return [np.asarray(array) for array in keras.tree.flatten(batch)]


def assert_equal(first: list[list[np.ndarray]], second: list[list[np.ndarray]]) -> None:
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            np.testing.assert_array_equal(a, b)


def assert_seeded(make: Callable[[int], tf.data.Dataset], count: int) -> None:
    """The same seed gives the same batches, another one others."""
    first = taken(make(1), count)
    assert_equal(first, taken(make(1), count))
    other = taken(make(2), count)
    assert any((a != b).any() for one, two in zip(first, other, strict=True) for a, b in zip(one, two, strict=True))


def assert_resumes(make: Callable[[], tf.data.Dataset], steps: int, done: int, state_bytes: int = 40_000) -> None:
    """A run that is stopped after ``done`` batches and resumed gives the batches of one that isn't, as `fit` reads."""

    def data() -> TrainingData:
        return TrainingData.of(make(), batch_size=1, steps_per_epoch=10**6)

    def read(given: TrainingData, count: int) -> list[list[np.ndarray]]:
        items = iter(given)
        return [flat(next(items)) for _ in range(count)]

    expected = read(data(), steps)
    stopped = data()
    begun = read(stopped, done)
    values, state = stopped.position(epoch_over=False)
    assert set(state) == {"iterator", "start"}  # No reading from the beginning.
    assert sum(len(tf.io.serialize_tensor(tensor).numpy()) for tensor in state.values()) < state_bytes
    resumed = data()
    resumed.resume(values, state, done)
    assert_equal(begun + read(resumed, steps - done), expected)
