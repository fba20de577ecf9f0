"""Checkpoints on disk: finding, checking and writing them, so that no crash leaves half of one.

    <directory>/.lock                             who writes here, while it does (directory_lock.py)
    <directory>/save-000007-step-1200/    the 7th checkpoint that was written here, after 1200 steps
        shard-0.index, shard-0.data-00000-of-00001    what server 0 wrote: a TensorFlow tensor bundle
        shard-1. ...
        client. ...                                   what no device keeps: learning rate, metrics
        data. ...                                     the position in a tf.data.Dataset
        checkpoint.json                               the manifest

A checkpoint is written to ``.partial-<name>-<random>``, the manifest last. When all files are on disk (fsync), one
rename gives the directory its name. So whatever has such a name is complete, and a crash at any time leaves the
earlier checkpoints. They are numbered in the order of writing, so that the newest one counts even if training began
anew. Only one training may write to a directory at a time (`directory_lock.py`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import pathlib
import re
import secrets
import shutil
import stat
from collections.abc import Iterable

import tensorflow as tf

from dapple_tf.checkpoints.checkpoint_manifest import (
    MOST_BYTES,
    CheckpointError,
    Entry,
    Manifest,
    Shard,
    UnreadableCheckpointError,
)
from dapple_tf.errors import reason

logger = logging.getLogger(__name__)

MANIFEST = "checkpoint.json"
_COMPLETE = re.compile(r"save-(\d{6,18})-step-(\d{1,18})", re.ASCII)
_PARTIAL = re.compile(r"\.partial-save-\d{6,18}-step-\d{1,18}-[0-9a-f]{16}", re.ASCII)


def index_file(shard: str) -> str:
    """Returns the name of a bundle's index file."""
    return f"{shard}.index"


def data_file(shard: str) -> str:
    """Returns the name of a bundle's data file."""
    return f"{shard}.data-00000-of-00001"


