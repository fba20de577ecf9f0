"""Training by mutual TLS, with somebody in the same network who knows everything but has no certificate.

host 0, a worker ──┐
host 1, a worker ──┼── one network, 10.77.0.0/24
and the client     │
hostile host ──────┘
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import require_namespaces
from tls_keys import new_authority, new_machine
from workers import PATIENCE, children, client, wait_until, wish

import dapple_tf as dapple
from dapple_tf.clusters import connection as connection_module
from dapple_tf.clusters.shared_connections import connected
from dapple_tf.network.certificates import Authority
from dapple_tf.network.control import PROTOCOL, Channel
from dapple_tf.network.inquiry import reachable
from dapple_tf.network.keys import Keys
from dapple_tf.tools.hosts import Hosts, LocalWorkers, Namespace, join

pytestmark = pytest.mark.slow

SERVER_PORT = 2300
HOSTILE = "10.77.0.9"

TRAINING = """
import sys
import keras, numpy as np
import dapple_tf as dapple
tls, *addresses = sys.argv[1:]
keras.utils.set_random_seed(1)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="a"), keras.layers.Dense(1, name="b")])
model.compile(keras.optimizers.SGD(0.05), "mse")
x = np.random.default_rng(0).normal(size=(16, 8)).astype("float32")
cluster = dapple.Cluster.of_servers(addresses, tls=tls or None)
stages = dapple.Plan.manual(["a"], [[0], [1]], micro_batches=2, global_batch_size=16)
losses = []
for plan in (dapple.Plan.data_parallel(2, 16), stages):
    pipelined = dapple.transform(model, cluster, plan, faults=dapple.FaultPolicy("restart", notice_seconds=5))
    losses += [float(pipelined.train_on_batch(x, x[:, :1])) for _ in range(3)]
    if plan is not stages:
        pipelined.close()
print("trained", *losses, flush=True)
for line in sys.stdin:
    print("trained", float(pipelined.train_on_batch(x, x[:, :1])), len(pipelined.faults), flush=True)
"""

ATTACK = """
import contextlib, json, socket, ssl, sys
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
for address in addresses:
    host, port = address.split(":")
    for kind, context in contexts():
        for name, data in says.items():
            got = b""
            try:
                with contextlib.ExitStack() as stack:
                    connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=1.5))
                    if context is not None:
                        connection = stack.enter_context(context.wrap_socket(connection))
                    connection.sendall(data)
                    got = connection.recv(1000)
            except OSError:
                pass
            if kind == "plain" and got[:1] == b"\\x15":
                got = b""  # an alert of TLS: "this isn't TLS"
            print(json.dumps([address, kind, name, got.decode(errors="replace")]), flush=True)
"""


@pytest.fixture(scope="module")
def authority() -> Authority:
    return new_authority()


@pytest.fixture(scope="module")
def keys(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Directories of both hosts (in one), of the client, of a neighbour, and of another authority's."""
    folder = tmp_path_factory.mktemp("keys")
    new_machine(authority, folder / "hosts", "10.77.0.1", "10.77.0.2", "127.0.0.1")
    new_machine(authority, folder / "client", "client")
    new_machine(new_authority(), folder / "foreign", "10.77.0.1", "10.77.0.2", "127.0.0.1")
    return folder


# ---- on this machine


@pytest.fixture(scope="module")
def workers(keys: pathlib.Path) -> Iterator[LocalWorkers]:
    with LocalWorkers(2, arguments=[f"--tls={keys / 'hosts'}"], echo=lambda *_: None) as made:
        yield made


def losses(process: subprocess.Popen[str]) -> list[float]:
    assert process.stdout is not None and process.stderr is not None
    line = process.stdout.readline()
    assert line.startswith("trained "), process.stderr.read()
    return [float(word) for word in line.split()[1:]]


