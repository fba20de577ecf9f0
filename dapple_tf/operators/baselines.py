"""Baselines for placements of operators, in the same simulator: one device, and data parallelism."""

from __future__ import annotations

import dataclasses

import numpy as np

from dapple_tf.operators.list_placement import placement_of
from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology
from dapple_tf.operators.placement_problem import PlacementError, PlacementProblem, compile_problem
from dapple_tf.operators.split_layouts import Layouts


def single_device(graph: OpGraph, topology: Topology) -> OpPlacement:
    """Places everything on the fastest device, except groups that are pinned to another one.

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
        reduce_seconds: of the all-reduce by itself.
        gradient_bytes: reduced by each device.
        peak_bytes: the most bytes that a device holds.
    """

    seconds: float
    compute_seconds: float
    reduce_seconds: float
    gradient_bytes: float
    peak_bytes: float


def data_parallel(graph: OpGraph, topology: Topology) -> DataParallelStep:
    """Simulates the whole step on each device for 1/V of the batch, with gradients all-reduced in a ring.

    Operators on samples take launch + (seconds - launch) / V; the rest, such as updates of variables, take as long as
    before, on every device. A tensor of the batch that an update reads is reduced as soon as all devices have it, one
    after another in 2 (V - 1) steps of 1/V of its bytes at the slowest link of the ring, while other operators run;
    updates come last.

    Raises:
        PlacementError: the graph isn't for this topology, or none of its operators can be split by batch.
    """
    problem = compile_problem(graph, topology)
    count = topology.count
    of_batch = samples_operators(problem)
    share = graph.seconds.copy()
    launch = np.minimum(graph.launch_seconds, share)
    share[of_batch] = (launch + (share - launch) / count)[of_batch]
    reduced = sorted(
        {
            tensor
            for tensor, producer in enumerate(problem.producer)
            if producer >= 0 and of_batch[producer] and not all(of_batch[reader] for reader in problem.readers[tensor])
        }
    )

    def ring(tensor: int) -> float:
        hops = [(device, (device + 1) % count) for device in range(count)] if count > 1 else []
        return (
            2 * (count - 1) * max((topology.seconds(problem.size[tensor] / count, *hop) for hop in hops), default=0.0)
        )

    seconds = [ring(tensor) for tensor in reduced]
    updates = np.zeros(problem.count, bool)
    for tensor in reduced:
        updates[[reader for reader in problem.readers[tensor] if not of_batch[reader]]] = True
    for op in range(problem.count):
        if updates[op]:
            behind = [reader for tensor in problem.outputs[op] for reader in problem.readers[tensor]]
            updates[[*behind, *problem.waiters[op]]] = True
    ends = np.cumsum(np.where(updates[:, None], 0.0, share), axis=0).max(axis=1)
    link = 0.0
    for tensor, one in sorted(zip(reduced, seconds, strict=True), key=lambda pair: ends[problem.producer[pair[0]]]):
        link = max(link, float(ends[problem.producer[tensor]])) + one
    computed = float(ends.max(initial=0.0))
    stored = float(graph.stored_bytes.sum())
    return DataParallelStep(
        seconds=max(computed, link) + float(share[updates].sum(axis=0).max(initial=0.0)),
        compute_seconds=float(share.sum(axis=0).max(initial=0.0)),
        reduce_seconds=sum(seconds),
        gradient_bytes=sum(problem.size[tensor] for tensor in reduced),
        peak_bytes=stored + (max(single_device(graph, topology).peak_bytes) - stored) / count,
    )


def samples_operators(problem: PlacementProblem) -> np.ndarray:
    """Returns which operators work on samples: bool [n].

    These are the operators that can be split by batch together with the heaviest one that can, and all between them.

    Raises:
        PlacementError: there are none.
    """
    layouts = Layouts(problem, 2)
    seeds = [op for op, rules in enumerate(layouts.reads.rules) if any(rule.dimension == "batch" for rule in rules)]
    if not seeds:
        raise PlacementError(
            "no operator can be split by batch, so the step can't be data-parallel; give the graph's operators "
            "their splits"
        )
    heaviest = max(seeds, key=lambda op: (problem.mean_seconds[op], -op))
    layout = layouts.grown(layouts.none(), "batch", problem.mean_seconds[heaviest])
    inside = np.array(layout) >= 0
    before, behind = inside.copy(), inside.copy()
    for op in range(problem.count):
        needs = [*(problem.producer[tensor] for tensor in problem.inputs[op]), *problem.waits[op]]
        before[op] |= bool(before[needs].any())
    for op in range(problem.count - 1, -1, -1):
        uses = [*(reader for tensor in problem.outputs[op] for reader in problem.readers[tensor]), *problem.waiters[op]]
        behind[op] |= bool(behind[uses].any())
    return np.asarray(before & behind)
