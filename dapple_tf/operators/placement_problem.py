"""An `OpGraph` and a `Topology` as plain lists, for loops over operators."""

from __future__ import annotations

import dataclasses

import numpy as np

from dapple_tf.errors import DappleError
from dapple_tf.operators.op_graph import OpGraph, Topology


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
