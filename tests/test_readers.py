"""Readers of files: the right samples, each once a pass, in an order that can be had again, and mistakes told."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tokenizers
from reading import (
    MNLI,
    NUMBERS,
    PAIR_SPECIAL,
    PAIR_WORDS,
    QUESTION_SPECIAL,
    QUESTION_TOKENS,
    QUESTION_WORDS,
    TOKENS,
    assert_resumes,
    assert_seeded,
    image_model,
    language_model,
    question_model,
    question_tokenizer,
    squad,
    taken,
    translator,
    write_images,
    write_mnli,
    write_pairs,
    write_questions,
    write_tokens,
)

import dapple_tf as dapple
from dapple_tf.models import bert
from dapple_tf.models.readers import sentences, tfrecords, vocabulary
from dapple_tf.models.readers.order import shuffled
from dapple_tf.models.registry import find_data
from dapple_tf.models.sources import ModelError

pytestmark = pytest.mark.usefixtures("_cache_of_readers")

IMAGES, WORDS, PAIRS, SPANS = image_model(), language_model(), translator(), question_model("spans")
OTHER = keras.Sequential([keras.Input((3,), name="tokens"), keras.layers.Embedding(9, 2)], name="other")
PAIR_FILE = "pairs:{0}/pairs/a.tsv?tokenizer={0}/pairs/words.json"
QUESTION_FILE = "squad:{0}/questions/train.json?tokenizer={0}/questions/words.json"
SEEDS = tf.constant([3, 5], tf.int64)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of files for each reader, and ``bad`` ones."""
    root = tmp_path_factory.mktemp("readers")
    for write in (write_images, write_tokens, write_pairs, write_questions, write_mnli):
        place = root / write.__name__.removeprefix("write_")
        place.mkdir()
        write(place)
    for name in ("records", "bad", "bad/empty"):
        (root / name).mkdir()
    tfrecords.write(root / "images", root / "records", shards=3)
    bad = root / "bad"
    good = (root / "records" / "train-00000-of-00003").read_bytes()
    changed = bytes([*good[:500], good[500] ^ 1, *good[501:]])  # Within the data of the first record.
    for name, content in (("good", good), ("cut", good[:-3]), ("data", changed), ("no_image", b""), ("missing", good)):
        (bad / name).mkdir()
        (bad / name / ("train-00000-of-00002" if name == "missing" else "train-00000-of-00001")).write_bytes(content)
    with tf.io.TFRecordWriter(str(bad / "no_image" / "train-00000-of-00001")) as writer:
        no_image = tf.train.Example()
        no_image.features.feature["image/class/label"].int64_list.value.append(1)
        writer.write(no_image.SerializeToString())
    for place, content in (
        ("page/ant/a.jpeg", b"<html>"),
        ("page/bee/a.jpeg", b"<html>"),
        ("cow/train/ant/a.png", b""),
        ("cow/val/cow/a.png", b""),
    ):
        (bad / place).parent.mkdir(parents=True)
        (bad / place).write_bytes(content)
    np.save(bad / "table.npy", np.zeros((2, 3), "int64"))
    (bad / "none.bin").touch()
    answered = squad(("who", "w1", "w1"), ("who", "w1", "w1"))
    for file, text in (
        ("1", "a\n"),
        ("2", "a\nb\n"),
        ("a.tsv", "a\tb\r\nno tabulator\n"),
        ("broken.json", "{"),
        ("qas.json", '{"data": [{"paragraphs": [{"context": "a"}]}]}'),
        ("none.json", squad(("who", "w1", "w1"))),
        ("at.json", answered.replace('"answer_start": 0', '"answer_start": 7')),
        ("train.tsv", "sentence1\tgold_label\n"),
        ("label/train.tsv", "sentence1\tsentence2\tgold_label\na\tb\tmaybe\n"),
    ):
        (bad / file).parent.mkdir(exist_ok=True)
        (bad / file).write_text(text)
    (bad / "latin.txt").write_bytes("über".encode("latin-1"))
    for name, known in (("no_end", ("<pad>", "<start>", "<unk>")), ("padded", ("<end>", "<start>", "<pad>"))):
        numbers = {token: number for number, token in enumerate(known)}
        tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, "<pad>")).save(str(bad / f"{name}.json"))
    return root


