"""AllReduce: each device's part of a group's gradients becomes the sum over all its devices."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

from graph_passes.ir.collectives import AllReduces
from graph_passes.ir.graph import BYTES_ATTR, REDUCTION_ATTR, Builder, Graph, Ref, dtype_attr
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.outline import add_call, outline
from graph_passes.ir.program import Value, ValueKind, Variable, VariableKind
from graph_passes.ir.storage import (
    accumulate_function,
    buckets,
    bytes_of,
    flatten,
    joined_shards,
    merged,
    neutral,
    read,
    shards_of,
    unflatten,
)
from graph_passes.ir.tasks import Phase, Task
from graph_passes.ir.tensorflow_bridge import empty_graph
from graph_passes.passes.parameter_group import Calls, Computation, Inputs, ParameterGroup, ReductionUnit, UpdateNodes
from graph_passes.passes.row_gradients import RowGradients

_EACH = 1
"""Bytes of buckets with one variable each."""


class Reduction:
    """Adds the nodes that reduce gradients, and finds the reduced ones.

    Args:
        nodes: the step's top level.

    Attributes:
        reduced: (bucket, device) -> the vector that all-reduce gives there; of a bucket of variables in shards, the
            device's shards.
    """

    def __init__(self, nodes: UpdateNodes) -> None:
        self.nodes = nodes
        self._builder = nodes.builder
        self._options = nodes.options
        self._program = nodes.program
        self._step = nodes.step
        self.reduced: dict[tuple[tuple[Variable, ...], str], Ref] = {}
        self.rows = RowGradients(nodes.program, nodes.builder)
        self._zeros: dict[tuple[str, str], Ref] = {}
        self._collectives = AllReduces(nodes.builder, nodes.options.all_reduces, nodes.step.next_key)
        self._buckets: dict[tuple[int, ...], list[tuple[Variable, ...]]] = {}  # of each group, as reduced so far

    def accumulate_nothing(self, applied: Calls) -> None:
        """Makes replicas without samples in this step contribute zeros, once carried gradients have been used."""
        if not self._step.accumulated:
            return  # `_contribution` gives them.
        for stage, devices in enumerate(self.nodes.devices):
            for replica, device in enumerate(devices):
                if any(task.stage == stage and task.replica == replica for task in self._step.entry):
                    continue
                targets = [own[stage] for own in self.nodes.contributors.values() if stage in own]
                if targets:
                    name = f"{self._step.prefix}stage{stage}_accumulate_nothing"
                    function = accumulate_function(name, targets, "none")
                    node = f"stage{stage}/replica{replica}/accumulate_nothing"
                    attrs = NodeKind.ACCUMULATE_NOTHING.marks(stage, replica)
                    after = [call for (stages, on), call in applied.items() if on == device and stage in stages]
                    made = add_call(self._builder, node, function, [], device=device, control=after, attrs=attrs)
                    self.nodes.empty[stage, replica] = [made.node]

    def all_reduce(self, units: Iterable[ReductionUnit], *, at_head: bool = False) -> None:
        """Reduces units in buckets, in this order; ``at_head`` the previous step's, at once."""
        for unit in units:
            group = unit.group
            if len(group.devices) == 1 or not unit.variables:
                continue
            packed = self._packed(unit)
            self._buckets.setdefault(group.stages, []).extend(packed)
            calls = {}
            for device in group.devices:
                control = [] if at_head else self.nodes.complete(group, device, unit.piece)
                pack = functools.partial(self._pack, self.nodes.stages_on(group, device), packed)
                call = self.nodes.compute(NodeKind.PACK, pack, group, device, part=unit.label, control=control)
                assert call is not None
                calls[device] = call
            index = 0
            for bucket in packed:
                if bucket[0].shards > 1:
                    vectors = {
                        device: [Ref(calls[device].node, index + number) for number in range(bucket[0].shards)]
                        for device in group.devices
                    }
                    self._reduce_scatter(vectors, bucket, group)
                    index += bucket[0].shards
                    continue
                starts = {device: f"{group.label}/replica{replica}" for replica, device in enumerate(group.devices)}
                reduced = self._collectives.add(
                    {device: Ref(calls[device].node, index) for device in group.devices},
                    starts,
                    bucket[0].dtype,
                    bytes_of(bucket),
                    NodeKind.ALL_REDUCE.marks(group=group.stages),
                    merge=bucket[0].merge,
                )
                self.reduced |= {(bucket, device): vector for device, vector in reduced.items()}
                index += 1

    def _packed(self, unit: ReductionUnit) -> list[tuple[Variable, ...]]:
        """Returns the buckets of a unit, variables in shards last."""
        in_shards = unit.group.in_shards
        whole = [variable for variable in unit.variables if variable.name not in in_shards]
        shards = [in_shards[variable.name] for variable in unit.variables if variable.name in in_shards]
        limit = self._options.bucket_bytes if self._options.spread.isdisjoint(unit.group.stages) else _EACH
        return buckets(whole, limit) + buckets(shards, limit)

    def _reduce_scatter(
        self, vectors: Mapping[str, Sequence[Ref]], bucket: tuple[Variable, ...], group: ParameterGroup
    ) -> None:
        """Adds up a bucket's shards, each on its device.

        Args:
            vectors: device -> its parts of the sums, in the order of shards.
            bucket: the variables.
            group: their group.
        """
        reduction = self.number()
        attrs = {
            **NodeKind.REDUCE_SCATTER.marks(group=group.stages),
            REDUCTION_ATTR: reduction,
            BYTES_ATTR: bytes_of(bucket),
        }
        with self._builder.marked(attrs):
            for number, device in enumerate(group.devices):
                name = f"{group.label}/replica{number}/reduce_scatter{reduction}"
                parts = [own[number] for own in vectors.values()]
                self.reduced[bucket, device] = self._builder.add_n(name, parts, bucket[0].dtype, device=device)

    def number(self) -> int:
        """Returns a number that no other reduction of the step has."""
        return self._collectives.number()

    def _pack(self, stages: Sequence[int], packed: Sequence[Sequence[Variable]], name: str) -> Computation:
        """Returns the packing of gradients of a device's stages into vectors, in the order of buckets and shards."""
        builder = Builder(empty_graph())
        inputs: Inputs = {}
        vectors = []
        for bucket in packed:
            sums = [self.own_sum(builder, inputs, variable, stages) for variable in bucket]
            dtype, count = bucket[0].dtype, bucket[0].shards
            if count == 1:
                parts = [flatten(builder, own, dtype) for own in sums]
                vectors.append(builder.concat("bucket", parts, dtype, 0))
                continue
            parts = [shards_of(builder, own, variable) for own, variable in zip(sums, bucket, strict=True)]
            shards = builder.concat("bucket", parts, dtype, 1)
            node = builder.add("shards", "Unpack", [shards], T=dtype_attr(dtype), num=count, axis=0).node
            vectors += [Ref(node, number) for number in range(count)]
        function = outline(self._step.prefix + name, Graph(builder.graph), list(inputs), vectors)
        return Computation(function, tuple(inputs.values()))

    def own_sum(self, builder: Builder, inputs: Inputs, variable: Variable, stages: Iterable[int]) -> Ref:
        """Merges the contributions of one device's stages to a variable; there may be none."""
        accumulators = self.nodes.contributors[variable.name]
        parts = []
        for stage in stages:
            if stage in accumulators and self._step.accumulated:
                own = accumulators[stage]
                parts.append(read(builder, own.name, own.dtype, own.shape))
            elif stage in accumulators:
                parts.append(builder.argument("contribution", variable.dtype))
                inputs[parts[-1]] = functools.partial(self._contribution, variable, stage)
        return merged(builder, "sum", parts, variable)

    def _contribution(self, variable: Variable, stage: int, device: str) -> Ref:
        """Returns the contribution of a stage's only task on a device to a variable; a neutral one without samples."""
        if variable.kind is VariableKind.STATE:
            value, phase = Value(variable.update or Ref("")), Phase.FORWARD
        else:
            value = Value(variable.value or Ref(""), ValueKind.GRADIENT)
            phase, _ = self._program.stages[stage].parameter_gradients
        task = Task(stage, phase, 0, self.nodes.devices[stage].index(device))
        if (task, value) in self._step.values:
            return self._step.values[task, value]
        if (variable.name, device) not in self._zeros:
            with self._builder.marked(NodeKind.ZEROS.marks(stage)):
                self._zeros[variable.name, device] = neutral(self._builder, variable, device)
        return self._zeros[variable.name, device]

    def reduced_values(
        self,
        builder: Builder,
        inputs: Inputs,
        wanted: Sequence[str],
        group: ParameterGroup,
        device: str,
        *,
        whole: bool = False,
    ) -> dict[str, Ref]:
        """Returns reduced gradients and state of a group on a device, as tensors of a function's graph.

        Of variables in shards these are the device's own shards.

        Args:
            builder: of the function's graph.
            inputs: receives the function's arguments.
            wanted: names of variables.
            group: the group.
            device: where the function runs.
            whole: whether to join all devices' shards.
        """
        here = [variable for variable in group.variables if variable.name in wanted]
        names = {variable.name for variable in here}
        if len(group.devices) == 1:
            stages = self.nodes.stages_on(group, device)
            return {variable.name: self.own_sum(builder, inputs, variable, stages) for variable in here}
        reduced: dict[str, Ref] = {}
        for bucket in self._buckets.get(group.stages, ()):
            if names.isdisjoint(variable.name for variable in bucket):
                continue
            joins = whole and bucket[0].shards > 1
            columns = []
            for source in group.devices if joins else (None,):
                argument = builder.argument("bucket", bucket[0].dtype)
                inputs[argument] = functools.partial(self._bucket, bucket, source)
                columns.append(unflatten(builder, argument, bucket[0].dtype, [v.storage_shape for v in bucket]))
            for variable, parts in zip(bucket, zip(*columns, strict=True), strict=True):
                reduced[variable.name] = joined_shards(builder, parts, variable) if joins else parts[0]
        return reduced

    def _bucket(self, bucket: tuple[Variable, ...], source: str | None, device: str) -> Ref:
        """Returns a bucket of reduced gradients on a device, or another device's part of it."""
        return self.reduced[bucket, source or device]
