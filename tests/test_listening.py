"""Servers are reached at the addresses they were given and at no other, public ones are refused."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from dapple_tf.errors import ClusterError, PortTakenError
from dapple_tf.network import listening
from dapple_tf.network.listening import Address, check_private, confine, keep_closed, port_error, resolve
from dapple_tf.tools.hosts import free_ports

LOOPBACK = ipaddress.IPv4Address("127.0.0.1")
LOOPBACK6 = ipaddress.IPv6Address("::1")
linux_only = pytest.mark.skipif(platform.system() != "Linux", reason="socket filters are Linux's")


def own_addresses() -> list[str]:
    """Addresses of this machine apart from 127.0.0.1: one to which a packet would be sent, if there is a network."""
    addresses = ["127.0.0.2"]
    for family, far in ((socket.AF_INET, "192.0.2.200"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))  # Sends nothing; picks the address to send from.
            addresses.append(probe.getsockname()[0])
    if has_ipv6():
        addresses.append("::1")
    return addresses


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


ipv6_only = pytest.mark.skipif(
    not has_ipv6(), reason="this machine has no IPv6 (sysctl net.ipv6.conf.lo.disable_ipv6=0)"
)


def answers(address: str, port: int, timeout: float = 0.25) -> bool:
    try:
        with socket.create_connection((address, port), timeout):
            return True
    except OSError:
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


@pytest.mark.parametrize(
    ("host", "wanted"),
    [
        ("10.0.0.1", ["10.0.0.1"]),
        ("::1", ["::1"]),
        ("[fd00::1]", ["fd00::1"]),
        ("fe80::1%eth0", ["fe80::1"]),
        ("::ffff:10.0.0.1", ["10.0.0.1"]),
        ("", ["0.0.0.0", "::"]),
    ],
)
def test_resolve(host: str, wanted: list[str]) -> None:
    assert [str(address) for address in resolve(host)] == wanted


def test_resolve_name() -> None:
    assert {LOOPBACK, LOOPBACK6} >= set(resolve("localhost")) > set()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a" * 300, "a..b", "\0", "[", "[]", "1.2.3.4.5"])
def test_unknown_host(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody_knows(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    if host == "no-such-host.invalid":  # Without a network to ask.
        monkeypatch.setattr(socket, "getaddrinfo", nobody_knows)
    with pytest.raises(ClusterError) as caught:
        resolve(host)
    assert f"the host {host!r} isn't known on this machine (" in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "10.1.2.3", "192.168.0.9", "172.16.0.1", "fd00::2", "fe80::1%a"])
def test_private_addresses(host: str) -> None:
    assert check_private(host, allow_public=False) == resolve(host)


@pytest.mark.parametrize("host", ["8.8.8.8", "2001:4860:4860::8888", "[2001:4860:4860::8888]", "::ffff:8.8.8.8"])
def test_public_addresses(host: str) -> None:
    with pytest.raises(ClusterError) as caught:
        check_private(host, allow_public=False)
    assert check_private(host, allow_public=True) == resolve(host)
    told = repr(host) if host[0] in "28" else f"{host!r} ({resolve(host)[0]})"
    assert str(caught.value) == (
        f"the address {told} is public: the whole Internet may reach it. TensorFlow's gRPC has neither authentication "
        f"nor encryption, so that whoever connects can run any graph in the worker, which reads and writes files. Give "
        f"an address in a private network or a tunnel; if others are kept from this one by a firewall, pass "
        f"--allow_public to python -m dapple_tf.worker"
    )


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "[::]", "::ffff:0.0.0.0"])
def test_all_interfaces(host: str) -> None:
    with pytest.raises(ClusterError) as caught:
        check_private(host, allow_public=True)
    told = repr(host) if host in ("0.0.0.0", "::") else f"{host!r} ({resolve(host)[0]})"
    assert str(caught.value) == (
        f"the address {told} means all interfaces of this machine. TensorFlow's gRPC has neither authentication nor "
        f"encryption, so that whoever connects can run any graph in the worker, which reads and writes files. Give the "
        f"address in the private network that the other servers and the client use; if all interfaces are meant and "
        f"others are kept from the port, pass --all_interfaces to python -m dapple_tf.worker"
    )
    addresses = check_private(host, allow_public=False, all_interfaces=True)
    confine(1, addresses)  # Filters nothing: not even a listening socket is looked for.


def test_a_name_with_one_public_address(monkeypatch: pytest.MonkeyPatch) -> None:
    infos = [(socket.AF_INET, 1, 6, "", (host, 0)) for host in ("10.0.0.1", "8.8.8.8", "10.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: infos)
    with pytest.raises(ClusterError, match=r"the address 'both' \(8\.8\.8\.8\) is public"):
        check_private("both", allow_public=False)
    assert [str(address) for address in check_private("both", allow_public=True)] == ["10.0.0.1", "8.8.8.8"]


@pytest.mark.slow
@linux_only
@pytest.mark.parametrize(
    "wanted",
    [[LOOPBACK], pytest.param([LOOPBACK6], marks=ipv6_only), pytest.param([LOOPBACK, LOOPBACK6], marks=ipv6_only)],
)
def test_confined(wanted: list[Address]) -> None:
    with listener() as server:
        port = server.getsockname()[1]
        assert all(answers(address, port) for address in own_addresses())
        while answers_pending(server):
            pass
        confine(port, wanted)
        others = {"127.0.0.1", *own_addresses()} - {str(address) for address in wanted}
        assert len(others) >= 2
        assert not [address for address in sorted(others) if answers(address, port)]
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


def answers_pending(server: socket.socket) -> bool:
    """Accepts and closes one connection, if there is one."""
    server.settimeout(0)
    try:
        server.accept()[0].close()
    except BlockingIOError:
        return False
    finally:
        server.settimeout(5)
    return True


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


@pytest.mark.slow
@linux_only
def test_kept_closed_until_confined() -> None:
    port = free_ports(1)[0]
    before = dict(os.environ)
    with keep_closed(port):
        with (
            pytest.raises(ClusterError, match=f"no server can be started on port {port}: is it taken"),
            keep_closed(port),
        ):
            pass
        with listener(port) as server:
            assert not any(answers(address, port) for address in ("127.0.0.1", "127.0.0.2"))
            confine(port, [LOOPBACK])
            assert not answers("127.0.0.1", port)
            late = socket.socket()
            late.setblocking(False)
            late.connect_ex(("127.0.0.1", port))
            kept = server.dup()
    assert dict(os.environ) == before
    with kept, late:
        assert answers("127.0.0.1", port)
        assert not answers("127.0.0.2", port)
        kept.settimeout(5)
        peers = []
        for _ in range(2):
            accepted, peer = kept.accept()
            accepted.close()
            peers.append(peer[1])
        assert late.getsockname()[1] in peers  # It tried again by itself.
        with (
            pytest.raises(ClusterError, match=f"no server can be started on port {port}: is it taken"),
            keep_closed(port),
        ):
            pass


@linux_only
def test_nothing_to_confine() -> None:
    port = free_ports(1)[0]
    with pytest.raises(ClusterError, match=rf"listens on port {port}; make the server first, with start=False"):
        confine(port, [LOOPBACK])
    foreign = ipaddress.IPv4Address("198.51.100.77")
    with pytest.raises(ClusterError, match=r"\(198\.51\.100\.77\) isn't one of this machine; is --task right\?"):
        confine(port, [foreign])
    with pytest.raises(ClusterError, match=r"\(none\) isn't one of this machine"):
        confine(port, [])
    with listener() as server:
        port = server.getsockname()[1]
        confine(port, [foreign, LOOPBACK])
        assert answers("127.0.0.1", port)
    with pytest.raises(ClusterError, match="port 70000 is no port"), keep_closed(70000):
        pass


def test_other_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    with pytest.raises(ClusterError, match=r"on Darwin the server can't be confined .* pass --all_interfaces"):
        confine(1, [LOOPBACK])
    with pytest.raises(ClusterError, match="on Darwin the server can't be confined"), keep_closed(1):
        pass


@linux_only
def test_kernels_without_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_ATTACH_FILTER", 9999)
    with listener() as server, pytest.raises(ClusterError, match=r"doesn't take a filter .*pass --all_interfaces"):
        confine(server.getsockname()[1], [LOOPBACK])


SERVER = """
import sys
import tensorflow as tf
from dapple_tf.network.listening import check_private, confine, keep_closed
port = int(sys.argv[1])
addresses = check_private("127.0.0.1", allow_public=False)
with keep_closed(port):
    server = tf.distribute.Server({"worker": [f"127.0.0.1:{port}"]}, job_name="worker", task_index=0, start=False)
    print("made", flush=True)
    sys.stdin.readline()
    confine(port, addresses)
server.start()
print("started", flush=True)
sys.stdin.readline()
"""


@pytest.mark.thorough  # Workers do the same with their servers: test_worker.py.
@linux_only
@pytest.mark.slow
def test_tensorflow_server() -> None:
    port = free_ports(1)[0]
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            import tensorflow as tf  # While the server's process imports it too.

            assert process.stdout.readline() == "made\n"
            assert not answers("127.0.0.1", port)
            assert not answers("127.0.0.2", port)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "started\n"
            assert not [address for address in own_addresses() if answers(address, port)]
            graph = tf.Graph()
            with graph.as_default(), tf.device("/job:worker/task:0"):
                total = tf.reduce_sum(tf.fill([100], 2.0))
            with tf.compat.v1.Session(f"grpc://127.0.0.1:{port}", graph=graph) as session:
                assert session.run(total) == 200
            assert not [address for address in own_addresses() if answers(address, port)]
        finally:
            process.kill()


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
