"""What placements of operators are compared with, in the same simulator: one device, and data parallelism."""

from __future__ import annotations

import dataclasses

import numpy as np

from dapple_tf.operators.list_placement import placement_of
from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology
from dapple_tf.operators.placement_problem import PlacementError, compile_problem


def single_device(graph: OpGraph, topology: Topology) -> OpPlacement:
    """Everything on the fastest device; groups that are pinned to another one are there.

    Its peak may be above the device's limit: see `fits`.
    """
    problem = compile_problem(graph, topology)
    totals = np.asarray(graph.seconds, float).sum(axis=0)
    pins = set(graph.pinned.tolist())
    fastest = min(range(topology.count), key=lambda device: (totals[device], device not in pins, device))
    devices = [problem.pinned[group] if problem.pinned[group] >= 0 else fastest for group in problem.group]
    return placement_of(problem, devices, list(range(problem.count)))


@dataclasses.dataclass(frozen=True)
class DataParallelStep:
    """A step of data parallelism.

    Attributes:
        seconds: of the whole step.
        compute_seconds: of the slowest device's operators.
        reduce_seconds: of the all-reduce, were there nothing else to do.
        gradient_bytes: what each device reduces.
        peak_bytes: what a device holds at most.
    """

    seconds: float
    compute_seconds: float
    reduce_seconds: float
    gradient_bytes: float
    peak_bytes: float


def data_parallel(graph: OpGraph, topology: Topology) -> DataParallelStep:
    """Each device does the whole step for 1/V of the batch, and gradients are all-reduced in a ring.

    What reads only variables (weights' updates, regularization) takes as long as before; the rest takes launch +
    (seconds - launch) / V. Every gradient is reduced as soon as all devices have it, one after another, while the backward
    operators go on: 2 (V - 1) steps of 1/V of its bytes each, at the slowest link of the ring. What needs the reduced
    gradient waits for it. Gradients are the tensors from outside that an operator of a group with variables reads and that
    depend on the batch, at most as large as those variables.

    Raises:
        PlacementError: the graph isn't for this topology.
    """
    problem = compile_problem(graph, topology)
    count = topology.count
    stored = graph.stored_bytes
    batch = _of_batch(graph)
    gradients = _gradients(graph, batch)
    share = np.where(
        batch[:, None],
        graph.launch_seconds + np.maximum(graph.seconds - graph.launch_seconds, 0) / count,
        graph.seconds,
    )
    share = np.minimum(share, graph.seconds)
    hops = [(i, (i + 1) % count) for i in range(count)] if count > 1 else []

    def ring(size: float) -> float:
        return 2 * (count - 1) * max((topology.seconds(size / count, a, b) for a, b in hops), default=0.0)

    reduced = {}
    ends = np.zeros(problem.count)
    clock = np.zeros(count)
    link = 0.0
    late: list[int] = []
    waiting = np.zeros(problem.count, bool)
    for op in range(problem.count):  # everything that doesn't wait for a reduction runs first, as in the backward pass
        needs = [problem.producer[tensor] for tensor in problem.inputs[op]]
        if any(tensor in gradients for tensor in problem.inputs[op]) or waiting[[*needs, *problem.waits[op]]].any():
            waiting[op] = True
            late.append(op)
            continue
        clock = clock + share[op]
        ends[op] = clock.max()
        for tensor in problem.outputs[op]:
            if tensor in gradients:
                link = max(link, ends[op]) + ring(problem.size[tensor])
                reduced[tensor] = link
    for op in late:
        ready = max((reduced[tensor] for tensor in problem.inputs[op] if tensor in reduced), default=0.0)
        clock = np.maximum(clock, ready) + share[op]
        for tensor in problem.outputs[op]:
            if tensor in gradients:
                link = max(link, float(clock.max())) + ring(problem.size[tensor])
                reduced[tensor] = link
    whole = single_device(graph, topology).peak_bytes
    activations = max(whole) - float(stored.sum())
    return DataParallelStep(
        seconds=float(max(clock.max(), link)),
        compute_seconds=float(share.sum(axis=0).max(initial=0.0)),
        reduce_seconds=sum(ring(problem.size[tensor]) for tensor in gradients),
        gradient_bytes=sum(problem.size[tensor] for tensor in gradients),
        peak_bytes=float(stored.sum()) + activations / count,
    )


def _of_batch(graph: OpGraph) -> np.ndarray:
    """Which operators work on the batch: those between one that can be split by batch and a variable's update."""
    edges = np.asarray(graph.edges, np.int64).reshape(-1, 4)
    stored = graph.stored_bytes[graph.groups] > 0
    split = np.zeros(graph.count, bool)
    for op, rules in graph.splits.items():
        split[op] = any(rule.dimension == "batch" for rule in rules)
    of_batch = split.copy()
    reaches = split.copy()
    for producer, consumer, _, _ in edges[np.argsort(edges[:, 1], kind="stable")].tolist():
        if of_batch[producer] and not stored[consumer]:
            of_batch[consumer] = True
    for producer, consumer, _, _ in edges[np.argsort(-edges[:, 0], kind="stable")].tolist():
        reaches[producer] |= reaches[consumer]
    if not split.any():
        raise PlacementError(
            "no operator can be split by batch, so the step can't be data-parallel; give splits to the graph's operators"
        )
    return np.asarray(of_batch & ~stored)


def _gradients(graph: OpGraph, batch: np.ndarray) -> set[int]:
    """Tensors of the batch that updates of variables read, directly or through operators on them alone."""
    edges = np.asarray(graph.edges, np.int64).reshape(-1, 4)
    stored = graph.stored_bytes[graph.groups]
    data = edges[edges[:, 2] >= 0]
    size = np.asarray(graph.tensor_bytes, float)[data[:, 2]]
    read = batch[data[:, 0]] & (stored[data[:, 1]] > 0) & (size <= stored[data[:, 1]] + 1)
    return set(data[read, 2].tolist())
