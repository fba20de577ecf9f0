"""FastT: list scheduling by static priorities with a device for the critical path (Yi et al., Middleware 2020).

FD-DPS describes it in sections 2.2 and 5.2: "fine-grained static operator priority and the critical path", without the
dynamics of devices. Our reading: the priority is the upward rank with mean costs; the operators on the critical path
(of greatest rank from an entry) go to the device that runs them all soonest and has memory for their variables; all
others go to the device on which they end first. Both take the first free time that is long enough. FastT's own
splitting of operators isn't included.
"""

from __future__ import annotations

from dapple_tf.operators.heft import by_rank
from dapple_tf.operators.list_placement import InsertionScheduler, placement_of
from dapple_tf.operators.op_graph import OpGraph, OpPlacement, Topology
from dapple_tf.operators.placement_problem import PlacementProblem, compile_problem, tails


def fast_t(graph: OpGraph, topology: Topology) -> OpPlacement:
    """Places operators by static priorities.

    Raises:
        PlacementError: the graph isn't for this topology.
    """
    problem = compile_problem(graph, topology)
    return placement_of(problem, *fast_t_schedule(problem))


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
