"""What relays of a simulated step wait for before they hand a slice on."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.legs import Leg
from dapple_tf.view.timeline import SEND, Span
from graph_passes.ir.tasks import Phase, Task


class Relays:
    """The slices that relays hand on.

    A tensor leaves when all of the relay's slice has come; a gradient when those of all readers to which it was handed
    on have come, and the relay's own backward is over.

    Attributes:
        legs: the plan's.
        due: (leg to the relay, micro-batch, replica, whether gradients, whether of the next step) -> number of messages
            still to come.
    """

    def __init__(self, costs: CostModel, begun: Collection[Task]) -> None:
        """Starts a step.

        Args:
            costs: the costs of the plan.
            begun: forwards of the next step that end in this one; what they make goes only to others of them.
        """
        self.legs, self._costs = costs.legs, costs
        self._begun = {(task.stage, task.micro_batch) for task in begun}
        self.due: dict[tuple[int, int, int, bool, bool], int] = {}
        self._numbers: dict[tuple[int, int, bool], Counter[int]] = {}

    def copied(self) -> Relays:
        """Returns a copy of the state."""
        other = copy.copy(self)
        other.due = dict(self.due)
        return other

    def come(self, leg: Leg, micro_batch: int, replica: int, *, backward: bool, begun: bool = False) -> Iterator[Leg]:
        """Notes that a message has come to a relay's slice, or that its own backward is over.

        Args:
            leg: the leg over which the relay gets the tensors.
            micro_batch: the micro-batch.
            replica: the relay's replica.
            backward: whether it is a gradient.
            begun: whether it is of the next step.

        Yields:
            The legs over which the slice leaves now.
        """
        key = (leg.number, micro_batch, replica, backward, begun)
        if key not in self.due:
            self.due[key] = self._number(leg, micro_batch, replica, backward)
        self.due[key] -= 1
        if not self.due[key]:
            yield from [leg] if backward else self.onward(leg)

    def onward(self, leg: Leg) -> list[Leg]:
        """Returns the legs over which a leg's receiver hands its tensors on."""
        return [self.legs[number] for number in leg.onward]

    def awaited(self, leg: Leg | None, micro_batch: int) -> bool:
        """Returns whether one of the next step's forwards gets what a leg's receiver hands on."""
        return leg is not None and any(
            (after.receiver, micro_batch) in self._begun or self.awaited(after, micro_batch)
            for after in self.onward(leg)
        )

    def _number(self, leg: Leg, micro_batch: int, replica: int, backward: bool) -> int:
        key = (leg.number, self._costs.micro_batches[micro_batch].size, backward)
        if key not in self._numbers:
            counts: Counter[int] = Counter()
            for other in self.onward(leg) if backward else [leg]:
                for message in self._costs.leg_messages(other, micro_batch, backward=backward):
                    counts[message.receiver] += 1
            self._numbers[key] = counts
        return self._numbers[key][replica] + int(backward)


class Held(NamedTuple):
    """Bytes that a relay holds for others: from their arrival until they have been sent on, in seconds."""

    device: int
    start: float
    end: float
    bytes: float


def held_by_relays(costs: CostModel, spans: Sequence[Span]) -> Iterator[Held]:
    """Yields what relays hold, besides what their own tasks keep: a forward's inputs count from its start on.

    Args:
        costs: the costs of the plan.
        spans: those of a step.
    """
    if not costs.plan.relays:
        return
    sent: dict[tuple[int, int | None, bool], list[Span]] = defaultdict(list)  # (leg, micro-batch, whether gradients)
    forwards: dict[tuple[int, int | None, int], float] = {}
    for span in spans:
        if span.kind == SEND and span.leg is not None:
            sent[span.leg, span.micro_batch, span.stage == costs.legs[span.leg].receiver].append(span)
        elif span.kind == Phase.FORWARD.value:
            forwards[span.stage, span.micro_batch, span.replica] = span.start
    for leg in costs.legs:
        for micro_batch in range(len(costs.micro_batches)) if leg.onward else ():
            for replica, interval in enumerate(costs.slices(leg.receiver, micro_batch)):
                device = costs.plan.devices[leg.receiver][replica]
                used = forwards.get((leg.receiver, micro_batch, replica), 0.0)
                for backward in (False, True):
                    incoming, outgoing = (leg.onward, [leg.number]) if backward else ([leg.number], leg.onward)
                    came = [s.end for n in incoming for s in sent[n, micro_batch, backward] if s.target == device]
                    left = [s.end for n in outgoing for s in sent[n, micro_batch, backward] if s.replica == replica]
                    start, end = min(came, default=0.0), max(left, default=0.0)
                    end = end if backward else min(end, used)
                    if came and end > start:
                        cost = leg.backward if backward else leg.forward
                        yield Held(device, start, end, cost.at(interval.size))
