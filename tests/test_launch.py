"""The launcher: a command finds its workers, gets signals, and gives its exit code; nothing is left of it."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys

import pytest
from workers import _workers_start_fast, has_ended, wait_until  # noqa: F401 (a fixture)

from dapple_tf.tools import hosts
from dapple_tf.tools.hosts import ROOT, HostsError, LocalWorkers, QuotaError, cpu_quota, environment, free_ports

pytestmark = pytest.mark.usefixtures("_workers_start_fast")


def launch(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tools.launch", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=ROOT,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert "Traceback" not in err, err
    return process.returncode, out, err


def pids(text: str) -> list[int]:
    """Processes of the workers that have started."""
    return [int(number) for number in re.findall(r"worker on \S+ \(process (\d+)\)", text)]


def test_the_command_gets_its_workers_signals_and_keys() -> None:
    """Its exit code is returned, and no worker is left."""
    pytest.importorskip("cryptography", reason="needs certificates: cryptography isn't installed (make venv)")
    program = """
import json, os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # One right before a sleep wouldn't end it.
keys = os.listdir(os.environ["DAPPLE_TF_TLS"])
print(json.dumps([json.loads(os.environ["TF_CONFIG"]), sorted(keys)]), flush=True)
signal.sigwait([signal.SIGTERM])
sys.exit(7)
"""
    first = free_ports(1)[0]
    process = launch("--workers=1", f"--base_port={first}", "--tls", "--", sys.executable, "-c", program)
    assert process.stdout is not None
    told = process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 7, err
    config = {"cluster": {"worker": [f"127.0.0.1:{first}"]}, "task": {"type": "chief", "index": 0}}
    assert json.loads(told) == [config, ["authority.pem", "certificate.pem", "key.pem"]]
    assert pids(err) and all(map(has_ended, pids(err)))


def test_workers_are_started_again_and_end_with_the_launcher() -> None:
    process = launch("--workers=1", "--restart")
    assert process.stdout is not None and process.stderr is not None
    printed = [process.stdout.readline() for _ in range(4)]
    assert re.fullmatch(r"1 workers: 127.0.0.1:\d+\n", printed[0])
    assert "Cluster.of_servers(['127.0.0.1:" in printed[1]
    assert "export TF_CONFIG='" in printed[2]
    workers = (own for line in process.stderr for own in pids(line))
    first = next(workers)
    os.kill(first, signal.SIGKILL)
    second = next(workers)
    assert second != first
    process.kill()
    finish(process)
    wait_until(lambda: has_ended(second))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers=2", "--base_port=65535"], "--base_port=65535: 2 workers would need ports to 65536"),
        (["--workers=1", "--", "no-such-program"], "there is no program 'no-such-program'"),
    ],
)
def test_mistakes_are_told(arguments: list[str], message: str) -> None:
    code, out, err = finish(launch(*arguments))
    assert code != 0
    assert message in out + err


def test_workers_that_do_not_start_are_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        text = rf"worker 0 \(127.0.0.1:{port}\) didn't start .* code 1; it said: .*no worker can listen on"
        with pytest.raises(HostsError, match=rf"(?s){text}"):
            LocalWorkers(1, ports=[port], echo=lambda number, line: None).__enter__()
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


# ---- a part of a core for some processes


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_has_the_quota(version: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the files of control groups, whose groups aren't emptied by a kernel."""
    root = tmp_path / "cpu" if version == 1 else tmp_path
    root.mkdir(exist_ok=True)
    (root / ("cpu.cfs_quota_us" if version == 1 else "cgroup.subtree_control")).write_text("-1")
    monkeypatch.setattr(hosts, "_GROUPS", tmp_path)
    monkeypatch.setattr(hosts, "_empty_group", lambda group: None)
    wanted = {
        1: {"cpu.cfs_period_us": "10000", "cpu.cfs_quota_us": "5000", "cpu.shares": "262144"},
        2: {"cpu.max": "5000 10000", "cpu.weight": "10000"},  # Others leave it its quota.
    }[version]
    with cpu_quota(0.5) as prefix:
        (group,) = root.glob("dapple_*")
        assert {name: (group / name).read_text() for name in wanted} == wanted
        assert version == 1 or (root / "cgroup.subtree_control").read_text() == "+cpu"
        done = subprocess.run([*prefix, "echo", "in it"], capture_output=True, text=True, check=True)
        assert done.stdout == "in it\n"
        assert (group / "cgroup.procs").read_text().strip().isdigit()


def test_a_machine_without_control_groups_is_told(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "_GROUPS", tmp_path / "missing")
    with pytest.raises(QuotaError, match=r"can't be limited here: .*needs root and a writable .*missing"), cpu_quota(1):
        pass


def _makes_groups() -> bool:
    try:
        with cpu_quota(1.0):
            return True
    except QuotaError:
        return False


@pytest.mark.skipif(not _makes_groups(), reason="control groups can't be made here")
def test_a_real_group_holds_children_and_is_removed() -> None:
    before = {path.name for path in hosts._GROUPS.glob("**/dapple_*")}
    with cpu_quota(0.5) as prefix:
        script = "sh -c 'cat /proc/self/cgroup'"
        done = subprocess.run([*prefix, "sh", "-c", script], capture_output=True, text=True, check=True)
        (group,) = {path for path in hosts._GROUPS.glob("*/dapple_*")} | {
            path for path in hosts._GROUPS.glob("dapple_*")
        }
        assert group.name in done.stdout
        assert str(os.getpid()) not in (group / "cgroup.procs").read_text().split()
    assert {path.name for path in hosts._GROUPS.glob("**/dapple_*")} == before
