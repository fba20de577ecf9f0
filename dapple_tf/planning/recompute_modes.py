"""What each stage recomputes: chosen by its own memory, and kept when a plan's stages change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from dapple_tf.describe.plan import Plan
from dapple_tf.planning.plan_request import FOUND_AGAIN, PlanRequest
from dapple_tf.planning.stage_cuts import by_time
from dapple_tf.simulation.stage_cost import stage_cost

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
