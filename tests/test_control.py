"""Connections between clients and workers: messages, first messages, and knocking at TensorFlow's servers."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator

import pytest
from workers import PATIENCE, serving, wait_until

from dapple_tf.clusters.shared_connections import connected
from dapple_tf.describe.cluster import Cluster
from dapple_tf.network import acceptor as acceptor_module
from dapple_tf.network import knocking
from dapple_tf.network.acceptor import Acceptor, Guest
from dapple_tf.network.control import Channel, ControlError, Hello, join_address, split_address
from dapple_tf.network.knocking import unreachable
from dapple_tf.tools.hosts import LocalWorkers, free_ports

Address = tuple[str, int]


@contextlib.contextmanager
def both_ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the other end of its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with contextlib.closing(Channel.connect(f"127.0.0.1:{port}", 5)) as channel:
            other, _ = listener.accept()
            with other:
                other.settimeout(5)
                yield channel, other


def send_quietly(target: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        target.sendall(data)


def test_messages_go_both_ways() -> None:
    large = {"cluster": {"worker": [f"host-{number}.example.org:2222" for number in range(10_000)]}}
    with both_ends() as (channel, socket_):
        other = Channel(socket_)
        channel.send({"ask": "status", "name": "é\n\u2028"}, 1)
        assert other.receive(1) == {"ask": "status", "name": "é\\n\\u2028"}  # Nothing that a terminal obeys.
        sending = threading.Thread(target=channel.send, args=(large, 5))
        sending.start()
        assert other.receive(5) == large
        sending.join()
        socket_.setblocking(True)
        socket_.sendall(b'{"a": 1}\n{"b": 2}\n{"c"')
        assert [channel.receive(1), channel.receive(1)] == [{"a": 1}, {"b": 2}]
        socket_.sendall(b": 3}\n")
        assert channel.ask({}, 1) == {"c": 3}


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"\xff\xfe\x00\n", "sends something that isn't JSON"),
        (b"[" * 100_000 + b"]" * 100_000 + b"\n", "sends something that isn't JSON: maximum recursion depth"),
        (b"1" * 10_000 + b"\n", "sends something that isn't JSON: Exceeds the limit"),
        (b"[1]\n", "sends a JSON list where an object is expected"),
        (b"x" * (1 << 21), "sends a message of more than 1048576 bytes"),
    ],
    ids=["bytes", "deep", "number", "list", "long"],
)
def test_what_is_no_message(sent: bytes, said: str) -> None:
    with both_ends() as (channel, socket_):
        threading.Thread(target=send_quietly, args=(socket_, sent)).start()
        with pytest.raises(ControlError, match=said):
            channel.receive(5)


def test_random_bytes_are_refused_or_understood() -> None:
    """Nothing but ControlError comes of them, within the deadline."""
    draw = random.Random(0)
    pieces = [b"{", b"}", b"[", b'"a":', b'"', b",", b"1e999", b"NaN", b"\\ud800", b"\x00", b"\xff", b"\n", b"{}\n"]
    for _ in range(100):
        data = b"".join(draw.choices(pieces, k=draw.randrange(1, 40))) + draw.randbytes(draw.randrange(3)) + b"\n"
        with both_ends() as (channel, socket_):
            socket_.sendall(data)
            with contextlib.suppress(ControlError):
                assert isinstance(channel.receive(1), dict)


@pytest.mark.parametrize("drips", [False, True])
def test_silence_ends_with_the_deadline(drips: bool) -> None:
    """Also if each byte comes long before it, but the message doesn't."""
    with both_ends() as (channel, socket_):
        done = threading.Event()

        def drip() -> None:
            while not done.wait(0.01):
                send_quietly(socket_, b" ")

        thread = threading.Thread(target=drip if drips else int)
        thread.start()
        socket_.sendall(b'{"half": ')
        with pytest.raises(ControlError, match=r"doesn't answer within 0.2 s"):
            channel.receive(0.2)
        done.set()
        thread.join()


def test_who_reads_nothing_is_told_of() -> None:
    with both_ends() as (channel, _), pytest.raises(ControlError, match="takes no message"):
        for _ in range(100):
            channel.send({"text": "x" * 1_000_000}, 0.2)


def test_connections_that_end_or_never_begin() -> None:
    with both_ends() as (channel, socket_):
        socket_.sendall(b'{"last": 1}\n')
        socket_.close()
        assert channel.receive(1) == {"last": 1}
        with pytest.raises(ControlError, match="connection closed by the other side"):
            channel.receive(1)
        channel.close()
    with both_ends() as (channel, socket_):
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        socket_.close()
        with pytest.raises(ControlError, match=r"connection lost: .*reset"):
            channel.receive(1)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        with pytest.raises(ControlError, match=r"can't be reached: .*refused"):
            Channel.connect(f"127.0.0.1:{held.getsockname()[1]}", 1)


@pytest.mark.parametrize(("address", "parts"), [("10.0.0.1:2222", ("10.0.0.1", 2222)), ("[::1]:80", ("::1", 80))])
def test_addresses(address: str, parts: Address) -> None:
    assert split_address(address) == parts
    assert join_address(*parts) == address


# ---- first messages of connections: who is slow to speak keeps nobody else waiting


@pytest.fixture
def listening() -> Iterator[tuple[Acceptor[Hello], Address]]:
    """Connections to all addresses of the loopback device, so that clients seem to be on several hosts."""
    listener = socket.create_server(("127.0.0.1", 0))
    with contextlib.closing(Acceptor(listener, Hello)) as acceptor:
        yield acceptor, listener.getsockname()


