"""What the tasks of a simulated step send to each other."""

from __future__ import annotations

from collections.abc import Iterator

from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.legs import Leg
from dapple_tf.simulation.simulated_relays import Relays
from dapple_tf.simulation.step_tasks import TaskNumbers
from graph_passes.ir.tasks import Phase, Task

Message = tuple[int, float, Leg | None]
"""The number of the receiving task for micro-batch 0, bytes, and the leg; None from Bx to Bw."""


class TaskMessages:
    """What each task sends by itself, not what it hands on.

    Attributes:
        incoming: stage -> the legs over which it receives.
        outgoing: stage -> the legs over which it sends what it makes.
    """

    def __init__(self, costs: CostModel, numbers: TaskNumbers, relays: Relays) -> None:
        self._costs, self._numbers, self._relays = costs, numbers, relays
        self._sent: dict[tuple[int, int, int, str], list[Message]] = {}
        self.incoming: dict[int, list[Leg]] = {stage: [] for stage in range(costs.plan.num_stages)}
        self.outgoing: dict[int, list[Leg]] = {stage: [] for stage in range(costs.plan.num_stages)}
        for leg in costs.legs:
            self.incoming[leg.receiver].append(leg)
            if leg.source is None:
                self.outgoing[leg.sender].append(leg)

    def of(self, task: Task) -> list[Message]:
        """Returns what a task sends."""
        key = (task.stage, task.replica, self._costs.micro_batches[task.micro_batch].size, task.phase._value_)
        if key not in self._sent:
            self._sent[key] = list(self._messages(task))
        return self._sent[key]

    def over(self, leg: Leg, sender: Task) -> Iterator[Message]:
        """Yields what a task's slice sends over a leg: forward, or gradients back."""
        for parcel in self._relays.parcels(leg, sender):
            yield self._numbers.first(parcel.stage, parcel.phase, parcel.replica), parcel.bytes, leg

    def _messages(self, task: Task) -> Iterator[Message]:
        if task.phase is Phase.FORWARD:
            for leg in self.outgoing[task.stage]:
                yield from self.over(leg, task)
        elif task.phase is not Phase.WEIGHT_GRAD:
            # The nearest stage first, and what its backward waits for before what it hands on.
            for leg in sorted(self.incoming[task.stage], key=lambda leg: -leg.sender):
                if not self._relays.sums(leg):
                    yield from self.over(leg, task)
        if task.phase is Phase.INPUT_GRAD:
            samples = self._costs.slices(task.stage, task.micro_batch)[task.replica].size
            size = self._costs.delayed_bytes(task.stage, samples)
            yield self._numbers.first(task.stage, Phase.WEIGHT_GRAD, task.replica), size, None
