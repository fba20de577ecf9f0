"""Fewer, larger operators to place: those that aren't worth a transfer join the one before or behind them.

Placing an operator apart from what it reads, or from what reads it, can only pay if it takes longer than that tensor's
transfer. So an operator that is cheaper joins its only producer, or its only consumer; one that needs nothing, as the
read of a variable, joins the first of its consumers; a chain is one piece as long as the piece isn't a large share of the
step. None of these joins makes a cycle. All operators of a piece get its device; in which order they run is
decided for single operators again, so nothing is lost but choices.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from dapple_tf.operators.op_graph import OpGraph, Topology
from dapple_tf.operators.placement_problem import PlacementProblem, compile_problem

_PIECES_PER_DEVICE = 24
"""A chain becomes pieces of at most the step's time divided by so many per device."""


@dataclasses.dataclass(frozen=True, eq=False)
class Coarse:
    """A graph of pieces.

    Attributes:
        graph: with the pieces as operators, named like their first operator.
        piece: of each operator of the original graph; int64 [n].
    """

    graph: OpGraph
    piece: np.ndarray


def coarsen(problem: PlacementProblem, per_device: int = _PIECES_PER_DEVICE) -> Coarse:
    """Join operators to pieces.

    Args:
        problem: the operators.
        per_device: pieces of chains take at most the step's time divided by this and the number of devices.
    """
    pieces = _Pieces(problem, sum(problem.mean_seconds) / (per_device * problem.devices))
    pieces.join_sources()
    for _ in range(3):
        before = pieces.joined
        pieces.join_forward()
        pieces.join_backward()
        if pieces.joined == before:
            break
    return pieces.coarse()