@contextlib.contextmanager
def guest_of(address: Address, host: str = "127.0.0.1", says: object = None) -> Iterator[socket.socket]:
    with socket.create_connection(address, 5, (host, 0)) as connection:
        if says is not None:
            connection.sendall(json.dumps(says).encode() + b"\n")
        yield connection


def next_guest(acceptor: Acceptor[Hello]) -> Guest[Hello]:
    guests: list[Guest[Hello] | None] = [None]

    def look() -> bool:
        acceptor.wait()
        guests[0] = acceptor.take({})
        return guests[0] is not None

    wait_until(look)
    assert guests[0] is not None
    guests[0].opening.channel.close()
    return guests[0]


def settle(acceptor: Acceptor[Hello]) -> None:
    """Deals with all that has arrived."""
    while acceptor._selector.select(0.1):
        acceptor.wait()


def test_who_speaks_is_served_before_those_who_do_not(listening: tuple[Acceptor[Hello], Address]) -> None:
    acceptor, address = listening
    with contextlib.ExitStack() as stack:
        for _ in range(70):
            stack.enter_context(guest_of(address)).sendall(b"{")
        stack.enter_context(guest_of(address, says={"ask": "status"}))
        guest = next_guest(acceptor)
        assert (guest.host, guest.opening.message) == ("127.0.0.1", {"ask": "status"})
        assert guest.opening.channel.longest == Channel.LONGEST


def test_a_crowd_from_one_host_keeps_no_other_out(
    listening: tuple[Acceptor[Hello], Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest connections of the host that has the most are closed."""
    monkeypatch.setattr(acceptor_module, "_MOST_GUESTS", 5)
    acceptor, address = listening
    with contextlib.ExitStack() as stack:
        patient = stack.enter_context(guest_of(address, "127.0.0.9"))
        crowd = [stack.enter_context(guest_of(address, "127.0.0.2")) for _ in range(20)]
        settle(acceptor)
        assert [guest.host for guest in acceptor._guests].count("127.0.0.2") == 4
        assert crowd[0].recv(1) == b""  # closed
        patient.sendall(b'{"ask": "status"}\n')
        assert next_guest(acceptor).host == "127.0.0.9"


def test_the_host_that_is_served_least_is_next(listening: tuple[Acceptor[Hello], Address]) -> None:
    acceptor, address = listening
    with contextlib.ExitStack() as stack:
        for host in ("127.0.0.2", "127.0.0.2", "127.0.0.3"):
            stack.enter_context(guest_of(address, host, says={"from": host}))
        settle(acceptor)
        served = {"127.0.0.2": 1}
        hosts = []
        while (guest := acceptor.take(served)) is not None:
            served[guest.host] = served.get(guest.host, 0) + 1
            hosts.append(guest.host)
            guest.opening.channel.close()
    assert hosts == ["127.0.0.3", "127.0.0.2", "127.0.0.2"]


@pytest.mark.parametrize("says", [b"[]\n", b"x" * 200_000, b'{"half":'], ids=["list", "long", "half"])
def test_who_says_nonsense_or_too_little_is_dismissed(
    says: bytes, listening: tuple[Acceptor[Hello], Address], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor_module, "_OPENING_SECONDS", 0.2)
    acceptor, address = listening
    with guest_of(address) as connection:
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            connection.send(says)
        settle(acceptor)
        while acceptor._guests:
            acceptor.wait()
        assert acceptor.take({}) is None


# ---- knocking: TensorFlow's servers are told from ports that are closed, silent, or somebody else's


@contextlib.contextmanager
def saying(says: bytes) -> Iterator[str]:
    """The address of somebody who says something to all, and hangs up."""

    def serve(connection: socket.socket) -> None:
        connection.recv(100)
        connection.sendall(says)
        connection.shutdown(socket.SHUT_WR)

    with serving(serve) as address:
        yield address


def directly(*addresses: str) -> dict[str, str]:
    return dict(zip(addresses, addresses, strict=True))


def test_what_is_behind_a_port(workers: LocalWorkers) -> None:
    closed = f"127.0.0.1:{free_ports(1)[0]}"
    with connected(Cluster.of_servers(workers.addresses[:1])) as connection:
        assert connection is not None
        server = f"127.0.0.1:{connection._leases[0].port}"
        with serving(lambda _: None) as silent, saying(b"") as curt, saying(b"HTTP/1.1 400") as web:
            assert unreachable(directly(server, f"localhost:{server.rpartition(':')[2]}"), PATIENCE) == {}
            assert unreachable(directly(closed, curt, web, server, "nowhere.invalid:5"), PATIENCE) == {
                closed: "Connection refused",
                curt: "the connection is closed from there",
                web: "something else answers there: b'HTTP/1.1 '",
                "nowhere.invalid:5": "Name or service not known",
            }
            assert unreachable(directly(silent), 0.2) == {silent: "no answer within 0.2 s"}


def test_more_servers_than_connections_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has the whole time, whatever the ones before it took."""
    monkeypatch.setattr(knocking, "_AT_ONCE", 2)
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    with saying(settings) as server, serving(lambda _: None) as silent:
        ways = dict(zip("abcde", (silent, silent, server, silent, server), strict=True))
        assert unreachable(ways, 0.2) == dict.fromkeys("abd", "no answer within 0.2 s")


def test_one_ctrl_c_ends_the_knocking() -> None:
    with serving(lambda _: os.kill(os.getpid(), signal.SIGINT)) as silent, pytest.raises(KeyboardInterrupt):
        unreachable(directly(silent), PATIENCE)
