"""TensorFlow's servers are told from ports that are closed, silent, or somebody else's."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from workers import PATIENCE

from dapple_tf.clusters.shared_connections import connected
from dapple_tf.describe.cluster import Cluster
from dapple_tf.network import knocking
from dapple_tf.network.knocking import unreachable
from dapple_tf.tools.hosts import LocalWorkers, free_ports

SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@contextlib.contextmanager
def listener(says: bytes | None) -> Iterator[str]:
    """Accepts connections, says something or, for None, nothing, and hangs up once it has said it; its address."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as listening:
        held = []

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = listening.accept()
                    held.append(connection)
                    if says is not None:
                        connection.recv(100)
                        connection.sendall(says)
                        connection.shutdown(socket.SHUT_WR)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()
            for connection in held:
                connection.close()


def directly(*addresses: str) -> dict[str, str]:
    return dict(zip(addresses, addresses, strict=True))


def test_what_is_behind_a_port() -> None:
    closed = f"127.0.0.1:{free_ports(1)[0]}"
    with (
        listener(SETTINGS) as server,
        listener(None) as silent,
        listener(b"") as curt,
        listener(b"HTTP/1.1 400") as web,
    ):
        assert unreachable(directly(server, f"localhost:{server.rpartition(':')[2]}"), PATIENCE) == {}
        assert unreachable(directly(silent, server), 0.2) == {silent: "no answer within 0.2 s"}
        assert unreachable(directly(closed, curt, web, server, "nowhere.invalid:5"), PATIENCE) == {
            closed: "Connection refused",
            curt: "the connection is closed from there",
            web: "something else answers there: b'HTTP/1.1 '",
            "nowhere.invalid:5": "Name or service not known",
        }


def test_more_servers_than_connections_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the whole time, whatever the ones before it took."""
    monkeypatch.setattr(knocking, "_AT_ONCE", 2)
    with listener(SETTINGS) as server, listener(None) as silent:
        ways = dict(zip("abcde", (silent, silent, server, silent, server), strict=True))
        assert unreachable(ways, 0.2) == dict.fromkeys("abd", "no answer within 0.2 s")


def test_tensorflow_s_servers_answer(workers: LocalWorkers) -> None:
    cluster = Cluster.of_servers(workers.addresses[:2])
    with connected(cluster) as connection:
        assert connection is not None
        assert unreachable(directly(*(f"127.0.0.1:{lease.port}" for lease in connection._leases)), PATIENCE) == {}
