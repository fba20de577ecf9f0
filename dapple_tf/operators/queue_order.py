"""Q for operators whose devices are known: each device takes the most urgent of its ready operators.

Simulates the step by events with the rules of `simulated_placement`, so that both agree on a step's length.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from dapple_tf.operators.placement_problem import PlacementProblem


def order_by_urgency(
    problem: PlacementProblem,
    devices: list[int],
    urgency: Sequence[float],
    release: Mapping[int, float] | None = None,
) -> tuple[list[int], list[float], list[float]]:
    """Simulates the step and records the order in which operators start.

    Args:
        problem: the operators.
        devices: of each operator.
        urgency: of each operator; the greatest first, ties by the lowest number.
        release: operators' earliest starts, in seconds; 0 for missing ones.

    Returns:
        Q, and the start and end of each operator.
    """
    count, n = problem.devices, problem.count
    seconds, outputs, readers, waiters = problem.seconds, problem.outputs, problem.readers, problem.waiters
    size, all_latency, all_per_byte = problem.size, problem.latency, problem.per_byte
    missing = [len(a) + len(b) for a, b in zip(problem.inputs, problem.waits, strict=True)]
    key = [(-urgency[op], op) for op in range(n)]
    ready: list[list[tuple[float, int]]] = [[] for _ in range(count)]
    # (time, number, device, operators that wait for one thing less, operator that ends or -1)
    events: list[tuple[float, int, int, list[int], int]] = []
    number = 0
    for op, time in sorted((release or {}).items()):
        if time > 0:
            number += 1
            missing[op] += 1
            events.append((time, number, devices[op], [op], -1))
    for op in range(n):
        if not missing[op]:
            ready[devices[op]].append(key[op])
    heapq.heapify(events)
    for heap in ready:
        heapq.heapify(heap)
    idle = [True] * count
    links = [[0.0] * count for _ in range(count)]
    start, finish = [0.0] * n, [0.0] * n
    order: list[int] = []
    push, pop = heapq.heappush, heapq.heappop
    touched = list(range(count))
    now = 0.0
    while True:
        for device in touched:
            if idle[device] and ready[device]:
                op = pop(ready[device])[1]
                order.append(op)
                start[op] = now
                end = finish[op] = now + seconds[op][device]
                idle[device] = False
                number += 1
                push(events, (end, number, device, [], op))
        if not events:
            return order, start, finish
        now = events[0][0]
        touched = []
        while events and events[0][0] == now:
            _, _, device, served, op = pop(events)
            if device not in touched:
                touched.append(device)
            for other in served:
                missing[other] -= 1
                if not missing[other]:
                    push(ready[device], key[other])
            if op < 0:
                continue
            idle[device] = True
            latency, per_byte, link = all_latency[device], all_per_byte[device], links[device]
            for tensor in outputs[op]:
                away: dict[int, list[int]] = {}
                for other in readers[tensor]:
                    there = devices[other]
                    if there == device:
                        missing[other] -= 1
                        if not missing[other]:
                            push(ready[device], key[other])
                    elif there in away:
                        away[there].append(other)
                    else:
                        away[there] = [other]
                for there in sorted(away):
                    begin = link[there]
                    if begin < now:
                        begin = now
                    link[there] = end = begin + (latency[there] + size[tensor] * per_byte[there])
                    number += 1
                    push(events, (end, number, there, away[there], -1))
            for other in waiters[op]:
                there = devices[other]
                if there == device:
                    missing[other] -= 1
                    if not missing[other]:
                        push(ready[device], key[other])
                else:
                    number += 1
                    push(events, (now + latency[there], number, there, [other], -1))
        touched.sort()
