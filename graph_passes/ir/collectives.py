"""TensorFlow's collective operations: all-reduces of a step's top level, and sums inside stage functions.

Sums over the replicas that work on one micro-batch (of a layer's moments, say, and of their gradients) are inside. The
replicas to add up (`Peers`) are arguments, so that one function serves all replicas and micro-batches.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from typing import Any

from tensorflow.core.framework import types_pb2

from graph_passes.errors import PassError
from graph_passes.ir.batching import split_evenly
from graph_passes.ir.graph import (
    BYTES_ATTR,
    OWN_ATTRS,
    PHASE_ATTR,
    REDUCTION_ATTR,
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
    set_inputs,
)
from graph_passes.ir.node_kinds import NodeKind
from graph_passes.ir.outline import FunctionDef
from graph_passes.ir.tensorflow_bridge import dtype_size

SUM_OP = "CollectiveReduceV2"
HINT_ATTR = "communication_hint"
RING, NCCL = "auto", "nccl"
"""Who adds up: TensorFlow by a ring of copies, which need no order; NCCL by kernels, which wait for each other."""


@dataclasses.dataclass(frozen=True)
class AllReduceRules:
    """How gradients are all-reduced.

    Attributes:
        hint: who makes the all-reduces (`HINT_ATTR`).
        hierarchical: the stages whose parameter groups are reduced inside each server first; a group of several stages
            counts as its first one's.
        server_of: device -> number of its server, for hierarchical ones.
    """

    hint: str = RING
    hierarchical: frozenset[int] = frozenset()
    server_of: Mapping[str, int] = dataclasses.field(default_factory=dict)


class AllReduces:
    """Adds all-reduces to a top level; each device starts them in the order of the calls.

    Hierarchical ones send each gradient over a network card fewer times:

        servers {0, 1}, {2, 3}, the two halves h of each device's vector:

        parts h of v0, v1 -> sum on device h ─┐
                                              ├ all-reduce {h, h + 2} -> both halves, joined on each device
        parts h of v2, v3 -> sum on h + 2 ────┘

    The devices of a server add up a part of the vector each (a reduce-scatter), the devices with the same part on all
    servers all-reduce it, and each device gets all parts (an all-gather). There are as many parts as the server with
    the fewest members has, so that a network card carries 2 (s - 1) / s of the vector for s servers rather than the
    2 (n - 1) / n of one ring through n devices, which crosses it once for each server. With one member there, the
    vector is one part: a reduce, an all-reduce between the servers, and a broadcast. Inside one server, and with one
    member on each server, they are flat.

    Args:
        builder: of the top level.
        rules: how they are made.
        first_key: the first of the collective keys.

    Source: DAPPLE (PPoPP'21), section 4.1, plans for hierarchical interconnects; the three steps are those of
    Horovod's and NCCL's hierarchical all-reduce.
    """

    def __init__(self, builder: Builder, rules: AllReduceRules, first_key: int) -> None:
        self._builder, self._rules = builder, rules
        self._next_key = first_key
        self._group_keys: dict[tuple[str, ...], int] = {}
        self._previous: dict[str, str] = {}  # device -> the last that it starts so far

    def number(self) -> int:
        """Returns a number that no other reduction of the step has."""
        self._next_key += 1
        return self._next_key - 1

    def add(
        self,
        vectors: Mapping[str, Ref],
        names: Mapping[str, str],
        dtype: int,
        size: int,
        marks: Mapping[str, Any],
        *,
        merge: str = "Add",
    ) -> dict[str, Ref]:
        """Adds an all-reduce.

        Args:
            vectors: device -> its part.
            names: device -> start of its nodes' names.
            dtype: dtype of the vectors.
            size: bytes of each.
            marks: attributes of all nodes, their stage among them.
            merge: ``"Add"``, ``"Max"`` or ``"Min"``; only sums are hierarchical.

        Returns:
            Device -> the whole.

        Raises:
            PassError: a device is on no server.
        """
        number = self.number()
        names = {device: f"{start}/all_reduce{number}" for device, start in names.items()}
        hierarchical = marks[STAGE_ATTR] in self._rules.hierarchical and merge == "Add"
        members = self._by_server(vectors, number) if hierarchical else []
        if not part_count(members):
            return self._meet(vectors, names, dtype, size, marks, number, merge)
        builder, length = self._builder, size // dtype_size(dtype)
        count = max(1, min(part_count(members), length))
        sizes = split_evenly(length, count)
        marks = {**marks, REDUCTION_ATTR: number}
        sums: dict[str, Ref] = {}
        with builder.marked({**marks, **NodeKind.REDUCE_SCATTER.marks()}):
            parts = {
                device: builder.split(f"{names[device]}/parts", vector, dtype, sizes, 0, device=device)
                for device, vector in vectors.items()
            }
            for devices in members:
                for part, owner in enumerate(devices[:count]):
                    own = [parts[device][part] for device in devices]
                    sums[owner] = builder.add_n(f"{names[owner]}/sum", own, dtype, device=owner)
        reduced: dict[str, Ref] = {}
        for part, peers in enumerate(zip(*(devices[:count] for devices in members), strict=True)):
            between = {device: f"{names[device]}/between_servers" for device in peers}
            own_size = sizes[part] * dtype_size(dtype)
            reduced |= self._meet({one: sums[one] for one in peers}, between, dtype, own_size, marks, self.number())
        whole: dict[str, Ref] = {}
        with builder.marked({**marks, **NodeKind.ALL_GATHER.marks()}):
            for devices in members:
                own = [reduced[owner] for owner in devices[:count]]
                for device in devices:
                    if count > 1:
                        whole[device] = builder.concat(names[device], own, dtype, 0, device=device)
                    else:
                        whole[device] = builder.add(names[device], "Identity", own, device=device, T=dtype_attr(dtype))
        return whole

    def _by_server(self, devices: Iterable[str], number: int) -> list[list[str]]:
        """Returns the members on each server."""
        by_server: dict[int, list[str]] = {}
        for device in devices:
            server = self._rules.server_of.get(device)
            if server is None:
                raise PassError(f"all-reduce {number} is on {device!r}, which is on no server")
            by_server.setdefault(server, []).append(device)
        return list(by_server.values())

    def _meet(
        self,
        vectors: Mapping[str, Ref],
        names: Mapping[str, str],
        dtype: int,
        size: int,
        marks: Mapping[str, Any],
        number: int,
        merge: str = "Add",
    ) -> dict[str, Ref]:
        """Adds a flat all-reduce."""
        keys = (len(vectors), self._group_keys.setdefault(tuple(vectors), number), number)
        attrs = {**marks, PHASE_ATTR: NodeKind.ALL_REDUCE.text, BYTES_ATTR: size, HINT_ATTR: self._rules.hint}
        reduced: dict[str, Ref] = {}
        for device, vector in vectors.items():
            after = [self._previous[device]] if device in self._previous else []
            reduced[device] = all_reduce(
                self._builder,
                names[device],
                vector,
                dtype,
                keys,
                device=device,
                control=after,
                merge_op=merge,
                **attrs,
            )
            self._previous[device] = reduced[device].node
        return reduced


def part_count(members: Sequence[Collection[object]]) -> int:
    """Returns into how many parts a hierarchical all-reduce splits vectors; 0 where one ring does as well.

    Args:
        members: the devices of each server that take part.
    """
    if len(members) < 2 or all(len(devices) == 1 for devices in members):
        return 0
    return min(map(len, members))


def all_reduce(
    builder: Builder,
    name: str,
    vector: Ref,
    dtype: int,
    keys: tuple[int, int, int],
    *,
    device: str,
    control: Iterable[str] = (),
    **attrs: Any,
) -> Ref:
    """Adds one member of an all-reduce; returns the sum over all members, or the largest or smallest.

    Args:
        builder: adds the node.
        name: the node's name.
        vector: the member's part.
        dtype: its dtype.
        keys: number of members, key of these members, and number of this all-reduce among theirs.
        device: the member's device.
        control: nodes that it waits for.
        **attrs: further attributes; ``merge_op`` is ``"Add"``, and `HINT_ATTR` is `RING`, if they aren't among them.
    """
    numbers = [builder.const(value, types_pb2.DT_INT32, device=device) for value in keys]
    return builder.add(
        name,
        SUM_OP,
        [vector, *numbers],
        control=control,
        device=device,
        T=dtype_attr(dtype),
        final_op="Id",
        # No timeout: TensorFlow would start a thread for each, which sleeps until it is over in any case.
        timeout_seconds=0.0,
        Nordering_token=0,
        max_subdivs_per_device=-1,
        **{"merge_op": "Add", HINT_ATTR: RING, **attrs},
    )


# ---- sums inside stage functions


def sums_of(nodes: Iterable[NodeDef]) -> list[NodeDef]:
    """Returns the sums over replicas among nodes, in their order."""
    return [node for node in nodes if node.op == SUM_OP]


def without_sums(graph: GraphDef) -> GraphDef:
    """Returns the graph of a replica alone, whose sums are its own values.

    x -> CollectiveReduceV2 -> y   becomes   x -> Identity -> y
    """
    if not sums_of(graph.node):
        return graph
    alone = copied(graph)
    for node in sums_of(alone.node):
        node.op = "Identity"
        set_inputs(node, data_inputs(node)[:1], control_inputs(node))
        for key in [key for key in node.attr if key != "T" and not key.startswith(OWN_ATTRS)]:
            del node.attr[key]
    return alone


def key_nodes(graph: Graph, peers: Container[Ref]) -> set[str]:
    """Returns the nodes that compute keys of sums: from ``peers``, the stage's arguments, and constants alone."""
    keys: set[str] = set()
    for node in graph:
        producers = [ref for ref in graph.inputs(node.name) if graph.nodes[ref.node].op != "Const"]
        if producers and all(ref in peers or ref.node in keys for ref in producers):
            keys.add(node.name)
    return keys


def order_sums(function: FunctionDef) -> None:
    """Makes each sum of a function wait for the previous one, in place, so that all replicas run them in one order."""
    for before, after in itertools.pairwise(sums_of(function.node_def)):
        if before.name not in control_inputs(after):
            after.input.append(f"^{before.name}")
