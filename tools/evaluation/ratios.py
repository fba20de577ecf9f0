"""Ratios of times that were measured in turns: a machine's speed drifts, equally for all that take turns."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class Quartiles:
    """Quartiles of a number over the rounds of a benchmark.

    Attributes:
        low: lower quartile.
        median: median.
        high: upper quartile.
    """

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f})"


def quartiles(values: Sequence[float]) -> Quartiles:
    """Returns the quartiles of at least one number."""
    low, median, high = np.percentile(np.asarray(values, np.float64), (25, 50, 75))
    return Quartiles(float(low), float(median), float(high))


def ratios(values: Sequence[float], base: Sequence[float]) -> Quartiles:
    """Returns the quartiles of ``values[i] / base[i]``, both of round i.

    >>> str(ratios([2.0, 3.0, 8.0], [1.0, 1.0, 2.0]))
    '3.000 (2.500 to 3.500)'

    Raises:
        ValueError: they aren't of the same rounds.
    """
    if len(values) != len(base):
        raise ValueError(f"{len(values)} rounds can't be compared with {len(base)}: ratios are within a round")
    return quartiles(np.divide(values, base).tolist())


def take_turns(
    ways: Mapping[str, Callable[[], object]], rounds: int, told: Callable[[int, str], None] | None = None
) -> dict[str, list[float]]:
    """Runs each way once in every round, in an order that is reversed from round to round.

    So none always follows the same other one, which leaves caches and the processor's clock in some state.

    Args:
        ways: name -> function that runs a turn.
        rounds: number of rounds.
        told: called after each turn with the round's number, from 0, and the way's name.

    Returns:
        Name -> seconds of each round, in the order of ``ways``.
    """
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways)[:: 1 if number % 2 == 0 else -1]:
            started = time.perf_counter()
            ways[name]()
            times[name].append(time.perf_counter() - started)
            if told is not None:
                told(number, name)
    return times
