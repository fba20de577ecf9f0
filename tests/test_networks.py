"""Training in networks that fail, and in which somebody hostile has no certificate.

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
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from conftest import require_namespaces
from workers import PATIENCE, children, new_authority, new_machine

from dapple_tf.network.control import PROTOCOL
from dapple_tf.tools.hosts import Hosts, Namespace, join

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

KNOCK = """
import socket, sys
for address in sys.argv[1:]:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
        print(address, "open")
    except TimeoutError:
        print(address, "silent")
    except OSError as error:
        print(address, "closed")
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
    command = [*where.prefix, sys.executable, "-c", KNOCK, *addresses]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True)
    return dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())


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
def keys(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Directories of both hosts (in one), of the client, and of another authority's host."""
    folder = tmp_path_factory.mktemp("keys")
    authority = new_authority()
    for _ in range(2):
        new_machine(authority, folder / "hosts", "10.77.0.1", "10.77.0.2")
        new_machine(authority, folder / "client", "client")
    new_machine(authority, folder / "renewed_hosts", "10.77.0.1", "10.77.0.2")
    new_machine(authority, folder / "renewed_client", "client")
    new_machine(new_authority(), folder / "foreign", "10.77.0.1", "10.77.0.2")
    return folder


def test_private_networks_firewalls_partitions_and_slow_links(keys: pathlib.Path) -> None:
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
        answers = attempts(hosts, keys / "foreign")
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


def test_by_tls_a_hostile_host_gets_nothing_and_a_lost_worker_is_taken_again(keys: pathlib.Path) -> None:
    """No status, no lease, no byte of TensorFlow's; new tunnels have certificates that were renewed meanwhile."""
    with training(str(keys / "hosts"), str(keys / "client")) as own:
        assert own.ask("transform", "train") == "0"
        assert attempts(own.hosts, keys / "foreign") == {}
        assert own.ask("train") == "0"  # Nobody has disturbed it.
        for machine in ("hosts", "client"):
            for file in (keys / f"renewed_{machine}").iterdir():
                os.replace(file, keys / machine / file.name)
        (child,) = children(own.hosts.processes[0].pid)
        os.kill(child, signal.SIGKILL)
        assert int(own.ask("train", "train")) >= 1
        own.end()
