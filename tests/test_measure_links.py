"""The program that measures links: what it prints and writes, and what it says of mistakes."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest

import dapple_tf as dapple
from dapple_tf.tools import command, measure_links
from dapple_tf.tools.hosts import ROOT, environment


@pytest.mark.thorough
@pytest.mark.slow
def test_workers_of_this_machine(tmp_path: pathlib.Path) -> None:
    out = tmp_path / "cluster.json"
    own = {key: value for key, value in environment().items() if key != "TF_CONFIG"}
    arguments = ["--local=3", "--mib=0.25", "--repeats=1", "--nocapacity", "--speeds", f"--out={out}"]
    line = [sys.executable, "-m", "tools.measure_links", *arguments]
    done = subprocess.run(line, capture_output=True, text=True, env=own, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["server", "address", "devices", "memory", "of", "each"]
    assert [line.split()[2:4] for line in lines[1:4]] == [["1", "CPU"]] * 3
    starts = [line[:5] for line in lines]
    assert [start for start in starts if start in ("0 - 1", "0 - 2", "1 - 2")] == ["0 - 1", "0 - 2", "1 - 2"]
    cluster = dapple.Cluster.load(out)
    assert "speed of each worker's first device: 1 +- 0, " in done.stdout
    assert all(device.speed > 0 for device in cluster.devices)
    assert cluster.num_servers == 3 and cluster.inter_bandwidth is not None
    assert all(server.inter_bandwidth for server in cluster.servers)


@pytest.mark.thorough
@pytest.mark.slow
def test_workers_that_share_machines(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Servers and workers were taken for the same: a table had two of four addresses, and speeds of two."""
    monkeypatch.delenv("TF_CONFIG", raising=False)
    out = tmp_path / "cluster.json"
    arguments = ["--local=4", "--workers_per_server=2", "--mib=0.25", "--repeats=1", "--nocapacity", "--speeds"]
    assert command.run(measure_links.main, measure_links.FLAGS, [*arguments, f"--out={out}"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[1:5]] == ["0", "0", "1", "1"]
    assert "0 - 1" in printed and "0 - 2" not in printed and "within a server" in printed
    (speeds,) = [line for line in printed.splitlines() if line.startswith("speed of each worker's first device: ")]
    assert speeds.count("+-") == 4
    cluster = dapple.Cluster.load(out)
    assert cluster.num_servers == 2 and cluster.intra_bandwidth is not None and cluster.inter_bandwidth is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which workers? Give --addresses=host:port"),
        (["--local=1", "--addresses=a:1"], "exclude each other"),
        (["--addresses=127.0.0.1:1"], "worker 0 (127.0.0.1:1) can't be reached"),
        (["--addresses=nonsense"], "address 0 is 'nonsense'"),
        (
            ["--local=1", "--workers_per_server=2"],
            "--workers_per_server=2: 1 worker can't be divided into servers of 2",
        ),
        (["--local=1", "--out=/no/such/folder/x.json"], "no such folder"),
    ],
)
def test_mistakes_are_told(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert command.run(measure_links.main, measure_links.FLAGS, arguments) == 1
    assert message in capsys.readouterr().err
