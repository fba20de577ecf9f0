"""Parameters in shards are gathered for the tasks of a stage: read on the devices that keep them, joined on its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from graph_passes.ir.graph import (
    BYTES_ATTR,
    GROUP_ATTR,
    PHASE_ATTR,
    REDUCTION_ATTR,
    REPLICA_ATTR,
    STAGE_ATTR,
    Builder,
    Graph,
    Ref,
    integers_attr,
)
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.outline import FunctionDef, call_node, outline, placeholder
from graph_passes.ir.program import Stage, Variable
from graph_passes.ir.storage import buckets, bytes_of, flatten, joined_shards, read_variable, unflatten
from graph_passes.ir.tensorflow_bridge import empty_graph

if TYPE_CHECKING:
    from graph_passes.passes.replicate import Replicate


class ParameterGathers:
    """Adds the nodes that gather a stage's parameters, to a step's top level.

        W/0 on 0, W/1 on 1   becomes   0: read W/0 -> gather W on 0, gather W on 1;  1: read W/1 -> the same

    A device that runs one stage gathers as soon as the step begins, and one read on each owner serves all of the
    stage's replicas. On a device that runs several, its gathers wait for their turn (`OrderTasks`), and so does what is
    sent for them: each replica then has reads of its own.

    Args:
        options: the pass.
        builder: of the step's top level.
        functions: receives the functions that the nodes call.

    Attributes:
        tensors: (parameter, stage, replica) -> its whole value on the replica's device.
        reads: (stages of a parameter group, device) -> the nodes that read its shards there.
        begins: (stage, replica) -> the nodes that wait for its turn; none if its device runs no other stage.
    """

    def __init__(self, options: Replicate, builder: Builder, functions: list[FunctionDef]) -> None:
        self.tensors: dict[tuple[str, int, int], Ref] = {}
        self.reads: dict[tuple[tuple[int, ...], str], tuple[str, ...]] = {}
        self.begins: dict[tuple[int, int], tuple[str, ...]] = {}
        self._options, self._layout, self._builder, self._functions = options, options.layout, builder, functions
        self._gathers = 0

    def add(self, stage: Stage, variables: Mapping[str, Variable], replicas: Iterable[int]) -> None:
        """Gathers the sharded parameters that a stage reads, except tables looked up before F.

        Args:
            stage: the stage.
            variables: the program's variables.
            replicas: its replicas with samples.
        """
        groups: dict[tuple[int, ...], list[Variable]] = {}
        for name in stage.reads:
            if name in self._options.in_shards and name not in stage.looked_up:
                groups.setdefault(tuple(self._options.owners[name]), []).append(variables[name])
        for stages, whole in groups.items():
            devices = tuple(dict.fromkeys(device for own in stages for device in self._layout.devices[own]))
            in_shards = [dataclasses.replace(variable, shards=len(devices)) for variable in whole]
            packed = buckets(sorted(in_shards, key=lambda variable: variable.dtype), self._options.bucket_bytes)
            label = f"stage{stage.index}_of{'_'.join(map(str, stages))}"
            name = f"{self._options.prefix}{label}_gather"
            reading = _reading(f"{name}_read", packed)
            joining = [_joining(f"{name}{index}", bucket) for index, bucket in enumerate(packed)]
            self._functions += [reading, *joining]
            together: list[str] = []
            for replica in replicas:
                if self._takes_turns(stage.index, replica):
                    reads = self._read(reading, stages, devices, f"{label}/replica{replica}")
                    self.begins[stage.index, replica] = (*self.begins.get((stage.index, replica), ()), *reads)
                else:
                    reads = together = together or self._read(reading, stages, devices, label)
                self._join(stage.index, replica, packed, joining, reads)

    def _takes_turns(self, stage: int, replica: int) -> bool:
        """Whether the device of a replica runs other stages, too."""
        device = self._layout.devices[stage][replica]
        return sum(device in devices for devices in self._layout.devices) > 1

    def _read(self, function: FunctionDef, stages: tuple[int, ...], devices: Sequence[str], label: str) -> list[str]:
        """Reads all shards, on each device its own; returns the nodes."""
        attrs = {PHASE_ATTR: NodeKind.READ.text, STAGE_ATTR: stages[0], GROUP_ATTR: integers_attr(stages)}
        nodes = []
        for number, device in enumerate(devices):
            name = self._builder.names.fresh(f"{label}/read_shard{number}")
            nodes.append(self._builder.append(call_node(name, function, [], device=device, attrs=attrs)).node)
            self.reads[stages, device] = (*self.reads.get((stages, device), ()), name)
        return nodes

    def _join(
        self,
        stage: int,
        replica: int,
        packed: Sequence[Sequence[Variable]],
        functions: Sequence[FunctionDef],
        reads: Sequence[str],
    ) -> None:
        """Joins all shards on the device of a replica, bucket by bucket."""
        device = self._layout.devices[stage][replica]
        for index, (bucket, function) in enumerate(zip(packed, functions, strict=True)):
            self._gathers += 1
            attrs = {
                PHASE_ATTR: NodeKind.ALL_GATHER.text,
                STAGE_ATTR: stage,
                REPLICA_ATTR: replica,
                REDUCTION_ATTR: -self._gathers,  # Numbers of reductions are above 0.
                BYTES_ATTR: bytes_of(bucket),
            }
            name = self._builder.names.fresh(f"stage{stage}/replica{replica}/gather")
            vectors = [Ref(node, index) for node in reads]
            node = self._builder.append(call_node(name, function, vectors, device=device, attrs=attrs)).node
            for position, variable in enumerate(bucket):
                self.tensors[variable.name, stage, replica] = Ref(node, position)


def packed_shards(builder: Builder, shards: Sequence[Ref], dtype: int) -> Ref:
    """Returns a device's shards of a bucket of variables as one vector."""
    return builder.concat("bucket", [flatten(builder, shard, dtype) for shard in shards], dtype, 0)


def joined_buckets(builder: Builder, vectors: Sequence[Ref], bucket: Sequence[Variable]) -> list[Ref]:
    """Returns the whole values of a bucket of variables from all devices' `packed_shards`, in order."""
    shapes = [variable.storage_shape for variable in bucket]
    columns = [unflatten(builder, vector, bucket[0].dtype, shapes) for vector in vectors]
    return [
        joined_shards(builder, shards, variable)
        for variable, shards in zip(bucket, zip(*columns, strict=True), strict=True)
    ]


def vector_arguments(builder: Builder, bucket: Sequence[Variable]) -> list[Ref]:
    """Returns arguments of a function for all devices' `packed_shards`."""
    dtype = bucket[0].dtype
    return [builder.append(placeholder(builder.names.fresh("vector"), dtype)) for _ in range(bucket[0].shards)]


def _reading(name: str, packed: Sequence[Sequence[Variable]]) -> FunctionDef:
    """Returns the function () -> a device's shards, a vector for each bucket."""
    builder = Builder(empty_graph())
    vectors = []
    for bucket in packed:
        shards = [read_variable(builder, v) for v in bucket]
        vectors.append(packed_shards(builder, shards, bucket[0].dtype))
    return outline(name, Graph(builder.graph), [], vectors)


def _joining(name: str, bucket: Sequence[Variable]) -> FunctionDef:
    """Returns the function from the vectors of all devices' shards to whole values."""
    builder = Builder(empty_graph())
    vectors = vector_arguments(builder, bucket)
    values = joined_buckets(builder, vectors, bucket)
    return outline(name, Graph(builder.graph), vectors, values)
