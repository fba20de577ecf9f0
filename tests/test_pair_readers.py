"""Sentences and translations: shifted, padded and weighted as they should be, in an order that can be had again."""

from __future__ import annotations

import functools
import pathlib

import keras
import numpy as np
import pytest
import tokenizers
from reading import assert_resumes, assert_seeded, taken

from dapple_tf.models.readers import vocabulary
from dapple_tf.models.readers.files import pairs_of
from dapple_tf.models.registry import find_data
from dapple_tf.models.sources import ModelError

WORDS = [f"w{number}" for number in range(20)]
SPECIAL = ["<pad>", "<unk>", "<start>", "<end>"]


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


MODEL = translator()
pytestmark = pytest.mark.usefixtures("_cache_of_readers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """60 pairs of 0 to 7 words, the translation backwards and a word longer, and a tokenizer that knows the words."""
    root = tmp_path_factory.mktemp("pairs")
    draw = np.random.default_rng(0)
    sources = [[WORDS[word] for word in draw.integers(0, 20, draw.integers(0, 8))] for _ in range(60)]
    targets = [["w0", *reversed(words)] for words in sources]
    for name, lists in (("a.en", sources), ("a.de", targets)):
        (root / name).write_text("".join(" ".join(words) + "\n" for words in lists))
    both = zip(sources, targets, strict=True)
    (root / "a.tsv").write_text("".join(f"{' '.join(a)}\t{' '.join(b)}\n" for a, b in both))
    tokens = {token: number for number, token in enumerate(SPECIAL + WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(tokens, unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(root / "words.json"))
    return root


def naive(folder: pathlib.Path, source: int, target: int) -> list[tuple[list[int], ...]]:
    """What batches have for each pair that fits, one after the other."""
    number = {word: len(SPECIAL) + index for index, word in enumerate(WORDS)}
    samples = []
    for line, translated in zip(
        (folder / "a.en").read_text().splitlines(), (folder / "a.de").read_text().splitlines(), strict=True
    ):
        read, written = [number[w] for w in line.split()], [number[w] for w in translated.split()]
        if read and len(read) <= source and len(written) + 1 <= target:
            pad = target - len(written) - 1
            samples.append(
                (
                    read + [0] * (source - len(read)),
                    [2, *written] + [0] * pad,
                    [*written, 3] + [0] * pad,
                    [1.0] * (len(written) + 1) + [0.0] * pad,
                )
            )
    return samples


def rows(batches: list[list[np.ndarray]]) -> list[tuple[list[int], ...]]:
    return [tuple(array[row].tolist() for array in batch) for batch in batches for row in range(len(batch[0]))]


@pytest.mark.parametrize("files", ["{0}/a.en,{0}/a.de", "{0}/a.tsv"])
def test_pairs_against_naive_padding(files: str, folder: pathlib.Path) -> None:
    name = f"pairs:{files.format(folder)}?tokenizer={folder}/words.json"
    expected = naive(folder, 5, 6)
    assert 20 < len(expected) < 60
    data = find_data(f"{name}&held_out=0")
    assert data.held_out is None and data.about.startswith("60 pairs of ")
    (x, y, weights) = next(iter(data.batches(MODEL, 4, 0)))
    assert {key: (value.shape, value.dtype.name) for key, value in x.items()} == {
        "source": ((4, 5), "int32"),
        "target": ((4, 6), "int32"),
    }
    assert (y.dtype.name, weights.dtype.name) == ("int32", "float32")
    seen = rows(taken(data.batches(MODEL, 1, 0), 2 * len(expected)))
    assert sorted(seen[: len(expected)]) == sorted(seen[len(expected) :]) == sorted(expected)


def test_evaluation_is_in_order_of_lines(folder: pathlib.Path) -> None:
    files = f"{folder}/a.en,{folder}/a.de"
    data = find_data(f"pairs:{files}?tokenizer={folder}/words.json&valid={files}")
    assert data.held_out is not None
    batches = taken(data.held_out(MODEL, 7), 99)
    expected = naive(folder, 5, 6)
    assert rows(batches) == expected
    assert [len(batch[0]) for batch in batches[:-1]] == [7] * ((len(expected) - 1) // 7)


def test_held_out_pairs_are_not_trained_on(folder: pathlib.Path) -> None:
    data = find_data(f"pairs:{folder}/a.tsv?tokenizer={folder}/words.json&held_out=0.3")
    assert data.held_out is not None
    out = rows(taken(data.held_out(MODEL, 4), 99))
    train = rows(taken(data.batches(MODEL, 1, 0), len(naive(folder, 5, 6)) - len(out)))
    assert 4 <= len(out) <= 18
    assert sorted(out + train) == sorted(naive(folder, 5, 6))


@pytest.mark.thorough
@pytest.mark.slow
def test_order_is_seeded_and_resumes(folder: pathlib.Path) -> None:
    data = find_data(f"pairs:{folder}/a.tsv?tokenizer={folder}/words.json")
    assert_seeded(functools.partial(data.batches, MODEL, 8), 5)
    assert_resumes(lambda: data.batches(MODEL, 8, 0), steps=12, done=5)


def test_tokenizers_are_trained_on_the_pairs(folder: pathlib.Path) -> None:
    model = translator(words=40, source=12, target=14)
    data = find_data(f"pairs:{folder}/a.tsv")
    x, y, weights = data.example(model, 6)
    assert 0 < max(x["source"].max(), y.max()) < 40
    assert x["source"].max() > 20
    again = find_data(f"pairs:{folder}/a.tsv").example(model, 6)
    for one, other in zip(keras.tree.flatten((x, y, weights)), keras.tree.flatten(again), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("kind", ["byte_bpe", "bpe", "wordpiece"])
def test_tokens_are_text_again(kind: vocabulary.TokenizerKind) -> None:
    lines = ["the quick brown fox", "the lazy dog and the quick dog"] * 5
    tokenizer = vocabulary.train(kind, 300, lambda: lines)
    assert vocabulary.size_of(tokenizer) <= 300
    for line, ids in zip(lines, vocabulary.encoded(tokenizer, lines), strict=True):
        assert tokenizer.decode(ids) == line
        assert len(ids) < len(line)
    assert [tokenizer.token_to_id(token) for token in vocabulary.SPECIAL[kind]] == list(
        range(len(vocabulary.SPECIAL[kind]))
    )
    other = vocabulary.train(kind, 300, lambda: lines)
    assert other.to_str() == tokenizer.to_str()


def test_small_vocabularies_are_kept_to() -> None:
    lines = ["abcdefghijklmnopqrstuvwxyz" + chr(0x3042 + number) for number in range(50)]
    for kind in ("bpe", "wordpiece"):
        assert vocabulary.size_of(vocabulary.train(kind, 32, lambda: lines)) <= 32


def test_the_sample() -> None:
    data = find_data("pairs?held_out=0.1")
    model = translator(words=32, source=6, target=7)
    assert data.held_out is not None
    x, _, weights = data.example(model, 8)
    assert x["source"].shape == (8, 6) and 0 < weights.mean() < 1
    assert sum(len(batch[0]) for batch in taken(data.held_out(model, 64), 9)) > 150


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ("a\nb\n", "a\n", r"first has 2 lines, .*second has 1; they must be translations line by line"),
        ("a\n", "a\nb\nc\n", r"first has 1 lines, .*second has 3"),
        ("a\n", "a\n", "has 1 lines; need at least 2"),
        (b"a\n\xff\n", "a\nb\n", "first isn't UTF-8 text behind line"),
    ],
)
def test_files_that_do_not_fit_are_told(first: str | bytes, second: str, message: str, tmp_path: pathlib.Path) -> None:
    for name, content in (("first", first), ("second", second)):
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ModelError, match=message):
        find_data(f"pairs:{tmp_path}/first,{tmp_path}/second")


def test_columns_are_told(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text("a\tb\r\nno tabulator\n")
    with pytest.raises(ModelError, match=r"line 2 of .*a\.tsv has 1 columns; write the source, one tabulator"):
        find_data(f"pairs:{path}")
    path.write_text("a\tb\r\nc\td")
    assert list(pairs_of((path,), "")) == [("a", "b"), ("c", "d")]


def test_mistakes_are_told(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    name = f"pairs:{folder}/a.tsv"
    for text, message in (
        (f"{name},b,c", r"give one file with two columns, or two files, not 3"),
        ("pairs:/none.en,/none.de", r"there is no file /none\.en"),
        (f"{name}?valid=/none.tsv", r"there is no file /none\.tsv"),
        (f"{name}?tokenizer=a&vocabulary=3", "tokenizer and vocabulary are both given"),
    ):
        with pytest.raises(ModelError, match=message):
            find_data(text)
    other = keras.Sequential([keras.Input((3,), name="tokens"), keras.layers.Embedding(9, 2)], name="other")
    (tmp_path / "broken.json").write_text("{")
    no_end = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<start>": 1, "<unk>": 2}, "<unk>"))
    no_end.save(str(tmp_path / "no_end.json"))
    padded = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<end>": 0, "<start>": 1, "<pad>": 2}, "<pad>"))
    padded.save(str(tmp_path / "padded.json"))
    for text, model, message in (
        (name, other, r"are for models of source and target \[batch, sequence\], but 'other' takes tokens"),
        (f"{name}?tokenizer=/none.json", MODEL, r"there is no tokenizer /none\.json"),
        (f"{name}?tokenizer={tmp_path}/broken.json", MODEL, "broken.json isn't a tokenizer's JSON file"),
        (f"{name}?tokenizer={tmp_path}/no_end.json", MODEL, "the tokenizer has none of the tokens <end>"),
        (f"{name}?tokenizer={tmp_path}/padded.json", MODEL, "the tokenizer's padding is token 2; models take token 0"),
        (f"{name}?tokenizer={folder}/words.json", translator(10), "the data have 24 tokens, but 'translator' knows 10"),
        (
            f"{name}?tokenizer={folder}/words.json",
            translator(24, 1, 2),
            "none of 57 pairs has 1 to 1 tokens and 1",
        ),
        (f"{name}?vocabulary=5", MODEL, "a vocabulary of 5 is too small for a tokenizer of kind bpe; use at least 6"),
    ):
        with pytest.raises(ModelError, match=message):
            find_data(text).example(model, 2)
