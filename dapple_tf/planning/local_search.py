"""Plans that differ from another in one respect: the steps of the planner's local search."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile

_GROUPS = 4
"""Number of groups of like devices whose unused devices are tried."""


def neighbours(plan: Plan, profile: Profile, cluster: Cluster, micro_batches: Iterable[int]) -> Iterator[Plan]:
    """Yields legal plans that differ from ``plan`` in one respect; if stages share devices, in cuts or micro-batches.

    Args:
        plan: where to start.
        profile: its layers.
        cluster: its devices.
        micro_batches: the numbers of micro-batches to choose from.
    """
    for cuts in _moved_cuts(plan, profile):
        yield from _legal(plan, cuts=cuts)
    hosts = [device for group in plan.devices for device in group]
    shared = len(hosts) > len(set(hosts))
    for devices in () if shared else _moved_devices(plan, cluster):
        yield from _legal(plan, devices=devices)
    for count in micro_batches:
        if count != plan.micro_batches and plan.micro_batches / 2 <= count <= plan.micro_batches * 2:
            yield from _legal(plan, micro_batches=count)
    if shared:
        return
    for index in range(plan.num_stages - 1):
        merged = tuple(sorted([*plan.devices[index], *plan.devices[index + 1]]))
        groups = (*plan.devices[:index], merged, *plan.devices[index + 2 :])
        yield from _legal(plan, devices=groups, cuts=plan.cuts[:index] + plan.cuts[index + 1 :])
    for cuts, devices in _split_stages(plan, profile, cluster):
        yield from _legal(plan, cuts=cuts, devices=devices)


def _bounds(plan: Plan, profile: Profile) -> list[int]:
    """Returns the index of each stage's first layer, and of the one after the last."""
    return [0, *(profile.index[cut] + 1 for cut in plan.cuts), len(profile.layers)]


def _moved_cuts(plan: Plan, profile: Profile) -> Iterator[tuple[str, ...]]:
    bounds = _bounds(plan, profile)
    for index in range(1, len(bounds) - 1):
        for shift in (-1, 1, -2, 2):
            if bounds[index - 1] < bounds[index] + shift < bounds[index + 1]:
                moved = profile.layers[bounds[index] + shift - 1].name
                yield (*plan.cuts[: index - 1], moved, *plan.cuts[index:])


def _free(plan: Plan, cluster: Cluster) -> list[int]:
    """Returns the first unused device of each group of like devices."""
    used = {device for group in plan.devices for device in group}
    unused = ([device for device in group if device not in used] for group in cluster.device_groups)
    return [devices[0] for devices in unused if devices][:_GROUPS]


def _moved_devices(plan: Plan, cluster: Cluster) -> Iterator[tuple[tuple[int, ...], ...]]:
    groups = [list(group) for group in plan.devices]

    def changed(changes: dict[int, list[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(changes.get(i, group))) for i, group in enumerate(groups))

    for giver, taker in _both_ways(range(len(groups))):
        if len(groups[giver]) > 1:
            index = -1 if giver < taker else 0
            device = groups[giver][index]
            left = [other for other in groups[giver] if other != device]
            yield changed({giver: left, taker: [*groups[taker], device]})
    for stage, group in enumerate(groups):
        for device in _free(plan, cluster):
            yield changed({stage: [*group, device]})
            yield changed({stage: [*group[:-1], device]})
        yield changed({stage: group[:-1]})
        yield changed({stage: group[1:]})
    for first, second in itertools.pairwise(range(len(groups))):
        one, other = groups[first], groups[second]
        if not _alike(cluster, one[-1], other[0]):
            yield changed({first: [*one[:-1], other[0]], second: [*other[1:], one[-1]]})


def _alike(cluster: Cluster, first: int, second: int) -> bool:
    """Returns whether two devices are interchangeable, apart from links."""
    one, other = cluster.devices[first], cluster.devices[second]
    return (one.speed, one.memory_bytes) == (other.speed, other.memory_bytes)


def _split_stages(
    plan: Plan, profile: Profile, cluster: Cluster
) -> Iterator[tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]:
    """Yields each stage split into two halves of about equal time, which share its devices or use a free one."""
    layers, samples = profile.layers, profile.batch_sizes[-1]
    for stage, (start, stop) in enumerate(itertools.pairwise(_bounds(plan, profile))):
        if stop - start < 2:
            continue
        times = [layer.forward.at(samples) + layer.backward.at(samples) for layer in layers[start:stop]]
        passed = list(itertools.accumulate(times))
        middle = min(range(len(times) - 1), key=lambda i: abs(passed[i] - passed[-1] / 2))
        cuts = (*plan.cuts[:stage], layers[start + middle].name, *plan.cuts[stage:])
        group = plan.devices[stage]
        halves: list[tuple[tuple[int, ...], tuple[int, ...]]] = [(group, (free,)) for free in _free(plan, cluster)]
        for part in sorted({1, len(group) // 2, len(group) - 1} & set(range(1, len(group)))):
            halves.append((group[:part], group[part:]))
        for first, second in halves:
            yield cuts, (*plan.devices[:stage], first, second, *plan.devices[stage + 1 :])


def _both_ways(stages: range) -> Iterator[tuple[int, int]]:
    for first, second in itertools.pairwise(stages):
        yield first, second
        yield second, first


def _legal(plan: Plan, **changes: Any) -> Iterator[Plan]:
    """Yields the plan with changes, if that is a legal plan."""
    try:
        yield dataclasses.replace(plan, **changes)
    except PlanError:
        return
