"""List scheduling by insertion, one for FD-DPS, FastT's DPOS, HEFT and MP-DPS.

They differ in priorities, device rules and links. As in HEFT (Topcuoglu et al., 2002) the ready operator with the
highest priority takes the first free time that is long enough, on the device that a rule chooses. Operators that were
placed earlier don't move. DPOS, HEFT and MP-DPS take links for free whenever they need them, as their papers do. FD-DPS
sends one tensor after another, as the simulator does, which judges all of them.

FD-DPS' critical path is dynamic: EST (formula 6) counts the transfers and busy devices of the operators placed so far,
so that DCPL (10) and the slack LST - EST of unplaced operators change with every step. Literally, each step would visit
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
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from dapple_tf.operators.op_graph import PlacementProblem, tails

_MOST_GAPS = 64
"""The most gaps of a device that are tried for one operator."""


class Slots:
    """The times at which a device is free.

    Attributes:
        end: when its last operator ends.
    """

    __slots__ = ("_ends", "_shortest", "_starts", "end")

    def __init__(self, shortest: float = 0.0) -> None:
        """Starts with an idle device; gaps up to ``shortest`` seconds are forgotten."""
        self.end = 0.0
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._shortest = shortest

    def find(self, ready: float, seconds: float) -> float:
        """Returns the first start from ``ready`` on with ``seconds`` free: formula 11 of FD-DPS."""
        if ready >= self.end:
            return ready
        starts, ends = self._starts, self._ends
        first = bisect_right(ends, ready)
        for index in range(first, min(len(ends), first + _MOST_GAPS)):
            start = starts[index]
            if start < ready:
                start = ready
            if start + seconds <= ends[index]:
                return start
        return self.end

    def take(self, start: float, seconds: float) -> None:
        """Takes a time that `find` has found."""
        end = start + seconds
        if start >= self.end:
            if start - self.end > self._shortest:
                self._starts.append(self.end)
                self._ends.append(start)
            self.end = end
            return
        starts, ends = self._starts, self._ends
        index = bisect_right(starts, start) - 1
        before, after = starts[index], ends[index]
        pieces = [(a, b) for a, b in ((before, start), (end, after)) if b - a > self._shortest]
        starts[index : index + 1] = [a for a, _ in pieces]
        ends[index : index + 1] = [b for _, b in pieces]


# ---- priorities


class Ready(Protocol):
    """The operators whose inputs have all been placed, in the order of an algorithm's priority."""

    def push(self, op: int, made: float) -> None:
        """Adds an operator whose inputs are made by ``made``."""

    def pop(self, first_free: float) -> int:
        """Takes the next operator, given when the first device is free."""


class ByPriority:
    """The ready operators by a static priority, the greatest first; ties go to the lowest number."""

    def __init__(self, priority: Sequence[float]) -> None:
        self._priority = priority
        self._ready: list[tuple[float, int]] = []

    def push(self, op: int, made: float) -> None:
        """See `Ready`."""
        heapq.heappush(self._ready, (-self._priority[op], op))

    def pop(self, first_free: float) -> int:
        """See `Ready`."""
        return heapq.heappop(self._ready)[1]


class MostCritical:
    """The ready operators, from which the one with the least slack is taken: algorithm 1 of FD-DPS.

    Args:
        length: ET + tail of each operator.
    """

    def __init__(self, length: Sequence[float]) -> None:
        self._length = length
        self._ready: list[tuple[float, int]] = []  # by when their data is made; no device has been idle until then
        self._path: list[tuple[float, int]] = []  # the same ones by made + length
        self._length_only: list[tuple[float, int]] = []  # those whose data was made before a device was free
        self._moved: set[int] = set()

    def push(self, op: int, made: float) -> None:
        """See `Ready`."""
        heapq.heappush(self._ready, (made, op))
        heapq.heappush(self._path, (-made - self._length[op], op))

    def pop(self, first_free: float) -> int:
        """See `Ready`; ties go to the lowest number."""
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


# ---- placing


