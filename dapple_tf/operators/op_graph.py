"""The operators of a training step with their costs, the devices, and placements: what a search takes and returns."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from dapple_tf.common.text_table import table
from dapple_tf.common.units import counted, gib, ms_text
from dapple_tf.describe.cluster import Cluster
from dapple_tf.errors import DappleError
from graph_passes.analysis.split_rules import Split, SplitRule


@dataclasses.dataclass(frozen=True, eq=False)
class Topology:
    """The devices and the links between them: D(V, E) of FD-DPS, definition 2.

    Attributes:
        names: of the devices, V in number.
        bandwidth: bytes/s from a device to another, float64 [V, V]; inf where it is unknown, and on the diagonal.
        latency: seconds until a transfer's first byte arrives, float64 [V, V]; 0 on the diagonal.
        memory_bytes: each device's limit, float64 [V]; inf for no limit.
    """

    names: tuple[str, ...]
    bandwidth: np.ndarray
    latency: np.ndarray
    memory_bytes: np.ndarray

    @classmethod
    def of(cls, cluster: Cluster, devices: Sequence[int] | None = None) -> Topology:
        """Returns the topology of some devices of a cluster, in this order; all of them for None."""
        chosen = range(cluster.num_devices) if devices is None else devices
        links = [[cluster.link(one, other) for other in chosen] for one in chosen]
        bandwidth = np.array([[link.bandwidth for link in row] for row in links], float)
        latency = np.array([[link.latency for link in row] for row in links], float)
        np.fill_diagonal(bandwidth, np.inf)
        np.fill_diagonal(latency, 0.0)
        limits = [cluster.devices[device].memory_bytes for device in chosen]
        memory = np.array([np.inf if limit is None else limit for limit in limits], float)
        return cls(tuple(cluster.device_names[device] for device in chosen), bandwidth, latency, memory)

    @classmethod
    def of_groups(cls, cluster: Cluster, groups: Sequence[Sequence[int]]) -> Topology:
        """Returns the topology of equally large groups of devices that run the same operators, device i of each alike.

        It has the first group's names, and of each device and link the slowest and smallest of its likes.
        """
        alike = [cls.of(cluster, group) for group in groups]
        return cls(
            alike[0].names,
            np.min([own.bandwidth for own in alike], axis=0),
            np.max([own.latency for own in alike], axis=0),
            np.min([own.memory_bytes for own in alike], axis=0),
        )

    @property
    def count(self) -> int:
        """V, the number of devices."""
        return len(self.names)

    def seconds(self, size: float, source: int, target: int) -> float:
        """Returns the seconds of a transfer of ``size`` bytes: formula 2; 0 on the same device."""
        return float(self.latency[source, target] + size / self.bandwidth[source, target])


@dataclasses.dataclass(frozen=True, eq=False)
class OpGraph:
    """The operators of a step, and their costs: T(O', E', V', W) of FD-DPS, definition 7.

    Operators are numbered in a topological order. Constants and fed placeholders aren't operators: every device has its
    own copy of a constant, and batches come from the host.

    Attributes:
        names: of the operators' nodes, n in number.
        ops: their TensorFlow op types.
        seconds: of each operator on each device, E of formula 1; float64 [n, V].
        edges: (producer, consumer, tensor, argument), -1 for the last two where the consumer only waits; int64
            [edges, 4]. Several edges may read one tensor; on one device they share one transfer.
        tensor_bytes: float64 [tensors].
        groups: operators with the same number are on one device (a variable and all that touch it); int64 [n].
        pinned: device on which a group has to be, -1 for any; int64 [groups].
        stored_bytes: of each group's variables, held all the time; float64 [groups].
        splits: operator -> the dimensions along which it can be split; empty for most.
        launch_seconds: seconds of starting an operator on each device, float64 [V]. A part with a share s of an
            operator takes launch + s (seconds - launch).
        copy_seconds: for each byte that a split, a concatenation or a sum writes, float64 [V].
        tensor_outputs: which output of its producer each tensor is; int64 [tensors]; None where all are the first.
        applied: name of an operator -> how it was split into some of these.
    """

    names: tuple[str, ...]
    ops: tuple[str, ...]
    seconds: np.ndarray
    edges: np.ndarray
    tensor_bytes: np.ndarray
    groups: np.ndarray
    pinned: np.ndarray
    stored_bytes: np.ndarray
    splits: Mapping[int, tuple[SplitRule, ...]]
    launch_seconds: np.ndarray
    copy_seconds: np.ndarray
    tensor_outputs: np.ndarray | None = None
    applied: Mapping[str, Split] = dataclasses.field(default_factory=dict)

    @property
    def count(self) -> int:
        """n, the number of operators."""
        return len(self.names)


@dataclasses.dataclass(frozen=True)
class OpPlacement:
    """Where each operator runs, and when: the strategy S and the queue Q of FD-DPS, algorithm 3.

    Attributes:
        devices: S: name of an operator -> index of its device. Split operators are listed by their parts.
        order: Q: the operators' names in the order in which they were scheduled, a topological order. Each device runs
            its operators in this order.
        splits: name of an operator of the unsplit graph -> how it was split.
        seconds: the simulated makespan.
        peak_bytes: the simulated peak of each device.
        device_names: of the devices, for reports; empty where they don't matter.
        ops: op types of the operators that were split, for reports.
    """

    devices: Mapping[str, int]
    order: tuple[str, ...]
    splits: Mapping[str, Split]
    seconds: float
    peak_bytes: tuple[float, ...]
    device_names: tuple[str, ...] = ()
    ops: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        return placement_report(self)


class DisjointSets:
    """Sets of integers that grow together (path halving)."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def find(self, item: int) -> int:
        """Returns the representative of an item's set."""
        parent = self._parent
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    def union(self, one: int, other: int) -> None:
        """Makes two sets one, with the representative of the first."""
        self._parent[self.find(other)] = self.find(one)


# ---- the same as plain lists, for loops over operators


class PlacementError(DappleError):
    """Operators can't be placed as asked; the text has both numbers and the fix."""


@dataclasses.dataclass(frozen=True, eq=False)
class PlacementProblem:
    """A compiled placement problem: n operators, m tensors, V devices.

    Attributes:
        graph: its source.
        topology: the devices.
        count: n.
        devices: V.
        seconds: of each operator, on each device.
        mean_seconds: of each operator over all devices.
        inputs: of each operator, the tensors that it reads, each once.
        waits: of each operator, those that it waits for without reading from them.
        outputs: of each operator, its tensors that have readers.
        producer: of each tensor.
        readers: of each tensor, each once.
        waiters: of each operator, those that only wait for it.
        size: bytes of each tensor.
        mean_transfer: seconds of each tensor's transfer, the mean over all pairs of different devices.
        latency: seconds from a device to another.
        per_byte: seconds for each byte, from a device to another.
        mean_latency: over all pairs of different devices.
        group: of each operator.
        members: operators of each group.
        pinned: device of each group; -1 for any.
        stored: bytes of each group.
    """

    graph: OpGraph
    topology: Topology
    count: int
    devices: int
    seconds: list[list[float]]
    mean_seconds: list[float]
    inputs: list[list[int]]
    waits: list[list[int]]
    outputs: list[list[int]]
    producer: list[int]
    readers: list[list[int]]
    waiters: list[list[int]]
    size: list[float]
    mean_transfer: list[float]
    latency: list[list[float]]
    per_byte: list[list[float]]
    mean_latency: float
    group: list[int]
    members: list[list[int]]
    pinned: list[int]
    stored: list[float]


def compile_problem(graph: OpGraph, topology: Topology) -> PlacementProblem:
    """Compiles a graph for these devices.

    Raises:
        PlacementError: the graph's costs are for another number of devices, its operators aren't in topological order,
            or a group is pinned to a device that isn't there.
    """
    count, devices = graph.count, topology.count
    if graph.seconds.shape != (count, devices):
        raise PlacementError(
            f"the graph has costs of {graph.seconds.shape[0]} operators on {graph.seconds.shape[-1]} devices, for "
            f"{count} operators and {devices} devices; build it for this topology"
        )
    edges = np.asarray(graph.edges, np.int64).reshape(-1, 4)
    wrong = np.flatnonzero(edges[:, 0] >= edges[:, 1])
    if len(wrong):
        first, second = edges[wrong[0], :2].tolist()
        raise PlacementError(
            f"operator {second} ({graph.names[second]}) comes before {first} ({graph.names[first]}), which it needs; "
            f"number operators in a topological order"
        )
    beyond = [group for group, device in enumerate(graph.pinned.tolist()) if device >= devices]
    if beyond:
        device = int(graph.pinned[beyond[0]])
        raise PlacementError(f"group {beyond[0]} is pinned to device {device} of {devices}; pin it to an earlier one")
    tensors = len(graph.tensor_bytes)
    data = edges[edges[:, 2] >= 0]
    producer = np.full(tensors, -1, np.int64)
    producer[data[:, 2]] = data[:, 0]
    reads = np.unique(data[:, 1] * max(tensors, 1) + data[:, 2])
    reader, read = reads // max(tensors, 1), reads % max(tensors, 1)
    known = np.unique(data[:, 0] * count + data[:, 1])
    control = np.unique(edges[edges[:, 2] < 0, 0] * count + edges[edges[:, 2] < 0, 1])
    control = control[~np.isin(control, known)]  # readers of an operator wait for it anyway
    first, second = control // count, control % count
    by_tensor = np.argsort(read, kind="stable")
    made = np.flatnonzero(producer >= 0)
    by_producer = made[np.argsort(producer[made], kind="stable")]
    by_waiter = np.argsort(second, kind="stable")
    off = ~np.eye(devices, dtype=bool)
    per_byte = 1.0 / topology.bandwidth
    np.fill_diagonal(per_byte, 0.0)
    mean_latency = float(topology.latency[off].mean()) if devices > 1 else 0.0
    mean_per_byte = float(per_byte[off].mean()) if devices > 1 else 0.0
    size = np.asarray(graph.tensor_bytes, float)
    groups = len(graph.pinned)
    by_group = np.argsort(graph.groups, kind="stable")
    return PlacementProblem(
        graph=graph,
        topology=topology,
        count=count,
        devices=devices,
        seconds=graph.seconds.tolist(),
        mean_seconds=graph.seconds.mean(axis=1).tolist() if count else [],
        inputs=_rows(reader, read, count),
        waits=_rows(second[by_waiter], first[by_waiter], count),
        outputs=_rows(producer[by_producer], by_producer, count),
        producer=producer.tolist(),
        readers=_rows(read[by_tensor], reader[by_tensor], tensors),
        waiters=_rows(first, second, count),
        size=size.tolist(),
        mean_transfer=(mean_latency + mean_per_byte * size).tolist(),
        latency=topology.latency.tolist(),
        per_byte=per_byte.tolist(),
        mean_latency=mean_latency,
        group=graph.groups.tolist(),
        members=_rows(graph.groups[by_group], by_group, groups),
        pinned=graph.pinned.tolist(),
        stored=np.asarray(graph.stored_bytes, float).tolist(),
    )


def tails(problem: PlacementProblem, devices: list[int] | None = None, weight: float = 1.0) -> list[float]:
    """Returns the least seconds from each operator's end to the end of the step: the longest path after it.

    With LST of FD-DPS' formula 7, tail(o) = DCPL - LST(o) - ET(o).

    Args:
        problem: the operators.
        devices: their devices, for exact times; None for means over devices and links.
        weight: of communication.
    """
    tail = [0.0] * problem.count
    readers, outputs, waiters = problem.readers, problem.outputs, problem.waiters
    size, seconds, mean_seconds, mean_transfer = (
        problem.size,
        problem.seconds,
        problem.mean_seconds,
        problem.mean_transfer,
    )
    for op in range(problem.count - 1, -1, -1):
        longest = 0.0
        if devices is None:
            for tensor in outputs[op]:
                under_way = weight * mean_transfer[tensor]
                for reader in readers[tensor]:
                    path = under_way + mean_seconds[reader] + tail[reader]
                    if path > longest:
                        longest = path
            for waiter in waiters[op]:
                path = weight * problem.mean_latency + mean_seconds[waiter] + tail[waiter]
                if path > longest:
                    longest = path
        else:
            here = devices[op]
            latency, per_byte = problem.latency[here], problem.per_byte[here]
            for tensor in outputs[op]:
                for reader in readers[tensor]:
                    there = devices[reader]
                    path = seconds[reader][there] + tail[reader]
                    if there != here:
                        path += weight * (latency[there] + size[tensor] * per_byte[there])
                    if path > longest:
                        longest = path
            for waiter in waiters[op]:
                there = devices[waiter]
                path = seconds[waiter][there] + tail[waiter] + weight * latency[there]
                if path > longest:
                    longest = path
        tail[op] = longest
    return tail


def _rows(keys: np.ndarray, values: np.ndarray, count: int) -> list[list[int]]:
    """Groups values by key; the keys ascend."""
    bounds = np.searchsorted(keys, np.arange(count + 1)).tolist()
    flat = values.tolist()
    return [flat[bounds[row] : bounds[row + 1]] for row in range(count)]


# ---- reports of a step's placement as text

_SHOWN = 8
"""The most op types named for operators that are split alike."""
_HERE = "/job:localhost/replica:0/task:0"


def placement_report(placement: OpPlacement) -> str:
    """Reports the simulated step, the splits, and what each device runs and holds: ``str(placement)``."""
    count, devices = len(placement.devices), len(placement.peak_bytes)
    lines = [
        f"{counted(count, 'operator')} on {counted(devices, 'device')}, "
        f"{ms_text(placement.seconds)} ms simulated for a step"
    ]
    lines += [f"split: {text}" for text in _splits(placement)] or ["no operator is split"]
    held = Counter(placement.devices.values())
    rows = [("device", "operators", "peak memory")]
    for device, peak in enumerate(placement.peak_bytes):
        rows.append((device_name(placement, device), f"{held[device]:,}", gib(peak)))
    return "\n".join([*lines, table(rows, left=1)])


def queue_report(placement: OpPlacement) -> str:
    """Lists every operator in the order of the queue Q: its position, its device, and its name."""
    position = len(str(max(len(placement.order) - 1, 0)))
    names = [device_name(placement, device) for device in range(len(placement.peak_bytes))]
    width = max(map(len, names), default=0)
    return "\n".join(
        f"{number:{position}}  {names[placement.devices[name]].ljust(width)}  {name}"
        for number, name in enumerate(placement.order)
    )


def placements_report(placements: Mapping[int, OpPlacement], groups: Sequence[Sequence[Sequence[int]]]) -> str:
    """Reports the placements of all stages, each with its queue.

    Args:
        placements: stage -> where its operators are.
        groups: for each stage the numbers, in the cluster, of the devices of each replica; replicas are alike.
    """
    parts = []
    for stage, placement in sorted(placements.items()):
        numbers = " and ".join(" ".join(map(str, group)) for group in groups[stage])
        parts.append(f"stage {stage} on devices {numbers}: {placement}\n\nqueue: position, device, operator")
        parts.append(queue_report(placement))
    return "\n\n".join(parts) + "\n"


def device_name(placement: OpPlacement, device: int) -> str:
    """Returns a device's name in reports: ``GPU:3``, on a cluster ``job:worker/task:1/GPU:3``.

    If names aren't known, it is the number within the placement.
    """
    if not placement.device_names:
        return str(device)
    name = placement.device_names[device].removeprefix(_HERE).replace("/replica:0", "").replace("device:", "")
    return name.removeprefix("/")


def _splits(placement: OpPlacement) -> list[str]:
    """Counts split operators by type for each dimension and number of parts; the most frequent first."""
    counts: dict[tuple[str, int], Counter[str]] = {}
    for name, split in placement.splits.items():
        counts.setdefault((split.dimension, split.parts), Counter())[placement.ops.get(name, "of unknown type")] += 1
    ordered = sorted(counts.items(), key=lambda item: (-item[1].total(), item[0]))
    lines = []
    for (dimension, parts), types in ordered:
        kinds = sorted(types.items(), key=lambda item: (-item[1], item[0]))
        shown = [f"{count:,} {op}" for op, count in kinds[:_SHOWN]]
        if rest := sum(count for _, count in kinds[_SHOWN:]):
            shown.append(f"{rest:,} others")
        lines.append(f"{types.total():,} by {dimension} into {parts}: {', '.join(shown)}")
    return lines
