"""The connections of this process: whatever works on the same workers shares one."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from dapple_tf.clusters.connection import Connection, any_started, close_tunnels, forget
from dapple_tf.clusters.remote_session import RemoteSession, wait_for_all_calls
from dapple_tf.clusters.session import session_config
from dapple_tf.common.units import counted
from dapple_tf.describe.cluster import Cluster, ClusterError
from dapple_tf.describe.faults import FaultPolicy

_EXIT_SECONDS = 3.0
_lock = threading.RLock()
_connections: dict[tuple[str, ...], Connection] = {}
_forked = False
"""Whether this process was forked from one with a TensorFlow server."""


def acquire(cluster: Cluster, faults: FaultPolicy) -> Connection:
    """Returns the connection to a cluster's workers, opened if necessary; `release` gives it back.

    An already open connection keeps its own `FaultPolicy`.

    Raises:
        ClusterError: see `Connection`; or this process has some of the workers in another cluster's connection, or
            can't use TensorFlow's servers.
    """
    if _forked:
        raise ClusterError(
            "this process was forked from one that uses workers, and lacks the threads of TensorFlow's server there: "
            'start it anew instead, by multiprocessing.get_context("spawn"), say'
        )
    with _lock:
        connection = _connections.get(cluster.addresses)
        if connection is None or connection.lost is not None:
            for addresses in _connections:
                shared = set(addresses) & set(cluster.addresses)
                if shared and addresses != cluster.addresses:
                    raise ClusterError(
                        f"worker {min(shared)} is in use by this process already, in another cluster of "
                        f"{counted(len(addresses), 'worker')}: close() that model first"
                    )
            if connection is not None:
                _close(connection)
            connection = _connections[cluster.addresses] = Connection(cluster, faults)
        connection.users += 1
        return connection


def release(connection: Connection) -> None:
    """Gives a connection back; once nobody uses it, others can have the workers."""
    with _lock:
        connection.users -= 1
        if connection.users <= 0:
            _close(connection)


def others_use(wanted: Cluster, own: Cluster) -> bool:
    """Whether others in this process use workers of ``wanted`` besides the caller's ``own``."""

    def prevents(addresses: tuple[str, ...], connection: Connection) -> bool:
        if addresses == own.addresses:
            return connection.users > 1
        return addresses != wanted.addresses or connection.lost is None

    with _lock:
        return any(
            prevents(addresses, connection)
            for addresses, connection in _connections.items()
            if set(addresses) & set(wanted.addresses)
        )


def give_back(cluster: Cluster) -> None:
    """Gives the workers of a cluster back, whoever in this process was about to use them."""
    with _lock:
        if (connection := _connections.get(cluster.addresses)) is not None:
            _close(connection)


@contextlib.contextmanager
def connected(cluster: Cluster, faults: FaultPolicy | None = None) -> Iterator[Connection | None]:
    """Keeps a cluster's workers for this process within the ``with`` block; does nothing for local devices.

    Yields:
        The connection to the workers; None for local devices.

    Raises:
        ClusterError: see `acquire`.
    """
    if not cluster.addresses:
        yield None
        return
    connection = acquire(cluster, faults or FaultPolicy())
    try:
        yield connection
    finally:
        release(connection)


def open_session(cluster: Cluster, graph: tf.Graph, connection: Connection | None = None) -> Any:
    """Returns a session on a cluster's devices: TensorFlow's own, or one that watches the workers.

    Workers must stay `connected` while it is used: once they are given back, each run raises a `WorkerLostError`.

    Args:
        cluster: the cluster to run on.
        graph: the graph to run.
        connection: connection to the workers; None is the one that this process holds.

    Raises:
        WorkerLostError: the connection has lost a worker.
    """
    config = session_config(cluster)
    if not cluster.addresses:
        return tf.compat.v1.Session(graph=graph, config=config)
    connection = connection or _connections[cluster.addresses]
    if connection.lost is not None:
        raise connection.lost.anew()
    return RemoteSession(connection, graph, config)


def _close(connection: Connection) -> None:
    """Closes a connection, after which others can be opened; a newer one to the same workers stays."""
    for addresses, own in list(_connections.items()):
        if own is connection:
            del _connections[addresses]
    connection.close()


def _leave_all() -> None:
    """Leaves all workers to the process that this one was forked from, whatever ends first."""
    global _lock, _forked
    _lock = threading.RLock()
    _forked = _forked or any_started()
    for connection in _connections.values():
        connection.disown()
    _connections.clear()
    forget()


os.register_at_fork(after_in_child=_leave_all)


@atexit.register
def _give_all_back() -> None:
    for connection in list(_connections.values()):
        _close(connection)
    wait_for_all_calls(_EXIT_SECONDS)
    close_tunnels()
