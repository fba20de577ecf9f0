"""A plan that the planner has simulated."""

from __future__ import annotations

from dataclasses import dataclass

from dapple_tf.planning.cost import CostModel
from dapple_tf.planning.plan import Plan


@dataclass(frozen=True)
class Choice:
    """A plan that was simulated. The simulation isn't kept: ten thousands of spans for each plan slow Python down.

    Attributes:
        plan: the plan.
        latency: simulated seconds of its step.
        costs: what it was simulated with.
    """

    plan: Plan
    latency: float
    costs: CostModel

    @property
    def memory(self) -> float:
        """Bytes that the fullest device needs with as many micro-batches in flight as the schedule allows."""
        return max(self.costs.needed_bytes(stage, count) for stage, count in enumerate(self.costs.warm_up))
