"""Whether another plan would be faster at the speeds at which devices are seen to compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan, PlanError
from dapple_tf.planning.planner import plan_anew
from dapple_tf.planning.shares import with_shares
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulation import Simulation
from dapple_tf.simulation.simulator import run

_MOST_DEVICES = 16
"""The most devices for which the planner searches while a model trains: one to four seconds."""


class NewPlan(NamedTuple):
    """A plan for devices whose speeds aren't the expected ones.

    Attributes:
        plan: the fastest plan; the present one if none is faster.
        latency: simulated seconds of its step at the speeds that were seen.
        present: those of the present plan.
    """

    plan: Plan
    latency: float
    present: float


def plan_for_speeds(simulation: Simulation, factors: Mapping[int, float]) -> NewPlan:
    """Returns the fastest of the present plan, the same with other shares, and what the planner finds.

    The planner searches DAPPLE's policies, on at most 16 devices.

    Args:
        simulation: the present plan's step at the expected speeds.
        factors: device -> its speed as a multiple of the expected one; 1 for others.
    """
    costs = simulation.costs
    cluster = _at_speeds(costs.cluster, factors)
    plan = dataclasses.replace(costs.plan, report=None)

    def latency(other: Plan) -> float:
        return run(CostModel(other, costs.profile, cluster)).latency

    present = latency(plan)
    plans = [with_shares(dataclasses.replace(plan, backward_cuts=()), costs.profile, cluster)]
    if plan.backward_cuts:
        plans.append(with_shares(plan, costs.profile, cluster))
    if cluster.num_devices <= _MOST_DEVICES and not plan.places_operators:
        plans.append(plan_anew(plan, costs.profile, cluster))
    timed = [NewPlan(plan, present, present)]
    for other in plans:
        try:
            timed.append(NewPlan(other, latency(other), present))
        except PlanError:
            continue  # It doesn't fit in memory.
    return min(timed, key=lambda new: new.latency)


def _at_speeds(cluster: Cluster, factors: Mapping[int, float]) -> Cluster:
    devices = tuple(
        dataclasses.replace(device, speed=device.speed * factors.get(index, 1.0))
        for index, device in enumerate(cluster.devices)
    )
    return dataclasses.replace(cluster, devices=devices)
