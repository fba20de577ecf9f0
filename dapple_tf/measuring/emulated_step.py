"""The TensorFlow graph of an emulated step: the schedule's tasks as waits, with the edges of a real step."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from dapple_tf.measuring.emulated_waits import Array, Port, StepClock, Wait
from dapple_tf.simulation.cost import CostModel
from dapple_tf.simulation.legs import Leg
from dapple_tf.simulation.simulated_reductions import Reductions, Unit, gradient_ends
from dapple_tf.simulation.simulation import Simulation
from dapple_tf.simulation.step_tasks import device_orders
from dapple_tf.view.timeline import Span
from graph_passes.ir.batching import Interval
from graph_passes.ir.tasks import Phase, Schedule, Task

_GRADIENTS = (Phase.BACKWARD, Phase.WEIGHT_GRAD)


@dataclass(frozen=True)
class _Made:
    """A node of the graph, and its wait."""

    tensor: tf.Tensor
    wait: Wait


class _Came(NamedTuple):
    """A tensor that has come to a device, and the waits after which it is there."""

    tensor: tf.Tensor
    waits: tuple[Wait, ...]


class _Part(NamedTuple):
    """What a task gets from a slice of another stage.

    Attributes:
        sender: the sending slice's task.
        leg: the leg over which it comes.
        samples: the samples.
        bytes: its size.
    """

    sender: Task
    leg: Leg
    samples: Interval
    bytes: float


class _Update(NamedTuple):
    """The update of a stage on one of its devices."""

    stage: int
    device: int
    replica: int


class EmulatedStep:
    """The graph of one step.

    Attributes:
        graph: the graph.
        end: the operation with which the step ends.
        spans: the spans; their times aren't known yet.
        orders: device -> its tasks in order.
    """

    def __init__(
        self,
        costs: CostModel,
        schedule: Schedule,
        clock: StepClock,
        simulated: Simulation,
        reduction_order: Sequence[int] | None = None,
        next_forward: bool = False,
    ) -> None:
        """Builds the graph.

        Args:
            costs: times of tasks, transfers and reductions.
            schedule: the order of tasks.
            clock: the clock that the nodes call.
            simulated: decides between which tasks a device makes its updates.
            reduction_order: as for :func:`dapple_tf.simulate`.
            next_forward: as for :func:`dapple_tf.simulate`.
        """
        self.costs, self.schedule, self.clock = costs, schedule, clock
        self.reductions = Reductions(costs, schedule, reduction_order)
        self.orders, self.next = device_orders(schedule, next_forward)
        self.spans: list[Span] = []
        used = sorted(costs.devices)
        self.number = {device: number for number, device in enumerate(used)}
        self.server = [device.server for device in costs.cluster.devices]
        self.last_gradients = schedule.last_gradients
        ends = gradient_ends(schedule, wait_free=costs.plan.wait_free)
        self.ready = {(schedule.device_of(end), stage): end for end, stages in ends.items() for stage in stages}
        self.made: dict[Task, _Made] = {}
        self.came: dict[tuple[int, Task], _Came] = {}  # (leg, slice's task) -> what has come over it
        self.sums: dict[tuple[int, Task], _Came] = {}  # (leg to the relay, its task) -> the gradients that it sends
        self.previous: dict[int, _Made] = {}  # device -> its latest work
        self.segments: dict[Task, dict[float, _Made]] = {}
        self.reduced: dict[tuple[int, int], list[_Made]] = {}  # (stage, device) -> its reductions
        self.turns: dict[int, _Made] = {}  # the last reduction of each device
        self.updated: dict[tuple[int, int], _Made] = {}  # (stage, device) -> its update
        self.ends: list[_Made] = []
        self.graph = tf.Graph()
        with self.graph.as_default():
            with self._on(used[0]):
                self.begin = tf.numpy_function(clock.begin, [], tf.float64, name="begin").op
            self._add_all(simulated)
            self.end = self._add_end(used[0])

    def _add_all(self, simulated: Simulation) -> None:
        """Adds tasks, reductions and updates, each after its inputs, in the simulated order."""
        phases = {phase.value: phase for phase in Phase}
        work: dict[int, list[Task | _Update]] = {}
        for device, spans in simulated.timeline.items():
            work[device] = [
                Task(span.stage, phases[span.kind], span.micro_batch, span.replica)
                if span.micro_batch is not None
                else _Update(span.stage, device, span.replica)
                for span in spans
            ]
        needs = {item: self._needs(item) for items in work.values() for item in items if isinstance(item, Task)}
        positions = dict.fromkeys(work, 0)
        units, reduced = self.reductions.units, 0
        moved = True
        while moved:
            moved = False
            while reduced < len(units) and self._completers(units[reduced]) <= self.made.keys():
                self._add_reduction(reduced, units[reduced])
                reduced, moved = reduced + 1, True
            for device, items in work.items():
                while positions[device] < len(items):
                    item = items[positions[device]]
                    last = max(self.reductions.of_stage[item.stage], default=-1)
                    if (isinstance(item, _Update) or item in self.next) and last >= reduced:
                        break
                    if isinstance(item, _Update):
                        self._add_update(item)
                    elif needs[item] <= self.made.keys():
                        self._add_task(item)
                    else:
                        break
                    positions[device] += 1
                    moved = True

    # ---- tasks

    def _slice(self, task: Task) -> Interval:
        """Returns a task's samples of the global batch."""
        return self.costs.plan.slices(task.stage, self.costs.micro_batches[task.micro_batch])[task.replica]

    def _sources(self, task: Task) -> Iterable[list[_Part]]:
        """Yields a task's inputs over each leg, in the order of samples."""
        for leg in self.costs.inputs(task.stage, task.phase, task.stage in self.schedule.split):
            if parts := self._parts_of(leg, task):
                yield parts

    def _parts_of(self, leg: Leg, task: Task) -> list[_Part]:
        """Returns what a task's slice gets over a leg: forward, or gradients."""
        backward = task.phase is not Phase.FORWARD
        stage, phase = leg.sending(backward, self.schedule.split)
        wanted, parts = self._slice(task), []
        for message in self.costs.leg_messages(leg, task.micro_batch, backward=backward):
            if message.receiver == task.replica:
                sender = Task(stage, phase, task.micro_batch, message.sender)
                parts.append(_Part(sender, leg, self._slice(sender).overlap(wanted), message.bytes))
        return parts

    def _feeders(self, leg: Leg, sender: Task) -> list[list[_Part]]:
        """Returns what a relay's slice waits for before it sends over a leg; nothing for what a task makes itself."""
        if sender.phase is Phase.FORWARD:
            return [] if leg.source is None else [self._parts_of(self.costs.legs[leg.source], sender)]
        return [parts for number in leg.onward if (parts := self._parts_of(self.costs.legs[number], sender))]

    def _makers(self, part: _Part) -> set[Task]:
        """Returns the tasks whose results a part is made of."""
        feeders = self._feeders(part.leg, part.sender)
        makers = {maker for parts in feeders for each in parts for maker in self._makers(each)}
        return makers if feeders and part.sender.phase is Phase.FORWARD else {part.sender, *makers}

    def _own(self, task: Task) -> Task | None:
        """Returns the task of the same stage and slice whose results it reads."""
        return next((other for other in self.schedule.inputs(task) if other.stage == task.stage), None)

    def _needs(self, task: Task) -> set[Task]:
        """Returns the tasks of this step that it waits for, besides the previous one on its device."""
        needed = {maker for parts in self._sources(task) for part in parts for maker in self._makers(part)}
        if (own := self._own(task)) is not None:
            needed.add(own)
        return needed if task in self.next else needed - self.next

    def _add_task(self, task: Task) -> None:
        device = self.schedule.device_of(task)
        own = self._slice(task)
        with self._on(device):
            tensors: list[tf.Tensor] = []
            after: list[Wait] = []
            kept = self._own(task)
            if kept is None or kept not in self.made:  # the last step's forwards are over
                tensors.append(tf.constant(_samples(own), tf.float64))
            else:
                size = self.costs.delayed_bytes(task.stage, own.size)
                arrived = self._transfer(self._result(kept), kept, task, own, size)
                tensors.append(arrived.tensor)
                after += arrived.waits
            for parts in self._sources(task):
                if all(maker in self.made for part in parts for maker in self._makers(part)):
                    come = self._arrived(parts, task)
                    tensors.append(come.tensor)
                    after += come.waits
            before_it = self._update_of(task) if task in self.next else []
            after += [made.wait for made in before_it]
            control = [made.tensor.op for made in before_it]
            server = self.server[device]
            span = self._span(task.phase.value, device, task.stage, task.micro_batch, task.replica)
            seconds, before = self.costs.seconds(task, device), 0.0
            made = None
            for part in self._parts(task, device):  # the last backward may be cut into pieces
                if made is not None:
                    tensors, after, control = [made.tensor], [made.wait], []
                wait = Wait(
                    f"{task}" if part == 1 else f"{task}/{part:.3f}",
                    span,
                    (part - before) * seconds * self.clock.scale,
                    after=tuple(after),
                    server=server if server in self.clock.cores else None,
                    expected=(_samples(own),) * len(tensors),
                )
                made = self._add(wait, tensors, device, control)
                self.segments.setdefault(task, {})[part] = made
                before = part
            assert made is not None
            self.made[task] = made

    def _parts(self, task: Task, device: int) -> list[float]:
        """Returns the fractions of a task's time after which its pieces end."""
        parts = {1.0}
        if self.last_gradients.get((device, task.stage)) == task:
            parts |= {self.reductions.units[unit].part for unit in self.reductions.of_stage[task.stage]}
        return sorted(parts)

    def _update_of(self, task: Task) -> list[_Made]:
        """Returns the update that a forward of the next step waits for; the reductions or gradients if it has none."""
        awaited = []
        for (device, stage), last in self.last_gradients.items():
            if (stage, last.replica) == (task.stage, task.replica):
                update = self.updated.get((stage, device))
                awaited += [update] if update else [*self.reduced.get((stage, device), ()), self.made[last]]
        return awaited

    def _result(self, task: Task) -> _Came:
        """Returns what a task has made."""
        return _Came(self.made[task].tensor, (self.made[task].wait,))

    def _arrived(self, parts: Sequence[_Part], receiver: Task) -> _Came:
        """Returns what has come to a slice over a leg."""
        key = (parts[0].leg.number, receiver)
        if key not in self.came:
            come = [self._transfer(self._sent(part), part.sender, receiver, *part[2:], part.leg) for part in parts]
            with tf.device(None), self._on(self.schedule.device_of(receiver)):
                tensor = _joined([each.tensor for each in come])
            self.came[key] = _Came(tensor, _waits(come))
        return self.came[key]

    def _sent(self, part: _Part) -> _Came:
        """Returns what a slice sends over a leg: a task's result, or what a relay hands on."""
        feeders = self._feeders(part.leg, part.sender)
        if not feeders:
            return self._result(part.sender)
        if part.sender.phase is Phase.FORWARD:
            return self._arrived(feeders[0], part.sender)
        key = (part.leg.number, part.sender)
        if key not in self.sums:
            come = [self._result(part.sender), *(self._arrived(parts, part.sender) for parts in feeders)]
            tensor = come[0].tensor
            with tf.device(None), self._on(self.schedule.device_of(part.sender)):
                for other in come[1:]:  # All are of the same samples; the clock checks what comes of it.
                    tensor = tf.where(tf.equal(tensor, other.tensor), tensor, np.nan)
            self.sums[key] = _Came(tensor, _waits(come))
        return self.sums[key]

    def _transfer(
        self, made: _Came, sender: Task, receiver: Task, interval: Interval, size: float, leg: Leg | None = None
    ) -> _Came:
        """Adds the transfer of a part of what a slice has to another slice's device.

        Args:
            made: what the sending slice has.
            sender: its task.
            receiver: the task of the receiving slice.
            interval: the samples that are sent.
            size: their bytes.
            leg: the leg over which they go; None from Bx to Bw.
        """
        source, target = self.schedule.device_of(sender), self.schedule.device_of(receiver)
        own = self._slice(sender)
        with tf.device(None), self._on(source):
            tensor = made.tensor
            if interval != own:
                sizes = [interval.start - own.start, interval.size, own.stop - interval.stop]
                tensor = tf.split(tensor, sizes, name=f"split/{sender}")[1]
            if source == target:
                return _Came(tensor, made.waits)
            link = self.costs.cluster.link(source, target)
            a, b = self.server[source], self.server[target]
            place = (source, sender.stage, sender.micro_batch, sender.replica, target, size)
            wait = Wait(
                f"send/{sender}/{receiver}",
                self._span("send", *place, leg=None if leg is None else leg.number),
                size / link.bandwidth * self.clock.scale,
                link.latency * self.clock.scale,
                made.waits,
                (("out", source), ("in", target)) if a == b else (("card out", a), ("card in", b)),
                (0, sender.replica, abs(receiver.stage - sender.stage) or self.costs.plan.num_stages, receiver.replica),
                expected=(_samples(interval),),
            )
            node = self._node(wait, [tensor], ())
            return _Came(node.tensor, (node.wait,))

    # ---- reductions and updates

    def _members(self, unit: Unit) -> Mapping[int, list[int]]:
        """Returns device -> the stages whose gradients it contributes to a reduction."""
        reduction = self.costs.reductions[unit.number]
        return {
            device: [stage for stage in reduction.stages if (device, stage) in self.last_gradients]
            for device in reduction.devices
        }

    def _completers(self, unit: Unit) -> set[Task]:
        """Returns the tasks after which a unit can be reduced."""
        return {self.ready[device, stage] for device, stages in self._members(unit).items() for stage in stages}

    def _add_reduction(self, position: int, unit: Unit) -> None:
        costs, reduction = self.costs, self.costs.reductions[unit.number]
        members = self._members(unit)
        servers = {self.server[device] for device in reduction.devices}
        ports: list[Port]
        if len(servers) > 1:
            ports = [(kind, server) for server in sorted(servers) for kind in ("card out", "card in")]
        else:
            ports = [(kind, device) for device in reduction.devices for kind in ("out", "in")]
        total = np.array([len(reduction.stages) * sum(range(costs.plan.global_batch_size))], np.float64)
        span = self._span("all_reduce", None, reduction.stages[0], None, size=unit.bytes, reduction=unit.number)
        after: dict[Wait, None] = {}
        vectors = {}
        for device, stages in members.items():
            parts = []
            for stage in stages:
                vector, waits = self._gradient(stage, device, unit.part)
                parts.append(vector)
                after |= dict.fromkeys(waits)
            with self._on(device):
                vectors[device] = parts[0] if len(parts) == 1 else tf.add_n(parts)
            if device in self.turns:
                after[self.turns[device].wait] = None
        for device in members:
            control = [self.turns[device].tensor.op] if device in self.turns else []
            control += [self.made[self.ready[device, stage]].tensor.op for stage in members[device] if unit.part == 1]
            with self._on(device), tf.control_dependencies(control):
                reduced = _all_reduce(vectors[device], len(members), unit.number + 1, position + 1)
            wait = Wait(
                f"all_reduce{unit.number}/{position}/{device}",
                span,
                costs.reduction_seconds(reduction, unit.bytes) * self.clock.scale,
                after=tuple(after),
                ports=tuple(ports),
                turn=(1, position),
                expected=(total,),
            )
            with self._on(device):
                made = self._node(wait, [reduced], ())
            self.ends.append(made)
            self.turns[device] = made
            for stage in members[device]:
                self.reduced.setdefault((stage, device), []).append(made)

    def _gradient(self, stage: int, device: int, part: float) -> tuple[tf.Tensor, list[Wait]]:
        """Returns a device's sum over all samples, once this part of its last backward is over."""
        gradients = [task for task in self.schedule.orders[device] if task.stage == stage and task.phase in _GRADIENTS]
        segments = self.segments[gradients[-1]]
        last = segments.get(part, segments[1.0])
        waits = [last.wait] if part in segments and part < 1 else [last.wait, self.made[self.ready[device, stage]].wait]
        with self._on(device):
            tensors = [*(self.made[task].tensor for task in gradients[:-1]), last.tensor]
            return tf.reshape(tf.reduce_sum(_joined(tensors)), [1]), waits

    def _add_update(self, update: _Update) -> None:
        stage, device, replica = update
        reduced = self.reduced.get((stage, device), [])
        last = self.made[self.ready[device, stage]]
        server = self.server[device]
        wait = Wait(
            f"apply/{stage}/{replica}",
            self._span("apply", device, stage, None, replica),
            self.costs.apply_seconds(stage, device) * self.clock.scale,
            after=(*(made.wait for made in reduced), last.wait),
            server=server if server in self.clock.cores else None,
            expected=tuple(made.wait.expected[0] for made in reduced) or (np.zeros(1),),
        )
        with self._on(device):
            tensors = [made.tensor for made in reduced] or [tf.zeros(1, tf.float64)]
            self.updated[stage, device] = self._add(wait, tensors, device, [last.tensor.op])

    def _add_end(self, device: int) -> tf.Operation:
        ends = [*self.previous.values(), *self.ends]
        wait = Wait(
            "end", -1, self.costs.profile.step_seconds * self.clock.scale, after=tuple(made.wait for made in ends)
        )
        with self._on(device), tf.control_dependencies([made.tensor.op for made in ends]):
            finish = functools.partial(self.clock.finish, wait)
            return tf.numpy_function(finish, [], tf.float64, name="end").op

    # ---- nodes

    def _on(self, device: int) -> Any:
        return tf.device(f"/job:localhost/replica:0/task:0/device:CPU:{self.number[device]}")

    def _span(
        self,
        kind: str,
        device: int | None,
        stage: int,
        micro_batch: int | None,
        replica: int = 0,
        target: int | None = None,
        size: float = 0.0,
        reduction: int | None = None,
        leg: int | None = None,
    ) -> int:
        place = (device, stage, micro_batch, replica, target, size)
        self.spans.append(Span(kind, 0.0, 0.0, *place, reduction=reduction, leg=leg))
        return len(self.spans) - 1

    def _add(
        self, wait: Wait, tensors: Sequence[tf.Tensor], device: int, control: Sequence[tf.Operation] = ()
    ) -> _Made:
        """Adds work of a device, after its previous work."""
        if device in self.previous:
            control = [*control, self.previous[device].tensor.op]
            wait = dataclasses.replace(wait, after=(*wait.after, self.previous[device].wait))
        self.previous[device] = self._node(wait, tensors, control)
        return self.previous[device]

    def _node(self, wait: Wait, tensors: Sequence[tf.Tensor], control: Sequence[tf.Operation]) -> _Made:
        with tf.control_dependencies([*control] if wait.after else [self.begin]):
            tensor = tf.numpy_function(functools.partial(self.clock.wait, wait), tensors, tf.float64, name=wait.name)
        tensor.set_shape([None])
        return _Made(tensor, wait)


def _samples(interval: Interval) -> Array:
    return np.arange(interval.start, interval.stop, dtype=np.float64)


def _waits(come: Sequence[_Came]) -> tuple[Wait, ...]:
    return tuple(dict.fromkeys(wait for each in come for wait in each.waits))


def _joined(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, 0)


def _all_reduce(vector: tf.Tensor, members: int, group: int, instance: int) -> tf.Tensor:
    return tf.raw_ops.CollectiveReduceV2(
        input=vector,
        group_size=members,
        group_key=group,
        instance_key=instance,
        ordering_token=[],
        merge_op="Add",
        final_op="Id",
    )
