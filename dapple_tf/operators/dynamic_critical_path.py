"""Scheduling by dynamic critical paths: algorithms 1, 2 and 3 of FD-DPS, without splits.

The critical path is dynamic: EST (formula 6) counts the transfers and busy devices of the operators placed so far, so
that DCPL (10) and the slack LST - EST of unplaced operators change with every step. Literally, each step would visit
all operators. It needn't:

* The path after an unplaced operator, tail(o), doesn't change: nothing on it is placed either. With it
  LST(o) = DCPL - ET(o) - tail(o) (7), for the current DCPL.
* So Score(o) = 1 / (LST - EST + eps) (9) ranks operators as EST(o) + ET(o) + tail(o) does, and the critical ones (8),
  which come first in algorithm 1, are at the top, where this sum is DCPL.
* EST(o) is when its data is made, or when the first device is free, if that is later. Operators that could start
  before a device is free have one EST and rank by ET + tail; the others by ready + ET + tail. Two heaps keep these
  orders, and an operator moves from one to the other once: O(log n) for each.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Literal

from dapple_tf.operators.list_placement import Slots, StoredBytes
from dapple_tf.operators.placement_problem import PlacementProblem

DeviceRule = Literal["earliest", "paper"]
"""Which device an operator gets.

earliest: the one on which it ends first. paper: algorithm 2's, a parent's device as long as that delays nothing, else
the earliest.
"""


class MostCritical:
    """The schedulable operators, from which the one with the least slack is taken: algorithm 1.

    Args:
        length: ET + tail of each operator.
    """

    def __init__(self, length: Sequence[float]) -> None:
        self._length = length
        self._ready: list[tuple[float, int]] = []  # by when their data is made; no device has been idle until then
        self._path: list[tuple[float, int]] = []  # the same ones by ready + length
        self._length_only: list[tuple[float, int]] = []  # those whose data was made before a device was free
        self._moved: set[int] = set()

    def push(self, op: int, ready: float) -> None:
        """Adds an operator whose inputs have all been placed, and are made by ``ready``."""
        heapq.heappush(self._ready, (ready, op))
        heapq.heappush(self._path, (-ready - self._length[op], op))

    def pop(self, first_free: float) -> int:
        """Takes the most critical operator, given when the first device is free; ties go to the lowest number."""
        while self._ready and self._ready[0][0] <= first_free:
            op = heapq.heappop(self._ready)[1]
            if op not in self._moved:
                self._moved.add(op)
                heapq.heappush(self._length_only, (-self._length[op], op))
        while self._path and self._path[0][1] in self._moved:
            heapq.heappop(self._path)
        if not self._path:
            return heapq.heappop(self._length_only)[1]
        if self._length_only:
            path, op = self._path[0]
            length, other = self._length_only[0]
            if (length - first_free, other) < (path, op):
                return heapq.heappop(self._length_only)[1]
        op = heapq.heappop(self._path)[1]
        self._moved.add(op)
        return op


def schedule_by_critical_path(
    problem: PlacementProblem,
    tail: Sequence[float],
    limits: Sequence[float] | None = None,
    *,
    as_numbered: bool = False,
    device_rule: DeviceRule = "earliest",
) -> tuple[list[int], list[int]]:
    """Places all operators, one after another.

    Each goes to the device on which it ends first, into the first free time that is long enough; placed operators
    don't move. Links send one tensor after another.

    Args:
        problem: the operators.
        tail: the path after each of them, see `tails`.
        limits: bytes that devices may hold, as far as that is known here; None doesn't check.
        as_numbered: takes operators in the order of their numbers, the program's, which holds little at once.
        device_rule: which device an operator gets.

    Returns:
        The devices and Q.
    """
    return _Scheduler(problem, tail, limits, device_rule).run(as_numbered)


class _Scheduler:
    def __init__(
        self,
        problem: PlacementProblem,
        tail: Sequence[float],
        limits: Sequence[float] | None,
        device_rule: DeviceRule,
    ) -> None:
        self.problem, self.tail, self.rule = problem, tail, device_rule
        self.longest = 0.0  # DCPL: the longest path through operators placed so far
        n, count = problem.count, problem.devices
        shortest = min((value for value in problem.mean_seconds if value > 0), default=0.0) / 2
        self.slots = [Slots(shortest) for _ in range(count)]
        self.place_of_group = list(problem.pinned)
        self.device, self.start, self.finish = [-1] * n, [0.0] * n, [0.0] * n
        self.links = [[0.0] * count for _ in range(count)]
        self.there: list[list[float]] = [[]] * len(problem.size)  # when a tensor is on each device; -1 where it isn't
        self.stored = StoredBytes(problem)
        self.memory = None if limits is None else _AliveTensors(problem, limits)

    def run(self, as_numbered: bool) -> tuple[list[int], list[int]]:
        problem = self.problem
        missing = [len(a) + len(b) for a, b in zip(problem.inputs, problem.waits, strict=True)]
        made = [0.0] * problem.count
        queue = MostCritical([mean + tail for mean, tail in zip(problem.mean_seconds, self.tail, strict=True)])
        for op in range(problem.count):
            if not missing[op]:
                queue.push(op, 0.0)
        for number in range(problem.count):
            op = number if as_numbered else queue.pop(min(slot.end for slot in self.slots))
            self._place(op)
            end = self.finish[op]
            for tensor in problem.outputs[op]:
                for reader in problem.readers[tensor]:
                    missing[reader] -= 1
                    if end > made[reader]:
                        made[reader] = end
                    if not missing[reader]:
                        queue.push(reader, made[reader])
            for waiter in problem.waiters[op]:
                missing[waiter] -= 1
                if end > made[waiter]:
                    made[waiter] = end
                if not missing[waiter]:
                    queue.push(waiter, made[waiter])
        start = self.start
        return self.device, sorted(range(problem.count), key=lambda op: (start[op], op))

    def _place(self, op: int) -> None:
        """Places an operator by algorithm 2, and updates the state as in algorithm 3."""
        problem = self.problem
        fixed = self.place_of_group[problem.group[op]]
        candidates = [fixed] if fixed >= 0 else self.stored.fitting(op)
        if self.memory is not None and fixed < 0:
            candidates = self.memory.fitting(op, candidates)
        ready = self._ready(op, candidates)
        seconds = problem.seconds[op]
        best = candidates[0]
        begin = self.slots[best].find(ready[best], seconds[best])
        if len(candidates) > 1:
            least = begin + seconds[best]
            for device in candidates[1:]:
                start = self.slots[device].find(ready[device], seconds[device])
                end = start + seconds[device]
                if end < least:
                    best, least, begin = device, end, start
            if self.rule == "paper":
                best, begin = self._of_a_parent(op, candidates, ready, (best, begin))
        self.slots[best].take(begin, seconds[best])
        if fixed < 0:
            self.place_of_group[problem.group[op]] = best
            self.stored.add(op, best)
        for tensor in problem.inputs[op]:
            row = self.there[tensor]
            if row[best] < 0:
                producer = problem.producer[tensor]
                source = self.device[producer]
                link = self.links[source]
                arrival = max(link[best], self.finish[producer])
                arrival += problem.latency[source][best] + problem.size[tensor] * problem.per_byte[source][best]
                row[best] = link[best] = arrival
        if self.memory is not None:
            self.memory.add(op, best, new=fixed < 0)
        self.device[op], self.start[op] = best, begin
        self.finish[op] = end = begin + seconds[best]
        for tensor in problem.outputs[op]:
            row = self.there[tensor] = [-1.0] * problem.devices
            row[best] = end

    def _of_a_parent(
        self, op: int, candidates: Sequence[int], ready: Sequence[float], earliest: tuple[int, float]
    ) -> tuple[int, float]:
        """Returns the device and start by algorithm 2: a parent's device if (11) holds there, else the earliest.

        (11) has the operator start no later than its LST, by the longest path that is known. The parent whose output
        comes last is asked first.
        """
        seconds, finish = self.problem.seconds[op], self.finish
        self.longest = max(self.longest, earliest[1] + seconds[earliest[0]] + self.tail[op])
        parents = {self.problem.producer[tensor] for tensor in self.problem.inputs[op]}
        for parent in sorted(parents, key=lambda other: (-finish[other], other)):
            device = self.device[parent]
            if device in candidates:
                start = self.slots[device].find(ready[device], seconds[device])
                if start + seconds[device] + self.tail[op] <= self.longest:
                    return device, start
        return earliest

    def _ready(self, op: int, candidates: Sequence[int]) -> list[float]:
        """Returns when an operator's inputs are on each device: EST if the device were free (6)."""
        problem, device, finish = self.problem, self.device, self.finish
        ready = [0.0] * problem.devices
        for tensor in problem.inputs[op]:
            producer = problem.producer[tensor]
            row, source, end = self.there[tensor], device[producer], finish[producer]
            link, latency, per_byte = self.links[source], problem.latency[source], problem.per_byte[source]
            size = problem.size[tensor]
            for target in candidates:
                arrival = row[target]
                if arrival < 0:
                    arrival = link[target]
                    if arrival < end:
                        arrival = end
                    arrival += latency[target] + size * per_byte[target]
                if arrival > ready[target]:
                    ready[target] = arrival
        for other in problem.waits[op]:
            latency = problem.latency[device[other]]
            for target in candidates:
                arrival = finish[other] + latency[target]
                if arrival > ready[target]:
                    ready[target] = arrival
        return ready


