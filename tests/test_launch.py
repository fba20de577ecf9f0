"""The launcher: a command finds its workers, gets signals, and gives its exit code; nothing is left of it."""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from dapple_tf.tools.hosts import ROOT, environment, free_ports

pytestmark = pytest.mark.slow


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


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.thorough
def test_the_example_trains_on_the_workers(tmp_path: pathlib.Path) -> None:
    model = tmp_path / "model.keras"
    example = [sys.executable, "docs/examples/train_on_cluster.py", "--pipeline", "--epochs=1", f"--model={model}"]
    code, out, err = finish(launch("--workers=2", "--devices=2", "--", *example))
    assert code == 0, err
    assert "4 devices on 2 workers: 127.0.0.1:" in out
    assert "accuracy" in out
    assert model.exists()
    assert "[worker 0] worker on" in err and "[worker 1] worker on" in err
    assert re.search(r"^\[worker 1\] .* serving process \d+ on ", err, flags=re.MULTILINE)
    wait_for(lambda: not any(map(alive, pids(err))))


def test_the_command_gets_tf_config_and_its_exit_code_is_returned() -> None:
    first = free_ports(1)[0]
    program = "import os, sys; print(os.environ['TF_CONFIG']); sys.exit(7)"
    code, out, err = finish(launch("--workers=1", f"--base_port={first}", "--", sys.executable, "-c", program))
    assert code == 7
    config = {"cluster": {"worker": [f"127.0.0.1:{first}"]}, "task": {"type": "chief", "index": 0}}
    assert json.loads(out) == config
    assert not any(map(alive, pids(err)))


@pytest.mark.thorough
def test_the_command_gets_keys_and_reaches_the_workers_by_them() -> None:
    pytest.importorskip("cryptography", reason="needs certificates: cryptography isn't installed (make venv)")
    program = """
import os, sys
import tensorflow as tf
import dapple_tf as dapple
cluster = dapple.Cluster.from_resolver(tf.distribute.cluster_resolver.TFConfigClusterResolver())
print(cluster.num_devices, cluster.tls == os.environ["DAPPLE_TF_TLS"])
"""
    code, out, err = finish(launch("--workers=2", "--tls", "--", sys.executable, "-c", program))
    assert code == 0, err
    assert out == "2 True\n"


@pytest.mark.thorough
def test_signals_go_on_to_the_command() -> None:
    program = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # One right before a sleep wouldn't end it.
print("ready", flush=True)
signal.sigwait([signal.SIGTERM])
sys.exit(5)
"""
    process = launch("--workers=1", "--", sys.executable, "-c", program)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 5

    process = launch("--workers=1", "--", "sh", "-c", "kill -9 $$")
    assert finish(process)[0] == 128 + signal.SIGKILL


@pytest.mark.thorough
def test_workers_are_started_again_and_end_with_the_launcher() -> None:
    process = launch("--workers=1", "--restart")
    assert process.stdout is not None and process.stderr is not None
    printed = [process.stdout.readline() for _ in range(4)]
    assert re.fullmatch(r"1 workers: 127.0.0.1:\d+\n", printed[0])
    assert "Cluster.of_servers(['127.0.0.1:" in printed[1]
    assert "export TF_CONFIG='" in printed[2]

    def next_worker() -> int:
        assert process.stderr is not None
        for line in process.stderr:
            if found := pids(line):
                return found[0]
        raise AssertionError("no worker came")

    first = next_worker()
    os.kill(first, signal.SIGKILL)
    second = next_worker()
    assert second != first
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 0
    wait_for(lambda: not alive(second))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers=1", "--", "no-such-program"], "there is no program 'no-such-program'"),
        (["--workers=2", "--base_port=65535"], "--base_port=65535: 2 workers would need ports to 65536"),
        (["--workers=0"], "flag --workers=0"),
        (["--workers=1", "python", "--epochs=3"], "Unknown command line flag 'epochs'"),
    ],
)
def test_mistakes_are_told(arguments: list[str], message: str) -> None:
    code, out, err = finish(launch(*arguments))
    assert code != 0
    assert message in out + err


@pytest.mark.thorough
def test_a_taken_port_is_told() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = finish(launch("--workers=1", f"--base_port={port}"))
    assert code == 1
    assert f"no worker can listen on 127.0.0.1:{port}" in err
