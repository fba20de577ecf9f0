"""FastT: list scheduling of the data-parallel graph by static priorities (Yi et al., Middleware 2020).

It begins with the graph of data parallelism, all operators on samples split by the batch, one part on each device. DPOS
places and orders the operators of that graph: the priority is the upward rank with mean costs, transfers included; the
operators on the critical path (of greatest rank from an entry) go to the device that runs them all soonest and has
memory for their variables; all others go to the device on which they end first. Both take the first free time that is
long enough. OS-DPOS then takes the whole operators on the critical path, the longest first, and splits each where DPOS
gets a shorter step with it, until one doesn't help. If data parallelism is faster than all of that, FastT goes back to
it. FD-DPS names it in sections 2.2 and 5.2: "fine-grained static operator priority and the critical path".
"""

from __future__ import annotations

from dapple_tf.operators.heft import by_rank
from dapple_tf.operators.list_placement import InsertionScheduler
from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology
from dapple_tf.operators.placement_candidates import Candidate, Variant, judged, placed_by, variant_of
from dapple_tf.operators.placement_problem import PlacementProblem, tails
from dapple_tf.operators.split_graph import apply_splits
from dapple_tf.operators.split_search import by_batch
from graph_passes.analysis.split_rules import Split

_MOST_SPLITS = 8
"""The most operators that OS-DPOS considers."""


def fast_t(graph: OpGraph, topology: Topology) -> OpPlacement:
    """Places operators by static priorities, beginning with data parallelism.

    Raises:
        PlacementError: the graph isn't for this topology.
    """
    base = variant_of(graph, topology, {})
    return placed_by(fast_t_candidate(base, by_batch(base) if topology.count > 1 else None))


def fast_t_candidate(base: Variant, start: Candidate | None, *, split: bool = True) -> Candidate:
    """Returns FastT's placement.

    Args:
        base: the graph without splits.
        start: data parallelism; None begins with the operators as they are.
        split: whether OS-DPOS splits operators.
    """
    best = dpos(base if start is None else start.variant)
    graph, devices = base.problem.graph, base.problem.devices
    number = {name: op for op, name in enumerate(graph.names)}
    for name in _whole_and_critical(best.variant.problem) if split else ():
        better = best
        for rule in graph.splits[number[name]]:
            parts = min(devices, rule.length)
            if parts > 1:
                splits = {**best.variant.splits, name: Split(rule.dimension, parts)}
                variant = variant_of(apply_splits(graph, splits), base.problem.topology, splits)
                better = min(better, dpos(variant), key=lambda one: one.rank)
        if better is best:
            break
        best = better
    return best if start is None else min(best, start, key=lambda one: one.rank)


def dpos(variant: Variant) -> Candidate:
    """Returns the placement and order of DPOS, simulated: without further splits, and without going back."""
    return judged(variant, *fast_t_schedule(variant.problem), "FastT")


def _whole_and_critical(problem: PlacementProblem) -> list[str]:
    """Returns the names of operators on the critical path that can be split, the longest first."""
    if problem.devices == 1:
        return []
    free = [
        op
        for op in critical_path(problem)
        if problem.graph.splits.get(op)
        and len(problem.members[problem.group[op]]) == 1
        and problem.pinned[problem.group[op]] < 0
    ]
    longest = sorted(free, key=lambda op: (-problem.mean_seconds[op], op))[:_MOST_SPLITS]
    return [problem.graph.names[op] for op in longest]


def fast_t_schedule(problem: PlacementProblem) -> tuple[list[int], list[int]]:
    """Returns the operators' devices and Q."""
    critical = critical_path(problem)
    on_path = [False] * problem.count
    totals = [0.0] * problem.devices
    for op in critical:
        on_path[op] = True
        totals = [total + one for total, one in zip(totals, problem.seconds[op], strict=True)]
    preferred = sorted(range(problem.devices), key=lambda device: (totals[device], device))
    scheduler = InsertionScheduler(problem)
    earliest, candidates, place = scheduler.earliest, scheduler.candidates, scheduler.place
    for op in by_rank(problem):
        devices = candidates(op)
        if len(devices) == 1:
            place(op, devices[0])
        elif on_path[op]:
            place(op, next(device for device in preferred if device in devices))
        else:
            place(op, min(devices, key=lambda device: earliest(op, device)[1]))
    return scheduler.device, scheduler.order()


def critical_path(problem: PlacementProblem) -> list[int]:
    """Returns the operators of the longest path with mean costs, communication included."""
    if not problem.count:
        return []
    tail = tails(problem)
    op = max(range(problem.count), key=lambda one: (problem.mean_seconds[one] + tail[one], -one))
    path = [op]
    while True:
        steps = [
            (problem.mean_transfer[tensor] + problem.mean_seconds[reader] + tail[reader], -reader)
            for tensor in problem.outputs[op]
            for reader in problem.readers[tensor]
        ]
        steps += [(problem.mean_latency + problem.mean_seconds[w] + tail[w], -w) for w in problem.waiters[op]]
        if not steps:
            return path
        op = -max(steps)[1]
        path.append(op)
