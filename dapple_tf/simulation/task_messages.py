"""What the tasks of a simulated step send to each other."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.legs import Leg
from dapple_tf.simulation.step_tasks import TaskNumbers
from graph_passes.ir.tasks import Phase, Task

Message = tuple[int, float, Leg | None]
"""The number of the receiving task for micro-batch 0, bytes, and the leg; None from Bx to Bw."""


class TaskMessages:
    """What each task sends by itself, not what it hands on."""

    def __init__(self, costs: CostModel, numbers: TaskNumbers, split: Collection[int]) -> None:
        self._costs, self._numbers, self._split = costs, numbers, split
        self._sent: dict[tuple[int, int, int, str], list[Message]] = {}

    def of(self, task: Task) -> list[Message]:
        """Returns what a task sends."""
        key = (task.stage, task.replica, self._costs.micro_batches[task.micro_batch].size, task.phase._value_)
        if key not in self._sent:
            self._sent[key] = list(self._messages(task))
        return self._sent[key]

    def over(self, leg: Leg, sender: Task) -> Iterator[Message]:
        """Yields what a task's slice sends over a leg: forward, or gradients back."""
        stage, phase, backward = leg.receiver, Phase.FORWARD, sender.phase is not Phase.FORWARD
        if backward:
            stage, phase = leg.sender, self._costs.gradient_phase(leg.sender, leg.sender in self._split)
        for message in self._costs.leg_messages(leg, sender.micro_batch, backward=backward):
            if message.sender == sender.replica:
                yield self._numbers.first(stage, phase, message.receiver), message.bytes, leg

    def _messages(self, task: Task) -> Iterator[Message]:
        if task.phase is Phase.FORWARD:
            for leg in self._costs.outgoing[task.stage]:
                yield from self.over(leg, task)
        elif task.phase is not Phase.WEIGHT_GRAD:
            # The nearest stage first, and what its backward waits for before what it hands on.
            for leg in sorted(self._costs.incoming[task.stage], key=lambda leg: -leg.sender):
                if not leg.sums:
                    yield from self.over(leg, task)
        if task.phase is Phase.INPUT_GRAD:
            samples = self._costs.slices(task.stage, task.micro_batch)[task.replica].size
            size = self._costs.delayed_bytes(task.stage, samples)
            yield self._numbers.first(task.stage, Phase.WEIGHT_GRAD, task.replica), size, None
