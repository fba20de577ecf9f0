"""Pieces of a step: fewer, larger operators to place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from dapple_tf.operators.op_graph import DisjointSets, OpGraph, PlacementProblem, compile_problem

_PIECES_PER_DEVICE = 24
"""A chain's pieces take at most the step's time divided by this and the number of devices."""

_MOST_CONSUMERS = 64
"""A source with more consumers than this, such as the learning rate, joins none of them."""
_ROUNDS = 3
"""The most rounds of joining pieces forward and backward."""


@dataclasses.dataclass(frozen=True, eq=False)
class Pieces:
    """A graph with its operators joined to pieces.

    Placing an operator apart from its producer or consumer can only pay if it takes longer than the tensor's transfer.
    So a cheaper operator joins its only producer, or its only consumer; one without inputs, such as the read of a
    variable, joins the first of its consumers; a chain is one piece unless it is a large share of the step. None of
    these joins makes a cycle. All operators of a piece get its device; their order is again decided for single ones.

    Attributes:
        problem: with the pieces as operators, named like their first operator.
        piece: of each operator of the original graph.
    """

    problem: PlacementProblem
    piece: list[int]

    @classmethod
    def of(cls, problem: PlacementProblem, pinned: np.ndarray | None = None) -> Pieces:
        """Joins operators to pieces; near-linear in operators and edges.

        Args:
            problem: the operators.
            pinned: device of each group, in place of the problem's own.
        """
        if pinned is not None:
            problem = dataclasses.replace(problem, pinned=pinned.tolist())
        joining = _Joining(problem)
        joining.join_sources()
        for _ in range(_ROUNDS):
            if not (joining.join_producers() | joining.join_consumers()):
                break
        return cls(compile_problem(joining.graph(), problem.topology), joining.piece.tolist())

    def spread(self, devices: list[int]) -> list[int]:
        """Returns the operators' devices, from the pieces'."""
        return [devices[piece] for piece in self.piece]


class _Joining:
    """Pieces while they grow, numbered in a topological order.

    Attributes:
        piece: of each operator.
        seconds: of each piece.
        before: of each piece, those that it needs, with the seconds of the transfers.
        after: of each piece, those that need it.
    """

    def __init__(self, problem: PlacementProblem) -> None:
        self.problem, self.most = problem, sum(problem.mean_seconds) / (_PIECES_PER_DEVICE * problem.devices)
        self.piece = np.arange(problem.count)
        self.bound = [
            -1 if len(problem.members[group]) == 1 and problem.pinned[group] < 0 else group for group in problem.group
        ]
        self.sets = DisjointSets(len(problem.members))
        self.group_pin = list(problem.pinned)
        edges = np.asarray(problem.graph.edges, np.int64).reshape(-1, 4)
        self.edges = np.unique(edges[:, :3], axis=0)
        self.transfer = np.append(problem.mean_transfer, problem.mean_latency)  # the last one is for edges that wait
        self._link()

    def join_sources(self) -> None:
        """Joins pieces without inputs that are cheaper than their transfer to their first consumer.

        It doesn't if their consumers are on several devices anyway.
        """
        root = list(range(len(self.seconds)))
        seconds, needs = list(self.seconds), [len(before) for before in self.before]
        after: dict[int, dict[int, float]] = {}  # of pieces that others have joined
        for op in range(len(root)):
            if needs[op]:
                continue
            behind = after.pop(op, {})
            for other, transfer in self.after[op].items():
                behind[other] = behind.get(other, 0.0) + transfer
            if not 0 < len(behind) <= _MOST_CONSUMERS:
                continue
            first = min(behind)
            if seconds[op] <= behind[first] and not self._apart(behind) and self._may_join(op, first):
                root[op] = first
                seconds[first] += seconds[op]
                needs[first] -= 1
                del behind[first]
                kept = after.setdefault(first, {})
                for other, transfer in behind.items():
                    kept[other] = kept.get(other, 0.0) + transfer
                    # A consumer of both the source and its piece now has one producer.
                    needs[other] -= other in self.after[first]
        self._join(root)

    def join_producers(self) -> bool:
        """Joins pieces to their only producer; returns whether any were joined."""
        return self._join_along(range(len(self.seconds)), self.before, self.after)

    def join_consumers(self) -> bool:
        """Joins pieces to their only consumer; returns whether any were joined."""
        return self._join_along(range(len(self.seconds) - 1, -1, -1), self.after, self.before)

    def _join_along(self, order: range, toward: list[dict[int, float]], away: list[dict[int, float]]) -> bool:
        root = list(range(len(order)))
        seconds = list(self.seconds)
        leaving = [len(others) for others in away]  # edges from a piece to those that haven't joined it
        for op in order:
            roots = {root[other] for other in toward[op]}
            if len(roots) != 1:
                continue
            (piece,) = roots
            chain = leaving[piece] == len(toward[op])  # They have no other link.
            if seconds[op] <= sum(toward[op].values()):
                pays = chain or seconds[op] <= self.most
            else:
                pays = chain and seconds[op] + seconds[piece] <= self.most
            if pays and self._may_join(piece, op):
                root[op] = piece
                seconds[piece] += seconds[op]
                leaving[piece] += leaving[op] - len(toward[op])
        return self._join(root)

    def _join(self, roots: list[int]) -> bool:
        root = np.array(roots, np.int64)
        kept = np.flatnonzero(root == np.arange(len(root)))
        if len(kept) == len(root):
            return False
        number = np.full(len(root), -1, np.int64)
        number[kept] = np.arange(len(kept))
        while (root[root] != root).any():
            root = root[root]
        self.piece = number[root][self.piece]
        self.bound = [self.bound[op] for op in kept.tolist()]
        self._link()
        return True

    def _link(self) -> None:
        """Adds up the pieces' seconds and transfers."""
        count = len(self.bound)
        self.seconds: list[float] = np.bincount(self.piece, self.problem.mean_seconds, count).tolist()
        edges = np.column_stack((self.piece[self.edges[:, :2]], self.edges[:, 2]))
        edges = np.unique(edges[edges[:, 0] != edges[:, 1]], axis=0)
        pairs, which = np.unique(edges[:, 0] * max(count, 1) + edges[:, 1], return_inverse=True)
        transfer = np.bincount(which, self.transfer[edges[:, 2]], len(pairs))
        self.before: list[dict[int, float]] = [{} for _ in range(count)]
        self.after: list[dict[int, float]] = [{} for _ in range(count)]
        for pair, value in zip(pairs.tolist(), transfer.tolist(), strict=True):
            first, second = divmod(pair, count)
            self.after[first][second] = self.before[second][first] = value

    def _apart(self, pieces: Iterable[int]) -> bool:
        pins = {self.group_pin[self.sets.find(self.bound[piece])] for piece in pieces if self.bound[piece] >= 0}
        return len(pins - {-1}) > 1

    def _may_join(self, one: int, other: int) -> bool:
        a, b = self.bound[one], self.bound[other]
        if a >= 0 and b >= 0:
            first, second = self.sets.find(a), self.sets.find(b)
            if first != second:
                pins = {self.group_pin[first], self.group_pin[second]} - {-1}
                if len(pins) > 1:
                    return False
                self.sets.union(first, second)
                self.group_pin[first] = max(pins, default=-1)
        self.bound[one] = self.bound[other] = a if a >= 0 else b
        return True

    def graph(self) -> OpGraph:
        """Returns the graph of the pieces, in a topological order."""
        problem, graph, piece = self.problem, self.problem.graph, self.piece
        count = len(self.bound)
        first = np.full(count, problem.count, np.int64)
        np.minimum.at(first, piece, np.arange(problem.count))
        seconds = np.zeros((count, problem.devices))
        np.add.at(seconds, piece, graph.seconds)
        edges = np.asarray(graph.edges, np.int64).reshape(-1, 4).copy()
        edges[:, :2] = piece[edges[:, :2]]
        edges = np.unique(edges[edges[:, 0] != edges[:, 1]], axis=0)
        names: dict[int, int] = {}
        group = [
            names.setdefault(self.sets.find(bound) if bound >= 0 else -1 - index, len(names))
            for index, bound in enumerate(self.bound)
        ]
        pinned, stored = np.full(len(names), -1, np.int64), np.zeros(len(names))
        for old, new in names.items():
            if old >= 0:
                pinned[new] = self.group_pin[old]
        for old, members in enumerate(problem.members):
            if members:
                stored[group[piece[members[0]]]] += problem.stored[old]
        return OpGraph(
            names=tuple(graph.names[op] for op in first.tolist()),
            ops=tuple(graph.ops[op] for op in first.tolist()),
            seconds=seconds,
            edges=edges,
            tensor_bytes=graph.tensor_bytes,
            groups=np.array(group, np.int64),
            pinned=pinned,
            stored_bytes=stored,
            splits={},
            launch_seconds=graph.launch_seconds,
            copy_seconds=graph.copy_seconds,
        )
