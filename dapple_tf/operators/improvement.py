"""Improvement rounds: operators that bound the step move to other devices, as long as that makes it shorter."""

from __future__ import annotations

from collections.abc import Callable

from dapple_tf.operators.placement_problem import PlacementProblem, tails
from dapple_tf.operators.queue_order import order_by_urgency


def run(problem: PlacementProblem, devices: list[int]) -> tuple[list[int], list[float], list[float], float]:
    tail = tails(problem, devices)
    urgency = [tail[op] + problem.seconds[op][devices[op]] for op in range(problem.count)]
    order, start, finish = order_by_urgency(problem, devices, urgency)
    return order, start, finish, max(finish, default=0.0)


def chain(
    problem: PlacementProblem, devices: list[int], order: list[int], start: list[float], finish: list[float]
) -> list[tuple[int, int, bool]]:
    """The operators that bound the step, from the last: (operator, what it waited for or -1, whether for data)."""
    last_on = [-1] * problem.devices
    before = [-1] * problem.count
    for op in order:
        before[op] = last_on[devices[op]]
        last_on[devices[op]] = op
    op = max(range(problem.count), key=lambda o: (finish[o], -o))
    found = []
    while op >= 0:
        prev = before[op]
        if prev >= 0 and finish[prev] >= start[op] - 1e-12:
            found.append((op, prev, False))
            op = prev
            continue
        # waits for data: the latest producer by finish + transfer
        best, latest = -1, -1.0
        for tensor in problem.inputs[op]:
            p = problem.producer[tensor]
            a = finish[p]
            if devices[p] != devices[op]:
                a += (
                    problem.latency[devices[p]][devices[op]]
                    + problem.size[tensor] * problem.per_byte[devices[p]][devices[op]]
                )
            if a > latest:
                best, latest = p, a
        for p in problem.waits[op]:
            a = finish[p] + problem.latency[devices[p]][devices[op]]
            if a > latest:
                best, latest = p, a
        found.append((op, best, True))
        op = best
    return found


def local_search(problem: PlacementProblem, devices: list[int], budget: int) -> tuple[list[int], float]:
    members = problem.members
    devices = list(devices)
    order, start, finish, best = run(problem, devices)
    spent = 0
    tried: set = set()
    while spent < budget:
        moved = False
        links = chain(problem, devices, order, start, finish)
        busy = [0.0] * problem.devices
        for op in range(problem.count):
            busy[devices[op]] += finish[op] - start[op]
        moves = []
        for index, (op, cause, data) in enumerate(links):
            if cause >= 0 and data and devices[cause] != devices[op]:
                moves.append((op, devices[cause]))
                moves.append((cause, devices[op]))
            elif not data:
                # op queued behind cause: move either to where its data is or to idle devices
                places = {devices[problem.producer[t]] for t in problem.inputs[op]} | {
                    devices[r] for t in problem.outputs[op] for r in problem.readers[t]
                }
                places |= {min(range(problem.devices), key=lambda v: busy[v])}
                for v in sorted(places):
                    moves.append((op, v))
                    moves.append((cause, v))
        seen = set()
        for op, v in moves:
            if devices[op] == v or (op, v) in seen or problem.pinned[problem.group[op]] >= 0:
                continue
            seen.add((op, v))
            if (op, v, best) in tried:
                continue
            tried.add((op, v, best))
            new = list(devices)
            for m in members[problem.group[op]]:
                new[m] = v
            o, s, f, seconds = run(problem, new)
            spent += 1
            if seconds < best - 1e-12:
                devices, order, start, finish, best = new, o, s, f, seconds
                moved = True
                break
            if spent >= budget:
                break
        if not moved:
            break
    return devices, best
