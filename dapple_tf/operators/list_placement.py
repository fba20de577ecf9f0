"""The common part of HEFT and FastT: devices' free times, and placing operators in turn where they end first.

Classical list scheduling by insertion (Topcuoglu et al., 2002): an operator takes a device's first free time that is
long enough, possibly before operators that were placed earlier. Links count as free when needed, as in both papers;
the simulator, which sends one tensor after another, judges the result.
"""

from __future__ import annotations

from bisect import bisect_right

from dapple_tf.operators.op_graph import OpPlacement, Topology
from dapple_tf.operators.placement_problem import PlacementProblem
from dapple_tf.operators.simulated_placement import simulate

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
        """Returns the first start from ``ready`` on with ``seconds`` free: formula 11 of FD-DPS.

        Placed operators don't move.
        """
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


class InsertionScheduler:
    """Places operators one after another, each after its inputs.

    Attributes:
        device: of each operator, -1 before it's placed.
        start: of each operator.
        finish: of each operator.
    """

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        shortest = min((value for value in problem.mean_seconds if value > 0), default=0.0) / 2
        self.slots = [Slots(shortest) for _ in range(problem.devices)]
        self.device = [-1] * problem.count
        self.start, self.finish = [0.0] * problem.count, [0.0] * problem.count
        self._ready: list[list[float] | None] = [None] * problem.count
        self._place_of_group = list(problem.pinned)
        self._memory = StoredBytes(problem)

    def candidates(self, op: int) -> list[int]:
        """Returns an operator's possible devices: that of its group, or those with memory for its variables."""
        group = self.problem.group[op]
        place = self._place_of_group[group]
        return [place] if place >= 0 else self._memory.fitting(op)

    def earliest(self, op: int, device: int) -> tuple[float, float]:
        """Returns EST and EFT of an operator on a device."""
        ready = self._ready[op]
        seconds = self.problem.seconds[op][device]
        start = self.slots[device].find(0.0 if ready is None else ready[device], seconds)
        return start, start + seconds

    def place(self, op: int, device: int) -> None:
        """Places an operator in the first free time."""
        problem = self.problem
        start, finish = self.earliest(op, device)
        self.slots[device].take(start, finish - start)
        self.device[op], self.start[op], self.finish[op] = device, start, finish
        group = problem.group[op]
        if self._place_of_group[group] < 0:
            self._place_of_group[group] = device
            self._memory.add(op, device)
        latency, per_byte = problem.latency[device], problem.per_byte[device]
        for tensor in problem.outputs[op]:
            size = problem.size[tensor]
            row = [finish + one + size * other for one, other in zip(latency, per_byte, strict=True)]
            for reader in problem.readers[tensor]:
                self._delay(reader, row)
        if problem.waiters[op]:
            row = [finish + one for one in latency]
            for waiter in problem.waiters[op]:
                self._delay(waiter, row)

    def order(self) -> list[int]:
        """Returns Q: operators by start; ties in topological order."""
        start = self.start
        return sorted(range(self.problem.count), key=lambda op: (start[op], op))

    def _delay(self, op: int, row: list[float]) -> None:
        ready = self._ready[op]
        self._ready[op] = row if ready is None else [a if a > b else b for a, b in zip(ready, row, strict=True)]


class StoredBytes:
    """The variables that devices hold: all that list scheduling knows of memory before a simulation."""

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem = problem
        self.limits = problem.topology.memory_bytes.tolist()
        self.used = [0.0] * problem.devices
        for device, stored in zip(problem.pinned, problem.stored, strict=True):
            if device >= 0:
                self.used[device] += stored
        self._everywhere = list(range(problem.devices))
        self._bounded = sum(problem.stored) > min(self.limits)

    def fitting(self, op: int) -> list[int]:
        """Returns the devices with memory for an operator's variables; if none, the one with the most left."""
        stored = self.problem.stored[self.problem.group[op]]
        if not self._bounded or not stored:
            return self._everywhere
        fits = [device for device in self._everywhere if self.used[device] + stored <= self.limits[device]]
        return fits or [max(self._everywhere, key=lambda device: (self.limits[device] - self.used[device], -device))]

    def add(self, op: int, device: int) -> None:
        """Counts the variables of an operator that is the first of its group."""
        self.used[device] += self.problem.stored[self.problem.group[op]]


def placement_of(problem: PlacementProblem, devices: list[int], order: list[int]) -> OpPlacement:
    """Simulates a placement without splits.

    Its peak may be above a device's limit: see `fits`.
    """
    seen = simulate(problem, devices, order)
    names = problem.graph.names
    return OpPlacement(
        devices={names[op]: devices[op] for op in range(problem.count)},
        order=tuple(names[op] for op in order),
        splits={},
        seconds=seen.seconds,
        peak_bytes=tuple(seen.peak_bytes.tolist()),
    )


def fits(placement: OpPlacement, topology: Topology) -> bool:
    """Returns whether every device's peak is within its limit: M_v < C of FD-DPS' formula 4."""
    return all(peak <= limit for peak, limit in zip(placement.peak_bytes, topology.memory_bytes.tolist(), strict=True))
