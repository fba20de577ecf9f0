"""TLS: who has no certificate of the authority gets nothing, and what can't be used is told early.

Networks that fail, and in which somebody hostile has no certificate:

         outside ─── public network ─── host 0 ──┐
    198.51.100.9      198.51.100.1  └─ 10.77.0.1 │
                                                 ├── one network, 10.77.0.0/24
    hostile host, 10.77.0.9 ─────────────────────┤
    host 1, 10.77.0.2, and the client on it ─────┘

The outside knows both of host 0's addresses, the ports, and host 0 as its way to the private network.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
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
from dapple_tf.network.control import PROTOCOL, Channel, ControlError, Hello, split_address
from dapple_tf.network.inquiry import reachable
from dapple_tf.network.keys import AUTHORITY, CERTIFICATE, KEY, Keys, tls_directory
from dapple_tf.network.tunnels import LOOPBACK, Relay, Tunnels, _End, _user_at_the_other_end, carry
from dapple_tf.tools import keys as tool
from dapple_tf.tools.hosts import Hosts, LocalWorkers, Namespace, environment, free_ports, join


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


def test_files_that_are_missing_or_open_to_all_or_that_others_would_refuse(
    authority: Authority, machine: pathlib.Path, foreign: Keys, tmp_path: pathlib.Path
) -> None:
    for name in (AUTHORITY, CERTIFICATE, KEY):
        whole = tmp_path / f"without_{name}"
        shutil.copytree(machine, whole)
        (whole / name).write_text("nothing")
        with pytest.raises(ClusterError, match=r"TLS: .*can't be read"):
            Keys(whole)
        (whole / name).unlink()
        with pytest.raises(ClusterError, match=rf"TLS: {whole}/{name} \(.*\) is missing; a directory for TLS has"):
            Keys(whole)
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


def test_an_empty_directory_is_no_choice_against_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable without a value in a script: the worker was open to everybody, without a word."""
    monkeypatch.delenv("DAPPLE_TF_TLS", raising=False)
    assert tls_directory(None) is None
    for named, variable in (("", "keys"), (None, "")):
        monkeypatch.setenv("DAPPLE_TF_TLS", variable)
        with pytest.raises(ClusterError, match="is empty: name the directory with this machine's certificate, or le"):
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
        for near, far, sent in ((first, second, one), (second, first, other)):
            sender = threading.Thread(target=near.sendall, args=(sent,))
            sender.start()
            got = bytearray()
            while len(got) < len(sent):
                got += far.recv(1 << 16)
            sender.join(PATIENCE)
            assert got == sent
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
from dapple_tf.network import tunnels
from dapple_tf.network.keys import Keys

def ip(*words):
    subprocess.run(["ip", *words], check=True)

ip("link", "set", "lo", "up")
ip("rule", "add", "priority", "200", "lookup", "local")
ip("rule", "del", "priority", "0")
tunnels.LEAST_SILENCE = 2.0
keys = Keys(sys.argv[1])
server, listener = socket.create_server((tunnels.LOOPBACK, 0)), socket.create_server(("127.0.0.1", 0))
port = listener.getsockname()[1]
tunnels.Relay(keys, [listener], server.getsockname()[1], [keys.fingerprint], [])
own = tunnels.Relay(keys, [], 0, [], [tunnels._End(f"127.0.0.1:{port}", keys.fingerprint)])
client = socket.create_connection((tunnels.LOOPBACK, own.ports[0]))
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
                assert "network.tunnels" in pathlib.Path(f"/proc/{tunnels}/cmdline").read_text()


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


def test_mistakes_of_the_command_line(machine: pathlib.Path) -> None:
    def told(message: str, *arguments: str) -> None:
        with pytest.raises(app.UsageError, match=message):
            run(f"--directory={machine}", *arguments)

    told("no machine is named")
    told("two machines have the same first name", "a,b", "a")
    told("'../a' in '../a' is neither a host's name nor an address", "../a")
    told("--authority and --authority_key go together", "--authority=a.pem", "a")
    told("the authority can't be read", "--authority=none.pem", "--authority_key=none.pem", "a")
    told("the authority can't be read: .*authority_key.pem", "a")
    shutil.copy(machine / KEY, machine / AUTHORITY_KEY)
    told("certificate and key don't go together", "a")
    shutil.copy(machine / CERTIFICATE, machine / AUTHORITY)
    told("is one of a machine", "a")


# ---- training in networks that fail, and in which somebody hostile has no certificate

SERVER_PORT = 2300
PUBLIC, OUTSIDE, HOSTILE = "198.51.100.1", "198.51.100.9", "10.77.0.9"

