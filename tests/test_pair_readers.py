"""Sentences and translations: shifted, padded and weighted as they should be, in an order that can be had again."""

from __future__ import annotations

import pathlib

import keras
import numpy as np
import pytest
from reading import PAIR_SPECIAL, PAIR_WORDS, taken, translator, write_pairs

from dapple_tf.models.readers import vocabulary
from dapple_tf.models.registry import find_data

MODEL = translator()
pytestmark = pytest.mark.usefixtures("_cache_of_readers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_pairs(tmp_path_factory.mktemp("pairs"))


def naive(folder: pathlib.Path, source: int, target: int) -> list[tuple[list[int], ...]]:
    """What batches have for each pair that fits, one after the other."""
    number = {word: len(PAIR_SPECIAL) + index for index, word in enumerate(PAIR_WORDS)}
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
