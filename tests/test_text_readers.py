"""Readers of text: windows of token files, pairs, questions with answers, tokens to predict, and the source text."""

from __future__ import annotations

import itertools
import math
import pathlib

import numpy as np
import pytest
import tensorflow as tf
import tokenizers
from reading import (
    NUMBERS,
    PAIR_SPECIAL,
    PAIR_WORDS,
    QUESTION_SPECIAL,
    QUESTION_TOKENS,
    QUESTION_WORDS,
    TOKENS,
    language_model,
    question_model,
    question_tokenizer,
    taken,
    translator,
    write_pairs,
    write_questions,
    write_tokens,
)

from dapple_tf.models import text
from dapple_tf.models.readers import tokens, vocabulary
from dapple_tf.models.readers.order import evaluation_batches
from dapple_tf.models.readers.predicted_tokens import masked, permutation
from dapple_tf.models.readers.squad import Question, examples, read_questions
from dapple_tf.models.registry import find_data
from dapple_tf.models.sources import ModelError

WORDS, PAIRS, SPANS = language_model(), translator(), question_model("spans")
SEEDS = tf.constant([3, 5], tf.int64)
pytestmark = pytest.mark.usefixtures("_cache_of_readers")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("text")
    for write in (write_tokens, write_pairs, write_questions):
        folder = root / write.__name__.removeprefix("write_")
        folder.mkdir()
        write(folder)
    return root


def rows(batches: list[list[np.ndarray]]) -> list[tuple[list[int], ...]]:
    return [tuple(array[row].tolist() for array in batch) for batch in batches for row in range(len(batch[0]))]


# ---- windows of tokens and of text


def windows(numbers: np.ndarray, sequence: int = TOKENS) -> list[tuple[list[int], ...]]:
    """x and y of each window, without the code above."""
    starts = range(0, len(numbers) - sequence, sequence)
    return [(numbers[at : at + sequence].tolist(), numbers[at + 1 : at + sequence + 1].tolist()) for at in starts]


@pytest.mark.parametrize("file", ["uint8.bin", "int64.bin", "uint32.npy"])
def test_windows_of_tokens_against_slices(file: str, root: pathlib.Path) -> None:
    path = root / "tokens" / file
    data = find_data(f"tokens:{path}?held_out=0.3" + (f"&dtype={path.stem}" if path.suffix == ".bin" else ""))
    assert data.held_out is not None
    train, out = windows(NUMBERS[:72]), windows(NUMBERS[72:])  # 31 tokens are 30% of 103.
    x, y = next(iter(data.batches(WORDS, 3, 0)))
    assert (x.shape, y.shape, x.dtype.name, y.dtype.name) == ((3, 5), (3, 5), "int32", "int32")
    seen = rows(taken(data.batches(WORDS, 1, 0), 2 * len(train)))
    assert sorted(seen[: len(train)]) == sorted(seen[len(train) :]) == sorted(train)
    assert seen[: len(train)] != seen[len(train) :]
    batches = taken(data.held_out(WORDS, 4), 9)
    assert rows(batches) == out and [len(xs) for xs, _ in batches] == [4, 2]


def test_the_last_token_is_used_and_files_to_evaluate_on(root: pathlib.Path) -> None:
    np.arange(11, dtype="uint16").tofile(root / "eleven.bin")
    data = find_data(f"tokens:{root}/tokens/uint16.bin?valid={root}/eleven.bin")
    assert data.held_out is not None
    assert rows(taken(data.held_out(WORDS, 9), 9)) == windows(np.arange(11))
    assert find_data(f"tokens:{root}/tokens/uint16.bin?held_out=0").held_out is None


