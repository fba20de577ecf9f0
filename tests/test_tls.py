"""TLS: who has no certificate of the authority gets nothing, and what can't be used is told early.

Training by it, and a hostile host in the same network: test_networks.py.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import random
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from absl import app, flags
from absl.testing import flagsaver
from conftest import require_namespaces
from workers import PATIENCE, children, has_ended, new_authority, new_machine, serving, wait_until

import dapple_tf as dapple
from dapple_tf.clusters import connection as connection_module
from dapple_tf.clusters.shared_connections import connected
from dapple_tf.errors import ClusterError
from dapple_tf.network.certificates import AUTHORITY_KEY, Authority
from dapple_tf.network.control import Channel, ControlError, Hello, split_address
from dapple_tf.network.inquiry import reachable
from dapple_tf.network.keys import AUTHORITY, CERTIFICATE, KEY, Keys, tls_directory
from dapple_tf.network.relay import LOOPBACK, Relay, _break_off_after, _End, _user_at_the_other_end, carry
from dapple_tf.network.tunnels import Tunnels
from dapple_tf.tools import keys as tool
from dapple_tf.tools.hosts import LocalWorkers, environment, free_ports


@pytest.fixture(scope="module")
def authority() -> Authority:
    return new_authority()


@pytest.fixture
def machine(authority: Authority, tmp_path: pathlib.Path) -> pathlib.Path:
    return new_machine(authority, tmp_path / "machine", "127.0.0.1", "node-1.example.org", "::1")


@pytest.fixture
def keys(machine: pathlib.Path) -> Keys:
    return Keys(machine)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    """A machine of another authority, whose certificate is for the same names."""
    return Keys(new_machine(new_authority(), tmp_path_factory.mktemp("foreign"), "127.0.0.1"))


# ---- files


def test_keys_are_for_their_names(keys: Keys) -> None:
    for host in ("127.0.0.1", "node-1.example.org", "::1"):
        keys.check_host(host)
    for host in ("127.0.0.2", "node-2.example.org"):
        told = rf"others would refuse {keys.directory}/certificate.pem from {host}: .*mismatch"
        with pytest.raises(ClusterError, match=told):
            keys.check_host(host)


@pytest.mark.parametrize("name", [AUTHORITY, CERTIFICATE, KEY])
def test_a_file_that_is_missing_or_something_else_is_told(machine: pathlib.Path, name: str) -> None:
    (machine / name).write_text("nothing")
    with pytest.raises(ClusterError, match=r"TLS: .*can't be read"):
        Keys(machine)
    (machine / name).unlink()
    with pytest.raises(ClusterError, match=rf"TLS: {machine}/{name} \(.*\) is missing; a directory for TLS has"):
        Keys(machine)


def test_keys_that_are_open_to_all_or_that_others_would_refuse(
    authority: Authority, machine: pathlib.Path, foreign: Keys, tmp_path: pathlib.Path
) -> None:
    (machine / KEY).chmod(0o644)
    with pytest.raises(ClusterError, match=rf"every user of this machine can read {machine}/key.pem; `chmod o= "):
        Keys(machine)
    (machine / KEY).chmod(0o640)  # As Kubernetes gives it to a pod's group.
    Keys(machine)
    expired = new_machine(authority, tmp_path / "expired", "127.0.0.1", days=0)
    with pytest.raises(ClusterError, match=r"others would refuse .*: certificate has expired"):
        Keys(expired)
    mixed = tmp_path / "mixed"
    shutil.copytree(foreign.directory, mixed)
    shutil.copy(machine / AUTHORITY, mixed / AUTHORITY)
    with pytest.raises(ClusterError, match=r"others would refuse .*: (unable to get|self.signed|certificate signat)"):
        Keys(mixed)
    shutil.copy(machine / CERTIFICATE, mixed / CERTIFICATE)
    with pytest.raises(ClusterError, match=r"certificate.pem and key.pem in .* don't go together"):
        Keys(mixed)


def test_keys_are_renewed_where_their_files_are(authority: Authority, machine: pathlib.Path, keys: Keys) -> None:
    """A certificate runs out, and whoever replaces it has workers that serve; half a renewal changes nothing.

    Files are replaced as a whole: a worker that read its directory meanwhile found one without its end.
    """
    assert keys.renewed() is keys
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context((machine / name).open()) for name in (AUTHORITY, CERTIFICATE, KEY)}
        before = {name: (machine / name).read_text() for name in files}
        new_machine(authority, machine, "127.0.0.1")
        assert {name: file.read() for name, file in files.items()} == before
    assert {path.name for path in machine.iterdir()} == set(before)
    assert (machine / KEY).stat().st_mode & 0o777 == 0o600
    renewed = keys.renewed()
    assert renewed.fingerprint == Keys(machine).fingerprint != keys.fingerprint
    (machine / CERTIFICATE).write_text(before[CERTIFICATE])  # not of the new key
    assert renewed.renewed() is renewed
    (machine / CERTIFICATE).unlink()
    assert renewed.renewed() is renewed


@pytest.mark.parametrize("label", ["CERTIFICATE", "X509 CERTIFICATE", "TRUSTED CERTIFICATE"])
def test_the_fingerprint_is_that_of_the_certificate_that_is_shown(label: str, keys: Keys) -> None:
    """The first in the file, with any label that OpenSSL knows: a worker ended when its certificate got another one."""
    file = keys.directory / CERTIFICATE
    own = file.read_text().replace("CERTIFICATE", label)
    file.write_text(f"Certificate:\n...\n{own}{(keys.directory / AUTHORITY).read_text()}")
    renewed = keys.renewed()
    assert renewed is not keys
    assert renewed.fingerprint == keys.fingerprint


@pytest.mark.parametrize(("named", "variable"), [("", None), ("", "keys"), (None, "")])
def test_an_empty_directory_is_no_choice_against_tls(
    named: str | None, variable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A variable without a value in a script: the worker was open to everybody, without a word."""
    monkeypatch.delenv("DAPPLE_TF_TLS", raising=False)
    assert tls_directory(None) is None
    if variable is not None:
        monkeypatch.setenv("DAPPLE_TF_TLS", variable)
    with pytest.raises(ClusterError, match="is empty: name the directory with this machine's certificate, or leave"):
        tls_directory(named)


