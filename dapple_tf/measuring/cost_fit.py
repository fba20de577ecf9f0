"""Costs from measured points: a fixed part and one per sample, neither negative; shares of a total."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dapple_tf.describe.layer_profile import ZERO, Cost

_LEAST_WEIGHED = 1e-3
"""Times below this part of the longest get no more weight: their errors would count too much."""


def nearest_cost(samples: Sequence[int], seconds: Sequence[float]) -> Cost:
    """Returns the cost nearest to measured times by relative error; a single point has no fixed part."""
    x, t = np.asarray(samples, float), np.asarray(seconds, float)
    if len(x) == 1:
        return Cost(0.0, float(t[0] / x[0]))
    if t.max() <= 0:
        return ZERO
    weight = 1 / np.maximum(t, t.max() * _LEAST_WEIGHED) ** 2

    def mean(values: np.ndarray) -> float:
        return float((weight * values).sum() / weight.sum())

    spread = mean((x - mean(x)) ** 2)
    slope = mean((x - mean(x)) * (t - mean(t))) / spread
    fixed = mean(t) - slope * mean(x)
    if slope < 0:
        return Cost(mean(t), 0.0)
    if fixed < 0:
        return Cost(0.0, mean(x * t) / mean(x * x))
    return Cost(fixed, slope)


def cost_through(samples: Sequence[int], sizes: Sequence[float]) -> Cost:
    """Returns the cost through two exact points; if a part would be negative, the least cost that covers both."""
    (few, many), (less, more) = samples, sizes
    rate = (more - less) / (many - few)
    fixed = less - rate * few
    if rate < 0:
        return Cost(float(less), 0.0)
    if fixed < 0:
        return Cost(0.0, more / many)
    return Cost(float(fixed), float(rate))


def shares(times: np.ndarray, start: float, total: float) -> np.ndarray:
    """Returns shares of ``total`` in proportion to ``times``, each less ``start``.

    Where there is nothing to share they are what is left of the times.
    """
    net = np.maximum(times - start, 0)
    if net.sum() <= 0 or total <= 0:
        return net
    return np.asarray(net * (total / net.sum()))
