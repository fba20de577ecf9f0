"""The manifest of a checkpoint: a JSON file that lists its contents and describes the state it cannot store.

A manifest may come from anywhere: every value is checked, and file names are never taken from it but matched against
the few possible ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import typing
from collections.abc import Mapping
from typing import Any

from dapple_tf.common.data_files import AMOUNTS, Decoder, Scalar, parse_object, short
from dapple_tf.errors import DappleError
from dapple_tf.version import VERSION

_VERSION = 2
FORMAT = f"dapple_tf.checkpoint/{_VERSION}"
FORMAT_WITHOUT_DIGEST = "dapple_tf.checkpoint/1"
"""The format of earlier versions, whose manifests have no digest of their own. They are read, too."""
CLIENT, DATA = "client", "data"
"""Shards written by the training process: what no device keeps, and the position in a tf.data.Dataset."""

LARGEST = 2**62
MOST_BYTES = 2**30
"""Maximum bytes of a manifest."""
DTYPES = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "float16": 2,
    "bfloat16": 2,
    "int32": 4,
    "uint32": 4,
    "float32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Bytes per element of each dtype."""

_SHARD = re.compile(rf"shard-[0-9]{{1,6}}|{CLIENT}|{DATA}")
_KEY = re.compile(r"(model|optimizer|metrics)/(0|[1-9][0-9]{0,8})")
_ANY_FORMAT = re.compile(r"dapple_tf\.checkpoint/([1-9][0-9]{0,8})")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_DIGEST_KEY = "sha256"


class CheckpointError(DappleError):
    """A checkpoint can't be written or read, or doesn't fit the model; the text names the file or variable."""


class UnreadableCheckpointError(CheckpointError):
    """A checkpoint may be intact, but this process or version can't read it."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A variable of a checkpoint.

    Attributes:
        key: "model/12" is the model's variable 12, not counting metrics; "optimizer/3" and "metrics/0" likewise.
        path: its Keras path when it was saved.
        dtype: name of its dtype.
        shape: its shape.
        shard: the shard that holds it under its key.
    """

    key: str
    path: str
    dtype: str
    shape: tuple[int, ...]
    shard: str

    @property
    def section(self) -> str:
        """``model``, ``optimizer`` or ``metrics``."""
        return self.key.partition("/")[0]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Shard:
    """The files of one tensor bundle.

    Attributes:
        index_bytes: size of the index file.
        index_sha256: digest of the index file. The index has the checksums of all tensors, so this covers them, too.
        data_bytes: size of the data file.
    """

    index_bytes: int
    index_sha256: str
    data_bytes: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint.

    Attributes:
        step: number of training steps done.
        epoch: the next epoch, from 0.
        batch: number of its batches that have been trained on.
        entries: variables.
        shards: name -> files.
        plan: JSON text of the plan with which it was saved; for information only.
        data: position in the training data; None if it isn't known.
    """

    step: int
    epoch: int
    batch: int
    entries: tuple[Entry, ...]
    shards: Mapping[str, Shard]
    plan: Mapping[str, Any] | None = None
    data: Mapping[str, Any] | None = None

    def to_json(self) -> str:
        """Returns JSON text with a line for each variable, and the digest of its contents in the last line."""
        variables = ",\n".join(f"    {json.dumps(dataclasses.asdict(entry))}" for entry in self.entries)
        shards = {name: dataclasses.asdict(shard) for name, shard in self.shards.items()}
        values = {"format": FORMAT, "step": self.step, "epoch": self.epoch, "batch": self.batch}
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        lines.append(f'  "variables": [\n{variables}\n  ]' if variables else '  "variables": []')
        lines += [
            f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}"
            for key, value in (("shards", shards), ("data", self.data), ("plan", self.plan))
        ]
        digest = _digest(json.loads("{" + ",".join(lines) + "}"))
        lines.append(f'  "{_DIGEST_KEY}": "{digest}"')
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, *, source: str) -> Manifest:
        """Parses the manifest that `to_json` wrote.

        Args:
            text: its text.
            source: name of the manifest in errors.

        Raises:
            UnreadableCheckpointError: a newer version has written it.
            CheckpointError: the text isn't JSON, or has another format, a wrong or missing key, a wrong value, or
                another digest than its contents.
        """
        data = parse_object(text, source, CheckpointError, most_bytes=MOST_BYTES, finite=True)
        if data.get("format") not in (FORMAT, FORMAT_WITHOUT_DIGEST):
            shown = short(data.get("format"))
            version = _ANY_FORMAT.fullmatch(str(data.get("format")))
            if version is not None:
                raise UnreadableCheckpointError(
                    f"{source} was written by a newer version of dapple_tf: its format is {version[1]}, dapple_tf "
                    f"{VERSION} reads formats up to {_VERSION}; install a newer dapple_tf, or give an older checkpoint"
                )
            raise CheckpointError(f"{source} isn't a checkpoint: 'format' is {shown}; it must be {FORMAT!r}")
        places = {("variables" if field.name == "entries" else field.name): field for field in dataclasses.fields(cls)}
        digested = data["format"] == FORMAT
        _DECODER.check_keys(data, ("format", *places, *([_DIGEST_KEY] if digested else ())), (), source)
        if not all(map(_SHARD.fullmatch, _DECODER.object(data["shards"], f"{source}: shards"))):
            raise CheckpointError(f"{source}: 'shards' names others than shard-<number>, {CLIENT} and {DATA}")
        types = typing.get_type_hints(cls)
        manifest = cls(
            **{
                field.name: _DECODER.read(types[field.name], data[key], f"{source}: {key}")
                for key, field in places.items()
            }
        )
        for name, shard in manifest.shards.items():
            if not _DIGEST.fullmatch(shard.index_sha256):
                raise CheckpointError(f"{source}: {name}: 'index_sha256' isn't a digest of 64 hexadecimal digits")
        for number, entry in enumerate(manifest.entries):
            _check(entry, manifest.shards, f"{source}: variable {number}")
        if len({entry.key for entry in manifest.entries}) < len(manifest.entries):
            raise CheckpointError(f"{source} has a variable twice")
        if digested:
            _check_digest(data, source)
        return manifest


def _check_digest(data: dict[str, Any], source: str) -> None:
    """Checks that a manifest's contents have the digest that stands among them."""
    digest = data.pop(_DIGEST_KEY)
    try:
        same = digest == _digest(data)
    except RecursionError as error:
        raise CheckpointError(f"{source} is nested too deeply: {error}") from error
    if not same:
        raise CheckpointError(f"{source} is damaged or was edited: its contents don't have the digest in its end")


def _digest(data: Mapping[str, Any]) -> str:
    """Returns the digest of a manifest's contents, whatever their layout in the file."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


_DECODER = Decoder(
    CheckpointError,
    {
        **AMOUNTS,
        int: Scalar(
            lambda value: type(value) is int and 0 <= value < LARGEST, "a whole number of at least 0 and below 2**62"
        ),
    },
)


def _check(entry: Entry, shards: Mapping[str, Shard], source: str) -> None:
    """Checks that a variable is possible."""
    if not _KEY.fullmatch(entry.key):
        raise CheckpointError(f"{source}: key {short(entry.key)} isn't model/, optimizer/ or metrics/ and a number")
    if entry.dtype not in DTYPES:
        raise CheckpointError(f"{source}: dtype {short(entry.dtype)} is unknown")
    if entry.shard not in shards or entry.shard == DATA:
        raise CheckpointError(f"{source} is in shard {short(entry.shard)}, which 'shards' doesn't have")
