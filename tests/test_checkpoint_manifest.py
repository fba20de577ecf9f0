"""Manifests and index files of checkpoints: what is written comes back, and whatever else stands there is refused."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from dapple_tf.checkpoints.checkpoint_files import check_bundle, index_file, read_manifest
from dapple_tf.checkpoints.checkpoint_manifest import (
    FORMAT,
    FORMAT_WITHOUT_DIGEST,
    CheckpointError,
    Entry,
    Manifest,
    Shard,
)
from dapple_tf.version import VERSION

MANIFEST = Manifest(
    step=12,
    epoch=2,
    batch=3,
    entries=(
        Entry("model/0", "dense/kernel", "float32", (4, 3), "shard-0"),
        Entry("model/1", "dense/bias", "bfloat16", (), "shard-1"),
        Entry("optimizer/0", "iterations", "int64", (), "client"),
        Entry("metrics/10", "loss/total", "float32", (0, 7), "client"),
    ),
    shards={name: Shard(100, "0f" * 32, 1 << 40) for name in ("shard-0", "shard-1", "client", "data")},
    plan={"format": "dapple_tf.plan/1"},
    data={"kind": "dataset", "round": 2, "done": 3, "opened": 3},
)


def parse(text: str) -> Manifest:
    return Manifest.from_json(text, source="m.json")


def contents() -> dict[str, Any]:
    """A manifest as versions without digests wrote it, of which single values can be changed."""
    data = json.loads(MANIFEST.to_json())
    del data["sha256"]
    return {**data, "format": FORMAT_WITHOUT_DIGEST}


def changed(*path: Any, value: Any) -> str:
    data = contents()
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return json.dumps(data)


def test_what_is_written_comes_back() -> None:
    assert parse(MANIFEST.to_json()) == MANIFEST
    empty = Manifest(0, 0, 0, (), {})
    assert parse(empty.to_json()) == empty


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "m.json isn't JSON"),
        ("[" * 100_000, "m.json isn't JSON"),
        ("[1]", "m.json has a JSON list where an object"),
        (changed("format", value="dapple_tf.checkpoint/03"), f"it must be '{FORMAT}'"),
        (
            changed("format", value="dapple_tf.checkpoint/3"),
            f"m.json was written by a newer version of dapple_tf: its format is 3, dapple_tf {VERSION} reads formats "
            f"up to 2; install a newer dapple_tf, or give an older checkpoint",
        ),
        (changed("step", value=float("nan")), "NaN isn't a number in JSON"),
        (changed("step", value=-1), "step is -1; it must be a whole number of at least 0 and below 2**62"),
        (changed("batch", value=2**62), "batch is 4611686018427387904; it must be a whole number"),
        (changed("more", value=1), "unknown key 'more'"),
        (changed("variables", 0, "key", value="model/1٢"), "isn't model/, optimizer/ or metrics/ and a number"),
        (changed("shards", "shard-٢", value={}), "'shards' names others than"),
        (changed("variables", 0, "key", value="model/1"), "m.json has a variable twice"),
        (changed("variables", 0, "dtype", value="variant"), "dtype 'variant' is unknown"),
        (changed("variables", 0, "shape", value=[4, -1]), "variables[0].shape[1] is -1; it must be a whole number"),
        (changed("variables", 0, "shard", value="data"), "which 'shards' doesn't have"),
        (changed("shards", value={"../shard-0": {}}), "'shards' names others than"),
        (changed("shards", "shard-0", "index_sha256", value="x"), "isn't a digest"),
    ],
)
def test_what_cannot_be_is_refused(text: str, message: str) -> None:
    with pytest.raises(CheckpointError) as error:
        parse(text)
    assert message in str(error.value)
    assert len(str(error.value)) < 400


def test_a_key_that_is_missing_is_named() -> None:
    for name in contents():
        data = contents()
        del data[name]
        with pytest.raises(CheckpointError, match=f"{name}.* is missing" if name != "format" else "format"):
            parse(json.dumps(data))


def test_no_flipped_bit_goes_unnoticed() -> None:
    """A quarter of them gave other steps, shapes or plans. Digests are of contents, not of their layout."""
    assert parse(json.dumps(json.loads(MANIFEST.to_json()), indent=1)) == MANIFEST
    assert parse(json.dumps(contents())) == MANIFEST  # of an earlier version
    content = MANIFEST.to_json().encode()
    for place in range(len(content)):
        flipped = content[:place] + bytes([content[place] ^ (1 << place % 8)]) + content[place + 1 :]
        with pytest.raises((CheckpointError, UnicodeDecodeError)):
            parse(flipped.decode())
    with pytest.raises(CheckpointError, match="'sha256' is missing"):
        parse(json.dumps({**contents(), "format": FORMAT}))


@pytest.mark.parametrize("file", ["checkpoint.json", "shard-0.index", "shard-0.data-00000-of-00001"])
def test_a_pipe_instead_of_a_file_does_not_hang(tmp_path: pathlib.Path, file: str) -> None:
    bundle(tmp_path, 1)
    content = (tmp_path / index_file("shard-0")).read_bytes()
    shard = Shard(len(content), hashlib.sha256(content).hexdigest(), 0)
    (tmp_path / file).unlink(missing_ok=True)
    os.mkfifo(tmp_path / file)
    with pytest.raises(CheckpointError, match=rf"{tmp_path} is damaged: {file} isn't a regular file"):
        read_manifest(tmp_path) if file == "checkpoint.json" else check_bundle(tmp_path, "shard-0", shard, [])


# ---- index files

DTYPES = ("bool", "int8", "uint8", "int16", "uint16", "float16", "bfloat16", "int32", "uint32", "float32", "int64")


def bundle(path: pathlib.Path, count: int) -> dict[str, tf.Tensor]:
    """A bundle of so many tensors, by TensorFlow's own writer."""
    tensors = {
        f"model/{index}": tf.cast(np.full((index % 4, 2), index), DTYPES[index % len(DTYPES)]) for index in range(count)
    }
    tf.raw_ops.SaveV2(
        prefix=str(path / "shard-0"),
        tensor_names=list(tensors),
        shape_and_slices=[""] * count,
        tensors=list(tensors.values()),
    )
    return tensors


