"""Snapshots of the devices' variables: taken between two steps, and written by the servers while later steps run."""

from __future__ import annotations

import pathlib
import threading
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from dapple_tf.checkpoints.checkpoint_graph import RestoreGraph, SnapshotGraph
from dapple_tf.checkpoints.checkpoint_manifest import CheckpointError
from dapple_tf.errors import reason
from dapple_tf.variables.device_values import Holding
from dapple_tf.variables.stored_values import Session


class Snapshot:
    """A snapshot in the servers' memory.

    Attributes:
        shards: shard -> its variables.
        writers: shard -> the server that writes it.
    """

    def __init__(self, graph: SnapshotGraph, session: Session, release: Callable[[], None]) -> None:
        """Describes a snapshot that has been taken."""
        self.shards, self.writers = graph.shards, graph.writers
        self._graph, self._session, self._release = graph, session, release

    def write(self, place: pathlib.Path) -> None:
        """Has the servers write it; may be called in any thread.

        Args:
            place: the directory to write to.

        Raises:
            CheckpointError: a server failed; the text has its reason.
        """
        prefix = self._graph.name
        feed = {f"{prefix}/{node}:0": str(place / shard) for shard, node in self._graph.prefixes.items()}
        try:
            self._session.run([f"{prefix}/{node}" for node in self._graph.write], feed)
        except tf.errors.OpError as error:
            raise CheckpointError(f"the servers can't write to {place}: {reason(error)}") from error
        finally:
            self._release()

    def discard(self) -> None:
        """Gives up writing the snapshot; the next one drops it."""
        self._release()


class Snapshots:
    """Takes snapshots of a session's variables, one at a time, and restores variables from files."""

    def __init__(self, holdings: Callable[[], Sequence[Holding]], session: Session) -> None:
        """See `StoredValues`."""
        self._holdings, self._session = holdings, session
        self._busy = threading.Lock()  # from when a snapshot is taken until it has been written
        self._graph: tuple[dict[str, str], SnapshotGraph] | None = None
        self._restoring: tuple[dict[str, tuple[str, str]], RestoreGraph] | None = None
        self._restorations = 0
        self._arrangements = 0

    def rearrange(self) -> None:
        """Discards the graphs when the holdings have changed, once the last snapshot has been written."""
        self.wait()
        self._graph = self._restoring = None
        self._arrangements += 1

    def take(self, keys: Mapping[str, str]) -> Snapshot:
        """Takes a snapshot, once the previous one has been written.

        Args:
            keys: variable -> its name in files.
        """
        if self._graph is None:
            graph = SnapshotGraph(f"snapshot{self._arrangements}", self._holdings(), keys)
            self._session.add(graph.graph, graph.name)
            self._graph = (dict(keys), graph)
        known, graph = self._graph
        assert known == keys, "the same variables have other names"
        self._busy.acquire()
        try:
            self._session.run([f"{graph.name}/{node}" for node in graph.take])
        except BaseException:
            self._busy.release()
            raise
        return Snapshot(graph, self._session, self._busy.release)

    def restore(self, path: pathlib.Path, located: Mapping[str, tuple[str, str]]) -> None:
        """Has the servers read variables from files; see `LiveValues.fill`."""
        if self._restoring is None or self._restoring[0] != located:
            self._restorations += 1
            made = RestoreGraph(f"restore{self._restorations}", self._holdings(), located)
            self._session.add(made.graph, made.name)
            self._restoring = (dict(located), made)
        _, graph = self._restoring
        feed = {f"{graph.name}/{node}:0": str(path / shard) for shard, node in graph.prefixes.items()}
        try:
            self._session.run([f"{graph.name}/{node}" for node in graph.nodes], feed)
        except tf.errors.OpError as error:
            fault = "is damaged" if isinstance(error, tf.errors.DataLossError) else "can't be read by the servers"
            raise CheckpointError(f"checkpoint {path} {fault}: {reason(error)}") from error

    def wait(self) -> None:
        """Waits until no snapshot is left to write."""
        with self._busy:
            pass
