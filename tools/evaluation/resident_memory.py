"""Peaks of resident memory, of processes with all their descendants."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable


def peak_mib(processes: Iterable[int]) -> float:
    """Returns the sum of the peaks of resident memory of processes and of their descendants that run, in MiB.

    Each process' peak is of its own time, so that together they may never have had as much. What several have in
    common, such as the code of libraries, counts in each.
    """
    return sum(_peak_kib(process) for process in processes) / 1024


def _peak_kib(process: int) -> int:
    folder = pathlib.Path(f"/proc/{process}")
    try:
        status = (folder / "status").read_text(encoding="utf-8", errors="replace")
        children = " ".join(path.read_text() for path in folder.glob("task/*/children")).split()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # It has ended meanwhile.
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", status, flags=re.MULTILINE)
    own = int(peak[1]) if peak else 0  # None: a process that has ended and whose parent hasn't looked yet
    return own + sum(_peak_kib(int(child)) for child in children)
