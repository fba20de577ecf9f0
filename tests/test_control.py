"""Messages between a client and a worker: what arrives, what doesn't, and how long anyone waits for it."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from dapple_tf.network.control import Channel, ControlError, join_address, split_address

DEEP = b"[" * 100_000 + b"]" * 100_000


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


def test_messages_go_both_ways() -> None:
    with both_ends() as (channel, socket_):
        other = Channel(socket_)
        channel.send({"ask": "status", "name": "é\n\u2028"}, 1)
        assert other.receive(1) == {"ask": "status", "name": "é\\n\\u2028"}  # Nothing that a terminal obeys.
        socket_.setblocking(True)
        socket_.sendall(b'{"a": 1}\n{"b": 2}\n{"c"')
        assert channel.receive(1) == {"a": 1}
        assert channel.receive(1) == {"b": 2}
        socket_.sendall(b": 3}\n")
        assert channel.ask({}, 1) == {"c": 3}


def test_a_large_message_arrives_whole() -> None:
    message = {"cluster": {"worker": [f"host-{number}.example.org:2222" for number in range(10_000)]}}
    with both_ends() as (channel, socket_):
        other = Channel(socket_)
        sending = threading.Thread(target=channel.send, args=(message, 5))
        sending.start()
        assert other.receive(5) == message
        sending.join()


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"\n", "sends something that isn't JSON: Expecting value"),
        (b"\xff\xfe\x00\n", "sends something that isn't JSON"),
        (b"GET / HTTP/1.1\r\n", "sends something that isn't JSON"),
        (DEEP + b"\n", "sends something that isn't JSON: maximum recursion depth"),
        (b"1" * 10_000 + b"\n", "sends something that isn't JSON: Exceeds the limit"),
        (b"[1]\n", "sends a JSON list where an object is expected"),
        (b"null\n", "sends a JSON NoneType where an object is expected"),
        (b"x" * (1 << 21), "sends a message of more than 1048576 bytes"),
    ],
    ids=["empty", "bytes", "http", "deep", "number", "list", "null", "long"],
)
def test_what_is_no_message(sent: bytes, said: str) -> None:
    with both_ends() as (channel, socket_):
        threading.Thread(target=send_quietly, args=(socket_, sent)).start()
        with pytest.raises(ControlError, match=said):
            channel.receive(5)


def send_quietly(target: socket.socket, data: bytes) -> None:
    with contextlib.suppress(OSError):
        target.sendall(data)


def test_random_bytes_are_refused_or_understood() -> None:
    """Nothing but ControlError comes of them, within the deadline."""
    draw = random.Random(0)
    pieces = [b"{", b"}", b"[", b'"a":', b'"', b",", b"1e999", b"NaN", b"\\ud800", b"\x00", b"\xff", b"\n", b"{}\n"]
    for _ in range(300):
        data = b"".join(draw.choices(pieces, k=draw.randrange(1, 40))) + draw.randbytes(draw.randrange(3)) + b"\n"
        with both_ends() as (channel, socket_):
            socket_.sendall(data)
            with contextlib.suppress(ControlError):
                assert isinstance(channel.receive(1), dict)


def test_silence_ends_with_the_deadline() -> None:
    with both_ends() as (channel, socket_):
        socket_.sendall(b'{"half": ')
        started = time.monotonic()
        with pytest.raises(ControlError, match=r"doesn't answer within 0.2 s"):
            channel.receive(0.2)
        assert time.monotonic() - started >= 0.2


def test_a_slow_sender_has_no_more_time_than_a_silent_one() -> None:
    """Each byte comes long before the deadline; the message doesn't."""
    with both_ends() as (channel, socket_):
        done = threading.Event()

        def drip() -> None:
            while not done.wait(0.01):
                send_quietly(socket_, b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        with pytest.raises(ControlError, match="doesn't answer"):
            channel.receive(0.3)
        done.set()
        thread.join()


def test_who_reads_nothing_is_told_of() -> None:
    with both_ends() as (channel, _):
        message = {"text": "x" * 1_000_000}
        with pytest.raises(ControlError, match="takes no message"):
            for _ in range(100):
                channel.send(message, 0.2)


def test_a_closed_connection() -> None:
    with both_ends() as (channel, socket_):
        socket_.sendall(b'{"last": 1}\n')
        socket_.close()
        assert channel.receive(1) == {"last": 1}
        with pytest.raises(ControlError, match="connection closed by the other side"):
            channel.receive(1)
        channel.close()
        channel.close()


def test_a_reset_connection() -> None:
    with both_ends() as (channel, socket_):
        socket_.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        socket_.close()
        with pytest.raises(ControlError, match=r"connection lost: .*reset"):
            channel.receive(1)
        with pytest.raises(ControlError, match="connection"):
            for _ in range(10):
                channel.ask({}, 1)


def test_nobody_there() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        with pytest.raises(ControlError, match=r"can't be reached: .*refused"):
            Channel.connect(f"127.0.0.1:{held.getsockname()[1]}", 1)
    with pytest.raises(ControlError, match="can't be reached"):
        Channel.connect("no-such-host.invalid:1", 1)


@pytest.mark.parametrize(
    ("address", "host", "port"), [("10.0.0.1:2222", "10.0.0.1", 2222), ("[::1]:80", "::1", 80), ("a.b:1", "a.b", 1)]
)
def test_addresses(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)
    assert join_address(host, port) == address
