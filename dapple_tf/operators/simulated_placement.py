"""Simulates a step whose operators are placed on devices: its time, and each device's memory.

It judges all placements. Each device runs one operator at a time in the order of the queue Q restricted to it; an
operator starts when its device is free and its inputs are there. A tensor that is read on another device is sent there
once, when its producer has ended; transfers from one device to another go one after another in the order in which they
became ready (ties: by Q), each with the time of formula 2 of FD-DPS. An operator that only waits for one on another
device learns of its end a latency later.

Since a device runs its operators in the order of Q, its tensors become ready in that order too: one pass over Q is
enough, without a queue of events.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dapple_tf.operators.op_graph import OpPlacement, PlacementError, PlacementProblem, tails

Sent = list[tuple[int, int, int, float, float]]
"""Tensor, source, target, start and arrival of each transfer, in the order in which their producers stand in Q."""


@dataclasses.dataclass(frozen=True, eq=False)
class SimulatedPlacement:
    """A simulated step.

    Attributes:
        start: of each operator, seconds; float64 [n].
        finish: the same.
        seconds: the makespan.
        peak_bytes: of each device, float64 [V]: the variables of its groups, and tensors from their producer's start or
            their arrival until the last reader there, or their last transfer, has ended.
        sent: the transfers.
    """

    start: np.ndarray
    finish: np.ndarray
    seconds: float
    peak_bytes: np.ndarray
    sent: Sent


def simulate(problem: PlacementProblem, devices: list[int], order: list[int]) -> SimulatedPlacement:
    """Simulates a step.

    Args:
        problem: its n operators, and the topology.
        devices: index of each operator's device, n of them.
        order: Q, the operators in a topological order.

    Raises:
        PlacementError: ``order`` isn't a topological order of all operators, or a group isn't on one device, or not on
            the one to which it is pinned.
    """
    _check(problem, devices, order)
    start, finish, sent = run_in_order(problem, devices, order)
    starts, ends = np.array(start), np.array(finish)
    peaks = peak_bytes(problem, np.array(devices, np.int64), starts, ends, sent)
    return SimulatedPlacement(starts, ends, max(finish, default=0.0), peaks, sent)


def run_in_order(
    problem: PlacementProblem, devices: list[int], order: list[int]
) -> tuple[list[float], list[float], Sent]:
    """Returns the operators' starts and ends, and the transfers, without checks."""
    count = problem.devices
    seconds, inputs, waits, outputs = problem.seconds, problem.inputs, problem.waits, problem.outputs
    readers, size, all_latency, all_per_byte = problem.readers, problem.size, problem.latency, problem.per_byte
    start, finish = [0.0] * problem.count, [0.0] * problem.count
    there = [0.0] * (len(size) * count)  # when a tensor is on a device
    free = [0.0] * count
    links = [[0.0] * count for _ in range(count)]
    sent: Sent = []
    for op in order:
        device = devices[op]
        now = free[device]
        for tensor in inputs[op]:
            arrival = there[tensor * count + device]
            if arrival > now:
                now = arrival
        for earlier in waits[op]:
            source = devices[earlier]
            end = finish[earlier]
            if source != device:
                end += all_latency[source][device]
            if end > now:
                now = end
        start[op] = now
        now += seconds[op][device]
        free[device] = finish[op] = now
        for tensor in outputs[op]:
            base = tensor * count
            there[base + device] = now
            targets = {devices[reader] for reader in readers[tensor]}
            targets.discard(device)
            if targets:
                link, latency, per_byte = links[device], all_latency[device], all_per_byte[device]
                for target in sorted(targets):
                    begin = link[target]
                    if begin < now:
                        begin = now
                    end = begin + (latency[target] + size[tensor] * per_byte[target])
                    link[target] = there[base + target] = end
                    sent.append((tensor, device, target, begin, end))
    return start, finish, sent