class ListScheduler:
    """Places operators one after another, each after its inputs.

    Attributes:
        device: of each operator, -1 before it's placed.
        start: of each operator, in seconds.
        finish: the same.

    Args:
        problem: the operators.
        limits: bytes of variables and tensors that devices may hold, as far as they are known here; None counts
            variables alone, within the topology's limits.
        busy_links: whether a link sends one tensor after another, each once to a device.
    """

    def __init__(
        self, problem: PlacementProblem, limits: Sequence[float] | None = None, *, busy_links: bool = False
    ) -> None:
        self.problem = problem
        n, count = problem.count, problem.devices
        shortest = min((value for value in problem.mean_seconds if value > 0), default=0.0) / 2
        self._slots = [Slots(shortest) for _ in range(count)]
        self._place_of_group = list(problem.pinned)
        self.device, self.start, self.finish = [-1] * n, [0.0] * n, [0.0] * n
        self._links = [[0.0] * count for _ in range(count)]
        self._there: list[list[float]] = [[]] * len(problem.size)  # when a tensor is on each device; -1 where it isn't
        self._memory = _Memory(problem, limits)
        self._busy_links = busy_links

    def run(self, ready: Ready, choose: Rule) -> tuple[list[int], list[int]]:
        """Places all operators; returns their devices and Q, by start with ties in topological order."""
        problem = self.problem
        missing = [len(a) + len(b) for a, b in zip(problem.inputs, problem.waits, strict=True)]
        made = [0.0] * problem.count
        for op in range(problem.count):
            if not missing[op]:
                ready.push(op, 0.0)
        for _ in range(problem.count):
            op = ready.pop(min(slots.end for slots in self._slots))
            self._place(op, choose)
            end = self.finish[op]
            for followers in (*(problem.readers[tensor] for tensor in problem.outputs[op]), problem.waiters[op]):
                for other in followers:
                    missing[other] -= 1
                    if end > made[other]:
                        made[other] = end
                    if not missing[other]:
                        ready.push(other, made[other])
        start = self.start
        return self.device, sorted(range(problem.count), key=lambda op: (start[op], op))

    def _place(self, op: int, choose: Rule) -> None:
        """Places an operator, and updates the state as in algorithm 3 of FD-DPS."""
        problem = self.problem
        group, seconds = problem.group[op], problem.seconds[op]
        fixed = self._place_of_group[group]
        devices = [fixed] if fixed >= 0 else self._memory.fitting(op)
        arrivals = self._arrivals(op, devices)
        starts = [self._slots[device].find(arrivals[device], seconds[device]) for device in devices]
        ends = [start + seconds[device] for start, device in zip(starts, devices, strict=True)]
        index = choose(self, op, devices, ends) if len(devices) > 1 else 0
        best = devices[index]
        self.device[op], self.start[op], self.finish[op] = best, starts[index], ends[index]
        self._slots[best].take(starts[index], seconds[best])
        self._place_of_group[group] = best
        if self._busy_links:
            self._send(op, best)
        self._memory.add(op, best, new=fixed < 0)
        for tensor in problem.outputs[op]:
            row = self._there[tensor] = [-1.0] * problem.devices
            row[best] = ends[index]

    def _send(self, op: int, target: int) -> None:
        """Sends the inputs of an operator to its device, unless they are there."""
        problem = self.problem
        for tensor in problem.inputs[op]:
            row = self._there[tensor]
            if row[target] < 0:
                producer = problem.producer[tensor]
                source = self.device[producer]
                link = self._links[source]
                arrival = max(link[target], self.finish[producer])
                arrival += problem.latency[source][target] + problem.size[tensor] * problem.per_byte[source][target]
                row[target] = link[target] = arrival

    def _arrivals(self, op: int, devices: Sequence[int]) -> list[float]:
        """Returns when an operator's inputs are on each device: its EST if the device were free (formula 6)."""
        problem, device, finish = self.problem, self.device, self.finish
        latest = [0.0] * problem.devices
        for tensor in problem.inputs[op]:
            producer = problem.producer[tensor]
            row, source, end = self._there[tensor], device[producer], finish[producer]
            link, latency, per_byte = self._links[source], problem.latency[source], problem.per_byte[source]
            size = problem.size[tensor]
            for target in devices:
                arrival = row[target]
                if arrival < 0:
                    arrival = link[target]
                    if arrival < end:
                        arrival = end
                    arrival += latency[target] + size * per_byte[target]
                if arrival > latest[target]:
                    latest[target] = arrival
        for other in problem.waits[op]:
            latency = problem.latency[device[other]]
            for target in devices:
                arrival = finish[other] + latency[target]
                if arrival > latest[target]:
                    latest[target] = arrival
        return latest