CLIENT = """
import sys, time
import keras, numpy as np
import dapple_tf as dapple
from dapple_tf.measuring.links import measure_between_servers

tls, *addresses = sys.argv[1:]
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="a"), keras.layers.Dense(1, name="b")])
model.compile(keras.optimizers.SGD(0.05), "mse")
x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
cluster = dapple.Cluster.of_servers(addresses, tls=tls or None)
plan = dapple.Plan.manual(["a"], [[0], [1]], micro_batches=2, global_batch_size=16)
faults = dapple.FaultPolicy("restart", notice_seconds=4, wait_seconds=60)
while line := sys.stdin.readline():
    if line == "transform\\n":
        try:
            pipelined = dapple.transform(model, cluster, plan, faults=faults)
            print("done", flush=True)
        except dapple.ClusterError as error:
            print(type(error).__name__, error, flush=True)
    elif line == "train\\n":
        pipelined.train_on_batch(x, x[:, :1])
        print(len(pipelined.faults), flush=True)
    elif line == "lose\\n":
        while pipelined.lost is None:
            time.sleep(0.05)
        print("lost", pipelined.lost.task, flush=True)
    elif line == "measure\\n":
        print(measure_between_servers(cluster, large=1 << 20, repeats=3)[0, 1].bandwidth, flush=True)
"""

ATTACK = """
import contextlib, json, socket, ssl, sys
from concurrent.futures import ThreadPoolExecutor
protocol, foreign, *addresses = sys.argv[1:]

def contexts():
    yield "plain", None
    for name in ("no certificate", "foreign certificate"):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if name.startswith("foreign"):
            context.load_cert_chain(foreign + "/certificate.pem", foreign + "/key.pem")
        yield name, context

asked = {
    "status": {"protocol": protocol, "ask": "status"},
    "lease": {"protocol": protocol, "ask": "lease", "client": "hostile", "secret": "x" * 64, "port": 0},
}
says = {name: json.dumps(message).encode() + b"\\n" for name, message in asked.items()}
says["grpc"] = b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])

def attempt(address, kind, context, name):
    host, port = address.split(":")
    got = b""
    try:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=3))
            if context is not None:
                connection = stack.enter_context(context.wrap_socket(connection))
            connection.sendall(says[name])
            got = connection.recv(1000)
    except OSError:
        pass
    if kind == "plain" and got[:1] == b"\\x15":
        got = b""  # an alert of TLS: "this isn't TLS"
    print(json.dumps([address, kind, name, got.decode(errors="replace")]) + "\\n", end="", flush=True)

with ThreadPoolExecutor(40) as pool:
    for address in addresses:
        for kind, context in contexts():
            for name in says:
                pool.submit(attempt, address, kind, context, name)
"""


class Training:
    """Two workers on hosts of their own, and a client on the second one that does what it is told."""

    def __init__(self, hosts: Hosts, tls: str) -> None:
        self.hosts = hosts
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self._client = hosts.popen(1, [sys.executable, "-c", CLIENT, tls, *hosts.addresses], **pipes)

    def tell(self, order: str) -> None:
        assert self._client.stdin is not None
        self._client.stdin.write(order + "\n")
        self._client.stdin.flush()

    def ask(self, *orders: str) -> str:
        """Tells the client these orders; returns its answer to the last one."""
        assert self._client.stdout is not None and self._client.stderr is not None
        for order in orders:
            self.tell(order)
            answer = self._client.stdout.readline()
            assert answer, self._client.stderr.read()
        return answer.rstrip("\n")

    def end(self) -> None:
        assert self._client.stdin is not None
        self._client.stdin.close()
        assert self._client.wait(PATIENCE) == 0


@contextlib.contextmanager
def training(worker_keys: str = "", client_keys: str = "") -> Iterator[Training]:
    require_namespaces()
    arguments = [f"--server_port={SERVER_PORT}", *([f"--tls={worker_keys}"] if worker_keys else [])]
    with Hosts(2, arguments=arguments, echo=lambda *_: None) as hosts:
        yield Training(hosts, client_keys)


@contextlib.contextmanager
def outside(hosts: Hosts) -> Iterator[Namespace]:
    with Namespace() as made:
        first = hosts.namespaces[0]
        join(first, "eth1", made, "eth0")
        first.call("ip", "addr", "add", f"{PUBLIC}/24", "dev", "eth1")
        made.call("ip", "addr", "add", f"{OUTSIDE}/24", "dev", "eth0")
        made.call("ip", "route", "add", "10.77.0.0/24", "via", PUBLIC)
        yield made


def knock(where: Namespace, *addresses: str) -> dict[str, str]:
    """What becomes of connections to these addresses, made in a namespace."""
    became = {}
    for address in addresses:
        opens = f"exec 3<>/dev/tcp/{address.replace(':', '/')}"
        done = subprocess.run(
            [*where.prefix, "timeout", "1", "bash", "-c", opens], stderr=subprocess.DEVNULL, check=False
        )
        became[address] = {0: "open", 124: "silent"}.get(done.returncode, "closed")
    return became


