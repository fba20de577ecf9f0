"""Connections between clients and workers: messages, first messages, and reachability at TensorFlow's servers."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import platform
import random
import signal
import socket
import threading
from collections.abc import Iterator

import pytest
from workers import PATIENCE, serving, wait_until

from dapple_tf.clusters.shared_connections import connected
from dapple_tf.describe.cluster import Cluster
from dapple_tf.errors import ClusterError, PortTakenError
from dapple_tf.network import acceptor as acceptor_module
from dapple_tf.network import listening as listening_module
from dapple_tf.network import reachability
from dapple_tf.network.acceptor import Acceptor, Guest
from dapple_tf.network.control import Channel, ControlError, Hello, join_address, split_address
from dapple_tf.network.listening import check_private, confine, keep_closed, port_error, resolve
from dapple_tf.network.reachability import unreachable
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
        (b"[1]\n", "sends a JSON list where an object is expected"),
        (b"x" * (1 << 21), "sends a message of more than 1048576 bytes"),
    ],
    ids=["bytes", "deep", "list", "long"],
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


def test_silence_ends_with_the_deadline() -> None:
    """Also if each byte comes long before it, but the message doesn't."""
    with both_ends() as (channel, socket_):
        done = threading.Event()

        def drip() -> None:
            while not done.wait(0.01):
                send_quietly(socket_, b" ")

        thread = threading.Thread(target=drip)
        thread.start()
        socket_.sendall(b'{"half": ')
        with pytest.raises(ControlError, match=r"doesn't answer within 0.2 s"):
            channel.receive(0.2)
        done.set()
        thread.join()


def test_connections_that_end_or_never_begin_or_whose_reader_is_stuck() -> None:
    with both_ends() as (channel, _), pytest.raises(ControlError, match="takes no message"):
        for _ in range(100):
            channel.send({"text": "x" * 1_000_000}, 0.2)
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


def test_addresses() -> None:
    assert split_address("[::1]:80") == ("::1", 80)
    assert join_address("::1", 80) == "[::1]:80"


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


# ---- reachability: TensorFlow's servers are told from ports that are closed, silent, or somebody else's


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
    monkeypatch.setattr(reachability, "_AT_ONCE", 2)
    settings = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
    with saying(settings) as server, serving(lambda _: None) as silent:
        ways = dict(zip("abcde", (silent, silent, server, silent, server), strict=True))
        assert unreachable(ways, 0.2) == dict.fromkeys("abd", "no answer within 0.2 s")


def test_one_ctrl_c_ends_the_knocking() -> None:
    with serving(lambda _: os.kill(os.getpid(), signal.SIGINT)) as silent, pytest.raises(KeyboardInterrupt):
        unreachable(directly(silent), PATIENCE)


# ---- servers are reached at the addresses they were given and at no other, public ones are refused

LOOPBACK = ipaddress.IPv4Address("127.0.0.1")
LOOPBACK6 = ipaddress.IPv6Address("::1")
FOREIGN = ipaddress.IPv4Address("198.51.100.77")
linux_only = pytest.mark.skipif(platform.system() != "Linux", reason="socket filters are Linux's")


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


ipv6_only = pytest.mark.skipif(
    not has_ipv6(), reason="this machine has no IPv6 (sysctl net.ipv6.conf.lo.disable_ipv6=0)"
)


def own_addresses() -> list[str]:
    """Addresses of this machine: the loopback device's, and one to which a packet would be sent, if there is a way."""
    addresses = ["127.0.0.1", "127.0.0.2", *(["::1"] if has_ipv6() else [])]
    for family, far in ((socket.AF_INET, "192.0.2.200"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))  # Sends nothing; picks the address to send from.
            addresses.append(probe.getsockname()[0])
    return addresses


