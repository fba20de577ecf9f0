"""Plans that differ from another in one respect: the moves of the planner's search."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dapple_tf.common.data_files import short
from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.describe.plan_values import PlanValueError, device_lists
from dapple_tf.describe.profile import Profile
from dapple_tf.planning.plan_request import FOUND_AGAIN, FOUND_LAST, Changes, Move, PlanRequest
from dapple_tf.planning.stage_cuts import by_device, by_time, chunked
from dapple_tf.schedules.policy import Policy
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import run
from dapple_tf.simulation.stage_cost import stage_cost
from graph_passes.ir.tasks import Phase, Task

_BY_BYTES = ("none", "min_cut", "boundary")
"""Modes, the one that keeps most first; backwards take longer in the same order."""
_EVENED = 3
"""Number of times that stages are made equal for what they recompute: with other layers they may keep more or less."""


def leanest(modes: Iterable[str]) -> str:
    """Returns the mode that keeps least."""
    return max(modes, key=_BY_BYTES.index)


def modes_on(plan: Plan, devices: Sequence[Sequence[int]]) -> tuple[str, ...]:
    """Returns what stages recompute that take the place of a plan's stages.

    Equally many stages recompute what the plan's do. Otherwise a stage keeps as little as the leanest of the plan's
    stages on any of its devices, or of all if there is none.

    Args:
        plan: the plan.
        devices: the devices of each new stage.
    """
    every = tuple(stage.recompute for stage in plan.stages)
    if len(devices) == plan.num_stages:
        return every
    modes: list[str] = []
    for group in devices:
        before = [stage.recompute for stage in plan.stages if not {*stage.devices}.isdisjoint(group)]
        modes.append(leanest(before or every))
    return tuple(modes)


def modes_by_memory(plan: Plan, request: PlanRequest) -> tuple[str, ...]:
    """Returns each stage's mode that keeps most without limiting micro-batches in flight.

    Stages from the last to the first have ever more micro-batches in flight, so that the last ones may keep what the
    first ones have to compute again. A stage that no mode suffices for has the one that keeps least.

    Args:
        plan: a plan; its own modes don't matter.
        request: the profile, the cluster and the modes that there are.
    """
    allowed = [mode for mode in _BY_BYTES if mode in request.modes]
    wanted = plan.warm_up_counts()
    modes = [allowed[-1]] * plan.num_stages
    for mode in reversed(allowed[:-1]):
        holds = request.costs(plan.with_options(recompute=mode)).holds
        if holds is None:
            return (allowed[0],) * plan.num_stages
        modes = [mode if count >= most else own for own, count, most in zip(modes, holds, wanted, strict=True)]
    return tuple(modes)


def evened(plan: Plan, request: PlanRequest) -> tuple[str, ...]:
    """Returns the cuts with which a plan's stages take the same time if they recompute what the plan says.

    Args:
        plan: a plan whose stages have devices of their own.
        request: the profile and the cluster.
    """
    profile = request.profile
    samples = profile.batch_sizes[-1]

    def seconds(mode: str) -> float:
        whole = stage_cost(profile, 0, len(profile.layers), mode)
        return whole.forward.at(samples) + whole.backward.at(samples)

    paces = {mode: seconds("none") / seconds(mode) if seconds(mode) else 1.0 for mode in request.modes}
    speeds = [
        paces[stage.recompute] * sum(request.cluster.devices[device].speed for device in stage.devices)
        for stage in plan.stages
    ]
    return tuple(by_time(profile, plan.num_stages, speeds))


def recomputing_by_stage(plan: Plan, request: PlanRequest) -> Iterator[Plan]:
    """Yields plans whose stages keep residuals by their own memory, some with moved cuts."""
    if not request.allows("stage_recompute") or len(request.modes) == 1:
        return
    plan = plan.with_options(**FOUND_AGAIN)
    used = [device for devices in plan.devices for device in devices]
    for _ in range(_EVENED):
        modes = modes_by_memory(plan, request)
        if modes == tuple(stage.recompute for stage in plan.stages):
            return
        plan = request.shared(plan.with_options(recompute=modes))
        yield plan
        if len(set(used)) < len(used):
            return  # Where devices have several stages, cuts are the policy's concern.
        plan = request.shared(plan.with_options(cuts=evened(plan, request)))
        yield plan


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
        for changes in move(plan, request):
            yield from _changed(plan, request, changes)
    for move in request.moves:
        yield from _by_own_move(plan, request, move)


def _changed(plan: Plan, request: PlanRequest, changes: Changes) -> Iterator[Plan]:
    """Yields the plan with changes, and with the shares and task times that follow, if that is a legal plan."""
    modes = modes_on(plan, device_lists(changes.get("devices", plan.devices)))
    dropped = {**FOUND_AGAIN, "task_seconds": None, "recompute": modes}
    try:
        other = plan.with_options(**{**dropped, **changes})
        if "shares" not in changes:
            other = request.shared(other)
        yield other if "task_seconds" in changes else with_task_seconds(other, request)
    except PlanValueError:
        raise
    except PlanError:
        return  # Moves needn't know all that makes a plan legal.


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
                made_legal = [other for other in _changed(plan, request, changes) if _fits(other, request)]
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


_MOST_PER_DEVICE = 12
"""The most stages on a device that are tried."""
_DIGITS = 3
"""Digits of `StagePlan.task_seconds`: enough to order tasks, few enough to read."""


def with_task_seconds(plan: Plan, request: PlanRequest) -> Plan:
    """Returns the plan, with its stages' times relative to the longest if its policy orders tasks by them."""
    if any(stage.task_seconds for stage in plan.stages):
        plan = plan.with_options(task_seconds=None)
    if not plan.policy.planning.by_seconds:
        return plan
    seconds = CostModel(plan, request.profile, request.cluster).task_seconds
    longest = max(itertools.chain(*seconds)) or 1.0

    def rounded(number: float) -> float:
        return float(f"{number / longest:.{_DIGITS}g}")

    return plan.with_options(task_seconds=tuple((rounded(f), rounded(x), rounded(w)) for f, x, w in seconds))


