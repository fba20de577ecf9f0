"""The manifest of a checkpoint: a JSON file that says what the checkpoint holds, and how what it can't hold was.

It is data that may come from anywhere: whatever stands in it is checked, and names of files are never taken from it but
matched against the few that there are.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

from dapple_tf.errors import DappleError

FORMAT = "dapple_tf.checkpoint/1"
CLIENT, DATA = "client", "data"
"""Shards that the training process itself writes: what no device keeps, and the position in a tf.data.Dataset."""

LARGEST = 2**62
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
"""Bytes of an element."""

_SHARD = re.compile(rf"shard-\d{{1,6}}|{CLIENT}|{DATA}")
_KEY = re.compile(r"(model|optimizer|metrics)/(0|[1-9]\d{0,8})")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class CheckpointError(DappleError):
    """A checkpoint can't be written or read, or doesn't fit the model; the text names the file or variable."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A variable of a checkpoint.

    Attributes:
        key: "model/12" is the model's variable 12, metrics apart; "optimizer/3" and "metrics/0" likewise.
        path: Keras' path of it when it was saved.
        dtype: name of its dtype.
        shape: its shape.
        shard: the shard that it is in, under its key.
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
        """Its bytes."""
        return math.prod(self.shape) * DTYPES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Shard:
    """The files of one tensor bundle.

    Attributes:
        index_bytes: size of the index file.
        index_sha256: its digest. The index has the check sums of all tensors, so that this is a digest of them, too.
        data_bytes: size of the data file.
    """

    index_bytes: int
    index_sha256: str
    data_bytes: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        step: training steps done.
        epoch: the epoch to go on with, from 0.
        batch: batches of that epoch that have been trained on.
        entries: variables.
        shards: name -> files.
        plan: the plan in whose training it was saved, as in its JSON file; only for information.
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
        """As JSON text, a line for each variable."""
        variables = ",\n".join(f"    {json.dumps(dataclasses.asdict(entry))}" for entry in self.entries)
        shards = {name: dataclasses.asdict(shard) for name, shard in self.shards.items()}
        values = {"format": FORMAT, "step": self.step, "epoch": self.epoch, "batch": self.batch}
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        lines.append(f'  "variables": [\n{variables}\n  ]' if variables else '  "variables": []')
        lines += [
            f"  {json.dumps(key)}: {json.dumps(value, allow_nan=False)}"
            for key, value in (("shards", shards), ("data", self.data), ("plan", self.plan))
        ]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    @classmethod
    def from_json(cls, text: str, *, source: str) -> Manifest:
        """The manifest that `to_json` wrote.

        Args:
            text: its text.
            source: stands in errors.

        Raises:
            CheckpointError: not JSON, another format, an unknown or missing key, or a value that can't be.
        """
        try:
            data = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:  # also for numbers and nesting beyond Python's limits
            raise CheckpointError(f"{source} isn't JSON: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise CheckpointError(f"{source} isn't a checkpoint: 'format' is {found!r:.60}; it must be {FORMAT!r}")
        values = _fields(data, cls, source, more=("format", "variables"), less=("entries",))
        shards = values["shards"]
        if not isinstance(shards, dict) or not all(_SHARD.fullmatch(name) for name in shards):
            raise CheckpointError(f"{source}: 'shards' names others than shard-<number>, {CLIENT} and {DATA}")
        if not isinstance(values["variables"], list):
            raise CheckpointError(f"{source}: 'variables' isn't a list")
        entries = tuple(_entry(item, shards, f"{source}: variable {i}") for i, item in enumerate(values["variables"]))
        if len({entry.key for entry in entries}) < len(entries):
            raise CheckpointError(f"{source} has a variable twice")
        for name in ("plan", "data"):
            if not isinstance(values[name], dict | None):
                raise CheckpointError(f"{source}: {name!r} is neither an object nor null")
        step, epoch, batch = (_count(values[name], f"{source}: {name!r}") for name in ("step", "epoch", "batch"))
        return cls(
            step,
            epoch,
            batch,
            entries,
            {name: _shard(shard, f"{source}: {name}") for name, shard in shards.items()},
            values["plan"],
            values["data"],
        )


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} isn't a number in JSON")


def _fields(
    data: Any, kind: type[Any], source: str, more: tuple[str, ...] = (), less: tuple[str, ...] = ()
) -> dict[str, Any]:
    """An object with exactly the keys of a dataclass."""
    if not isinstance(data, dict):
        raise CheckpointError(f"{source} has a JSON {type(data).__name__} where an object {{...}} is expected")
    names = {field.name for field in dataclasses.fields(kind)}.union(more).difference(less)
    for what, keys in (("is missing", names - data.keys()), ("is unknown", data.keys() - names)):
        if keys:
            raise CheckpointError(f"{source}: key {min(keys)!r:.60} {what}")
    return data


def _count(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value < LARGEST:
        raise CheckpointError(f"{what} isn't a whole number from 0 to 2**62")
    return value


def _entry(data: Any, shards: Mapping[str, Any], source: str) -> Entry:
    values = _fields(data, Entry, source)
    for name in ("key", "path", "dtype", "shard"):
        if not isinstance(values[name], str):
            raise CheckpointError(f"{source}: {name!r} isn't a text")
    if not _KEY.fullmatch(values["key"]):
        raise CheckpointError(f"{source}: key {values['key']!r:.60} isn't model/, optimizer/ or metrics/ and a number")
    if values["dtype"] not in DTYPES:
        raise CheckpointError(f"{source}: dtype {values['dtype']!r:.60} is unknown")
    if values["shard"] not in shards or values["shard"] == DATA:
        raise CheckpointError(f"{source} is in shard {values['shard']!r:.60}, which 'shards' doesn't have")
    if not isinstance(values["shape"], list):
        raise CheckpointError(f"{source}: 'shape' isn't a list")
    shape = tuple(_count(size, f"{source}: 'shape'") for size in values["shape"])
    return Entry(values["key"], values["path"], values["dtype"], shape, values["shard"])


def _shard(data: Any, source: str) -> Shard:
    values = _fields(data, Shard, source)
    digest = values["index_sha256"]
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise CheckpointError(f"{source}: 'index_sha256' isn't a digest of 64 hexadecimal digits")
    sizes = (_count(values[name], f"{source}: {name!r}") for name in ("index_bytes", "data_bytes"))
    return Shard(next(sizes), digest, next(sizes))
