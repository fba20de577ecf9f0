"""A part of a core for some processes."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from dapple_tf.tools import cpu_quota as module
from dapple_tf.tools.cpu_quota import QuotaError, cpu_quota


@pytest.mark.parametrize("version", [1, 2])
def test_a_group_has_the_quota(version: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the files of control groups, whose groups aren't emptied by a kernel."""
    root = tmp_path / "cpu" if version == 1 else tmp_path
    root.mkdir(exist_ok=True)
    (root / ("cpu.cfs_quota_us" if version == 1 else "cgroup.subtree_control")).write_text("-1")
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    monkeypatch.setattr(module, "_empty", lambda group: None)
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
    monkeypatch.setattr(module, "_ROOT", tmp_path / "missing")
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
    before = {path.name for path in module._ROOT.glob("**/dapple_*")}
    with cpu_quota(0.5) as prefix:
        script = "sh -c 'cat /proc/self/cgroup'"
        done = subprocess.run([*prefix, "sh", "-c", script], capture_output=True, text=True, check=True)
        (group,) = {path for path in module._ROOT.glob("*/dapple_*")} | {path for path in module._ROOT.glob("dapple_*")}
        assert group.name in done.stdout
        assert str(os.getpid()) not in (group / "cgroup.procs").read_text().split()
    assert {path.name for path in module._ROOT.glob("**/dapple_*")} == before