def test_a_file_of_tokens_is_not_loaded(tmp_path: pathlib.Path) -> None:
    """A file of 40 GB (a hole, apart from its last tokens) is opened and read at its end."""
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.seek(40 * 10**9)
        file.write(np.arange(11, dtype="uint16").tobytes())
    whole = tokens.TokenFile.of(path, "uint16", "")
    assert whole.count == 20 * 10**9 + 11
    last = whole.split(11 / whole.count)[1].windows(TOKENS, 256, "")
    assert rows(taken(evaluation_batches(last, 2), 9)) == windows(np.arange(11))


def test_text_is_bytes_of_files_in_order(root: pathlib.Path) -> None:
    folder = root / "tokens"
    data = find_data(f"text:{folder}/more,{folder}/a.txt?held_out=0")
    content = b"".join((folder / name).read_bytes() + b"\0" for name in ("more/a.txt", "more/b.txt", "a.txt"))
    expected = windows(np.frombuffer(content, "uint8"))
    assert sorted(rows(taken(data.batches(WORDS, 1, 0), len(expected)))) == sorted(expected)


def test_text_is_tokenized_by_its_own_vocabulary_or_a_given_one(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    model = language_model(280)
    data = find_data(f"text:{root}/tokens/a.txt?vocabulary=280&held_out=0.25")
    assert data.held_out is not None
    assert max(x.max() for x, _ in taken(data.held_out(model, 64), 9)) > 256
    assert int(data.about.split()[0]) < 300  # 47 bytes of two lines are a few tokens.
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 1, "<unk>": 2, "<end>": 3}, "<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("the cat the cat\nthe dog\n")
    own = find_data(f"text:{tmp_path}/a.txt?tokenizer={tmp_path}/words.json&held_out=0")
    assert rows(taken(own.batches(language_model(4, 6), 1, 0), 1)) == [([0, 1, 0, 1, 0, 2], [1, 0, 1, 0, 2, 3])]


