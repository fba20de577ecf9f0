"""A plan that the planner has simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dapple_tf.describe.plan import Plan
from dapple_tf.simulation.cost import CostModel


@dataclass(frozen=True)
class Choice:
    """A simulated plan. The simulation isn't kept: tens of thousands of spans for each plan slow Python down.

    Attributes:
        plan: the plan.
        latency: simulated seconds of its step.
        costs: the costs it was simulated with.
    """

    plan: Plan
    latency: float
    costs: CostModel

    @property
    def reducing(self) -> float:
        """Seconds of its all-reduces one after the other: the most that running them during backwards can gain."""
        return sum(self.costs.reduction_seconds(reduction) for reduction in self.costs.reductions)

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