@pytest.mark.thorough
def test_training_by_tls_is_the_same_and_survives_a_lost_worker(
    workers: LocalWorkers, authority: Authority, keys: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit by bit as without TLS; a worker that is killed and comes back is taken again, by new tunnels.

    Certificates may have been renewed meanwhile.
    """
    with LocalWorkers(2, echo=lambda *_: None) as bare, client(TRAINING, "", *bare.addresses) as process:
        expected = losses(process)
    monkeypatch.setenv("DAPPLE_TF_TLS", str(keys / "client"))  # In place of tls=...
    with client(TRAINING, "", *workers.addresses, stdin=subprocess.PIPE) as process:
        assert losses(process) == expected
        assert process.stdin is not None
        (child,) = children(workers.processes[1].pid)
        os.kill(child, 9)
        new_machine(authority, keys / "hosts", "10.77.0.1", "10.77.0.2", "127.0.0.1")
        new_machine(authority, keys / "client", "client")
        for count in (1, 1):
            process.stdin.write("again\n")
            process.stdin.flush()
            assert losses(process)[1] == count
        process.stdin.close()
        assert process.wait(PATIENCE) == 0
    for worker in workers.processes:
        wait_until(lambda worker=worker: not children(worker.pid))


def test_what_a_client_is_told(workers: LocalWorkers, keys: pathlib.Path) -> None:
    address = workers.addresses[0]
    with pytest.raises(dapple.ClusterError, match=rf"--address={address}` running there, without --tls\?"):
        dapple.Cluster.of_servers([address])
    with pytest.raises(
        dapple.ClusterError, match=r"has a certificate that isn't accepted: .* of the same authority as"
    ):
        dapple.Cluster.of_servers([address], tls=keys / "foreign")
    with pytest.raises(dapple.ClusterError, match="is missing; a directory for TLS has"):
        dapple.Cluster.of_servers([address], tls=keys)
    cluster = dapple.Cluster.of_servers([address], tls=keys / "client")
    assert cluster.tls == str(keys / "client")
    assert reachable([address], PATIENCE, Keys(keys / "client")) == [True]
    assert reachable([address], PATIENCE) == [False]


def test_tunnels_to_a_worker_without_a_port_end(workers: LocalWorkers, keys: pathlib.Path) -> None:
    """Each attempt left a process of relays behind, to the end of this one."""
    cluster = dapple.Cluster.of_servers(workers.addresses, tls=keys / "client")
    with socket.socket() as taken, pytest.MonkeyPatch.context() as patch:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        patch.setitem(connection_module._ports, cluster.addresses[1], taken.getsockname()[1])
        before = {*children(os.getpid())}
        with connected(cluster):
            (tunnels,) = {*children(os.getpid())} - before
            assert "relay" in pathlib.Path(f"/proc/{tunnels}/cmdline").read_text()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({}, "'fingerprints' is None; it must be of type list"),
        ({"fingerprints": []}, "'fingerprints' is []; it must have a text for each of the workers"),
        ({"fingerprints": [1]}, "'fingerprints' is [1]; it must have a text for each of the workers"),
        ({"fingerprints": ["x"], "cluster": {"worker": ["a:1"], "ps": ["b:1"]}}, "the cluster has the jobs"),
        ({"fingerprints": ["x"], "cluster": {"worker": ["a:1"], "client": ["b:1", "b:2"]}}, "the cluster has the jobs"),
    ],
)
def test_orders_that_are_refused(
    change: dict[str, object], error: str, workers: LocalWorkers, keys: pathlib.Path
) -> None:
    address = workers.addresses[0]
    order = {"cluster": {"worker": [address]}, "task": 0, "leader": 0, "silence": 60.0}
    with contextlib.closing(Channel.connect(address, PATIENCE, Keys(keys / "client"))) as channel:
        assert "port" in channel.ask(wish("somebody"), PATIENCE)
        assert channel.ask({**order, **change}, PATIENCE)["error"].startswith(error)
    wait_until(lambda: not children(workers.processes[0].pid))


# ---- in a network


def listening_ports(namespace: Namespace) -> set[int]:
    """All TCP ports on which something listens in a namespace, whoever may reach it."""
    table = namespace.call("cat", "/proc/net/tcp", "/proc/net/tcp6")
    return {int(match[1], 16) for match in re.finditer(r"^\s*\d+: \w+:(\w{4}) \w+:0000 0A ", table, re.MULTILINE)}


def attempts(keys: pathlib.Path, *, tls: bool) -> list[tuple[str, str, str, str]]:
    """Address, way and question of each attempt of the hostile host while a client trains, and what it was sent back.

    It tries all ports that there are, TensorFlow's on the loopback devices included.
    """
    require_namespaces()
    own, other = ([f"--tls={keys / 'hosts'}"], str(keys / "client")) if tls else ([], "")
    with Hosts(2, arguments=[f"--server_port={SERVER_PORT}", *own]) as hosts, Namespace() as hostile:
        join(hostile, "eth0", hosts._switch, "port9")
        hosts._switch.call("ip", "link", "set", "port9", "master", "bridge")
        hostile.call("ip", "addr", "add", f"{HOSTILE}/24", "dev", "eth0")
        command = [sys.executable, "-c", TRAINING, other, *hosts.addresses]
        training = hosts.popen(1, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        losses(training)
        ports = [sorted(listening_ports(namespace)) for namespace in hosts.namespaces]
        assert all({2222, SERVER_PORT} <= set(numbers) for numbers in ports)
        addresses = [f"{ip}:{port}" for ip, numbers in zip(hosts.ips, ports, strict=True) for port in numbers]
        attack = [*hostile.prefix, sys.executable, "-c", ATTACK, PROTOCOL, str(keys / "foreign"), *addresses]
        done = subprocess.run(attack, capture_output=True, text=True, timeout=300, check=True)
        assert training.stdin is not None
        training.stdin.write("again\n")
        training.stdin.flush()
        assert losses(training)[1] == 0  # Nobody has disturbed it.
        training.stdin.close()
        assert training.wait(PATIENCE) == 0
    answers = [tuple(json.loads(line)) for line in done.stdout.splitlines()]
    assert len(answers) == 9 * len(addresses)
    return answers


@pytest.mark.thorough
def test_a_hostile_host_gets_nothing(keys: pathlib.Path) -> None:
    """No status, no lease and no byte of TensorFlow's."""
    assert [attempt for attempt in attempts(keys, tls=True) if attempt[3]] == []


@pytest.mark.thorough
def test_without_tls_a_hostile_host_gets_in(keys: pathlib.Path) -> None:
    """So its attempts are real ones: it is told of devices, and TensorFlow's servers greet it, the client's, too."""
    answers = {attempt[:3]: attempt[3] for attempt in attempts(keys, tls=False) if attempt[3]}
    assert {way for _, way, _ in answers} == {"plain"}
    servers = {address for address, _, asked in answers if asked == "grpc"}
    assert len(servers) == 3 and {f"10.77.0.1:{SERVER_PORT}", f"10.77.0.2:{SERVER_PORT}"} < servers
    workers = {address for address, _, _ in answers} - servers
    assert workers == {"10.77.0.1:2222", "10.77.0.2:2222"}
    for address in workers:
        assert json.loads(answers[address, "plain", "status"])["holder"] == "another client"
        assert answers[address, "plain", "lease"].startswith('{"error": "in use by another client')
