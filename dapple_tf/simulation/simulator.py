"""Simulates one training step: the Schedule itself, task by task, on the devices and links of a cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dapple_tf.describe.cluster import Cluster
from dapple_tf.describe.plan import Plan
from dapple_tf.describe.profile import Profile
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.least_times import LeastTimes
from dapple_tf.simulation.simulated_reductions import Reductions, carried_stages
from dapple_tf.simulation.simulated_step import ROUNDING, SimulatedStep
from dapple_tf.simulation.simulation import Simulation
from dapple_tf.simulation.step_tasks import TooSlowError
from graph_passes.ir.tasks import Schedule

__all__ = ["Simulation", "run", "simulate", "tried"]


def simulate(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    schedule: Schedule | None = None,
    reduction_order: Sequence[int] | None = None,
    next_forward: bool = False,
) -> Simulation:
    """Simulates one training step of a plan.

    Each device runs its tasks in the Schedule's order, each as soon as its inputs have arrived. Transfers go from
    replica to replica; between two devices of a server over their own ports, between servers over the servers' network
    cards, each of which sends one message at a time and receives one, first come, first served. Data that stays on a
    device arrives at once.

    A parameter group's gradients are reduced when all replicas of its stages have computed them, whatever tasks remain,
    those of each piece of its last backward (``plan.backward_cuts``) by themselves;
    with ``plan.wait_free=False`` when all tasks of these devices are over. A device takes part in one reduction
    at a time, in the order of a real step (:func:`graph_passes.ir.tasks.reduction_order`). A stage's parameters are
    updated when its gradients are reduced and its device has no ready task. A schedule without backwards
    reduces and updates nothing. With ``plan.carried_updates`` a step first reduces and updates what the previous step
    has left, and the forwards of these stages wait for it.

    On a server whose capacity is below its number of devices, tasks that run at the same time slow each other down.

    Args:
        plan: the plan.
        profile: its layers' costs.
        cluster: the devices and links; unknown links are free.
        schedule: run this schedule instead of the plan's.
        reduction_order: the order of reductions, as positions in :attr:`CostModel.reductions`.
        next_forward: simulate from the first backwards to the end of the next step's first forwards, each of which
            waits for its stage's update (Out-Of-Order BackProp, EuroSys'22, section 2): the forwards that come before
            a device's first backward are those of the next step. The time between two steps' ends, where steps follow
            each other.

    Raises:
        PlanError: the plan doesn't fit the profile, the cluster, or a device's memory.
        ValueError: the schedule deadlocks, or ``reduction_order`` isn't one of all reductions.
    """
    costs = CostModel(plan, profile, cluster)
    return run(costs, schedule, reduction_order=reduction_order, next_forward=next_forward)


def run(
    costs: CostModel,
    schedule: Schedule | None = None,
    *,
    reduction_order: Sequence[int] | None = None,
    next_forward: bool = False,
) -> Simulation:
    """Simulates the step that ``costs`` describes; see :func:`simulate`."""
    return _step(costs, schedule, math.inf, reduction_order, next_forward).run()


_COSTS, _STAGE_COSTS, _ORDER = 60.0, 8.0, 0.6
"""Work of a plan's costs, of each of its stages and of ordering a task, relative to simulating a task."""


@dataclass
class Trial:
    """A step that was simulated as far as it may be fast enough.

    Attributes:
        simulation: the step; None if it takes too long.
        work: what that took, in tasks, transfers and others simulated.
        tail: seconds of the step after its last task: the most that earlier all-reduces can gain.
    """

    simulation: Simulation | None
    work: float
    tail: float
    _step: SimulatedStep | None

    def with_cuts(self, costs: CostModel) -> Trial:
        """Simulates the step with its last backwards cut: only what these may change.

        Args:
            costs: those of the same plan with other ``backward_cuts``.

        Raises:
            PlanError: reductions during backwards need more memory than there is.
        """
        if self._step is None or self._step.saved is None or costs.holds != self._step.costs.holds:
            return tried(costs)
        step = self._step.saved.resumed(costs)
        before = len(step.spans)
        simulation = step.go_on()
        tail = simulation.latency - step.computed
        work = _COSTS + _STAGE_COSTS * costs.plan.num_stages + len(step.spans) - before
        return Trial(simulation, work, tail, None)


def tried(costs: CostModel, limit: float = math.inf) -> Trial:
    """Simulates a plan's step.

    Args:
        costs: the plan's costs.
        limit: seconds; a step that takes longer even with its last backwards cut isn't simulated to the end.
    """
    stages = range(costs.plan.num_stages)
    work = _COSTS + _STAGE_COSTS * len(stages)
    if limit < math.inf:
        costs.check_memory()
        least = LeastTimes(
            costs,
            {stage for stage in stages if costs.delays(stage)},
            carried=stages if costs.plan.carried_updates else (),
        )
        if least.busiest() + costs.profile.step_seconds > limit * (1 + ROUNDING):
            return Trial(None, work, 0.0, None)
    schedule = costs.schedule
    work += _ORDER * sum(map(len, schedule.orders.values()))
    try:
        step = _step(costs, schedule, limit)
    except TooSlowError:
        return Trial(None, work, 0.0, None)
    step.keep()
    try:
        simulation = step.run()
    except TooSlowError:
        return Trial(None, work + len(step.spans), 0.0, None)
    return Trial(simulation, work + len(step.spans), simulation.latency - step.computed, step)


def _step(
    costs: CostModel,
    schedule: Schedule | None,
    limit: float,
    reduction_order: Sequence[int] | None = None,
    next_forward: bool = False,
) -> SimulatedStep:
    schedule = costs.schedule if schedule is None else schedule
    carried = () if next_forward else carried_stages(costs, schedule)
    reductions = Reductions(costs, schedule, reduction_order, carried)
    return SimulatedStep(costs, schedule, reductions, next_forward, carried, limit)
