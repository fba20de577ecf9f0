"""Folders of images and TFRecord files: the right pixels and labels, each once a pass, and those held out."""

from __future__ import annotations

import itertools
import pathlib
import struct

import numpy as np
import pytest
import tensorflow as tf
from reading import image_model, taken, write_images

from dapple_tf.models.readers import records_writer, tfrecords
from dapple_tf.models.readers.images import listed
from dapple_tf.models.readers.pixels import ImageOptions, evaluation_image
from dapple_tf.models.registry import find_data

pytestmark = pytest.mark.usefixtures("_cache_of_readers")

MODEL = image_model()
kinds = pytest.mark.parametrize("kind", ["images", "tfrecords"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    images, records = (tmp_path_factory.mktemp(name) for name in ("images", "records"))
    write_images(images)
    records_writer.write(images / "train", records, "train", shards=3, seed=5)
    records_writer.write(images / "val", records, "validation", shards=2, seed=None)
    return {"images": images, "tfrecords": records}


@kinds
def test_batches_are_full_and_have_every_image_with_its_label_once_a_pass(
    kind: str, folders: dict[str, pathlib.Path]
) -> None:
    data = find_data(f"{kind}:{folders[kind]}?augment=false&scale=bytes")
    images, labels = next(iter(data.batches(MODEL, 4, 0)))
    assert (images.shape, images.dtype) == ((4, 8, 8, 3), tf.float32)
    assert (labels.shape, labels.dtype) == ((4,), tf.int32)
    seen = taken(data.batches(MODEL, 1, 3), 42)  # 21 images: two passes
    keys = [(int(label[0]), round(float(image[0, 2, 2, 1]) / 30)) for image, label in seen]
    everything = sorted(itertools.product(range(3), range(7)))
    assert sorted(keys[:21]) == sorted(keys[21:]) == everything
    assert keys[:21] != keys[21:]
    reds = {int(label[0]): round(float(image[0, ..., 0].mean())) for image, label in seen}
    assert all(abs(red - (40 + 60 * label)) < 3 for label, red in reds.items())  # JPEG isn't exact.


@kinds
def test_evaluation_is_in_order_of_names_and_whole(kind: str, folders: dict[str, pathlib.Path]) -> None:
    data = find_data(f"{kind}:{folders[kind]}")
    assert data.held_out is not None
    batches = taken(data.held_out(MODEL, 4), 9)
    assert [len(labels) for _, labels in batches] == [4, 4, 1] and len(data.held_out(MODEL, 4)) == 3
    assert np.concatenate([labels for _, labels in batches]).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    paths = listed(folders["images"] / "val", "").paths
    expected = [evaluation_image(tf.io.read_file(path), (8, 8, 3), ImageOptions()) for path in paths]
    np.testing.assert_array_equal(np.concatenate([images for images, _ in batches]), expected)


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
def test_the_centre_against_a_naive_crop(shape: tuple[int, int, int], scale: str, left: int, expected: object) -> None:
    """7/8 of the shorter side around the centre, scaled down by a whole factor."""
    pixels = np.random.default_rng(0).integers(0, 256, (64, 80, shape[2]), dtype=np.uint8)
    image = evaluation_image(tf.io.encode_png(pixels), shape, ImageOptions(scale=scale))  # type: ignore[arg-type]
    wanted = expected(pixels[4:60, left : left + shape[1]])  # type: ignore[operator]
    np.testing.assert_allclose(image, wanted, rtol=1e-4, atol=1e-5)


def test_crops_differ_from_pass_to_pass(folders: dict[str, pathlib.Path]) -> None:
    data = find_data(f"images:{folders['images']}?scale=bytes")
    means: dict[tuple[int, int], set[float]] = {}
    for image, label in taken(data.batches(image_model(side=6), 1, 0), 21 * 4):
        key = (int(label[0]), round(float(image[0, ..., 1].mean()) / 30))
        means.setdefault(key, set()).add(round(float(image[0, ..., 2].mean()), 3))
    assert sum(len(crops) > 1 for crops in means.values()) > 15


def test_a_part_is_held_out_on_request(folders: dict[str, pathlib.Path]) -> None:
    root = folders["images"] / "train"  # Without a folder train in it, its own folders are the classes.
    assert find_data(f"images:{root}").held_out is None
    data = find_data(f"images:{root}?held_out=0.2&augment=false")
    assert data.held_out is not None
    held_out = np.concatenate([images for images, _ in taken(data.held_out(MODEL, 2), 9)])
    train = np.concatenate([images for images, _ in taken(data.batches(MODEL, 1, 0), 17)])
    assert (len(held_out), len(np.unique(train, axis=0))) == (4, 17)
    assert not any((image == train).all((1, 2, 3)).any() for image in held_out)


def test_records_are_found_at_their_offsets_and_have_tensorflows_checksums(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "train-00000-of-00001"
    contents = [b"123456789", *(b"a" * size for size in (0, 1, 700_000, 3))]
    with tf.io.TFRecordWriter(str(path)) as writer:
        for content in contents:
            writer.write(content)
    index = tfrecords.indexed([path], "")
    assert index.offsets.tolist() == np.cumsum([0, *(len(content) + 16 for content in contents[:-1])]).tolist()
    read = tf.data.Dataset.from_tensor_slices(index.offsets).flat_map(lambda at: tfrecords.record_at(str(path), at))
    assert list(read.as_numpy_iterator()) == contents
    written = path.read_bytes()
    assert tfrecords.masked_checksum(written[:8]) == struct.unpack("<I", written[8:12])[0]
    assert tfrecords.masked_checksum(contents[0]) == struct.unpack("<I", written[21:25])[0]
