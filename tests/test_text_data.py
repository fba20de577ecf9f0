from __future__ import annotations

import itertools
import math
import pathlib

import numpy as np
import pytest

from dapple_tf.models import text

DIGITS = np.arange(23, dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """A small library, and files in it that must be left out."""
    for index in range(40):
        path = tmp_path / f"package_{index % 3}" / f"module_{index}.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"x = {index}\n")
    left_out = ("site-packages/a.py", "test/a.py", "package_0/tests/a.py", "_sysconfigdata_linux.py", "notes.txt")
    for name in left_out:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("left out\n")
    return tmp_path


def test_files_in_order_without_tests_and_packages(folder: pathlib.Path) -> None:
    names = [path.relative_to(folder).as_posix() for path in text.source_files(folder)]
    assert len(names) == 40
    assert names == sorted(names)
    assert all(name.startswith("package_") and "tests" not in name for name in names)


def test_every_file_is_in_one_part(folder: pathlib.Path) -> None:
    corpus = text.standard_library(0.3, root=folder)
    parts = [bytes(part).split(b"\0") for part in (corpus.train, corpus.held_out)]
    assert [part[-1] for part in parts] == [b"", b""]
    lines = [set(part[:-1]) for part in parts]
    assert all(lines)
    assert not lines[0] & lines[1]
    assert lines[0] | lines[1] == {f"x = {index}\n".encode() for index in range(40)}


def test_the_split_is_the_same_everywhere() -> None:
    """Pinned: Python's own hash of a string changes from run to run."""
    held_out = [index for index in range(100) if text.is_held_out(f"module_{index}.py", 0.05)]
    assert held_out == [5, 30, 60, 63, 68, 73]
    assert text.is_held_out("a.py", 1.0)
    assert not text.is_held_out("a.py", 0.0)


@pytest.mark.parametrize(("fraction", "message"), [(0.0, "need 0 < fraction < 1"), (1.0, "need 0"), (0.5, "need both")])
def test_impossible_parts_are_refused(fraction: float, message: str, tmp_path: pathlib.Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "a.py").write_text("x = 1\n")
    assert text.source_files(tmp_path / "tests") == [tmp_path / "tests" / "a.py"], "folders above don't matter"
    with pytest.raises(ValueError, match=message):
        text.standard_library(fraction, root=tmp_path / "tests")


def test_windows_in_order() -> None:
    batches = [(x.numpy().tolist(), y.numpy().tolist()) for x, y in text.windows(DIGITS, 4, 2)]
    # 23 bytes: 5 windows of 4 bytes and their targets; the rest is left out.
    assert batches == [
        ([[0, 1, 2, 3], [4, 5, 6, 7]], [[1, 2, 3, 4], [5, 6, 7, 8]]),
        ([[8, 9, 10, 11], [12, 13, 14, 15]], [[9, 10, 11, 12], [13, 14, 15, 16]]),
        ([[16, 17, 18, 19]], [[17, 18, 19, 20]]),
    ]
    assert [y.numpy().tolist() for _, y in text.windows(DIGITS[:9], 4, 2)] == [[[1, 2, 3, 4], [5, 6, 7, 8]]]


def test_shuffled_windows_are_repeatable() -> None:
    def passes(seed: int) -> list[list[int]]:
        dataset = text.windows(DIGITS, 4, 5, seed=seed, repeat=True)
        return [x.numpy()[:, 0].tolist() for x, _ in itertools.islice(dataset, 6)]

    first = passes(seed=1)
    assert first == passes(seed=1)
    assert first != passes(seed=2)
    assert all(sorted(starts) == [0, 4, 8, 12, 16] for starts in first)  # Each pass has each window once,
    assert len({tuple(starts) for starts in first}) > 1  # in an order of its own.


@pytest.mark.parametrize(
    ("count", "repeat", "message"),
    [
        (4, False, "4 bytes make 0 windows of 4 \\+ 1 bytes; need 1"),
        (0, False, "0 bytes make 0 windows of 4 \\+ 1 bytes; need 1"),
        (12, True, "12 bytes make 2 windows of 4 \\+ 1 bytes; need 3"),
    ],
)
def test_too_short_text_is_refused(count: int, repeat: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text.windows(DIGITS[:count], 4, 3, repeat=repeat)


def test_unigram_bits_per_byte() -> None:
    train = np.repeat(np.arange(256, dtype=np.uint8), 7)
    assert text.unigram_bits_per_byte(train, DIGITS) == pytest.approx(8)
    # Each count plus one: byte 0 has 512 of 767, each other byte 1 of 767.
    skewed = np.zeros(511, np.uint8)
    assert text.unigram_bits_per_byte(skewed, np.zeros(3, np.uint8)) == pytest.approx(-math.log2(512 / 767))
    assert text.unigram_bits_per_byte(skewed, np.array([0, 9], np.uint8)) == pytest.approx(
        (-math.log2(512 / 767) + math.log2(767)) / 2
    )
    assert text.bits_per_byte(math.log(256)) == pytest.approx(8)