def answers(address: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((address, port), 0.25):
        return True
    return False


@contextlib.contextmanager
def listener(port: int = 0) -> Iterator[socket.socket]:
    """A socket as TensorFlow's: on all interfaces, IPv4 and IPv6."""
    with socket.socket(socket.AF_INET6 if has_ipv6() else socket.AF_INET) as made:
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        if os.environ.get("TF_GRPC_REUSE_PORT"):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.bind(("", port))
        made.listen()
        made.settimeout(5)
        yield made


# ---- addresses


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        ("[fd00::1]", ["fd00::1"]),
        ("fe80::1%eth0", ["fe80::1"]),
        ("::ffff:10.0.0.1", ["10.0.0.1"]),
        ("192.168.0.9", ["192.168.0.9"]),
    ],
)
def test_private_addresses(host: str, wanted: list[str]) -> None:
    assert [str(address) for address in check_private(host, allow_public=False)] == wanted
    assert {LOOPBACK, LOOPBACK6} >= set(resolve("localhost")) > set()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, "\0"])
def test_unknown_hosts(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_knows(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    if host == "no-such-host.invalid":  # Without a network to ask.
        monkeypatch.setattr(socket, "getaddrinfo", nobody_knows)
    with pytest.raises(ClusterError) as caught:
        resolve(host)
    assert f"the host {host!r} isn't known on this machine (" in str(caught.value)


WHY = (
    "TensorFlow's gRPC has neither authentication nor encryption, so that whoever connects can run any graph in the "
    "worker, which reads and writes files. Give"
)


@pytest.mark.parametrize("host", ["8.8.8.8", "::ffff:8.8.8.8", "both"])
def test_public_addresses(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [(socket.AF_INET, 1, 6, "", (own, 0)) for own in ("10.0.0.1", "8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: infos)
    with pytest.raises(ClusterError) as caught:
        check_private(host, allow_public=False)
    assert check_private(host, allow_public=True) == resolve(host)
    told = repr(host) if host == "8.8.8.8" else f"{host!r} ({resolve(host)[-1]})"
    text = str(caught.value)
    assert text.startswith(f"the address {told} is public: the whole Internet may reach it. {WHY} an address in a")
    assert text.endswith("pass --allow_public to python -m dapple_tf.worker")


@pytest.mark.parametrize("host", ["0.0.0.0", "::ffff:0.0.0.0"])
def test_all_interfaces(host: str) -> None:
    with pytest.raises(ClusterError) as caught:
        check_private(host, allow_public=True)
    told = repr(host) if host == "0.0.0.0" else f"{host!r} ({resolve(host)[0]})"
    text = str(caught.value)
    assert text.startswith(f"the address {told} means all interfaces of this machine. {WHY} the address in the")
    assert text.endswith("pass --all_interfaces to python -m dapple_tf.worker")
    # Filters nothing: not even a listening socket is looked for.
    confine(1, check_private(host, allow_public=False, all_interfaces=True))


# ---- listening sockets


@linux_only
@pytest.mark.parametrize(
    "wanted", [pytest.param([LOOPBACK6], marks=ipv6_only), [LOOPBACK, *([LOOPBACK6] if has_ipv6() else [])]]
)
def test_kept_closed_until_confined_to_its_addresses(wanted: list[listening_module.Address]) -> None:
    port = free_ports(1)[0]
    before = dict(os.environ)
    taken = pytest.raises(ClusterError, match=f"no server can be started on port {port}: is it taken")
    with contextlib.ExitStack() as stack:
        with keep_closed(port):
            with taken, keep_closed(port):
                pass
            server = stack.enter_context(listener(port))
            assert not any(answers(address, port) for address in own_addresses())
            confine(port, wanted)
            assert not answers(str(wanted[0]), port)
            late = stack.enter_context(socket.socket(socket.AF_INET6 if wanted[0].version == 6 else socket.AF_INET))
            late.setblocking(False)
            late.connect_ex((str(wanted[0]), port))
        assert dict(os.environ) == before
        accepted, peer = server.accept()
        accepted.close()
        assert peer[1] == late.getsockname()[1]  # It tried again by itself.
        assert {address for address in own_addresses() if answers(address, port)} == {*map(str, wanted)}
        for _ in wanted:
            server.accept()[0].close()
        for address in wanted:
            with socket.create_connection((str(address), port), 5) as client:
                accepted, _ = server.accept()
                with accepted:
                    client.sendall(b"there")
                    assert accepted.recv(10) == b"there"
                    accepted.sendall(b"and back")
                    assert client.recv(10) == b"and back"
        with pytest.raises(ClusterError, match=rf"listens on port {port}; its filter can't be changed any more"):
            confine(port, [LOOPBACK])
        with pytest.raises(OSError, match="not permitted"):  # SO_DETACH_FILTER
            server.setsockopt(socket.SOL_SOCKET, 27, 0)


@linux_only
@pytest.mark.parametrize("accept", [False, True])
def test_connections_made_before(accept: bool) -> None:
    with listener() as server, contextlib.ExitStack() as stack:
        port = server.getsockname()[1]
        right = stack.enter_context(socket.create_connection(("127.0.0.1", port), 5))
        stack.enter_context(socket.create_connection(("127.0.0.2", port), 5))
        accepted = [stack.enter_context(server.accept()[0]) for _ in range(2)] if accept else []
        message = r"connected to it at 127\.0\.0\.2 from 127\.0\.0\.\d, not at 127\.0\.0\.1, and may have sent a graph"
        with pytest.raises(ClusterError, match=message):
            confine(port, [LOOPBACK])
        if accepted:  # One made to the right address goes on.
            right.sendall(b"x")
            assert accepted[0].recv(1) == b"x"


@linux_only
def test_nothing_to_confine() -> None:
    port = free_ports(1)[0]
    for addresses, message in (
        ([LOOPBACK], rf"listens on port {port}; make the server first, with start=False"),
        ([FOREIGN], r"\(198\.51\.100\.77\) isn't one of this machine; is --task right\?"),
        ([], r"\(none\) isn't one of this machine"),
    ):
        with pytest.raises(ClusterError, match=message):
            confine(port, addresses)
    with listener() as server:
        confine(server.getsockname()[1], [FOREIGN, LOOPBACK])
        assert answers("127.0.0.1", server.getsockname()[1])
    with pytest.raises(ClusterError, match="port 70000 is no port"), keep_closed(70000):
        pass


@linux_only
def test_systems_without_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, listener() as server:
        patch.setattr(listening_module, "_ATTACH_FILTER", 9999)
        with pytest.raises(ClusterError, match=r"doesn't take a filter .*pass --all_interfaces"):
            confine(server.getsockname()[1], [LOOPBACK])
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(ClusterError, match=r"on Darwin the server can't be confined .* pass --all_interfaces"):
        confine(1, [LOOPBACK])
    with pytest.raises(ClusterError, match="on Darwin the server can't be confined"), keep_closed(1):
        pass


@linux_only
def test_several_sockets_on_one_port_are_refused() -> None:
    """As TensorFlow's servers before 2.20 have them: the kernel would give all connections to one that nobody reads."""
    with socket.socket() as first, socket.socket() as second:
        for made in (first, second):
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        first.bind(("127.0.0.1", 0))
        second.bind(first.getsockname())
        first.listen()
        second.listen()
        with pytest.raises(ClusterError, match=r"2 sockets of this process listen on port \d+, .* use TensorFlow 2.20"):
            confine(first.getsockname()[1], [LOOPBACK])


def test_only_a_port_that_somebody_has_is_taken() -> None:
    """An address of another machine was told to be taken, too, and tried three times."""
    taken = port_error("nothing listens at port 1", OSError(errno.EADDRINUSE, "in use"))
    assert type(taken) is PortTakenError and "port 1: is it taken?" in str(taken)
    elsewhere = port_error("nothing listens at port 1", OSError(errno.EADDRNOTAVAIL, "no such address"))
    assert type(elsewhere) is ClusterError and "taken" not in str(elsewhere)


@linux_only
def test_a_port_at_which_another_begins_to_listen_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are bound to it before: that ended training with a bare OSError, and no other port was tried."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("", 0))

        def bound_before_the_other_listens(port: int) -> socket.socket:
            gate = socket.socket()
            gate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            gate.bind(("", port))
            other.listen()
            return gate

        monkeypatch.setattr(listening_module, "_bound", bound_before_the_other_listens)
        port = other.getsockname()[1]
        told = f"no server can be started on port {port}: is it taken"
        with pytest.raises(PortTakenError, match=told), keep_closed(port):
            pytest.fail("both listen at the port")
