"""Times that were measured in turns, as ratios: a machine's speed drifts, and what takes turns drifts together."""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Result:
    """Step times of one way of running a model.

    Attributes:
        name: which.
        seconds: median of a step.
        ratio: median of each round's time over that of one lane.
        low: lower quartile of these.
        high: upper quartile.
    """

    name: str
    seconds: float
    ratio: float
    low: float
    high: float


def summarize(times: dict[str, list[float]]) -> list[Result]:
    """Medians of interleaved times, and of their ratios to the first one's."""
    base = np.asarray(next(iter(times.values())))
    results = []
    for name, found in times.items():
        low, middle, high = np.percentile(np.asarray(found) / base, (25, 50, 75))
        results.append(Result(name, float(np.median(found)), float(middle), float(low), float(high)))
    return results
