"""Hierarchical all-reduce: gradients are added up inside each server before they cross the links between servers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from tensorflow.core.framework import types_pb2

from graph_passes.errors import PassError
from graph_passes.ir.batching import split_evenly
from graph_passes.ir.graph import (
    BYTES_ATTR,
    GROUP_ATTR,
    PHASE_ATTR,
    REDUCTION_ATTR,
    STAGE_ATTR,
    Builder,
    Graph,
    GraphDef,
    NodeDef,
    Ref,
    attr,
    control_inputs,
    copied,
    copied_node,
    data_inputs,
    drop_unread,
    dtype_attr,
    make_node,
)
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.program import Fact, Program
from graph_passes.ir.replica_sums import SUM_OP
from graph_passes.ir.tensorflow_bridge import dtype_size


@dataclasses.dataclass(frozen=True)
class ReduceByServer:
    """Replaces all-reduces over several servers by ones that send each gradient over a network card fewer times.

        servers {0, 1}, {2, 3}:  v0..v3 -> all-reduce   becomes, for each device d and the two halves h of its vector

        parts h of v0, v1 -> sum on device h ─┐
                                              ├ all-reduce {h, h + 2} -> both halves, joined on each device
        parts h of v2, v3 -> sum on h + 2 ────┘

    The devices of a server add up a part of the vector each (a reduce-scatter), the devices with the same part on all
    servers all-reduce it, and each device gets all parts (an all-gather). There are as many parts as the server with
    the fewest members has, so that a network card carries 2 (s - 1) / s of the vector for s servers rather than the
    2 (n - 1) / n of one ring through n devices, which crosses it once for each server. With one member there, the
    vector is one part: a reduce, an all-reduce between the servers, and a broadcast.

    All-reduces inside one server, and those with one member on each server, stay as they are.

    Attributes:
        stages: the stages whose parameter groups are reduced so; a group of several stages counts as its first one's.
        server_of: device -> number of its server.

    Source: DAPPLE (PPoPP'21), section 4.1, plans for hierarchical interconnects; the three steps are those of
    Horovod's and NCCL's hierarchical all-reduce.
    """

    name: ClassVar[str] = "reduce_by_server"
    requires: ClassVar[tuple[Fact, ...]] = (Fact.COMPLETE,)
    ensures: ClassVar[tuple[Fact, ...]] = (Fact.COMPLETE,)
    stages: frozenset[int]
    server_of: Mapping[str, int]

    def run(self, program: Program) -> Program:
        """A complete step -> the same, whose all-reduces of these groups go by server.

        Raises:
            PassError: a member is on no server.
        """
        graph = copied(program.graph)
        self.rewrite(graph)
        return program.replace(graph=graph)

    def rewrite(self, graph: GraphDef) -> None:
        """Replaces the all-reduces of a graph, in place. Who reads a reduced vector needn't change."""
        before = Graph(copied(graph))
        reductions = [(reduction, self._members(reduction)) for reduction in _all_reduces(before)]
        changes = [
            reduction.stage in self.stages and part_count(members) > 0 and reduction.adds
            for reduction, members in reductions
        ]
        if not any(changes):
            return
        rewriting = _Rewriting(graph, before)
        for (reduction, members), change in zip(reductions, changes, strict=True):
            if change:
                rewriting.replace(reduction, members)
            else:
                rewriting.keep(reduction)
        rewriting.finish()

    def _members(self, reduction: _AllReduce) -> list[list[str]]:
        """Returns the members on each server."""
        by_server: dict[int, list[str]] = {}
        for device in reduction.nodes:
            if device not in self.server_of:
                raise PassError(f"all-reduce {reduction.instance} is on {device!r}, which is on no server")
            by_server.setdefault(self.server_of[device], []).append(device)
        return list(by_server.values())


def part_count(members: Sequence[Collection[object]]) -> int:
    """Returns into how many parts an all-reduce by server splits vectors; 0 where one ring does as well.

    Args:
        members: the devices of each server that take part.
    """
    if len(members) < 2 or all(len(devices) == 1 for devices in members):
        return 0
    return min(map(len, members))


class _AllReduce(NamedTuple):
    """An all-reduce of the top level.

    Attributes:
        instance: its number.
        stage: the first stage of its parameter group.
        nodes: device -> its node there.
    """

    instance: int
    stage: int
    nodes: dict[str, NodeDef]

    @property
    def adds(self) -> bool:
        """Whether it is a sum."""
        return all(node.attr["merge_op"].s == b"Add" for node in self.nodes.values())


def _all_reduces(graph: Graph) -> list[_AllReduce]:
    """Returns the all-reduces of gradients, in the order in which devices start them."""
    reductions: dict[int, _AllReduce] = {}
    for name in graph.topological():
        node = graph.nodes[name]
        if _reduces(node):
            instance = _constant(graph, data_inputs(node)[3])
            stage = int(node.attr[STAGE_ATTR].i)
            reductions.setdefault(instance, _AllReduce(instance, stage, {})).nodes[node.device] = node
    for reduction in reductions.values():
        members = sorted(reduction.nodes.values(), key=lambda node: graph.position[node.name])
        reduction.nodes.clear()
        reduction.nodes.update({node.device: node for node in members})
    return list(reductions.values())


def _reduces(node: NodeDef) -> bool:
    return node.op == SUM_OP and NodeKind.of(node) is NodeKind.ALL_REDUCE


def _constant(graph: Graph, ref: Ref) -> int:
    return int(graph.nodes[ref.node].attr["value"].tensor.int_val[0])


class _Rewriting:
    """A graph while its all-reduces are replaced, in the order in which devices start them.

    Args:
        graph: the graph, which changes.
        before: the graph as it was.
    """

    def __init__(self, graph: GraphDef, before: Graph) -> None:
        self._graph = graph
        self._reducing = {node.name for node in before if _reduces(node)}
        self._constants = {ref.node for name in self._reducing for ref in data_inputs(before.nodes[name])[1:]}
        rest = [node for node in graph.node if node.name not in self._reducing]
        del graph.node[:]
        graph.node.extend(rest)
        self._builder = Builder(graph)
        keys = [ref for name in self._reducing for ref in data_inputs(before.nodes[name])[2:4]]
        self._next_key = max((_constant(before, ref) for ref in keys), default=0) + 1
        self._group_keys: dict[tuple[str, ...], int] = {}
        self._previous: dict[str, str] = {}  # device -> the collective that it starts last so far

    def keep(self, reduction: _AllReduce) -> None:
        """Keeps an all-reduce, after the one before it on each device, which may be another now."""
        for node in reduction.nodes.values():
            same = copied_node(node)
            self._start(same, data_inputs(node))

    def replace(self, reduction: _AllReduce, members: Sequence[Sequence[str]]) -> None:
        """Replaces an all-reduce. Its nodes' names go to those that give the reduced vectors."""
        nodes, builder = reduction.nodes, self._builder
        names = {device: builder.names.fresh(node.name) for device, node in nodes.items()}
        some = next(iter(nodes.values()))
        dtype, size = some.attr["T"].type, int(some.attr[BYTES_ATTR].i)
        length = size // dtype_size(dtype)
        count = max(1, min(part_count(members), length))
        sizes = split_evenly(length, count)
        marks: dict[str, Any] = {key: some.attr[key] for key in (STAGE_ATTR, GROUP_ATTR)}
        marks[REDUCTION_ATTR] = reduction.instance
        sums: dict[str, Ref] = {}
        with builder.marked({**marks, PHASE_ATTR: NodeKind.REDUCE_SCATTER.text}):
            parts = {
                device: builder.split(f"{names[device]}/parts", data_inputs(node)[0], dtype, sizes, 0, device=device)
                for device, node in nodes.items()
            }
            for devices in members:
                for part, owner in enumerate(devices[:count]):
                    own = [parts[device][part] for device in devices]
                    sums[owner] = builder.add_n(f"{names[owner]}/sum", own, dtype, device=owner)
        reduced: dict[str, Ref] = {}
        for part, peers in enumerate(zip(*(devices[:count] for devices in members), strict=True)):
            group, instance = self._group_key(peers), self._key()
            for device in peers:
                node = copied_node(nodes[device])
                node.name = builder.names.fresh(f"{names[device]}/between_servers")
                for key, value in {**marks, BYTES_ATTR: sizes[part] * dtype_size(dtype)}.items():
                    node.attr[key].CopyFrom(attr(value))
                keys = (len(peers), group, instance)
                numbers = [builder.const(value, types_pb2.DT_INT32, device=device) for value in keys]
                reduced[device] = self._start(node, [sums[device], *numbers])
        with builder.marked({**marks, PHASE_ATTR: NodeKind.ALL_GATHER.text}):
            for devices in members:
                own = [reduced[owner] for owner in devices[:count]]
                for device in devices:
                    self._gather(names[device], own, dtype, device)

    def _start(self, node: NodeDef, inputs: Sequence[Ref]) -> Ref:
        """Adds a collective, which its device starts after all others so far."""
        control = [name for name in control_inputs(node) if name not in self._reducing]
        if node.device in self._previous:
            control.append(self._previous[node.device])
        del node.input[:]
        node.input.extend([*map(str, inputs), *(f"^{name}" for name in control)])
        self._previous[node.device] = node.name
        return self._builder.append(node)

    def _gather(self, name: str, parts: Sequence[Ref], dtype: int, device: str) -> None:
        """Adds the node by which a device gets the whole reduced vector."""
        kind = dtype_attr(dtype)
        if len(parts) == 1:
            node = make_node(name, "Identity", parts, device=device, attrs={"T": kind})
        else:
            axis = self._builder.const(0, types_pb2.DT_INT32, device=device)
            attrs = {"T": kind, "Tidx": dtype_attr(types_pb2.DT_INT32), "N": len(parts)}
            node = make_node(name, "ConcatV2", [*parts, axis], device=device, attrs=attrs)
        self._builder.append(node)

    def _group_key(self, devices: tuple[str, ...]) -> int:
        if devices not in self._group_keys:
            self._group_keys[devices] = self._key()
        return self._group_keys[devices]

    def _key(self) -> int:
        self._next_key += 1
        return self._next_key - 1

    def finish(self) -> None:
        """Removes the constants that only replaced nodes read."""
        drop_unread(self._graph, self._constants)
