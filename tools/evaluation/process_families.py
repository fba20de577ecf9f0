"""Processes with all their descendants: peaks of resident memory, and the cores that they run on."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Sequence

_GONE = (FileNotFoundError, ProcessLookupError)


def peak_mib(processes: Iterable[int]) -> float:
    """Returns the sum of the peaks of resident memory of processes and of their descendants that run, in MiB.

    Each process' peak is of its own time, so that together they may never have had as much. What several have in
    common, such as the code of libraries, counts in each.
    """
    return sum(_peak_kib(member) for process in processes for member in _family(process)) / 1024


def place(process: int, cores: Sequence[int]) -> None:
    """Lets all threads of a process and of its descendants run on these cores only."""
    for member in _family(process):
        with contextlib.suppress(*_GONE):  # It has ended meanwhile.
            for thread in os.listdir(f"/proc/{member}/task"):
                os.sched_setaffinity(int(thread), cores)


def _family(process: int) -> Iterator[int]:
    """Yields a process and its descendants."""
    yield process
    with contextlib.suppress(*_GONE):
        for path in pathlib.Path(f"/proc/{process}").glob("task/*/children"):
            for child in path.read_text().split():
                yield from _family(int(child))


def _peak_kib(process: int) -> int:
    try:
        status = pathlib.Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
    except _GONE:
        return 0
    peak = re.search(r"^VmHWM:\s+(\d+) kB$", status, flags=re.MULTILINE)
    return int(peak[1]) if peak else 0  # None: a process that has ended and whose parent hasn't looked yet