def largest_reverse_first_k(plan: Plan, profile: Profile, cluster: Cluster) -> int:
    """Returns the largest k of reverse first-k that memory allows, 0 also where not even that fits.

    Algorithm 2 of Out-Of-Order BackProp (EuroSys'22), lines 1 and 2, bounds k by f(j) < MXM, where f(j) is the memory
    when only the weight gradients of layers 1 to j are left to compute: M_fwd - sum over i > j of M(dO_i) + sum over
    i <= j of M(dW_i). Here f is the simulated step's most memory, which has these terms, residuals that wait for Bw
    (`CostModel.delayed_bytes`) and gradients, along with all others on each device.

    Args:
        plan: the plan, whose own k doesn't matter.
        profile: its layers' costs.
        cluster: the devices, whose known memory is the limit.

    Raises:
        PlanError: the plan doesn't fit the profile or the cluster.
    """
    if all(device.memory_bytes is None for device in cluster.devices):
        return plan.num_stages

    def fits(k: int) -> bool:
        try:
            return run(CostModel(dataclasses.replace(plan, reverse_first_k=k, report=None), profile, cluster)).fits
        except PlanError:
            return False  # not even one micro-batch

    # More delayed weight gradients keep more: the largest k that fits, by bisection, all stages first.
    low, high = 0, plan.num_stages
    middle = high
    while low < high:
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
        middle = (low + high + 1) // 2
    return low


def even_plans(request: PlanRequest, recompute: str) -> Iterator[Plan]:
    """Pipelines of stages of the same time and number of devices, on all devices, that fit in memory.

    Under DAPPLE's policies unequal stages may be better, but not when weight gradients fill the bubbles.
    """
    devices = request.cluster.num_devices
    for stages in range(1, min(devices, len(request.profile.layers)) + 1):
        replicas, rest = divmod(devices, stages)
        if rest:
            continue
        members = [range(i * replicas, (i + 1) * replicas) for i in range(stages)]
        speeds = [sum(request.cluster.devices[device].speed for device in group) for group in members]
        cuts = by_time(request.profile, stages, speeds)
        for count in request.counts:
            if replicas <= request.batch // count and (count > 1 or stages == 1):
                plan = request.plan(cuts, members, count, recompute)
                if min(request.costs(plan).holds or (1,)) > 0:
                    yield plan


def same_stages(base: Plan, request: PlanRequest, policies: Sequence[Policy]) -> Iterator[Plan]:
    """Yields the same stages under these policies."""
    for policy in policies:
        yield from _derived(base, request, schedule=policy)


