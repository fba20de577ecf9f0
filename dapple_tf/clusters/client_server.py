"""This process's TensorFlow server for each cluster of workers: sessions run steps at it, workers send results to it.

TensorFlow can't stop a server, so each is made once, and used again as long as the workers' servers have the same
addresses.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from dapple_tf.clusters.server_definition import ServerSettings
from dapple_tf.clusters.serving import free_port, start_server
from dapple_tf.describe.cluster import ClusterError
from dapple_tf.network.control import join_address, split_address
from dapple_tf.network.keys import Keys
from dapple_tf.network.listening import check_private, resolve
from dapple_tf.network.relay import LOOPBACK
from dapple_tf.network.tunnels import Tunnels


class ClientServer(NamedTuple):
    """This process's TensorFlow server for a cluster.

    Attributes:
        port: port at which workers reach it.
        target: its target for sessions.
        tunnels: the tunnels by which it is reached and reaches workers; None without TLS.
    """

    port: int
    target: str
    tunnels: Tunnels | None


_servers: dict[tuple[tuple[str, ...], ...], ClientServer] = {}


def client_server(
    workers: tuple[str, ...],
    hosts: tuple[str, ...],
    keys: Keys | None,
    fingerprints: tuple[str, ...],
    silence: float,
) -> ClientServer:
    """Returns this process's server for a cluster; made once, as TensorFlow can't stop a server.

    Args:
        workers: address of each worker's server.
        hosts: this process's addresses, as workers see them.
        keys: this machine's, for TLS.
        fingerprints: those of the workers' certificates.
        silence: seconds for which a tunnel's link may be down.
    """
    key = workers, hosts, fingerprints, () if keys is None else (keys.fingerprint, str(silence))
    server = _servers.get(key)
    if server is None or (server.tunnels is not None and not server.tunnels.alive):
        server = _servers[key] = _start(workers, hosts, keys, fingerprints, silence)
    elif server.tunnels is not None:
        server.tunnels.drop()
    return server


def _start(
    workers: tuple[str, ...],
    hosts: tuple[str, ...],
    keys: Keys | None,
    fingerprints: tuple[str, ...],
    silence: float,
) -> ClientServer:
    own = [resolve(host)[0] for host in hosts]
    taken = {split_address(worker)[1] for worker in workers}  # Workers on this machine listen there in a moment.
    while (port := free_port(hosts[0])) in taken:
        pass
    cluster = {"client": [join_address(hosts[0], port)], "worker": list(workers)}
    settings = ServerSettings()
    if keys is None:
        for host in hosts:
            try:
                check_private(host, allow_public=bool(os.environ.get("DAPPLE_TF_ALLOW_PUBLIC")), all_interfaces=False)
            except ClusterError as error:
                raise ClusterError(
                    f"this process reaches the workers from {host}, where it would have to listen; use a private "
                    f"network or TLS, or set DAPPLE_TF_ALLOW_PUBLIC=1 if a firewall keeps others out ({error})"
                ) from error
        return ClientServer(port, start_server(cluster, "client", 0, settings, port, own).target, None)
    all_fingerprints = {"client": [""], "worker": fingerprints}
    tunnels = Tunnels(keys, hosts, port, cluster, all_fingerprints, ("client", 0), silence=silence)
    try:
        start_server(tunnels.cluster, "client", 0, settings, tunnels.server_port, resolve(LOOPBACK))
    except BaseException:
        tunnels.close()
        raise
    return ClientServer(port, f"grpc://{join_address(LOOPBACK, tunnels.server_port)}", tunnels)


def any_started() -> bool:
    """Whether this process has a TensorFlow server."""
    return bool(_servers)


def forget() -> None:
    """Leaves all servers and tunnels to the process that this one was forked from."""
    _servers.clear()


def close_tunnels() -> None:
    """Ends what carries the servers' connections, at the end of the process."""
    for server in _servers.values():
        if server.tunnels is not None:
            server.tunnels.close()