def listening_ports(namespace: Namespace) -> list[int]:
    """All TCP ports on which something listens in a namespace, whoever may reach it."""
    table = namespace.call("cat", "/proc/net/tcp", "/proc/net/tcp6")
    ports = {int(match[1], 16) for match in re.finditer(r"^\s*\d+: \w+:(\w{4}) \w+:0000 0A ", table, re.MULTILINE)}
    assert {2222, SERVER_PORT} <= ports
    return sorted(ports)


def attempts(hosts: Hosts, foreign: pathlib.Path) -> dict[tuple[str, str, str], str]:
    """Address, way and question of each attempt of the hostile host that is answered, and the answer.

    It tries all ports that there are, TensorFlow's on the loopback devices included.
    """
    with Namespace() as hostile:
        join(hostile, "eth0", hosts._switch, "port9")
        hosts._switch.call("ip", "link", "set", "port9", "master", "bridge")
        hostile.call("ip", "addr", "add", f"{HOSTILE}/24", "dev", "eth0")
        addresses = [
            f"{ip}:{port}" for ip, own in zip(hosts.ips, hosts.namespaces, strict=True) for port in listening_ports(own)
        ]
        attack = [*hostile.prefix, sys.executable, "-c", ATTACK, PROTOCOL, str(foreign), *addresses]
        done = subprocess.run(attack, capture_output=True, text=True, timeout=300, check=True)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == 9 * len(addresses)
    return {(address, way, asked): got for address, way, asked, got in answers if got}


@pytest.fixture(scope="module")
def folders(authority: Authority, foreign: Keys, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Directories of both hosts (in one) and of the client, now and renewed."""
    folder = tmp_path_factory.mktemp("folders")
    for age in ("", "renewed_"):
        new_machine(authority, folder / f"{age}hosts", "10.77.0.1", "10.77.0.2")
        new_machine(authority, folder / f"{age}client", "client")
    return folder


def test_private_networks_firewalls_partitions_and_slow_links(foreign: Keys) -> None:
    with training() as own:
        hosts = own.hosts
        first = hosts.namespaces[0]
        # TensorFlow's port of host 0 is firewalled: `transform` waited for an hour, `step_seconds`.
        rule = f"ipproto tcp sport {SERVER_PORT} blackhole"
        first.call("ip", "rule", "add", "priority", "100", *rule.split())
        assert own.ask("transform").startswith(
            "UnusableWorkersError TensorFlow's port 10.77.0.1:2300 of worker 0 (10.77.0.1:2222) can't be reached from "
            "this process: no answer within"
        )
        first.call("ip", "rule", "del", "priority", "100")
        assert own.ask("transform", "train") == "0"
        # Nobody gets in from outside the private network.
        private, public = ([f"{ip}:{port}" for port in (2222, SERVER_PORT)] for ip in (hosts.ips[0], PUBLIC))
        with outside(hosts) as other:
            assert knock(hosts.namespaces[1], *private) == dict.fromkeys(private, "open")
            nothing = [f"{ip}:9" for ip in (hosts.ips[0], PUBLIC)]
            assert knock(other, *nothing) == dict.fromkeys(nothing, "closed")  # It does reach the machine.
            assert "open" not in knock(other, *private, *public).values()
        # Within it, a hostile host is told of devices, and TensorFlow's servers greet it, the client's, too.
        answers = attempts(hosts, foreign.directory)
        assert {way for _, way, _ in answers} == {"plain"}
        servers = {address for address, _, asked in answers if asked == "grpc"}
        assert len(servers) == 3 and {f"{ip}:{SERVER_PORT}" for ip in hosts.ips} < servers
        for address in hosts.addresses:
            assert json.loads(answers[address, "plain", "status"])["holder"] == "another client"
            assert answers[address, "plain", "lease"].startswith('{"error": "in use by another client')
        # A host that is cut off is lost, and taken again.
        hosts.cut(0)
        assert own.ask("lose") == "lost 0"
        own.tell("train")
        hosts.join(0)
        assert own.ask("train") == "1"
        # A slow link is measured as what it is.
        hosts.limit(50)
        own.ask("measure")
        assert float(own.ask("measure")) < 1.3 * 50e6 / 8
        own.end()


def test_by_tls_a_hostile_host_gets_nothing_and_a_lost_worker_is_taken_again(
    folders: pathlib.Path, foreign: Keys
) -> None:
    """No status, no lease, no byte of TensorFlow's; new tunnels have certificates that were renewed meanwhile."""
    with training(str(folders / "hosts"), str(folders / "client")) as own:
        assert own.ask("transform", "train") == "0"
        assert attempts(own.hosts, foreign.directory) == {}
        assert own.ask("train") == "0"  # Nobody has disturbed it.
        for machine in ("hosts", "client"):
            for file in (folders / f"renewed_{machine}").iterdir():
                os.replace(file, folders / machine / file.name)
        (child,) = children(own.hosts.processes[0].pid)
        os.kill(child, signal.SIGKILL)
        assert int(own.ask("train", "train")) >= 1
        own.end()
