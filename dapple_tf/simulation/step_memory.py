"""How long each buffer of a simulated step lives, and on which device.

A buffer stays on the device that makes it until its last reader ends. Devices that share the host's memory (logical CPU
devices of one process) read it there; others hold a copy from its arrival to their last reader's end.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from dapple_tf.simulation.activities import JOIN
from dapple_tf.view.timeline import Span
from graph_passes.ir.batching import Interval
from graph_passes.ir.tasks import Phase

if TYPE_CHECKING:
    from dapple_tf.describe.profile import Tensor
    from dapple_tf.simulation.simulation import Simulation
    from dapple_tf.simulation.stage_cost import StageBuffers

F, B, BX, BW = Phase.FORWARD, Phase.BACKWARD, Phase.INPUT_GRAD, Phase.WEIGHT_GRAD


class Life(NamedTuple):
    """The life of a buffer, or of a task's working memory.

    Attributes:
        device: where it is.
        start: when it is allocated, in seconds.
        end: when it is freed, in seconds; before its start if it was allocated in the previous step.
        bytes: its size.
    """

    device: int
    start: float
    end: float
    bytes: float


class _Slice(NamedTuple):
    """A replica's work for a micro-batch.

    Attributes:
        stage: its stage.
        micro_batch: its micro-batch.
        device: where it runs.
        part: its samples of the micro-batch.
        forward: its F.
        backward: its B or Bx; Bw where Bx has nothing to do.
        weight: its B or Bw; Bx where Bw has nothing to do.
    """

    stage: int
    micro_batch: int
    device: int
    part: Interval
    forward: Span
    backward: Span
    weight: Span


class _Message(NamedTuple):
    """What a slice sends to another one.

    Attributes:
        sender: the sending slice.
        receiver: the receiving slice.
        ready: when the sender has it.
        arrival: when the receiver has it.
        shared: whether the receiver's device reads the sender's memory in place.
    """

    sender: _Slice
    receiver: _Slice
    ready: float
    arrival: float
    shared: bool

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self.sender.part.overlap(self.receiver.part).size

    @property
    def inside(self) -> bool:
        """Whether the receiver reads the sender's slice in place; several parts become a tensor of its own."""
        return self.shared and self.samples == self.receiver.part.size


_Messages = Mapping[tuple[int, bool], Sequence[_Message]]
"""(leg, whether gradients) -> its messages."""


