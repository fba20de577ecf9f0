"""Token files and text files: the right windows of them, read where they are."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import tokenizers
from reading import NUMBERS, TOKENS, assert_equal, language_model, taken, write_tokens

from dapple_tf.models.readers import tokens
from dapple_tf.models.readers.order import evaluation_batches
from dapple_tf.models.registry import find_data
from dapple_tf.models.sources import ModelError

MODEL = language_model()
pytestmark = pytest.mark.usefixtures("_cache_of_readers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def windows(numbers: np.ndarray, sequence: int = TOKENS) -> list[tuple[list[int], list[int]]]:
    """x and y of each window, without any of the code above."""
    pairs = []
    for start in range(0, len(numbers) - sequence, sequence):
        pairs.append((numbers[start : start + sequence].tolist(), numbers[start + 1 : start + sequence + 1].tolist()))
    return pairs


def rows(batches: list[list[np.ndarray]]) -> list[tuple[list[int], list[int]]]:
    return [(x.tolist(), y.tolist()) for xs, ys in batches for x, y in zip(xs, ys, strict=True)]


@pytest.mark.parametrize("file", ["uint8.bin", "uint16.bin", "int64.bin", "uint32.npy", "int32.npy"])
def test_windows_against_slices(file: str, folder: pathlib.Path) -> None:
    path = folder / file
    data = find_data(f"tokens:{path}?held_out=0.3" + (f"&dtype={path.stem}" if path.suffix == ".bin" else ""))
    assert data.held_out is not None
    train, out = windows(NUMBERS[:72]), windows(NUMBERS[72:])  # 31 tokens are 30% of 103.
    x, y = next(iter(data.batches(MODEL, 3, 0)))
    assert (x.shape, y.shape, x.dtype.name, y.dtype.name) == ((3, 5), (3, 5), "int32", "int32")
    seen = rows(taken(data.batches(MODEL, 1, 0), 2 * len(train)))
    assert sorted(seen[: len(train)]) == sorted(seen[len(train) :]) == sorted(train)
    assert seen[: len(train)] != seen[len(train) :]
    batches = taken(data.held_out(MODEL, 4), 9)
    assert rows(batches) == out
    assert [len(xs) for xs, _ in batches] == [4, 2]


def test_the_last_token_is_used_and_files_to_evaluate_on(folder: pathlib.Path) -> None:
    np.arange(11, dtype="uint16").tofile(folder / "eleven.bin")
    data = find_data(f"tokens:{folder}/uint16.bin?valid={folder}/eleven.bin")
    assert data.held_out is not None
    assert rows(taken(data.held_out(MODEL, 9), 9)) == windows(np.arange(11))
    assert len(windows(np.arange(11))) == 2
    assert find_data(f"tokens:{folder}/uint16.bin?held_out=0").held_out is None


def test_nothing_is_loaded(tmp_path: pathlib.Path) -> None:
    """A file of 40 GB (a hole, apart from its last tokens) is opened and read at its end."""
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.seek(40 * 10**9)
        file.write(np.arange(11, dtype="uint16").tobytes())
    whole = tokens.TokenFile.of(path, "uint16", "")
    assert whole.count == 20 * 10**9 + 11
    end = whole.split(11 / whole.count)[1]
    assert end.array().tolist() == list(range(11))
    last = end.windows(TOKENS, 256, "")
    assert rows(taken(evaluation_batches(last, 2), 9)) == windows(np.arange(11))


def test_text_is_bytes(folder: pathlib.Path) -> None:
    data = find_data(f"text:{folder}/a.txt?held_out=0")
    text = np.frombuffer((folder / "a.txt").read_bytes(), "uint8")
    count = len(windows(text))
    assert sorted(rows(taken(data.batches(MODEL, 1, 0), count))) == sorted(windows(text))
    both = find_data(f"text:{folder}/more,{folder}/a.txt?held_out=0")
    names = ("more/a.txt", "more/b.txt", "a.txt")
    text = np.frombuffer(b"".join((folder / name).read_bytes() + b"\0" for name in names), "uint8")
    assert sorted(rows(taken(both.batches(MODEL, 1, 0), len(windows(text))))) == sorted(windows(text))


def test_text_is_tokenized(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model = language_model(280)
    data = find_data(f"text:{folder}/a.txt?vocabulary=280&held_out=0.25")
    assert data.held_out is not None
    out = taken(data.held_out(model, 64), 9)
    train = rows(taken(data.batches(model, 1, 0), int(data.about.split()[0]) // TOKENS - 1))
    assert max(x.max() for x, _ in out) > 256
    assert_equal(out, taken(find_data(f"text:{folder}/a.txt?vocabulary=280&held_out=0.25").held_out(model, 64), 9))
    assert len(train) < 60  # 47 bytes of two lines are a few tokens.
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 1, "<unk>": 2, "<end>": 3}, "<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("the cat the cat\nthe dog\n")
    own = find_data(f"text:{tmp_path}/a.txt?tokenizer={tmp_path}/words.json&held_out=0")
    assert rows(taken(own.batches(language_model(4, 6), 1, 0), 1)) == [([0, 1, 0, 1, 0, 2], [1, 0, 1, 0, 2, 3])]


def test_tokens_that_were_not_looked_at_are_told(folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "_LOOKED_AT", 1)
    monkeypatch.setattr(tokens, "_AT_ONCE", 1)
    with pytest.raises(ModelError, match=r"uint16\.bin has a token that a vocabulary of\] \[90\] \[lacks:\]"):
        find_data(f"tokens:{folder}/uint16.bin?held_out=0").example(language_model(90), 20)
