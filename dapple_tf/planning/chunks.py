"""Chunks: a replicated stage cut into consecutive stages on the same devices, whose gradients are reduced one by one.

    layers    0 1 2 3 4 5 6 7          0 1 2 | 3 4 | 5 6 7
    devices   [0, 1]            ->     [0, 1] [0, 1] [0, 1]

During the backward of the first chunks, the gradients of the last ones are all-reduced: wait-free reduction, which
Poseidon and PipeDream do by layers, and which reverse first-k (Out-Of-Order BackProp, EuroSys'22, section 5.1)
reorders.
"""

from __future__ import annotations

import dataclasses
import itertools

from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.plan_values import integer
from dapple_tf.describe.profile import Profile


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