class StepMemory:
    """The lives of all buffers of a simulated step, or of the sums in a profile without buffers."""

    def __init__(self, step: Simulation) -> None:
        self.costs, self.graph = step.costs, step.graph
        self.activities = self.graph.activities
        self.stage_of = self.costs.profile.stage_of_layers(self.costs.plan.cuts)
        self.spans = {span.activity: span for span in step.spans}
        self.none = Span("", step.latency, step.latency, None, 0)
        self.trains = any(span.kind in (B.value, BW.value) for span in step.spans)
        # (stage, micro-batch, replica) -> its work
        self.slices: dict[tuple[int, int | None, int], _Slice] = dict(self._slices())

    @functools.cached_property
    def inputs(self) -> list[list[int]]:
        """Each activity's predecessors."""
        return self.graph.inputs()

    def _slices(self) -> Iterator[tuple[tuple[int, int, int], _Slice]]:
        costs, split = self.costs, self.graph.schedule.split
        backward = [costs.gradient_phase(stage, stage in split) for stage in range(costs.plan.num_stages)]
        weight = [BW if s in split and costs.computes(s, BW) else phase for s, phase in enumerate(backward)]
        tasks = {(span.kind, *span[4:7]): span for span in self.spans.values()}
        for (kind, stage, micro_batch, replica), span in tasks.items():
            if kind == F.value and micro_batch is not None:
                part, place = costs.slices(stage, micro_batch)[replica], (stage, micro_batch, replica)
                others = (tasks.get((phases[stage].value, *place), self.none) for phases in (backward, weight))
                if part.size:
                    yield place, _Slice(stage, micro_batch, costs.plan.devices[stage][replica], part, span, *others)

    def _end(self, number: int) -> float:
        """Returns when an activity is over, a join with the last of its inputs; 0 if that was in the step before."""
        if self.activities[number].kind == JOIN:
            return max(map(self._end, self.inputs[number]), default=0.0)
        return self.spans[number].end if number in self.spans else 0.0

    def lives(self) -> Iterator[Life]:
        """Yields the life of each buffer, and of each task's working memory."""
        costs = self.costs
        for own in self.slices.values() if self.trains else ():
            buffers = costs.stages[own.stage].buffers
            yield from self._summed(own) if buffers is None else self._inside(own, buffers)
        if not costs.profile.has_buffers:
            yield from self._relayed(self._messages()) if costs.plan.relays else ()
            yield from self._reductions()
            return
        messages = self._messages()
        for position, tensor in enumerate(costs.profile.tensors):
            legs = [leg.number for leg in costs.legs if position in leg.tensors]
            sent, returned = ([one for leg in legs for one in messages[leg, back]] for back in (False, True))
            gradients = self._gradients(tensor, returned) if tensor.differentiable else ()
            # A buffer that is handed on at once is part of its maker's working memory.
            lives = itertools.chain(self._crossing(tensor, sent), gradients)
            yield from (life for life in lives if life.end != life.start)
        yield from self._updates()

    # ---- a stage's own

    def _inside(self, own: _Slice, buffers: StageBuffers) -> Iterator[Life]:
        device, samples, start, last = own.device, own.part.size, own.forward.start, own.weight.end
        delayed = buffers.delayed.at(samples)
        yield Life(device, start, last, delayed)
        yield Life(device, start, own.backward.end, max(0.0, buffers.residual.at(samples) - delayed))
        if own.backward != own.weight:
            yield Life(device, own.backward.start, last, buffers.partial.at(samples))
            yield Life(device, own.backward.start, own.backward.end, buffers.working_input(samples))
            yield Life(device, own.weight.start, last, buffers.working_weight(samples))
        else:
            yield Life(device, own.weight.start, last, buffers.working(samples))
        update = self.graph.updates[device, own.stage]
        applied = self.spans.get(update, self.none).end
        if rows := buffers.rows.at(samples):
            yield Life(device, last, max(last, applied), rows)
        if not self.costs.plan.accumulates():
            packed = [self._complete(updates) for updates in self.graph.reduced.values() if update in updates]
            taken = max(last, *packed) if packed else applied
            yield Life(device, last, taken, buffers.gradients)
            if packed:  # into vectors that exist at the same time
                yield Life(device, taken, taken, buffers.gradients)

    def _summed(self, own: _Slice) -> Iterator[Life]:
        """Yields the lives of a slice's residuals, and of tasks' working memory, in a profile without buffers."""
        costs, stage, samples = self.costs, own.stage, own.part.size
        kept = costs.residual_bytes(stage, samples)
        yield Life(own.device, own.forward.start, own.backward.end, kept)
        tasks = [(B, own.weight, kept)]
        if own.backward != own.weight:
            delayed = costs.delayed_bytes(stage, samples)
            yield Life(own.device, own.backward.end, own.weight.end, delayed)
            tasks = [(BX, own.backward, max(0.0, kept - delayed)), (BW, own.weight, delayed)]
        for phase, (_, start, end, *_), freed in tasks:
            working = costs.working_bytes(stage, samples, phase)
            # A task of no time needs what it frees all the same.
            yield Life(own.device, start, end, working + freed if start == end else working)

    # ---- between stages

    def _messages(self) -> _Messages:
        """Returns the messages between stages; what the step before has sent is there from the start."""
        messages = defaultdict[tuple[int, bool], list[_Message]](list)
        for number, (activity, after) in enumerate(zip(self.activities, self.graph.after, strict=True)):
            if activity.leg is None or activity.target is None or not after:
                continue
            reader, micro_batch = self.activities[number + after[0]], self.graph.micro_batch[number]
            own = self.slices.get((activity.stage, micro_batch, activity.replica))
            other = self.slices.get((reader.stage, micro_batch, reader.replica))
            # Forwards of the next step have messages of their own.
            if own is not None and other is not None and (reader.kind == JOIN or number + after[0] in self.spans):
                shared = self.costs.cluster.shares_memory(own.device, other.device)
                one = _Message(own, other, self._end(self.inputs[number][0]), self._end(number), shared)
                messages[activity.leg, own.stage > other.stage].append(one)
        return messages

    def _relayed(self, messages: _Messages) -> Iterator[Life]:
        """Yields what relays hold for others, from its arrival until it has been sent, in a profile without buffers.

        What their own tasks keep is left out: a forward's inputs count from its start on.
        """
        for leg, back in itertools.product(self.costs.legs, (False, True)):
            come, go = (leg.onward, [leg.number]) if back else ([leg.number], leg.onward)
            came, left = (defaultdict[_Slice, list[float]](list) for _ in range(2))
            for number in (*come, *go) if leg.onward else ():
                for one in messages[number, back]:
                    if one.sender.device != one.receiver.device:
                        (came[one.receiver] if number in come else left[one.sender]).append(one.arrival)
            for own, arrivals in came.items():
                end = max(left[own], default=0.0)
                end = end if back else min(end, own.forward.start)
                if end > min(arrivals):
                    size = leg.backward if back else leg.forward
                    yield Life(own.device, min(arrivals), end, size.at(own.part.size))

    def _crossing(self, tensor: Tensor, sent: Sequence[_Message]) -> Iterator[Life]:
        """Yields the lives of a tensor that other stages read, and of its copies on other devices.

        The slice of a relay is there until it has been handed on.
        """
        maker, size = self.stage_of[tensor.producer], tensor.bytes
        kept = {self.stage_of[layer] for layer in tensor.kept} if self.trains else set()
        delayed = {self.stage_of[layer] for layer in tensor.delayed}
        makers = [own for own in self.slices.values() if own.stage == maker]
        onward = defaultdict[_Slice, list[_Message]](list)
        for one in sent:
            onward[one.sender].append(one)
        # A backward alone may read it, where another tensor has the same memory.
        others = kept - {maker} - {one.receiver.stage for one in sent}
        for own, other in itertools.product(makers, self.slices.values()) if others else ():
            if other.stage in others and other.micro_batch == own.micro_batch:
                shared = self.costs.cluster.shares_memory(own.device, other.device)
                onward[own].append(_Message(own, other, 0.0, 0.0, shared))

        def used(own: _Slice) -> float:
            """Returns until when a slice is needed, by its own stage and its receivers."""
            late = own.weight if own.stage in delayed else own.backward
            reader = late if own.stage in kept else own.forward
            return max([reader.end, *(used(one.receiver) if one.inside else one.arrival for one in onward[own])])

        for own in makers if onward else ():
            # A backward that comes before is that of an earlier step's forward.
            end = own.weight.end if own.weight.end < own.forward.start else used(own)
            yield Life(own.device, own.forward.start, end, size.at(own.part.size))
        for one in sent:
            if not one.inside:
                yield Life(one.receiver.device, one.arrival, used(one.receiver), size.at(one.samples))

    def _gradients(self, tensor: Tensor, returned: Sequence[_Message]) -> Iterator[Life]:
        """Yields the lives of a tensor's gradients; the sum of several is there until it has been used, or sent."""
        gradients = defaultdict[_Slice, list[_Message]](list)
        for one in returned:
            gradients[one.receiver].append(one)
        for own, parts in gradients.items():
            relay, made = own.stage != self.stage_of[tensor.producer], own.backward.end
            if relay:  # It adds its own.
                parts.append(_Message(own, own, made, made, shared=True))
            joined, several = max(one.arrival for one in parts), len(parts) > 1
            use = joined if relay else own.weight.end if tensor.gradient_delayed else made
            for one in parts:
                end, size = joined if several else use, tensor.bytes.at(one.samples)
                yield Life(one.sender.device, one.ready, end if one.shared else one.arrival, size)
                if not one.shared:
                    yield Life(own.device, one.arrival, end, size)
            if several:
                yield Life(own.device, joined, use, tensor.bytes.at(own.part.size))

    # ---- reductions and updates

    def _reductions(self) -> Iterator[Life]:
        """Yields the lives of reductions' buffers in a profile without buffers."""
        units = defaultdict[int, list[Span]](list)
        for span in self.spans.values():
            if span.reduction is not None:
                units[span.reduction].append(span)
        for number, own in units.items():
            start, end = min(unit.start for unit in own), max(unit.end for unit in own)
            for device in self.costs.reductions[number].devices:
                yield Life(device, start, end, self.costs.reductions[number].bytes)

    def _updates(self) -> Iterator[Life]:
        """Yields the lives of packed gradients, from the last task to the update, and of updates' working memory.

        An update runs as soon as its gradients are reduced, on a thread of its own beside the device's tasks.
        """
        pending = defaultdict[int, list[Life]](list)
        for (reduction, device), updates in self.graph.reduced.items():
            before = (other for other in self._inputs(updates) if self.activities[other].reduction in (None, reduction))
            end = max(map(self._end, before)) + max(self.activities[update].seconds for update in updates)
            yield Life(device, self._complete(updates), end, self.costs.reductions[reduction].bytes)
        for (device, stage), update in self.graph.updates.items():
            ready, seconds = max(map(self._end, self.inputs[update]), default=0.0), self.activities[update].seconds
            pending[device].append(Life(device, ready, ready + seconds, self.costs.apply_bytes(stage)))
        for lives in pending.values():
            yield from _one_at_a_time(lives)

    def _inputs(self, updates: Iterable[int]) -> Iterator[int]:
        """Yields the tasks and reductions for which updates wait."""
        return itertools.chain.from_iterable(self.inputs[update] for update in updates)

    def _complete(self, updates: Iterable[int]) -> float:
        """Returns when a device has all gradients of updates; 0 if they are the previous step's."""
        tasks = (other for other in self._inputs(updates) if self.graph.micro_batch[other] is not None)
        return max(map(self._end, tasks), default=0.0)


def _one_at_a_time(lives: Sequence[Life]) -> Iterator[Life]:
    """Yields the most memory of uses that run at any time within their lives, but one after the other."""
    times = sorted({time for life in lives for time in (life.start, life.end)})
    for start, end in itertools.pairwise(times):
        size = max((life.bytes for life in lives if life.start <= start and end <= life.end), default=0.0)
        yield Life(lives[0].device, start, end, size)
