"""A part of a core for some processes."""

from __future__ import annotations

import os
import pathlib
import subprocess

import pytest

from dapple_tf.tools import cpu_quota as module
from dapple_tf.tools.cpu_quota import QuotaError, cpu_quota


@pytest.fixture
def version_1(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder with the files of control groups of version 1, whose groups aren't emptied by a kernel."""
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("-1")
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    monkeypatch.setattr(module, "_empty", lambda group: None)
    return tmp_path


def test_a_group_of_version_1_has_the_quota(version_1: pathlib.Path) -> None:
    with cpu_quota(0.5) as prefix:
        (group,) = (version_1 / "cpu").glob("dapple_*")
        assert (group / "cpu.cfs_period_us").read_text() == "10000"
        assert (group / "cpu.cfs_quota_us").read_text() == "5000"
        assert (group / "cpu.shares").read_text() == "262144", "others leave it its quota"
        done = subprocess.run([*prefix, "echo", "in it"], capture_output=True, text=True, check=True)
        assert done.stdout == "in it\n"
        assert (group / "cgroup.procs").read_text().strip().isdigit()


def test_a_group_of_version_2_has_the_quota(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_ROOT", tmp_path)
    monkeypatch.setattr(module, "_empty", lambda group: None)
    with cpu_quota(1.5):
        (group,) = tmp_path.glob("dapple_*")
        assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
        assert (group / "cpu.max").read_text() == "15000 10000"
        assert (group / "cpu.weight").read_text() == "10000"


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
