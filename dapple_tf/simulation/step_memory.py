"""How long each buffer of a simulated step lives, and on which device.

A buffer stays on the device that makes it until its last reader ends. Devices that share the host's memory (logical CPU
devices of one process) read it there; others hold a copy from its arrival to their last reader's end.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dapple_tf.simulation.activities import carried_stages
from dapple_tf.view.timeline import LINK_KINDS
from graph_passes.ir.tasks import Phase

if TYPE_CHECKING:
    from dapple_tf.describe.profile import Tensor
    from dapple_tf.simulation.simulation import Simulation
    from dapple_tf.simulation.stage_cost import StageBuffers
    from dapple_tf.view.timeline import Span


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


class StepMemory:
    """The lives of all buffers of a simulated step, or of the sums in a profile without buffers."""

    def __init__(self, simulation: Simulation) -> None:
        self.costs, self.end = simulation.costs, simulation.latency
        self.plan = self.costs.plan
        self.stage_of = self.costs.profile.stage_of_layers(self.plan.cuts)
        self.spans: dict[tuple[str, int, int | None, int], Span] = {}
        self.applies: dict[tuple[int, int], Span] = {}  # (stage, device) -> its update
        self.reduced: dict[int, tuple[float, float]] = {}  # reduction -> its start and end
        self.sends: dict[tuple[int, int | None, int, int | None, int | None], list[Span]] = defaultdict(list)
        self.legs = {(tensor, leg.receiver): leg for leg in self.costs.legs for tensor in leg.tensors}
        for span in simulation.spans:
            if span.kind == "apply" and span.device is not None:
                self.applies[span.stage, span.device] = span
            elif span.reduction is not None:
                start, end = self.reduced.get(span.reduction, (span.start, span.end))
                self.reduced[span.reduction] = min(start, span.start), max(end, span.end)
            elif span.kind == "send":
                self.sends[span.stage, span.micro_batch, span.replica, span.target, span.leg].append(span)
            elif span.kind not in LINK_KINDS:
                self.spans[span.kind, span.stage, span.micro_batch, span.replica] = span
        self.split = {stage for kind, stage, _, _ in self.spans if kind == Phase.INPUT_GRAD.value}
        self.trains = any(kind != Phase.FORWARD.value for kind, *_ in self.spans)

    @functools.cached_property
    def carried(self) -> frozenset[tuple[int, ...]]:
        """The groups that are updated in the next step, each a stage."""
        return frozenset((stage,) for stage in carried_stages(self.costs, self.costs.schedule))

    def lives(self) -> Iterator[Life]:
        """Yields the life of each buffer, and of each task's working memory."""
        for stage, cost in enumerate(self.costs.stages) if self.trains else ():
            for micro_batch in range(len(self.costs.micro_batches)):
                for replica in range(len(self.plan.devices[stage])):
                    done = self.slice(stage, micro_batch, replica)
                    if done is not None and cost.buffers is not None:
                        yield from self._inside(stage, cost.buffers, done)
                    elif done is not None:
                        yield from self._summed(stage, done)
        if not self.costs.profile.has_buffers:
            yield from self._relayed()
            for number, (start, end) in self.reduced.items():
                reduction = self.costs.reductions[number]
                yield from (Life(device, start, end, reduction.bytes) for device in reduction.devices)
            return
        for position in range(len(self.costs.profile.tensors)):
            tensor = _Crossing(self, position)
            # A buffer that is handed on at once is part of its maker's working memory.
            yield from (life for life in tensor.lives() if life.end > life.start)
        if self.trains:
            yield from self._updates()

    # ---- a stage's own

    def slice(self, stage: int, micro_batch: int, replica: int) -> SliceTimes | None:
        """Returns a replica's work for a micro-batch; None if it has none."""
        samples = self.costs.slices(stage, micro_batch)[replica].size
        forward = self._times("F", stage, micro_batch, replica)
        weight = self._times("Bw" if stage in self.split else "B", stage, micro_batch, replica)
        if not samples or (forward is None and weight is None):
            return None
        if stage in self.split and self.costs.computes(stage, Phase.INPUT_GRAD):
            backward = self._times("Bx", stage, micro_batch, replica)
            if not self.costs.computes(stage, Phase.WEIGHT_GRAD):
                weight = backward
        else:
            backward = weight
        return SliceTimes(
            samples,
            self.plan.devices[stage][replica],
            forward or (0.0, 0.0),
            backward or (self.end, self.end),
            weight or (self.end, self.end),
        )

    def _times(self, kind: str, stage: int, micro_batch: int, replica: int) -> tuple[float, float] | None:
        span = self.spans.get((kind, stage, micro_batch, replica))
        return None if span is None else (span.start, span.end)

    def until(self, start: float, end: float) -> list[tuple[float, float]]:
        """Returns the time from a forward to the release of its results; a release before it is an earlier step's."""
        return [(start, end)] if start <= end else [(0.0, end), (start, self.end)]

    def _inside(self, stage: int, own: StageBuffers, done: SliceTimes) -> Iterator[Life]:
        samples, start = done.samples, done.forward[0]
        delayed = own.delayed.at(samples)
        last = done.weight[1]
        for low, high in self.until(start, last):
            yield Life(done.device, low, high, delayed)
        for low, high in self.until(start, done.backward[1]):
            yield Life(done.device, low, high, max(0.0, own.residual.at(samples) - delayed))
        if done.backward != done.weight:
            yield Life(done.device, done.backward[0], last, own.partial.at(samples))
            yield Life(done.device, *done.backward, own.working_input(samples))
            yield Life(done.device, *done.weight, own.working_weight(samples))
        else:
            yield Life(done.device, *done.weight, own.working(samples))
        rows = own.rows.at(samples)
        if rows:
            yield Life(done.device, last, max(last, self._applied(stage, done.device)), rows)
        if not self.plan.accumulates():
            taken, packed = self._taken(stage, done.device)
            yield Life(done.device, last, max(last, taken), own.gradients)
            if packed:  # into vectors that exist at the same time
                yield Life(done.device, taken, taken, own.gradients)

    def _summed(self, stage: int, done: SliceTimes) -> Iterator[Life]:
        """Yields the lives of a slice's residuals, and of tasks' working memory, in a profile without buffers."""
        device, samples = done.device, done.samples
        kept = self.costs.residual_bytes(stage, samples)
        for low, high in self.until(done.forward[0], done.backward[1]):
            yield Life(device, low, high, kept)
        tasks = [(Phase.BACKWARD, done.weight, kept)]
        if done.backward != done.weight:
            delayed = self.costs.delayed_bytes(stage, samples)
            yield Life(device, done.backward[1], done.weight[1], delayed)
            tasks = [
                (Phase.INPUT_GRAD, done.backward, max(0.0, kept - delayed)),
                (Phase.WEIGHT_GRAD, done.weight, delayed),
            ]
        for phase, (start, end), freed in tasks:
            working = self.costs.working_bytes(stage, samples, phase)
            # A task of no time needs what it frees all the same.
            yield Life(device, start, end, working + freed if start == end else working)

    def _relayed(self) -> Iterator[Life]:
        """Yields what relays hold for others, from its arrival until it has been sent, in a profile without buffers.

        What their own tasks keep is left out: a forward's inputs count from its start on.
        """
        legs = self.costs.legs
        # (leg, micro-batch, whether gradients) -> its messages
        sent: dict[tuple[int, int | None, bool], list[Span]] = defaultdict(list)
        for span in itertools.chain.from_iterable(self.sends.values()):
            if span.leg is not None:
                sent[span.leg, span.micro_batch, span.stage == legs[span.leg].receiver].append(span)
        for leg, micro_batch in itertools.product(legs, range(len(self.costs.micro_batches))):
            for replica, interval in enumerate(self.costs.slices(leg.receiver, micro_batch)) if leg.onward else ():
                device = self.plan.devices[leg.receiver][replica]
                used, _ = self._times("F", leg.receiver, micro_batch, replica) or (0.0, 0.0)
                for backward in (False, True):
                    incoming, outgoing = (leg.onward, [leg.number]) if backward else ([leg.number], leg.onward)
                    came = [s.end for n in incoming for s in sent[n, micro_batch, backward] if s.target == device]
                    left = [s.end for n in outgoing for s in sent[n, micro_batch, backward] if s.replica == replica]
                    start, end = min(came, default=0.0), max(left, default=0.0)
                    end = end if backward else min(end, used)
                    if came and end > start:
                        cost = leg.backward if backward else leg.forward
                        yield Life(device, start, end, cost.at(interval.size))

    # ---- between stages

    def stages(self, layers: Iterable[int]) -> set[int]:
        """Returns the stages of layers."""
        return {self.stage_of[layer] for layer in layers}

    def shares(self, first: int, second: int) -> bool:
        """Returns whether a device reads another device's memory in place."""
        return self.costs.cluster.shares_memory(first, second)

    def last_use(self, tensor: Tensor, stage: int, done: SliceTimes) -> float:
        """Returns when a stage's slice reads a tensor for the last time."""
        if self.trains and stage in self.stages(tensor.kept):
            late = stage in self.stages(tensor.delayed)
            return done.weight[1] if late else done.backward[1]
        return done.forward[1]

    def arrival(self, way: tuple[int, int | None, int], target: int, leg: int | None, after: float) -> float:
        """Returns when what a slice sends over a leg, at ``after`` or later, has come to another device.

        Args:
            way: the sender's stage, micro-batch and replica.
            target: the device.
            leg: number of the leg.
            after: when the sender has it.
        """
        arrivals = [span.end for span in self.sends[(*way, target, leg)] if span.start >= after]
        return min(arrivals, default=after)

    # ---- reductions and updates

    def _apply_seconds(self, stage: int, device: int) -> float:
        return self.costs.apply_seconds(stage, device)

    def _applied(self, stage: int, device: int) -> float:
        span = self.applies.get((stage, device))
        return self.end if span is None else span.end

    def _taken(self, stage: int, device: int) -> tuple[float, bool]:
        """Returns when a stage's dense gradients outside accumulators have been packed or used on a device.

        Returns:
            The time, and whether they are packed then.
        """
        reduced = [r.stages for r in self.costs.reductions if stage in r.stages and device in r.devices]
        if reduced:
            return max(self._complete(stages, device) for stages in reduced), True
        return self._applied(stage, device), False

    def _complete(self, stages: Iterable[int], device: int) -> float:
        """Returns when the gradients of stages are complete on a device."""
        kinds = ("B", "Bw")
        if not self.plan.wait_free:
            ends = [span.end for (kind, *_), span in self.spans.items() if span.device == device]
        else:
            ends = [
                s.end
                for (kind, stage, *_), s in self.spans.items()
                if s.device == device and kind in kinds and stage in stages
            ]
        return max(ends, default=0.0)

    def _updates(self) -> Iterator[Life]:
        """Yields the lives of packed gradients, from the last task to the update, and of updates' working memory.

        An update runs as soon as its gradients are reduced, on a thread of its own beside the device's tasks.
        """
        ready: dict[tuple[int, int], float] = {}  # (stage, device) -> when its gradients are reduced
        for number, reduction in enumerate(self.costs.reductions):
            for device in reduction.devices:
                stages = [stage for stage in reduction.stages if device in self.plan.devices[stage]]
                if reduction.stages in self.carried:
                    yield Life(device, 0.0, self._head(stages, device), reduction.bytes)
                    continue
                start = self._complete(stages, device)
                reduced = max(start, self.reduced.get(number, (start, start))[1])
                ready |= {(stage, device): max(reduced, ready.get((stage, device), 0.0)) for stage in stages}
                applied = max(self._apply_seconds(stage, device) for stage in stages)
                yield Life(device, start, reduced + applied, reduction.bytes)
        pending: dict[int, list[Life]] = defaultdict(list)
        for (stage, device), span in self.applies.items():
            size = self.costs.apply_bytes(stage)
            if (stage,) in self.carried:
                life = Life(device, 0.0, self._head([stage], device), size)
            else:
                start = min(span.start, ready.get((stage, device), self._complete([stage], device)))
                life = Life(device, start, start + self._apply_seconds(stage, device), size)
            pending[device].append(life)
        for lives in pending.values():
            yield from _one_at_a_time(lives)

    def _head(self, stages: Iterable[int], device: int) -> float:
        """Returns when the first forward of stages begins on a device."""
        starts = [
            s.start
            for (kind, stage, *_), s in self.spans.items()
            if kind == "F" and stage in stages and s.device == device
        ]
        return min(starts, default=0.0)


def _one_at_a_time(lives: Sequence[Life]) -> Iterator[Life]:
    """Yields the most memory of uses that run at any time within their lives, but one after the other."""
    times = sorted({time for life in lives for time in (life.start, life.end)})
    for start, end in itertools.pairwise(times):
        yield Life(
            lives[0].device, start, end, max((x.bytes for x in lives if x.start <= start and end <= x.end), default=0.0)
        )


class _Crossing:
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
        """Returns until when a slice is needed, by its own stage and its receivers."""
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
