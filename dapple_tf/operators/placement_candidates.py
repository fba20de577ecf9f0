"""Placements during the search, each with its simulated makespan and peaks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import numpy as np

from dapple_tf.operators.op_graph import (
    DisjointSets,
    OpGraph,
    OpPlacement,
    PlacementProblem,
    Topology,
    compile_problem,
    tails,
)
from dapple_tf.operators.simulated_placement import Sent, order_by_urgency, peak_bytes, run_in_order, simulate
from graph_passes.analysis.split_rules import Split


@dataclasses.dataclass(frozen=True, eq=False)
class Variant:
    """A graph with some operators split.

    Attributes:
        problem: its operators.
        splits: what was split.
    """

    problem: PlacementProblem
    splits: Mapping[str, Split]


class Candidate(NamedTuple):
    """A placement.

    Attributes:
        variant: its graph.
        devices: of each operator.
        order: Q.
        seconds: the simulated makespan.
        over: total bytes by which the devices' peaks exceed their limits.
        origin: how it was found.
    """

    variant: Variant
    devices: list[int]
    order: list[int]
    seconds: float
    over: float
    origin: str

    @property
    def rank(self) -> tuple[float, float]:
        """The lower, the better: a placement that doesn't fit is worse than any that does."""
        return (self.over, self.seconds)


def judged(variant: Variant, devices: list[int], order: list[int], origin: str) -> Candidate:
    """Simulates given devices and queue."""
    return _candidate(variant, devices, order, *run_in_order(variant.problem, devices, order), origin)


def _candidate(
    variant: Variant,
    devices: list[int],
    order: list[int],
    start: list[float],
    finish: list[float],
    sent: Sent,
    origin: str,
) -> Candidate:
    over, limits = 0.0, variant.problem.topology.memory_bytes
    if np.isfinite(limits).any():
        place = np.array(devices, np.int64)
        peaks = peak_bytes(variant.problem, place, np.array(start), np.array(finish), sent)
        over = float(np.maximum(peaks - limits, 0.0).sum())
    return Candidate(variant, devices, order, max(finish, default=0.0), over, origin)


def scheduled(variant: Variant, devices: list[int], origin: str) -> Candidate:
    """Finds the queue for given devices by urgency: the path from an operator's start to the end of the step."""
    return _queued(variant, devices, _urgency(variant.problem, devices), None, origin)


def _urgency(problem: PlacementProblem, devices: list[int]) -> list[float]:
    tail = tails(problem, devices)
    return [tail[op] + problem.seconds[op][devices[op]] for op in range(problem.count)]


def _queued(
    variant: Variant, devices: list[int], urgency: list[float], release: Mapping[int, float] | None, origin: str
) -> Candidate:
    order, start, finish, sent = order_by_urgency(variant.problem, devices, urgency, release)
    if release:  # Devices wait for nothing when the queue is run.
        return judged(variant, devices, order, origin)
    return _candidate(variant, devices, order, start, finish, sent, origin)


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
    problem, devices = candidate.variant.problem, candidate.devices
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
        candidates.append(_queued(candidate.variant, devices, urgency, release, candidate.origin))
    return min(candidates, key=lambda one: one.rank)


def _early(problem: PlacementProblem) -> list[bool]:
    """Returns which operators need only variables, and take less time than sending their outputs."""
    early = [False] * problem.count
    for op in range(problem.count):
        light = problem.mean_seconds[op] <= sum(problem.mean_transfer[tensor] for tensor in problem.outputs[op])
        early[op] = (light or not problem.inputs[op]) and not problem.waits[op]
        early[op] = early[op] and all(early[problem.producer[tensor]] for tensor in problem.inputs[op])
    return early


def variant_of(graph: OpGraph, topology: Topology, splits: Mapping[str, Split]) -> Variant:
    """Returns a graph as a variant."""
    return Variant(compile_problem(graph, topology), splits)


def placed_by(candidate: Candidate) -> OpPlacement:
    """Returns a candidate, simulated, as a placement of the graph without splits.

    Its peak may be above a device's limit.
    """
    problem, devices = candidate.variant.problem, candidate.devices
    seen, names = simulate(problem, devices, candidate.order), problem.graph.names
    return OpPlacement(
        devices=dict(zip(names, devices, strict=True)),
        order=tuple(names[op] for op in candidate.order),
        splits=dict(candidate.variant.splits),
        seconds=seen.seconds,
        peak_bytes=tuple(seen.peak_bytes.tolist()),
    )


# ---- pieces: fewer, larger operators to place


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
