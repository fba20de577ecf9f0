"""Scheduling by dynamic critical paths: algorithms 1, 2 and 3 of FD-DPS, without splits.

The critical path is dynamic: EST (formula 6) counts the transfers and the busy devices that the operators placed so far
bring, so that DCPL (10) and the slack LST - EST of what isn't placed change with every step. Written out, each step
would visit all operators. It needn't:

* The path behind an operator that isn't placed, tail(o), doesn't change: all that is on it isn't placed either. With it
  LST(o) = DCPL - ET(o) - tail(o) (7), for the one DCPL of the moment.
* So Score(o) = 1 / (LST - EST + eps) (9) ranks operators as EST(o) + ET(o) + tail(o) does, and the critical ones (8),
  which come first in algorithm 1, are those at the top, where this sum is DCPL.
* EST(o) is when its data is made, or when the first device is free, if that is later. All that could start before a
  device is free have one EST and rank by ET + tail; the others by ready + ET + tail. Two heaps keep these orders, and
  an operator changes from one to the other once: O(log n) for each.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from dapple_tf.operators.list_placement import Slots, StoredBytes
from dapple_tf.operators.placement_problem import PlacementProblem


class MostCritical:
    """The schedulable operators, of which the one with the least slack is taken: algorithm 1.

    Args:
        length: ET + tail of each operator.
    """

    def __init__(self, length: Sequence[float]) -> None:
        self._length = length
        self._ready: list[tuple[float, int]] = []  # by when their data is made; nobody has been idle until then
        self._path: list[tuple[float, int]] = []  # the same ones by ready + length
        self._length_only: list[tuple[float, int]] = []  # those whose data was made before a device was free
        self._moved: set[int] = set()

    def push(self, op: int, ready: float) -> None:
        """All that an operator needs has been placed, and is made at ``ready`` at the latest."""
        heapq.heappush(self._ready, (ready, op))
        heapq.heappush(self._path, (-ready - self._length[op], op))

    def pop(self, first_free: float) -> int:
        """The most critical operator, given when the first device is free; of equal ones the first in number."""
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
    previous: list[int] | None = None,
    limits: Sequence[float] | None = None,
    *,
    as_numbered: bool = False,
) -> tuple[list[int], list[int]]:
    """Place all operators, one after another.

    Each goes to the device on which it ends first (with ``previous``, to that on which the path through it is the
    shortest), into the first free time that is long enough; what was placed before stays where it is. Links
    send one tensor after another.

    Args:
        problem: the operators.
        tail: the path behind each of them, see `tails`.
        previous: devices in the previous round, taken for those of the operators that aren't placed yet.
        limits: what devices may hold, as far as that can be told here; None doesn't look.
        as_numbered: take operators in the order of their numbers, that of the program, in which little is held at once.

    Returns:
        The devices and Q.
    """
    return _Scheduler(problem, tail, previous, limits).run(as_numbered)


class _Scheduler:
    def __init__(
        self,
        problem: PlacementProblem,
        tail: Sequence[float],
        previous: list[int] | None,
        limits: Sequence[float] | None,
    ) -> None:
        self.problem, self.tail, self.previous = problem, tail, previous
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
        """Algorithm 2, and what algorithm 3 updates."""
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
            after = None if self.previous is None else self._after(op)
            least = (begin + seconds[best] + (after[best] if after else 0.0), begin + seconds[best])
            for device in candidates[1:]:
                start = self.slots[device].find(ready[device], seconds[device])
                end = start + seconds[device]
                cost = (end + (after[device] if after else 0.0), end)
                if cost < least:
                    best, least, begin = device, cost, start
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

    def _ready(self, op: int, candidates: Sequence[int]) -> list[float]:
        """When all that an operator needs is on each device: EST without regard to what the device does (6)."""
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

    def _after(self, op: int) -> list[float]:
        """The path behind an operator, for each device that it may have."""
        problem, previous, tail = self.problem, self.previous, self.tail
        assert previous is not None
        longest = [0.0] * problem.devices
        for tensor in problem.outputs[op]:
            size = problem.size[tensor]
            paths: dict[int, float] = {}
            for reader in problem.readers[tensor]:
                there = previous[reader]
                path = problem.seconds[reader][there] + tail[reader]
                if path > paths.get(there, -1.0):
                    paths[there] = path
            for there, path in paths.items():
                for device in range(problem.devices):
                    value = path
                    if device != there:
                        value += problem.latency[device][there] + size * problem.per_byte[device][there]
                    if value > longest[device]:
                        longest[device] = value
        for waiter in problem.waiters[op]:
            there = previous[waiter]
            path = problem.seconds[waiter][there] + tail[waiter]
            for device in range(problem.devices):
                longest[device] = max(longest[device], path + problem.latency[device][there])
        return longest


class _AliveTensors:
    """What devices hold of what has been placed: M_v of formula 3, with tensors, as far as it can be told yet.

    A tensor is held wherever it is until all that read it have been placed. The simulator has the last word.
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
        """The devices that stay within their limits; where there is none, that which has the most memory left."""
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
        """Place an operator; ``new`` if it's the first of its group."""
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