class _Pieces:
    """Pieces while they grow; each is named by one of its operators (`find`)."""

    def __init__(self, problem: PlacementProblem, most: float) -> None:
        self.problem, self.most, self.joined = problem, most, 0
        n = problem.count
        self.parent = list(range(n))
        self.seconds = list(problem.mean_seconds)
        self.alone = [len(members) == 1 for members in problem.members]
        # The group that binds a piece; -1 for none.
        self.bound = [-1 if self.alone[group] and problem.pinned[group] < 0 else group for group in problem.group]
        self.group_parent = list(range(len(problem.members)))
        self.group_pin = list(problem.pinned)
        self.weight: list[dict[int, float]] = []  # of each operator: the operators that it needs -> transfer seconds
        self.uses: list[dict[int, float]] = [{} for _ in range(n)]
        for op in range(n):
            needs: dict[int, float] = {}
            for tensor in problem.inputs[op]:
                producer = problem.producer[tensor]
                needs[producer] = needs.get(producer, 0.0) + problem.mean_transfer[tensor]
            for other in problem.waits[op]:
                needs.setdefault(other, problem.mean_latency)
            self.weight.append(needs)
            for producer, seconds in needs.items():
                self.uses[producer][op] = seconds

    def find(self, op: int) -> int:
        parent = self.parent
        while parent[op] != op:
            parent[op] = parent[parent[op]]
            op = parent[op]
        return op

    def find_group(self, group: int) -> int:
        while self.group_parent[group] != group:
            group = self.group_parent[group]
        return group

    def neighbours(self, op: int, table: list[dict[int, float]]) -> dict[int, float]:
        """The pieces before or behind one, with the seconds of the transfers."""
        stale = table[op]
        found: dict[int, float] = {}
        for other, seconds in stale.items():
            root = self.find(other)
            if root != op:
                found[root] = found.get(root, 0.0) + seconds
        table[op] = found
        return found

    def join(self, one: int, other: int) -> bool:
        """Make two pieces one, if no two groups that are bound to different devices would be in it."""
        a, b = self.bound[one], self.bound[other]
        if a >= 0 and b >= 0:
            first, second = self.find_group(a), self.find_group(b)
            if first != second:
                pins = {self.group_pin[first], self.group_pin[second]} - {-1}
                if len(pins) > 1:
                    return False
                self.group_parent[second] = first
                self.group_pin[first] = max(pins, default=-1)
        self.bound[one] = a if a >= 0 else b
        self.parent[other] = one
        self.seconds[one] += self.seconds[other]
        for table in (self.weight, self.uses):
            kept = table[one]
            for root, seconds in table[other].items():
                kept[root] = kept.get(root, 0.0) + seconds
            table[other] = {}
        self.joined += 1
        return True

    def join_sources(self) -> None:
        """What needs nothing and is cheaper than its transfer joins the first that needs it, and so on.

        The piece keeps the consumer's number, so that numbers stay a topological order.
        """
        for op in range(self.problem.count):
            after = self.neighbours(op, self.uses)
            if after and not self.neighbours(op, self.weight):
                first = min(after)
                if self.seconds[op] <= after[first]:
                    self.join(first, op)

    def worth_joining(self, small: int, large: int, transfer: float, chain: bool) -> bool:
        """Whether ``small`` should go with ``large``; in a chain either is all that the other is linked with."""
        if self.seconds[small] <= transfer:
            return chain or self.seconds[small] <= self.most
        return chain and self.seconds[small] + self.seconds[large] <= self.most

    def join_forward(self) -> None:
        """What has only one producer joins it."""
        for op in range(self.problem.count):
            if self.parent[op] != op:
                continue
            before = self.neighbours(op, self.weight)
            if len(before) == 1:
                ((producer, seconds),) = before.items()
                chain = len(self.neighbours(producer, self.uses)) == 1
                if self.worth_joining(op, producer, seconds, chain):
                    self.join(producer, op)

    def join_backward(self) -> None:
        """What has only one consumer joins it."""
        for op in range(self.problem.count - 1, -1, -1):
            if self.parent[op] != op:
                continue
            after = self.neighbours(op, self.uses)
            if len(after) == 1:
                ((consumer, seconds),) = after.items()
                chain = len(self.neighbours(consumer, self.weight)) == 1
                if self.worth_joining(op, consumer, seconds, chain):
                    self.join(consumer, op)

    def coarse(self) -> Coarse:
        """The graph of the pieces, in a topological order."""
        problem, graph = self.problem, self.problem.graph
        roots = [self.find(op) for op in range(problem.count)]
        order = self._topological(roots)
        number = {root: index for index, root in enumerate(order)}
        piece = np.array([number[root] for root in roots], np.int64)
        count = len(order)
        first = np.full(count, problem.count, np.int64)
        np.minimum.at(first, piece, np.arange(problem.count))
        seconds = np.zeros((count, problem.devices))
        np.add.at(seconds, piece, graph.seconds)
        edges = np.asarray(graph.edges, np.int64).reshape(-1, 4).copy()
        edges[:, :2] = piece[edges[:, :2]]
        edges = np.unique(edges[edges[:, 0] != edges[:, 1]], axis=0)
        bound = np.array(
            [self.find_group(self.bound[root]) if self.bound[root] >= 0 else -1 for root in order], np.int64
        )
        names: dict[int, int] = {}
        group_of = np.array(
            [
                names.setdefault(int(group) if group >= 0 else -1 - index, len(names))
                for index, group in enumerate(bound)
            ],
            np.int64,
        )
        pinned, stored = np.full(len(names), -1, np.int64), np.zeros(len(names))
        for group, index in names.items():
            if group >= 0:
                pinned[index] = self.group_pin[group]
        for group in range(len(problem.members)):
            if problem.members[group]:
                stored[group_of[piece[problem.members[group][0]]]] += problem.stored[group]
        return Coarse(
            OpGraph(
                names=tuple(graph.names[op] for op in first.tolist()),
                ops=tuple(graph.ops[op] for op in first.tolist()),
                seconds=seconds,
                edges=edges,
                tensor_bytes=graph.tensor_bytes,
                groups=group_of,
                pinned=pinned,
                stored_bytes=stored,
                splits={},
                launch_seconds=graph.launch_seconds,
                copy_seconds=graph.copy_seconds,
            ),
            piece,
        )

    def _topological(self, roots: list[int]) -> list[int]:
        """Pieces such that each comes after all that it needs."""
        problem = self.problem
        needs: dict[int, set[int]] = {root: set() for root in roots}
        uses: dict[int, list[int]] = {root: [] for root in roots}
        for op in range(problem.count):
            root = roots[op]
            for other in [*(problem.producer[tensor] for tensor in problem.inputs[op]), *problem.waits[op]]:
                if roots[other] != root and roots[other] not in needs[root]:
                    needs[root].add(roots[other])
                    uses[roots[other]].append(root)
        missing = {root: len(before) for root, before in needs.items()}
        ready = [root for root in sorted(missing) if not missing[root]]
        order = []
        for root in ready:
            order.append(root)
            for other in uses[root]:
                missing[other] -= 1
                if not missing[other]:
                    ready.append(other)
        return order


def coarsen_graph(graph: OpGraph, topology: Topology) -> Coarse:
    """Join operators to pieces: see `coarsen`."""
    return coarsen(compile_problem(graph, topology))
