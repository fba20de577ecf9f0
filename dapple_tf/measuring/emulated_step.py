"""The TensorFlow graph of an emulated step: its activities as waits, with the edges of a real step."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from dapple_tf.measuring.emulated_waits import Array, StepClock, Wait
from dapple_tf.simulation.activities import APPLY, JOIN, Activity, ActivityGraph
from dapple_tf.simulation.simulation import Simulation
from dapple_tf.view.timeline import ALL_REDUCE, Span
from graph_passes.ir.batching import Interval
from graph_passes.ir.tasks import Phase, Task

_GRADIENTS = (Phase.BACKWARD, Phase.WEIGHT_GRAD)


class _Made(NamedTuple):
    """The result of an activity.

    Attributes:
        waits: the waits after which it is there.
        ops: the operations after which it is there.
        tensors: its samples; none of a reduction or an update.
    """

    waits: tuple[Wait, ...]
    ops: tuple[tf.Operation, ...]
    tensors: tuple[tf.Tensor, ...] = ()


class EmulatedStep:
    """The graph of one step.

    Attributes:
        graph: the graph.
        end: the operation with which the step ends.
        spans: the spans; their times aren't known yet.
        orders: device -> its tasks in order.
    """

    def __init__(self, step: ActivityGraph, clock: StepClock, simulated: Simulation) -> None:
        """Builds the graph.

        Args:
            step: the activities.
            clock: the clock that the nodes call.
            simulated: decides between which tasks a device makes its updates.
        """
        self.step, self.costs, self.clock = step, step.costs, clock
        self.orders = step.orders
        self.inputs = step.inputs()
        self.spans: list[Span] = []
        used = sorted(self.costs.devices)
        self.number = {device: number for number, device in enumerate(used)}
        self.server = [device.server for device in self.costs.cluster.devices]
        self.made: dict[int, _Made] = {}
        self.pieces: dict[tuple[int, int], _Made] = {}  # (task, reduction) -> the task's part before it
        self.reduced: dict[tuple[int, int | None], _Made] = {}  # (reduction, device) -> its sum
        self.previous: dict[int, _Made] = {}  # device -> its latest work
        self.turns: dict[int, _Made] = {}  # device -> its latest reduction
        self.ends: list[_Made] = []
        self.graph = tf.Graph()
        with self.graph.as_default():
            with self._on(used[0]):
                self.begin = tf.numpy_function(clock.begin, [], tf.float64, name="begin").op
            for number in self._in_order(simulated):
                self._add(number, step.activities[number])
            self.end = self._add_end(used[0])

    def _in_order(self, simulated: Simulation) -> list[int]:
        """Returns all activities, each after its inputs and its device's previous work."""
        step, order = self.step, []
        phases = {phase.value: phase for phase in Phase}
        updates = {
            (activity.device, activity.stage): number
            for number, activity in enumerate(step.activities)
            if activity.kind == APPLY
        }
        waiting = step.waiting.copy()
        after: dict[int, list[int]] = defaultdict(list)
        first = dict.fromkeys(step.first)
        for device, spans in simulated.timeline.items():
            work = [
                updates[device, span.stage]
                if span.micro_batch is None
                else step.number(Task(span.stage, phases[span.kind], span.micro_batch, span.replica))
                for span in spans
            ]
            for before, number in itertools.pairwise(work):
                after[before].append(number)
                waiting[number] += 1
            first |= dict.fromkeys(work[:1])
        for number, units in step.early.items():
            after[number] += [unit for unit, _ in units]
        ready = deque(number for number in first if not waiting[number])
        while ready:
            number = ready.popleft()
            order.append(number)
            for other in (*(number + difference for difference in step.after[number]), *after[number]):
                waiting[other] -= 1
                if not waiting[other]:
                    ready.append(other)
        return order

    def _add(self, number: int, activity: Activity) -> None:
        if activity.kind == ALL_REDUCE:
            self._add_reduction(number, activity)
        elif activity.kind == APPLY:
            self._add_update(number, activity)
        elif activity.target is not None:
            self._add_message(number, activity)
        elif activity.kind != JOIN:
            self._add_task(number, activity)
        elif activity.leg is not None:
            self._add_relay(number, activity)
        else:  # An update that takes no time.
            before = self._before(number)
            self.made[number] = _Made(_waits(before), _ops(before))

    def _before(self, number: int) -> list[_Made]:
        """Returns all that an activity waits for on its device."""
        device = self.step.activities[number].device
        return [self.reduced.get((other, device)) or self.made[other] for other in self.inputs[number]]

    # ---- tasks and messages

    def _slice(self, number: int) -> Interval:
        """Returns the samples of an activity, of the global batch."""
        activity, micro_batch = self.step.activities[number], self.step.micro_batch[number]
        assert micro_batch is not None
        return self.costs.plan.slices(activity.stage, self.costs.micro_batches[micro_batch])[activity.replica]

    def _received(self, number: int) -> list[_Made]:
        """Returns what an activity gets over each leg, joined in the order of samples."""
        legs: dict[int | None, list[int]] = {}
        for other in self.inputs[number]:
            if self.step.activities[other].target is not None:
                legs.setdefault(self.step.activities[other].leg, []).append(other)
        received = []
        for parts in legs.values():
            come = [
                self.made[part]
                for part in sorted(parts, key=lambda part: self.step.activities[part].replica)
                if part in self.made
            ]
            # The rest has come in the last step.
            tensors = (_joined([each.tensors[0] for each in come]),) if len(come) == len(parts) else ()
            received.append(_Made(_waits(come), _ops(come), tensors))
        return received

    def _add_task(self, number: int, activity: Activity) -> None:
        device, micro_batch = activity.device, self.step.micro_batch[number]
        assert device is not None and micro_batch is not None
        own, task = self._slice(number), Task(activity.stage, Phase(activity.kind), micro_batch, activity.replica)
        with self._on(device):
            kept = next((other for other in self.step.schedule.inputs(task) if other.stage == task.stage), None)
            before = self._received(number)
            if kept is not None and (made := self.made.get(self.step.number(kept))) is not None:
                before.insert(0, made)
            else:  # The last step's forwards are over.
                before.insert(0, _Made((), (), (tf.constant(_samples(own), tf.float64),)))
            tensors = [tensor for each in before for tensor in each.tensors]
            before += [self.made[other] for other in self.inputs[number] if self.step.micro_batch[other] is None]
            control = [*_ops(before)]
            after, span, done = _waits(before), self._span(number, activity), 0.0
            early = self.step.early.get(number, ())
            for part in sorted({1.0, *(end for _, end in early)}):  # the last backward may be cut into pieces
                wait = Wait(
                    f"{task}" if part == 1 else f"{task}/{part:.3f}",
                    span,
                    (part - done) * activity.seconds * self.clock.scale,
                    after=after,
                    server=self._cores(device),
                    expected=(_samples(own),) * len(tensors),
                )
                self.made[number] = self._add_work(wait, tensors, device, control)
                for unit, end in early:
                    if end == part:
                        self.pieces[number, unit] = self.made[number]
                after, tensors, control, done = self.made[number].waits, [*self.made[number].tensors], [], part

    def _add_message(self, number: int, activity: Activity) -> None:
        """Adds a message to another slice, or a look-up of rows, which depends on no tensor."""
        receiver = number + self.step.after[number][0]
        before = self._before(number)
        assert activity.device is not None
        with tf.device(None), self._on(activity.device):
            if activity.leg is None:
                interval = self._slice(receiver)
                tensor = tf.constant(_samples(interval), tf.float64)
            else:
                own = self._slice(self.inputs[number][0])
                interval, tensor = own.overlap(self._slice(receiver)), before[0].tensors[0]
                if interval != own:
                    sizes = [interval.start - own.start, interval.size, own.stop - interval.stop]
                    tensor = tf.split(tensor, sizes, name=f"split/{number}")[1]
            if activity.kind == JOIN:
                self.made[number] = _Made(before[0].waits, (tensor.op,), (tensor,))
                return
            reader = self.step.activities[receiver]
            distance = abs(reader.stage - activity.stage) or self.costs.plan.num_stages
            wait = Wait(
                f"send/{number}/{activity.device}/{activity.target}",
                self._span(number, activity),
                activity.seconds * self.clock.scale,
                activity.latency * self.clock.scale,
                _waits(before),
                activity.ports,
                (0, activity.replica, distance, reader.replica),
                expected=(_samples(interval),),
            )
            self.made[number] = self._node(wait, [tensor], _ops(before))

    def _add_relay(self, number: int, activity: Activity) -> None:
        """Adds a relay's slice: its leg's parts, or the sum of its own and returned gradients."""
        own = [
            self.made[other]
            for other in self.inputs[number]
            if other in self.made and self.step.activities[other].target is None
        ]
        assert activity.device is not None
        with tf.device(None), self._on(activity.device):
            come = [*own, *self._received(number)]
            tensor, *others = [tensor for each in come for tensor in each.tensors] or [
                tf.constant(_samples(self._slice(number)), tf.float64)
            ]
            for other in others:  # All are of the same samples; the clock checks what comes of it.
                tensor = tf.where(tf.equal(tensor, other), tensor, np.nan)
        self.made[number] = _Made(_waits(come), (tensor.op,), (tensor,))

    # ---- reductions and updates

    def _add_reduction(self, number: int, activity: Activity) -> None:
        assert activity.reduction is not None
        costs, reduction = self.costs, self.costs.reductions[activity.reduction]
        total = np.array([len(reduction.stages) * sum(range(costs.plan.global_batch_size))], np.float64)
        before = [self.made[other] for other in self.inputs[number] if other in self.made]
        before += [made for (_, unit), made in self.pieces.items() if unit == number]
        before += [self.turns[device] for device in reduction.devices if device in self.turns]
        after, span = _waits(before), self._span(number, activity)
        vectors = {device: self._gradient(number, device, reduction.stages) for device in reduction.devices}
        for device in reduction.devices:
            control = [*self.turns[device].ops] if device in self.turns else []
            for other in self.inputs[number]:
                if self.step.activities[other].device == device:
                    control += self.made[other].ops
            wait = Wait(
                f"all_reduce{activity.reduction}/{number - self.step.base}/{device}",
                span,
                activity.seconds * self.clock.scale,
                after=after,
                ports=activity.ports,
                turn=(1, number),
                expected=(total,),
            )
            with self._on(device):
                with tf.control_dependencies(control):
                    summed = _all_reduce(
                        vectors[device], len(reduction.devices), activity.reduction + 1, number - self.step.base + 1
                    )
                made = self._node(wait, [summed], ())
            self.turns[device] = made
            self.reduced[number, device] = made
            self.ends.append(made)

    def _gradient(self, number: int, device: int, stages: Sequence[int]) -> tf.Tensor:
        """Returns a device's sum over all samples of stages, the gradient of the reduction."""
        parts = []
        for task in self.step.schedule.orders[device]:
            if task.stage in stages and task.phase in _GRADIENTS:
                other = self.step.number(task)
                if task.stage in self.step.carried:  # of the last step
                    parts.append(tf.constant(_samples(self._slice(other)), tf.float64))
                else:
                    made = self.pieces.get((other, number)) or self.made[other]
                    parts.append(made.tensors[0])
        with self._on(device):
            return tf.reshape(tf.reduce_sum(_joined(parts)), [1])

    def _add_update(self, number: int, activity: Activity) -> None:
        device, before = activity.device, self._before(number)
        assert device is not None
        reduced = [self.reduced[other, device] for other in self.inputs[number] if (other, device) in self.reduced]
        wait = Wait(
            f"apply/{activity.stage}/{activity.replica}",
            self._span(number, activity),
            activity.seconds * self.clock.scale,
            after=_waits(before),
            server=self._cores(device),
            expected=tuple(made.waits[0].expected[0] for made in reduced) or (np.zeros(1),),
        )
        with self._on(device):
            tensors = [made.tensors[0] for made in reduced] or [tf.zeros(1, tf.float64)]
            self.made[number] = self._add_work(wait, tensors, device, _ops(before))

    def _add_end(self, device: int) -> tf.Operation:
        ends = [*self.previous.values(), *self.ends]
        wait = Wait("end", -1, self.costs.profile.step_seconds * self.clock.scale, after=_waits(ends))
        with self._on(device), tf.control_dependencies(_ops(ends)):
            finish = functools.partial(self.clock.finish, wait)
            return tf.numpy_function(finish, [], tf.float64, name="end").op

    # ---- nodes

    def _on(self, device: int) -> Any:
        return tf.device(f"/job:localhost/replica:0/task:0/device:CPU:{self.number[device]}")

    def _cores(self, device: int) -> int | None:
        """Returns the server whose cores a device shares."""
        return self.server[device] if self.server[device] in self.clock.cores else None

    def _span(self, number: int, activity: Activity) -> int:
        place = (activity.device, activity.stage, self.step.micro_batch[number], activity.replica, activity.target)
        self.spans.append(Span(activity.kind, 0.0, 0.0, *place, activity.bytes, None, activity.reduction, number))
        return len(self.spans) - 1

    def _add_work(
        self, wait: Wait, tensors: Sequence[tf.Tensor], device: int, control: Sequence[tf.Operation] = ()
    ) -> _Made:
        """Adds work of a device, after its previous work."""
        if device in self.previous:
            control = [*control, *self.previous[device].ops]
            wait = dataclasses.replace(wait, after=(*wait.after, *self.previous[device].waits))
        self.previous[device] = self._node(wait, tensors, control)
        return self.previous[device]

    def _node(self, wait: Wait, tensors: Sequence[tf.Tensor], control: Sequence[tf.Operation]) -> _Made:
        with tf.control_dependencies([*control] if wait.after else [self.begin]):
            tensor = tf.numpy_function(functools.partial(self.clock.wait, wait), tensors, tf.float64, name=wait.name)
        tensor.set_shape([None])
        return _Made((wait,), (tensor.op,), (tensor,))


def _samples(interval: Interval) -> Array:
    return np.arange(interval.start, interval.stop, dtype=np.float64)


def _waits(made: Sequence[_Made]) -> tuple[Wait, ...]:
    return tuple(dict.fromkeys(wait for each in made for wait in each.waits))


def _ops(made: Sequence[_Made]) -> tuple[tf.Operation, ...]:
    return tuple(dict.fromkeys(op for each in made for op in each.ops))


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
