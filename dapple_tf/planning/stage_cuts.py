"""Cuts that make the stages of a pipeline equal: in time, or in memory."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

from dapple_tf.describe.profile import Profile


def by_time(profile: Profile, stages: int, weights: Sequence[float] | None = None) -> list[str]:
    """Returns the layers to cut after, so that the longest stage is as short as possible.

    Args:
        profile: the layers.
        stages: how many; no more than layers.
        weights: how fast each stage is, such as its number of replicas; all alike by default.
    """
    samples = profile.batch_sizes[-1]
    times = [layer.forward.at(samples) + layer.backward.at(samples) for layer in profile.layers]
    return [profile.layers[end - 1].name for end in balanced(times, stages, weights)]


def by_device(profile: Profile, devices: Sequence[object], speeds: Sequence[float]) -> list[str]:
    """Returns the layers to cut after, so that devices get about equal work, over all of their stages.

    It starts from equal stages and moves cuts by single layers as long as that balances the work better.

    Args:
        profile: the layers.
        devices: what each stage runs on; stages with equal entries share its time.
        speeds: how fast each stage is, such as its number of replicas.
    """
    samples = profile.batch_sizes[-1]
    times = [layer.forward.at(samples) + layer.backward.at(samples) for layer in profile.layers]
    passed = [0.0, *itertools.accumulate(times)]
    bounds = [0, *balanced(times, len(devices), speeds), len(times)]
    first_like = [devices.index(device) for device in devices]
    loads = dict.fromkeys(first_like, 0.0)
    for stage, (start, stop) in enumerate(itertools.pairwise(bounds)):
        loads[first_like[stage]] += (passed[stop] - passed[start]) / speeds[stage]
    moved = True
    while moved:
        moved = False
        for cut, shift in itertools.product(range(1, len(devices)), (-1, 1)):
            new = bounds[cut] + shift
            before, after = first_like[cut - 1], first_like[cut]
            if before == after or not bounds[cut - 1] < new < bounds[cut + 1]:
                continue
            change = passed[new] - passed[bounds[cut]]
            one, other = loads[before] + change / speeds[cut - 1], loads[after] - change / speeds[cut]
            if max(one, other) < max(loads[before], loads[after]) * (1 - 1e-9):
                loads[before], loads[after], bounds[cut], moved = one, other, new, True
    return [profile.layers[end - 1].name for end in bounds[1:-1]]


def by_memory(profile: Profile, stages: int) -> list[str]:
    """Returns the layers to cut after, so that stored bytes and residuals are balanced."""
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


def balanced(times: Sequence[float], stages: int, weights: Sequence[float] | None = None) -> list[int]:
    """Cuts a row of layers into stages so that the longest is as short as possible; returns where all but the last end.

    Args:
        times: of each layer.
        stages: how many; no more than layers.
        weights: how fast each stage is; a stage takes the time of its layers divided by its weight.
    """
    passed = [0.0, *itertools.accumulate(times)]
    speeds = [1.0] * stages if weights is None else list(weights)
    low, high = max(max(times) / max(speeds), passed[-1] / sum(speeds)), passed[-1] / min(speeds)
    best: list[int] = []
    for _ in range(50):
        limit = high if not best else (low + high) / 2
        ends = _packed(passed, speeds, limit)
        if ends is None:
            low = limit
        else:
            best, high = ends, limit
    return best


def _packed(passed: Sequence[float], speeds: Sequence[float], limit: float) -> list[int] | None:
    """Returns stages of at most ``limit`` each, as long as possible while every later stage keeps a layer."""
    ends: list[int] = []
    start, last = 0, len(passed) - 1
    for stage, speed in enumerate(speeds[:-1]):
        left = len(speeds) - 1 - stage
        most = limit * (1 + 1e-12) * speed
        end = bisect.bisect_right(passed, passed[start] + most) - 1
        end = min(max(end, start + 1), last - left)
        if passed[end] - passed[start] > most * (1 + 1e-9):
            return None  # a layer that is too long for a slow stage
        ends.append(end)
        start = end
    return ends if passed[last] - passed[start] <= limit * (1 + 1e-12) * speeds[-1] else None
