"""First messages of connections: who is slow to speak, or never does, keeps nobody else waiting."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator

import pytest
from workers import wait_until

from dapple_tf.network import acceptor as acceptor_module
from dapple_tf.network.acceptor import Acceptor, Guest
from dapple_tf.network.control import Channel, Hello

ADDRESS = tuple[str, int]


@pytest.fixture
def listening() -> Iterator[tuple[Acceptor[Hello], ADDRESS]]:
    """Connections to all addresses of the loopback device, so that clients seem to be on several hosts."""
    listener = socket.create_server(("127.0.0.1", 0))
    acceptor = Acceptor(listener, Hello)
    yield acceptor, listener.getsockname()
    acceptor.close()


@contextlib.contextmanager
def connected(address: ADDRESS, host: str = "127.0.0.1", says: object = None) -> Iterator[socket.socket]:
    with socket.create_connection(address, 5, (host, 0)) as connection:
        if says is not None:
            connection.sendall(json.dumps(says).encode() + b"\n")
        yield connection


def next_guest(acceptor: Acceptor[Hello], served: dict[str, int] | None = None) -> Guest[Hello]:
    guests: list[Guest[Hello] | None] = []

    def look() -> bool:
        acceptor.wait()
        guests.append(acceptor.take(served or {}))
        return guests[-1] is not None

    wait_until(look)
    guest = guests[-1]
    assert guest is not None
    return guest


def test_who_speaks_is_served_before_those_who_do_not(listening: tuple[Acceptor[Hello], ADDRESS]) -> None:
    acceptor, address = listening
    with contextlib.ExitStack() as stack:
        for _ in range(70):
            stack.enter_context(connected(address)).sendall(b"{")
        stack.enter_context(connected(address, says={"ask": "status"}))
        guest = next_guest(acceptor)
        assert (guest.host, guest.opening.message) == ("127.0.0.1", {"ask": "status"})
        assert guest.opening.channel.longest == Channel.LONGEST
        guest.opening.channel.close()


def test_a_crowd_from_one_host_keeps_no_other_out(
    listening: tuple[Acceptor[Hello], ADDRESS], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest connections of the host that has the most are closed."""
    monkeypatch.setattr(acceptor_module, "_MOST_GUESTS", 5)
    acceptor, address = listening
    with contextlib.ExitStack() as stack:
        patient = stack.enter_context(connected(address, "127.0.0.9"))
        crowd = [stack.enter_context(connected(address, "127.0.0.2")) for _ in range(20)]
        settle(acceptor)
        assert [guest.host for guest in acceptor._guests].count("127.0.0.2") == 4
        assert crowd[0].recv(1) == b""  # closed
        patient.sendall(b'{"ask": "status"}\n')
        guest = next_guest(acceptor)
        assert guest.host == "127.0.0.9"
        guest.opening.channel.close()


def settle(acceptor: Acceptor[Hello]) -> None:
    """Deals with all that has arrived."""
    while acceptor._selector.select(0.1):
        acceptor.wait()


def test_the_host_that_is_served_least_is_next(listening: tuple[Acceptor[Hello], ADDRESS]) -> None:
    acceptor, address = listening
    with contextlib.ExitStack() as stack:
        for host in ("127.0.0.2", "127.0.0.2", "127.0.0.3"):
            stack.enter_context(connected(address, host, says={"from": host}))
        settle(acceptor)
        served = {"127.0.0.2": 1}
        hosts = []
        while (guest := acceptor.take(served)) is not None:
            served[guest.host] = served.get(guest.host, 0) + 1
            hosts.append(guest.host)
            guest.opening.channel.close()
    assert hosts == ["127.0.0.3", "127.0.0.2", "127.0.0.2"]


@pytest.mark.parametrize("says", [b"\n", b"[]\n", b"x" * 200_000, b'{"half":'])
def test_who_says_nonsense_or_too_little_is_dismissed(
    says: bytes, listening: tuple[Acceptor[Hello], ADDRESS], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor_module, "_OPENING_SECONDS", 0.2)
    acceptor, address = listening
    with connected(address) as connection:
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            connection.send(says)
        settle(acceptor)
        while acceptor._guests:
            acceptor.wait()
        assert acceptor.take({}) is None
