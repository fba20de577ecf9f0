"""Folders of images and TFRecord files: the right pixels and labels, in an order that can be had again."""

from __future__ import annotations

import functools
import itertools
import pathlib
import struct

import keras
import numpy as np
import pytest
import tensorflow as tf
from reading import assert_equal, assert_resumes, assert_seeded, image_model, taken

from dapple_tf.models.readers import records_writer, tfrecords
from dapple_tf.models.readers.images import listed
from dapple_tf.models.readers.options import Request
from dapple_tf.models.readers.pixels import ImageOptions, evaluation_image
from dapple_tf.models.registry import find_data
from dapple_tf.models.sources import ModelError

CLASSES = ("ant", "bee", "cat")
pytestmark = pytest.mark.usefixtures("_cache_of_readers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Images of ImageNet's layout, of several sizes and formats; red tells the class, green the number."""
    root = tmp_path_factory.mktemp("images")
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


@pytest.fixture(scope="module")
def records(folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    root = tmp_path_factory.mktemp("records")
    records_writer.write(folder / "train", root, "train", shards=3, seed=5)
    records_writer.write(folder / "val", root, "validation", shards=2, seed=None)
    return root


MODEL = image_model()


def name_of(kind: str, folder: pathlib.Path, records: pathlib.Path, options: str = "") -> str:
    return f"{kind}:{folder if kind == 'images' else records}{options}"


kinds = pytest.mark.parametrize("kind", ["images", "tfrecords"])


@pytest.mark.slow
@kinds
def test_batches_are_endless_full_seeded_and_have_every_image_once_a_pass(
    kind: str, folder: pathlib.Path, records: pathlib.Path
) -> None:
    data = find_data(name_of(kind, folder, records, "?augment=false&scale=bytes"))
    images, labels = next(iter(data.batches(MODEL, 4, 0)))
    assert (images.shape, images.dtype) == ((4, 8, 8, 3), tf.float32)
    assert (labels.shape, labels.dtype) == ((4,), tf.int32)
    assert_seeded(functools.partial(data.batches, MODEL, 4), 6)
    seen = taken(data.batches(MODEL, 1, 3), 42)  # 21 images: two passes
    keys = [(int(label[0]), round(float(image[0, 2, 2, 1]) / 30)) for image, label in seen]
    everything = sorted(itertools.product(range(3), range(7)))
    assert sorted(keys[:21]) == sorted(keys[21:]) == everything
    assert keys[:21] != keys[21:]
    reds = {int(label[0]): round(float(image[0, ..., 0].mean())) for image, label in seen}
    assert all(abs(red - (40 + 60 * label)) < 3 for label, red in reds.items())  # JPEG isn't exact.


@pytest.mark.few(1)
@kinds
@pytest.mark.parametrize("cache", ["none", pytest.param("file", marks=pytest.mark.slow)])
def test_a_resumed_run_sees_the_same_crops(kind: str, cache: str, folder: pathlib.Path, records: pathlib.Path) -> None:
    def make() -> tf.data.Dataset:
        return find_data(name_of(kind, folder, records, f"?cache={cache}")).batches(MODEL, 4, 0)

    assert_resumes(make, steps=9, done=3)


@kinds
def test_evaluation_is_in_order_of_names_and_whole(kind: str, folder: pathlib.Path, records: pathlib.Path) -> None:
    data = find_data(name_of(kind, folder, records))
    assert data.held_out is not None
    batches = taken(data.held_out(MODEL, 4), 9)
    assert [len(labels) for _, labels in batches] == [4, 4, 1]
    assert np.concatenate([labels for _, labels in batches]).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len(data.held_out(MODEL, 4)) == 3
    paths = listed(folder / "val", "").paths
    expected = [evaluation_image(tf.io.read_file(path), (8, 8, 3), ImageOptions()) for path in paths]
    np.testing.assert_array_equal(np.concatenate([images for images, _ in batches]), expected)


@pytest.mark.few(1)
@pytest.mark.slow
@kinds
def test_kept_images(kind: str, folder: pathlib.Path, records: pathlib.Path) -> None:
    """In memory they are as they were; decoded ones in a file are nearly so, and the same again."""
    name = name_of(kind, folder, records, "?scale=bytes")
    plain, memory, file, again = (find_data(f"{name}{more}") for more in ("", "&cache=memory", *["&cache=file"] * 2))
    expected = taken(plain.batches(MODEL, 4, 0), 6)
    assert_equal(taken(memory.batches(MODEL, 4, 0), 6), expected)
    kept = taken(file.batches(MODEL, 4, 0), 6)
    assert_equal(taken(again.batches(MODEL, 4, 0), 6), kept)
    assert plain.held_out is not None and file.held_out is not None
    for (_, wanted), (_, labels) in zip(expected, kept, strict=True):
        np.testing.assert_array_equal(labels, wanted)
    for (wanted, _), (images, _) in zip(
        taken(plain.held_out(MODEL, 9), 1), taken(file.held_out(MODEL, 9), 1), strict=True
    ):
        np.testing.assert_allclose(images[..., :2], wanted[..., :2], atol=6)  # Blue has lines, which differ.


def test_records_and_folders_give_the_same_evaluation(folder: pathlib.Path, records: pathlib.Path) -> None:
    one, two = (find_data(name_of(kind, folder, records)).held_out for kind in ("images", "tfrecords"))
    assert one is not None and two is not None
    assert_equal(taken(one(MODEL, 5), 9), taken(two(MODEL, 5), 9))


def test_the_centre_against_a_naive_crop() -> None:
    """7/8 of the shorter side around the centre, scaled down by a whole factor."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 80, 3), dtype=np.uint8)
    image = evaluation_image(tf.io.encode_png(pixels), (56, 56, 3), ImageOptions(scale="bytes"))
    np.testing.assert_array_equal(image, pixels[4:60, 12:68].astype("float32"))
    tall = evaluation_image(tf.io.encode_png(pixels), (56, 28, 3), ImageOptions(scale="bytes"))
    np.testing.assert_array_equal(tall, pixels[4:60, 26:54].astype("float32"))
    grey = evaluation_image(tf.io.encode_png(pixels[..., :1]), (56, 56, 1), ImageOptions(scale="unit"))
    np.testing.assert_allclose(grey, pixels[4:60, 12:68, :1] / 255, rtol=1e-6)
    signed = evaluation_image(tf.io.encode_png(pixels), (56, 56, 3), ImageOptions(scale="signed"))
    assert -1 <= signed.numpy().min() < -0.9 < 0.9 < signed.numpy().max() <= 1
    usual = evaluation_image(tf.io.encode_png(pixels), (56, 56, 3), ImageOptions()).numpy()
    expected = (pixels[4:60, 12:68] / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(usual, expected, rtol=1e-4, atol=1e-5)


def test_crops_differ_from_pass_to_pass(folder: pathlib.Path) -> None:
    data = find_data(f"images:{folder}?scale=bytes")
    means = {}
    for image, label in taken(data.batches(image_model(side=6), 1, 0), 21 * 4):
        key = (int(label[0]), round(float(image[0, ..., 1].mean()) / 30))
        means.setdefault(key, set()).add(round(float(image[0, ..., 2].mean()), 3))
    assert sum(len(crops) > 1 for crops in means.values()) > 15


def test_a_part_is_held_out_when_asked_for(folder: pathlib.Path) -> None:
    root = folder / "train"  # Without a folder train in it, its own folders are the classes.
    assert find_data(f"images:{root}").held_out is None
    data = find_data(f"images:{root}?held_out=0.2&augment=false")
    assert data.held_out is not None
    held_out = np.concatenate([images for images, _ in taken(data.held_out(MODEL, 2), 9)])
    train = np.concatenate([images for images, _ in taken(data.batches(MODEL, 1, 0), 17)])
    assert (len(held_out), len(np.unique(train, axis=0))) == (4, 17)
    assert not any((image == train).all((1, 2, 3)).any() for image in held_out)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["images", "tfrecords"])
def test_the_sample(kind: str) -> None:
    data = find_data(kind)
    model = image_model(classes=10)
    images, labels, weights = data.example(model, 5)
    assert images.shape == (5, 8, 8, 3) and labels.max() < 10 and weights is None
    assert data.held_out is not None
    assert sum(len(labels) for _, labels in taken(data.held_out(model, 30), 9)) == 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "?augmnt=false",
            r"no option augmnt; did you mean 'augment'\?; images takes augment, scale, cache, held_out",
        ),
        ("?augment=maybe", "augment is 'maybe'; use true or false"),
        ("?scale=big", "scale is 'big'; use one of imagenet, unit, signed, bytes"),
        ("?held_out=1", "held_out is 1.0; need 0 <= held_out < 1"),
        ("?held_out=some", "held_out is 'some'; it must be a number"),
        ("?augment", "'augment' isn't an option; write option=value"),
        ("?augment=true&augment=false", "option augment is given twice"),
        (",b", "give one folder, not 2"),
        (",", "a path is empty"),
    ],
)
def test_wrong_options_are_told(options: str, message: str, folder: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=message):
        find_data(f"images:{folder}{options}")


def test_wrong_folders_are_told(folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ModelError, match=r"^images:/none: there is no folder /none"):
        find_data("images:/none")
    with pytest.raises(ModelError, match="has no folders; put the images of each class into a folder"):
        find_data(f"images:{tmp_path}")
    (tmp_path / "train" / "ant").mkdir(parents=True)
    with pytest.raises(ModelError, match="ant has no images"):
        find_data(f"images:{tmp_path}")
    (tmp_path / "train" / "ant" / "a.png").write_bytes(b"")
    (tmp_path / "val" / "cow").mkdir(parents=True)
    with pytest.raises(ModelError, match="cow is no class: train has no folder cow"):
        find_data(f"images:{tmp_path}")
    with pytest.raises(ModelError, match=r"the data have 3 classes, but 'small' tells 2 apart; .* classes=3"):
        find_data(f"images:{folder}").example(image_model(2), 2)
    with pytest.raises(ModelError, match="takes images of 4 channels; images from files have 1 or 3"):
        find_data(f"images:{folder}").example(image_model(channels=4), 2)


def test_damaged_images_are_told(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "ant" / "a.jpeg"
    path.parent.mkdir()
    path.write_bytes(b"<html>not found</html>")
    with pytest.raises(ModelError, match=r"can't be read: .*not a JPEG, PNG, GIF or BMP image.*a\.jpeg"):
        find_data(f"images:{tmp_path}").example(MODEL, 1)
    path.write_bytes(tf.io.encode_jpeg(np.zeros((30, 30, 3), "uint8")).numpy()[:200])
    with pytest.raises(ModelError, match=r"can't be read: .*JPEG"):
        find_data(f"images:{tmp_path}").example(MODEL, 1)


def test_records_are_found_where_they_are(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "train-00000-of-00001"
    contents = [b"a" * size for size in (0, 1, 700_000, 3)]
    with tf.io.TFRecordWriter(str(path)) as writer:
        for content in contents:
            writer.write(content)
    index = tfrecords.indexed([path], "")
    offsets = np.cumsum([0, *(len(content) + 16 for content in contents[:-1])])
    assert index.offsets.tolist() == offsets.tolist()
    read = tf.data.Dataset.from_tensor_slices(index.offsets).flat_map(lambda at: tfrecords.record_at(str(path), at))
    assert list(read.as_numpy_iterator()) == contents


def test_wrong_records_are_told(records: pathlib.Path, folder: pathlib.Path, tmp_path: pathlib.Path) -> None:
    name = f"tfrecords:{tmp_path}"
    with pytest.raises(
        ModelError, match=r"no files train-00000-of-00001 and so on; python -m dapple_tf.tools.make_data"
    ):
        find_data(name)
    files = [records / f"train-0000{number}-of-00003" for number in range(3)]
    good = files[0].read_bytes()
    target = tmp_path / "train-00000-of-00002"
    target.write_bytes(good)
    with pytest.raises(ModelError, match=r"has 1 of 2 files train-...; number 1 is missing"):
        find_data(name)
    target = target.rename(tmp_path / "train-00000-of-00001")
    for damaged in (good[:-3], b"x" + good[1:], good + b"more"):
        target.write_bytes(damaged)
        with pytest.raises(ModelError, match=r"isn't an uncompressed TFRecord file, or is damaged or cut off at byte"):
            find_data(name)
    damaged = bytearray(good)
    damaged[500] ^= 1  # Within the data of the first record.
    target.write_bytes(damaged)
    with pytest.raises(ModelError, match=r"can't be read: corrupted record at 12|is no tf.train.Example"):
        find_data(name).example(MODEL, 7)
    target.write_bytes(good)
    with pytest.raises(ModelError, match=r"has label 1, but a model of 3 classes takes 5 to 7|has label [123], but"):
        find_data(f"{name}?first_label=5").example(MODEL, 2)
    with pytest.raises(ModelError, match=r"has label [23], but a model of 1 classes takes 1|isn't one of 1 classes"):
        find_data(name).example(image_model(1), 7)


def test_records_that_are_no_images_are_told(tmp_path: pathlib.Path) -> None:
    def write(**features: tf.train.Feature) -> None:
        with tf.io.TFRecordWriter(str(tmp_path / "train-00000-of-00001")) as writer:
            given = {name.replace("__", "/"): value for name, value in features.items()}
            writer.write(tf.train.Example(features=tf.train.Features(feature=given)).SerializeToString())

    def read() -> None:
        find_data(f"tfrecords:{tmp_path}").example(MODEL, 1)

    label = tf.train.Feature(int64_list=tf.train.Int64List(value=[1]))
    image = tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"<html>"]))
    write(image__class__label=label)
    with pytest.raises(ModelError, match=r"the record at byte 0 of .* has no bytes image/encoded"):
        read()
    write(image__encoded=image)
    with pytest.raises(ModelError, match="has no int64 image/class/label"):
        read()
    write(image__encoded=image, image__class__label=label)
    with pytest.raises(ModelError, match=r"not a JPEG, PNG, GIF or BMP image.*train-00000-of-00001.*at byte.*0"):
        read()


@pytest.mark.parametrize("data", [b"", b"123456789", b"\0" * 8])
def test_checksums_are_tensorflows(data: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "file"
    with tf.io.TFRecordWriter(str(path)) as writer:
        writer.write(data)
    written = path.read_bytes()
    assert tfrecords.masked_checksum(written[:8]) == struct.unpack("<I", written[8:12])[0]
    assert tfrecords.masked_checksum(data) == struct.unpack("<I", written[-4:])[0]


def test_requests() -> None:
    request = Request.parse("pairs:a/b.en,a/b.de?vocabulary=100&held_out=0.5")
    assert [str(path) for path in request.paths] == ["a/b.en", "a/b.de"]
    assert (request.kind, dict(request.given)) == ("pairs", {"vocabulary": "100", "held_out": "0.5"})
    assert Request.parse("images?augment=false").paths == ()


@pytest.mark.thorough
@pytest.mark.slow
def test_training_on_the_sample() -> None:
    """Its classes can be told apart."""
    model = image_model(classes=10, side=12)
    model.compile(keras.optimizers.Adam(3e-3), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    keras.utils.set_random_seed(0)
    data = find_data("images?augment=false")
    history = model.fit(data.batches(model, 32, 0), steps_per_epoch=12, epochs=2, verbose=0)
    assert history.history["loss"][-1] < history.history["loss"][0]