def checkpoints(directory: pathlib.Path) -> list[pathlib.Path]:
    """Returns the complete checkpoints in a directory, oldest first."""
    try:
        names = [entry.name for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{directory} can't be read: {error}") from error
    return [directory / name for _, name in sorted((int(m[1]), m[0]) for m in map(_COMPLETE.fullmatch, names) if m)]


class Writing:
    """A checkpoint being written.

    Attributes:
        target: its final path.
        place: folder of its files until then.
    """

    def __init__(self, directory: pathlib.Path, step: int) -> None:
        """Creates the folder.

        Raises:
            CheckpointError: the directory can't be written to.
        """
        number = 1 + max((int(path.name.split("-")[1]) for path in checkpoints(directory)), default=0)
        self._directory = directory
        self.target = directory / f"save-{number:06d}-step-{step}"
        self.place = directory / f".partial-{self.target.name}-{secrets.token_hex(8)}"
        try:
            self.place.mkdir(parents=True)
        except OSError as error:
            raise CheckpointError(f"no checkpoint can be written to {directory}: {error}") from error

    def publish(self, manifest: Manifest) -> None:
        """Writes the manifest, waits until all files are on disk, and gives the checkpoint its name."""
        (self.place / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        for path in self.place.iterdir():
            _to_disk(path)
        _to_disk(self.place)
        self.place.rename(self.target)
        _to_disk(self._directory)

    def discard(self) -> None:
        """Removes what has been written."""
        shutil.rmtree(self.place, ignore_errors=True)

    def describe(self, shard: str, entries: Iterable[Entry], writer: str) -> Shard:
        """Checks a written shard and returns its description.

        Args:
            shard: name of the shard.
            entries: the variables that it must hold.
            writer: who should have written it, for errors.

        Raises:
            CheckpointError: it is missing, or holds something else.
        """
        index, data = self.place / index_file(shard), self.place / data_file(shard)
        try:
            content = index.read_bytes()
            description = Shard(len(content), hashlib.sha256(content).hexdigest(), data.stat().st_size)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{writer} has saved its variables, but {error.filename} isn't there: the checkpoint's directory "
                f"{self._directory} must be on a file system that this process and all servers share"
            ) from error
        check_bundle(self.place, shard, description, entries)
        return description


def remove_old(directory: pathlib.Path, keep: int) -> None:
    """Removes all but the ``keep`` newest checkpoints, and the remains of crashes. Other files stay."""
    partial = [
        directory / entry.name
        for entry in os.scandir(directory)
        if _PARTIAL.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    ]
    for path in [*checkpoints(directory)[:-keep], *partial]:
        try:
            if path not in partial:
                # If this process dies now, half of a checkpoint mustn't have its name.
                path = path.rename(path.with_name(f".partial-{path.name}-{secrets.token_hex(8)}"))
            shutil.rmtree(path)
        except OSError as error:
            logger.warning("the old checkpoint %s can't be removed: %s", path, error)


def _to_disk(path: pathlib.Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_manifest(path: pathlib.Path) -> Manifest:
    """Returns the manifest of a checkpoint.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    file = path / MANIFEST
    try:
        text = _content(file).decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{file} isn't text: {error}") from error
    return Manifest.from_json(text, source=str(file))


def _content(file: pathlib.Path) -> bytes:
    """Returns the content of a regular file; a pipe could keep us waiting for ever.

    Raises:
        UnreadableCheckpointError: the operating system doesn't let this process read it.
        CheckpointError: there is none, or it is something else, or too large.
    """
    try:
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise CheckpointError(f"checkpoint {file.parent} is damaged: {file.name} isn't a regular file")
            content = stream.read(MOST_BYTES + 1)
    except (FileNotFoundError, IsADirectoryError) as error:
        raise CheckpointError(f"checkpoint {file.parent} is damaged: {error}") from error
    except OSError as error:
        raise UnreadableCheckpointError(f"{file} can't be read: {error}") from error
    if len(content) > MOST_BYTES:
        raise CheckpointError(f"{file} has more than {MOST_BYTES:,} bytes, which no manifest or index has")
    return content


def check_shards(path: pathlib.Path, manifest: Manifest) -> None:
    """Checks the files of all shards, before TensorFlow reads any of them.

    Raises:
        CheckpointError: one is missing, damaged, or doesn't hold what the manifest says.
    """
    for name, shard in manifest.shards.items():
        check_bundle(path, name, shard, [entry for entry in manifest.entries if entry.shard == name])


def check_bundle(path: pathlib.Path, name: str, shard: Shard, entries: Iterable[Entry]) -> None:
    """Checks the files of one shard, as `check_shards` does."""
    index, data = path / index_file(name), path / data_file(name)
    content = _content(index)
    try:
        size = data.stat().st_size
    except OSError as error:
        raise CheckpointError(f"checkpoint {path} is damaged: {error}") from error
    if not data.is_file():
        raise CheckpointError(f"checkpoint {path} is damaged: {data.name} isn't a regular file")
    if len(content) != shard.index_bytes or hashlib.sha256(content).hexdigest() != shard.index_sha256:
        raise CheckpointError(f"{index} is damaged: it isn't the file that the manifest describes")
    if size != shard.data_bytes:
        raise CheckpointError(f"{data} is damaged: it has {size:,} bytes, the manifest says {shard.data_bytes:,}")
    try:
        reader = tf.train.load_checkpoint(str(path / name))
    except (tf.errors.OpError, RuntimeError, ValueError) as error:
        raise CheckpointError(f"{index} is damaged: {reason(error)}") from error
    shapes, dtypes = reader.get_variable_to_shape_map(), reader.get_variable_to_dtype_map()
    for entry in entries:
        if entry.key not in shapes or (dtypes[entry.key].name, tuple(shapes[entry.key])) != (entry.dtype, entry.shape):
            raise CheckpointError(f"{index} doesn't hold {entry.key} as {entry.dtype} {entry.shape}")
