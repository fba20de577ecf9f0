"""Plans that differ from another in one respect: the steps of the planner's local search."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping

from dapple_tf.common.data_files import short
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.plan_values import PlanValueError, device_lists
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.plan_request import FOUND_AGAIN, FOUND_LAST, Changes, Move, PlanRequest
from dapple_tf.planning.recompute_modes import modes_on

logger = logging.getLogger(__name__)

_GROUPS = 4
"""Number of groups of like devices whose unused devices are tried."""
_MOST_CHANGES = 1000
"""The most changes of one plan that are taken from a move: it may yield them without end."""
_NOT_BY_MOVES = {"global_batch_size", *FOUND_LAST}
"""Options that moves don't change: the user's, and the planner's last ones."""


def neighbours(plan: Plan, request: PlanRequest) -> Iterator[Plan]:
    """Yields the legal plans that are one move away from ``plan``: by `MOVES`, then by the request's own.

    Args:
        plan: where to start.
        request: the profile, the cluster, and what may be chosen from.

    Raises:
        PlanError: a move yields something else than changes of a plan's options, or a value that no plan has there.
    """
    for move in MOVES:
        yield from _legal(plan, request, move(plan, request))
    for move in request.moves:
        yield from _by_own_move(plan, request, move)


def _legal(plan: Plan, request: PlanRequest, moves: Iterable[Changes]) -> Iterator[Plan]:
    for changes in moves:
        try:
            modes = modes_on(plan, device_lists(changes.get("devices", plan.devices)))
            neighbour = plan.with_options(**{**FOUND_AGAIN, "recompute": modes, **changes})
            if "shares" not in changes:
                neighbour = request.shared(neighbour)
        except PlanValueError:
            raise
        except PlanError:
            continue  # Moves needn't know all that makes a plan legal.
        yield neighbour


def _by_own_move(plan: Plan, request: PlanRequest, move: Move) -> Iterator[Plan]:
    """Yields the legal plans of a move of the user's, which may be wrong in any way."""
    name = getattr(move, "__name__", type(move).__name__)
    tried = legal = 0
    try:
        yielded = _called(move, name, plan, request)
        for changes in itertools.islice(yielded, _MOST_CHANGES):
            _check_changes(name, plan, request, changes)
            tried += 1
            try:
                made_legal = [other for other in _legal(plan, request, [changes]) if _fits(other, request)]
            except PlanValueError as error:
                raise PlanError(f"move {name} yields {short(changes)}: {error}") from error
            legal += len(made_legal)
            yield from made_legal
    except PlanError:
        raise
    except Exception as error:
        error.add_note(f"in the move {name}, of a plan of {plan.num_stages} stages")
        raise
    finally:
        logger.debug("move %s changed a plan in %d ways, %d of them legal", name, tried, legal)


def _fits(plan: Plan, request: PlanRequest) -> bool:
    """Returns whether a plan is one of this model on this cluster: its cuts are in order, and its devices exist."""
    places = [request.profile.index[cut] for cut in plan.cuts]
    highest = max(device for group in plan.working_devices for device in group)
    return (
        highest < request.cluster.num_devices
        and places == sorted(places)
        and places[-1:] != [len(request.profile.layers) - 1]
    )


def _called(move: Move, name: str, plan: Plan, request: PlanRequest) -> Iterable[Changes]:
    made: object = move(plan, request)
    if isinstance(made, Mapping | str) or not isinstance(made, Iterable):
        raise PlanError(f"move {name} returned {short(made)}; {_YIELD}")
    return made


_YIELD = "let it yield dicts of a plan's options, such as {'micro_batches': 8}"


def _check_changes(name: str, plan: Plan, request: PlanRequest, changes: object) -> None:
    """Checks that what an own move yields is options of a plan, and layers of the model."""
    if not isinstance(changes, Mapping):
        raise PlanError(f"move {name} yields {short(changes)}; {_YIELD}")
    fields = plan.options.keys() - _NOT_BY_MOVES
    if not changes.keys() <= fields:
        raise PlanError(
            f"move {name} changes {', '.join(sorted(map(str, changes.keys() - fields)))}; a move may change "
            f"{', '.join(sorted(fields))}"
        )
    cuts = changes.get("cuts", ())
    unknown = [cut for cut in cuts if cut not in request.profile.index] if isinstance(cuts, list | tuple) else []
    if unknown:
        raise PlanError(f"move {name} cuts after {short(unknown[0])}, which is no layer of {request.profile.model}")


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
    for count in request.counts:
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


def equal_shares(plan: Plan, request: PlanRequest) -> Iterator[Changes]:
    """Gives all replicas of a stage the same share, which may need fewer messages or less memory."""
    del request
    if any(stage.shares for stage in plan.stages):
        yield {"shares": None}


MOVES: tuple[Move, ...] = (move_cuts, move_devices, change_micro_batches, merge_stages, split_stages, equal_shares)
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
