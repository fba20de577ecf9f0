"""What holds of all readers: an order that can be had again, samples of their own, and mistakes that are told."""

from __future__ import annotations

import functools
import pathlib
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf
import tokenizers
from reading import (
    assert_resumes,
    assert_seeded,
    image_model,
    language_model,
    question_model,
    squad,
    translator,
    write_images,
    write_pairs,
    write_questions,
    write_tokens,
)

from dapple_tf.models import bert
from dapple_tf.models.readers import records_writer
from dapple_tf.models.registry import find_data
from dapple_tf.models.sources import ModelError

pytestmark = pytest.mark.usefixtures("_cache_of_readers")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of files for each reader, and ``bad`` ones."""
    root = tmp_path_factory.mktemp("readers")
    for write in (write_images, write_tokens, write_pairs, write_questions):
        place = root / write.__name__.removeprefix("write_")
        place.mkdir()
        write(place)
    for name in ("records", "bad", "bad/empty"):
        (root / name).mkdir()
    records_writer.write(root / "images" / "train", root / "records", "train", shards=3, seed=5)
    bad = root / "bad"
    _bad_images(bad)
    _bad_records(bad, (root / "records" / "train-00000-of-00003").read_bytes())
    np.save(bad / "table.npy", np.zeros((2, 3), "int64"))
    (bad / "latin.txt").write_bytes("über".encode("latin-1"))
    for name, content in (("1", b"a\n"), ("2", b"a\nb\n")):
        (bad / name).write_bytes(content)
    (bad / "a.tsv").write_text("a\tb\r\nno tabulator\n")
    (bad / "broken.json").write_text("{")
    for name, known in (("no_end", ("<pad>", "<start>", "<unk>")), ("padded", ("<end>", "<start>", "<pad>"))):
        numbers = {token: number for number, token in enumerate(known)}
        unknown = "<unk>" if "<unk>" in known else "<pad>"
        tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unknown)).save(str(bad / f"{name}.json"))
    for name, content in (
        ("qas", '{"data": [{"paragraphs": [{"context": "a"}]}]}'),
        ("none", '{"data": []}'),
        ("at", squad(("who", "w1", "w1"), ("who", "w1", "w1")).replace('"answer_start": 0', '"answer_start": 7')),
    ):
        (bad / f"squad_{name}.json").write_text(content)
    return root


def _bad_images(bad: pathlib.Path) -> None:
    (bad / "page" / "ant").mkdir(parents=True)
    (bad / "page" / "ant" / "a.jpeg").write_bytes(b"<html>not found</html>")
    (bad / "cow" / "train" / "ant").mkdir(parents=True)
    (bad / "cow" / "train" / "ant" / "a.png").write_bytes(b"")
    (bad / "cow" / "val" / "cow").mkdir(parents=True)


def _bad_records(bad: pathlib.Path, good: bytes) -> None:
    data = bytearray(good)
    data[500] ^= 1  # Within the data of the first record.
    label = tf.train.Feature(int64_list=tf.train.Int64List(value=[1]))
    image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"<html>"]))
    contents = {"cut": good[:-3], "data": bytes(data), "good": good}
    for name, content in contents.items():
        (bad / f"records_{name}").mkdir()
        (bad / f"records_{name}" / "train-00000-of-00001").write_bytes(content)
    (bad / "records_missing").mkdir()
    (bad / "records_missing" / "train-00000-of-00002").write_bytes(good)
    for name, features in (
        ("no_image", {"image/class/label": label}),
        ("page", {"image/encoded": image, "image/class/label": label}),
    ):
        (bad / f"records_{name}").mkdir()
        with tf.io.TFRecordWriter(str(bad / f"records_{name}" / "train-00000-of-00001")) as writer:
            writer.write(tf.train.Example(features=tf.train.Features(feature=features)).SerializeToString())


IMAGES, WORDS, PAIRS, SPANS = image_model(), language_model(), translator(), question_model("spans")
PAIR_FILE = "pairs:{0}/pairs/a.tsv?tokenizer={0}/pairs/words.json"
QUESTION_FILE = "squad:{0}/questions/train.json?tokenizer={0}/questions/words.json"
OTHER = keras.Sequential([keras.Input((3,), name="tokens"), keras.layers.Embedding(9, 2)], name="other")

READERS: dict[str, tuple[str, keras.Model]] = {
    "images": ("images:{0}/images", IMAGES),
    "images, kept": ("images:{0}/images?cache=file", IMAGES),
    "records": ("tfrecords:{0}/records", IMAGES),
    "tokens": ("tokens:{0}/tokens/uint16.bin", WORDS),
    "text": ("text:{0}/tokens/a.txt?vocabulary=280", language_model(280)),
    "pairs": (PAIR_FILE, PAIRS),
    "questions": (QUESTION_FILE, SPANS),
    "masked tokens": (QUESTION_FILE, question_model("tokens")),
    "tokens in an order": (QUESTION_FILE, question_model("tokens", ordered=True)),
}


@pytest.mark.parametrize("name", READERS)
def test_order_is_seeded_and_a_resumed_run_sees_the_same_batches(name: str, root: pathlib.Path) -> None:
    text, model = READERS[name]
    data = find_data(text.format(root))
    assert_seeded(functools.partial(data.batches, model, 4), 6)
    assert_resumes(lambda: data.batches(model, 4, 0), steps=11, done=4)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("images", lambda: image_model(10)),
        ("tfrecords", lambda: image_model(10)),
        ("text", lambda: language_model(sequence=32)),
        ("tokens", lambda: language_model(sequence=32)),
        ("pairs?held_out=0.1", lambda: translator(words=32, source=6, target=7)),
        ("squad", bert.bert_tiny),
    ],
)
def test_each_reader_has_a_sample(name: str, make: Callable[[], keras.Model]) -> None:
    data, model = find_data(name), make()
    batch = data.example(model, 5)
    assert {len(array) for array in keras.tree.flatten(batch) if array is not None} == {5}
    assert batch[1].max() < model.output_shape[-1]
    assert data.held_out is not None and len(list(data.held_out(model, 8))) > 1


@pytest.mark.parametrize(
    ("name", "model", "message"),
    [
        ("images:/none", None, r"^images:/none: there is no folder /none"),
        ("images:{0}/bad/empty", None, "has no folders; put the images of each class into a folder"),
        ("images:{0}/bad/cow", None, "cow is no class: train has no folder cow"),
        ("images:{0}/bad/page", IMAGES, r"can't be read: .*not a JPEG, PNG, GIF or BMP image.*a\.jpeg"),
        ("images:{0}/images", image_model(2), r"the data have 3 classes, but 'small' tells 2 apart; .* classes=3"),
        ("images:{0}/images", image_model(channels=4), "takes images of 4 channels; images from files have 1 or 3"),
        ("images:{0}/images?augmnt=false", None, r"no option augmnt; did you mean 'augment'\?; images takes"),
        ("images:{0}/images?augment=true&augment=false", None, "option augment is given twice"),
        ("tfrecords:{0}/bad/empty", None, r"no files train-00000-of-00001 and so on; python -m dapple_tf.tools.make"),
        ("tfrecords:{0}/bad/records_missing", None, r"has 1 of 2 files train-...; number 1 is missing"),
        ("tfrecords:{0}/bad/records_cut", None, "isn't an uncompressed TFRecord file, or is damaged or cut"),
        ("tfrecords:{0}/bad/records_data", IMAGES, r"corrupted record at 12|is no tf.train.Example"),
        ("tfrecords:{0}/bad/records_good?first_label=5", IMAGES, r"has label [123], but a model of 3 classes takes 5"),
        ("tfrecords:{0}/bad/records_good", image_model(1), r"has label [23], but a model of 1 |isn't one of 1 classes"),
        ("tfrecords:{0}/bad/records_no_image", IMAGES, r"the record at byte 0 of .* has no bytes image/encoded"),
        ("tfrecords:{0}/bad/records_page", IMAGES, r"not a JPEG, PNG, GIF or BMP image.*of-00001.*at byte.*0"),
        ("tokens:{0}/none.bin", None, r"there is no file .*none\.bin"),
        ("tokens:{0}/tokens/uint8.bin", None, "has 103 bytes, which isn't a multiple of 2, the bytes of a uint16"),
        ("tokens:{0}/bad/table.npy", None, r"has int64 of shape \(2, 3\); tokens are whole numbers of one axis"),
        ("tokens:{0}/tokens/uint16.bin", language_model(50), r"token 50 of .* is 50, but 'language' knows 50; build"),
        ("tokens:{0}/tokens/uint16.bin", language_model(sequence=200), r"98 tokens of .* make no window of 200 \+ 1"),
        ("text:{0}/bad/empty", None, r"there are no files \*\.txt in"),
        ("text:{0}/bad/latin.txt?vocabulary=300", None, r"latin\.txt isn't UTF-8 text: .*; leave out the tokenizer"),
        ("pairs:{0}/bad/2,{0}/bad/1", None, r"2 has 2 lines, .*1 has 1; they must be translations line by line"),
        ("pairs:{0}/bad/a.tsv", None, r"line 2 of .*a\.tsv has 1 columns; write the source, one tabulator"),
        ("pairs:{0}/pairs/a.tsv,b,c", None, r"give one file with two columns, or two files, not 3"),
        ("pairs:{0}/pairs/a.tsv?tokenizer=a&vocabulary=3", None, "tokenizer and vocabulary are both given"),
        ("pairs:{0}/pairs/a.tsv", OTHER, r"are for models of source and target .*, but 'other' takes tokens"),
        ("pairs:{0}/pairs/a.tsv?tokenizer={0}/bad/broken.json", PAIRS, "broken.json isn't a tokenizer's JSON file"),
        ("pairs:{0}/pairs/a.tsv?tokenizer={0}/bad/no_end.json", PAIRS, "the tokenizer has none of the tokens <end>"),
        ("pairs:{0}/pairs/a.tsv?tokenizer={0}/bad/padded.json", PAIRS, "padding is token 2; models take token 0"),
        (PAIR_FILE, translator(24, 1, 2), "none of 57 pairs has 1 to 1 tokens and 1"),
        ("pairs:{0}/pairs/a.tsv?vocabulary=5", PAIRS, "a vocabulary of 5 is too small for a tokenizer of kind bpe"),
        ("squad:{0}/bad/squad_qas.json", None, "isn't in SQuAD's format, .*KeyError 'qas'"),
        ("squad:{0}/bad/squad_none.json", None, "has 0 questions; need at least 2"),
        ("squad:{0}/bad/squad_at.json", None, "7 to 9 of a"),
        (QUESTION_FILE, question_model("other"), r"'answers' gives \[12, 3\]; questions are for logits"),
        (QUESTION_FILE, question_model("spans", ordered=True), r"gives \[2, 12\]; .* 'permutation' only the last$"),
        (QUESTION_FILE, question_model("spans", 9), "the data have 27 tokens, but 'answers' knows 9"),
        (QUESTION_FILE + "&question=8", SPANS, "a question takes 8 and 3 are special, which leaves 1 of the text"),
        (QUESTION_FILE, OTHER, "tokens and segments and present"),
    ],
)
def test_mistakes_are_told(name: str, model: keras.Model | None, message: str, root: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=message):
        data = find_data(name.format(root))
        assert model is not None, "the files were taken"
        data.example(model, 7)
