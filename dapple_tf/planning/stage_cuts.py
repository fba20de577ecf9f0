"""Cuts that make stages equal, in time or in memory, and cuts of replicated stages into chunks."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.plan_values import integer
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


def chunked(plan: Plan, profile: Profile, chunks: int = 4) -> Plan:
    """Cuts each replicated stage into chunks of about the same time and parameters, where few bytes cross.

    Args:
        plan: the plan; each chunk inherits its stage's settings, and ``reverse_first_k`` counts the chunks of its
            first k stages. Its report, pieces and relays are dropped.
        profile: its layers' costs.
        chunks: the most parts of a stage; fewer where the layers don't allow more, since each chunk needs parameters.

    Returns:
        The plan; the same one if there is nothing to cut.

    Raises:
        PlanError: ``chunks`` is below 1, or the plan cuts after layers that the profile lacks.
    """
    Profile.check("profile", profile)
    chunks = integer("chunks", chunks)
    if chunks < 1:
        raise PlanError(f"chunks is {chunks}; it must be at least 1")
    for cut in plan.cuts:
        if cut not in profile.index:
            raise PlanError(f"the plan cuts after {cut!r}, which isn't a layer of the profile of {profile.model!r}")
    bounds = [0, *(profile.index[cut] + 1 for cut in plan.cuts), len(profile.layers)]
    parts = [
        _ends(profile, start, stop, chunks) if len(plan.devices[stage]) > 1 else [stop]
        for stage, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]
    if all(len(ends) == 1 for ends in parts):
        return plan
    cuts = [profile.layers[end - 1].name for ends in parts for end in ends][:-1]
    origin = [stage for stage, ends in enumerate(parts) for _ in ends]  # the stage of each chunk
    ranges = list(itertools.pairwise([0, *(end for ends in parts for end in ends)]))
    whole = [_time(profile, start, stop) or 1.0 for start, stop in itertools.pairwise(bounds)]
    stages = []
    for end, stage, part in zip([*cuts, None], origin, ranges, strict=True):
        own = plan.stages[stage]
        if own.task_seconds is not None:
            share = _time(profile, *part) / whole[stage]
            forward, input_grad, weight_grad = own.task_seconds
            own = dataclasses.replace(own, task_seconds=(share * forward, share * input_grad, share * weight_grad))
        stages.append(dataclasses.replace(own, cut=end, relays=False))
    return plan.with_stages(
        stages,
        warm_up=None if plan.warm_up is None else tuple(plan.warm_up[stage] for stage in origin),
        reverse_first_k=sum(stage < plan.reverse_first_k for stage in origin),
    )


def _time(profile: Profile, start: int, stop: int) -> float:
    samples = profile.batch_sizes[-1]
    return sum(layer.forward.at(samples) + layer.backward.at(samples) for layer in profile.layers[start:stop])


def _ends(profile: Profile, start: int, stop: int, chunks: int) -> list[int]:
    """Returns the ends of a stage's chunks, the last at ``stop``."""
    sizes = _parameters(profile, start, stop)
    total_size, total_time = sum(sizes), _time(profile, start, stop)
    if not total_size:
        return [stop]
    passed, at = [], 0.0  # half time and half parameters before each possible cut
    for index in range(start, stop - 1):
        at += sizes[index - start] / total_size / 2 + _time(profile, index, index + 1) / (total_time or 1.0) / 2
        passed.append(at)
    samples = profile.batch_sizes[-1]
    ends: list[int] = []
    for number in range(1, chunks):
        wanted = number / chunks
        near = [i for i in range(start, stop - 1) if abs(passed[i - start] - wanted) <= 0.25 / chunks]
        near = near or sorted(range(start, stop - 1), key=lambda i: (abs(passed[i - start] - wanted), i))[:1]
        if near:
            # Among about equally good cuts, the one that the fewest bytes cross.
            best = min(near, key=lambda i: (_crossing(profile, i, samples), abs(passed[i - start] - wanted), i))
            ends.append(best + 1)
    kept: list[int] = []
    for end in sorted(set(ends)):
        last = kept[-1] if kept else start
        if sum(sizes[last - start : end - start]) and sum(sizes[end - start :]):
            kept.append(end)
    return [*kept, stop]


def _parameters(profile: Profile, start: int, stop: int) -> list[int]:
    """Returns bytes of each layer's parameters; shared ones count for the first of their layers in the stage."""
    sizes = [layer.parameter_bytes for layer in profile.layers[start:stop]]
    for group in profile.shared:
        inside = [layer for layer in group.layers if start <= layer < stop]
        if inside:
            sizes[inside[0] - start] += group.parameter_bytes
    return sizes


def _crossing(profile: Profile, layer: int, samples: int) -> float:
    forward, backward = profile.crossing[layer]
    return forward.at(samples) + backward.at(samples)
