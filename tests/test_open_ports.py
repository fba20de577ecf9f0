"""A firewall between TensorFlow's servers is told of before TensorFlow waits for ever: from where, to which port."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from conftest import require_namespaces
from workers import PATIENCE, expect, wait_until

from dapple_tf.clusters.open_ports import check_ports
from dapple_tf.describe.cluster import ClusterError
from dapple_tf.errors import UnusableWorkersError
from dapple_tf.tools.hosts import Hosts, end

ADDRESSES = ["a:1", "b:1", "c:1"]
SERVERS = ["10.0.0.1:7", "10.0.0.2:7", "10.0.0.3:7"]
CLIENT = "10.0.0.9:7"
SECONDS = 0.5


def check(*answers: Mapping[str, Any], client: list[str] | None = None) -> None:
    """Checks a cluster whose workers give these answers, and of whose servers this process reaches all but some."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        closed = dict.fromkeys(client or [], "Connection refused")
        monkeypatch.setattr("dapple_tf.clusters.open_ports.unreachable", lambda servers, seconds: closed)
        servers = {server: server for server in SERVERS[: len(answers)]}
        told = dict(enumerate(answers))
        check_ports(ADDRESSES[: len(answers)], lambda ask: told, servers, [CLIENT] * len(answers), SECONDS)


def closed(*servers: str) -> dict[str, Any]:
    return {"unreachable": dict.fromkeys(servers, "no answer within 8 s")}


def test_all_ports_are_open() -> None:
    check(closed(), closed(), closed())


@pytest.mark.parametrize(
    ("client", "answers", "text", "tasks"),
    [
        ([SERVERS[1]], [closed(), closed()], "10.0.0.2:7 of worker 1 (b:1) can't be reached from this process: C", [1]),
        ([], [closed(), closed(CLIENT)], "10.0.0.9:7 of this process can't be reached from worker 1 (b:1): no", [1]),
        ([], [closed(SERVERS[1]), closed()], "10.0.0.2:7 of worker 1 (b:1) can't be reached from worker 0 (a:1)", [1]),
        (
            [SERVERS[0]],
            [closed(), closed(SERVERS[0]), closed(SERVERS[1])],
            "10.0.0.1:7 of worker 0 (a:1) can't be reached from this process: Connection refused, nor from worker 1 "
            "(b:1): no answer within 8 s; TensorFlow's port 10.0.0.2:7 of worker 1 (b:1) can't be reached from worker",
            [0, 1],
        ),
    ],
    ids=["client to worker", "worker to client", "worker to worker", "several"],
)
def test_a_port_that_is_closed(client: list[str], answers: list[Any], text: str, tasks: list[int]) -> None:
    with pytest.raises(UnusableWorkersError) as raised:
        check(*answers, client=client)
    assert text in str(raised.value)
    assert "firewall" in str(raised.value)
    assert list(raised.value.tasks) == tasks


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"unreachable": []}, "lacks 'unreachable' or garbles it"),
        ({"unreachable": {SERVERS[0]: 5}}, "lacks 'unreachable' or garbles it"),
        ({"unreachable": {"elsewhere:5": "closed"}}, "lacks 'unreachable' or garbles it"),
    ],
)
def test_a_worker_that_does_not_say(answer: dict[str, Any], text: str) -> None:
    with pytest.raises(ClusterError, match=text):
        check(closed(), answer)


# ---- hosts

SERVER_PORT = "2300"

TRAINING = """
import sys
import keras, numpy as np
import dapple_tf as dapple

model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, name="a"), keras.layers.Dense(1, name="b")])
model.compile(keras.optimizers.SGD(0.05), "mse")
cluster = dapple.Cluster.of_servers(sys.argv[2:])
plan = dapple.Plan.manual(["a"], [[0], [1]], micro_batches=2, global_batch_size=16)
print("begins", flush=True)
try:
    dapple.transform(model, cluster, plan, faults=dapple.FaultPolicy(notice_seconds=float(sys.argv[1])))
except (dapple.ClusterError, KeyboardInterrupt) as error:
    print(type(error).__name__, error, flush=True)
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    require_namespaces()
    with Hosts(2, arguments=[f"--server_port={SERVER_PORT}"], echo=lambda *_: None) as made:
        yield made


@contextlib.contextmanager
def rules(hosts: Hosts, host: int, rules: list[str]) -> Iterator[None]:
    """Rules of a host's routing, in place of a firewall's, for which many machines have no kernel modules."""
    namespace = hosts.namespaces[host]
    for number, rule in enumerate(rules):
        namespace.call("ip", "rule", "add", "priority", str(100 + number), *rule.split())
    try:
        yield
    finally:
        for number in range(len(rules)):
            namespace.call("ip", "rule", "del", "priority", str(100 + number))


def knocks(hosts: Hosts, host: int) -> bool:
    """Whether a host waits for an answer from somebody's TensorFlow server."""
    table = hosts.namespaces[host].call("cat", "/proc/net/tcp", "/proc/net/tcp6")
    return re.search(rf":{int(SERVER_PORT):04X} 02 ", table) is not None


DROPPED = (1, [f"ipproto tcp sport {SERVER_PORT} blackhole"])
"""What the server of host 1 answers is lost."""


@pytest.mark.thorough
@pytest.mark.slow
def test_a_firewall_is_told_of(hosts: Hosts) -> None:
    """`transform` waited for an hour, `step_seconds`."""
    with rules(hosts, *DROPPED):
        done = hosts.run(
            0, [sys.executable, "-c", TRAINING, "2", *hosts.addresses], stdout=subprocess.PIPE, timeout=2 * PATIENCE
        )
    assert (
        "begins\nUnusableWorkersError TensorFlow's port 10.77.0.2:2300 of worker 1 (10.77.0.2:2222) can't be reached "
        "from this process: no answer within"
    ) in done.stdout


@pytest.mark.thorough
@pytest.mark.slow
def test_one_ctrl_c_ends_the_waiting_for_a_port(hosts: Hosts) -> None:
    """The second one was in vain, too."""
    with rules(hosts, *DROPPED):
        client = hosts.popen(
            0,
            ["env", "--default-signal=INT", sys.executable, "-c", TRAINING, "600", *hosts.addresses],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        expect(client, "begins")
        wait_until(lambda: knocks(hosts, 0))
        client.send_signal(signal.SIGINT)
        assert client.wait(PATIENCE) == 0
        assert client.stdout is not None and client.stdout.read().startswith("KeyboardInterrupt")
        end(client)
