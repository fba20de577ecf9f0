"""HEFT: heterogeneous earliest finish time (Topcuoglu, Hariri, Wu: IEEE TPDS 13(3), 2002)."""

from __future__ import annotations

from dapple_tf.operators.list_placement import InsertionScheduler, placement_of
from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology
from dapple_tf.operators.placement_problem import PlacementProblem, compile_problem, tails


def heft(graph: OpGraph, topology: Topology) -> OpPlacement:
    """Places operators by upward rank, each on the device on which it ends first.

    rank(o) = mean seconds of o + max over its successors s of (mean seconds of the transfer + rank(s)). Operators go in
    the order of descending rank, into the first free time that is long enough.

    Raises:
        PlacementError: the graph isn't for this topology.
    """
    problem = compile_problem(graph, topology)
    return placement_of(problem, *heft_schedule(problem))


def heft_schedule(problem: PlacementProblem) -> tuple[list[int], list[int]]:
    """Returns the operators' devices and Q."""
    scheduler = InsertionScheduler(problem)
    earliest, candidates, place = scheduler.earliest, scheduler.candidates, scheduler.place
    for op in by_rank(problem):
        devices = candidates(op)
        place(op, devices[0] if len(devices) == 1 else min(devices, key=lambda v: earliest(op, v)[1]))
    return scheduler.device, scheduler.order()


def by_rank(problem: PlacementProblem) -> list[int]:
    """Sorts operators by descending upward rank; ties in topological order."""
    rank = [mean + tail for mean, tail in zip(problem.mean_seconds, tails(problem), strict=True)]
    return sorted(range(problem.count), key=lambda op: (-rank[op], op))
