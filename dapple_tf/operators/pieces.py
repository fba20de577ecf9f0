"""Pieces of a step: fewer, larger operators to place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

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
        joining = _Joining(problem, sum(problem.mean_seconds) / (_PIECES_PER_DEVICE * problem.devices))
        joining.join(_sources)
        for _ in range(_ROUNDS):
            if not (joining.join(_forward) | joining.join(_backward)):
                break
        return cls(compile_problem(joining.graph(), problem.topology), joining.piece.tolist())

    def spread(self, devices: list[int]) -> list[int]:
        """Returns the operators' devices, from the pieces'."""
        return [devices[piece] for piece in self.piece]


@dataclasses.dataclass
class _Level:
    """The current pieces, numbered in a topological order.

    Attributes:
        seconds: of each.
        before: of each, the pieces that it needs, with the seconds of the transfers.
        after: of each, the pieces that need it.
        most: the most seconds of a piece that is made of a chain.
        may_join: whether two pieces can be on one device; if so, it binds them to each other.
        apart: whether some of these pieces have to be on different devices.
    """

    seconds: list[float]
    before: list[dict[int, float]]
    after: list[dict[int, float]]
    most: float
    may_join: Callable[[int, int], bool]
    apart: Callable[[Iterable[int]], bool]

    def worth_joining(self, joining: float, other: float, transfer: float, chain: bool) -> bool:
        """Returns whether a piece should join another, by their seconds; in a ``chain`` they have no other link."""
        if joining <= transfer:
            return chain or joining <= self.most
        return chain and joining + other <= self.most


def _sources(level: _Level) -> list[int]:
    """Joins pieces without inputs that are cheaper than their transfer to their first consumer; names the last one.

    It doesn't if their consumers are on several devices anyway.
    """
    root = list(range(len(level.seconds)))
    seconds, needs = list(level.seconds), [len(before) for before in level.before]
    after: dict[int, dict[int, float]] = {}  # of pieces that others have joined
    for op in range(len(root)):
        if needs[op]:
            continue
        behind = after.pop(op, {})
        for other, transfer in level.after[op].items():
            behind[other] = behind.get(other, 0.0) + transfer
        if not 0 < len(behind) <= _MOST_CONSUMERS:
            continue
        first = min(behind)
        joins = seconds[op] <= behind[first] and not level.apart(behind) and level.may_join(op, first)
        if joins:
            root[op] = first
            seconds[first] += seconds[op]
            kept = after.setdefault(first, {})
        for other, transfer in behind.items():
            if other != first and joins:
                kept[other] = kept.get(other, 0.0) + transfer
        if joins:
            needs[first] -= 1
            # Consumers of both the source and its piece now have one producer.
            for other in behind:
                if other != first and other in level.after[first]:
                    needs[other] -= 1
    return root


def _forward(level: _Level) -> list[int]:
    """Joins pieces to their only producer; names the first one."""
    return _along(level, range(len(level.seconds)), level.before, level.after)


def _backward(level: _Level) -> list[int]:
    """Joins pieces to their only consumer; names the last one."""
    return _along(level, range(len(level.seconds) - 1, -1, -1), level.after, level.before)


def _along(level: _Level, order: range, toward: list[dict[int, float]], away: list[dict[int, float]]) -> list[int]:
    root = list(range(len(order)))
    seconds = list(level.seconds)
    leaving = [len(others) for others in away]  # edges from a piece to those that haven't joined it
    for op in order:
        if not toward[op]:
            continue
        roots = {root[other] for other in toward[op]}
        if len(roots) > 1:
            continue
        (piece,) = roots
        chain = leaving[piece] == len(toward[op])
        if level.worth_joining(seconds[op], seconds[piece], sum(toward[op].values()), chain) and level.may_join(
            piece, op
        ):
            root[op] = piece
            seconds[piece] += seconds[op]
            leaving[piece] += leaving[op] - len(toward[op])
    return root


class _Joining:
    """Pieces while they grow."""

    def __init__(self, problem: PlacementProblem, most: float) -> None:
        self.problem, self.most = problem, most
        self.piece = np.arange(problem.count)
        self.bound = [
            -1 if len(problem.members[group]) == 1 and problem.pinned[group] < 0 else group for group in problem.group
        ]
        self.sets = DisjointSets(len(problem.members))
        self.group_pin = list(problem.pinned)
        edges = np.asarray(problem.graph.edges, np.int64).reshape(-1, 4)
        self.edges = np.unique(edges[:, :3], axis=0)
        self.transfer = np.append(problem.mean_transfer, problem.mean_latency)  # the last one is for edges that wait

    def join(self, rule: Callable[[_Level], list[int]]) -> bool:
        """Joins pieces by a rule; returns whether any were joined."""
        level = self._level()
        root = np.array(rule(level), np.int64)
        kept = np.flatnonzero(root == np.arange(len(root)))
        if len(kept) == len(root):
            return False
        number = np.full(len(root), -1, np.int64)
        number[kept] = np.arange(len(kept))
        while (root[root] != root).any():
            root = root[root]
        self.piece = number[root][self.piece]
        self.bound = [self.bound[op] for op in kept.tolist()]
        return True

    def _level(self) -> _Level:
        count = int(self.piece.max(initial=-1)) + 1
        seconds = np.bincount(self.piece, self.problem.mean_seconds, count)
        edges = np.column_stack((self.piece[self.edges[:, :2]], self.edges[:, 2]))
        edges = np.unique(edges[edges[:, 0] != edges[:, 1]], axis=0)
        pairs, which = np.unique(edges[:, 0] * max(count, 1) + edges[:, 1], return_inverse=True)
        transfer = np.bincount(which, self.transfer[edges[:, 2]], len(pairs))
        before: list[dict[int, float]] = [{} for _ in range(count)]
        after: list[dict[int, float]] = [{} for _ in range(count)]
        for pair, value in zip(pairs.tolist(), transfer.tolist(), strict=True):
            first, second = divmod(pair, count)
            after[first][second] = before[second][first] = value
        return _Level(seconds.tolist(), before, after, self.most, self._may_join, self._apart)

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