def test_an_index_must_hold_what_the_manifest_says(tmp_path: pathlib.Path) -> None:
    bundle(tmp_path, 12)
    content = (tmp_path / index_file("shard-0")).read_bytes()
    size = (tmp_path / "shard-0.data-00000-of-00001").stat().st_size
    shard = Shard(len(content), hashlib.sha256(content).hexdigest(), size)
    good = Entry("model/9", "x", "float32", (1, 2), "shard-0")
    check_bundle(tmp_path, "shard-0", shard, [good])
    for entry in (
        Entry("model/12", "x", "float32", (1, 2), "shard-0"),
        Entry("model/9", "x", "int32", (1, 2), "shard-0"),
        Entry("model/9", "x", "float32", (1 << 60, 1 << 60), "shard-0"),
    ):
        with pytest.raises(CheckpointError, match=r"shard-0.index doesn't hold model/"):
            check_bundle(tmp_path, "shard-0", shard, [entry])
    with pytest.raises(CheckpointError, match="isn't the file that the manifest describes"):
        check_bundle(tmp_path, "shard-0", Shard(len(content), "0" * 64, size), [good])
    (tmp_path / "shard-0.data-00000-of-00001").write_bytes(b"short")
    with pytest.raises(CheckpointError, match=rf"it has 5 bytes, the manifest says {size:,}"):
        check_bundle(tmp_path, "shard-0", shard, [good])
    (tmp_path / index_file("shard-0")).write_bytes(b"something else")
    other = Shard(14, hashlib.sha256(b"something else").hexdigest(), 5)
    with pytest.raises(CheckpointError, match=r"shard-0.index is damaged: "):
        check_bundle(tmp_path, "shard-0", other, [good])
    (tmp_path / index_file("shard-0")).unlink()
    with pytest.raises(CheckpointError, match=r"is damaged: .*No such file"):
        check_bundle(tmp_path, "shard-0", shard, [good])
