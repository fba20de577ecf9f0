"""Cuts that make the stages of a pipeline equal: in time, or in memory."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from dapple_tf.profile import Profile


def by_time(profile: Profile, stages: int) -> list[str]:
    """The layers to cut after, so that the longest stage is as short as can be."""
    samples = profile.batch_sizes[-1]
    times = [layer.forward.at(samples) + layer.backward.at(samples) for layer in profile.layers]
    return [profile.layers[end - 1].name for end in balanced(times, stages)]


def by_memory(profile: Profile, stages: int) -> list[str]:
    """The layers to cut after, so that stored bytes and residuals are shared out evenly."""
    samples = profile.least_samples
    sizes = [
        2 * layer.parameter_bytes + layer.slot_bytes + layer.state_bytes + layer.residual_bytes.at(samples)
        for layer in profile.layers
    ]
    total, passed = sum(sizes) or 1.0, 0.0
    cuts: list[str] = []
    for index, size in enumerate(sizes[:-1]):
        passed += size
        left = len(sizes) - 1 - index
        wanted = stages - 1 - len(cuts)
        if wanted and (passed >= total * (len(cuts) + 1) / stages or left == wanted):
            cuts.append(profile.layers[index].name)
    return cuts


def balanced(times: Sequence[float], stages: int) -> list[int]:
    """Where to cut a row of layers into stages of which the longest is as short as can be: positions after each."""
    passed = [0.0, *itertools.accumulate(times)]
    low, high = max(max(times), passed[-1] / stages), passed[-1]
    best: list[int] = []
    for _ in range(50):
        limit = high if not best else (low + high) / 2
        ends = _packed(passed, stages, limit)
        if ends is None:
            low = limit
        else:
            best, high = ends, limit
    return best


def _packed(passed: Sequence[float], stages: int, limit: float) -> list[int] | None:
    """Stages of at most ``limit`` each, as long as possible but for a layer that every later stage needs."""
    ends: list[int] = []
    start, last = 0, len(passed) - 1
    for left in range(stages - 1, 0, -1):
        end = bisect.bisect_right(passed, passed[start] + limit * (1 + 1e-12)) - 1
        end = min(max(end, start + 1), last - left)
        ends.append(end)
        start = end
    return ends if passed[last] - passed[start] <= limit * (1 + 1e-12) else None
