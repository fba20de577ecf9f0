"""A part of a core for some processes: control groups of Linux, version 1 or 2. Needs root."""

from __future__ import annotations

import contextlib
import os
import pathlib
import uuid
from collections.abc import Iterator

_PERIOD = 10_000
"""Microseconds after which the quota begins anew; short beside a step."""
_MOST_SHARES, _MOST_WEIGHT = 2**18, 10_000
"""The most that Linux accepts in versions 1 and 2: other load on the machine leaves a group its quota."""
_ROOT = pathlib.Path("/sys/fs/cgroup")


class QuotaError(RuntimeError):
    """Processor time can't be limited here; the text says why."""


@contextlib.contextmanager
def cpu_quota(cores: float) -> Iterator[list[str]]:
    """Yields the start of a command that may use ``cores`` cores together with all its children.

    Several commands with this start share them, and get them before processes of other groups, as far as the machine
    has any. The group goes with the ``with`` block, when they have ended.

    Raises:
        QuotaError: control groups can't be made here.
    """
    old = (_ROOT / "cpu" / "cpu.cfs_quota_us").exists()
    group = (_ROOT / "cpu" if old else _ROOT) / f"dapple_{uuid.uuid4().hex[:12]}"
    quota = max(1000, int(cores * _PERIOD))
    try:
        if not old:
            (_ROOT / "cgroup.subtree_control").write_text("+cpu")
        group.mkdir()
        if old:
            (group / "cpu.shares").write_text(str(_MOST_SHARES))
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (group / "cpu.weight").write_text(str(_MOST_WEIGHT))
            (group / "cpu.max").write_text(f"{quota} {_PERIOD}")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        raise QuotaError(
            f"processor time can't be limited here: {error}; that needs root and a writable {_ROOT}"
        ) from error
    try:
        yield ["sh", "-c", f'echo $$ > {group / "cgroup.procs"} && exec "$@"', "sh"]
    finally:
        _empty(group)


def _empty(group: pathlib.Path) -> None:
    """Removes a group, whose processes that still run go back to the one above."""
    for process in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            (group.parent / "cgroup.procs").write_text(process)
    os.rmdir(group)
