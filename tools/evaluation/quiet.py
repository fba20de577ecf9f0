"""Measuring while other processes leave the machine alone."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

FEWEST = 4
"""Minimum number of steps that count: the least disturbed ones if fewer are undisturbed."""


def undisturbed(steps: Sequence[tuple[float, float]], noise: float) -> list[tuple[float, float]]:
    """Returns the steps that count, the least disturbed first: those with little noise, or else the `FEWEST` least.

    Args:
        steps: seconds of each step, and the mean number of cores that other processes used meanwhile.
        noise: cores.
    """
    ordered = sorted(steps, key=lambda step: step[1])
    return ordered[: max(FEWEST, sum(others <= noise for _, others in ordered))]


def with_noise(function: Callable[[], T], processes: Sequence[int] = ()) -> tuple[T, float]:
    """Calls a function; returns its result, and the mean number of cores that other processes used meanwhile.

    Others are all but this process, ``processes`` and their children, whose processor time counts by the kernel's ticks
    of 10 ms.
    """
    before, started = _others(processes), time.perf_counter()
    result = function()
    return result, max(0.0, _others(processes) - before) / (time.perf_counter() - started)


def quietest(function: Callable[[], T], noise: float, tries: int) -> tuple[T, float]:
    """Calls a function until others used at most ``noise`` cores meanwhile; returns the least disturbed call's result.

    Args:
        function: what to call.
        noise: cores.
        tries: the most calls.

    Returns:
        The result, and the cores that others used.
    """
    best = with_noise(function)
    for _ in range(tries - 1):
        if best[1] <= noise:
            break
        best = min(best, with_noise(function), key=lambda call: call[1])
    return best


def _others(processes: Sequence[int]) -> float:
    """Returns the processor time so far of processes other than this one, these and their children, in seconds."""
    with open("/proc/stat", encoding="ascii") as lines:
        user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, next(lines).split()[1:9])
    total = (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")
    return total - sum(map(_own, (os.getpid(), *processes)))


def _own(process: int) -> float:
    """Returns the processor time of a process and its children, also of those that have ended."""
    folder = pathlib.Path(f"/proc/{process}")
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        children = " ".join(path.read_text() for path in folder.glob("task/*/children")).split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # It has ended meanwhile.
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(_own, map(int, children)))
