"""FD-DPS' scheduling by dynamic critical paths: algorithms 1, 2 and 3 without splits."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from dapple_tf.operators.list_placement import Slots, StoredBytes
from dapple_tf.operators.placement_problem import PlacementProblem


def schedule_by_critical_path(
    problem: PlacementProblem,
    tail: Sequence[float],
    previous: list[int] | None = None,
    weight: float = 1.0,
    stay: float = 0.0,
) -> tuple[list[int], list[int]]:
    """Place all operators."""
    n, count = problem.count, problem.devices
    seconds, inputs, waits, outputs = problem.seconds, problem.inputs, problem.waits, problem.outputs
    producer, readers, waiters, size = problem.producer, problem.readers, problem.waiters, problem.size
    latency, per_byte, group = problem.latency, problem.per_byte, problem.group
    shortest = min((value for value in problem.mean_seconds if value > 0), default=0.0) / 2
    slots = [Slots(shortest) for _ in range(count)]
    stored = StoredBytes(problem)
    place_of_group = list(problem.pinned)
    device, start, finish = [-1] * n, [0.0] * n, [0.0] * n
    links = [[0.0] * count for _ in range(count)]
    there: list[list[float]] = [[]] * len(size)
    missing = [len(a) + len(b) for a, b in zip(inputs, waits, strict=True)]
    ready_at = [0.0] * n
    # Algorithm 1. Among those that could start by `first_free` EST is the same, so the longest tail is most critical;
    # among the others it's the largest ready + tail.
    by_ready: list[tuple[float, int]] = []
    by_path: list[tuple[float, int]] = []
    by_tail: list[tuple[float, int]] = []
    done = [False] * n
    push, pop = heapq.heappush, heapq.heappop
    for op in range(n):
        if not missing[op]:
            push(by_tail, (-tail[op] - problem.mean_seconds[op], op))
    first_free = 0.0
    for _ in range(n):
        while by_ready and by_ready[0][0] <= first_free:
            op = pop(by_ready)[1]
            if not done[op]:
                push(by_tail, (-tail[op] - problem.mean_seconds[op], op))
        while by_path and (done[by_path[0][1]] or ready_at[by_path[0][1]] <= first_free):
            pop(by_path)
        if by_tail and (not by_path or first_free - by_tail[0][0] >= -by_path[0][0]):
            op = pop(by_tail)[1]
        else:
            op = pop(by_path)[1]
        done[op] = True
        # Algorithm 2.
        fixed = place_of_group[group[op]]
        candidates = stored.fitting(op) if fixed < 0 else [fixed]
        ready = [0.0] * count
        for tensor in inputs[op]:
            row, source = there[tensor], device[producer[tensor]]
            end, link = finish[producer[tensor]], links[source]
            delay, rate, bytes_ = latency[source], per_byte[source], size[tensor]
            for v in candidates:
                arrival = row[v]
                if arrival < 0:
                    arrival = link[v]
                    if arrival < end:
                        arrival = end
                    arrival += delay[v] + bytes_ * rate[v]
                if arrival > ready[v]:
                    ready[v] = arrival
        for other in waits[op]:
            source = device[other]
            for v in candidates:
                arrival = finish[other] + latency[source][v]
                if arrival > ready[v]:
                    ready[v] = arrival
        if len(candidates) == 1:
            best = candidates[0]
            begin = slots[best].find(ready[best], seconds[op][best])
        else:
            after = None
            if previous is not None:
                after = _after(problem, op, previous, tail)
            best, least, begin = -1, (float("inf"), 0.0), 0.0
            for v in candidates:
                one = slots[v].find(ready[v], seconds[op][v])
                end = one + seconds[op][v]
                cost = end
                if after is not None:
                    cost += weight * after[v]
                    if v == previous[op]:
                        cost -= stay
                if (cost, end) < least:
                    best, least, begin = v, (cost, end), one
        slots[best].take(begin, seconds[op][best])
        if place_of_group[group[op]] < 0:
            place_of_group[group[op]] = best
            stored.add(op, best)
        # Algorithm 3: the communication that is known now, and what it makes ready.
        for tensor in inputs[op]:
            row = there[tensor]
            if row[best] < 0:
                source = device[producer[tensor]]
                link = links[source]
                arrival = max(link[best], finish[producer[tensor]])
                row[best] = link[best] = arrival + latency[source][best] + size[tensor] * per_byte[source][best]
        device[op], start[op] = best, begin
        end = finish[op] = begin + seconds[op][best]
        for tensor in outputs[op]:
            there[tensor] = [-1.0] * count
            there[tensor][best] = end
            for reader in readers[tensor]:
                missing[reader] -= 1
                if end > ready_at[reader]:
                    ready_at[reader] = end
                if not missing[reader]:
                    push(by_ready, (ready_at[reader], reader))
                    push(by_path, (-ready_at[reader] - tail[reader] - problem.mean_seconds[reader], reader))
        for waiter in waiters[op]:
            missing[waiter] -= 1
            if end > ready_at[waiter]:
                ready_at[waiter] = end
            if not missing[waiter]:
                push(by_ready, (ready_at[waiter], waiter))
                push(by_path, (-ready_at[waiter] - tail[waiter] - problem.mean_seconds[waiter], waiter))
        first_free = min(slot.end for slot in slots)
    return device, sorted(range(n), key=lambda op: (start[op], op))


def _after(problem: PlacementProblem, op: int, previous: list[int], tail: Sequence[float]) -> list[float]:
    """The path behind an operator by device, if what comes behind it is where it was in the previous round."""
    count = problem.devices
    longest = [0.0] * count
    for tensor in problem.outputs[op]:
        bytes_ = problem.size[tensor]
        ends: dict[int, float] = {}
        for reader in problem.readers[tensor]:
            there = previous[reader]
            path = problem.seconds[reader][there] + tail[reader]
            if path > ends.get(there, -1.0):
                ends[there] = path
        for there, path in ends.items():
            for v in range(count):
                value = path if v == there else path + problem.latency[v][there] + bytes_ * problem.per_byte[v][there]
                if value > longest[v]:
                    longest[v] = value
    for waiter in problem.waiters[op]:
        there = previous[waiter]
        path = problem.seconds[waiter][there] + tail[waiter]
        for v in range(count):
            if path + problem.latency[v][there] > longest[v]:
                longest[v] = path + problem.latency[v][there]
    return longest
