"""Connects the replicas of stages, whatever their numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from tensorflow.core.framework import types_pb2

from graph_passes.ir.connections import check_rows
from graph_passes.ir.graph import FLOAT_DTYPES, Builder, Ref, copied, dtype_attr, substitute
from graph_passes.ir.node_kinds import NodeKind, task_attrs
from graph_passes.ir.program import Boundary, Fact, Program, Step, Value, ValueKind
from graph_passes.ir.tasks import Phase, Task, sources_of


@dataclasses.dataclass(frozen=True)
class SplitConcat:
    """Connects pending tensors between stages, for any n : m replicas.

        3 replicas [0,2) [2,4) [4,5)  ->  2 replicas [0,3) [3,5)
        sender 0 sends all to 0; sender 1 splits [2,3) to 0 and [3,4) to 1; sender 2 sends all to 1

    Slices go from replica to replica, never through a gather on one device; gradients flow back the same way. Where
    an axis has several parts with rows of all samples (`Boundary.outer`), each is split, and joined, for itself. A
    tensor that has no batch axis (a loss term of an earlier stage, say) is the mean over the sender's slices, weighted
    by their samples; its gradient is shared out by the same weights.

    A stage gets a tensor from its maker, or from a stage between them that reads it as well and is one of ``relays``
    (`sources_of`). It is handed on as soon as it is there. A relay adds the gradients that come back to its own, and
    sends the sum on.

        made by 0, read by 1 and 2:     0 -> 1, 0 -> 2      with relays (1,):   0 -> 1 -> 2
        gradients:                      0 <- 1, 0 <- 2                          0 <- (1 + 2) <- 2

    Source: DAPPLE (PPoPP'21), section 5.2.2; arXiv 2007.01045, figure 9 (b) to (d).

    Attributes:
        relays: the stages that hand on what they read.
    """

    relays: tuple[int, ...] = ()
    name: ClassVar[str] = "split_concat"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.STEP,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.CONNECTED,)

    def run(self, program: Program) -> Program:
        """Program after ``replicate`` -> the same with boundary tensors and their gradients connected.

        Raises:
            PassError: a tensor would have to be split or joined, and can't be.
        """
        check_rows(program, program.own_step.layout)
        graph = copied(program.graph)
        phases = [stage.gives_gradients for stage in program.stages]
        connection = _Connection(Builder(graph), program.own_step, phases)
        for boundary in program.boundaries:
            sources = connection.sources(boundary, self.relays)
            for stage, source in sources.items():
                connection.send(boundary, stage, source, onward=stage in sources.values())
            connection.send_back(boundary, sources)
        substitute(graph, connection.bound)
        pending = {key: name for key, name in program.own_step.pending.items() if name not in connection.bound}
        return program.replace(graph=graph, step=dataclasses.replace(program.own_step, pending=pending))


class _Connection:
    def __init__(self, builder: Builder, step: Step, phases: Sequence[Phase]) -> None:
        self.builder = builder
        self.phases = phases  # of each stage, the one that gradients go to and come from
        self.step = step
        self.layout = step.layout
        self.bound: dict[str, Ref] = {}
        self.relayed: dict[tuple[Task, Value], Ref] = {}  # what a relay's slices hand on
        self.readers: dict[Value, set[int]] = {}  # the stages whose tasks wait for a value
        for task, value in step.pending:
            self.readers.setdefault(value, set()).add(task.stage)

    def _slices(self, stage: int, phase: Phase, micro_batch: int) -> list[Task]:
        """Returns the tasks of a stage that have samples of a micro-batch."""
        slices = enumerate(self.layout.slices(stage, micro_batch))
        return [Task(stage, phase, micro_batch, replica) for replica, samples in slices if samples.size]

    def _common(self, one: Task, other: Task) -> int:
        """Returns the number of samples that two tasks have in common."""
        return self.layout.samples(one).overlap(self.layout.samples(other)).size

    def _receivers(self, value: Value, stage: int, phase: Phase) -> Iterator[tuple[int, list[Task]]]:
        """Yields the micro-batches in which tasks of a stage wait for a value, and these tasks."""
        for micro_batch in range(len(self.layout.micro_batch_intervals)):
            tasks = self._slices(stage, phase, micro_batch)
            if receivers := [task for task in tasks if (task, value) in self.step.pending]:
                yield micro_batch, receivers

    def sources(self, boundary: Boundary, relays: Sequence[int]) -> dict[int, int]:
        """Maps each stage that reads a tensor to the one that it gets it from."""
        readers = self.readers.get(Value(boundary.ref), set())  # Others have nothing to hand on.
        return sources_of(boundary.producer, boundary.consumers, readers.intersection(relays), self.layout.devices)

    def send(self, boundary: Boundary, stage: int, source: int, *, onward: bool) -> None:
        """Sends a tensor forward: from slices of stage ``source`` to slices of ``stage``.

        Args:
            boundary: the tensor.
            stage: the receiver.
            source: the stage that makes the tensor, or hands it on.
            onward: whether the receiver hands it on.
        """
        value, original = Value(boundary.ref), source == boundary.producer
        tensors = self.step.values if original else self.relayed
        for micro_batch, receivers in self._receivers(value, stage, Phase.FORWARD):
            sent = {task: tensors[task, value] for task in self._slices(source, Phase.FORWARD, micro_batch)}
            moved = self._move(boundary, sent, receivers, original=original)
            for receiver, tensor in zip(receivers, moved, strict=True):
                self.bound[self.step.pending[receiver, value]] = tensor
                if onward:
                    self.relayed[receiver, value] = self._relay(boundary, receiver, [tensor])

    def send_back(self, boundary: Boundary, sources: Mapping[int, int]) -> None:
        """Sends gradients backward: from consumers' slices to the producer's, over relays.

        Args:
            boundary: the tensor.
            sources: reader -> the stage that it gets the tensor from.
        """
        value = Value(boundary.ref, ValueKind.GRADIENT)
        producer = boundary.producer
        for micro_batch, receivers in self._receivers(value, producer, self.phases[producer]):
            # Readers of a relay come after it, so that its sum is complete when its turn comes.
            sums: dict[Task, Ref] = {}
            for stage in sorted({*sources.values()} - {producer}, reverse=True):
                relays = self._slices(stage, self.phases[stage], micro_batch)
                readers = [reader for reader in sources if sources[reader] == stage]
                for task, terms in zip(relays, self._returned(boundary, readers, relays, sums), strict=True):
                    if terms:
                        own = [self.step.values[task, value]] if (task, value) in self.step.values else []
                        sums[task] = self._relay(boundary, task, [*own, *terms])
            direct = [reader for reader in boundary.consumers if sources[reader] == producer]
            for receiver, terms in zip(receivers, self._returned(boundary, direct, receivers, sums), strict=True):
                name = f"sum/{receiver}/{boundary.ref.node}"
                with self.builder.marked(task_attrs(receiver, NodeKind.SUM)):
                    total = self.builder.add_n(name, terms, boundary.dtype, device=self.layout.device_of(receiver))
                self.bound[self.step.pending[receiver, value]] = total

    def _returned(
        self, boundary: Boundary, readers: Sequence[int], receivers: Sequence[Task], sums: Mapping[Task, Ref]
    ) -> list[list[Ref]]:
        """Returns the gradients that come back to each receiver, in the order of the readers that send them.

        Args:
            boundary: the tensor.
            readers: stages that got it from the receivers.
            receivers: tasks of one stage.
            sums: what relays among the readers send: their own gradients and those that they were sent.
        """
        value, original = Value(boundary.ref, ValueKind.GRADIENT), receivers[0].stage == boundary.producer
        parts: list[list[Ref]] = [[] for _ in receivers]
        for stage in readers:
            tasks = self._slices(stage, self.phases[stage], receivers[0].micro_batch)
            made = ((task, sums.get(task, self.step.values.get((task, value)))) for task in tasks)
            sent = {task: tensor for task, tensor in made if tensor is not None}
            if boundary.batch_axis is None and not original and not boundary.whole:
                for task, tensor in sent.items():
                    parts[receivers.index(self._first(receivers, task))].append(tensor)
            elif sent:
                for terms, tensor in zip(parts, self._move(boundary, sent, receivers, backward=True), strict=True):
                    terms.append(tensor)
        return parts

    def _first(self, tasks: Iterable[Task], other: Task) -> Task:
        """Returns the first of a stage's tasks that has samples of another stage's task."""
        return next(task for task in tasks if self._common(task, other))

    def _relay(self, boundary: Boundary, task: Task, tensors: list[Ref]) -> Ref:
        """Adds the node of a relay from which other stages read: of a tensor, or of the sum of gradients."""
        device, kind = self.layout.device_of(task), dtype_attr(boundary.dtype)
        name = f"relay/{task}/{boundary.ref.node}"
        with self.builder.marked(task_attrs(task, NodeKind.RELAY)):
            if len(tensors) > 1:
                return self.builder.add_n(name, tensors, boundary.dtype, device=device)
            return self.builder.add(name, "Identity", tensors, device=device, T=kind)

    def _move(
        self,
        boundary: Boundary,
        sources: Mapping[Task, Ref],
        receivers: Sequence[Task],
        *,
        backward: bool = False,
        original: bool = True,
    ) -> list[Ref]:
        """Returns the tensor as each receiver needs it.

        Args:
            boundary: the tensor.
            sources: task -> its slice of the tensor, or of the tensor's gradient.
            receivers: the tasks that want slices.
            backward: whether it is the gradient.
            original: whether the sources' stage makes the tensor; a relay's slices of one without a batch axis are
                means already.
        """
        axis = boundary.batch_axis
        if axis is None and (boundary.whole or not (backward or original)):
            return [sources[self._first(sources, receiver)] for receiver in receivers]
        if axis is None and backward:
            return self._share(boundary, list(sources.values()), receivers)
        if axis is None:
            return [self._mean(boundary, sources, receiver) for receiver in receivers]
        received: dict[Task, list[tuple[Ref, int]]] = {receiver: [] for receiver in receivers}
        for task, tensor in sources.items():
            sizes = {receiver: size for receiver in receivers if (size := self._common(task, receiver))}
            parts = self._split(boundary, axis, task, tensor, list(sizes.values()))
            for (receiver, size), part in zip(sizes.items(), parts, strict=True):
                received[receiver].append((part, size))
        return [self._concat(boundary, axis, receiver, parts) for receiver, parts in received.items()]

    def _concat(self, boundary: Boundary, axis: int, receiver: Task, parts: list[tuple[Ref, int]]) -> Ref:
        """Joins (tensor, its samples) along the batch axis."""
        name, device = f"concat/{receiver}/{boundary.ref.node}", self.layout.device_of(receiver)
        tensors = [tensor for tensor, _ in parts]
        if len(parts) > 1 and boundary.outer != 1:
            pieces = [
                self._pieces(f"{name}/parts", receiver, boundary, axis, tensor, [size], device)
                for tensor, size in parts
            ]
            tensors = [each for several in zip(*pieces, strict=True) for each in several]
        with self.builder.marked(task_attrs(receiver, NodeKind.CONCAT)):
            return self.builder.concat(name, tensors, boundary.dtype, axis, device=device)

    def _split(self, boundary: Boundary, place: int, task: Task, tensor: Ref, sizes: list[int]) -> list[Ref]:
        name, device, count = f"split/{task}/{boundary.ref.node}", self.layout.device_of(task), len(sizes)
        if count == 1:
            return [tensor]
        pieces = self._pieces(name, task, boundary, place, tensor, sizes, device)
        with self.builder.marked(task_attrs(task, NodeKind.SPLIT)):
            return [
                self.builder.concat(f"{name}/{part}", pieces[part::count], boundary.dtype, place, device=device)
                for part in range(count)
            ]

    def _pieces(
        self, name: str, task: Task, boundary: Boundary, place: int, tensor: Ref, sizes: list[int], device: str
    ) -> list[Ref]:
        """Splits each part of the batch axis, which has rows of all samples, into pieces of ``sizes`` samples."""
        assert boundary.outer is not None
        every = sizes * boundary.outer
        if boundary.rows_per_sample is not None:
            lengths = [size * boundary.rows_per_sample // boundary.outer for size in every]
            with self.builder.marked(task_attrs(task, NodeKind.SPLIT)):
                return self.builder.split(name, tensor, boundary.dtype, lengths, place, device=device)
        if len(every) == 1:
            return [tensor]
        # The rows of a sample are known at run time only.
        with self.builder.marked(task_attrs(task, NodeKind.LENGTHS)):
            rows = self._rows(name, boundary, tensor, place, sum(every), device)

        def scaled(sizes: Ref) -> Ref:
            with self.builder.marked(task_attrs(task, NodeKind.LENGTHS)):
                return self.builder.add(f"{name}/sizes", "Mul", [sizes, rows], device=device, T=_INT32)

        with self.builder.marked(task_attrs(task, NodeKind.SPLIT)):
            return self.builder.split(name, tensor, boundary.dtype, every, place, device=device, scaled=scaled)

    def _rows(self, name: str, boundary: Boundary, tensor: Ref, place: int, samples: int, device: str) -> Ref:
        """Returns the rows of each sample: the length of an axis / samples of all pieces."""
        kind = {"T": dtype_attr(boundary.dtype), "out_type": _INT32}
        shape = self.builder.add(f"{name}/shape", "Shape", [tensor], device=device, **kind)
        first, last, one, count = (
            self.builder.const(number, types_pb2.DT_INT32, device=device)
            for number in ([place], [place + 1], [1], samples)
        )
        kind = {"T": _INT32, "Index": _INT32, "shrink_axis_mask": 1}
        length = self.builder.add(f"{name}/length", "StridedSlice", [shape, first, last, one], device=device, **kind)
        return self.builder.add(f"{name}/rows", "FloorDiv", [length, count], device=device, T=_INT32)

    def _mean(self, boundary: Boundary, sources: Mapping[Task, Ref], receiver: Task) -> Ref:
        if len(sources) == 1 or boundary.dtype not in FLOAT_DTYPES:
            return next(iter(sources.values()))
        sizes = {task: self.layout.samples(task).size for task in sources}
        device, name = self.layout.device_of(receiver), f"mean/{receiver}/{boundary.ref.node}"
        with self.builder.marked(task_attrs(receiver, NodeKind.MEAN)):
            parts = [
                self._times(name, boundary, tensor, sizes[task] / sum(sizes.values()), device)
                for task, tensor in sources.items()
            ]
            return self.builder.add_n(name, parts, boundary.dtype, device=device)

    def _share(self, boundary: Boundary, gradients: Sequence[Ref], receivers: Sequence[Task]) -> list[Ref]:
        sizes = {task: self.layout.samples(task).size for task in receivers}
        shares = []
        for receiver, size in sizes.items():
            device, name = self.layout.device_of(receiver), f"share/{receiver}/{boundary.ref.node}"
            with self.builder.marked(task_attrs(receiver, NodeKind.SHARE)):
                share = self.builder.add_n(name, gradients, boundary.dtype, device=device)
                if len(receivers) > 1:
                    share = self._times(name, boundary, share, size / sum(sizes.values()), device)
            shares.append(share)
        return shares

    def _times(self, name: str, boundary: Boundary, tensor: Ref, factor: float, device: str) -> Ref:
        inputs = [tensor, self.builder.const(factor, boundary.dtype, device=device)]
        return self.builder.add(name, "Mul", inputs, device=device, T=dtype_attr(boundary.dtype))


_INT32 = dtype_attr(types_pb2.DT_INT32)