# ---- connections


@contextlib.contextmanager
def listening(keys: Keys | None) -> Iterator[tuple[str, list[str]]]:
    """A worker's side of one connection after the other: address, and what became of them."""
    answers: list[str] = []

    def serve(connection: socket.socket) -> None:
        connection.settimeout(5)
        try:
            hello = Hello(connection, keys)
            hello.connection.setblocking(True)
            assert hello.advance()
            hello.channel.socket.setblocking(False)
            hello.channel.send({"you": hello.channel.fingerprint}, 5)
            answers.append("answered")
        except ControlError as error:
            answers.append(str(error))
        hello.channel.close()

    with serving(serve) as address:
        yield address, answers


def ask(address: str, keys: Keys | None) -> dict[str, str]:
    with contextlib.closing(Channel.connect(address, 5, keys)) as channel:
        return channel.ask({"ask": "status"}, 5)


def stranger(certificate: Keys | None) -> ssl.SSLContext:
    """Somebody who trusts everybody."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if certificate is not None:
        context.load_cert_chain(certificate.directory / CERTIFICATE, certificate.directory / KEY)
    return context


def test_only_machines_of_one_authority_talk(
    authority: Authority, keys: Keys, foreign: Keys, tmp_path: pathlib.Path
) -> None:
    """Strangers get nothing: without TLS, without a certificate, or with one of another authority."""
    client = Keys(new_machine(authority, tmp_path / "client", "client"))
    with listening(keys) as (address, answers):
        assert ask(address, client) == {"you": client.fingerprint}
        with pytest.raises(ControlError, match="connection"):
            ask(address, None)
        with pytest.raises(ControlError, match="has a certificate that isn't accepted"):
            ask(address, foreign)
        for context in (stranger(None), stranger(foreign)):
            with socket.create_connection(split_address(address), 5) as plain:
                secured = context.wrap_socket(plain)
                with contextlib.closing(secured), pytest.raises(OSError):
                    secured.sendall(b'{"ask": "status"}\n')
                    if not secured.recv(100):
                        raise OSError("closed")
    assert len(answers) == 5 and answers[0] == "answered" and "answered" not in answers[1:]


def test_who_is_at_another_name_or_does_not_speak_tls_is_told(
    authority: Authority, keys: Keys, tmp_path: pathlib.Path
) -> None:
    other = Keys(new_machine(authority, tmp_path / "other", "10.0.0.2"))
    with listening(other) as (address, _), pytest.raises(ControlError, match=r"isn't accepted: IP address mismatch"):
        ask(address, keys)
    told = r"doesn't speak TLS as expected \(was it started with --tls\?\)"
    with listening(None) as (address, answers), pytest.raises(ControlError, match=told):
        ask(address, keys)
    assert answers == ["speaks TLS, which this side wasn't told to (--tls)"]


# ---- relays hand on what TensorFlow's servers say to each other, and nothing of what anybody else does

ALERT = b"\x15\x03\x01\x00\x02\x02\x46"
"""What TLS says to who doesn't speak it: protocol version."""