def order_by_urgency(
    problem: PlacementProblem,
    devices: list[int],
    urgency: Sequence[float],
    release: Mapping[int, float] | None = None,
) -> tuple[list[int], list[float], list[float], Sent]:
    """Finds Q for operators whose devices are known: each device takes the most urgent of its ready operators.

    It simulates the step by events with the rules of `run_in_order`, so both agree on the step's length.

    Args:
        problem: the operators.
        devices: of each operator.
        urgency: of each operator; the greatest first, ties by the lowest number.
        release: operators' earliest starts, in seconds; 0 for missing ones.

    Returns:
        Q, the start and end of each operator, and the transfers.
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
    sent: Sent = []
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
            return order, start, finish, sent
        now = events[0][0]
        touched = []
        while events and events[0][0] == now:
            _, _, device, served, op = pop(events)
            if device not in touched:
                touched.append(device)
            if op >= 0:
                idle[device] = True
                latency, per_byte, link = all_latency[device], all_per_byte[device], links[device]
                for tensor in outputs[op]:
                    away: dict[int, list[int]] = {}
                    for other in readers[tensor]:
                        there = devices[other]
                        if there == device:
                            served.append(other)
                        elif there in away:
                            away[there].append(other)
                        else:
                            away[there] = [other]
                    for there in sorted(away):
                        begin = link[there]
                        if begin < now:
                            begin = now
                        link[there] = end = begin + (latency[there] + size[tensor] * per_byte[there])
                        sent.append((tensor, device, there, begin, end))
                        number += 1
                        push(events, (end, number, there, away[there], -1))
                for other in waiters[op]:
                    there = devices[other]
                    if there == device:
                        served.append(other)
                    else:
                        number += 1
                        push(events, (now + latency[there], number, there, [other], -1))
            for other in served:
                missing[other] -= 1
                if not missing[other]:
                    push(ready[device], key[other])
        touched.sort()


def peak_bytes(
    problem: PlacementProblem, place: np.ndarray, start: np.ndarray, finish: np.ndarray, sent: Sent
) -> np.ndarray:
    """Returns the peak bytes of each device."""
    count, tensors = problem.devices, len(problem.size)
    peaks = np.zeros(count)
    for group, members in enumerate(problem.members):
        if members and problem.stored[group]:
            peaks[place[members[0]]] += problem.stored[group]
    if not tensors:
        return peaks
    producer = np.array(problem.producer, np.int64)
    lengths = [len(readers) for readers in problem.readers]
    tensor = np.repeat(np.arange(tensors), lengths)
    reader = np.array([op for readers in problem.readers for op in readers], np.int64)
    begin, until = np.full(tensors * count, np.inf), np.full(tensors * count, -np.inf)
    made = np.flatnonzero(producer >= 0)
    own = made * count + place[producer[made]]
    begin[own], until[own] = start[producer[made]], finish[producer[made]]
    for number, source, target, _, arrival in sent:
        begin[number * count + target] = arrival
        until[number * count + source] = max(until[number * count + source], arrival)
    np.maximum.at(until, tensor * count + place[reader], finish[reader])
    alive = np.flatnonzero(np.isfinite(begin))
    size = np.array(problem.size)[alive // count]
    for device in range(count):
        mine = alive % count == device
        if not mine.any():
            continue
        chosen, bytes_ = alive[mine], size[mine]
        times = np.concatenate([begin[chosen], until[chosen]])
        change = np.concatenate([bytes_, -bytes_])
        # At one moment memory is freed before other memory is allocated.
        by_time = np.lexsort((change, times))
        peaks[device] += max(0.0, float(np.cumsum(change[by_time]).max()))
    return peaks


def _check(problem: PlacementProblem, devices: list[int], order: list[int]) -> None:
    names = problem.graph.names
    position = [-1] * problem.count
    for index, op in enumerate(order):
        position[op] = index
    if len(order) != problem.count or len(devices) != problem.count or -1 in position:
        raise PlacementError(
            f"{len(devices)} operators are placed and {len(set(order))} are in the queue, of {problem.count}; place "
            f"and queue each operator once"
        )
    outside = [op for op in order if not 0 <= devices[op] < problem.devices]
    if outside:
        op = outside[0]
        raise PlacementError(
            f"{names[op]} is on device {devices[op]} of {problem.devices}; take one from 0 to {problem.devices - 1}"
        )
    edges = np.asarray(problem.graph.edges, np.int64).reshape(-1, 4)
    places = np.array(position, np.int64)
    late = np.flatnonzero(places[edges[:, 0]] > places[edges[:, 1]])
    if len(late):
        first, second = edges[late[0], :2].tolist()
        raise PlacementError(
            f"the queue has {names[second]} at {position[second]} before {names[first]} at {position[first]}, which it "
            f"needs; queue operators in a topological order"
        )
    for group, members in enumerate(problem.members):
        where = {devices[op] for op in members}
        if len(where) > 1 or (where and problem.pinned[group] >= 0 and where != {problem.pinned[group]}):
            wanted = problem.pinned[group] if problem.pinned[group] >= 0 else "one device"
            raise PlacementError(
                f"operators of group {group}, as {names[members[0]]}, are on devices {sorted(where)}; put them "
                f"on {wanted}"
            )


# ---- placements during a search


class Candidate(NamedTuple):
    """A placement.

    Attributes:
        problem: its operators, some of which may be parts.
        devices: of each operator.
        order: Q.
        seconds: the simulated makespan.
        over: total bytes by which the devices' peaks exceed their limits.
        origin: how it was found.
    """

    problem: PlacementProblem
    devices: list[int]
    order: list[int]
    seconds: float
    over: float
    origin: str

    @property
    def rank(self) -> tuple[float, float]:
        """The lower, the better: a placement that doesn't fit is worse than any that does."""
        return (self.over, self.seconds)