def stages_per_device(base: Plan, request: PlanRequest) -> Iterator[tuple[Policy, int]]:
    """Yields the (policy, stages on each device) that a plan's devices allow, the most likely to gain first."""
    most = min(_MOST_PER_DEVICE, len(request.profile.layers) // base.num_stages)
    if base.num_stages > 1 and request.allows("several_stages"):
        for count in range(2, most + 1):
            for policy in request.ranked:
                if _stages_on(base.devices, policy, count) is None:
                    continue
                if not policy.planning.where_short or _is_short(base, request):
                    yield policy, count


def _is_short(base: Plan, request: PlanRequest) -> bool:
    """Returns whether memory limits the micro-batches in flight of a plan."""
    holds = request.costs(base).holds
    return holds is not None and min(holds) < base.micro_batches


def _stages_on(places: Sequence[tuple[int, ...]], policy: Policy, count: int) -> list[tuple[int, ...]] | None:
    """Returns each stage's devices, ``count`` on each place, as a policy needs them; None if it can't have them."""
    candidates = (placement.stages(places, count) for placement in policy.planning.placements)
    return next((devices for devices in candidates if devices is not None), None)


def more_stages(base: Plan, request: PlanRequest, policy: Policy, count: int) -> Iterator[Plan]:
    """Yields plans with ``count`` stages on each device under a policy, with times in proportion to the devices."""
    devices = _stages_on(base.devices, policy, count)
    if devices is None:
        return
    speeds = [sum(request.cluster.devices[device].speed for device in group) for group in devices]
    cuts = tuple(by_device(request.profile, devices, speeds))
    yield from _derived(base, request, cuts=cuts, devices=tuple(devices), schedule=policy)


def with_chunks(base: Plan, request: PlanRequest, chunks: int) -> Iterator[Plan]:
    """Yields the plan with its replicated stages cut into chunks, if that is possible and changes anything."""
    if max(base.replicas) > 1 and _one_group_per_device(base):
        cut = chunked(base, request.profile, chunks)
        if cut != base:
            yield from _derived(cut, request)


def groups(plan: Plan) -> list[tuple[range, tuple[int, ...]]]:
    """Returns the runs of consecutive stages with equal devices, and these devices."""
    runs: list[tuple[range, tuple[int, ...]]] = []
    for devices, stages in itertools.groupby(range(plan.num_stages), key=lambda stage: plan.devices[stage]):
        members = list(stages)
        runs.append((range(members[0], members[-1] + 1), devices))
    return runs


def least_seconds(costs: CostModel) -> float:
    """Returns a lower bound of a plan's step, whatever the order of its tasks.

    It is the time of the busiest device, or of the busiest port of a device or network card.
    """
    busy: dict[object, float] = {}
    plan, cluster = costs.plan, costs.cluster
    count = len(costs.micro_batches)
    for stage, devices in enumerate(plan.devices):
        for replica, device in enumerate(devices):
            tasks = (Task(stage, phase, count - 1, replica) for phase in (Phase.FORWARD, Phase.BACKWARD))
            seconds = count * sum(map(costs.whole_seconds, tasks)) + costs.apply_seconds(stage, device)
            busy[device] = busy.get(device, 0.0) + seconds
    for (producer, consumer), backward in itertools.product(costs.routes, (False, True)):
        ends = (consumer, producer) if backward else (producer, consumer)
        for message in costs.messages(producer, consumer, count - 1, backward=backward):
            source, target = plan.devices[ends[0]][message.sender], plan.devices[ends[1]][message.receiver]
            if source != target:
                link = cluster.link(source, target)
                a, b = cluster.devices[source].server, cluster.devices[target].server
                for port in (("out", source), ("in", target)) if a == b else (("card out", a), ("card in", b)):
                    busy[port] = busy.get(port, 0.0) + count * message.bytes / link.bandwidth
    return max(busy.values())


def name(plan: Plan) -> str:
    """Returns a plan's out-of-order options: ``zb_h2, stages 0-3 and 4-7 in chunks, k = 2``; else empty."""
    parts = [str(plan.policy)] if not plan.policy.planning.formula else []
    runs = groups(plan)
    used = [device for _, devices in runs for device in devices]
    most = max(used.count(device) for device in set(used))
    if most > 1:
        parts.append(f"{most} stages on each device")
    cut = [f"{stages[0]}-{stages[-1]}" for stages, _ in runs if len(stages) > 1]
    if cut and most == 1:
        parts.append(f"wait-free reduction of chunks (stages {', '.join(cut)})")
    if plan.reverse_first_k:
        parts.append(f"reverse first-k with k = {plan.reverse_first_k}")
    if plan.carried_updates:
        parts.append(f"{plan.carried_updates} updates during the next step's forward")
    return ", ".join(parts)


def _one_group_per_device(plan: Plan) -> bool:
    used = [device for _, devices in groups(plan) for device in devices]
    return len(used) == len(set(used))


def _derived(base: Plan, request: PlanRequest, **changes: Any) -> Iterator[Plan]:
    """Yields the plan with changes, and with the k that the request asks for, if that is a legal plan."""
    if isinstance(request.first_k, int):
        changes["reverse_first_k"] = min(request.first_k, len(changes.get("devices", base.devices)))
    yield from _changed(base, request, changes)
