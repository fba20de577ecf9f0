"""All-reduces whose members were placed one by one: their buckets, their groups, and the order in which they meet."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any

from tensorflow.core.framework import types_pb2

from graph_passes.errors import PassError
from graph_passes.ir.collectives import SUM_OP
from graph_passes.ir.graph import (
    BYTES_ATTR,
    GROUP_ATTR,
    REPLICA_ATTR,
    STAGE_ATTR,
    Builder,
    Graph,
    GraphDef,
    Ref,
    control_inputs,
    copied,
    data_inputs,
    set_inputs,
)
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.tensorflow_bridge import constant_value, dtype_size

_GROUP_KEY, _INSTANCE_KEY = 2, 3
"""Arguments of an all-reduce: the key of its devices, and its number."""


def common_order(view: Graph, ranks: Mapping[str, Any]) -> list[list[str]]:
    """Returns all nodes in a topological order in which the members of an all-reduce are one entry.

    If each device runs its operators in this order, no two devices wait for each other at all-reduces.

    Args:
        view: a top level.
        ranks: node -> its rank: among those that may come next, the least does; nodes without a rank at once.

    Raises:
        PassError: members of an all-reduce wait for each other.
    """
    entry_of: dict[str, int] = {}
    entries: list[list[str]] = []
    meetings: dict[int, int] = {}  # instance of an all-reduce -> its entry
    for name, node in view.nodes.items():
        number = meetings.setdefault(_instance(view, name), len(entries)) if node.op == SUM_OP else len(entries)
        if number == len(entries):
            entries.append([])
        entries[number].append(name)
        entry_of[name] = number
    followers: list[list[int]] = [[] for _ in entries]
    pending = [0] * len(entries)
    for name, own in entry_of.items():
        for producer in set(view.sources(name)):
            followers[entry_of[producer]].append(own)
            pending[own] += 1
    keys = [max([(1, ranks[name]) for name in names if name in ranks], default=(0, 0)) for names in entries]
    ready = [(keys[number], number) for number, count in enumerate(pending) if not count]
    heapq.heapify(ready)
    order: list[list[str]] = []
    while ready:
        _, number = heapq.heappop(ready)
        order.append(entries[number])
        for follower in followers[number]:
            pending[follower] -= 1
            if not pending[follower]:
                heapq.heappush(ready, (keys[follower], follower))
    if len(order) < len(entries):
        view.topological()  # raises an error that shows a cycle, if members needn't meet for one
        stuck = next(names for names, count in zip(entries, pending, strict=True) if count and len(names) > 1)
        raise PassError(
            f"all-reduce {stuck[0]!r} and its members wait for each other; replicas must make the same operators"
        )
    return order


def join_reductions(
    graph: GraphDef, devices: Mapping[str, str], units: Mapping[str, str], bucket_bytes: int
) -> GraphDef:
    """Returns the graph with all-reduces of the same devices joined in buckets.

        a -> all-reduce -> x, b -> all-reduce -> y   becomes   a, b -> concat -> all-reduce -> split -> x, y

    Args:
        graph: a top level with one all-reduce for each variable; it isn't changed.
        devices: member of an all-reduce -> the device that it is placed on; others stay where they are.
        units: member -> what it is packed with, whose parts are all complete before any is reduced.
        bucket_bytes: approximate size of a bucket.
    """
    view = Graph(graph)
    members: dict[int, dict[str, str]] = {}  # instance -> device -> member
    for name, node in view.nodes.items():
        if node.op == SUM_OP and BYTES_ATTR in node.attr:
            members.setdefault(_instance(view, name), {})[devices.get(name, node.device)] = name
    buckets: dict[tuple[str, frozenset[str], int, bytes], list[list[int]]] = {}
    sizes: dict[int, int] = {}
    for instance, own in sorted(members.items()):
        first = next(iter(own.values()))
        sizes[instance], kind = int(view.nodes[first].attr[BYTES_ATTR].i), view.nodes[first].attr["T"].type
        merge = view.nodes[first].attr["merge_op"].s
        alike = buckets.setdefault((units[first], frozenset(own), kind, merge), [[]])
        if alike[-1] and sum(sizes[other] for other in alike[-1]) + sizes[instance] > bucket_bytes:
            alike.append([])
        alike[-1].append(instance)
    joined = copied(graph)
    builder, nodes = Builder(joined), {node.name: node for node in joined.node}
    instead: dict[str, Ref] = {}  # member -> its part of the bucket
    waited: dict[str, str] = {}  # member -> that of the bucket
    parts_of: set[str] = set()
    for (_, own_devices, kind, _), alike in buckets.items():
        for bucket in (bucket for bucket in alike if len(bucket) > 1):
            lengths = [sizes[instance] // dtype_size(kind) for instance in bucket]
            for device in sorted(own_devices):
                names = [members[instance][device] for instance in bucket]
                vectors = [view.inputs(name)[0] for name in names]
                node = nodes[names[0]]
                marks = {key: node.attr[key] for key in (STAGE_ATTR, REPLICA_ATTR, GROUP_ATTR) if key in node.attr}
                with builder.marked({**NodeKind.CONCAT.marks(), **marks}):
                    node.input[0] = str(builder.concat(f"{names[0]}/bucket", vectors, kind, 0, device=device))
                node.device, node.attr[BYTES_ATTR].i = device, sum(sizes[instance] for instance in bucket)
                with builder.marked({**NodeKind.SPLIT.marks(), **marks}):
                    parts = builder.split(f"{names[0]}/parts", Ref(names[0]), kind, lengths, 0, device=device)
                parts_of.add(parts[0].node)
                instead |= zip(names, parts, strict=True)
                waited |= dict.fromkeys(names, names[0])
    rest = [node for node in joined.node if waited.get(node.name, node.name) == node.name]
    reduced = GraphDef(node=rest, versions=joined.versions, library=joined.library)
    for node in reduced.node:
        if node.name in parts_of or not any(text.removeprefix("^") in waited for text in node.input):
            continue
        waits = (waited.get(name, name) for name in control_inputs(node))
        data = [instead.get(ref.node, ref) for ref in data_inputs(node)]
        set_inputs(node, data, (name for name in waits if name != node.name))
    return reduced


def regroup(graph: GraphDef, view: Graph, order: Sequence[Sequence[str]]) -> None:
    """Gives all-reduces whose members have got other devices the groups of these, and an order on each, in place.

    Args:
        graph: the top level, with the members' new devices.
        view: the top level before.
        order: the order of its nodes, see `common_order`.
    """
    nodes = {node.name: node for node in graph.node}
    builder = Builder(graph)
    keys: dict[frozenset[str], int] = {}
    last: dict[str, str] = {}
    for names in order:
        if view.nodes[names[0]].op != SUM_OP:
            continue
        key = keys.setdefault(frozenset(nodes[name].device for name in names), _instance(view, names[0]))
        for name in names:
            node = nodes[name]
            data = data_inputs(node)
            data[_GROUP_KEY] = builder.const(key, types_pb2.DT_INT32, device=node.device)
            waits = [waited for waited in control_inputs(node) if nodes[waited].op != SUM_OP]
            if node.device in last:
                waits.append(last[node.device])
            set_inputs(node, data, waits)
            last[node.device] = name


def _instance(view: Graph, name: str) -> int:
    return int(constant_value(view.nodes[view.inputs(name)[_INSTANCE_KEY].node]))
