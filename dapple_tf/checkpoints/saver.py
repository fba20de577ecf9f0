"""Checkpoints are written in the background: by the servers what devices keep, by this process the rest."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import pathlib
import threading
from collections.abc import Callable, Iterator, Mapping

import keras
import tensorflow as tf

from dapple_tf.checkpoints.checkpoint import Path, Progress, dtype_of, metrics_of, variables_of
from dapple_tf.checkpoints.checkpoint_files import Writing, remove_old
from dapple_tf.checkpoints.checkpoint_manifest import CLIENT, DATA, CheckpointError, Entry, Manifest
from dapple_tf.checkpoints.directory_lock import DirectoryLock
from dapple_tf.checkpoints.snapshots import Snapshot
from dapple_tf.errors import reason
from dapple_tf.frontend.initialization import tensor_of

logger = logging.getLogger(__name__)


class Saver:
    """Writes checkpoints in the background, one after the other.

    Attributes:
        newest: path and step of the last complete checkpoint; None if there is none yet.
    """

    def __init__(self) -> None:
        """Starts without any checkpoint."""
        self.newest: tuple[pathlib.Path, int] | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._lock: DirectoryLock | None = None
        self._training = False

    @contextlib.contextmanager
    def training(self, directory: Path, model: str) -> Iterator[None]:
        """Makes a context for a training that saves in a directory, where nobody else can save meanwhile.

        A checkpoint that can't be written doesn't end the training: the next one may succeed.

        Args:
            directory: directory of checkpoints.
            model: name of the model.

        Raises:
            CheckpointError: the directory is in use by another training, or can't be written to; or, in the end, the
                last checkpoint couldn't be written.
        """
        place = pathlib.Path(directory).absolute()
        self.finish()
        self._error = None
        self._hold(place, model)
        self._training = True
        try:
            yield
            self.finish()
            if (error := self._error) is not None:
                cause = str(error) if isinstance(error, CheckpointError) else reason(error)
                raise CheckpointError(
                    f"training is over, but its last checkpoint couldn't be written: {cause}; the trained values are "
                    f"still there, and save_checkpoint() writes them to another directory"
                ) from error
        finally:
            self._training = False
            self.release()

    def _hold(self, place: pathlib.Path, model: str) -> None:
        if self._lock is None or not self._lock.covers(place):
            self.release()
            self._lock = DirectoryLock(place, model, self._busy)

    def _busy(self) -> bool:
        return self._training or (self._thread is not None and self._thread.is_alive())

    def release(self) -> None:
        """Lets others save in the directory, once the last checkpoint has been written."""
        self.finish()
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def save(
        self,
        directory: Path,
        model: keras.Model,
        take: Callable[[Mapping[str, keras.Variable]], Snapshot] | None,
        *,
        step: int,
        progress: Progress,
        plan: str,
        keep: int,
    ) -> pathlib.Path:
        """Takes a snapshot and begins to write it, once the previous checkpoint has been written.

        Args:
            directory: directory of checkpoints.
            model: the model, from which values are saved that devices don't keep.
            take: takes a snapshot of those variables that devices keep, by their keys; None if the model has all.
            step: number of training steps done.
            progress: how far training has come.
            plan: the plan's JSON text.
            keep: number of checkpoints that the directory keeps.

        Returns:
            The path that the checkpoint will have.

        Raises:
            CheckpointError: the directory can't be written to, or is in use by another training.
        """
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least 1 checkpoint must be kept")
        self.finish()
        self._error = None
        place = pathlib.Path(directory).absolute()
        try:
            self._hold(place, model.name)
            writing = Writing(place, step)
        except CheckpointError as error:
            self._error = error
            raise
        variables = {**variables_of(model), **metrics_of(model)}
        try:
            snapshot = None if take is None else take(variables)
        except BaseException:
            writing.discard()
            raise
        shards = {} if snapshot is None else snapshot.shards
        shard_of = {key: shard for shard, keys in shards.items() for key in keys}
        entries = tuple(
            Entry(key, v.path, dtype_of(v), tuple(v.shape), shard_of.get(key, CLIENT)) for key, v in variables.items()
        )
        # A tensor shares its variable's buffer until the variable is assigned.
        tensors = {key: tensor_of(v) for key, v in variables.items() if key not in shard_of}
        manifest = Manifest(step, progress.epoch, progress.batch, entries, {}, json.loads(plan), progress.data)

        def write() -> None:
            try:
                _write(writing, manifest, snapshot, tensors, progress.state)
                self.newest = (writing.target, step)
                remove_old(place, keep)
            except Exception as error:
                self._error = error
                writing.discard()
                logger.warning("checkpoint %s couldn't be written: %s", writing.target, reason(error))

        self._thread = threading.Thread(target=write, name=f"write {writing.target.name}")
        self._thread.start()
        return writing.target

    def wait(self) -> None:
        """Waits until the last checkpoint has been written.

        Raises:
            CheckpointError: writing failed; the previous checkpoint is still there.
        """
        self.finish()
        error, self._error = self._error, None
        if error is not None:
            raise error if isinstance(error, CheckpointError) else CheckpointError(reason(error)) from error

    def finish(self) -> None:
        """Waits until the last checkpoint has been written, or its failure logged."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None


def _write(
    writing: Writing,
    manifest: Manifest,
    snapshot: Snapshot | None,
    tensors: Mapping[str, tf.Tensor],
    state: Mapping[str, tf.Tensor],
) -> None:
    """Writes and publishes a checkpoint."""
    writers: dict[str, str] = {}
    if snapshot is not None:
        snapshot.write(writing.place)
        writers |= {shard: f"server {host}" for shard, host in snapshot.writers.items()}
    for shard, own in ((CLIENT, tensors), (DATA, state)):
        if own:
            _save_tensors(writing.place / shard, own)
            writers[shard] = "the training process"
    shards = {
        shard: writing.describe(shard, [entry for entry in manifest.entries if entry.shard == shard], writer)
        for shard, writer in writers.items()
    }
    writing.publish(dataclasses.replace(manifest, shards=shards))


def _save_tensors(prefix: pathlib.Path, tensors: Mapping[str, tf.Tensor]) -> None:
    try:
        with tf.device("CPU:0"):
            tf.raw_ops.SaveV2(
                prefix=str(prefix),
                tensor_names=list(tensors),
                shape_and_slices=[""] * len(tensors),
                tensors=list(tensors.values()),
            )
    except tf.errors.OpError as error:
        raise CheckpointError(f"{prefix} can't be written: {reason(error)}") from error
