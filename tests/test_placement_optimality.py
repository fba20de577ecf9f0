"""Small graphs: FD-DPS against the optimum over all assignments and queues, found by branch and bound."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from op_graphs import random_graph, topology

from dapple_tf.operators.fd_dps import fd_dps
from dapple_tf.operators.op_graph import OpGraph, Topology
from dapple_tf.operators.placement_problem import PlacementProblem, compile_problem, tails
from dapple_tf.operators.simulated_placement import simulate


def assignments(problem: PlacementProblem, alike: bool) -> Iterator[list[int]]:
    """All devices that the operators may have; of those that differ in the devices' names only, one."""
    groups = [group for group, members in enumerate(problem.members) if members]
    ranges = [range(problem.devices) if problem.pinned[g] < 0 else [problem.pinned[g]] for g in groups]
    for chosen in itertools.product(*ranges):
        if alike:
            firsts = list(dict.fromkeys(chosen))
            if firsts != sorted(firsts) or firsts[-1] != len(firsts) - 1:
                continue
        place = dict(zip(groups, chosen, strict=True))
        yield [place[group] for group in problem.group]


def best_queue(problem: PlacementProblem, devices: list[int], bound: float) -> float:
    """The shortest makespan of all queues for given devices, if it's below a bound; else the bound.

    Queues in the order of the operators' starts are enough: others see the same step.
    """
    n, v = problem.count, problem.devices
    tail = tails(problem, devices)
    work = [0.0] * v
    for op in range(n):
        work[devices[op]] += problem.seconds[op][devices[op]]
    best = bound
    missing = [len({problem.producer[t] for t in problem.inputs[op]} | set(problem.waits[op])) for op in range(n)]
    uses = [
        sorted({r for t in problem.outputs[op] for r in problem.readers[t]} | set(problem.waiters[op]))
        for op in range(n)
    ]

    def go(
        done: int,
        missing: list[int],
        free: list[float],
        left: list[float],
        ready: list[float],
        links: dict[tuple[int, int], float],
        last: tuple[float, int],
    ) -> None:
        nonlocal best
        if done == n:
            best = min(best, max(free))
            return
        for op in range(n):
            if missing[op]:
                continue
            device = devices[op]
            start = max(free[device], ready[op])
            if (start, op) < last:
                continue
            end = start + problem.seconds[op][device]
            rest = left[device] - problem.seconds[op][device]
            if max(end + tail[op], end + rest) >= best * (1 - 1e-9):
                continue
            links2, ready2, missing2 = dict(links), list(ready), list(missing)
            missing2[op] = n + 1
            for tensor in problem.outputs[op]:
                arrivals = {device: end}
                for target in sorted({devices[r] for r in problem.readers[tensor]} - {device}):
                    begin = max(links2.get((device, target), 0.0), end)
                    arrivals[target] = links2[device, target] = begin + (
                        problem.latency[device][target] + problem.size[tensor] * problem.per_byte[device][target]
                    )
                for reader in problem.readers[tensor]:
                    ready2[reader] = max(ready2[reader], arrivals[devices[reader]])
            for waiter in problem.waiters[op]:
                ready2[waiter] = max(ready2[waiter], end + problem.latency[device][devices[waiter]])
            for other in uses[op]:
                missing2[other] -= 1
            free2, left2 = list(free), list(left)
            free2[device], left2[device] = end, rest
            go(done + 1, missing2, free2, left2, ready2, links2, (start, op))

    go(0, missing, [0.0] * v, work, [0.0] * n, {}, (-1.0, -1))
    return best


def optimum(graph: OpGraph, links: Topology, bound: float, alike: bool) -> float:
    """The shortest makespan there is, if it's below a bound; else the bound."""
    problem = compile_problem(graph, links)
    order = []
    for devices in assignments(problem, alike):
        tail = tails(problem, devices)
        longest = max(problem.seconds[op][devices[op]] + tail[op] for op in range(problem.count))
        loads = np.bincount(devices, [problem.seconds[op][d] for op, d in enumerate(devices)])
        order.append((max(longest, float(loads.max())), devices))
    best = bound
    for least, devices in sorted(order, key=lambda one: one[0]):
        if least >= best * (1 - 1e-9):
            break
        best = best_queue(problem, devices, best)
    return best


INSTANCES = [
    (count, devices, shape, transfer, groups, uneven, seed)
    for seed, (shape, transfer, groups, uneven) in enumerate(
        itertools.product(("layered", "fork_join", "chains", "random"), (0.05, 0.5, 2.0), (0, 2), (False, True))
    )
    for count, devices in ((7, 3), (9, 2))
]


@pytest.mark.few(4)
@pytest.mark.parametrize("number", range(0, len(INSTANCES), 6))
def test_small_graphs_are_within_5_percent_of_the_optimum(number: int) -> None:
    for count, devices, shape, transfer, groups, uneven, seed in INSTANCES[number : number + 6]:
        graph = random_graph(
            count, devices, 100 + seed, shape=shape, transfer=transfer, groups=groups, pins=groups // 2, uneven=uneven
        )
        links = topology(devices)
        placement = fd_dps(graph, links)
        best = optimum(graph, links, placement.seconds, alike=not uneven and not groups)
        assert placement.seconds <= 1.05 * best, (
            count,
            devices,
            shape,
            transfer,
            groups,
            uneven,
            seed,
            placement.seconds / best,
        )


def test_branch_and_bound_finds_what_all_queues_show() -> None:
    """On four operators, by trying every queue and every assignment in the simulator."""
    for seed in range(6):
        graph = random_graph(5, 2, seed, shape="random", transfer=0.5)
        links = topology(2)
        problem = compile_problem(graph, links)
        best = float("inf")
        for order in itertools.permutations(range(5)):
            place = {op: index for index, op in enumerate(order)}
            if all(place[p] < place[c] for p, c, _, _ in graph.edges.tolist()):
                for devices in itertools.product(range(2), repeat=5):
                    best = min(best, simulate(problem, list(devices), list(order)).seconds)
        assert optimum(graph, links, 1.0, alike=True) == pytest.approx(best, rel=1e-12)
