"""The TensorFlow graph of an emulated step: the schedule's tasks as waits, with the edges that a real step has."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from dapple_tf.cost import CostModel, Reduction
from dapple_tf.emulated_waits import Array, Port, StepClock, Wait
from dapple_tf.simulator import Span, last_gradients
from graph_passes.batching import Interval, slice_intervals
from graph_passes.tasks import Phase, Schedule, Task


@dataclass(frozen=True)
class _Made:
    """A node of the graph, and the wait that it is."""

    tensor: tf.Tensor
    wait: Wait


class EmulatedStep:
    """The graph of one step.

    Attributes:
        graph: the graph.
        end: the operation that is over when the step is.
        spans: what each span is; its times aren't known yet.
    """

    def __init__(self, costs: CostModel, schedule: Schedule, clock: StepClock) -> None:
        self.costs, self.schedule, self.clock = costs, schedule, clock
        self.spans: list[Span] = []
        plan, cluster = costs.plan, costs.cluster
        used = sorted({device for group in plan.devices for device in group})
        self.number = {device: number for number, device in enumerate(used)}
        self.server = [device.server for device in cluster.devices]
        self.last_gradients = last_gradients(schedule)
        self.split = {task.stage for task in schedule.tasks if task.phase is Phase.INPUT_GRAD}
        self.made: dict[Task, _Made] = {}
        self.previous: dict[int, _Made] = {}
        self.segments: dict[Task, dict[float, _Made]] = {}
        self.reduced: dict[tuple[int, int], list[_Made]] = {}
        self.ends: list[_Made] = []
        self.collectives = 0
        self.graph = tf.Graph()
        with self.graph.as_default():
            with self._on(used[0]):
                self.begin = tf.numpy_function(clock.begin, [], tf.float64, name="begin").op
            for task in self._in_order():
                self._add_task(task)
            for number, reduction in enumerate(costs.reductions if self.last_gradients else ()):
                self._add_reduction(number, reduction)
            if self.last_gradients:
                self._add_updates()
            self.end = self._add_end(used[0])

    # ---- tasks

    def _slice(self, task: Task) -> Interval:
        """The samples of the global batch that are the task's."""
        costs = self.costs
        return slice_intervals(costs.micro_batches[task.micro_batch], len(costs.plan.devices[task.stage]))[task.replica]

    def _in_order(self) -> Iterable[Task]:
        """Every task after those that it needs; the simulator has shown that there is such an order."""
        arrows = {task: self._missing(task) for task in self.schedule.tasks}
        positions = dict.fromkeys(self.schedule.orders, 0)
        moved = True
        while moved:
            moved = False
            for device, tasks in self.schedule.orders.items():
                while positions[device] < len(tasks) and arrows[tasks[positions[device]]] <= self.made.keys():
                    yield tasks[positions[device]]
                    positions[device] += 1
                    moved = True

    def _sources(self, task: Task) -> Iterable[tuple[int, list[tuple[Task, Interval, float]]]]:
        """What a task gets from each other stage: (sender, samples, bytes) in the order of samples."""
        if task.phase is Phase.WEIGHT_GRAD:
            return
        costs, backward = self.costs, task.phase is not Phase.FORWARD
        wanted = self._slice(task)
        for producer, consumer in costs.routes:
            if task.stage != (producer if backward else consumer):
                continue
            other = consumer if backward else producer
            phase = Phase.FORWARD
            if backward:
                phase = Phase.INPUT_GRAD if other in self.split else Phase.BACKWARD
            found = []
            for piece in costs.pieces(producer, consumer, task.micro_batch, backward=backward):
                if piece.receiver == task.replica:
                    sender = Task(other, phase, task.micro_batch, piece.sender)
                    found.append((sender, self._slice(sender).overlap(wanted), piece.bytes))
            if found:
                yield other, found

    def _missing(self, task: Task) -> set[Task]:
        return {sender for _, pieces in self._sources(task) for sender, _, _ in pieces}

    def _add_task(self, task: Task) -> None:
        device = self.schedule.device_of(task)
        own = self._slice(task)
        with self._on(device):
            tensors: list[tf.Tensor] = []
            after: list[Wait] = []
            if task.phase is Phase.FORWARD:
                tensors.append(tf.constant(_samples(own), tf.float64))
            else:
                needed = Phase.INPUT_GRAD if task.phase is Phase.WEIGHT_GRAD else Phase.FORWARD
                kept = self.made[Task(task.stage, needed, task.micro_batch, task.replica)]
                tensors.append(kept.tensor)
                after.append(kept.wait)
            for _, pieces in self._sources(task):
                arrived = [self._transfer(sender, task, interval, size) for sender, interval, size in pieces]
                tensors.append(_joined([made.tensor for made in arrived]))
                after += [made.wait for made in arrived]
            server = self.server[device]
            span = self._span(task.phase.value, device, task.stage, task.micro_batch, task.replica)
            parts = [1.0]
            if self.costs.overlap and task in self.last_gradients and server not in self.clock.cores:
                parts = sorted({part for buckets in self._buckets(task.stage).values() for part, _ in buckets} | {1.0})
            seconds, before = self.costs.seconds(task), 0.0
            made = None
            for part in parts:  # the last backward is cut where a bucket is ready
                if made is not None:
                    tensors, after = [made.tensor], [made.wait]
                wait = Wait(
                    f"{task}" if part == 1 else f"{task}/{part:.3f}",
                    span,
                    (part - before) * seconds * self.clock.scale,
                    after=tuple(after),
                    server=server if server in self.clock.cores else None,
                    expected=(_samples(own),) * len(tensors),
                )
                made = self._add(wait, tensors, device)
                self.segments.setdefault(task, {})[part] = made
                before = part
            assert made is not None
            self.made[task] = made

    def _transfer(self, sender: Task, receiver: Task, interval: Interval, size: float) -> _Made:
        """One piece of what a task made, on the device of another task."""
        source, target = self.schedule.device_of(sender), self.schedule.device_of(receiver)
        made = self.made[sender]
        own = self._slice(sender)
        with tf.device(None), self._on(source):
            tensor = made.tensor
            if interval != own:
                sizes = [interval.start - own.start, interval.size, own.stop - interval.stop]
                tensor = tf.split(tensor, sizes, name=f"split/{sender}")[1]
            if source == target:
                return _Made(tensor, made.wait)
            link = self.costs.cluster.link(source, target)
            a, b = self.server[source], self.server[target]
            wait = Wait(
                f"send/{sender}/{receiver}",
                self._span("send", source, sender.stage, sender.micro_batch, sender.replica, target, size),
                size / link.bandwidth * self.clock.scale,
                link.latency * self.clock.scale,
                (made.wait,),
                (("out", source), ("in", target)) if a == b else (("card out", a), ("card in", b)),
                (0, sender.replica, abs(receiver.stage - sender.stage), receiver.replica),
                expected=(_samples(interval),),
            )
            return self._node(wait, [tensor], ())

    # ---- the end of the step

    def _buckets(self, stage: int) -> Mapping[int, tuple[tuple[float, float], ...]]:
        """Reduction -> (part of the last backward after which it is ready, bytes) of each of its buckets."""
        found = {}
        for number, reduction in enumerate(self.costs.reductions):
            if stage in reduction.stages:
                buckets: tuple[tuple[float, float], ...] = ((1.0, reduction.bytes),)
                if self.costs.overlap and len(reduction.stages) == 1:
                    buckets = self.costs.buckets(stage) or buckets
                found[number] = buckets
        return found

    def _add_reduction(self, number: int, reduction: Reduction) -> None:
        costs = self.costs
        members = [
            (stage, replica, device)
            for stage in reduction.stages
            for replica, device in enumerate(costs.plan.devices[stage])
        ]
        servers = {self.server[device] for device in reduction.devices}
        ports: list[Port]
        if len(servers) > 1:
            ports = [(kind, server) for server in sorted(servers) for kind in ("card out", "card in")]
        else:
            ports = [(kind, device) for device in reduction.devices for kind in ("out", "in")]
        total = np.array([len(reduction.stages) * sum(range(costs.plan.global_batch_size))], np.float64)
        previous: dict[int, tf.Operation] = {}
        for bucket, (part, size) in enumerate(self._buckets(reduction.stages[0])[number]):
            ready = [self._gradient(stage, device, part) for stage, _, device in members]
            span = self._span("all_reduce", None, reduction.stages[0], None, size=size)
            seconds = costs.reduction_seconds(reduction, size) * self.clock.scale
            self.collectives += 1
            for (stage, _, device), (vector, _) in zip(members, ready, strict=True):
                with self._on(device), tf.control_dependencies([previous[device]] if device in previous else []):
                    reduced = _all_reduce(vector, len(members), number + 1, self.collectives)
                previous[device] = reduced.op
                wait = Wait(
                    f"all_reduce{number}/{bucket}/{device}",
                    span,
                    seconds,
                    after=tuple(wait for _, wait in ready),
                    ports=tuple(ports),
                    turn=(1, number, bucket),
                    expected=(total,),
                )
                with self._on(device):
                    made = self._node(wait, [reduced], ())
                self.reduced.setdefault((stage, device), []).append(made)
                self.ends.append(made)

    def _gradient(self, stage: int, device: int, part: float) -> tuple[tf.Tensor, Wait]:
        """The sum over all samples of a device, once this part of its last backward is over."""
        gradients = [
            task
            for task in self.schedule.orders[device]
            if task.stage == stage and task.phase in (Phase.BACKWARD, Phase.WEIGHT_GRAD)
        ]
        segments = self.segments[gradients[-1]]
        last = segments.get(part, segments[1.0])  # on shared cores a backward isn't cut
        with self._on(device):
            tensors = [*(self.made[task].tensor for task in gradients[:-1]), last.tensor]
            return tf.reshape(tf.reduce_sum(_joined(tensors)), [1]), last.wait

    def _add_updates(self) -> None:
        for stage, devices in enumerate(self.costs.plan.devices):
            for replica, device in enumerate(devices):
                seconds = self.costs.apply_seconds(stage, device)
                if not seconds or device not in self.previous:
                    continue
                reduced = self.reduced.get((stage, device), ())
                server = self.server[device]
                wait = Wait(
                    f"apply/{stage}/{replica}",
                    self._span("apply", device, stage, None, replica),
                    seconds * self.clock.scale,
                    after=tuple(made.wait for made in reduced),
                    server=server if server in self.clock.cores else None,
                    expected=tuple(made.wait.expected[0] for made in reduced) or (np.zeros(1),),
                )
                with self._on(device):
                    tensors = [made.tensor for made in reduced] or [tf.zeros(1, tf.float64)]
                    self._add(wait, tensors, device)

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
    ) -> int:
        self.spans.append(Span(kind, 0.0, 0.0, device, stage, micro_batch, replica, target, size))
        return len(self.spans) - 1

    def _add(self, wait: Wait, tensors: Sequence[tf.Tensor], device: int) -> _Made:
        """Adds what a device computes, after what it computed before."""
        control = [self.previous[device].tensor.op] if device in self.previous else []
        if device in self.previous:
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


# ---- checks
