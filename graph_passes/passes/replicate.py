"""One call node for each phase, stage, micro-batch and replica, on its device."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar

from tensorflow.core.framework import types_pb2

from graph_passes.ir.graph import Builder, Graph, Ref, dtype_attr, shape_attr
from graph_passes.ir.kernels import host_of
from graph_passes.ir.node_kinds import NodeKind, task_attrs
from graph_passes.ir.outline import add_call, dtype_of, outline
from graph_passes.ir.program import (
    Fact,
    Layout,
    Peers,
    Program,
    Stage,
    StageFunction,
    Step,
    Value,
    ValueKind,
    Variable,
    VariableKind,
)
from graph_passes.ir.storage import merge_gradients, read_function
from graph_passes.ir.tasks import Phase, Task
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.passes.row_exchange import RowLookups
from graph_passes.passes.shards import ParameterGathers


@dataclasses.dataclass(frozen=True)
class Replicate:
    """Starts the step's top level.

        2 stages x 2 micro-batches, 2 replicas of stage 0   becomes   0F0 0F0.r1 0F1 0F1.r1 1F0 1F1 (and as many B)

    If B is split, there are as many Bx and Bw. A task without work, such as a Bx, or a B in one function with F, is a
    NoOp, so that schedules needn't know.

    Every replica of a stage works on each micro-batch, on its own slice of it. Calls of one slice are connected here
    (residuals, variables, batch inputs); what comes from other stages stays pending.

    Attributes:
        layout: devices and batch sizes.
        host_device: the device on which batches are fed and cut into slices.
        owners: the stages that keep each variable on their devices. A stage that reads a variable without keeping it
            reads it from the first device of the first of them.
        in_shards: the parameters of which these devices keep a shard each. Each replica gathers what its stage reads of
            them; where a stage needs only rows (`Stage.lookups`), these alone.
        prefix: start of the names of the step's functions.
        first_key: the first of the collective keys; steps that share workers mustn't share keys.

    Source: DAPPLE (PPoPP'21), section 5.2.2 and figure 8(a): "we split the micro-batch further into 2 even slices, and
    assign each to a device."
    """

    name: ClassVar[str] = "replicate"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.FUNCTIONS,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.STEP,)
    layout: Layout
    host_device: str
    owners: Mapping[str, Sequence[int]]
    prefix: str = ""
    first_key: int = 1
    in_shards: frozenset[str] = frozenset()

    def run(self, program: Program) -> Program:
        """Program with stage functions -> program whose graph is a step's top level, with ``step``."""
        return Replication(self, program).result()


class Replication:
    """The top level while it is being made.

    Attributes:
        options: the pass.
        layout: devices and batch sizes.
        program: stages with functions.
        builder: of the top level.
        reads: as in `Step`, and so the next two.
        shard_reads: see ``reads``.
        ahead: see ``reads``.
    """

    def __init__(self, options: Replicate, program: Program) -> None:
        self.options = options
        self.layout = options.layout
        self.program = program
        self.flat = Graph(program.flat_graph)
        self.variable_of_value = {v.value: v for v in program.roles.variables if v.value is not None}
        self.builder = Builder(empty_graph())
        self.entry: dict[Task, str] = {}
        self.exit: dict[Task, tuple[str, ...]] = {}
        self.values: dict[tuple[Task, Value], Ref] = {}
        self.pending: dict[tuple[Task, Value], str] = {}
        self.metric_values: dict[tuple[str, int], Ref] = {}
        self.feeds: dict[Ref, Ref] = {}
        self.slices: dict[tuple[Ref, int], dict[tuple[int, int], Ref]] = {}
        self.metric_feeds: dict[str, tuple[Ref, Ref]] = {}
        self.variables: dict[tuple[str, int, int], Ref] = {}
        self.reads = collections.defaultdict[tuple[int, int], list[str]](list)
        self.shard_reads = collections.defaultdict[tuple[tuple[int, ...], str], list[str]](list)
        self.ahead = collections.defaultdict[Task, list[str]](list)
        self.hosts: set[str] = set()
        self.groups: dict[tuple[str, ...], int] = {}
        self.gathers = ParameterGathers(self)
        self.lookups = RowLookups(self)

    def result(self) -> Program:
        """Returns the program with the top level."""
        program, graph = self.program, self.builder.graph
        for stage in program.stages:
            for function in (*stage.own_graph.library.function, *stage.loops):
                self.builder.define(function)
            merge_gradients(graph, stage.own_graph.library)
        self._feed_batches()
        self._normalizers()
        for stage in program.stages:
            self._read_variables(stage)
            for micro_batch, replica in self.layout.slices_with_samples(stage.index):
                self._tasks(stage, micro_batch, replica)
        step = Step(
            self.layout,
            owners=self.options.owners,
            host_device=self.options.host_device,
            prefix=self.options.prefix,
            next_key=self.options.first_key + sum_keys(program, self.layout),
            entry=self.entry,
            exit=self.exit,
            values=self.values,
            pending=self.pending,
            reads=dict(self.reads),
            shard_reads=dict(self.shard_reads),
            ahead=dict(self.ahead),
            hosts=frozenset(self.hosts),
            feeds=self.feeds,
            metric_feeds=self.metric_feeds,
            metric_results=self._metric_results(),
            loss=self._loss(),
            outputs=tuple(self._output(ref) for ref in program.roles.outputs),
        )
        return program.replace(graph=graph, step=step)

    def _feed_batches(self) -> None:
        for ref in self.program.roles.inputs:
            node = self.flat.nodes[ref.node]
            self.feeds[ref] = self.builder.add(
                f"batch/{ref.node}", "Placeholder", device=self.options.host_device, **node.attr
            )

    def _slices_of(self, ref: Ref, stage: int) -> dict[tuple[int, int], Ref]:
        """Cuts a batch input for the replicas of a stage: (micro-batch, replica) -> slice."""
        if (ref, stage) not in self.slices:
            slices = self.layout.slices_with_samples(stage)
            with self.builder.marked(NodeKind.SLICES.marks(stage)):
                parts = self.builder.split(
                    f"stage{stage}/slices/{ref.node}",
                    self.feeds[ref],
                    dtype_of(self.flat, ref),
                    [interval.size for interval in slices.values()],
                    0,
                    device=self.options.host_device,
                    on_host=True,
                )
            self.slices[ref, stage] = dict(zip(slices, parts, strict=True))
        return self.slices[ref, stage]

    def _normalizers(self) -> None:
        """Adds the divisors of the whole batch, each computed once from the batch inputs."""
        self.inverses: dict[Ref, Ref] = {}
        normalizers = self.program.roles.normalizers
        if not normalizers:
            return
        wanted = [normalizer.of_whole_batch for normalizer in normalizers]
        body = self.flat.ancestors(wanted, self.feeds, control=False)
        read = {ref for name in body for ref in self.flat.inputs(name)}
        used = [ref for ref in self.feeds if ref in read]
        inputs = [self.feeds[ref] for ref in used]
        samples = self.program.roles.slice.samples
        if samples in read:  # the slice is the whole batch
            used.append(samples)
            inputs.append(self.builder.const(self.layout.batch, types_pb2.DT_INT32, device=self.options.host_device))
        function = outline(f"{self.options.prefix}normalizers", self.flat, used, wanted)
        attrs = NodeKind.NORMALIZERS.marks()
        node = add_call(
            self.builder, "normalizers", function, inputs, device=self.options.host_device, attrs=attrs
        ).node
        for index, normalizer in enumerate(normalizers):
            self.inverses[normalizer.placeholder] = Ref(node, index)

    def _read_variables(self, stage: Stage) -> None:
        variables = self.program.variables
        active = sorted({replica for _, replica in self.layout.slices_with_samples(stage.index)})
        self.gathers.add(stage, active)
        sources: dict[int, list[Variable]] = {}
        for name in stage.reads:
            if name in self.options.in_shards or name in stage.looked_up:
                continue
            owners = self.options.owners[name]
            sources.setdefault(stage.index if stage.index in owners else owners[0], []).append(variables[name])
        for source, group in sources.items():
            function = read_function(f"{self.options.prefix}stage{stage.index}_read_from{source}", group)
            for replica, device in enumerate(self.layout.devices[stage.index]):
                remote = source != stage.index
                if replica not in active:
                    continue
                if not remote or replica == 0:
                    name = f"stage{stage.index}/replica{replica}/read_from{source}"
                    reading = self.layout.devices[source][0] if remote else device
                    attrs = NodeKind.READ.marks(stage.index, replica)
                    node = add_call(self.builder, name, function, [], device=reading, attrs=attrs).node
                self.reads[stage.index, replica].append(node)
                for index, variable in enumerate(group):
                    self.variables[variable.name, stage.index, replica] = Ref(node, index)

    def _tasks(self, stage: Stage, micro_batch: int, replica: int) -> None:
        forward = Task(stage.index, Phase.FORWARD, micro_batch, replica)
        if (stage.index, replica) in self.gathers.begins:
            self.ahead[forward] += self.gathers.begins[stage.index, replica]
        if stage.integers is not None:
            host = host_of(self.layout.device_of(forward))
            self.hosts.add(host)
            integers = self._call(stage, forward, stage.integers, NodeKind.INTEGERS, host, keep=False)
            self.values |= {(forward, value): Ref(integers, i) for i, value in enumerate(stage.integers.outputs)}
        if stage.indices is not None:
            indices = self._call(stage, forward, stage.indices, NodeKind.INDICES, keep=False)
            self.lookups.add(stage, forward, indices)
        for phase, part in stage.phases:
            task, kind = Task(stage.index, phase, micro_batch, replica), NodeKind.of_phase(phase)
            if part is not None:
                self._call(stage, task, part, kind)
            else:
                name = f"stage{stage.index}/replica{replica}/{kind.text}{micro_batch}"
                device = self.layout.device_of(task)
                node = self.builder.add(name, "NoOp", device=device, **task_attrs(task, kind)).node
                self.entry[task], self.exit[task] = node, (node,)
        if stage.metrics is not None:
            metrics = self._call(stage, forward, stage.metrics, NodeKind.METRICS, keep=False)
            self.exit[forward] = (*self.exit[forward], metrics)
            for index, value in enumerate(stage.metrics.outputs):
                variable = next(v for v in self.program.roles.variables if v.update == value.ref)
                self.metric_values[variable.name, replica if variable.additive else 0] = Ref(metrics, index)

    def _call(
        self, stage: Stage, task: Task, function: StageFunction, kind: NodeKind, host: str = "", *, keep: bool = True
    ) -> str:
        """Adds the call of a task, on its device or on ``host``; returns its node."""
        device = host or self.layout.device_of(task)
        dtypes = (arg.type for arg in function.function.signature.input_arg)
        inputs = [self._argument(task, *each, device) for each in zip(function.inputs, dtypes, strict=True)]
        name = f"stage{stage.index}/replica{task.replica}/{kind.text}{task.micro_batch}"
        attrs = task_attrs(task, kind)
        node = add_call(self.builder, name, function.function, inputs, device=device, attrs=attrs).node
        if keep:
            self.entry[task], self.exit[task] = node, (node,)
            backward = dataclasses.replace(task, phase=Phase.BACKWARD)
            of_backward = set(stage.backward.outputs) if stage.fused is not None and stage.backward is not None else ()
            for index, value in enumerate(function.outputs):
                self.values[backward if value in of_backward else task, value] = Ref(node, index)
        return node

    def _argument(self, task: Task, value: Value, dtype: int, device: str) -> Ref:
        forward = Task(task.stage, Phase.FORWARD, task.micro_batch, task.replica)
        if value.kind is ValueKind.GRADIENT:
            return self._pending(
                dataclasses.replace(task, phase=self.program.stages[task.stage].gives_gradients), value, dtype
            )
        if value.kind is ValueKind.PARTIAL:
            return self.values[dataclasses.replace(task, phase=Phase.INPUT_GRAD), value]
        if value.kind is ValueKind.LOOKED_UP:
            return self.lookups.rows[forward, value]
        if (forward, value) in self.values:
            return self.values[forward, value]
        variable = self.variable_of_value.get(value.ref)
        if variable is not None:
            if variable.kind is VariableKind.METRIC:
                return self._metric_value(variable, task.replica)
            reader = variable.name, task.stage, task.replica
            return self.gathers.tensors[reader] if reader in self.gathers.tensors else self.variables[reader]
        if value.ref in self.feeds:
            return self._slices_of(value.ref, task.stage)[task.micro_batch, task.replica]
        samples = self.layout.samples(task).size
        scalars, peers = self.program.roles.slice, self.program.roles.peers
        if value.ref == scalars.weight:
            return self.builder.const(samples / self.layout.batch, dtype, device=device)
        if value.ref == scalars.number:
            number = task.micro_batch * len(self.layout.devices[task.stage]) + task.replica
            return self.builder.const(number, dtype, device=device)
        if value.ref == scalars.samples:
            return self.builder.const(samples, dtype, device=device)
        if peers is not None and value.ref in peers.refs:
            return self.builder.const(self._peers(task, peers)[peers.refs.index(value.ref)], dtype, device=device)
        if value.ref in self.inverses:
            return self.inverses[value.ref]
        return self._pending(forward, value, dtype)

    def _peers(self, task: Task, peers: Peers) -> tuple[int, int, int]:
        """Returns a task's `Peers`: number of its peers, key of their devices, first key of its own."""
        replicas = range(len(self.layout.devices[task.stage]))
        active = [replica for replica in replicas if self.layout.active(task.stage, task.micro_batch, replica)]
        devices = tuple(self.layout.device_of(dataclasses.replace(task, replica=replica)) for replica in active)
        group = self.groups.setdefault(devices, self.options.first_key + len(self.groups))
        number = task.stage * len(self.layout.micro_batch_intervals) + task.micro_batch
        return len(active), group, self.options.first_key + number * peers.keys

    def _pending(self, task: Task, value: Value, dtype: int) -> Ref:
        if (task, value) not in self.pending:
            placeholder = self.builder.add(
                f"pending/{task}/{value.ref.node}", "Placeholder", dtype=dtype_attr(dtype), shape=shape_attr(None)
            )
            self.pending[task, value] = placeholder.node
        return Ref(self.pending[task, value])

    def _metric_value(self, variable: Variable, replica: int) -> Ref:
        """Returns the value after the replica's last micro-batch, or the one before the step.

        Only the first replica continues from the running value; the others start from zero, so that their sums can be
        added. A value that isn't a sum continues from the previous replica.
        """
        replica = replica if variable.additive else 0
        if (variable.name, replica) in self.metric_values:
            return self.metric_values[variable.name, replica]
        if variable.name not in self.metric_feeds:
            kind = {"dtype": dtype_attr(variable.dtype), "shape": shape_attr(variable.shape)}
            running, initial = (
                self.builder.add(f"metric/{part}", "Placeholder", device=self.options.host_device, **kind)
                for part in ("running", "initial")
            )
            self.metric_feeds[variable.name] = (running, initial)
        return self.metric_feeds[variable.name][replica > 0]

    def _metric_results(self) -> dict[str, tuple[Ref, ...]]:
        results: dict[str, list[Ref]] = {}
        for (name, _), ref in sorted(self.metric_values.items()):
            results.setdefault(name, []).append(ref)
        return {name: tuple(refs) for name, refs in results.items()}

    def _loss(self) -> Ref | None:
        """Returns the sum of all slices' contributions, in the order of samples."""
        loss = self.program.roles.loss
        if loss is None:
            return None
        parts = self._output(loss)
        task = next(task for task, value in self.values if value.ref == loss)
        device = self.layout.devices[task.stage][0]
        with self.builder.marked(NodeKind.LOSS.marks(task.stage)):
            return self.builder.add_n("loss", parts, dtype_of(self.flat, loss), device=device)

    def _output(self, ref: Ref) -> tuple[Ref, ...]:
        tasks = sorted((t for t, value in self.values if value == Value(ref)), key=lambda t: (t.micro_batch, t.replica))
        return tuple(self.values[task, Value(ref)] for task in tasks)


def sum_keys(program: Program, layout: Layout) -> int:
    """Returns the number of keys that the collective operations inside a step's tasks take."""
    peers, micro_batches = program.roles.peers, len(layout.micro_batch_intervals)
    # Groups have keys of their own, at most one for each phase of each stage's micro-batches.
    return 0 if peers is None else len(layout.devices) * micro_batches * max(peers.keys, len(Phase))
