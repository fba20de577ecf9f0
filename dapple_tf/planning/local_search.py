"""Plans that differ from another in one respect: the steps of the planner's local search."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.plan_request import Changes, Move, PlanRequest

_GROUPS = 4
"""Number of groups of like devices whose unused devices are tried."""


def neighbours(plan: Plan, request: PlanRequest) -> Iterator[Plan]:
    """Yields the legal plans that are one move away from ``plan``: by `MOVES`, then by the request's own.

    Args:
        plan: where to start.
        request: the profile, the cluster, and what may be chosen from.

    Raises:
        PlanError: a move changes what isn't a plan's, or the global batch.
    """
    fields = {field.name for field in dataclasses.fields(plan) if field.init} - {"global_batch_size"}
    for move in (*MOVES, *request.moves):
        for changes in move(plan, request):
            if not changes.keys() <= fields:
                raise PlanError(
                    f"move {move.__name__} changes {', '.join(sorted(changes.keys() - fields))}; a move may change "
                    f"{', '.join(sorted(fields))}"
                )
            try:
                neighbour = dataclasses.replace(plan, **changes)
            except PlanError:
                continue  # Moves needn't know all that makes a plan legal.
            yield neighbour


def move_cuts(plan: Plan, request: PlanRequest) -> Iterator[Changes]:
    """Moves one cut by one or two layers."""
    bounds = _bounds(plan, request.profile)
    for index in range(1, len(bounds) - 1):
        for shift in (-1, 1, -2, 2):
            if bounds[index - 1] < bounds[index] + shift < bounds[index + 1]:
                moved = request.profile.layers[bounds[index] + shift - 1].name
                yield {"cuts": (*plan.cuts[: index - 1], moved, *plan.cuts[index:])}


def move_devices(plan: Plan, request: PlanRequest) -> Iterator[Changes]:
    """Gives a device of one stage to the next or the one before, takes or frees one, or exchanges unlike ones."""
    groups = [] if _shared(plan) else [list(group) for group in plan.devices]

    def changed(changes: dict[int, list[int]]) -> Changes:
        return {"devices": tuple(tuple(sorted(changes.get(i, group))) for i, group in enumerate(groups))}

    for giver, taker in _both_ways(range(len(groups))):
        if len(groups[giver]) > 1:
            index = -1 if giver < taker else 0
            device = groups[giver][index]
            left = [other for other in groups[giver] if other != device]
            yield changed({giver: left, taker: [*groups[taker], device]})
    for stage, group in enumerate(groups):
        for device in _free(plan, request.cluster):
            yield changed({stage: [*group, device]})
            yield changed({stage: [*group[:-1], device]})
        yield changed({stage: group[:-1]})
        yield changed({stage: group[1:]})
    for first, second in itertools.pairwise(range(len(groups))):
        one, other = groups[first], groups[second]
        if not _alike(request.cluster, one[-1], other[0]):
            yield changed({first: [*one[:-1], other[0]], second: [*other[1:], one[-1]]})


def change_micro_batches(plan: Plan, request: PlanRequest) -> Iterator[Changes]:
    """Takes at most twice and at least half as many micro-batches."""
    for count in request.micro_batches:
        if count != plan.micro_batches and plan.micro_batches / 2 <= count <= plan.micro_batches * 2:
            yield {"micro_batches": count}


def merge_stages(plan: Plan, request: PlanRequest) -> Iterator[Changes]:
    """Makes one stage of two neighbouring ones, on the devices of both."""
    del request
    for index in range(0 if _shared(plan) else plan.num_stages - 1):
        merged = tuple(sorted([*plan.devices[index], *plan.devices[index + 1]]))
        groups = (*plan.devices[:index], merged, *plan.devices[index + 2 :])
        yield {"devices": groups, "cuts": plan.cuts[:index] + plan.cuts[index + 1 :]}


def split_stages(plan: Plan, request: PlanRequest) -> Iterator[Changes]:
    """Splits a stage into halves of about equal time, which share its devices or use a free one."""
    layers, samples = request.profile.layers, request.profile.batch_sizes[-1]
    for stage, (start, stop) in enumerate(itertools.pairwise(_bounds(plan, request.profile))):
        if stop - start < 2 or _shared(plan):
            continue
        times = [layer.forward.at(samples) + layer.backward.at(samples) for layer in layers[start:stop]]
        passed = list(itertools.accumulate(times))
        middle = min(range(len(times) - 1), key=lambda i: abs(passed[i] - passed[-1] / 2))
        cuts = (*plan.cuts[:stage], layers[start + middle].name, *plan.cuts[stage:])
        group = plan.devices[stage]
        halves: list[tuple[tuple[int, ...], tuple[int, ...]]] = [
            (group, (free,)) for free in _free(plan, request.cluster)
        ]
        for part in sorted({1, len(group) // 2, len(group) - 1} & set(range(1, len(group)))):
            halves.append((group[:part], group[part:]))
        for first, second in halves:
            yield {"cuts": cuts, "devices": (*plan.devices[:stage], first, second, *plan.devices[stage + 1 :])}


MOVES: tuple[Move, ...] = (move_cuts, move_devices, change_micro_batches, merge_stages, split_stages)
"""The moves of the local search, in the order in which they are tried."""


def _shared(plan: Plan) -> bool:
    """Returns whether a device has several stages: then devices stay where they are."""
    used = [device for group in plan.devices for device in group]
    return len(used) > len(set(used))


def _bounds(plan: Plan, profile: Profile) -> list[int]:
    """Returns the index of each stage's first layer, and of the one after the last."""
    return [0, *(profile.index[cut] + 1 for cut in plan.cuts), len(profile.layers)]


def _free(plan: Plan, cluster: Cluster) -> list[int]:
    """Returns the first unused device of each group of like devices."""
    used = {device for group in plan.devices for device in group}
    unused = ([device for device in group if device not in used] for group in cluster.device_groups)
    return [devices[0] for devices in unused if devices][:_GROUPS]


def _alike(cluster: Cluster, first: int, second: int) -> bool:
    """Returns whether two devices are interchangeable, apart from links."""
    one, other = cluster.devices[first], cluster.devices[second]
    return (one.speed, one.memory_bytes) == (other.speed, other.memory_bytes)


def _both_ways(stages: range) -> Iterator[tuple[int, int]]:
    for first, second in itertools.pairwise(stages):
        yield first, second
        yield second, first
