"""How long tensors between stages live, and their gradients: where they are made and read, and on their way."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from dapple_tf.simulation.step_memory import StepMemory


class Life(NamedTuple):
    """The life of a buffer, or of a task's working memory.

    Attributes:
        device: where it is.
        start: when it is allocated, in seconds.
        end: when it is freed, in seconds.
        bytes: its size.
    """

    device: int
    start: float
    end: float
    bytes: float


class SliceTimes(NamedTuple):
    """A stage's replica's work for one micro-batch.

    Attributes:
        samples: number of its samples.
        device: where it runs.
        forward: start and end of F.
        backward: start and end of B or Bx; as Bw where Bx has nothing to do.
        weight: start and end of B or Bw.
    """

    samples: int
    device: int
    forward: tuple[float, float]
    backward: tuple[float, float]
    weight: tuple[float, float]


class _Slice(NamedTuple):
    """One of the slices of a stage: its stage, micro-batch and replica."""

    stage: int
    micro_batch: int
    replica: int


class _Part(NamedTuple):
    """What one slice sends to another.

    Attributes:
        sender: the sending slice.
        receiver: the receiving slice.
        samples: number of samples.
        inside: whether the receiver reads the sender's memory in place.
        leg: number of the leg over which it goes; None where only a backward reads the tensor.
    """

    sender: _Slice
    receiver: _Slice
    samples: int
    inside: bool
    leg: int | None


class CrossingTensor:
    """A tensor that stages read which don't make it, in one step.

    The slice of a relay is there until it has been handed on, and its gradient until the sum has been sent.
    """

    def __init__(self, memory: StepMemory, position: int) -> None:
        """Finds its ways.

        Args:
            memory: the lives of the step's buffers.
            position: the tensor's, in the profile.
        """
        self.memory, self.costs = memory, memory.costs
        self.tensor = self.costs.profile.tensors[position]
        self.maker = memory.stage_of[self.tensor.producer]
        self.consumers = sorted(memory.stages(self.tensor.consumers) - {self.maker})
        readers = sorted(memory.stages((*self.tensor.consumers, *self.tensor.kept)) - {self.maker})
        self.legs = {stage: memory.legs.get((position, stage)) for stage in readers}
        self.onward: dict[int, list[int]] = {}  # stage -> those that get the tensor from it
        for stage, leg in self.legs.items():
            self.onward.setdefault(self.maker if leg is None else leg.sender, []).append(stage)
        self.times: dict[_Slice, SliceTimes] = {}
        for stage in (self.maker, *readers) if readers else ():
            for micro_batch in range(len(self.costs.micro_batches)):
                for replica in range(len(self.costs.plan.devices[stage])):
                    times = memory.slice(stage, micro_batch, replica)
                    if times is not None:
                        self.times[_Slice(stage, micro_batch, replica)] = times
        self.parts = {own: self._parts(own) for own in self.times}
        self.received: dict[_Slice, list[_Part]] = {own: [] for own in self.times}
        for part in itertools.chain.from_iterable(self.parts.values()):
            self.received[part.receiver].append(part)
        # Senders before receivers: when a slice can be sent, made or come.
        self.there: dict[_Slice, float] = {}
        for own in sorted(self.times):
            arrivals = [self._arrival(part) for part in self.received[own]]
            self.there[own] = max(arrivals, default=self.times[own].forward[1])
        # And back: when a reader can send its gradient, with those that it was sent.
        self.ready: dict[_Slice, float] = {}
        for own in sorted(self.times, reverse=True):
            self.ready[own] = max([self.times[own].backward[1], *(end for _, end in self._returned(own))])

    def lives(self) -> Iterator[Life]:
        """Yields the lives of its slices, their copies on other devices, and their gradients."""
        for part in self.times:
            yield from self._forward(part)
            gradient = self.memory.trains and self.tensor.differentiable
            if gradient and (part.stage == self.maker or self._relayed(part)):
                yield from self._gradient(part)

    # ---- forward

    def _parts(self, sender: _Slice) -> list[_Part]:
        """Returns what a slice sends to each reader that gets the tensor from it."""
        parts = []
        own = self.costs.slices(sender.stage, sender.micro_batch)[sender.replica]
        for stage in self.onward.get(sender.stage, ()):
            leg = self.legs[stage]
            for replica, wanted in enumerate(self.costs.slices(stage, sender.micro_batch)):
                receiver, common = _Slice(stage, sender.micro_batch, replica), own.overlap(wanted).size
                if common and receiver in self.times:
                    # Messages of several senders become a tensor of the receiver's.
                    inside = self._shares(sender, receiver) and common == wanted.size
                    parts.append(_Part(sender, receiver, common, inside, None if leg is None else leg.number))
        return parts

    def _shares(self, first: _Slice, second: _Slice) -> bool:
        return self.memory.shares(self.times[first].device, self.times[second].device)

    def _arrival(self, part: _Part) -> float:
        """Returns when the receiver has got a part."""
        device = self.times[part.receiver].device
        return self.memory.arrival(part.sender, device, part.leg, self.there[part.sender])

    def _used(self, own: _Slice) -> float:
        """Returns until when a slice is needed: by its own stage, and by those that it is sent to."""
        ends = [self.memory.last_use(self.tensor, own.stage, self.times[own])]
        ends += [self._used(part.receiver) if part.inside else self._arrival(part) for part in self.parts[own]]
        return max(ends)

    def _forward(self, own: _Slice) -> Iterator[Life]:
        times, used = self.times[own], self._used(own)
        if own.stage != self.maker:
            for part in self.received[own] if own.stage in self.consumers else ():
                if not part.inside:
                    for low, high in self.memory.until(self._arrival(part), used):
                        yield Life(times.device, low, high, self.tensor.bytes.at(part.samples))
            return
        latest = max(used, times.forward[1])
        if times.forward[0] > times.weight[1]:  # The backward is that of an earlier step's forward.
            latest = times.weight[1]
        for low, high in self.memory.until(times.forward[0], latest):
            yield Life(times.device, low, high, self.tensor.bytes.at(times.samples))

    # ---- gradients

    def _relayed(self, own: _Slice) -> bool:
        return any(part.receiver.stage in self.consumers for part in self.parts[own])

    def _returned(self, own: _Slice) -> list[tuple[_Part, float]]:
        """Returns the gradients that come back to a slice: of which parts, and when."""
        device = self.times[own].device
        return [
            (part, self.memory.arrival(part.receiver, device, part.leg, self.ready[part.receiver]))
            for part in self.parts[own]
            if part.receiver.stage in self.consumers
        ]

    def _gradient(self, own: _Slice) -> Iterator[Life]:
        """Yields the lives of the gradients that return to one slice, of the maker's or a relay's."""
        times, returned = self.times[own], self._returned(own)
        joined = max((arrival for _, arrival in returned), default=0.0)
        several = len(returned) > 1
        if own.stage == self.maker:
            late = self.tensor.gradient_delayed or times.backward == times.weight
            use = times.weight[1] if late else times.backward[1]
        else:
            joined = use = max(joined, times.backward[1])
            several = True
            yield Life(times.device, times.backward[1], joined, self.tensor.bytes.at(times.samples))
        for part, arrival in returned:
            ready = self.ready[part.receiver]
            maker = self.times[part.receiver].device
            shared, size = self.memory.shares(times.device, maker), self.tensor.bytes.at(part.samples)
            end = joined if several else use
            yield Life(maker, ready, max(end if shared else arrival, ready), size)
            if not shared:
                yield Life(times.device, arrival, max(arrival, end), size)
        if several:
            yield Life(times.device, joined, max(joined, use), self.tensor.bytes.at(times.samples))