class _Memory:
    """What devices hold of placed operators: their variables; with limits also tensors, M_v of FD-DPS' formula 3.

    A tensor is held wherever it is until all its readers have been placed. The simulator decides in the end.
    """

    def __init__(self, problem: PlacementProblem, limits: Sequence[float] | None) -> None:
        self.problem, self._has_tensors = problem, limits is not None
        self._limits = problem.topology.memory_bytes.tolist() if limits is None else limits
        self._held = [0.0] * problem.devices
        for device, stored in zip(problem.pinned, problem.stored, strict=True):
            if device >= 0:
                self._held[device] += stored
        self._everywhere = list(range(problem.devices))
        self._bounded = bool(np.isfinite(self._limits).any())
        self._unread = [len(readers) for readers in problem.readers]
        self._where: list[list[int]] = [[] for _ in problem.size]

    def fitting(self, op: int) -> list[int]:
        """Returns the devices with memory for an operator; if none has enough, the one with the most left."""
        problem = self.problem
        needed = problem.stored[problem.group[op]]
        if not self._bounded or not (needed or self._has_tensors):
            return self._everywhere
        absent = [0.0] * problem.devices
        if self._has_tensors:
            needed += sum(problem.size[tensor] for tensor in problem.outputs[op])
            for device in self._everywhere:
                absent[device] = sum(
                    problem.size[tensor] for tensor in problem.inputs[op] if device not in self._where[tensor]
                )
        left = [
            limit - held - needed - more for limit, held, more in zip(self._limits, self._held, absent, strict=True)
        ]
        fits = [device for device in self._everywhere if left[device] >= 0]
        return fits or [max(self._everywhere, key=lambda device: (left[device], -device))]

    def add(self, op: int, device: int, new: bool) -> None:
        """Counts a placed operator; ``new`` if it's the first of its group."""
        problem = self.problem
        if new:
            self._held[device] += problem.stored[problem.group[op]]
        if not self._has_tensors:
            return
        for tensor in problem.outputs[op]:
            self._where[tensor].append(device)
            self._held[device] += problem.size[tensor]
        for tensor in problem.inputs[op]:
            if device not in self._where[tensor]:
                self._where[tensor].append(device)
                self._held[device] += problem.size[tensor]
            self._unread[tensor] -= 1
            if not self._unread[tensor]:
                for place in self._where[tensor]:
                    self._held[place] -= problem.size[tensor]


# ---- device rules

Rule: TypeAlias = Callable[[ListScheduler, int, Sequence[int], Sequence[float]], int]
"""Scheduler, operator, the devices that may run it and when it would end on each -> index of its device there."""


def earliest(scheduler: ListScheduler, op: int, devices: Sequence[int], ends: Sequence[float]) -> int:
    """Chooses the device on which an operator ends first; ties go to the first of them."""
    return ends.index(min(ends))


# ---- the algorithms


def heft_schedule(problem: PlacementProblem) -> tuple[list[int], list[int]]:
    """Returns the devices and Q of HEFT: by upward rank, each operator where it ends first.

    Source: Topcuoglu, Hariri, Wu (IEEE TPDS 13(3), 2002).
    """
    return ListScheduler(problem).run(by_rank(problem), earliest)


def by_rank(problem: PlacementProblem) -> ByPriority:
    """Returns the order of descending upward ranks.

    rank(o) = mean seconds of o + max over its successors s of (mean seconds of the transfer + rank(s)).
    """
    return ByPriority([mean + tail for mean, tail in zip(problem.mean_seconds, tails(problem), strict=True)])


def dpos_schedule(problem: PlacementProblem) -> tuple[list[int], list[int]]:
    """Returns the devices and Q of FastT's DPOS (Yi et al., Middleware 2020): by upward rank, like HEFT.

    The operators on the critical path, of greatest rank from an entry, go to the device that runs them all soonest and
    has memory for their variables; all others to the device on which they end first.
    """
    critical = critical_path(problem)
    totals = [sum(problem.seconds[op][device] for op in critical) for device in range(problem.devices)]
    on_path = set(critical)

    def choose(scheduler: ListScheduler, op: int, devices: Sequence[int], ends: Sequence[float]) -> int:
        if op in on_path:
            return min(range(len(devices)), key=lambda index: (totals[devices[index]], devices[index]))
        return earliest(scheduler, op, devices, ends)

    return ListScheduler(problem).run(by_rank(problem), choose)


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


def fd_dps_schedule(
    problem: PlacementProblem,
    choose: Rule = earliest,
    *,
    weight: float = 1.0,
    limits: Sequence[float] | None = None,
    as_numbered: bool = False,
) -> tuple[list[int], list[int]]:
    """Returns the devices and Q of algorithms 1 and 3 of FD-DPS, without splits.

    Args:
        problem: the operators.
        choose: which device an operator gets, in place of algorithm 2.
        weight: of communication in the paths after operators.
        limits: bytes that devices may hold, as far as that is known here; None counts variables alone.
        as_numbered: takes operators in the order of their numbers, the program's, which holds little at once.
    """
    length = [mean + tail for mean, tail in zip(problem.mean_seconds, tails(problem, None, weight), strict=True)]
    ready: Ready = ByPriority([0.0] * problem.count) if as_numbered else MostCritical(length)
    return ListScheduler(problem, limits, busy_links=True).run(ready, choose)
