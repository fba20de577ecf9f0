"""Relays hand on what TensorFlow's servers say to each other, and nothing of what anybody else does."""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from conftest import require_namespaces
from tls_keys import new_authority, new_machine
from workers import PATIENCE, has_ended, wait_until

from dapple_tf.errors import ClusterError
from dapple_tf.network.certificates import Authority
from dapple_tf.network.control import split_address
from dapple_tf.network.keys import CERTIFICATE, Keys
from dapple_tf.network.relay import LOOPBACK, Relay, _break_off_after, _End, _user_at_the_other_end, carry
from dapple_tf.network.tunnels import Tunnels
from dapple_tf.tools.hosts import environment, free_ports


@pytest.fixture(scope="module")
def authority() -> Authority:
    return new_authority()


@pytest.fixture(scope="module")
def keys(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return Keys(new_machine(authority, tmp_path_factory.mktemp("keys") / "one", "127.0.0.1"))


def print_of(directory: pathlib.Path) -> str:
    return Keys(directory).fingerprint


ALERT = b"\x15\x03\x01\x00\x02\x02\x46"
"""What TLS says to who doesn't speak it: protocol version."""


def receive(source: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count and (part := source.recv(1 << 16)):
        data += part
    return bytes(data)


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname(), PATIENCE)
        other, _ = listener.accept()
        other.settimeout(PATIENCE)
        return one, other


def shaken(keys: Keys, one: socket.socket, other: socket.socket) -> tuple[ssl.SSLSocket, ssl.SSLSocket]:
    """Both ends of a connection of TLS."""
    client, server = keys.peer(one), keys.server(other)
    thread = threading.Thread(target=server.do_handshake)
    thread.start()
    client.do_handshake()
    thread.join()
    return client, server


@pytest.mark.parametrize("secured", [False, True])
def test_both_directions_of_a_link_at_once(secured: bool, keys: Keys) -> None:
    """More than any buffer holds, from both sides before either reads anything: neither waits for the other."""
    (first, left), (second, right) = pair(), pair()
    if secured:
        second, right = shaken(keys, second, right)
    carrier = threading.Thread(target=carry, args=(left, right))
    carrier.start()
    draw = random.Random(0)
    one, other = draw.randbytes(5_000_001), draw.randbytes(4_000_003)
    with first, left, second, right:
        senders = [threading.Thread(target=first.sendall, args=(one,))]
        if not secured:  # Connections of TLS are for one thread at a time.
            senders.append(threading.Thread(target=second.sendall, args=(other,)))
        for thread in senders:
            thread.start()
        assert receive(second, len(one)) == one
        if secured:
            senders.append(threading.Thread(target=second.sendall, args=(other,)))
            senders[-1].start()
        assert receive(first, len(other)) == other
        for thread in (*senders, carrier):
            if thread is carrier:
                first.close()
            thread.join(PATIENCE)
            assert not thread.is_alive()


@contextlib.contextmanager
def echoing() -> Iterator[tuple[int, list[bytes]]]:
    """A server that answers what it is sent, and remembers it."""
    heard: list[bytes] = []
    with socket.create_server((LOOPBACK, 0)) as listener:

        def serve(connection: socket.socket) -> None:
            with connection, contextlib.suppress(OSError):
                while data := connection.recv(1 << 16):
                    heard.append(data)
                    connection.sendall(data)

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname()[1], heard
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def test_only_those_who_are_known_reach_the_server(authority: Authority, keys: Keys, tmp_path: pathlib.Path) -> None:
    """Not who has no certificate, nor one of another authority, nor one of this one's that isn't in the cluster."""
    neighbour = Keys(new_machine(authority, tmp_path / "neighbour", "127.0.0.1"))
    foreign = Keys(new_machine(new_authority(), tmp_path / "foreign", "127.0.0.1"))
    with echoing() as (port, heard):
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        Relay(keys, [listener], port, [print_of(keys.directory)], [])
        with socket.create_connection(address, PATIENCE) as plain, contextlib.suppress(ConnectionResetError):
            plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert plain.recv(100) in (b"", ALERT)
        for stranger in (neighbour, foreign):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.load_cert_chain(stranger.directory / CERTIFICATE, stranger.directory / "key.pem")
            plain = socket.create_connection(address, PATIENCE)
            with context.wrap_socket(plain) as secured, contextlib.suppress(OSError):
                secured.sendall(b"hello")
                assert secured.recv(100) == b""
        assert heard == []
        with socket.create_connection(address, PATIENCE) as plain, keys.peer(plain) as secured:
            secured.do_handshake()
            secured.sendall(b"hello")
            assert secured.recv(100) == b"hello"


def test_only_the_server_s_user_gets_into_a_tunnel(
    keys: Keys, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Any user of the machine reached the servers of all others by it. The kernel calls closed connections root's."""
    one, other = pair()
    with other:
        assert _user_at_the_other_end(other) == os.geteuid()
        one.close()
        assert _user_at_the_other_end(other) is None
    with caplog.at_level("WARNING"):
        (port,) = Relay(keys, [], 1, [], [_End("127.0.0.1:1", keys.fingerprint)]).ports
        monkeypatch.setattr(os, "getuid", lambda: 4711)
        with socket.create_connection((LOOPBACK, port), PATIENCE) as link, contextlib.suppress(ConnectionResetError):
            assert link.recv(1) == b""
        assert f"user {os.geteuid()} of this machine isn't let through to 127.0.0.1:1" in caplog.text


def test_relays_show_the_certificate_that_others_were_told_of(authority: Authority, tmp_path: pathlib.Path) -> None:
    """They read the directory again: one that was renewed since showed what nobody knew, and no tunnel was let in."""
    one, other = (new_machine(authority, tmp_path / name, "127.0.0.1") for name in ("one", "other"))
    first, second = free_ports(2)
    cluster = {"client": [f"127.0.0.1:{first}"], "worker": [f"127.0.0.1:{second}"]}
    keys, others = Keys(one), Keys(other)
    prints = {"client": [keys.fingerprint], "worker": [others.fingerprint]}
    for directory in (one, other):
        new_machine(authority, directory, "127.0.0.1")
        assert print_of(directory) not in (keys.fingerprint, others.fingerprint)
    with contextlib.ExitStack() as stack:
        client = Tunnels(keys, ["127.0.0.1"], first, cluster, prints, ("client", 0))
        stack.callback(client.close)
        worker = Tunnels(others, ["127.0.0.1"], second, cluster, prints, ("worker", 0))
        stack.callback(worker.close)
        server = stack.enter_context(socket.create_server((LOOPBACK, worker.server_port)))
        server.settimeout(PATIENCE)
        with socket.create_connection(split_address(client.cluster["worker"][0]), PATIENCE) as link:
            link.sendall(b"question")
            accepted, _ = server.accept()
            with accepted:
                assert accepted.recv(100) == b"question"


def test_tunnels_lead_to_the_certificate_that_is_known(
    keys: Keys, authority: Authority, tmp_path: pathlib.Path
) -> None:
    """Data arrive by two processes; dropped links end; and nothing goes to a machine with another certificate."""
    other = new_machine(authority, tmp_path / "other", "127.0.0.1")
    first, second, third = free_ports(3)
    cluster = {"client": [f"127.0.0.1:{first}"], "worker": [f"127.0.0.1:{second}", f"127.0.0.1:{third}"]}
    prints = {"client": [print_of(keys.directory)], "worker": [print_of(other), print_of(keys.directory)]}
    with contextlib.ExitStack() as stack:
        client = Tunnels(keys, ["127.0.0.1"], first, cluster, prints, ("client", 0))
        stack.callback(client.close)
        worker = Tunnels(Keys(other), ["127.0.0.1"], second, cluster, prints, ("worker", 0))
        stack.callback(worker.close)
        impostor = Tunnels(Keys(other), ["127.0.0.1"], third, cluster, prints, ("worker", 1))
        stack.callback(impostor.close)
        assert client.cluster["client"] == [f"{LOOPBACK}:{client.server_port}"]
        assert worker.cluster["worker"][0] == f"{LOOPBACK}:{worker.server_port}"
        server = stack.enter_context(socket.create_server((LOOPBACK, worker.server_port)))
        with socket.create_connection(split_address(client.cluster["worker"][0]), PATIENCE) as link:
            link.sendall(b"question")
            server.settimeout(PATIENCE)
            accepted, _ = server.accept()
            with accepted:
                assert accepted.recv(100) == b"question"
                accepted.sendall(b"answer")
                assert link.recv(100) == b"answer"
                client.drop()
                assert link.recv(100) == b""
                assert accepted.recv(100) == b""
        with socket.create_connection(split_address(client.cluster["worker"][1]), PATIENCE) as link:
            assert link.recv(100) == b""
        assert client.alive
        process = client._process.pid
        client.close()
        assert not client.alive
        wait_until(lambda: has_ended(process))
        with pytest.raises(ClusterError, match=rf"no tunnel can end at port {second} of 127.0.0.1: is it taken\?"):
            Tunnels(keys, ["127.0.0.1"], second, cluster, prints, ("client", 0))


CLOSING = """
import pathlib, socket, subprocess, sys
from dapple_tf.network import relay
from dapple_tf.network.keys import Keys

def ip(*words):
    subprocess.run(["ip", *words], check=True)

ip("link", "set", "lo", "up")
ip("rule", "add", "priority", "200", "lookup", "local")
ip("rule", "del", "priority", "0")
relay.LEAST_SILENCE = 2.0
keys = Keys(sys.argv[1])
server, listener = socket.create_server((relay.LOOPBACK, 0)), socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
relay.Relay(keys, [listener], server.getsockname()[1], [keys.fingerprint], [])
own = relay.Relay(keys, [], 0, [], [relay._End(f"127.0.0.1:{port}", keys.fingerprint)])
client = socket.create_connection((relay.LOOPBACK, own.ports[0]))
client.sendall(b"question")
accepted, _ = server.accept()
assert accepted.recv(100) == b"question"
ip("rule", "add", "priority", "100", "ipproto", "tcp", sys.argv[2], str(port), "blackhole")
if sys.argv[3] == "sends":
    client.sendall(b"another")
for side in (client, accepted):
    while side.recv(100):
        pass
print("both ends know", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("lost", "does"), [("dport", "sends"), ("sport", "sends"), ("sport", "waits")])
def test_a_port_that_a_firewall_closes_in_the_middle_ends_both_sides_of_its_links(
    keys: Keys, lost: str, does: str
) -> None:
    """Nobody noticed before `step_seconds`, an hour: what was sent was repeated, and the other side waited for it."""
    require_namespaces()
    command = ["unshare", "-rn", sys.executable, "-c", CLOSING, str(keys.directory), lost, does]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.stdout == "both ends know\n", done.stderr


def test_links_that_may_be_down_for_long(keys: Keys) -> None:
    """Not less than what counts as a loss of the worker."""
    one, other = pair()
    seconds: list[float] = []
    with one, other:
        for silence in (1.0, 300.0, 86_400.0):
            listener = socket.create_server(("127.0.0.1", 0))
            own = Relay(keys, [listener], 0, [], [], silence)
            _break_off_after(one, own._silence)
            seconds.append(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000)
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert seconds == [50, 300, 32_767]
