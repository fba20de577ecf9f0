"""Servers are reached at the addresses they were given and at no other, public ones are refused."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import platform
import socket
from collections.abc import Iterator

import pytest

from dapple_tf.errors import ClusterError, PortTakenError
from dapple_tf.network import listening
from dapple_tf.network.listening import check_private, confine, keep_closed, port_error, resolve
from dapple_tf.tools.hosts import free_ports

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


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, "a..b", "\0", "[]", "1.2.3.4.5"])
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


@pytest.mark.parametrize("host", ["8.8.8.8", "[2001:4860:4860::8888]", "::ffff:8.8.8.8", "both"])
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


@pytest.mark.parametrize("host", ["", "0.0.0.0", "[::]", "::ffff:0.0.0.0"])
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
def test_kept_closed_until_confined_to_its_addresses(wanted: list[listening.Address]) -> None:
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
        patch.setattr(listening, "_ATTACH_FILTER", 9999)
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

        monkeypatch.setattr(listening, "_bound", bound_before_the_other_listens)
        port = other.getsockname()[1]
        told = f"no server can be started on port {port}: is it taken"
        with pytest.raises(PortTakenError, match=told), keep_closed(port):
            pytest.fail("both listen at the port")