class _AliveTensors:
    """Devices' memory of placed operators: M_v of formula 3, with tensors, as far as known.

    A tensor is held wherever it is until all its readers have been placed. The simulator decides in the end.
    """

    def __init__(self, problem: PlacementProblem, limits: Sequence[float]) -> None:
        self.problem, self.limits = problem, limits
        self.held = [0.0] * problem.devices
        for device, stored in zip(problem.pinned, problem.stored, strict=True):
            if device >= 0:
                self.held[device] += stored
        self._unread = [len(readers) for readers in problem.readers]
        self._where: list[list[int]] = [[] for _ in problem.size]

    def fitting(self, op: int, candidates: Sequence[int]) -> list[int]:
        """Returns the devices that stay within their limits; if none does, the one with the most memory left."""
        problem = self.problem
        made = sum(problem.size[tensor] for tensor in problem.outputs[op]) + problem.stored[problem.group[op]]
        left = {
            device: self.limits[device]
            - self.held[device]
            - made
            - sum(problem.size[tensor] for tensor in problem.inputs[op] if device not in self._where[tensor])
            for device in candidates
        }
        fits = [device for device in candidates if left[device] >= 0]
        return fits or [max(candidates, key=lambda device: (left[device], -device))]

    def add(self, op: int, device: int, new: bool) -> None:
        """Counts a placed operator; ``new`` if it's the first of its group."""
        problem = self.problem
        if new:
            self.held[device] += problem.stored[problem.group[op]]
        for tensor in problem.outputs[op]:
            self._where[tensor].append(device)
            self.held[device] += problem.size[tensor]
        for tensor in problem.inputs[op]:
            if device not in self._where[tensor]:
                self._where[tensor].append(device)
                self.held[device] += problem.size[tensor]
            self._unread[tensor] -= 1
            if not self._unread[tensor]:
                for place in self._where[tensor]:
                    self.held[place] -= problem.size[tensor]