# ---- all readers

READERS: dict[str, tuple[str, keras.Model]] = {
    "images": ("images:{0}/images", IMAGES),
    "images, some held out": ("images:{0}/images/train?held_out=0.2", IMAGES),
    "records": ("tfrecords:{0}/records", IMAGES),
    "tokens": ("tokens:{0}/tokens/uint16.bin", WORDS),
    "text": ("text:{0}/tokens/a.txt?vocabulary=290", language_model(290)),
    "pairs": (PAIR_FILE, PAIRS),
    "questions": (QUESTION_FILE, SPANS),
    "masked tokens": (QUESTION_FILE, question_model("tokens")),
    "tokens in an order": (QUESTION_FILE, question_model("tokens", ordered=True)),
    "mnli": ("mnli:{0}/mnli?tokenizer={0}/mnli/words.json", question_model("3 classes")),
}


@pytest.mark.parametrize("name", READERS)
def test_order_is_seeded_and_a_resumed_run_sees_the_same_batches(name: str, root: pathlib.Path) -> None:
    """Workers of a cluster read them, too."""
    text, model = READERS[name]
    data = find_data(text.format(root))
    assert_seeded(functools.partial(data.batches, model, 4), 6)
    assert_resumes(lambda: data.batches(model, 4, 0), steps=11, done=4)
    dapple.on_workers(data.batches(model, 4, 0))


def rows(batches: list[list[np.ndarray]]) -> list[bytes]:
    return [b"".join(array[row].tobytes() for array in batch) for batch in batches for row in range(len(batch[0]))]


PLAIN = "augment=false"


@pytest.mark.parametrize(
    ("text", "model", "train", "held_out"),
    [
        (f"images:{{0}}/images?{PLAIN}", IMAGES, 21, 9),
        (f"images:{{0}}/images/train?{PLAIN}&held_out=0.2", IMAGES, 17, 4),
        (f"images:{{0}}/images/train?{PLAIN}", IMAGES, 21, None),
        (f"tfrecords:{{0}}/records?{PLAIN}", IMAGES, 21, 9),
        ("tokens:{0}/tokens/uint16.bin?held_out=0.3", WORDS, 14, 6),
        ("tokens:{0}/tokens/uint16.bin?held_out=0", WORDS, 20, None),
        ("tokens:{0}/tokens/uint16.bin?valid={0}/tokens/uint16.bin", WORDS, 20, 20),
        (PAIR_FILE + "&held_out=0", PAIRS, 28, None),
        (PAIR_FILE + "&valid={0}/pairs/a.en,{0}/pairs/a.de", PAIRS, 28, 28),
        (PAIR_FILE + "&held_out=0.3", PAIRS, 20, 8),
        (QUESTION_FILE + "&held_out=0.5", SPANS, 33, 34),
    ],
)
def test_each_sample_is_read_once_a_pass_and_held_out_ones_are_not_trained_on(
    text: str, model: keras.Model, train: int, held_out: int | None, root: pathlib.Path
) -> None:
    data = find_data(text.format(root))
    seen = rows(taken(data.batches(model, 1, 3), 2 * train))
    assert sorted(seen[:train]) == sorted(seen[train:]) and seen[:train] != seen[train:]
    assert len(set(seen)) == train
    if held_out is None:
        assert data.held_out is None
        return
    assert data.held_out is not None
    batches = taken(data.held_out(model, 4), 99)
    assert [len(batch[0]) for batch in batches[:-1]] == [4] * (len(batches) - 1)
    assert len(rows(batches)) == held_out
    assert "held_out=" not in text or not {*rows(batches)} & {*seen}


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("images", lambda: image_model(10)),
        ("tfrecords", lambda: image_model(10)),
        ("text", lambda: language_model(sequence=32)),
        ("tokens", lambda: language_model(sequence=32)),
        ("pairs", lambda: translator(words=32, source=6, target=7)),
        ("squad", bert.bert_tiny),
        ("mnli", bert.bert_tiny),
    ],
)
def test_each_reader_has_a_sample(name: str, make: Callable[[], keras.Model]) -> None:
    data, model = find_data(name), make()
    batch = data.example(model, 5)
    assert {len(array) for array in keras.tree.flatten(batch) if array is not None} == {5}
    assert batch[1].max() < model.output_shape[-1]
    assert data.held_out is not None and len(taken(data.held_out(model, 8), 2)) == 2