def pair() -> tuple[socket.socket, socket.socket]:
    """Both ends of a connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname(), PATIENCE)
        other, _ = listener.accept()
        other.settimeout(PATIENCE)
        return one, other


def test_both_directions_of_a_link_at_once(keys: Keys) -> None:
    """More than any buffer holds, from both sides before either reads anything: neither waits for the other."""
    (first, left), (second, right) = pair(), pair()
    second, right = keys.peer(second), keys.server(right)
    shaking = threading.Thread(target=right.do_handshake)
    shaking.start()
    second.do_handshake()
    shaking.join()
    carrier = threading.Thread(target=carry, args=(left, right))
    carrier.start()
    draw = random.Random(0)
    one, other = draw.randbytes(5_000_001), draw.randbytes(4_000_003)
    with first, left, second, right:
        sender = threading.Thread(target=first.sendall, args=(one,))
        sender.start()
        got = bytearray()
        while len(got) < len(one):
            got += second.recv(1 << 16)
        sender.join(PATIENCE)
        sender = threading.Thread(target=second.sendall, args=(other,))
        sender.start()
        back = bytearray()
        while len(back) < len(other):
            back += first.recv(1 << 16)
        sender.join(PATIENCE)
        assert (got, back) == (one, other)
        first.close()
        carrier.join(PATIENCE)
        assert not carrier.is_alive()


def test_only_those_who_are_known_reach_the_server(
    authority: Authority, keys: Keys, foreign: Keys, tmp_path: pathlib.Path
) -> None:
    """Not who has no certificate, nor one of another authority, nor one of this one's that isn't in the cluster."""
    neighbour = Keys(new_machine(authority, tmp_path / "neighbour", "127.0.0.1"))
    heard: list[bytes] = []

    def echo(connection: socket.socket) -> None:
        heard.append(connection.recv(1 << 16))
        connection.sendall(heard[-1])

    with serving(echo, LOOPBACK) as server:
        listener = socket.create_server(("127.0.0.1", 0))
        address = listener.getsockname()
        Relay(keys, [listener], split_address(server)[1], [keys.fingerprint], [])
        with socket.create_connection(address, PATIENCE) as plain, contextlib.suppress(ConnectionResetError):
            plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            assert plain.recv(100) in (b"", ALERT)
        for own in (neighbour, foreign):
            plain = socket.create_connection(address, PATIENCE)
            with stranger(own).wrap_socket(plain) as secured, contextlib.suppress(OSError):
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


def test_tunnels_lead_to_the_certificate_that_is_known(
    keys: Keys, authority: Authority, tmp_path: pathlib.Path
) -> None:
    """Data arrive by two processes; dropped links end; and nothing goes to a machine with another certificate.

    Relays show the certificate that others were told of: they read the directory again, so that one that was renewed
    since showed what nobody knew.
    """
    others = Keys(new_machine(authority, tmp_path / "other", "127.0.0.1"))
    first, second, third = free_ports(3)
    cluster = {"client": [f"127.0.0.1:{first}"], "worker": [f"127.0.0.1:{second}", f"127.0.0.1:{third}"]}
    prints = {"client": [keys.fingerprint], "worker": [others.fingerprint, keys.fingerprint]}
    for own in (keys, others):
        new_machine(authority, own.directory, "127.0.0.1")
        assert Keys(own.directory).fingerprint != own.fingerprint
    with contextlib.ExitStack() as stack:
        client = Tunnels(keys, ["127.0.0.1"], first, cluster, prints, ("client", 0))
        stack.callback(client.close)
        worker = Tunnels(others, ["127.0.0.1"], second, cluster, prints, ("worker", 0))
        stack.callback(worker.close)
        impostor = Tunnels(others, ["127.0.0.1"], third, cluster, prints, ("worker", 1))
        stack.callback(impostor.close)
        assert client.cluster["client"] == [f"{LOOPBACK}:{client.server_port}"]
        assert worker.cluster["worker"][0] == f"{LOOPBACK}:{worker.server_port}"
        server = stack.enter_context(socket.create_server((LOOPBACK, worker.server_port)))
        server.settimeout(PATIENCE)
        with socket.create_connection(split_address(client.cluster["worker"][0]), PATIENCE) as link:
            link.sendall(b"question")
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


@pytest.mark.parametrize(("lost", "does"), [("dport", "sends"), ("sport", "waits")])
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
            _break_off_after(one, Relay(keys, [], 0, [], [], silence)._silence)
            seconds.append(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000)
            assert one.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert seconds == [50, 300, 32_767]


# ---- a worker with TLS


def test_clients_of_a_worker_with_tls(
    authority: Authority, machine: pathlib.Path, foreign: Keys, tmp_path: pathlib.Path
) -> None:
    """Tunnels to a worker without a port end: each attempt left a process of relays behind, to the end of this one."""
    own = new_machine(authority, tmp_path / "client", "client")
    with LocalWorkers(1, arguments=[f"--tls={machine}"], echo=lambda *_: None) as workers:
        (address,) = workers.addresses
        for directory, told in (
            (None, rf"--address={address}` running there, without --tls\?"),
            (foreign.directory, r"has a certificate that isn't accepted: .* of the same authority as"),
            (tmp_path, "is missing; a directory for TLS has"),
        ):
            with pytest.raises(ClusterError, match=told):
                dapple.Cluster.of_servers([address], tls=directory)
        cluster = dapple.Cluster.of_servers([address], tls=own)
        assert cluster.tls == str(own)
        assert reachable([address], PATIENCE, Keys(own)) == [True]
        assert reachable([address], PATIENCE) == [False]
        with socket.socket() as taken, pytest.MonkeyPatch.context() as patch:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            patch.setitem(connection_module._ports, address, taken.getsockname()[1])
            before = {*children(os.getpid())}
            with connected(cluster):
                (tunnels,) = {*children(os.getpid())} - before
                assert "relay" in pathlib.Path(f"/proc/{tunnels}/cmdline").read_text()


# ---- dapple-keys


def run(*arguments: str) -> None:
    with flagsaver.flagsaver():
        tool.main(flags.FLAGS(["keys", *arguments]))


def test_the_tool_makes_an_authority_once(
    authority: Authority, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "keys"
    run(f"--directory={directory}", "node1,10.0.0.1", "client")
    assert "a new authority" in capsys.readouterr().out
    assert (directory / AUTHORITY_KEY).stat().st_mode & 0o777 == 0o600
    assert (directory / "node1" / KEY).stat().st_mode & 0o777 == 0o600
    assert not (directory / "node1" / AUTHORITY_KEY).exists()
    Keys(directory / "node1").check_host("10.0.0.1")
    before = (directory / AUTHORITY).read_bytes()
    run(f"--directory={directory}", "node2")
    assert (directory / "node2" / AUTHORITY).read_bytes() == before == (directory / AUTHORITY).read_bytes()
    others = [f"--authority={directory / AUTHORITY}", f"--authority_key={directory / AUTHORITY_KEY}", "node3"]
    run(f"--directory={tmp_path / 'others'}", *others)
    assert (tmp_path / "others" / "node3" / AUTHORITY).read_bytes() == before
    assert not (tmp_path / "others" / AUTHORITY_KEY).exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no machine is named"),
        (["a,b", "a"], "two machines have the same first name"),
        (["../a"], "'../a' in '../a' is neither a host's name nor an address"),
        (["a,,b"], "'' in 'a,,b' is neither"),
        (["--authority=a.pem", "a"], "--authority and --authority_key go together"),
        (["--authority=none.pem", "--authority_key=none.pem", "a"], "the authority can't be read"),
    ],
)
def test_mistakes_of_the_command_line(
    authority: Authority, arguments: list[str], message: str, tmp_path: pathlib.Path
) -> None:
    with pytest.raises(app.UsageError, match=message):
        run(f"--directory={tmp_path / 'keys'}", *arguments)


def test_half_an_authority_is_told(machine: pathlib.Path) -> None:
    with pytest.raises(app.UsageError, match=r"the authority can't be read: .*authority_key.pem"):
        run(f"--directory={machine}", "a")
    shutil.copy(machine / KEY, machine / AUTHORITY_KEY)
    with pytest.raises(app.UsageError, match="certificate and key don't go together"):
        run(f"--directory={machine}", "a")
    shutil.copy(machine / CERTIFICATE, machine / AUTHORITY)
    with pytest.raises(app.UsageError, match="is one of a machine"):
        run(f"--directory={machine}", "a")
