"""Lower bounds of a step's time: what must come before a task and after it, however busy links are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from dapple_tf.simulation.cost import CostModel, Message
from dapple_tf.simulation.legs import Leg
from graph_passes.ir.tasks import Phase, Task, inputs

_NOTHING = 1e-9
"""Bytes of the smallest piece of gradients: how a backward is cut doesn't matter for a bound."""

F, B, BX, BW = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD


class LeastTimes:
    """The least seconds before and after each stage's tasks: the way of one micro-batch through stages without queues.

    Attributes:
        before: for each stage the least seconds until it can start a forward.
        after: (stage, phase) -> the least seconds from the end of such a task to the end of the step.
    """

    def __init__(
        self, costs: CostModel, split: Collection[int], *, carried: Collection[int] = (), forward_only: bool = False
    ) -> None:
        """Follows the messages of the last micro-batch, which is one of the smallest.

        Args:
            costs: the plan's costs.
            split: the stages whose backward is Bx and Bw.
            carried: the stages whose updates are made in the next step.
            forward_only: whether the step has no backwards.
        """
        self.costs = costs
        stages = range(costs.plan.num_stages)
        self.before = [0.0] * len(stages)
        self.after: dict[tuple[int, Phase], float] = defaultdict(float)
        for stage in stages:
            for (sender, phase), sent in self._inputs(stage, F, split):
                start = self.before[sender] + self._seconds(sender, phase) + sent
                self.before[stage] = max(self.before[stage], start)
        backwards = [(stage, phase) for stage in stages for phase in ((BW, BX) if stage in split else (B,))]
        for stage, phase in (*(() if forward_only else backwards), *((stage, F) for stage in reversed(stages))):
            if phase is B or phase is BW:
                updated = 0.0 if stage in carried else self._updated(stage)
                self.after[stage, phase] = max(updated, self.after[stage, phase])
            for sending, sent in self._inputs(stage, phase, split):
                least = sent + self._seconds(stage, phase) + self.after[stage, phase]
                self.after[sending] = max(self.after[sending], least)

    def _inputs(self, stage: int, phase: Phase, split: Collection[int]) -> Iterator[tuple[tuple[int, Phase], float]]:
        """Yields the stage and phase of each task that one waits for, and the seconds of the quickest message.

        What relays hand on doesn't wait for their own tasks: it bounds nothing here.
        """
        for before in inputs(stage, phase):
            if before[0] == stage:
                yield before, 0.0
        backward = phase is not F
        for leg in self.costs.inputs(stage, phase, stage in split):
            sent = self._sent(leg, backward=backward) if leg.source is None else None
            if sent is not None:
                yield leg.sending(backward, split), sent

    def rest(self, tasks: Sequence[Task], seconds: Sequence[float]) -> list[float]:
        """Returns for each of a device's tasks the least seconds from its start to the end of the step.

        Args:
            tasks: the device's tasks in order.
            seconds: their times.
        """
        rest = [0.0] * len(tasks)
        least = 0.0
        for position in range(len(tasks) - 1, -1, -1):
            task = tasks[position]
            after = self.after[task.stage, task.phase]
            least = rest[position] = seconds[position] + (after if after > least else least)
        return rest

    def busiest(self) -> float:
        """Returns a lower bound of the step: a device's work, what must come before it and what must follow."""
        costs, count = self.costs, len(self.costs.micro_batches)
        work: dict[int, float] = {}
        before: dict[int, float] = {}
        after: dict[int, float] = {}
        for stage, devices in enumerate(costs.plan.devices):
            ends = min(value for (other, phase), value in self.after.items() if other == stage and phase is not F)
            times: dict[tuple[int, float], float] = {}
            for replica, interval in enumerate(costs.slices(stage, count - 1)):
                device = devices[replica]
                kind = interval.size, costs.cluster.devices[device].speed
                if kind not in times:
                    tasks = (Task(stage, phase, count - 1, replica) for phase in (F, B))
                    times[kind] = count * sum(map(costs.whole_seconds, tasks))
                work[device] = work.get(device, 0.0) + times[kind]
                before[device] = min(before.get(device, math.inf), self.before[stage])
                after[device] = min(after.get(device, math.inf), ends)
        return max(work[device] + before[device] + after[device] for device in work)

    def _seconds(self, stage: int, phase: Phase) -> float:
        """Returns the seconds of a phase of the last micro-batch, on the quickest replica."""
        costs, last = self.costs, len(self.costs.micro_batches) - 1
        kinds: dict[tuple[int, float], Task] = {}
        for replica, interval in enumerate(costs.slices(stage, last)):
            speed = costs.cluster.devices[costs.plan.devices[stage][replica]].speed
            kinds.setdefault((interval.size, speed), Task(stage, phase, last, replica))
        return min(map(costs.whole_seconds, kinds.values()))

    def _sent(self, leg: Leg, *, backward: bool) -> float | None:
        """Returns the seconds of the quickest message over a leg; None if there is none."""
        costs = self.costs
        messages = costs.leg_messages(leg, len(costs.micro_batches) - 1, backward=backward)
        senders, receivers = costs.plan.devices[leg.sender], costs.plan.devices[leg.receiver]
        if backward:
            senders, receivers = receivers, senders
        if not messages:
            return None
        return min(self._message(message, senders, receivers) for message in messages)

    def _message(self, message: Message, senders: Sequence[int], receivers: Sequence[int]) -> float:
        source, target = senders[message.sender], receivers[message.receiver]
        if source == target:
            return 0.0
        link = self.costs.cluster.link(source, target)
        return message.bytes / link.bandwidth + link.latency

    def _updated(self, stage: int) -> float:
        """Returns the seconds of a stage's update, and of the last of many all-reduces if it has some of its own.

        If the stage's first layer has no gradients, the last all-reduce may be over before the backward that is cut.
        """
        costs = self.costs
        seconds = min(costs.apply_seconds(stage, device) for device in costs.plan.devices[stage])
        if not costs.layer_gradients(stage)[0]:
            return seconds
        own = [costs.reduction_seconds(item, _NOTHING) for item in costs.reductions if item.stages == (stage,)]
        return seconds + max(own, default=0.0)  # The devices of groups reduce their variables at the same time.
