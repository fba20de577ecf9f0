"""Workers and hosts to try things out on: they do what their names say, and nothing is left of them."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from conftest import require_namespaces

from dapple_tf.network.control import PROTOCOL
from dapple_tf.tools.hosts import ROOT, Hosts, HostsError, LocalWorkers, environment, free_ports

pytestmark = pytest.mark.slow

# Without dapple_tf, whose import takes a while.
STATUS = """
import json, socket, sys
for address in sys.argv[2:]:
    host, port = address.split(":")
    try:
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(json.dumps({"protocol": sys.argv[1], "ask": "status"}).encode() + b"\\n")
            print(len(json.loads(connection.makefile().readline())["devices"]))
    except TimeoutError:
        print("silent")
    except OSError:
        print("refused")
"""


def status(*addresses: str) -> list[str]:
    """How many devices each worker has, or what becomes of the question."""
    done = subprocess.run(
        [sys.executable, "-c", STATUS, PROTOCOL, *addresses], capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def group(leader: int) -> list[int]:
    """Processes of a group that are there."""
    pids = []
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[2]) == leader and fields[0] != "Z":
            pids.append(int(path.parent.name))
    return pids


def wait_until_gone(*leaders: int) -> None:
    deadline = time.monotonic() + 20
    while any(group(leader) for leader in leaders):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.05)


@pytest.mark.thorough
def test_workers_end_with_the_program_that_started_them() -> None:
    program = """
import os, sys, time
from dapple_tf.tools.hosts import LocalWorkers
with LocalWorkers(1) as workers:
    print(workers.processes[0].pid, flush=True)
    time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT
    ) as process:
        assert process.stdout is not None
        leader = int(process.stdout.readline())
        assert group(leader)
        process.kill()
    wait_until_gone(leader)


@pytest.mark.thorough
def test_a_worker_that_does_not_start_is_told() -> None:
    with pytest.raises(HostsError, match=r"worker 0 \(127.0.0.1:\d+\) didn't start .* code 1; it said: .*no_such_flag"):
        LocalWorkers(1, arguments=["--no_such_flag"], echo=lambda number, line: None).__enter__()
    with pytest.raises(HostsError, match="0 workers were asked for"):
        LocalWorkers(0)


@pytest.mark.parametrize(("count", "expected"), [(1, []), (2, ["--gpus=1"])])
def test_each_of_several_workers_has_one_gpu(monkeypatch: pytest.MonkeyPatch, count: int, expected: list[str]) -> None:
    """All lent all."""
    monkeypatch.setattr("dapple_tf.tools.hosts.WorkerProcess", lambda command, echo: command)
    assert LocalWorkers(count, devices=0)._start(count - 1)[-1 - len(expected) :] == ["--devices=0", *expected]


def test_free_ports_differ_and_are_not_those_of_outgoing_connections() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    first = int(pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(1024 < port < max(first, 32_768) for port in ports)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    require_namespaces()
    with Hosts(2, devices=2) as made:
        yield made


def asked(hosts: Hosts, host: int, of: int) -> str:
    done = hosts.run(
        host, [sys.executable, "-c", STATUS, PROTOCOL, hosts.addresses[of]], stdout=subprocess.PIPE, timeout=60
    )
    assert done.returncode == 0
    return done.stdout.strip()


@pytest.mark.thorough
def test_a_host_is_cut_off_and_comes_back(hosts: Hosts) -> None:
    assert asked(hosts, 0, of=1) == "2"
    hosts.cut(1)
    assert asked(hosts, 0, of=1) == "silent"
    assert asked(hosts, 1, of=1) == "2"  # It is there all the same.
    hosts.join(1)
    assert asked(hosts, 0, of=1) == "2"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("packets", "silent"), [("", [True, True]), ("ipproto tcp dport 2222", [True, False])], ids=["all", "to a port"]
)
def test_packets_are_lost_one_way(hosts: Hosts, packets: str, silent: list[bool]) -> None:
    hosts.lose(1, 0, packets)
    assert [asked(hosts, 1, of=0) == "silent", asked(hosts, 0, of=1) == "silent"] == silent
    hosts.join(1)
    assert [asked(hosts, 1, of=0), asked(hosts, 0, of=1)] == ["2", "2"]


@pytest.mark.thorough
@pytest.mark.parametrize("rate", [200, 50])
def test_links_between_hosts_are_measured_as_they_are(hosts: Hosts, rate: int, tmp_path: pathlib.Path) -> None:
    import dapple_tf as dapple

    out = tmp_path / "cluster.json"
    hosts.limit(rate)
    try:
        command = [sys.executable, "-m", "tools.measure_links", f"--addresses={','.join(hosts.addresses)}"]
        # Enough bytes that the measured time is the link's, whatever else the machine does meanwhile.
        options = [f"--mib={rate / 25}", "--repeats=5", f"--out={out}"]
        done = hosts.run(
            0, [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=200, cwd=os.fspath(ROOT)
        )
    finally:
        hosts.limit(None)
    assert done.returncode == 0, done.stderr
    assert "10.77.0.2:2222    2 CPU" in done.stdout
    assert "\n0 - 1 " in done.stdout and "\nring through all devices " in done.stdout
    measured = dapple.Cluster.load(out)
    assert [measured.devices_of(server) for server in range(2)] == [(0, 1), (2, 3)]
    assert measured.inter_bandwidth == pytest.approx(rate * 1e6 / 8, rel=0.15)
    assert measured.link(0, 2).bandwidth == measured.inter_bandwidth
    assert measured.devices[0].memory_bytes
    assert json.loads(out.read_text())["servers"][1]["devices"] == 2
