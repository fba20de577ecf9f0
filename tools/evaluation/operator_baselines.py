"""Baselines for placements of operators, in the same simulator: one device, data parallelism, FD-DPS to the letter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.operators.list_scheduler import ListScheduler, Rule, earliest
from dapple_tf.operators.op_graph import OpGraph, OpPlacement, PlacementProblem, Topology, compile_problem, tails
from dapple_tf.operators.simulated_placement import judged, placed_by
from dapple_tf.operators.split_search import samples_operators


def single_device(graph: OpGraph, topology: Topology) -> OpPlacement:
    """Places everything on the fastest device, except groups that are pinned to another one.

    Its peak may be above the device's limit.
    """
    problem = compile_problem(graph, topology)
    totals = np.asarray(graph.seconds, float).sum(axis=0)
    pins = set(graph.pinned.tolist())
    fastest = min(range(topology.count), key=lambda device: (totals[device], device not in pins, device))
    devices = [problem.pinned[group] if problem.pinned[group] >= 0 else fastest for group in problem.group]
    return placed_by(judged(problem, devices, list(range(problem.count)), "one device"))


class DataParallelStep(NamedTuple):
    """A step of data parallelism.

    Attributes:
        seconds: of the whole step.
        reduce_seconds: of the gradients' all-reduces by themselves.
    """

    seconds: float
    reduce_seconds: float


def data_parallel(graph: OpGraph, topology: Topology, *, own_statistics: bool = False) -> DataParallelStep:
    """Simulates the whole step on each device for 1/V of the batch, with gradients all-reduced in a ring or directly.

    Operators on samples take launch + (seconds - launch) / V; the rest, such as updates of variables, take as long as
    before, on every device. Tensors of the batch that an update reads are reduced as soon as all devices have them,
    singly or in buckets of the size that is best, one after another, while other operators run: each in a ring, by 2
    (V - 1) steps of 1/V of the bytes at its slowest link, or directly, as placements may send, too: each device sends
    every other one its V-th over a link of their own, and then the sum of its own V-th. Each device adds (V - 1)/V of
    the bytes, as long as `apply_splits` lets a sum take. Updates come last.

    Sums over the batch that operators on samples read, such as the mean in BatchNormalization, are exchanged where they
    are made: each device sends its own to all others, and adds. Only then is it the step that one device would run.

    Args:
        graph: the operators.
        topology: the devices.
        own_statistics: whether replicas take the sums over their own samples instead, which is another step.

    Raises:
        PlacementError: the graph isn't for this topology, or none of its operators can be split by batch.
    """
    problem = compile_problem(graph, topology)
    count = topology.count
    of_batch = samples_operators(problem)
    share = graph.seconds.copy()
    launch = np.minimum(graph.launch_seconds, share)
    share[of_batch] = (launch + (share - launch) / count)[of_batch]
    made = [
        tensor
        for tensor, producer in enumerate(problem.producer)
        if producer >= 0 and of_batch[producer] and problem.readers[tensor]
    ]
    reduced = [tensor for tensor in made if not all(of_batch[reader] for reader in problem.readers[tensor])]
    sums = set(_batch_sums(graph)) if count > 1 else set()
    exchanged = [
        tensor for tensor in made if tensor in sums and any(of_batch[reader] for reader in problem.readers[tensor])
    ]
    hops = [(device, (device + 1) % count) for device in range(count)] if count > 1 else []
    pairs = [(one, other) for one in range(count) for other in range(count) if one != other]

    def reducing(size: float) -> float:
        ring = (count - 1) * max((topology.seconds(size / count, *hop) for hop in hops), default=0.0)
        direct = max((topology.seconds(size / count, *pair) for pair in pairs), default=0.0)
        return 2 * min(ring, direct)

    def adding(tensor: int, part: float) -> np.ndarray:
        return np.asarray(graph.launch_seconds + part * problem.size[tensor] * graph.copy_seconds)

    statistics = np.zeros(problem.count)
    if not own_statistics:
        for tensor in exchanged:
            sent = max(topology.seconds(problem.size[tensor], *pair) for pair in pairs)
            statistics[problem.producer[tensor]] += sent + float(adding(tensor, 1.0).max())
    updates = np.zeros(problem.count, bool)
    for tensor in reduced:
        updates[[reader for reader in problem.readers[tensor] if not of_batch[reader]]] = True
        if count > 1:
            share[problem.producer[tensor]] += adding(tensor, (count - 1) / count)
    for op in range(problem.count):
        if updates[op]:
            behind = [reader for tensor in problem.outputs[op] for reader in problem.readers[tensor]]
            updates[[*behind, *problem.waiters[op]]] = True
    ends = (np.cumsum(np.where(updates[:, None], 0.0, share), axis=0) + np.cumsum(statistics)[:, None]).max(axis=1)
    reduced.sort(key=lambda tensor: ends[problem.producer[tensor]])
    gradients = [(float(ends[problem.producer[tensor]]), problem.size[tensor]) for tensor in reduced]
    by_size = [_buckets(gradients, least) for least in _BUCKETS]
    link, buckets = min((_reduced_by(buckets, reducing), buckets) for buckets in by_size)
    computed = float(ends.max(initial=0.0))
    updated = float(share[updates].sum(axis=0).max(initial=0.0))
    return DataParallelStep(
        seconds=max(computed, link) + updated,
        reduce_seconds=sum(reducing(size) for _, size in buckets),
    )


_BUCKETS = (0.0, 1e6, 4e6, 16e6, 64e6, np.inf)
"""Bytes from which a bucket of gradients is reduced; the best is taken."""


def _buckets(gradients: Sequence[tuple[float, float]], least: float) -> list[tuple[float, float]]:
    """Joins gradients to buckets of at least some bytes; returns when each is complete, and its bytes."""
    buckets: list[tuple[float, float]] = []
    size = 0.0
    for index, (ready, one) in enumerate(gradients):
        size += one
        if size >= least or index == len(gradients) - 1:
            buckets.append((ready, size))
            size = 0.0
    return buckets


def _reduced_by(buckets: Sequence[tuple[float, float]], reducing: Callable[[float], float]) -> float:
    """Returns when the last of the buckets is reduced, one after another."""
    link = 0.0
    for ready, size in buckets:
        link = max(link, ready) + reducing(size)
    return link


def _batch_sums(graph: OpGraph) -> list[int]:
    """Returns the tensors that are sums or means over the batch."""
    outputs = np.zeros(len(graph.tensor_bytes), np.int64) if graph.tensor_outputs is None else graph.tensor_outputs
    sums = []
    for producer, tensor in np.unique(graph.edges[graph.edges[:, 2] >= 0][:, [0, 2]], axis=0).tolist():
        for rule in graph.splits.get(producer, ()):
            if rule.dimension == "batch" and rule.output_axes[int(outputs[tensor])] is None:
                sums.append(tensor)
    return sums


def parents_device(problem: PlacementProblem) -> Rule:
    """Returns algorithm 2 of FD-DPS: a parent's device if (11) holds there, else the earliest.

    (11) has the operator start no later than its LST, by the longest path that is known. The parent whose output comes
    last is asked first.
    """
    tail = tails(problem)
    longest = 0.0  # DCPL: the longest path through operators placed so far

    def choose(scheduler: ListScheduler, op: int, devices: Sequence[int], ends: Sequence[float]) -> int:
        nonlocal longest
        longest = max(longest, min(ends) + tail[op])
        finish = scheduler.finish
        parents = {problem.producer[tensor] for tensor in problem.inputs[op]}
        for parent in sorted(parents, key=lambda other: (-finish[other], other)):
            device = scheduler.device[parent]
            if device in devices and ends[devices.index(device)] + tail[op] <= longest:
                return devices.index(device)
        return earliest(scheduler, op, devices, ends)

    return choose
