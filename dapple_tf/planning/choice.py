"""A plan that the planner has simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dapple_tf.describe.plan import Plan
from dapple_tf.simulation.cost import CostModel


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


def simplest(ranked: Sequence[Choice], least_gain: float) -> list[Choice]:
    """The plans of the simplest kind that no plan gains enough over, the fastest first.

    Simple is one device before data parallelism before pipelines: fewer stages, and of as many stages fewer devices.

    Args:
        ranked: plans, the fastest first.
        least_gain: the part of its step's time that a plan must gain over a simpler one.
    """

    def kind(choice: Choice) -> tuple[int, int]:
        plan = choice.plan
        return plan.num_stages, len({device for stage in plan.devices for device in stage})

    near = [choice for choice in ranked if choice.latency <= ranked[0].latency * (1 + least_gain)]
    least = min(map(kind, near))
    return [choice for choice in near if kind(choice) == least]