def test_tokens_beyond_the_vocabulary_are_found_while_reading(
    root: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_LOOKED_AT", 1)
    monkeypatch.setattr(tokens, "_AT_ONCE", 1)
    with pytest.raises(ModelError, match=r"uint16\.bin has a token that a vocabulary of\] \[90\] \[lacks:\]"):
        find_data(f"tokens:{root}/tokens/uint16.bin?held_out=0").example(language_model(90), 20)


# ---- pairs


def pairs(folder: pathlib.Path, source: int, target: int) -> list[tuple[list[int], ...]]:
    """The content of batches for each pair that fits, one after the other."""
    number = {word: len(PAIR_SPECIAL) + index for index, word in enumerate(PAIR_WORDS)}
    samples = []
    for line in (folder / "a.tsv").read_text().splitlines():
        read, written = ([number[word] for word in half.split()] for half in line.split("\t"))
        pad, missing = target - len(written) - 1, source - len(read)
        if read and missing >= 0 and pad >= 0:
            shifted = [2, *written] + [0] * pad, [*written, 3] + [0] * pad
            samples.append((read + [0] * missing, *shifted, [1.0] * (len(written) + 1) + [0.0] * pad))
    return samples


@pytest.mark.parametrize("files", ["{0}/a.en,{0}/a.de", "{0}/a.tsv"])
def test_pairs_against_naive_padding(files: str, root: pathlib.Path) -> None:
    folder = root / "pairs"
    files, expected = files.format(folder), pairs(folder, 5, 6)
    data = find_data(f"pairs:{files}?tokenizer={folder}/words.json&valid={files}")
    assert data.held_out is not None and data.about.startswith("60 pairs of ") and 20 < len(expected) < 60
    x, y, weights = next(iter(data.batches(PAIRS, 4, 0)))
    assert {value.dtype.name for value in x.values()} == {"int32"}
    assert (y.dtype.name, weights.dtype.name) == ("int32", "float32")
    seen = rows(taken(data.batches(PAIRS, 1, 0), 2 * len(expected)))
    assert sorted(seen[: len(expected)]) == sorted(seen[len(expected) :]) == sorted(expected)
    batches = taken(data.held_out(PAIRS, 7), 99)
    assert rows(batches) == expected  # in order of lines
    assert [len(batch[0]) for batch in batches[:-1]] == [7] * ((len(expected) - 1) // 7)


def test_held_out_pairs_are_not_trained_on(root: pathlib.Path) -> None:
    folder = root / "pairs"
    data = find_data(f"pairs:{folder}/a.tsv?tokenizer={folder}/words.json&held_out=0.3")
    assert data.held_out is not None
    out, whole = rows(taken(data.held_out(PAIRS, 4), 99)), pairs(folder, 5, 6)
    train = rows(taken(data.batches(PAIRS, 1, 0), len(whole) - len(out)))
    assert 4 <= len(out) <= 18 and sorted(out + train) == sorted(whole)
    assert find_data(f"pairs:{folder}/a.tsv?tokenizer={folder}/words.json&held_out=0").held_out is None


def test_tokenizers_are_trained_on_the_pairs(root: pathlib.Path) -> None:
    x, y, _ = find_data(f"pairs:{root}/pairs/a.tsv").example(translator(words=40, source=12, target=14), 6)
    assert 20 < max(x["source"].max(), y.max()) < 40


@pytest.mark.parametrize("kind", ["byte_bpe", "bpe", "wordpiece"])
def test_tokens_are_text_again_and_vocabularies_are_small(kind: vocabulary.TokenizerKind) -> None:
    lines = ["the quick brown fox", "the lazy dog and the quick dog"] * 5
    tokenizer = vocabulary.train(kind, 300, lambda: lines)
    assert vocabulary.size_of(tokenizer) <= 300
    for line, ids in zip(lines, vocabulary.encoded(tokenizer, lines), strict=True):
        assert tokenizer.decode(ids) == line and len(ids) < len(line)
    special = vocabulary.SPECIAL[kind]
    assert [tokenizer.token_to_id(token) for token in special] == list(range(len(special)))
    assert vocabulary.train(kind, 300, lambda: lines).to_str() == tokenizer.to_str()
    if kind != "byte_bpe":
        many = ["abcdefghijklmnopqrstuvwxyz" + chr(0x3042 + number) for number in range(50)]
        assert vocabulary.size_of(vocabulary.train(kind, 32, lambda: many)) <= 32


# ---- questions


def test_parts_of_a_long_text() -> None:
    """Nine words, four at a time, of which one is shared; the answer is whole in the third part alone."""
    context = " ".join(f"w{number}" for number in range(9))
    start = context.index("w6")
    asked = Question("who what w0", context, start, start + len("w6 w7"))
    parts = list(examples([asked], question_tokenizer(), 9, 2, 1, (2, 3)))
    head = [2, 25, 26, 3]  # The third word of the question is left out.
    texts = [[5, 6, 7, 8], [8, 9, 10, 11], [11, 12, 13]]
    assert [example.tokens for example in parts] == [[*head, *words, 3] for words in texts]
    assert [(example.start, example.end) for example in parts] == [(0, 0), (0, 0), (4, 5)]
    assert {example.text for example in parts} == {4}


@pytest.mark.parametrize(("start", "answer", "words"), [(3, "w2", (1, 1)), (0, "w1 w2", (0, 1)), (1, "1", (0, 0))])
def test_answers_within_words_are_the_words(start: int, answer: str, words: tuple[int, int]) -> None:
    asked = Question("who", "w1 w2 w3", start, start + len(answer))
    (example,) = examples([asked], question_tokenizer(), 12, 3, 1, (2, 3))
    assert (example.start - example.text, example.end - example.text) == words


def questions(root: pathlib.Path, options: str = "") -> str:
    files = root / "questions"
    return f"squad:{files}/train.json?tokenizer={files}/words.json&valid={files}/train.json{options}"


def test_samples_of_questions_against_the_answers(root: pathlib.Path) -> None:
    data = find_data(questions(root, "&stride=2"))
    assert data.held_out is not None
    batches = taken(data.held_out(SPANS, 4), 999)
    present, segments, numbers, answers = (np.concatenate([batch[i] for batch in batches]) for i in range(4))
    asked = read_questions(root / "questions" / "train.json", "")
    known, got = QUESTION_SPECIAL + QUESTION_WORDS, set()
    for row, line in enumerate([known[token] for token in sample] for sample in numbers):
        count, start_of_text = present[row].sum(), line.index("[SEP]") + 1
        pad = QUESTION_TOKENS - count
        assert present[row].tolist() == [1] * count + [0] * pad
        assert (line[0], line[count - 1], line[count:]) == ("[CLS]", "[SEP]", ["[PAD]"] * pad)
        assert segments[row].tolist() == [0] * start_of_text + [1] * (count - start_of_text) + [0] * pad
        start, end = answers[row]
        assert (start, end) == (0, 0) or start_of_text <= start <= end < count - 1
        got |= {" ".join(line[start : end + 1])} if end else set()
    assert got == {each.context[each.start : each.end] for each in asked if each.start >= 0}


def test_labels_of_questions_follow_the_model(root: pathlib.Path) -> None:
    """Is there an answer, or masked tokens, or tokens in the order of a permutation."""
    data = find_data(questions(root))
    assert data.held_out is not None
    spans = taken(data.held_out(SPANS, 999), 1)[0]
    x, labels = next(data.held_out(question_model("classes"), 999).as_numpy_iterator())
    np.testing.assert_array_equal(labels, spans[-1][:, 1] > 0)
    assert 0 < labels.mean() < 1
    changed, labels, weights = next(data.held_out(question_model("tokens"), 999).as_numpy_iterator())
    np.testing.assert_array_equal(labels, x["tokens"])
    np.testing.assert_array_equal(changed["tokens"][weights == 0], labels[weights == 0])
    assert 0.6 < (changed["tokens"][weights == 1] == 4).mean() < 0.95
    given, same, ordered = next(data.held_out(question_model("tokens", ordered=True), 999).as_numpy_iterator())
    np.testing.assert_array_equal(given["tokens"], same)
    np.testing.assert_array_equal(given["present"], changed["present"])
    np.testing.assert_array_equal(ordered, given["permutation"] > 0)
    for chosen in (weights, ordered):
        assert chosen.sum(1).min() >= 1 and 0.1 < chosen[labels > 4].mean() < 0.3
        assert not chosen[labels <= 4].any()  # Padding, and what stands between question and text.


def test_a_sixth_of_the_tokens_that_are_not_special_is_predicted_in_a_random_order() -> None:
    special = np.zeros((200, 40), bool)
    special[:, 30:] = special[:, 0] = True
    places = permutation(tf.constant(special), SEEDS).numpy()
    assert places.dtype == np.int32 and not places[special].any()
    assert {tuple(sorted(row[row > 0])) for row in places} == {(1, 2, 3, 4, 5)}  # 29 / 6
    firsts = np.bincount((places == 1).argmax(axis=1), minlength=40)[1:30]
    assert firsts.min() >= 1 and firsts.max() < 25


@pytest.mark.parametrize("candidates", [0, 1, 3, 9])
def test_at_least_one_token_is_predicted_unless_all_are_special(candidates: int) -> None:
    """Where all were special, they had the least draw, padding too, and were masked."""
    special = np.arange(12) >= candidates
    places = permutation(tf.constant(special), SEEDS).numpy()
    count = max(1, round(candidates / 6)) if candidates else 0
    assert sorted(places[places > 0]) == list(range(1, count + 1))
    changed, chosen = masked(tf.range(12), tf.constant(special), 99, 12, SEEDS)
    assert chosen.numpy().any() == bool(candidates) and not chosen.numpy()[special].any()
    assert candidates or changed.numpy().tolist() == list(range(12))


def test_masked_tokens_are_masked_replaced_or_left() -> None:
    changed, chosen = (part.numpy() for part in masked(tf.fill((4000,), 7), tf.zeros((4000,), tf.bool), 99, 50, SEEDS))
    assert 0.13 < chosen.mean() < 0.17
    assert 0.75 < (changed[chosen] == 99).mean() < 0.85
    assert 0.05 < (changed[chosen] == 7).mean() < 0.16  # Some of those replaced are, too.
    np.testing.assert_array_equal(changed[~chosen], 7)


# ---- the source text of the standard library

DIGITS = np.arange(23, dtype=np.uint8)


def test_source_files_are_in_order_without_tests_and_packages_and_each_is_in_one_part(tmp_path: pathlib.Path) -> None:
    left_out = ("site-packages/a.py", "test/a.py", "package_0/tests/a.py", "_sysconfigdata_linux.py", "notes.txt")
    for name in [*(f"package_{index % 3}/module_{index}.py" for index in range(40)), *left_out]:
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(f"x = {name}\n")
    names = [path.relative_to(tmp_path).as_posix() for path in text.source_files(tmp_path)]
    assert len(names) == 40 and names == sorted(names) and not {*names} & {*left_out}
    corpus = text.standard_library(0.3, root=tmp_path)
    train, held_out = (set(bytes(part).split(b"\0")) - {b""} for part in (corpus.train, corpus.held_out))
    assert train and held_out and not train & held_out
    assert train | held_out == {f"x = {name}\n".encode() for name in names}


def test_the_split_of_source_files_is_the_same_everywhere() -> None:
    """Python's own hash of a string changes from run to run."""
    held_out = [index for index in range(100) if text.is_held_out(f"module_{index}.py", 0.05)]
    assert held_out == [5, 30, 60, 63, 68, 73]


def test_windows_of_source_are_in_order_or_shuffled_by_a_seed() -> None:
    batches = [(x.numpy().tolist(), y.numpy().tolist()) for x, y in text.windows(DIGITS, 4, 2)]
    assert [len(x) for x, _ in batches] == [2, 2, 1]
    assert [pair for x, y in batches for pair in zip(x, y, strict=True)] == windows(DIGITS, 4)
    assert len(list(text.windows(DIGITS[:9], 4, 2))) == 1

    def passes(seed: int) -> list[list[int]]:
        dataset = text.windows(DIGITS, 4, 5, seed=seed, repeat=True)
        return [x.numpy()[:, 0].tolist() for x, _ in itertools.islice(dataset, 6)]

    first = passes(seed=1)
    assert first == passes(seed=1) != passes(seed=2)
    assert all(sorted(starts) == [0, 4, 8, 12, 16] for starts in first) and len(set(map(tuple, first))) > 1


@pytest.mark.parametrize(
    ("count", "repeat", "message"),
    [(4, False, r"4 bytes make 0 windows of 4 \+ 1 bytes; need 1"), (12, True, "12 bytes make 2 windows .* need 3")],
)
def test_too_short_text_is_refused(count: int, repeat: bool, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        text.windows(DIGITS[:count], 4, 3, repeat=repeat)
    with pytest.raises(ValueError, match="need 0 < fraction < 1"):
        text.standard_library(1.0)


def test_unigram_bits_per_byte() -> None:
    assert text.unigram_bits_per_byte(np.repeat(np.arange(256, dtype=np.uint8), 7), DIGITS) == pytest.approx(8)
    # Each count plus one: byte 0 has 512 of 767, each other byte 1 of 767.
    skewed = text.unigram_bits_per_byte(np.zeros(511, np.uint8), np.array([0, 9], np.uint8))
    assert skewed == pytest.approx((-math.log2(512 / 767) + math.log2(767)) / 2)
    assert text.bits_per_byte(math.log(256)) == pytest.approx(8)
