"""Measuring while other processes leave the machine alone."""

from __future__ import annotations

from collections.abc import Sequence

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
