"""Batches that workers read themselves, in the place of batches that are fed."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from tensorflow.core.framework import types_pb2

from graph_passes.errors import PassError
from graph_passes.ir.batching import Interval
from graph_passes.ir.graph import (
    PHASE_ATTR,
    STAGE_ATTR,
    Builder,
    Graph,
    GraphDef,
    NodeDef,
    Ref,
    control_inputs,
    copied,
    data_inputs,
    dtype_attr,
    dtypes_attr,
    set_inputs,
    shape_attr,
)
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.program import Fact, Program, TakenBatch
from graph_passes.ir.tensorflow_bridge import constant_value, output_dtypes

_OF_BATCH = frozenset({NodeKind.SLICES, NodeKind.NORMALIZERS})
"""The kinds of nodes that compute something of the whole batch, for tasks to read."""


@dataclasses.dataclass(frozen=True)
class PlaceData:
    """Lets each worker take the batch from its own memory, where it has read it, instead of from feeds.

        batch/x (client) -> stage0/slices/x (client) -> F on workers 0 and 1
            becomes   worker0/batch -> worker0/stage0/slices/x -> F on worker 0
                      worker1/batch -> worker1/stage0/slices/x -> F on worker 1

    What is computed of the whole batch (slices, divisors of losses) is computed on every worker that reads it, from
    that worker's own copy of the batch, so that no part of a batch travels between machines. The only feed is the
    number under which workers keep the batch. In parts, a worker has only the samples that its devices read.

    Attributes:
        hosts: device of the plan, or CPU of its worker -> this CPU.
        area: name of the memory in which workers keep batches by number (`MapStage`).
        in_parts: whether each worker has only the samples that its devices read, in their order in the batch.
    """

    name: ClassVar[str] = "place_data"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.STEP,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.STEP,)
    hosts: Mapping[str, str]
    area: str
    in_parts: bool = False

    def run(self, program: Program) -> Program:
        """Step with feeds -> the same step with ``taken`` in place of them.

        Raises:
            PassError: a node that no pass of this package has made reads the batch on none of the plan's devices; or
                batches are in parts, but something is computed of a whole one.
        """
        return _Placing(self, program).result()


class _Placing:
    """The top level while it is being made."""

    def __init__(self, options: PlaceData, program: Program) -> None:
        self.options, self.program, self.step = options, program, program.own_step
        self.graph = Graph(program.graph)
        self.inputs = program.roles.inputs
        self.components = {self.step.feeds[ref].node: index for index, ref in enumerate(self.inputs)}
        self.of_batch = {node.name for node in self.graph if NodeKind.of(node) in _OF_BATCH}
        self.workers = {host: number for number, host in enumerate(dict.fromkeys(options.hosts.values()))}
        unmoved = [copied(node) for node in self.graph if not self._is_moved(Ref(node.name))]
        before = program.graph
        self.builder = Builder(GraphDef(node=unmoved, versions=before.versions, library=before.library))
        number = {"dtype": dtype_attr(types_pb2.DT_INT64), "shape": shape_attr([])}
        self.number = self.builder.add("batch/number", "Placeholder", device=self.step.host_device, **number)
        self.taken: dict[str, tuple[Ref, ...]] = {}
        self.copies: dict[tuple[str, str], str] = {}
        self.read: dict[tuple[str, str], set[Interval]] = {}
        self.slices: dict[tuple[str, str], list[Ref]] = {}
        self.parts = self._parts() if options.in_parts else {}

    def result(self) -> Program:
        graph = self.builder.graph
        for node in list(graph.node):
            refs, waits = data_inputs(node), control_inputs(node)
            if any(map(self._is_moved, refs)):
                host = self._host_of(node)
                set_inputs(node, [self._on(host, ref) if self._is_moved(ref) else ref for ref in refs], waits)
            if any(self._is_moved(Ref(name)) for name in waits):
                raise PassError(
                    f"{node.op} node {node.name!r} waits for nodes of the whole batch ({', '.join(waits)}), of which "
                    f"each worker has its own"
                )
        taken = TakenBatch(self.number, self.taken, self.parts)
        return self.program.replace(graph=graph, step=dataclasses.replace(self.step, feeds={}, taken=taken))

    def _host_of(self, node: NodeDef) -> str:
        if node.device not in self.options.hosts:
            raise PassError(
                f"{node.op} node {node.name!r} on {node.device!r} reads the batch, which only workers have: place it "
                f"on one of the plan's devices, or feed the data from this process"
            )
        return self.options.hosts[node.device]

    def _parts(self) -> dict[str, tuple[Interval, ...]]:
        """Returns CPU of a worker -> the samples that its devices read, in order, neighbours joined."""
        for node in self.graph:
            for ref in data_inputs(node) if node.name not in self.of_batch else ():
                if self._is_moved(ref):
                    self.read.setdefault((self._host_of(node), ref.node), set()).add(self._samples_of(ref))
        samples: dict[str, set[Interval]] = {}
        for (host, _), own in self.read.items():
            samples.setdefault(host, set()).update(own)
        return {host: joined(own) for host, own in samples.items()}

    def _samples_of(self, ref: Ref) -> Interval:
        """Returns the samples that a tensor of the batch has."""
        if ref.node in self.components:
            return Interval(0, self.step.layout.batch)
        node = self.graph.nodes[ref.node]
        if NodeKind.of(node) is not NodeKind.SLICES:
            raise PassError(
                f"{node.op} node {node.name!r} computes something of whole batches (the divisor of a loss with masks "
                f"or weights, say), of which each worker has only a part: let all workers read whole batches"
            )
        _, sizes, _ = data_inputs(node)
        ends = list(itertools.accumulate(map(int, constant_value(self.graph.nodes[sizes.node]))))
        return Interval([0, *ends][ref.output], ends[ref.output])

    def _on(self, host: str, ref: Ref) -> Ref:
        """Returns a tensor of the batch, or one that is computed of it, on a worker's CPU."""
        if ref.node in self.components:
            return self._batch_on(host)[self.components[ref.node]]
        if self.options.in_parts:
            return self._slice_on(host, ref)
        if (host, ref.node) not in self.copies:
            node = copied(self.graph.nodes[ref.node])
            inputs = [self._on(host, source) if self._is_moved(source) else source for source in data_inputs(node)]
            node.name = self.builder.names.fresh(f"worker{self.workers[host]}/{ref.node}")
            node.device = host
            set_inputs(node, inputs)
            self.builder.append(node)
            self.copies[host, ref.node] = node.name
        return Ref(self.copies[host, ref.node], ref.output)

    def _slice_on(self, host: str, ref: Ref) -> Ref:
        """Returns a slice of a worker's part of the batch."""
        own = sorted(self.read[host, ref.node])
        if (host, ref.node) not in self.slices:
            node = self.graph.nodes[ref.node]
            part = self._on(host, data_inputs(node)[0])
            bounds = [0, *(self._place_of(host, sample) for interval in own for sample in interval)]
            bounds.append(sum(interval.size for interval in self.parts[host]))
            # Between these slices there may be others, which only other devices of the worker read.
            pieces = {start: stop - start for start, stop in itertools.pairwise(bounds) if stop > start}
            with self.builder.marked({key: node.attr[key] for key in (PHASE_ATTR, STAGE_ATTR)}):
                name, dtype = f"worker{self.workers[host]}/{ref.node}", output_dtypes(node)[0]
                cut = self.builder.split(name, part, dtype, [*pieces.values()], 0, device=host, on_host=True)
            at = dict(zip(pieces, cut, strict=True))
            self.slices[host, ref.node] = [at[self._place_of(host, interval.start)] for interval in own]
        return self.slices[host, ref.node][own.index(self._samples_of(ref))]

    def _place_of(self, host: str, sample: int) -> int:
        """Returns the place of a sample in a worker's part of the batch."""
        return sum(interval.overlap(Interval(0, sample)).size for interval in self.parts[host])

    def _is_moved(self, ref: Ref) -> bool:
        return ref.node in self.components or ref.node in self.of_batch

    def _batch_on(self, host: str) -> Sequence[Ref]:
        """Returns the arrays of the batch on a worker's CPU."""
        if host not in self.taken:
            dtypes = [output_dtypes(self.graph.nodes[name])[0] for name in self.components]
            indices = self.builder.const(range(len(dtypes)), types_pb2.DT_INT32)
            attrs = {"dtypes": dtypes_attr(dtypes), "shared_name": self.options.area, "container": ""}
            attrs |= {"capacity": 0, "memory_limit": 0, PHASE_ATTR: NodeKind.BATCH.text}
            name = f"worker{self.workers[host]}/batch"
            node = self.builder.add(name, "MapUnstage", [self.number, indices], device=host, **attrs).node
            self.taken[host] = tuple(Ref(node, index) for index in range(len(dtypes)))
        return self.taken[host]


def joined(samples: Iterable[Interval]) -> tuple[Interval, ...]:
    """Returns the same samples as intervals that don't touch: ``[0, 2) [2, 3) [5, 6)`` as ``[0, 3) [5, 6)``."""
    intervals: list[Interval] = []
    for interval in sorted(samples):
        if intervals and interval.start <= intervals[-1].stop:
            before = intervals.pop()
            interval = Interval(before.start, max(before.stop, interval.stop))
        intervals.append(interval)
    return tuple(intervals)