@pytest.mark.parametrize("seed", [0, -1, 2**63])
def test_samples_are_far_from_their_places(seed: int) -> None:
    """With seed 0 the first pass was almost in order, in which images of a class follow each other."""
    for turn in range(2):
        order = np.array(
            [int(shuffled(tf.constant(draw, tf.int64), 200, seed)) for draw in range(200 * turn, 200 * turn + 200)]
        )
        assert sorted(order) == list(range(200)) and np.abs(order - np.arange(200)).mean() == pytest.approx(67, rel=0.2)


# ---- images


@pytest.mark.parametrize("kind", ["images", "records"])
def test_images_have_the_labels_of_their_folders(kind: str, root: pathlib.Path) -> None:
    data = find_data(f"{kind.replace('records', 'tfrecords')}:{root}/{kind}?{PLAIN}&scale=bytes")
    for image, label in taken(data.batches(IMAGES, 1, 3), 21):
        assert image.shape == (1, 8, 8, 3) and image.dtype == np.float32 and label.dtype == np.int32
        assert image[..., 0].mean() == pytest.approx(40 + 60 * label[0], abs=3)  # JPEG isn't exact.


@pytest.mark.parametrize(
    ("shape", "scale", "left", "expected"),
    [
        ((56, 56, 3), "bytes", 12, lambda pixels: pixels),
        ((56, 28, 3), "bytes", 26, lambda pixels: pixels),
        ((56, 56, 1), "unit", 12, lambda pixels: pixels / 255),
        ((56, 56, 3), "signed", 12, lambda pixels: pixels / 127.5 - 1),
        ((56, 56, 3), "imagenet", 12, lambda pixels: (pixels / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]),
    ],
)
def test_the_centre_against_a_naive_crop(
    shape: tuple[int, int, int], scale: str, left: int, expected: Callable[[Any], Any], tmp_path: pathlib.Path
) -> None:
    """7/8 of the shorter side around the centre, scaled down by a whole factor."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 80, shape[2]), dtype=np.uint8)
    for name in ("train/a", "val/a"):
        (tmp_path / name).mkdir(parents=True)
        for number in range(2):
            (tmp_path / name / f"{number}.png").write_bytes(tf.io.encode_png(pixels).numpy())
    model = keras.Sequential([keras.Input(shape), keras.layers.Flatten(), keras.layers.Dense(1)])
    held_out = find_data(f"images:{tmp_path}?scale={scale}").held_out
    assert held_out is not None
    image = taken(held_out(model, 1), 1)[0][0][0]
    np.testing.assert_allclose(image, expected(pixels[4:60, left : left + shape[1]]), rtol=1e-4, atol=1e-4)


def test_crops_differ_from_pass_to_pass(root: pathlib.Path) -> None:
    means: dict[tuple[int, int], set[float]] = {}
    for image, label in taken(find_data(f"images:{root}/images?scale=bytes").batches(image_model(side=6), 1, 0), 84):
        key = (int(label[0]), round(float(image[0, ..., 1].mean()) / 30))
        means.setdefault(key, set()).add(round(float(image[0, ..., 2].mean()), 3))
    assert sum(len(crops) > 1 for crops in means.values()) > 15


@pytest.mark.parametrize(("kind", "classes"), [("cifar10", 10), ("cifar100", 100)])
def test_cifar_is_what_keras_loads(kind: str, classes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (classes, 32, 32, 3), dtype=np.uint8), np.arange(classes)[:, None]
    monkeypatch.setattr(getattr(keras.datasets, kind), "load_data", lambda: ((x, y), (x[:7], y[:7])))
    data, model = find_data(f"{kind}?scale=bytes"), image_model(classes, 32)
    assert data.held_out is not None
    images, labels = taken(data.held_out(model, 7), 1)[0]
    np.testing.assert_array_equal(images, x[:7])
    assert labels.tolist() == list(range(7))
    for image, label in taken(data.batches(model, 1, 0), 5):  # Shifted by at most four pixels, and half mirrored.
        padded = np.pad(x[label[0]], [(4, 4), (4, 4), (0, 0)])
        shifts = (padded[a : a + 32, b : b + 32] for a in range(9) for b in range(9))
        assert any((image[0] == shift[:, ::way]).all() for shift in shifts for way in (1, -1))
    monkeypatch.setattr(getattr(keras.datasets, kind), "load_data", lambda: tf.io.read_file("/no/such").numpy())
    with pytest.raises(ModelError, match=rf"keras\.datasets\.{kind} can't be loaded: .*/no/such"):
        find_data(kind)


# ---- text


@pytest.mark.parametrize("file", ["uint8.bin", "int64.bin", "uint32.npy"])
def test_windows_of_tokens_against_slices(file: str, root: pathlib.Path) -> None:
    path = root / "tokens" / file
    data = find_data(f"tokens:{path}?valid={path}" + (f"&dtype={path.stem}" if path.suffix == ".bin" else ""))
    assert data.held_out is not None
    x, y = (np.concatenate(arrays) for arrays in zip(*taken(data.held_out(WORDS, 8), 9), strict=True))
    assert x.dtype == y.dtype == np.int32
    np.testing.assert_array_equal(x, NUMBERS[:100].reshape(20, TOKENS))
    np.testing.assert_array_equal(y, NUMBERS[1:101].reshape(20, TOKENS))


def test_a_file_of_tokens_is_not_loaded(tmp_path: pathlib.Path) -> None:
    """A file of 40 GB is a hole, apart from its last tokens."""
    with (tmp_path / "large.bin").open("wb") as file:
        file.seek(40 * 10**9)
        file.write(np.arange(11, dtype="uint16").tobytes())
    data = find_data(f"tokens:{tmp_path}/large.bin")
    assert data.about.startswith("20,000,000,011 tokens") and not data.example(WORDS, 2)[0].any()


def test_text_is_bytes_of_files_in_order_or_tokens(root: pathlib.Path, tmp_path: pathlib.Path) -> None:
    folder = root / "tokens"
    content = b"".join((folder / name).read_bytes() + b"\0" for name in ("more/a.txt", "more/b.txt", "a.txt"))
    data = find_data(f"text:{folder}/more,{folder}/a.txt?valid={folder}/more")
    x, _, _ = data.example(language_model(sequence=len(content) // 2 - 1), 2)
    assert sorted(bytes(row.tolist()) for row in x) == sorted(
        content[start : start + len(content) // 2 - 1] for start in (0, len(content) // 2 - 1)
    )
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "cat": 1, "<unk>": 2, "<end>": 3}, "<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.enable_truncation(2)  # A file's own truncation is for its model.
    words.save(str(tmp_path / "words.json"))
    (tmp_path / "a.txt").write_text("the cat the cat\nthe dog\n" * 2)
    own = find_data(f"text:{tmp_path}/a.txt?tokenizer={tmp_path}/words.json&held_out=0")
    assert {*map(tuple, own.example(language_model(4, 6), 4)[0].tolist())} == {(0, 1, 0, 1, 0, 2)}


@pytest.mark.parametrize("size", [300, 40])
def test_tokens_are_text_again_and_vocabularies_are_small(size: int) -> None:
    lines = ["the quick brown fox", "the lazy dog and the quick dog"] * 5
    tokenizer = vocabulary.trained(iter(lines), size, "")
    assert vocabulary.size_of(tokenizer) <= size
    for line, ids in zip(lines, vocabulary.encoded(tokenizer, lines), strict=True):
        assert tokenizer.decode(ids) == line and len(ids) < len(line)
    assert vocabulary.trained(iter(lines), size, "").to_str() == tokenizer.to_str()
    many = ["abcdefghijklmnopqrstuvwxyz" + chr(0x3042 + number) for number in range(50)]
    assert vocabulary.size_of(vocabulary.trained(iter(many), 32, "")) <= 32


def test_pairs_against_naive_padding(root: pathlib.Path) -> None:
    number = {word: len(PAIR_SPECIAL) + index for index, word in enumerate(PAIR_WORDS)}
    expected = []
    for line in (root / "pairs" / "a.tsv").read_text().splitlines():
        read, written = ([number[word] for word in half.split()] for half in line.split("\t"))
        pad, missing = 6 - len(written) - 1, 5 - len(read)
        if read and missing >= 0 and pad >= 0:
            shifted = [2, *written] + [0] * pad, [*written, 3] + [0] * pad
            expected.append((read + [0] * missing, *shifted, [1.0] * (len(written) + 1) + [0.0] * pad))
    files = f"{root}/pairs/a.en,{root}/pairs/a.de"
    data = find_data(f"pairs:{files}?tokenizer={root}/pairs/words.json&valid={files}")
    assert data.held_out is not None and data.about.startswith("60 pairs of ")
    columns = zip(*taken(data.held_out(PAIRS, 7), 99), strict=True)
    got = [np.concatenate(arrays) for arrays in columns]
    assert [array.dtype.name for array in got] == ["int32", "int32", "int32", "float32"]
    assert [tuple(array.tolist() for array in row) for row in zip(*got, strict=True)] == expected


# ---- pairs of sentences


def examples(*questions: sentences.Pair, sequence: int) -> list[sentences.Example]:
    return list(sentences._examples(questions, question_tokenizer(), sequence, [("first", 2), ("separator", 3)]))


def test_parts_of_a_long_text() -> None:
    """Nine words, four at a time, of which two are shared; the answer is whole in one part alone."""
    context = " ".join(f"w{number}" for number in range(9))
    start = context.index("w6")
    parts = examples(sentences.Pair("who what w0", context, 1, start, start + len("w6 w7")), sequence=9)
    head = [2, 25, 3]  # A question has at most one token here.
    texts = [[5, 6, 7, 8, 9], [8, 9, 10, 11, 12], [11, 12, 13]]
    assert [tokens for tokens, _ in parts] == [[*head, *words, 3] for words in texts]
    assert [numbers for _, numbers in parts] == [(3, 0, 0, 0), (3, 6, 7, 1), (3, 3, 4, 1)]


@pytest.mark.parametrize(("start", "answer", "words"), [(3, "w2", (1, 1)), (0, "w1 w2", (0, 1)), (1, "1", (0, 0))])
def test_answers_within_words_are_the_words(start: int, answer: str, words: tuple[int, int]) -> None:
    ((_, (second, first, last, _)),) = examples(
        sentences.Pair("who", "w1 w2 w3", 1, start, start + len(answer)), sequence=12
    )
    assert (first - second, last - second) == words


def test_samples_of_questions_against_the_answers(root: pathlib.Path) -> None:
    data = find_data(f"{QUESTION_FILE}&valid={{0}}/questions/train.json".format(root))
    assert data.held_out is not None
    batches = taken(data.held_out(SPANS, 4), 999)
    present, segments, numbers, answers = (np.concatenate([batch[i] for batch in batches]) for i in range(4))
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
    pairs = sentences._questions(json.loads((root / "questions" / "train.json").read_text())["data"])
    assert got == {pair.second[pair.start : pair.end] for pair in pairs if pair.end}


def test_labels_follow_the_model(root: pathlib.Path) -> None:
    """Is there an answer, or masked tokens, or tokens in the order of a permutation."""
    held_out = find_data(f"{QUESTION_FILE}&valid={{0}}/questions/train.json".format(root)).held_out
    assert held_out is not None
    spans = taken(held_out(SPANS, 999), 1)[0]
    x, labels = next(held_out(question_model("2 classes"), 999).as_numpy_iterator())
    np.testing.assert_array_equal(labels, spans[-1][:, 1] > 0)
    assert 0 < labels.mean() < 1
    changed, labels, weights = next(held_out(question_model("tokens"), 999).as_numpy_iterator())
    np.testing.assert_array_equal(labels, x["tokens"])
    np.testing.assert_array_equal(changed["tokens"][weights == 0], labels[weights == 0])
    given, same, ordered = next(held_out(question_model("tokens", ordered=True), 999).as_numpy_iterator())
    np.testing.assert_array_equal(given["tokens"], same)
    np.testing.assert_array_equal(ordered, given["permutation"] > 0)
    for chosen in (weights, ordered):
        assert chosen.sum(1).min() >= 1 and 0.1 < chosen[labels > 4].mean() < 0.3
        assert not chosen[labels <= 4].any()  # Padding, and what stands between question and text.


def test_mnli_has_the_labels_of_glue(root: pathlib.Path) -> None:
    held_out = find_data(READERS["mnli"][0].format(root)).held_out
    assert held_out is not None
    x, labels = next(held_out(READERS["mnli"][1], 99).as_numpy_iterator())
    assert labels.tolist() == [0, 1, 2] * 2 and len(MNLI) == 3
    assert x["tokens"][0].tolist()[:9] == [2, 5, 6, 3, 5, 7, 1, 8, 3]  # A quotation mark is a word, and unknown.


def test_a_sixth_of_the_tokens_is_predicted_in_a_random_order() -> None:
    special = np.zeros((200, 40), bool)
    special[:, 30:] = special[:, 0] = True
    places = sentences.permutation(tf.constant(special), SEEDS).numpy()
    assert places.dtype == np.int32 and not places[special].any()
    assert {tuple(sorted(row[row > 0])) for row in places} == {(1, 2, 3, 4, 5)}  # 29 / 6
    firsts = np.bincount((places == 1).argmax(axis=1), minlength=40)[1:30]
    assert firsts.min() >= 1 and firsts.max() < 25


@pytest.mark.parametrize("candidates", [0, 1, 3, 9])
def test_at_least_one_token_is_predicted_unless_all_are_special(candidates: int) -> None:
    special = np.arange(12) >= candidates
    places = sentences.permutation(tf.constant(special), SEEDS).numpy()
    count = max(1, round(candidates / 6)) if candidates else 0
    assert sorted(places[places > 0]) == list(range(1, count + 1))
    changed, chosen = sentences.masked(tf.range(12), tf.constant(special), 99, 12, SEEDS)
    assert chosen.numpy().any() == bool(candidates) and not chosen.numpy()[special].any()
    assert candidates or changed.numpy().tolist() == list(range(12))


def test_masked_tokens_are_masked_replaced_or_left() -> None:
    masked = sentences.masked(tf.fill((4000,), 7), tf.zeros((4000,), tf.bool), 99, 50, SEEDS)
    changed, chosen = (part.numpy() for part in masked)
    assert 0.13 < chosen.mean() < 0.17
    assert 0.75 < (changed[chosen] == 99).mean() < 0.85
    assert 0.05 < (changed[chosen] == 7).mean() < 0.16  # Some of the replaced ones are, too.
    np.testing.assert_array_equal(changed[~chosen], 7)


# ---- mistakes


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("images:/none", None, r"^images:/none: there is no folder /none"),
        ("images:{0}/bad/empty", None, "put the images of each class into a folder there"),
        ("images:{0}/bad/cow", None, "cow is no class: train has no folder cow"),
        ("images:{0}/bad/page", image_model(2), r"can't be read: .*not a JPEG, PNG, GIF or BMP image.*a\.jpeg"),
        ("images:{0}/images", image_model(2), r"the data have 3 classes, but 'small' tells 2 apart; .* classes=3"),
        ("images:{0}/images", image_model(channels=4), "takes images of 4 channels; images from files have 1 or 3"),
        ("images:{0}/images?augmnt=false", None, r"no option augmnt; did you mean 'augment'\?; images takes"),
        ("images:{0}/images?augment=true&augment=false", None, "option augment is given twice"),
        ("images:{0}/images?held_out=1", None, "held_out is 1.0; need 0 <= held_out < 1"),
        ("images:{0}/images?held_out=few", None, "held_out is 'few'; need a float"),
        ("images:{0}/images?scale=byte", None, "scale is 'byte'; use one of imagenet, unit, signed, bytes"),
        ("images:a,b", None, "images takes one folder, not 2"),
        ("cifar10:a", None, "cifar10 takes no path"),
        ("tfrecords:{0}/bad/empty", None, r"no files train-00000-of-00001 and so on; python -m dapple_tf.tools.make"),
        ("tfrecords:{0}/bad/missing", None, r"has 1 of 2 files train-...; copy the missing"),
        ("tfrecords:{0}/bad/cut", IMAGES, "truncated record at"),
        ("tfrecords:{0}/bad/data", IMAGES, r"corrupted record at 12"),
        (
            "tfrecords:{0}/bad/good?first_label=5",
            IMAGES,
            r"label isn.*t from 5 to 7, but\] \[[123]\] \[in\] .*of-00001",
        ),
        ("tfrecords:{0}/bad/good", image_model(1), r"label isn.*t from 1 to 1, but\] \[[23]\]"),
        ("tfrecords:{0}/bad/no_image", IMAGES, r"not a JPEG, PNG, GIF or BMP image.*no_image/train-00000-of-00001"),
        ("tokens:{0}/none.bin", None, r"there is no file .*none\.bin"),
        ("tokens:{0}/tokens/uint8.bin", None, "has 103 bytes, which isn't a multiple of 2, the bytes of a uint16"),
        ("tokens:{0}/bad/table.npy", None, r"has int64 of shape \(2, 3\); tokens are whole numbers of one axis"),
        (
            "tokens:{0}/tokens/uint16.bin",
            language_model(50),
            "there is a token 102, but 'language' knows 0 to 49; build it with",
        ),
        ("tokens:{0}/tokens/uint16.bin", language_model(sequence=200), r"103 tokens make no window of 200 \+ 1"),
        ("text:{0}/bad/empty", None, r"there are no files \*\.txt in"),
        ("text:{0}/bad/latin.txt?vocabulary=300", None, r"latin\.txt isn't UTF-8 text behind line 0"),
        ("pairs:{0}/bad/2,{0}/bad/1", None, r"1 ends before line 2, .* translations line by line"),
        ("pairs:{0}/bad/a.tsv", None, r"line 2 of .*a\.tsv has 1 columns; write the source, one tabulator"),
        ("pairs:{0}/pairs/a.tsv,b,c", None, r"give one file with two columns, or two files, not 3"),
        ("pairs:{0}/pairs/a.tsv?tokenizer=a&vocabulary=3", PAIRS, "tokenizer and vocabulary are both given"),
        ("pairs:{0}/pairs/a.tsv", OTHER, r"are for models of source and target .*, but 'other' takes tokens"),
        ("pairs:{0}/pairs/a.tsv?tokenizer={0}/bad/broken.json", PAIRS, "broken.json isn't a tokenizer's JSON file"),
        ("pairs:{0}/pairs/a.tsv?tokenizer={0}/bad/no_end.json", PAIRS, "the tokenizer has none of the tokens <end>"),
        ("pairs:{0}/pairs/a.tsv?tokenizer={0}/bad/padded.json", PAIRS, "padding is token 2; models take token 0"),
        (PAIR_FILE, translator(24, 1, 2), "none of 60 pairs has 1 to 1 tokens and 1"),
        (PAIR_FILE, translator(9), "the data have 24 tokens, but the model knows 9; use a tokenizer of at most 9"),
        ("pairs:{0}/pairs/a.tsv?vocabulary=5", PAIRS, "a vocabulary of 5 is too small for a tokenizer; use at least 7"),
        ("squad:{0}/bad/qas.json", None, "isn't in SQuAD's format, .*KeyError 'qas'"),
        ("squad:{0}/bad/broken.json", None, "isn't in SQuAD's format, .*JSONDecodeError"),
        ("squad:{0}/bad/none.json?tokenizer={0}/questions/words.json", SPANS, "there are 1 samples; need at least 2"),
        ("squad:{0}/bad/at.json", None, "'who' is answered by characters 7 to 9 of 2"),
        (QUESTION_FILE, question_model("other"), r"'answers' gives \(12, 3\) .* logits .*\(2, 12\) \(spans\)"),
        (QUESTION_FILE, question_model("spans", ordered=True), r"gives \(2, 12\) .* logits \(12, 27\) \(ordered\)$"),
        (QUESTION_FILE, question_model("3 classes"), r"gives \(3,\) .* logits .*\(2,\) \(classes\)"),
        (QUESTION_FILE, OTHER, "tokens and segments and present"),
        ("mnli:{0}/bad", None, "train.tsv has no column sentence2 in its first line"),
        ("mnli:{0}/bad/label", None, "line 2 of .*train.tsv has label 'maybe', not one of contradiction, entailment"),
        (READERS["mnli"][0], SPANS, r"gives \(2, 12\) .* logits \(12, 27\) \(masked\), \(3,\) \(classes\)$"),
    ],
)
def test_mistakes_are_told(name: str, model: keras.Model | None, message: str, root: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=message):
        data = find_data(name.format(root))
        assert model is not None, "the files were taken"
        data.example(model, 7)
