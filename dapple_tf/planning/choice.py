"""A plan that the planner has simulated."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from dapple_tf.describe.plan import Plan
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.simulator import Trial

_LEAST_TAIL = 0.004
"""The least part of a step after its last task for which backwards are cut."""


@dataclass(frozen=True)
class Choice:
    """A simulated plan. The simulation isn't kept: tens of thousands of spans for each plan slow Python down.

    Attributes:
        plan: the plan.
        latency: simulated seconds of its step.
        costs: the costs it was simulated with.
        tail: seconds of its step after its last task: the most that earlier all-reduces can gain.
    """

    plan: Plan
    latency: float
    costs: CostModel
    tail: float = 0.0

    @classmethod
    def of(cls, trial: Trial) -> Choice | None:
        """Returns the choice of a simulated plan; None if it wasn't simulated to the end."""
        if trial.simulation is None:
            return None
        costs = trial.simulation.costs
        return cls(costs.plan, trial.simulation.latency, costs, trial.tail)

    def gains_from_cuts(self, fastest: float) -> bool:
        """Returns whether cutting its last backwards may make it faster than the fastest, by enough to matter."""
        return self.latency - self.tail < fastest and self.tail > _LEAST_TAIL * self.latency

    def with_warm_up(self) -> Choice:
        """Returns the choice with K in its plan, if devices' memory is known: a run keeps to K, or refuses it.

        K isn't written where one micro-batch is in flight, where the policy keeps all of them, and where K doesn't give
        the same order: some policies limit the stages of a device together.
        """
        costs = self.costs
        if costs.holds is None or max(costs.warm_up) == 1 or self.plan.policy.needs_all:
            return self
        plan = dataclasses.replace(self.plan, warm_up=costs.warm_up)
        written = CostModel(plan, costs.profile, costs.cluster)
        return dataclasses.replace(self, plan=plan, costs=written) if written.schedule == costs.schedule else self

    @property
    def memory(self) -> float:
        """Bytes that the fullest device needs with the most micro-batches in flight that the schedule allows."""
        return max(self.costs.needed_bytes(stage, count) for stage, count in enumerate(self.costs.warm_up))


def simplest(ranked: Sequence[Choice], least_gain: float) -> list[Choice]:
    """Returns the plans of the simplest kind that no other plan beats by enough, the fastest first.

    From simple to complex: one device, data parallelism, pipelines; fewer stages first, then fewer devices.

    Args:
        ranked: plans, the fastest first.
        least_gain: the fraction of its step's time that a plan must gain over a simpler one.
    """

    def kind(choice: Choice) -> tuple[int, int]:
        plan = choice.plan
        return plan.num_stages, len({device for stage in plan.devices for device in stage})

    near = [choice for choice in ranked if choice.latency <= ranked[0].latency * (1 + least_gain)]
    least = min(map(kind, near))
    return [choice for choice in near if kind(choice) == least]
