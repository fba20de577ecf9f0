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
from typing import NamedTuple

import numpy as np

from dapple_tf.operators.placement_problem import PlacementError, PlacementProblem


class Transfer(NamedTuple):
    """A transfer of a tensor.

    Attributes:
        tensor: its number.
        source: device.
        target: device.
        start: when the link began to send it, in seconds.
        arrival: when it arrived, in seconds.
    """

    tensor: int
    source: int
    target: int
    start: float
    arrival: float


@dataclasses.dataclass(frozen=True, eq=False)
class SimulatedPlacement:
    """A simulated step.

    Attributes:
        start: of each operator, seconds; float64 [n].
        finish: the same.
        seconds: the makespan.
        peak_bytes: of each device, float64 [V]: the variables of its groups, and tensors from their producer's start or
            their arrival until the last reader there, or their last transfer, has ended.
        busy_seconds: each device's seconds of running operators, float64 [V].
        sent_bytes: over each link, float64 [V, V].
        transfers: in the order in which their producers stand in Q.
    """

    start: np.ndarray
    finish: np.ndarray
    seconds: float
    peak_bytes: np.ndarray
    busy_seconds: np.ndarray
    sent_bytes: np.ndarray
    transfers: tuple[Transfer, ...]


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
    count = problem.devices
    place = np.array(devices, np.int64)
    starts, ends = np.array(start), np.array(finish)
    sent_bytes = np.zeros((count, count))
    moved = np.array([(t, s, d) for t, s, d, _, _ in sent], np.int64).reshape(-1, 3)
    np.add.at(sent_bytes, (moved[:, 1], moved[:, 2]), np.array(problem.size)[moved[:, 0]])
    return SimulatedPlacement(
        start=starts,
        finish=ends,
        seconds=max(finish, default=0.0),
        peak_bytes=peak_bytes(problem, place, starts, ends, sent),
        busy_seconds=np.bincount(place, ends - starts, count),
        sent_bytes=sent_bytes,
        transfers=tuple(Transfer(*values) for values in sent),
    )


Sent = list[tuple[int, int, int, float, float]]
"""Tensor, source, target, start and arrival of each transfer."""


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