def judged(problem: PlacementProblem, devices: list[int], order: list[int], origin: str) -> Candidate:
    """Simulates given devices and queue."""
    return _candidate(problem, devices, order, *run_in_order(problem, devices, order), origin)


def _candidate(
    problem: PlacementProblem,
    devices: list[int],
    order: list[int],
    start: list[float],
    finish: list[float],
    sent: Sent,
    origin: str,
) -> Candidate:
    over, limits = 0.0, problem.topology.memory_bytes
    if np.isfinite(limits).any():
        place = np.array(devices, np.int64)
        peaks = peak_bytes(problem, place, np.array(start), np.array(finish), sent)
        over = float(np.maximum(peaks - limits, 0.0).sum())
    return Candidate(problem, devices, order, max(finish, default=0.0), over, origin)


def scheduled(problem: PlacementProblem, devices: list[int], origin: str) -> Candidate:
    """Finds the queue for given devices by urgency: the path from an operator's start to the end of the step."""
    return _queued(problem, devices, _urgency(problem, devices), None, origin)


def _urgency(problem: PlacementProblem, devices: list[int]) -> list[float]:
    tail = tails(problem, devices)
    return [tail[op] + problem.seconds[op][devices[op]] for op in range(problem.count)]


def _queued(
    problem: PlacementProblem,
    devices: list[int],
    urgency: list[float],
    release: Mapping[int, float] | None,
    origin: str,
) -> Candidate:
    order, start, finish, sent = order_by_urgency(problem, devices, urgency, release)
    if release:  # Devices wait for nothing when the queue is run.
        return judged(problem, devices, order, origin)
    return _candidate(problem, devices, order, start, finish, sent, origin)


def ordered_sources(candidate: Candidate, rounds: int = 2) -> Candidate:
    """Returns a candidate whose variables are read and sent when needed, or the given one if that is better.

    Operators without inputs would run at the start of the step, the longest path first: a large variable is sent before
    a small one that is needed sooner, since transfers on a link go in the order in which they became ready. It tries
    reads in the order in which their tensors are needed, at the start and shortly before they are needed.

    Args:
        candidate: where to start.
        rounds: number of updates of the times at which tensors are needed.
    """
    for _ in range(rounds):
        better = _with_ordered_sources(candidate)
        if better is candidate:
            break
        candidate = better
    return candidate


def _with_ordered_sources(candidate: Candidate) -> Candidate:
    problem, devices = candidate.problem, candidate.devices
    start, _, _ = run_in_order(problem, devices, candidate.order)
    early = _early(problem)
    needed: dict[int, float] = {}  # when tensors that follow from variables alone have to be sent
    for op in range(problem.count - 1, -1, -1):
        if not early[op]:
            continue
        here = devices[op]
        latency, per_byte = problem.latency[here], problem.per_byte[here]
        times = [
            needed[reader] for tensor in problem.outputs[op] for reader in problem.readers[tensor] if reader in needed
        ]
        times += [
            start[reader] - latency[devices[reader]] - problem.size[tensor] * per_byte[devices[reader]]
            for tensor in problem.outputs[op]
            for reader in problem.readers[tensor]
            if devices[reader] != here
        ]
        if times:
            needed[op] = min(times)
    if not needed:
        return candidate
    urgency = _urgency(problem, devices)
    candidates = [candidate]
    for op, time in needed.items():
        urgency[op] = max(urgency[op], 2 * candidate.seconds - time)
    for lead in (None, 0.1):
        release = None if lead is None else {op: time - lead * candidate.seconds for op, time in needed.items()}
        candidates.append(_queued(candidate.problem, devices, urgency, release, candidate.origin))
    return min(candidates, key=lambda one: one.rank)


def _early(problem: PlacementProblem) -> list[bool]:
    """Returns which operators need only variables, and take less time than sending their outputs."""
    early = [False] * problem.count
    for op in range(problem.count):
        light = problem.mean_seconds[op] <= sum(problem.mean_transfer[tensor] for tensor in problem.outputs[op])
        early[op] = (light or not problem.inputs[op]) and not problem.waits[op]
        early[op] = early[op] and all(early[problem.producer[tensor]] for tensor in problem.inputs[op])
    return early


def placed_by(candidate: Candidate) -> OpPlacement:
    """Returns a candidate, simulated, as a placement of the graph without splits.

    Its peak may be above a device's limit.
    """
    problem, devices = candidate.problem, candidate.devices
    seen, names = simulate(problem, devices, candidate.order), problem.graph.names
    return OpPlacement(
        devices=dict(zip(names, devices, strict=True)),
        order=tuple(names[op] for op in candidate.order),
        splits=dict(candidate.problem.graph.applied),
        seconds=seen.seconds,
        peak_bytes=tuple(seen.peak_bytes.tolist()),
    )
